"""A request while it waits and runs, and the items that several requests want at once. Pure but for the awaited end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from attention.layout import Ints
from attention.plans import Strategy
from batching.pass_time import Work
from batching.runs import Chain, Lease
from batching.scheduler import Ticket
from batching.select import Choice
from batching.types import RequestScores, Scored, TokenizedRequest

WantedKey = tuple[bytes, bytes]  # what it stands behind, and itself


@dataclass(slots=True, eq=False)
class Wanted:
    """A distinct item behind one prefix. holders: who wants its score, and as which of its items; first come pays.

    taken  it is part of the pass that is being composed or runs
    """

    key: WantedKey
    holders: dict[Job, int] = field(default_factory=dict)
    taken: bool = False

    @property
    def payer(self) -> Job:
        return next(iter(self.holders))


@dataclass(slots=True, eq=False)
class Job:
    """One accepted request. Its items are distinct; `places` maps the request's items to them.

    lengths  tokens of each item
    wanted   of each item; the same object in every job that waits for the same
    left     items without a score, in order
    scored   of each item
    chain    the prefix as the cache knows it
    fetching its prefix is on its way from a tier: it waits
    coming   told once, with a lease of all its pages, when the pass that writes them begins
    lease    its pages, from its first pass on
    cached   prefix tokens that it found computed
    missed   its deadline came first, and that was counted
    count, total, squares   of the items that it pays for: how many, their tokens, and the sum of their squares
    """

    request: TokenizedRequest
    lengths: tuple[int, ...]
    places: Ints
    choice: Choice
    chain: Chain
    ticket: Ticket
    done: asyncio.Future[RequestScores]
    wanted: list[Wanted] = field(default_factory=list)
    left: dict[int, None] = field(default_factory=dict)
    scored: list[Scored | None] = field(default_factory=list)
    fetching: asyncio.Task[None] | None = None
    coming: Callable[[Lease], None] | None = None
    lease: Lease | None = None
    cached: int | None = None
    missed: bool = False
    count: int = 0
    total: int = 0
    squares: int = 0
    computed: int = 0
    passes: int = 0
    plan_seconds: float = 0.0
    forward_seconds: float = 0.0

    @property
    def naive(self) -> bool:
        return self.choice.strategies[0] is Strategy.NAIVE

    @property
    def prefix_written(self) -> bool:
        """Whether another pass of its would find all of its prefix."""
        prefix = len(self.request.prefix)
        return self.naive or not prefix or (self.lease is not None and self.lease.written == prefix)

    def pay(self, item: int, sign: int = 1) -> None:
        """From now on this item is on this job's account; with -1 no more."""
        length = self.lengths[item]
        self.count += sign
        self.total += sign * length
        self.squares += sign * length * length

    def work(self, cached: int) -> Work:
        """What is still to be computed for it alone, where the K/V of `cached` prefix tokens exists."""
        if not self.count:
            return Work()
        prefix = len(self.request.prefix)
        return Work.sums(prefix, cached, self.count, self.total, self.squares, self.naive)

    def waits(self, filling: Collection[tuple[int, bytes]]) -> bool:
        """Whether its prefix is on its way into pages."""
        if self.fetching is not None and not self.fetching.done():
            return True
        leased = self.lease is not None and self.lease.tokens == len(self.request.prefix)
        return not leased and any(self.chain.keys[place : place + 1] == (key,) for place, key in filling)

    def open_items(self) -> Iterator[int]:
        """Items without a score that no pass computes at the moment."""
        return (item for item in self.left if not self.wanted[item].taken)

    def answer(self, now: float) -> RequestScores:
        """What the caller gets. Items without a score are None."""
        elapsed = now - self.ticket.submitted
        return RequestScores(
            scored=tuple(self.scored[place] for place in self.places),
            reason=self.choice.reason,
            computed_tokens=self.computed,
            cached_prefix_tokens=self.cached or 0,
            passes=self.passes,
            queue_seconds=max(0.0, elapsed - self.plan_seconds - self.forward_seconds),
            plan_seconds=self.plan_seconds,
            forward_seconds=self.forward_seconds,
        )


class InFlight:
    """Which items are wanted, so that equal ones behind equal prefixes are computed once, whoever asked."""

    def __init__(self) -> None:
        self._wanted: dict[WantedKey, Wanted] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def join(self, job: Job) -> None:
        """The job's items become wanted."""
        behind = blake2b(job.request.prefix.tobytes(), digest_size=16)
        behind.update(f"{job.chain.salt!r}{job.request.normalize}{job.request.strategy}".encode())
        digest = behind.digest()
        for number, item in enumerate(job.request.items):
            key = digest, item.key()
            wanted = self._wanted.get(key)
            if wanted is None:
                wanted = self._wanted[key] = Wanted(key)
                job.pay(number)
            wanted.holders[job] = number
            job.wanted.append(wanted)
        job.left = dict.fromkeys(range(len(job.wanted)))
        job.scored = [None] * len(job.wanted)

    def leave(self, job: Job) -> set[Job]:
        """The job wants nothing any more. Returns those who wait for the same items and pay for them now."""
        heirs = set()
        for number in job.left:
            wanted = job.wanted[number]
            paid = wanted.payer is job
            del wanted.holders[job]
            if not wanted.holders:
                del self._wanted[wanted.key]
            elif paid:
                wanted.payer.pay(wanted.holders[wanted.payer])
                heirs.add(wanted.payer)
        job.left.clear()
        job.count = job.total = job.squares = 0
        return heirs

    def scored(self, wanted: Wanted, scored: Scored) -> list[Job]:
        """Hands a score to all who want it, and returns those who now have all of theirs."""
        if not wanted.holders:
            return []  # cancelled while it ran
        del self._wanted[wanted.key]
        wanted.payer.pay(wanted.holders[wanted.payer], -1)
        complete = []
        for job, number in wanted.holders.items():
            job.scored[number] = scored
            del job.left[number]
            if not job.left:
                complete.append(job)
        wanted.holders.clear()
        return complete
