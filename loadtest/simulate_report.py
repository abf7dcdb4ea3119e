"""The simulation's results as tables and plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.sim_mixed import Mixed
from loadtest.sim_result import Result


def report(
    policies: Mapping[str, Result],
    overload: Mapping[float, Result],
    flood: Result,
    reuse: Mapping[float, Result],
    beams: Mapping[tuple[float, str], Mixed],
) -> str:
    """Markdown tables."""
    return "\n".join([*_policies(policies), *_overload(overload), *_flood(flood), *_reuse(reuse), *_beams(beams)])


def _policies(results: Mapping[str, Result]) -> list[str]:
    """Milliseconds of the two classes."""
    lines = [
        "Half short, half long calls at 80 % load, no deadlines; milliseconds from arrival to answer:",
        "",
        "| policy | short p50 | short p99 | long p50 | long p99 | documents/s | device busy |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        times = [1e3 * result.latency(kind, q) for kind in ("short", "bulk") for q in (0.5, 0.99)]
        documents = sum(len(outcome.call.documents) for outcome in result.outcomes) / result.seconds
        lines.append(
            f"| {name} | {' | '.join(f'{ms:.0f}' for ms in times)} | {documents:.0f} | "
            f"{result.busy / result.seconds:.0%} |"
        )
    return lines


def _overload(results: Mapping[float, Result]) -> list[str]:
    lines = [
        "",
        "The same calls with deadlines of 100 and 500 ms:",
        "",
        "| load | in time, of the accepted | documents/s in time | short refused | long refused | refusal p99, ms |",
        "|---|---|---|---|---|---|",
    ]
    for load, result in results.items():
        refused = [sum(bool(o.refused) for o in result.of(name)) / len(result.of(name)) for name in ("short", "bulk")]
        lines.append(
            f"| {load:g} x | {result.met:.2%} | {result.goodput:.0f} | {refused[0]:.0%} | {refused[1]:.0%} | "
            f"{1e3 * result.refusal_p99:.1f} |"
        )
    return lines


def _flood(result: Result) -> list[str]:
    quiet, loud = (result.tokens_of(tenant) / result.seconds for tenant in ("quiet", "loud"))
    asked = sum(o.call.tokens for o in result.outcomes if o.call.profile.tenant == "quiet") / result.seconds
    return [
        "",
        "Two tenants of equal weight, one asking for three times the device, the other for a third of it:",
        f"the quiet one gets {quiet:.0f} of the {asked:.0f} tokens/s that it asks for, the loud one {loud:.0f}.",
    ]


def _reuse(results: Mapping[float, Result]) -> list[str]:
    lines = [
        "",
        "Zipf(1.0) over 200 prefixes of 512 tokens, 500-1000 documents of 16:",
        "",
        "| pool, of the distinct prefixes | prefix tokens cached | device busy | p99, ms |",
        "|---|---|---|---|",
    ]
    for part, result in results.items():
        lines.append(
            f"| {part:.0%} | {result.hit_ratio:.0%} | {result.busy / result.seconds:.0%} | "
            f"{1e3 * result.latency('titles', 0.99):.0f} |"
        )
    return lines


def _beams(results: Mapping[tuple[float, str], Mixed]) -> list[str]:
    lines = [
        "",
        "Short and long calls at 60 % load without deadlines, and searches of 128 beams and 16 tokens over prompts of",
        "1,024 beside them. p99 in milliseconds, and how many times that of scoring alone:",
        "",
        "| searches, of the device | their steps run | short p99 | long p99 | search p50 | search p99 |",
        "|---|---|---|---|---|---|",
    ]
    alone = next(mixed.scoring for (part, _), mixed in results.items() if not part)
    for (part, way), mixed in results.items():
        cells = [f"{1e3 * ms:.0f} ({ms / alone.latency(kind, 0.99):.2f} x)" for kind, ms in mixed.p99.items()]
        searches = [f"{1e3 * mixed.latency(q):.0f}" if mixed.searches else "-" for q in (0.5, 0.99)]
        lines.append(f"| {part:.0%} | {way} | {' | '.join([*cells, *searches])} |")
    return lines


def plot(path: Path, policies: Mapping[str, Result], overload: Mapping[float, Result]) -> None:
    """Draws how long the short calls took under each policy, and what is done in time under each load."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.5))
    for name, result in policies.items():
        _curve(axes[0], name, result)
    axes[0].set(xlabel="milliseconds from arrival to answer", ylabel="part of the short calls", xscale="log")
    axes[0].legend()
    loads = list(overload)
    axes[1].plot(loads, [overload[load].goodput for load in loads], marker="o")
    axes[1].set(xlabel="load", ylabel="documents/s in time", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curve(axes: Any, name: str, result: Result) -> None:
    times = sorted(1e3 * (o.end - o.call.at) for o in result.of("short") if o.end is not None)
    axes.plot(times, [(i + 1) / len(times) for i in range(len(times))], label=name)
