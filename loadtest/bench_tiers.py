"""`prefixrank bench tiers`: is a prefix sooner fetched or computed again, and what does the service choose?"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from batching.batcher import Batcher
from batching.holding import PROBE
from batching.tiering import Found, Rates, ReadAhead, Tiers
from batching.types import Ints, TokenizedRequest
from scorer.config import Config
from scorer.runtime import Runtime

PATIENT = 3600.0  # a fetch that is to be measured is not given up
TWICE = 2  # wanted so often, a prefix is copied down
ARMS = ("computed", "fetched", "chosen")
BAR = 0.10
NORMAL = 1.86  # standard error of a median, by the median of absolute deviations over sqrt(n)


@dataclass(frozen=True, slots=True)
class Row:
    """One tier and length. Times are medians of a whole request with one token behind the prefix, in ms.

    size       bytes of the prefix in the tier
    copied_ms  of fetched_ms until the prefix was in the pages
    turns      measurements of each of computed, fetched and chosen
    fetches    of the turns in which the service chose to fetch
    behind     what requests took longer where the service chose than by the better way, 0.1 for a tenth: the median
               over turns, each against the better way in the same turn, as machines are not equally fast all the time
    noise      standard error of `behind`
    """

    model: str
    tier: str
    prefix: int
    size: int
    computed_ms: float
    fetched_ms: float
    copied_ms: float
    chosen_ms: float
    turns: int
    fetches: int
    behind: float
    noise: float


@dataclass(slots=True)
class Taken:
    """Seconds of one prefix, turn by turn."""

    computed: list[float] = field(default_factory=list)
    fetched: list[float] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    copied: list[float] = field(default_factory=list)
    fetches: int = 0

    def row(self, model: str, tier: str, prefix: int, size: int) -> Row:
        computed, fetched, copied, chosen = (
            1e3 * median(told) for told in (self.computed, self.fetched, self.copied, self.chosen)
        )
        better = self.computed if computed < fetched else self.fetched
        behind = np.array(self.chosen) / np.array(better) - 1
        middle = float(np.median(behind))
        noise = NORMAL * float(np.median(np.abs(behind - middle))) / math.sqrt(len(behind))
        turns = len(behind)
        return Row(model, tier, prefix, size, computed, fetched, copied, chosen, turns, self.fetches, middle, noise)


@dataclass(slots=True)
class Only:
    """One of several tiers, perhaps as if it were slower: `rate` bytes/s at most."""

    tiers: Tiers
    name: str
    rate: float = math.inf

    @property
    def names(self) -> Sequence[str]:
        return [self.name]

    def found(self, keys: Sequence[bytes]) -> Sequence[Found]:
        return [found for found in self.tiers.found(keys) if found.tier == self.name]

    async def read(self, found: Found, keys: Sequence[bytes]) -> Sequence[Any]:
        began = time.perf_counter()
        contents = await self.tiers.read(found, keys)
        await asyncio.sleep(max(0.0, found.size / self.rate - (time.perf_counter() - began)))
        return contents

    def fill(self, pages: Ints, contents: Sequence[Any]) -> Awaitable[float]:
        return self.tiers.fill(pages, contents)

    def store(self, keys: Sequence[bytes], pages: Ints) -> Awaitable[None]:
        return self.tiers.store(keys, pages)

    def close(self) -> None:
        return


class Steered(Rates):
    """Learns as the service does; while it is told to fetch, everything seems to come at once."""

    fetch = False

    def seconds(self, tier: str, size: int) -> float:
        if not self.fetch:
            return super().seconds(tier, size)
        return 0.0 if size else PATIENT


@dataclass(slots=True)
class Grid:
    """The measurements of one tier."""

    runtime: Runtime
    ahead: ReadAhead
    rates: Steered
    requests: dict[int, TokenizedRequest]
    taken: dict[int, Taken] = field(default_factory=dict)

    @property
    def batcher(self) -> Batcher:
        return self.runtime.batcher

    async def fill(self) -> None:
        """Every prefix into the tiers."""
        assert self.runtime.tiers is not None, "the command asked for a tier"
        for request in self.requests.values():
            for _ in range(TWICE):
                await self.batcher.submit(request)
            await self.ahead.settle()
            await asyncio.to_thread(self.runtime.tiers.flush)

    async def turn(self, number: int) -> None:
        """Each prefix in each way, one right after the other; who is first changes."""
        first = number % len(ARMS)
        for tokens in self.requests:
            for arm in ARMS[first:] + ARMS[:first]:
                await self._measure(tokens, arm)

    async def _measure(self, tokens: int, arm: str) -> None:
        """One request, from nothing in the pages."""
        self.batcher.ahead = None if arm == "computed" else self.ahead
        self.rates.fetch = arm == "fetched"
        self.batcher.cache.clear()
        request, taken = self.requests[tokens], self.taken.setdefault(tokens, Taken())
        declined, began = self.ahead.counts.chosen["recompute"], time.perf_counter()
        if arm == "fetched" and (task := self.ahead.bring(self.batcher.chain(request))) is not None:
            await task
            taken.copied.append(time.perf_counter() - began)
        await self.batcher.submit(request)
        getattr(taken, arm).append(time.perf_counter() - began)
        taken.fetches += arm == "chosen" and self.ahead.counts.chosen["recompute"] == declined
        await self.ahead.settle()

    def row(self, model: str, tier: str, tokens: int) -> Row:
        self.batcher.cache.clear()
        return self.taken[tokens].row(model, tier, tokens, self._size(tokens))

    def _size(self, tokens: int) -> int:
        chain = self.batcher.chain(self.requests[tokens])
        assert self.runtime.tiers is not None, "the command asked for a tier"
        return max(found.size for found in self.runtime.tiers.found(chain.keys))


def run(
    config: Config, model: str, lengths: Sequence[int], rates: Sequence[float], repeats: int, output: Path | None
) -> int:
    """Measures, prints, and appends JSON lines to `output`."""
    size = config.page_size
    room = size * (-(-max(lengths) // size) + 1)
    runtime = Runtime.load(config.model_copy(update={"cache_tokens": max(config.cache_tokens or 0, room)}))
    try:
        rows = asyncio.run(_measured(runtime, model, lengths, rates, repeats))
    finally:
        runtime.close()
    print(_told(rows))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        stamp = {"date": date.today().isoformat(), "device": runtime.info.device, "codec": config.kv_codec}
        with output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(row) | stamp) + "\n" for row in rows)
    return 0


async def _measured(
    runtime: Runtime, model: str, lengths: Sequence[int], rates: Sequence[float], repeats: int
) -> list[Row]:
    assert runtime.tiers is not None, "the command asked for a tier"
    names = runtime.tiers.names
    rows: list[Row] = []
    for name, rate in [*((name, math.inf) for name in names), *((names[-1], rate) for rate in rates)]:
        tier = name if rate == math.inf else f"{name} at {rate / 1e6:.0f} MB/s"
        for row in await _grid(runtime, Only(runtime.tiers, name, rate), lengths, repeats, model, tier):
            print(_line(row), flush=True)
            rows.append(row)
    await runtime.batcher.drain()
    return rows


async def _grid(
    runtime: Runtime, tiers: Only, lengths: Sequence[int], repeats: int, model: str, tier: str
) -> list[Row]:
    assert runtime.tiers is not None, "the command asked for a tier"
    rates = Steered(runtime.tiers.rates().first)
    ahead = runtime.batcher.reading_ahead(tiers, rates)
    grid = Grid(runtime, ahead, rates, {tokens: _request(runtime, tokens) for tokens in lengths})
    runtime.batcher.ahead = ahead
    await grid.fill()
    await grid.turn(0)  # teaches and warms up
    grid.taken.clear()
    for number in range(repeats):
        await grid.turn(number)
    return [grid.row(model, tier, tokens) for tokens in lengths]


def _request(runtime: Runtime, tokens: int) -> TokenizedRequest:
    vocabulary = min(runtime.limits.vocabulary_size, 1_000)
    ids = np.random.default_rng(tokens).integers(0, vocabulary, tokens).astype(np.int32)
    return TokenizedRequest(ids, PROBE)


def _line(row: Row) -> str:
    rate = row.size / max(row.copied_ms, 1e-9) / 1e6
    return (
        f"{row.model:>8} {row.tier:<18} P{row.prefix:<6} {row.size / 1e6:8.1f} MB: computed {row.computed_ms:9.2f} ms, "
        f"fetched {row.fetched_ms:9.2f} ms (copied in {row.copied_ms:8.2f}, {rate:5.2f} GB/s), "
        f"chosen {row.chosen_ms:9.2f} ms (fetched {row.fetches:2} of {row.turns}): "
        f"{row.behind:+5.1%} +- {row.noise:.1%} to the better"
    )


def _told(rows: Sequence[Row]) -> str:
    worst = max(rows, key=lambda row: row.behind)
    within = sum(row.behind <= BAR for row in rows)
    unclear = sum(abs(row.behind - BAR) < 2 * row.noise for row in rows)
    return (
        f"{len(rows)} points: where the service chose, requests took at most {BAR:.0%} longer than by the better "
        f"way at {within}; at most {worst.behind:.1%} longer ({worst.tier}, P {worst.prefix}); "
        f"{unclear} points are within two standard errors of the {BAR:.0%}"
    )
