"""Collects requests, runs them pass after pass on the injected device, and hands each its own scores."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from batching.composer import Composer, Part
from batching.errors import (
    BatchingError,
    Closed,
    DeviceFailed,
    DeviceGone,
    Expired,
    NotAdmitted,
    QueueFull,
    refuse_expired,
)
from batching.job import InFlight, Job
from batching.observer import Observer, Unobserved
from batching.packing import fold, pack, unpack
from batching.pass_time import FittedPassTime, PassTime, Work
from batching.prefix_cache import Chain, Lease, PrefixCache
from batching.scheduler import NOTHING_AHEAD, Asked, Order, Scheduler, SchedulerLimits, TextsAhead, Ticket, by_due
from batching.select import Policy, choose
from batching.shares import FairShares
from batching.tiering import Rates, ReadAhead, Tiers
from batching.types import Ints, Item, PackedBatch, Reads, RequestScores, Scored, TokenizedRequest
from batching.window import Turns, Window

# A pass is enqueued before its awaitable first waits: whatever the device is given later runs later.
Execute = Callable[[PackedBatch], Awaitable[Reads]]
FAILURES_IN_A_ROW = 3  # failed passes after which the device is taken to be gone
LET_IN_SECONDS = 0.01  # that turns of the event loop may take before a pass
IDLE_TURNS = 6  # without a new request: on its way to us a call needs some
HOLD_TRIES = 3  # others may take the pages of a prefix in the moment between its pass and its use
ESTIMATED = 256  # requests at the head of the queue whose work is counted again each tick


# A pass has items: behind a prefix that is computed for later stands this one.
PROBE = Item(np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32))


@dataclass(frozen=True, slots=True)
class Warmed:
    """Tokens of a prefix: cached before, and kept from eviction now."""

    cached: int
    kept: int


@dataclass(frozen=True, slots=True)
class Held:
    """A prefix whose K/V is in pages. cached: tokens that were there before; scores: what computing the others cost.

    Whoever holds must release the lease, by `Batcher.cache`.
    """

    lease: Lease
    cached: int
    scores: RequestScores | None


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
        self._execute = execute
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
        self._turns = Turns()
        self._submitted = 0
        self._in_flight = InFlight()
        self._jobs: dict[Ticket, Job] = {}
        self.passes_in_flight = given.passes_in_flight
        self._running: list[Part] = []  # whose pages the device is using
        self._passes: set[asyncio.Task[None]] = set()
        self._free_at = self._ended_at = -math.inf
        self._work = asyncio.Event()
        self._closed = False
        self._failures = 0
        self._gone = asyncio.Event()
        self._reason = ""
        self._loop: asyncio.Task[None] | None = None

    def reading_ahead(self, tiers: Tiers, rates: Rates) -> ReadAhead:
        """Fetches and keeps for this batcher's cache, once it is set as `ahead`."""
        return ReadAhead(self.cache, tiers, rates, self._scheduler.pass_time, self._limits.max_pass_tokens, self._clock)

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
            self._scheduler.admit_bytes(ticket, size, list(self._jobs), self._device_free(now), now, texts)
        except NotAdmitted as error:
            self.observer.refused(error.reason)
            raise

    def learn_size(self, size: int, tokens: int) -> None:
        """What a request's bytes turned out to be in tokens."""
        self._scheduler.learn_size(size, tokens)

    async def submit(self, request: TokenizedRequest, deadline: float | None = None) -> RequestScores:
        """Scores a request. deadline: in the clock's seconds. Cancelling the caller's task drops what is not running.

        Raises StrategyError, NotAdmitted, Expired, Closed or DeviceFailed.
        """
        return await self._answered(self._accept(request, self.chain(request), deadline))

    async def _answered(self, job: Job) -> RequestScores:
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
        distinct = replace(request, items=items)
        lengths = tuple(len(item.ids) for item in items)
        cached = self.cache.hit(chain)
        choice = choose(distinct, items, self.policy, cached)
        done: asyncio.Future[RequestScores] = asyncio.get_running_loop().create_future()
        now = self._clock()
        self._refuse_late(deadline, now)
        ticket = Ticket(request.tenant, request.priority, now, deadline, request.partial_ok)
        job = Job(distinct, lengths, places, choice, chain, ticket, done)
        ticket.work = Work.of(len(request.prefix), cached, lengths, job.naive)
        self._window.arrived(now)
        try:
            self._scheduler.admit(ticket, list(self._jobs), self._device_free(now), now)
        except NotAdmitted as error:
            self.observer.refused(error.reason)
            raise
        return job

    def _device_free(self, now: float) -> float:
        """When what runs is expected to end."""
        return self._free_at if self._running else now

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

    async def warm(self, prefix: Ints, tenant: str, keep: float, deadline: float | None = None) -> Warmed:
        """Computes a prefix, unless it is cached, and keeps it from eviction for `keep` seconds.

        Raises as submit does.
        """
        request = TokenizedRequest(prefix, (PROBE,), tenant=tenant)
        chain = self.chain(request)
        cached = self.cache.hit(chain)
        if cached < len(prefix):
            await self.submit(request, deadline)
        now = self._clock()
        lease = self.cache.held(chain)
        kept = self.cache.pin(lease, now + keep, now)
        self.cache.release(lease)
        return Warmed(cached, kept)

    async def hold(
        self,
        prefix: Ints,
        asked: Asked,
        deadline: float | None = None,
        coming: Callable[[Lease], None] | None = None,
    ) -> Held:
        """Computes a prefix, unless it is cached, and holds its pages.

        coming: is told when a pass that computes it begins, with a lease of its own, to be released by whoever is told.
        From the loop's next turn on, what is given to the device finds the K/V in these pages; whether it is sound is
        known when this returns a lease of the same blocks.

        Raises as submit does, and QueueFull where the pages are in use by others.
        """
        request = TokenizedRequest(prefix, (PROBE,), tenant=asked.tenant, priority=asked.priority)
        chain = self.chain(request)
        cached, scores = self.cache.hit(chain), None
        for _ in range(HOLD_TRIES):
            there = scores is None and cached == len(prefix)  # its use counts as one, where no pass counts it
            lease = self.cache.acquire(chain, self._clock()) if there else self.cache.held(chain)
            if lease.written == len(prefix):
                return Held(lease, cached, scores)
            self.cache.release(lease)
            job = self._accept(request, chain, deadline)
            job.coming, coming = coming, None
            scores = await self._answered(job)
        raise QueueFull(f"the pages for a prefix of {len(prefix)} tokens are in use")

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
        self._scheduler.left(job.ticket)
        if not any(part.job is job for part in self._running):
            self._composer.drop(job)
        if heirs := self._in_flight.leave(job):
            computing = self._computing()
            for heir in heirs:
                self._count(heir, computing.get(heir))

    async def drain(self) -> None:
        """Accepts nothing more and returns when everything accepted is answered and no pass runs."""
        self._closed = True
        while (self._jobs or self._running) and not self._gone.is_set():
            await asyncio.sleep(0.01)
        if self.ahead is not None:
            await self.ahead.settle()
        if self._loop is not None:
            tasks = [self._loop, *self._passes]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while not self._gone.is_set():
                if not self._jobs or len(self._passes) == self.passes_in_flight:
                    await self._something()
                    continue
                self._drop_expired()
                if wait := self._open_for():
                    await asyncio.sleep(wait)
                elif self._turns.worth_trying():
                    await self._let_in()
                if parts := self._compose():
                    self._start(parts)
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

    def _start(self, parts: Sequence[Part]) -> None:
        self._running += parts
        running = asyncio.create_task(self._one_pass(parts))
        self._passes.add(running)
        running.add_done_callback(self._pass_ended)

    def _pass_ended(self, running: asyncio.Task[None]) -> None:
        self._passes.discard(running)
        self._work.set()
        if not running.cancelled() and (error := running.exception()) is not None:
            self.give_up(f"the batcher itself failed: {error!r}")

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

    def _computing(self) -> dict[Job, Work]:
        """What the device computes of requests at the moment, beside what counts as cached."""
        works: dict[Job, Work] = {}
        for part in self._running:
            job, lengths = part.job, [part.job.lengths[item] for item in part.group.items]
            work = Work.of(len(job.request.prefix), self._composer.cached(job), lengths, job.naive)
            works[job] = works.get(job, Work()) + work
        return works

    def _compose(self) -> Sequence[Part]:
        """The next pass: whose turn comes first, as much as its budget holds."""
        now, computing = self._clock(), self._computing()
        for ticket in islice(self._scheduler.order(self._jobs, now), ESTIMATED):
            self._count(self._jobs[ticket], computing.get(self._jobs[ticket]))
        order = (self._jobs[ticket] for ticket in self._scheduler.order(self._jobs, now))
        writing = [part.job for part in self._running if not part.job.prefix_written]
        parts = self._composer.compose((job for job in order if not any(job is other for other in writing)), now)
        for part in parts:
            self._scheduler.estimate(part.job.ticket, part.work + computing.get(part.job, Work()))
        return parts

    async def _one_pass(self, parts: Sequence[Part]) -> None:
        began = self._clock()
        work = sum((part.work for part in parts), Work())
        starts = began if len(self._passes) < 2 else max(began, self._free_at)  # behind the pass that runs
        self._free_at = starts + self._scheduler.pass_time.share(work, max(work.tokens, 1))
        try:
            batch = pack([part.group for part in parts], self.cache.page_size)
            packed = self._clock() - began
            self._tell(parts)
            reads = await self._execute(batch)
            scored = unpack(batch, reads)
        except (Exception, asyncio.CancelledError) as error:  # whatever it was, it fails this pass and no other
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            self._not_running(parts)
            self._failed_pass(parts, error)
            return
        self._not_running(parts)
        seconds = self._ran(batch, began)
        self._composer.finish(parts, _sound(reads, batch))
        for part in parts:
            self._charge(part, packed + reads.plan_seconds, reads.forward_seconds)
        self._hand_out(parts, scored)
        # Behind the replies, which are what callers wait for.
        asyncio.get_running_loop().call_soon(self._scheduler.pass_time.learn, work, seconds)

    def _tell(self, parts: Sequence[Part]) -> None:
        """Those who wait for no more than that a prefix is on its way."""
        for job in (part.job for part in parts):
            if job.coming is not None and job.lease is not None and job.lease.tokens == len(job.request.prefix):
                job.coming(self.cache.held_blocks(job.lease.blocks))
                job.coming = None

    def _not_running(self, parts: Sequence[Part]) -> None:
        self._running = [part for part in self._running if not any(part is ended for ended in parts)]

    def _ran(self, batch: PackedBatch, began: float) -> float:
        """The seconds that the device took for it."""
        ended = self._clock()
        began = max(began, self._ended_at)  # it had to wait for the one before it
        self._failures, self._ended_at = 0, ended
        self._window.ran(began, ended)
        self.observer.ran(
            batch.tokens, batch.tokens / self._limits.max_pass_tokens, len({s.request for s in batch.shares})
        )
        return ended - began

    def _charge(self, part: Part, plan_seconds: float, forward_seconds: float) -> None:
        job = part.job
        job.computed += part.work.tokens
        job.passes += 1
        job.plan_seconds += plan_seconds
        job.forward_seconds += forward_seconds

    def _hand_out(self, parts: Sequence[Part], scored: dict[tuple[int, int], Scored]) -> None:
        for number, part in enumerate(parts):
            for item in part.group.items:
                for job in self._in_flight.scored(part.job.wanted[item], scored[number, item]):
                    self._end(job, job.answer(self._clock()))
        self._drop_left(parts)

    def _drop_left(self, parts: Iterable[Part]) -> None:
        """Lets go of the pages of those that ended, or whose callers went away while they ran."""
        for part in parts:
            if part.job.ticket not in self._jobs:
                if self.ahead is not None and part.job.lease is not None:
                    self.ahead.keep(part.job.lease)
                self._composer.drop(part.job)

    def _failed_pass(self, parts: Sequence[Part], error: BaseException) -> None:
        self._failures += 1
        self._composer.finish(parts, sound=False)
        for part in parts:
            if part.job.ticket in self._jobs:
                failure = DeviceFailed(f"{type(error).__name__} in the forward pass")
                failure.__cause__ = error
                self._fail(part.job, failure)
        self._drop_left(parts)
        if isinstance(error, DeviceGone):
            self.give_up(str(error))
        elif self._failures >= FAILURES_IN_A_ROW:
            self.give_up(f"{FAILURES_IN_A_ROW} passes in a row failed")

    def give_up(self, reason: str) -> None:
        """Nothing runs any more: whoever waits is told."""
        self._reason = reason
        self._gone.set()
        for job in list(self._jobs.values()):
            self._fail(job, Closed("the device is gone"))


def _sound(reads: Reads, batch: PackedBatch) -> bool:
    """Whether all that was read is finite. Where it is not, NaN may have spread to prefix pages, so none are kept."""
    return bool(np.isfinite(reads.logits).all() and np.isfinite(reads.lse[batch.normalize]).all())
