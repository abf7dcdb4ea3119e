"""Beam searches beside scoring on one simulated device: the real searcher, batcher and scheduler in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from batching.batcher import Batcher, BatcherLimits
from batching.beams import BeamOptions, Candidates
from batching.page_pool import PagePool
from batching.prefix_cache import PrefixCache
from batching.select import Threshold
from batching.types import PackedBatch, Reads
from loadtest.sim_device import DeviceTime, SimDevice
from loadtest.sim_result import Outcome, Result
from loadtest.traces import Call, Profile, calls, request_of
from loadtest.virtual_time import run
from scorer.beam import TURN_SECONDS, BeamSearcher
from scorer.beam_pages import BeamPages
from scorer.beam_run import BeamRequest
from scorer.beam_steps import BeamStep, Stepped

T = TypeVar("T")

PAGE, CACHE_PAGES, BEAM_PAGES = 16, 1 << 14, 1 << 13
PASS_TOKENS, PASS_ITEMS = 16_384, 1024
PROMPT, OPTIONS = 1024, BeamOptions(128, 16)
# Of a step with Qwen3-0.6B's shape behind 1,024 tokens on an H200 (loadtest/results/h200-decode: 32 to 512 beams take
# 1.81 to 2.85 ms): its launches and weights, then what each beam's row and logits add.
STEP_SECONDS, BEAM_SECONDS = 1.75e-3, 2.1e-6
PARTS = (0.0, 0.1, 0.2, 0.3)  # of the device's time that searches ask for
TURNS, WHOLE = "in turns", "in one piece"


@dataclass(frozen=True, slots=True)
class Mixed:
    """What became of scoring, and how many seconds each search took."""

    scoring: Result
    searches: list[float]

    @property
    def p99(self) -> dict[str, float]:
        """Seconds, of short and of long calls."""
        return {kind: self.scoring.latency(kind, 0.99) for kind in ("short", "bulk")}

    def latency(self, quantile: float) -> float:
        """Seconds of a search."""
        return float(np.quantile(self.searches, quantile))


class SharedDevice(SimDevice):
    """Passes and turns of steps one after the other, as they come. Steps take time when their turn ends."""

    def __init__(self, time: DeviceTime, seed: int = 0) -> None:
        super().__init__(time, seed)
        self._turn = asyncio.Lock()
        self._owed = 0.0

    async def __call__(self, batch: PackedBatch) -> Reads:
        async with self._turn:
            return await super().__call__(batch)

    async def between(self, work: Callable[[], T]) -> T:
        """As the engine does."""
        async with self._turn:
            self._owed = 0.0
            result = work()
            self.busy += self._owed
            await asyncio.sleep(self._owed)
            return result

    def timer(self) -> float:
        """The time as a step sees it."""
        return asyncio.get_running_loop().time() + self._owed

    def submit(self, step: BeamStep) -> Callable[[], Stepped]:
        """A step whose continuations are all as probable."""
        seconds = STEP_SECONDS + BEAM_SECONDS * len(step.tokens)
        self._owed += seconds
        beams = (np.arange(step.count) % len(step.tokens)).astype(np.int32)
        found = Candidates(np.full(step.count, -1.0, np.float32), beams, np.arange(step.count, dtype=np.int32))
        return lambda: Stepped(found, 0.0, seconds)


def mixed(
    seconds: float,
    device: DeviceTime,
    mix: Sequence[tuple[Profile, float]],
    per_second: float,
    parts: Sequence[float] = PARTS,
) -> dict[tuple[float, str], Mixed]:
    """Scoring at this rate with searches beside it, by how much of the device these ask for and how they run."""
    ways = [(part, way) for part in parts for way in ((TURNS, WHOLE) if part else (TURNS,))]
    return {(part, way): run(_mixed(seconds, device, mix, per_second, part, way)) for part, way in ways}


async def _mixed(
    seconds: float,
    time: DeviceTime,
    mix: Sequence[tuple[Profile, float]],
    per_second: float,
    part: float,
    way: str,
) -> Mixed:
    loop, device = asyncio.get_running_loop(), SharedDevice(time)
    cache = PrefixCache(PagePool(CACHE_PAGES), PAGE)
    limits = BatcherLimits(PASS_TOKENS, PASS_ITEMS, 1 << 30)
    batcher = Batcher(device, limits, Threshold(128), cache, loop.time)
    pages = BeamPages(CACHE_PAGES, BEAM_PAGES, PAGE)
    turn = TURN_SECONDS if way == TURNS else float("inf")
    # No one comes while the simulated device computes a turn, so that it cannot be seen whether anyone waits.
    searcher = BeamSearcher(batcher, device, device, pages, loop.time, turn, device.timer, idle_turn_seconds=turn)
    trace = calls(mix, per_second, seconds, seed=6)
    scoring = [asyncio.create_task(_score(batcher, call, n)) for n, call in enumerate(trace)]
    times = _arrivals(part * per_second_of_all(time), seconds)
    searching = [asyncio.create_task(_search(searcher, at, n)) for n, at in enumerate(times)]
    outcomes, searches = await asyncio.gather(*scoring), await asyncio.gather(*searching)
    ended = loop.time()
    await batcher.drain()
    return Mixed(Result(list(outcomes), ended, device.busy, device.tokens), list(searches))


def per_second_of_all(time: DeviceTime) -> float:
    """Searches/s that would keep the device busy all the time."""
    from batching.pass_time import Work

    steps = STEP_SECONDS * OPTIONS.max_new_tokens + BEAM_SECONDS * OPTIONS.num_beams * (OPTIONS.max_new_tokens - 1)
    return 1 / (time.seconds(Work.of(PROMPT, 0, [1])) + steps)


def _arrivals(per_second: float, seconds: float) -> list[float]:
    if not per_second:
        return []
    gaps = np.random.default_rng(7).exponential(1 / per_second, int(2 * per_second * seconds) + 20)
    times = np.cumsum(gaps)
    return [float(at) for at in times[times < seconds]]


async def _score(batcher: Batcher, call: Call, number: int) -> Outcome:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(call.at - loop.time())
    answer = await batcher.submit(request_of(call, number))
    return Outcome(call, end=loop.time(), cached=answer.cached_prefix_tokens)


async def _search(searcher: BeamSearcher, at: float, number: int) -> float:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at - loop.time())
    prompt = np.full(PROMPT, 1_000_000 + number, np.int32)
    await searcher.search(BeamRequest(prompt, OPTIONS))
    return loop.time() - at
