"""Collects requests, runs them pass after pass on the injected device, and hands each its own scores."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from batching.composer import Composer, Part
from batching.errors import BatchingError, Closed, DeviceFailed, Expired, NotAdmitted, refuse_expired
from batching.job import InFlight, Job
from batching.observer import Observer, Unobserved
from batching.packing import fold
from batching.pass_time import FittedPassTime, PassTime, Work
from batching.passes import Execute, Passes
from batching.prefix_cache import PrefixCache
from batching.runs import Chain, Lease
from batching.scheduler import NOTHING_AHEAD, Asked, Order, Scheduler, SchedulerLimits, TextsAhead, Ticket, by_due
from batching.select import Policy, choose
from batching.shares import FairShares
from batching.tiering import Rates, ReadAhead, Tiers
from batching.types import RequestScores, Scored, TokenizedRequest
from batching.window import Turns, Window

LET_IN_SECONDS = 0.01  # that turns of the event loop may take before a pass
IDLE_TURNS = 6  # without a new request: on its way to us a call needs some
ESTIMATED = 256  # requests at the head of the queue whose work is counted again each tick


@dataclass(frozen=True, slots=True)
class BatcherLimits:
    """max_pass_tokens, max_pass_items: computed by one pass; max_queue_tokens: waiting, beyond which submit refuses."""

    max_pass_tokens: int
    max_pass_items: int
    max_queue_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Scheduling:
    """How requests are ordered and let in. The defaults are what the service uses; a simulation brings others."""

    pass_time: PassTime | None = None  # None: fitted to the passes that are run
    shares: FairShares | None = None  # None: every tenant weighs the same
    order: Order = by_due
    window: Window | None = None
    passes_in_flight: int = 1  # 2 where the device can be given a pass while it runs another


class Batcher:
    """Runs accepted requests to their end: each gets its scores or one of batching.errors. Lives on one event loop."""

    def __init__(
        self,
        execute: Execute,
        limits: BatcherLimits,
        policy: Policy,
        cache: PrefixCache,
        clock: Callable[[], float] = time.monotonic,
        scheduling: Scheduling | None = None,
        salt: bytes = b"",
        tiers: tuple[Tiers, Rates] | None = None,
    ) -> None:
        """salt: what the cached K/V depends on beside tokens and tenant: the profile's revision.

        tiers: stores below the pages, and how fast they are.
        """
        given = scheduling or Scheduling()
        self._limits = limits
        self.policy = policy
        self.cache = cache
        self.observer: Observer = Unobserved()
        self._clock = clock
        self._salt = salt
        self._scheduler = Scheduler(
            SchedulerLimits(limits.max_pass_tokens, limits.max_queue_tokens),
            given.pass_time or FittedPassTime(),
            given.shares,
            given.order,
        )
        self.ahead: ReadAhead | None = None
        if tiers is not None:
            self.ahead = self.reading_ahead(*tiers)
        self._composer = Composer(cache, limits.max_pass_tokens, limits.max_pass_items, self._scheduler.pass_time)
        self._window = given.window or Window()
        self.passes = Passes(
            execute, self, self._composer, cache, self._scheduler, self._window, clock, limits.max_pass_tokens
        )
        self._turns = Turns()
        self._submitted = 0
        self._in_flight = InFlight()
        self._jobs: dict[Ticket, Job] = {}
        self.passes_in_flight = given.passes_in_flight
        self._work = asyncio.Event()
        self._closed = False
        self._gone = asyncio.Event()
        self._reason = ""
        self._loop: asyncio.Task[None] | None = None

    def now(self) -> float:
        """By the batcher's clock, in seconds."""
        return self._clock()

    def reading_ahead(self, tiers: Tiers, rates: Rates) -> ReadAhead:
        """Fetches and keeps for this batcher's cache, once it is set as `ahead`."""
        return ReadAhead(self.cache, tiers, rates, self._scheduler.pass_time, self._limits.max_pass_tokens, self._clock)

    @property
    def max_queue_tokens(self) -> int:
        """Tokens waiting, beyond which submit refuses."""
        return self._limits.max_queue_tokens

    @property
    def queued_tokens(self) -> int:
        """Tokens accepted and not computed yet."""
        return sum(ticket.work.tokens for ticket in self._jobs)

    @property
    def shares(self) -> FairShares:
        """The tenants' shares of the device."""
        return self._scheduler.shares

    @property
    def unanswered(self) -> int:
        """Accepted requests that have no answer yet. Any thread may ask."""
        return len(self._jobs)

    async def failed(self) -> str:
        """Returns, with the reason, once the device is taken to be gone; until then it waits."""
        await self._gone.wait()
        return self._reason

    def admit_bytes(self, size: int, asked: Asked, deadline: float | None, texts: TextsAhead = NOTHING_AHEAD) -> None:
        """A first look at a request of so many bytes, before it is tokenised. texts: that are tokenised before it.

        Raises Expired where its deadline has come, NotAdmitted where it hardly could be in time.
        """
        self._refuse_closed()
        now = self._clock()
        refuse_expired(deadline, now)
        ticket = Ticket(asked.tenant, asked.priority, now, deadline, asked.partial)
        try:
            self._scheduler.admit_bytes(ticket, size, list(self._jobs), self.passes.end(now), now, texts)
        except NotAdmitted as error:
            self.observer.refused(error.reason)
            raise

    def learn_size(self, size: int, tokens: int) -> None:
        """What a request's bytes turned out to be in tokens."""
        self._scheduler.learn_size(size, tokens)

    async def submit(
        self,
        request: TokenizedRequest,
        deadline: float | None = None,
        chain: Chain | None = None,
        coming: Callable[[Lease], None] | None = None,
    ) -> RequestScores:
        """Scores a request. deadline: in the clock's seconds; chain: its prefix's, where the caller has it. Cancelling
        the caller's task drops what is not running.

        coming: is told when a pass that computes its prefix begins, with a lease of its own, to be released by whoever
        is told. From the loop's next turn on, what is given to the device finds the K/V in these pages; whether it is
        sound is known once the request is answered.

        Raises StrategyError, NotAdmitted, Expired, Closed or DeviceFailed.
        """
        job = self._accept(request, self.chain(request) if chain is None else chain, deadline)
        job.coming = coming
        self._submitted += 1
        self._jobs[job.ticket] = job
        self._in_flight.join(job)
        try:
            self._count(job)
            self._read_ahead(job)
            self._work.set()
            if self._loop is None:
                self._loop = asyncio.create_task(self._run())
            return await self._ended(job)
        except asyncio.CancelledError:
            self._left_alone(job)
            raise
        finally:
            self._leave(job)

    def _read_ahead(self, job: Job) -> None:
        """Where a tier has the prefix sooner than it could be computed, the job waits for it."""
        if self.ahead is None or job.naive:
            return
        job.fetching = self.ahead.bring(job.chain)
        if job.fetching is not None:
            job.fetching.add_done_callback(lambda _: self._work.set())

    def _refuse_closed(self) -> None:
        if self._closed or self._gone.is_set():
            raise Closed("the service is stopping")

    def _accept(self, request: TokenizedRequest, chain: Chain, deadline: float | None) -> Job:
        self._refuse_closed()
        items, places = fold(request.items)
        distinct = request if items is request.items else replace(request, items=items)
        cached = self.cache.hit(chain)
        choice = choose(distinct, items, self.policy, cached)
        done: asyncio.Future[RequestScores] = asyncio.get_running_loop().create_future()
        now = self._clock()
        self._refuse_late(deadline, now)
        ticket = Ticket(request.tenant, request.priority, now, deadline, request.partial_ok)
        job = Job(distinct, items.lengths.tolist(), places, choice, chain, ticket, done)
        ticket.work = Work.sums(len(request.prefix), cached, len(items), len(items.ids), items.squares, job.naive)
        self._window.arrived(now)
        try:
            self._scheduler.admit(ticket, list(self._jobs), self.passes.end(now), now)
        except NotAdmitted as error:
            self.observer.refused(error.reason)
            raise
        return job

    def _refuse_late(self, deadline: float | None, now: float) -> None:
        """Its deadline came since the first look at it, so it counts as missed."""
        try:
            refuse_expired(deadline, now)
        except Expired:
            self.observer.missed()
            raise

    def chain(self, request: TokenizedRequest) -> Chain:
        """The request's prefix as the cache knows it."""
        return self.cache.chain(self._salt + b"\0" + request.tenant.encode(), request.prefix)

    async def _ended(self, job: Job) -> RequestScores:
        if job.ticket.deadline is None:
            return await job.done
        try:
            async with asyncio.timeout(job.ticket.deadline - self._clock()):
                return await job.done
        except TimeoutError:
            return self._late(job)

    def _late(self, job: Job) -> RequestScores:
        """What there is at the deadline. Raises Expired where the caller did not ask for a part."""
        if job.ticket.partial and not job.left:
            return job.answer(self._clock())  # the last score came at the same moment
        self._missed(job)
        if job.ticket.partial:
            return job.answer(self._clock())
        raise Expired("the deadline came before this request's scores")

    def _left_alone(self, job: Job) -> None:
        if job.ticket.went_late(self._clock()):
            self._missed(job)
        else:
            self.observer.cancelled()

    def _missed(self, job: Job) -> None:
        """Counts it once, whoever notices first: who waits for it, the loop, or its caller's own clock."""
        if not job.missed:
            job.missed = True
            self.observer.missed()

    def _leave(self, job: Job) -> None:
        self._jobs.pop(job.ticket, None)
        self._scheduler.left(job.ticket, self._jobs, self._clock())
        if not self.passes.has(job):
            self._composer.drop(job)
        if heirs := self._in_flight.leave(job):
            computing = self.passes.computing()
            for heir in heirs:
                self._count(heir, computing.get(heir))

    async def drain(self) -> None:
        """Accepts nothing more and returns when everything accepted is answered and no pass runs."""
        self._closed = True
        while (self._jobs or self.passes.running) and not self._gone.is_set():
            await asyncio.sleep(0.01)
        if self.ahead is not None:
            await self.ahead.settle()
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        await self.passes.cancel()

    async def _run(self) -> None:
        try:
            while not self._gone.is_set():
                if not self._jobs or len(self.passes) == self.passes_in_flight:
                    await self._something()
                    continue
                self._drop_expired()
                if wait := self._open_for():
                    await asyncio.sleep(wait)
                elif self._turns.worth_trying():
                    await self._let_in()
                if parts := self._compose():
                    self.passes.start(parts)
                    await asyncio.sleep(0)  # the device gets it before the next one is thought of
                elif self._jobs:  # all that waits is in a running pass, or its prefix on its way from a tier
                    await self._something()
        except Exception as error:
            self.give_up(f"the batcher itself failed: {error!r}")  # or every caller would wait for ever
            raise

    async def _something(self) -> None:
        """Waits until a request came or a pass ended."""
        self._work.clear()
        await self._work.wait()

    async def _let_in(self) -> None:
        """Turns of the event loop, as long as some bring another request."""
        until, before, idle = self._clock() + min(LET_IN_SECONDS, max(self._slack(), 0.0)), self._submitted, 0
        while idle < IDLE_TURNS and self._clock() < until and self.queued_tokens < self._limits.max_pass_tokens:
            seen = self._submitted
            await asyncio.sleep(0)
            idle = idle + 1 if self._submitted == seen else 0
        self._turns.brought(self._submitted - before)

    def _slack(self) -> float:
        """How long the most urgent request may be kept, in seconds."""
        now = self._clock()
        return min((t.deadline - now - 2 * t.seconds for t in self._jobs if t.deadline is not None), default=math.inf)

    def _open_for(self) -> float:
        """Seconds that the batch stays open for others to join."""
        now, slack = self._clock(), self._slack()
        return self._window.seconds(self.queued_tokens, self._limits.max_pass_tokens, slack, now)

    def _drop_expired(self) -> None:
        now = self._clock()
        for ticket, job in list(self._jobs.items()):
            if ticket.deadline is not None and now >= ticket.deadline:
                try:
                    self._end(job, self._late(job))
                except Expired as error:
                    self._fail(job, error)

    def hand_out(self, parts: Sequence[Part], scored: Mapping[int, Sequence[Scored]]) -> None:
        """A pass ended. scored: of each part's items, by its number."""
        for number, part in enumerate(parts):
            for job in self._in_flight.scored(part.job, part.group.items, scored[number]):
                self._end(job, job.answer(self._clock()))
        self._drop_left(parts)

    def fail(self, parts: Sequence[Part], error: BaseException) -> None:
        """A pass failed, and with it the requests that it had a part of."""
        for part in parts:
            if part.job.ticket in self._jobs:
                failure = DeviceFailed(f"{type(error).__name__} in the forward pass")
                failure.__cause__ = error
                self._fail(part.job, failure)
        self._drop_left(parts)

    def pass_ended(self) -> None:
        """There is room for another pass."""
        self._work.set()

    def _end(self, job: Job, answer: RequestScores) -> None:
        self._jobs.pop(job.ticket, None)
        if not job.done.done():
            job.done.set_result(answer)

    def _fail(self, job: Job, error: BatchingError) -> None:
        self._leave(job)
        if not job.done.done():
            job.done.set_exception(error)

    def _count(self, job: Job, computing: Work | None = None) -> None:
        """Counts again what is to be done for a request: the cache and other requests change it."""
        job.ticket.work = job.work(self._composer.cached(job))
        self._scheduler.estimate(job.ticket, computing)

    def _compose(self) -> Sequence[Part]:
        """The next pass: whose turn comes first, as much as its budget holds."""
        now, computing = self._clock(), self.passes.computing()
        for ticket in islice(self._scheduler.order(self._jobs, now), ESTIMATED):
            self._count(self._jobs[ticket], computing.get(self._jobs[ticket]))
        order = (self._jobs[ticket] for ticket in self._scheduler.order(self._jobs, now))
        writing = [part.job for part in self.passes.running if not part.job.prefix_written]
        parts = self._composer.compose((job for job in order if not any(job is other for other in writing)), now)
        for part in parts:
            self._scheduler.begun(part.job.ticket, part.work)
            self._scheduler.estimate(part.job.ticket, part.work + computing.get(part.job, Work()))
        return parts

    def _drop_left(self, parts: Iterable[Part]) -> None:
        """Lets go of the pages of those that ended, or whose callers went away while they ran, and of pages that may be
        spoiled; but not while another pass uses them."""
        running = {part.job for part in self.passes.running}
        writing = self.passes.writing() if self.ahead is not None else set()
        for job in (part.job for part in parts if part.job not in running):
            if job.ticket not in self._jobs:
                if self.ahead is not None and job.lease is not None:
                    self.ahead.keep(job.lease, writing)
                self._composer.drop(job)
            elif job.lease is not None and job.lease.withdrawn:
                self._composer.drop(job)

    def give_up(self, reason: str) -> None:
        """Nothing runs any more: whoever waits is told."""
        self._reason = reason
        self._gone.set()
        for job in list(self._jobs.values()):
            self._fail(job, Closed("the device is gone"))
