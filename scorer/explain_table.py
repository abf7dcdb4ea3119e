"""What `explain` found, for people: a table that fits into 80 columns whatever its numbers, and a few sentences."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from attention.timing import MEASURED_PREFIX, MEASURED_TOKENS, TimeModel
from scorer.times import heads_of

COLUMNS = 80
_SCALES = (("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15), ("E", 1e18))


def show(told: dict[str, Any], model: TimeModel, advice: str, file: TextIO | None = None) -> None:
    """Prints it. Numbers are never cut: a narrow terminal wraps the lines. advice: what is told of the article."""
    from rich.table import Table
    from rich.text import Text

    from scorer.console import plain_console

    title = Text(f"one layer, {heads_of(model.heads)}, on {model.machine.name}")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("strategy", "CTAs", "KV keys", "GFLOP", "MB", "launches", "ms"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=True)
    for name, c in told["strategies"].items():
        milliseconds = "-" if c["predicted_ms"] is None else short(c["predicted_ms"], 4)
        counts = (
            short(c["ctas"]),
            short(c["kv_tokens_scanned"]),
            short(c["flops"] / 1e9, 3),
            short(c["bytes"] / 1e6, 3),
        )
        table.add_row(name, *counts, short(c["launches"]), milliseconds)
    console = plain_console(file=file or sys.stdout)
    console.width = max(COLUMNS, console.width)
    console.print(table)
    for line in _sentences(told, model, advice):
        console.print(line, soft_wrap=True)


def _sentences(told: dict[str, Any], model: TimeModel, advice: str) -> list[str]:
    refused = [f"no time: {c['refused']}" for c in told["strategies"].values() if "refused" in c]
    times = whose(model)
    if told["beyond_measured"]:
        times += (
            f"; measured up to {MEASURED_PREFIX:,} tokens of prefix and {MEASURED_TOKENS:,} in all: more takes longer"
        )
    return [*refused, f"choice: {told['choice']} ({told['reason']})", advice, times]


def whose(model: TimeModel) -> str:
    """A sentence: which machine the times are of."""
    return f"times: predicted, of one layer on {model.machine.name}, whatever this machine is"


def short(number: float, decimals: int = 0) -> str:
    """At most seven characters up to 1e99, such as 1234567, 12.345 or, of four digits, 1.235G."""
    for digits in range(decimals, -1, -1):
        if len(told := f"{number:.{digits}f}") <= 7:
            return told
    scaled = (f"{number / scale:.4g}{suffix}" for suffix, scale in _SCALES if number / scale < 999.95)
    return next(scaled, f"{number:.1e}")
