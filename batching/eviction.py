"""In which order what the prefix cache keeps goes. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from batching.runs import TOKEN_BYTES, Lease, Run

HALF_LIFE = 32  # wishes for blocks, for each page of the pool, after which one counts half

# (tokens before the block, tokens of it) -> what computing it again costs: of equal blocks no less for the later one.
Cost = Callable[[int, int], float]


def by_tokens(before: int, tokens: int) -> float:
    """The plainest recompute cost: a token is a token."""
    return float(tokens)


class EvictionOrder:
    """The block goes that is least worth keeping: how often it was wanted, each time counting half as much HALF_LIFE
    later, times what computing it again costs. So what is not wanted any more goes, whatever it costs, and what is
    wanted all the time stays though something else was wanted last."""

    def __init__(self, pages: int, page_size: int, cost: Cost = by_tokens) -> None:
        """pages: of the pool."""
        self._page_size = page_size
        self._cost = cost
        self._step = 1.0 / (HALF_LIFE * max(pages, 1))  # what a wish counts more than the one before it, as log2
        self._wishes = 0
        self._heap: list[tuple[float, int, Run]] = []
        self._pushed = 0
        self._tidy_at = 64

    def want(self, lease: Lease) -> None:
        """Counts a wish for each block, one after the other. Kept as a logarithm that only grows, so that old
        priorities need no update; as it grows alike from block to block, there is one number a run."""
        now = (self._wishes + 1) * self._step
        self._wishes += lease.blocks
        for run in lease.runs:
            run.wishes += 1
            most = max(run.level, now)
            run.level = most + math.log2(1.0 + 2.0 ** (min(run.level, now) - most))  # of both together

    def push(self, run: Run) -> None:
        """A run that nobody holds and nothing continues gets its place: that of its last block, as those before are
        worth even less; but a partial block is cheap, and the one before it may be worth more."""
        if run.users or run.children or not run.indexed:
            return
        before = (run.end - 1) * self._page_size
        tokens = run.begin * self._page_size + len(run.ids) // TOKEN_BYTES - before
        cost = self._cost(before, tokens)
        worth = run.level + (run.end - 1) * self._step + math.log2(max(cost, 1e-30))
        self._pushed += 1
        run.entry = self._pushed
        heapq.heappush(self._heap, (worth, run.entry, run))
        if len(self._heap) > self._tidy_at:
            self._heap = [entry for entry in self._heap if _valid(entry)]
            heapq.heapify(self._heap)
            self._tidy_at = 64 + 2 * len(self._heap)

    def pop(self) -> Run | None:
        """The run whose last block is to go; None where none may."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if _valid(entry):
                return entry[2]
        return None


def _valid(entry: tuple[float, int, Run]) -> bool:
    _, number, run = entry
    return run.entry == number and run.indexed and not run.users and not run.children
