"""`prefixrank bench cache`: what the prefix cache saves, and what it costs where nothing is found in it. In process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import cycle
from pathlib import Path

import numpy as np

from batching.batcher import Batcher, BatcherLimits, Scheduling
from batching.items import Item, Items
from batching.page_pool import PagePool
from batching.prefix_cache import PrefixCache
from batching.types import Ints, RequestScores, TokenizedRequest
from loadtest.shapes import Shape
from scorer.config import Config
from scorer.runtime import Runtime
from scorer.sizing import MAX_PASS_ITEMS

Asked = Iterator[Sequence[TokenizedRequest]]  # what is sent at once, time after time

WARM = 4  # prefixes of those that hit
AT_ONCE = 32
TURNS = 5  # with the cache, without, with, ...
ALONE = 30  # calls one at a time


@dataclass(frozen=True, slots=True)
class Row:
    """One run. p50_ms, p99_ms: of a call, of both calls in pairs; cached: prefix tokens that were found, a call."""

    model: str
    what: str
    shape: Shape
    prefixes: str
    at_once: int
    calls: int
    p50_ms: float
    p99_ms: float
    items_per_s: float
    cached: float


class Requests:
    """Seeded random requests of one shape, made as they are asked for, no two with equal documents."""

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        self._shape = shape
        self._vocabulary = vocabulary
        self._rng = np.random.default_rng(0)

    def _ids(self, *shape: int) -> Ints:
        return self._rng.integers(0, self._vocabulary, shape, np.int32)

    def _behind(self, prefix: Ints) -> TokenizedRequest:
        _, length, items = self._shape
        last, labels = np.array([length - 1], np.int32), np.array([[1, 2]], np.int32)
        return TokenizedRequest(prefix, Items.of(Item(ids, last, labels) for ids in self._ids(items, length)))

    def new(self) -> Asked:
        """Prefixes that never were before."""
        while True:
            yield [self._behind(self._ids(self._shape[0]))]

    def known(self) -> Asked:
        """Prefixes that come again and again."""
        prefixes = [self._ids(self._shape[0]) for _ in range(WARM)]
        for prefix in cycle(prefixes):
            yield [self._behind(prefix)]

    def pairs(self, shared: bool) -> Asked:
        """Two at once, over one new prefix or over two."""
        while True:
            prefix = self._ids(self._shape[0])
            yield [self._behind(prefix), self._behind(prefix if shared else self._ids(self._shape[0]))]


def run(config: Config, name: str, shape: Shape, seconds: float, output: Path | None) -> None:
    """Measures, prints, and appends JSON lines to `output`."""
    runtime = Runtime.load(config)
    try:
        rows = asyncio.run(_measure(runtime, name, shape, seconds))
    finally:
        runtime.close()
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        stamp = {"date": date.today().isoformat(), "device": runtime.info.device, "dtype": runtime.info.dtype}
        with output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(row) | stamp) + "\n" for row in rows)


def _without_cache(runtime: Runtime) -> Batcher:
    """On the same device, with no page to keep a prefix in."""
    limits = BatcherLimits(runtime.limits.max_pass_tokens, MAX_PASS_ITEMS, runtime.config.max_queue_tokens)
    cache = PrefixCache(PagePool(0), runtime.config.page_size)
    scheduling = Scheduling(passes_in_flight=runtime.batcher.passes_in_flight)
    return Batcher(runtime.engine.execute, limits, runtime.batcher.policy, cache, scheduling=scheduling)


async def _measure(runtime: Runtime, name: str, shape: Shape, seconds: float) -> list[Row]:
    requests = Requests(shape, min(runtime.limits.vocabulary_size, 1_000))
    new, known = requests.new(), requests.known()
    cache, none = runtime.batcher, _without_cache(runtime)
    rows: list[Row] = []

    async def measured(batcher: Batcher, what: str, prefixes: str, asked: Asked, at_once: int) -> None:
        await _loop(batcher, asked, 1, 0.0, WARM)
        rows.append(await _row(batcher, name, what, shape, prefixes, asked, at_once, seconds))
        print(_line(rows[-1]), flush=True)

    for batcher in (cache, none):
        await _loop(batcher, new, AT_ONCE, seconds / 2)  # whatever is slow the first time
    for at_once in (1, AT_ONCE):
        await measured(cache, "calls", "new", new, at_once)
        await measured(cache, "calls", "cached", known, at_once)
    for prefixes in ("apart", "shared"):
        await measured(cache, "two in a pass", prefixes, requests.pairs(prefixes == "shared"), 1)
    for _ in range(TURNS):
        await measured(none, "no cache", "new", new, AT_ONCE)
        await measured(cache, "cache that misses", "new", new, AT_ONCE)
    print(_cost(rows), flush=True)
    for batcher in (cache, none):
        await batcher.drain()
    return rows


async def _row(
    batcher: Batcher, name: str, what: str, shape: Shape, prefixes: str,
    asked: Asked, at_once: int, seconds: float,
) -> Row:  # fmt: skip
    times, answers, spent = await _loop(batcher, asked, at_once, seconds, ALONE if at_once == 1 else 0)
    calls = len(answers)
    return Row(
        model=name,
        what=what,
        shape=shape,
        prefixes=prefixes,
        at_once=at_once,
        calls=calls,
        p50_ms=1e3 * float(np.median(times)),
        p99_ms=1e3 * float(np.percentile(times, 99)),
        items_per_s=calls * shape[2] / spent,
        cached=sum(answer.cached_prefix_tokens for answer in answers) / calls,
    )


async def _loop(
    batcher: Batcher, asked: Asked, at_once: int, seconds: float, least: int = 0
) -> tuple[list[float], list[RequestScores], float]:
    """So many at once, each followed by the next, for so long and at least so many: (seconds of each, answers,
    seconds of it all)."""
    times: list[float] = []
    answers: list[RequestScores] = []
    started = time.perf_counter()

    async def one() -> None:
        while time.perf_counter() - started < seconds or len(times) < least:
            chosen = next(asked)
            sent = time.perf_counter()
            answers.extend(await asyncio.gather(*(batcher.submit(request) for request in chosen)))
            times.append(time.perf_counter() - sent)

    await asyncio.gather(*(one() for _ in range(at_once)))
    return times, answers, time.perf_counter() - started


def _cost(rows: Sequence[Row]) -> str:
    """Medians of the turns beside each other."""
    rates = {what: [row.items_per_s for row in rows if row.what == what] for what in ("no cache", "cache that misses")}
    none, missing = (float(np.median(found)) for found in rates.values())
    spread = max(max(found) / min(found) for found in rates.values()) - 1
    return (
        f"a cache that never hits costs {1 - missing / none:.1%} of {none:.0f} items/s (turns differ by {spread:.1%})"
    )


def _line(row: Row) -> str:
    return (
        f"{row.model:>8} P{row.shape[0]:<5} S{row.shape[1]:<4} M{row.shape[2]:<4} {row.what:<17} {row.prefixes:<6} "
        f"{row.at_once:>2} at once: p50 {row.p50_ms:8.2f}, p99 {row.p99_ms:8.2f} ms, {row.items_per_s:8.0f} items/s, "
        f"{row.cached:.0f} of {row.shape[0]} prefix tokens cached"
    )
