"""The report of `prefixrank bench decode`: Markdown from the rows, the fitted rule and its regret."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from attention.decode import DecodeStrategy
from attention.decode_timing import BUILT_IN, DecodeLaw, DecodePoint, crossover
from loadtest.decode_rows import (
    BATCHES,
    OUR_BATCH,
    OUR_CASCADE,
    VARIANTS,
    AnyRow,
    AttentionRow,
    SearchRow,
    StepRow,
    attention_floor,
)

LAYERS = {"0.6B": (28, (16, 8)), "4B": (36, (32, 8)), "8B": (36, (32, 8))}
Times = dict[DecodePoint, dict[str, float]]


def report(rows: Sequence[AnyRow], output: Path) -> None:
    """Writes decode.md into `output`, and the fitted rule beside it."""
    lines = ["# Decode steps and beam searches", ""]
    attention = [row for row in rows if isinstance(row, AttentionRow)]
    if attention:
        lines += _attention(attention, output)
    lines += _steps([row for row in rows if isinstance(row, StepRow)])
    lines += _searches([row for row in rows if isinstance(row, SearchRow)])
    (output / "decode.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _attention(rows: Sequence[AttentionRow], output: Path) -> list[str]:
    times: Times = {}
    for row in rows:
        if row.milliseconds is not None:
            times.setdefault(DecodePoint(row.prompt, row.beams, row.own), {})[row.variant] = row.milliseconds
    told = sorted({f"* `{row.variant}` was not run: {row.told}" for row in rows if row.told})
    head = "| P | N | S | floor | " + " | ".join(VARIANTS) + " | fastest batch / our cascade |"
    lines = ["## Attention of one layer, milliseconds", "", *told, "", head, "|---" * (5 + len(VARIANTS)) + "|"]
    lines += [_attention_line(point, found) for point, found in sorted(times.items())]
    return [*lines, "", *_rule(times, output)]


def _attention_line(point: DecodePoint, found: dict[str, float]) -> str:
    cells = [f"{found[v]:.4f}" if v in found else "-" for v in VARIANTS]
    batch = [found[v] for v in BATCHES if v in found]
    ratio = f"{min(batch) / found[OUR_CASCADE]:.2f}" if batch and OUR_CASCADE in found else "-"
    floor = 1e3 * attention_floor(*point)
    return f"| {point.prompt} | {point.beams} | {point.own} | {floor:.4f} | " + " | ".join(cells) + f" | {ratio} |"


def _rule(times: Times, output: Path) -> list[str]:
    """The law fitted to these rows, what it costs not to know better, and from where on the cascade is faster."""
    ours = {DecodeStrategy.CASCADE_DECODE: OUR_CASCADE, DecodeStrategy.BATCH_DECODE: OUR_BATCH}
    both = {point: found for point, found in times.items() if all(name in found for name in ours.values())}
    measured = [(s, point, found[name]) for point, found in both.items() for s, name in ours.items()]
    try:
        law = DecodeLaw.fit(measured)
    except ValueError as error:
        return [f"No rule: {error}.", ""]
    (output / "decode-law.txt").write_text(f"{law.as_lists()}\n", encoding="utf-8")
    lines = ["## The rule between our kernels", ""]
    for name, rule in (("fitted to these rows", law), ("built in", BUILT_IN)):
        regret = _behind(both, rule, tuple(ours.values()))
        told = f"regret {np.mean(regret):.2%} in the mean, {np.max(regret):.2%} at most"
        lines.append(f"* {name}: {told}, over {len(regret)} points")
    worst = max(_behind(both, law, BATCHES))
    lines.append(f"* `auto` is behind the fastest batch_decode of any kernel by at most {worst:.1%}")
    known = {point.prompt for point in both}
    prompts = sorted(known | set(range(min(known), 4096, 64)))
    for beams in sorted({point.beams for point in both}):
        told = f"from P {crossover(law, beams, 16, prompts)} (fitted), {_measured(both, beams)} (measured)"
        lines.append(f"* N {beams}, S 16: cascade_decode is faster {told}")
    return [*lines, ""]


def _behind(times: Times, rule: DecodeLaw, others: Sequence[str]) -> list[float]:
    """By what part the rule's choice takes longer than the fastest of these, at each point."""
    ours = {DecodeStrategy.CASCADE_DECODE: OUR_CASCADE, DecodeStrategy.BATCH_DECODE: OUR_BATCH}
    return [
        found[ours[rule.choose(point)]] / min(found[name] for name in others if name in found) - 1
        for point, found in times.items()
    ]


def _measured(times: Times, beams: int) -> str:
    """From which prompt on the cascade was faster at every longer one that was measured."""
    found = sorted((point, of) for point, of in times.items() if point.beams == beams and point.own == 16)
    faster = [of[OUR_CASCADE] <= of[OUR_BATCH] for _, of in found]
    begin = next((i for i in range(len(found)) if all(faster[i:])), None)
    return "none" if begin is None else str(found[begin][0].prompt)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    yield from ("| " + " | ".join(line) + " |" for line in lines)


def _steps(rows: Sequence[StepRow]) -> list[str]:
    if not rows:
        return []
    by_key = {row.key: row for row in rows}
    lines = []
    for row in sorted(rows, key=lambda row: row.key):
        base = by_key.get((row.size, 1024, row.beams, row.own))
        layers, heads = LAYERS[row.size]
        added = attention_floor(row.prompt, row.beams, row.own, layers, heads) - attention_floor(
            1024, row.beams, row.own, layers, heads
        )
        more = "" if base is None or base is row else f"{(row.milliseconds - base.milliseconds) / (1e3 * added):.2f}"
        lines.append([row.size, str(row.prompt), str(row.beams), str(row.own), f"{row.milliseconds:.3f}", more])
    head = ["size", "P", "N", "S", "ms", "added over P 1,024, times the floor of the attention added"]
    return ["## A whole step", "", *_table(head, lines), ""]


def _searches(rows: Sequence[SearchRow]) -> list[str]:
    if not rows:
        return []
    lines = []
    for row in sorted(rows, key=lambda row: row.key):
        times = f"{row.milliseconds:.2f}", f"{row.fastest:.2f}"
        lengths = str(row.prompt), str(row.beams), str(row.new)
        lines.append([row.size, *lengths, "cached" if row.cached else "new", *times])
    head = ["size", "P", "beams", "new tokens", "prompt", "ms, median", "ms, fastest"]
    return ["## Whole searches", "", *_table(head, lines), ""]
