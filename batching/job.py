"""A request while it waits and runs, and the items that several requests want at once. Pure but for the awaited end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from attention.layout import Ints
from attention.plans import Strategy
from batching.pass_time import Work
from batching.runs import Chain, Lease
from batching.scheduler import Ticket
from batching.select import Choice
from batching.types import RequestScores, Scored, TokenizedRequest

# What items stand behind, and all that their scores depend on beside themselves: prefix, salt, normalize, strategy.
Name = tuple[bytes, bytes, bool, Strategy | None]


@dataclass(slots=True, eq=False)
class Wanted:
    """A distinct item behind a prefix. holders: who wants its score, and as which of its items; first come pays.

    taken  it is part of the pass that is being composed or runs
    """

    key: bytes
    holders: dict[Job, int] = field(default_factory=dict)
    taken: bool = False

    @property
    def payer(self) -> Job:
        return next(iter(self.holders))


@dataclass(slots=True, eq=False)
class Behind:
    """Those who want items scored alike behind one prefix. Equal items are computed once, whoever asked.

    jobs    in the order they came. While there was never more than one, it keeps its own books
    wanted  else what they want, by key
    """

    name: Name
    jobs: dict[Job, None] = field(default_factory=dict)
    wanted: dict[bytes, Wanted] | None = None

    def __len__(self) -> int:
        """Distinct items."""
        return sum(len(job.left) for job in self.jobs) if self.wanted is None else len(self.wanted)

    def join(self, job: Job) -> None:
        """The job's items become wanted."""
        if self.jobs:
            self._share(job)
        else:
            job.pay_all()
        self.jobs[job] = None

    def leave(self, job: Job) -> set[Job]:
        """The job wants nothing any more. Returns those who wait for the same items and pay for them now."""
        wants = [] if job.wanted is None else [job.wanted[item] for item in job.left]
        heirs = {heir for wanted in wants for heir in self._let_go(job, wanted)}
        self._gone(job)
        return heirs

    def scored(self, job: Job, items: Sequence[int], scores: Sequence[Scored]) -> list[Job]:
        """A pass scored these of the job's items. Returns who now has all of theirs."""
        if job.wanted is not None:
            told = zip(items, scores, strict=True)
            complete = [one for item, score in told for one in self._hand(job.wanted[item], score)]
        elif not job.left:
            return []  # cancelled while it ran
        else:
            job.have(items, scores)
            complete = [] if job.left else [job]
        for one in complete:
            self._gone(one)
        return complete

    def _share(self, job: Job) -> None:
        """Another job comes: from now on the books are kept item by item."""
        if self.wanted is None:
            (first,) = self.jobs
            keys = first.request.items.keys
            first.wanted = {item: Wanted(keys[item], {first: item}, item in first.taken) for item in first.left}
            self.wanted = {wanted.key: wanted for wanted in first.wanted.values()}
        job.wanted = {}
        for item, key in enumerate(job.request.items.keys):
            wanted = job.wanted[item] = self.wanted.setdefault(key, Wanted(key))
            if not wanted.holders:
                job.pay(item)
            wanted.holders[job] = item

    def _let_go(self, job: Job, wanted: Wanted) -> list[Job]:
        """The job does not want this any more. Returns who pays for it now, if it paid and another wants it."""
        paid = wanted.payer is job
        del wanted.holders[job]
        if not wanted.holders:
            self._forget(wanted)
        elif paid:
            wanted.payer.pay(wanted.holders[wanted.payer])
            return [wanted.payer]
        return []

    def _hand(self, wanted: Wanted, score: Scored) -> list[Job]:
        """The score to all who want it; returns who now has all of theirs."""
        if not wanted.holders:
            return []  # all were cancelled while it ran
        self._forget(wanted)
        wanted.payer.pay(wanted.holders[wanted.payer], -1)
        for job, item in wanted.holders.items():
            job.scored[item] = score
            del job.left[item]
        complete = [job for job in wanted.holders if not job.left]
        wanted.holders.clear()
        return complete

    def _forget(self, wanted: Wanted) -> None:
        assert self.wanted is not None, "what is wanted is kept by key"
        del self.wanted[wanted.key]

    def _gone(self, job: Job) -> None:
        del self.jobs[job]
        job.left.clear()
        job.count = job.total = job.squares = 0


@dataclass(slots=True, eq=False)
class Job:
    """One accepted request. Its items are distinct; `places` maps the request's items to them.

    lengths  tokens of each item
    behind   where its items stand, from when it is in flight
    left     items without a score, in order
    taken    of them, those in the pass that is being composed or runs; while nobody else is `behind`
    wanted   of those that were left when somebody else came; the same object in every job that waits for the same
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
    lengths: Sequence[int]
    places: Ints
    choice: Choice
    chain: Chain
    ticket: Ticket
    done: asyncio.Future[RequestScores]
    behind: Behind | None = None
    left: dict[int, None] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    wanted: dict[int, Wanted] | None = None
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
    def whole(self) -> Lease | None:
        """Its lease, where that has pages for all of its prefix that no pass may have spoiled."""
        lease = self.lease
        if lease is None or lease.withdrawn or lease.tokens < len(self.request.prefix):
            return None
        return lease

    @property
    def prefix_written(self) -> bool:
        """Whether another pass of its would find all of its prefix."""
        prefix = len(self.request.prefix)
        return self.naive or not prefix or ((lease := self.whole) is not None and lease.written == prefix)

    def pay(self, item: int, sign: int = 1) -> None:
        """From now on this item is on this job's account; with -1 no more."""
        length = self.lengths[item]
        self.count += sign
        self.total += sign * length
        self.squares += sign * length * length

    def pay_all(self) -> None:
        """All items are on this job's account."""
        items = self.request.items
        self.count, self.total, self.squares = len(items), len(items.ids), items.squares

    def have(self, items: Sequence[int], scores: Sequence[Scored]) -> None:
        """These items have their scores, for which it paid."""
        if len(items) == len(self.lengths):
            self.scored, self.count, self.total, self.squares = list(scores), 0, 0, 0
            self.left.clear()
            return
        for item, score in zip(items, scores, strict=True):
            self.scored[item] = score
            del self.left[item]
            self.pay(item, -1)

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
        return self.whole is None and any(self.chain.keys[place : place + 1] == (key,) for place, key in filling)

    def open_items(self) -> list[int]:
        """Items without a score that no pass computes at the moment."""
        if self.wanted is not None:
            return [item for item in self.left if not self.wanted[item].taken]
        return [item for item in self.left if item not in self.taken] if self.taken else list(self.left)

    def take(self, items: Sequence[int]) -> None:
        """They are part of a pass from now on."""
        if self.wanted is None:
            self.taken.update(items)
        else:
            for item in items:
                self.wanted[item].taken = True

    def put_back(self, items: Sequence[int]) -> None:
        """The pass that they were part of has ended."""
        if self.wanted is None:
            self.taken.difference_update(items)
        else:
            for item in items:
                self.wanted[item].taken = False

    def answer(self, now: float) -> RequestScores:
        """What the caller gets. Items without a score are None."""
        elapsed, distinct = now - self.ticket.submitted, len(self.places) == len(self.scored)
        return RequestScores(
            scored=tuple(self.scored) if distinct else tuple(self.scored[place] for place in self.places.tolist()),
            reason=self.choice.reason,
            computed_tokens=self.computed,
            cached_prefix_tokens=self.cached or 0,
            passes=self.passes,
            queue_seconds=max(0.0, elapsed - self.plan_seconds - self.forward_seconds),
            plan_seconds=self.plan_seconds,
            forward_seconds=self.forward_seconds,
        )


class InFlight:
    """What is wanted, by what it stands behind."""

    def __init__(self) -> None:
        self._behind: dict[Name, Behind] = {}

    def __len__(self) -> int:
        """Distinct items."""
        return sum(map(len, self._behind.values()))

    def join(self, job: Job) -> None:
        """The job's items become wanted."""
        name = _name(job)
        job.behind = self._behind.setdefault(name, Behind(name))
        job.left = dict.fromkeys(range(len(job.lengths)))
        job.scored = [None] * len(job.lengths)
        job.behind.join(job)

    def leave(self, job: Job) -> set[Job]:
        """The job wants nothing any more. Returns those who wait for the same items and pay for them now."""
        if job.behind is None or job not in job.behind.jobs:
            return set()
        heirs = job.behind.leave(job)
        self._tidy(job.behind)
        return heirs

    def scored(self, job: Job, items: Sequence[int], scores: Sequence[Scored]) -> list[Job]:
        """A pass scored these items of a job: each score goes to all who want it. Returns those who now have all of
        theirs."""
        assert job.behind is not None, "it has joined"
        complete = job.behind.scored(job, items, scores)
        self._tidy(job.behind)
        return complete

    def _tidy(self, behind: Behind) -> None:
        if not behind.jobs and self._behind.get(behind.name) is behind:  # after a cancelled one others may have come
            del self._behind[behind.name]


def _name(job: Job) -> Name:
    return job.chain.ids, job.chain.salt, job.request.normalize, job.request.strategy
