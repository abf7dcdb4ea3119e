"""Where evicted prefixes may be found again, and whether fetching one is worth it. Pure but for the awaited copies."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from attention.layout import Ints
from batching.pass_time import PassTime, Work
from batching.prefix_cache import PrefixCache
from batching.runs import Chain, Lease, Run

PATIENCE = 1.0  # of the time that recomputing takes, after which a fetch is given up
GIVEN_UP_SECONDS = 0.1  # what a fetch that failed is taken to have cost at least
GIVEN_UP_TIMES = 4.0  # a fetch that was given up would have taken longer, nobody knows how much
FORGETTING = 0.85
BELIEF = 0.1  # weight of a first belief's error beside a fetch's, before they are squared
TRY_AGAIN = 64  # one of so many fetches that do not look worth it is made all the same
WISHES = 2  # how often a block must have been wanted before it is copied to the tiers
CHOICES = ("fetch", "missed", "recompute", "given_up")  # missed: what the tier may have had was not there, or not sound


@dataclass(frozen=True, slots=True)
class Found:
    """A leading run of blocks that a tier has, or may have. likely: how much of it, as far as is known, 0..1; sure: by
    the tier's own index."""

    tier: str
    blocks: int
    size: int
    likely: float = 1.0
    sure: bool = False


class Tiers(Protocol):
    """The slower stores below the pages. Nothing here blocks the event loop."""

    @property
    def names(self) -> Sequence[str]:
        """Of the tiers, the fastest first."""

    def found(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """What each tier has of these blocks, from the first on; nothing of those that have none. Looks at indexes
        only."""

    def read(self, found: Found, keys: Sequence[bytes]) -> Awaitable[Sequence[Any]]:
        """The blocks' contents, from the first on, as many as are there and sound. May be cancelled."""

    def fill(self, pages: Ints, contents: Sequence[Any]) -> Awaitable[float]:
        """Copies contents into pages that nobody else uses, beside the passes; the seconds that this took."""

    def store(self, keys: Sequence[bytes], pages: Ints) -> Awaitable[None]:
        """Copies pages that are held out, beside the passes; writing them to the tiers goes on behind that."""

    def close(self) -> None:
        """Ends what is under way."""


class Rates:
    """Seconds that a fetch takes, by tier: a latency and bytes/s, fitted to the last ones."""

    def __init__(self, first: dict[str, tuple[float, float]]) -> None:
        """first: (latency, bytes/s) that each tier is taken to have until it has shown its own."""
        self.first = first
        self._seen: dict[str, deque[tuple[float, float]]] = {tier: deque(maxlen=32) for tier in first}

    def learn(self, tier: str, size: int, seconds: float) -> None:
        """What one fetch took."""
        self._seen[tier].append((float(size), seconds))

    def seconds(self, tier: str, size: int) -> float:
        """Predicted. Late fetches count more; the first belief as a hundredth of one, at no bytes and at so many."""
        latency, rate = self.first[tier]
        seen = self._seen[tier]
        told = np.array([*seen, (0.0, latency), (float(size), latency + size / rate)])
        age = np.concatenate([np.arange(len(seen))[::-1], [0.0, 0.0]])
        part = np.concatenate([np.ones(len(seen)), [BELIEF, BELIEF]])
        # Between absolute and relative errors: a slow fetch must be noticed, a fast one predicted well. Only the very
        # shortest count alike, or the noise of long ones would be all that is known of the latency.
        short = float(np.quantile(told[: len(seen), 1], 0.1)) if seen else 0.0
        weight = part * FORGETTING**age / np.sqrt(np.maximum(told[:, 1], max(short, 1e-9)))
        rows = np.column_stack([np.ones(len(told)), told[:, 0] / max(size, 1)]) * weight[:, None]
        for columns in ([0, 1], [1], [0]):  # where noise makes one of them negative, the other says it all
            solved = np.linalg.lstsq(rows[:, columns], told[:, 1] * weight, rcond=None)[0]
            if (solved >= 0).all():
                return float(solved.sum())
        raise AssertionError("one positive column fits positive times by a positive number")


@dataclass(slots=True)
class TierCounts:
    """Since the start. fetched_tokens: found in each tier; regret_seconds: what the worse of the two choices cost."""

    fetched_tokens: dict[str, int] = field(default_factory=dict)
    chosen: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHOICES, 0))
    regret_seconds: float = 0.0


class ReadAhead:
    """Brings prefixes up from the tiers while their requests wait, and copies down what is wanted again and again."""

    def __init__(
        self, cache: PrefixCache, tiers: Tiers, rates: Rates, pass_time: PassTime, pass_tokens: int,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._cache = cache
        self._tiers = tiers
        self._rates = rates
        self._pass_time = pass_time
        self._pass_tokens = pass_tokens
        self._clock = clock
        self._storing: set[asyncio.Task[None]] = set()
        self._declined = 0
        self._bringing: dict[bytes, asyncio.Task[None]] = {}
        self.counts = TierCounts()

    def choose(self, asked: Chain) -> Found | None:
        """What to fetch of a prefix, and from where: what saves most time. None where nothing is there, or where
        computing it again is faster."""
        hit = self._cache.hit_blocks(asked)
        found = self._tiers.found(asked.keys[hit:]) if hit < asked.blocks else ()
        if not found:
            return None
        best = max(found, key=lambda each: self._gain(asked, hit, each))
        if self._gain(asked, hit, best) > 0:
            return best
        self._declined += 1
        if self._declined % TRY_AGAIN == 0:
            return best  # or a tier that has recovered would never be asked again
        self.counts.chosen["recompute"] += 1
        return None

    def _gain(self, asked: Chain, hit: int, found: Found) -> float:
        """Seconds that fetching it likely saves."""
        begin = hit * self._cache.page_size
        end = min(begin + found.blocks * self._cache.page_size, asked.tokens)
        return self._recompute(begin, end) * found.likely - self._rates.seconds(found.tier, found.size)

    def _recompute(self, begin: int, end: int) -> float:
        return self._pass_time.share(Work.of(end, begin, ()), self._pass_tokens)

    def bring(self, asked: Chain) -> asyncio.Task[None] | None:
        """Begins to fetch what `choose` finds into pages, once for all who wait for it; None where nothing is fetched.

        Ends, without an error, when it is there or when it has taken as long as computing it again would.
        """
        found = self.choose(asked)
        if found is None:
            return None
        held = self._cache.held(asked)  # or what is there already might go meanwhile
        name = asked.keys[held.blocks + found.blocks - 1]
        if name in self._bringing:
            self._cache.release(held)
        else:
            task = self._bringing[name] = asyncio.create_task(self._bring(asked, found, held))
            task.add_done_callback(lambda _: self._brought(name, held))
        return self._bringing[name]

    def _brought(self, name: bytes, held: Lease) -> None:
        del self._bringing[name]
        self._cache.release(held)

    async def _bring(self, asked: Chain, found: Found, held: Lease) -> None:
        began = self._clock()
        try:
            await self._fetch(asked, found, held, began)
        except Exception:  # noqa: BLE001 - a tier's trouble is no request's: the prefix is computed
            self.counts.chosen["given_up"] += 1
            self._rates.learn(found.tier, found.size, max(self._clock() - began, GIVEN_UP_SECONDS))

    async def _fetch(self, asked: Chain, found: Found, held: Lease, began: float) -> None:
        hit = held.blocks
        again = self._recompute(held.tokens, self._end(asked, hit + found.blocks))
        try:
            async with asyncio.timeout(PATIENCE * again + self._rates.seconds(found.tier, 0)):
                contents = await self._tiers.read(found, asked.keys[hit : hit + found.blocks])
        except TimeoutError:
            self.counts.chosen["given_up"] += 1
            self.counts.regret_seconds += self._clock() - began
            self._rates.learn(found.tier, found.size, GIVEN_UP_TIMES * (self._clock() - began))
            return
        spent = self._clock() - began
        blocks, seconds = await self._filled(asked, hit, contents, found.tier)
        spent += seconds
        self._rates.learn(found.tier, found.size * len(contents) // found.blocks, spent)
        end = self._end(asked, hit + blocks)
        self.counts.chosen["fetch" if blocks else "missed"] += 1
        self.counts.regret_seconds += max(0.0, spent - (self._recompute(held.tokens, end) if blocks else 0.0))
        self.counts.fetched_tokens[found.tier] = self.counts.fetched_tokens.get(found.tier, 0) + end - held.tokens

    def _end(self, asked: Chain, blocks: int) -> int:
        """Tokens of so many leading blocks."""
        return min(blocks * self._cache.page_size, asked.tokens)

    async def _filled(self, asked: Chain, hit: int, contents: Sequence[Any], tier: str) -> tuple[int, float]:
        """Registers the blocks, fills their pages, and only then says that they are written. (blocks, seconds)"""
        blocks = hit + len(contents)
        there = self._cache.held(asked)
        taken = there.blocks != hit or there.written < there.tokens  # by a pass that computes them, or those before
        self._cache.release(there)
        if taken or not contents:
            return 0, 0.0
        lease = self._cache.registered(asked.beginning(blocks), self._clock())
        first = hit, asked.keys[hit]
        self._cache.filling.append(first)
        try:
            pages = lease.pages[hit:]
            # Shielded, as the pages are held until the copy ends.
            seconds = await asyncio.shield(self._tiers.fill(pages, contents[: len(pages)]))
            for run in lease.runs:
                if run.begin >= hit:
                    run.written = True
                    run.stored = tier == self._tiers.names[0]  # else it is to come nearer when it is wanted again
            return len(pages), seconds
        finally:
            self._cache.filling.remove(first)
            self._cache.release(lease)

    def keep(self, lease: Lease, writing: Collection[Run] = ()) -> None:
        """Copies blocks of a lease down that were wanted often enough and are not there yet. writing: what a pass under
        way may still spoil, and so is copied another time."""
        fresh = [run for run in self._fresh(lease) if run not in writing]
        if not fresh:
            return
        held = self._cache.held_again(lease)
        for run in fresh:
            run.stored = True
        places = [place for run in fresh for place in range(run.begin, run.end)]
        task = asyncio.create_task(self._store(held, places))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    def _fresh(self, lease: Lease) -> list[Run]:
        fresh = [run for run in lease.runs if run.written and run.indexed and run.wishes >= WISHES and not run.stored]
        if fresh:  # else nobody looks into the tiers; what is there already may be a block computed again
            for found in self._tiers.found(lease.chain.keys[: lease.blocks]):
                if found.sure and found.tier == self._tiers.names[0]:
                    self._cache.mark_stored(lease, found.blocks)
        return [run for run in fresh if not run.stored]

    async def _store(self, held: Lease, places: Sequence[int]) -> None:
        """places: of the blocks in the prefix."""
        try:
            await self._tiers.store([held.chain.keys[place] for place in places], held.pages[list(places)])
        except Exception:  # noqa: BLE001 - a tier's trouble is no request's
            for run in held.runs:
                run.stored = run.stored and run.begin not in places
        finally:
            self._cache.release(held)

    async def settle(self) -> None:
        """Waits for the copies that are under way."""
        while under_way := [*self._storing, *self._bringing.values()]:
            await asyncio.gather(*under_way, return_exceptions=True)
