"""Fills one pass: which items of which requests, over which pages. Pure; time is given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attention.plans import DENSE, Strategy
from batching.job import Job
from batching.packing import Group
from batching.pass_time import PassTime, Work
from batching.prefix_cache import PrefixCache
from batching.select import Budget


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What a pass computes of one request.

    work            its own part of the pass, shared prefix blocks counted once
    total, squares  of its items: their tokens, and the sum of their squares
    """

    job: Job
    group: Group
    work: Work
    total: int
    squares: int

    def beside(self, cached: int) -> Work:
        """What its items cost where so many tokens of the prefix need not be computed."""
        job, count = self.job, len(self.group.items)
        return Work.sums(len(job.request.prefix), cached, count, self.total, self.squares, job.naive)


class Composer:
    """Takes requests in the order that it is given, as much as a pass holds."""

    def __init__(self, cache: PrefixCache, pass_tokens: int, pass_items: int, pass_time: PassTime) -> None:
        self.cache = cache
        self.pass_time = pass_time
        self._pass_tokens = pass_tokens
        self._pass_items = pass_items

    def compose(self, jobs: Iterable[Job], now: float) -> list[Part]:
        """The next pass. Afterwards call `finish` with it.

        All of a pass ends together, so nothing is added that would make someone late who would be done with it.
        """
        budget = Budget(self._pass_tokens, self._pass_items)
        parts: list[Part] = []
        trees: dict[tuple[bytes, bytes], Strategy | None] = {}
        end, latest = now, math.inf
        for job in jobs:
            if budget.full:
                break
            if job.waits(self.cache.filling) or _mixes(job, trees):
                continue
            if parts and end + self._at_most(job, budget) > latest:
                continue
            if (part := self._part(job, budget, now)) is not None:
                parts.append(part)
                trees |= dict.fromkeys(_root(job), _dense(job))
                end += self.pass_time.share(part.work, self._pass_tokens) * self.pass_time.margin
                if len(part.group.items) == len(job.left) and not job.ticket.hopeless(now):
                    latest = min(latest, math.inf if job.ticket.deadline is None else job.ticket.deadline)
        return parts

    def _at_most(self, job: Job, budget: Budget) -> float:
        """Seconds that a job would add to the pass, as much of it as the pass has room for."""
        part = min(1.0, budget.tokens / max(job.ticket.work.tokens, 1))
        return job.ticket.seconds * part * self.pass_time.margin

    def cached(self, job: Job) -> int:
        """Prefix tokens of a job that are indexed at the moment."""
        if job.naive:
            return 0
        if job.lease is None or job.lease.withdrawn:
            return self.cache.hit(job.chain)
        return job.lease.tokens

    def _part(self, job: Job, budget: Budget, now: float) -> Part | None:
        prefix = len(job.request.prefix)
        items = job.open_items()[: budget.items]
        lengths = job.lengths if len(items) == len(job.lengths) else [job.lengths[item] for item in items]
        count = budget.take(prefix - self.cached(job), lengths, job.naive)
        if not count:
            return None
        job.take(items[:count])
        return self._leased(job, tuple(items[:count]), now)

    def _leased(self, job: Job, items: tuple[int, ...], now: float) -> Part:
        found = self._lease(job, now) if len(job.request.prefix) and not job.naive else 0
        strategies = job.choice.strategies
        if len(items) < len(strategies):
            strategies = tuple(strategies[item] for item in items)
        lease = job.lease if job.lease is not None and job.lease.blocks else None
        cached, pages = (lease.written, lease.pages) if lease is not None else (0, None)
        group = Group(job.request, items, strategies, cached, pages, job.choice.packed_rows)
        total, squares = _sums(job, items)
        work = Work.sums(len(job.request.prefix), found, len(items), total, squares, job.naive)
        return Part(job, group, work, total, squares)

    def _lease(self, job: Job, now: float) -> int:
        """Holds the prefix's pages; returns how many of its tokens this part of the pass need not compute."""
        if job.whole is None:
            self.drop(job)  # where there was no room for all of it, perhaps there is now
        if job.lease is not None:
            return job.lease.written
        job.lease = self.cache.acquire(job.chain, now)
        if job.cached is None:
            job.cached = job.lease.hit
        return job.lease.hit

    def finish(self, parts: Iterable[Part], sound: bool = True) -> None:
        """The pass has ended; unsound: what it wrote is not to be trusted."""
        leases = [(part.job.lease, part.group.cached) for part in parts if part.job.lease is not None]
        if not sound:
            self.cache.withdraw(leases)
        for lease, _ in leases if sound else ():
            self.cache.commit(lease)
        for part in parts:
            part.job.put_back(part.group.items)

    def drop(self, job: Job) -> None:
        """Lets go of a job's pages."""
        if job.lease is not None:
            self.cache.release(job.lease)
            job.lease = None


def _sums(job: Job, items: Sequence[int]) -> tuple[int, int]:
    """Tokens of some of a job's items, and the sum of their squares."""
    if len(items) == job.count == len(job.lengths):
        return job.total, job.squares  # it pays for all of them
    lengths = [job.lengths[item] for item in items]
    return sum(lengths), sum(n * n for n in lengths)


def _dense(job: Job) -> Strategy | None:
    """The strategy of a job whose mask is a matrix over everything that shares its first page."""
    return job.request.strategy if job.request.strategy in DENSE else None


def _root(job: Job) -> list[tuple[bytes, bytes]]:
    """Who shares this block shares a tree of the pass."""
    return [job.chain.root] if job.chain.blocks and not job.naive else []


def _mixes(job: Job, trees: Mapping[tuple[bytes, bytes], Strategy | None]) -> bool:
    """Whether the job would put a dense mask and something else into one tree, which no plan can: it waits."""
    return any(trees.get(root, _dense(job)) is not _dense(job) for root in _root(job))
