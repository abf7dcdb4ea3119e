"""`prefixrank bench cpu`: documents/s of each strategy on token ids, beside transformers one document at a time."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import numpy as np
import torch
from rich.progress import track
from rich.table import Table

from attention.plans import Strategy
from batching.items import Item, Items
from batching.types import Ints, TokenizedRequest
from scorer.config import Config
from scorer.console import plain_console
from scorer.runtime import Runtime
from scorer.selfcheck import alone, packed

SEED = 0
# (prefix tokens, tokens of a document, documents)
SHAPES = ((512, 64, 32), (128, 16, 64), (128, 200, 16))
ALONE_DOCUMENTS = 4  # one document at a time is slow and steady: a few are enough
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One shape: documents/s, medians over the repeats, and how far packed is from alone."""

    shape: tuple[int, int, int]
    packed: dict[Strategy, float]
    alone: float
    deviation: float


def run(config: Config) -> int:
    """Prints the table and the machine that it was measured on."""
    console = plain_console()
    runtime = Runtime.load(config)
    try:
        progress = plain_console(stderr=True)
        rows = [
            _measure(runtime, s) for s in track(SHAPES, "measuring", console=progress, disable=not progress.is_terminal)
        ]
    finally:
        runtime.close()
    console.print(_table(rows))
    console.print(_machine(runtime))
    return 0


def request(vocabulary: int, prefix: int, length: int, documents: int, labels: Ints) -> TokenizedRequest:
    """Seeded random token ids: time does not depend on what they say."""
    rng = np.random.default_rng(SEED)

    def ids(n: int) -> Ints:
        return rng.integers(0, vocabulary, n).astype(np.int32)

    items = (Item(ids(length), np.array([length - 1], np.int32), labels) for _ in range(documents))
    return TokenizedRequest(ids(prefix), Items.of(items))


def _measure(runtime: Runtime, shape: tuple[int, int, int]) -> Row:
    prefix, length, documents = shape
    asked = request(runtime.limits.vocabulary_size, prefix, length, documents, np.array([[1, 2]], np.int32))
    rates, scores = {}, {}
    for strategy in (Strategy.MULTI_ITEM, Strategy.DIRECT_RAGGED):
        scores[strategy] = packed(runtime.engine, asked, strategy)  # also warms up
        rates[strategy] = documents / _seconds(partial(packed, runtime.engine, asked, strategy))
    few = asked.items[:ALONE_DOCUMENTS]
    expected = [alone(runtime.engine.model, asked, item) for item in few]
    rate = len(few) / _seconds(lambda: [alone(runtime.engine.model, asked, item) for item in few])
    worst = max(
        float(np.abs(got.logits - want.logits).max())
        for found in scores.values()
        for got, want in zip(found, expected, strict=False)
    )
    return Row(shape, rates, rate, worst)


def _seconds(call: Callable[[], object]) -> float:
    """Median of the repeats."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"documents/s, median of {REPEATS}")
    for heading in (
        "prefix",
        "tokens",
        "documents",
        "multi_item",
        "direct_ragged",
        "one at a time",
        "gain",
        "|difference|",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        best = max(row.packed.values())
        rates = [f"{row.packed[s]:.2f}" for s in (Strategy.MULTI_ITEM, Strategy.DIRECT_RAGGED)]
        gain = f"{best / row.alone:.1f} x"
        table.add_row(*map(str, row.shape), *rates, f"{row.alone:.2f}", gain, f"{row.deviation:.1e}")
    return table


def _machine(runtime: Runtime) -> str:
    info = runtime.info
    return (
        f"{info.model} {info.dtype} on {info.device}, {torch.get_num_threads()} threads, {_processor()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {version('transformers')}"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
