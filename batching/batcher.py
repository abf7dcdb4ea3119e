"""Collects requests, runs them pass after pass on the injected device, and hands each its own scores."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from attention.layout import Ints
from attention.plans import Strategy
from batching.packing import Group, fold, pack, unpack
from batching.page_pool import PagePool
from batching.select import Choice, Policy, Waiting, choose, take
from batching.types import Item, PackedBatch, Reads, RequestScores, Scored, TokenizedRequest

Execute = Callable[[PackedBatch], Awaitable[Reads]]
FAILURES_IN_A_ROW = 3  # failed passes after which the device is taken to be gone
FIRST_RATE = 2000.0  # tokens/s that the device is taken to compute until it has shown its own rate

PRIORITY_SECONDS = 10.0  # how much earlier a class has its turn than the class below it


class BatchingError(Exception):
    """Base of what `Batcher.submit` raises."""


class QueueFull(BatchingError):
    """More tokens wait than the service accepts."""


class Expired(BatchingError):
    """The deadline came before the scores."""


class Closed(BatchingError):
    """The batcher accepts nothing any more."""


class DeviceFailed(BatchingError):
    """The pass that this request was part of failed."""


@dataclass(frozen=True, slots=True)
class BatcherLimits:
    """max_pass_tokens, max_pass_items: computed by one pass; max_queue_tokens: waiting, beyond which submit refuses."""

    max_pass_tokens: int
    max_pass_items: int
    max_queue_tokens: int
    page_size: int


@dataclass(slots=True, eq=False)
class _Job:
    """One accepted request. Its items are distinct; `places` maps the request's items to them.

    turn  when it would be done had it the device to itself: requests run in this order, so that a short one passes a
          long one, and a long one that has waited as much longer as it takes is passed by no one
    """

    request: TokenizedRequest
    lengths: tuple[int, ...]  # tokens of each item
    places: Ints
    choice: Choice
    deadline: float | None
    submitted: float
    turn: float
    done: asyncio.Future[RequestScores]
    pages: Ints | None = None
    cached: bool = False
    scored: list[Scored] = field(default_factory=list)
    computed: int = 0
    passes: int = 0
    plan_seconds: float = 0.0
    forward_seconds: float = 0.0

    @property
    def remaining(self) -> tuple[Item, ...]:
        return self.request.items[len(self.scored) :]

    @property
    def naive(self) -> bool:
        return self.choice.strategies[0] is Strategy.NAIVE

    def waiting(self) -> Waiting:
        prefix = 0 if self.cached else len(self.request.prefix)
        return Waiting(prefix, self.lengths[len(self.scored) :], self.naive)

    def tokens(self) -> int:
        waiting = self.waiting()
        return sum(waiting.items) + waiting.prefix * (len(waiting.items) if self.naive else 1)


class Batcher:
    """Runs accepted requests to their end: each gets its scores or one of the errors above. Lives on one event loop."""

    def __init__(
        self,
        execute: Execute,
        limits: BatcherLimits,
        policy: Policy,
        pool: PagePool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._execute = execute
        self._limits = limits
        self.policy = policy
        self._pool = pool
        self._clock = clock
        self._queue: list[_Job] = []
        self._work = asyncio.Event()
        self._closed = False
        self._rate = FIRST_RATE
        self._failures = 0
        self._pass: Sequence[_Job] = ()  # whose pages the device is using
        self._gone = asyncio.Event()
        self._reason = ""
        self._loop: asyncio.Task[None] | None = None

    @property
    def queued_tokens(self) -> int:
        """Tokens accepted and not computed yet."""
        return sum(job.tokens() for job in self._queue)

    async def failed(self) -> str:
        """Returns, with the reason, once the device is taken to be gone; until then it waits."""
        await self._gone.wait()
        return self._reason

    async def submit(self, request: TokenizedRequest, deadline: float | None = None) -> RequestScores:
        """Scores a request. deadline: in the clock's seconds. Cancelling the caller's task drops what is not running.

        Raises StrategyError, QueueFull, Expired, Closed or DeviceFailed.
        """
        if self._closed or self._gone.is_set():
            raise Closed("the service is stopping")
        job = self._accept(request, deadline)
        self._queue.append(job)
        self._work.set()
        if self._loop is None:
            self._loop = asyncio.create_task(self._run())
        try:
            return await job.done
        finally:
            self._leave(job)

    def _accept(self, request: TokenizedRequest, deadline: float | None) -> _Job:
        items, places = fold(request.items)
        distinct = replace(request, items=items)
        choice = choose(distinct, items, self.policy)
        done: asyncio.Future[RequestScores] = asyncio.get_running_loop().create_future()
        now = self._clock()
        job = _Job(distinct, tuple(len(item.ids) for item in items), places, choice, deadline, now, now, done)
        tokens = job.tokens()
        job.turn += tokens / self._rate - PRIORITY_SECONDS * request.priority
        queued, limit = self.queued_tokens, self._limits.max_queue_tokens
        if queued and queued + tokens > limit:  # an idle service takes whatever a request may ask
            raise QueueFull(f"{queued} tokens wait and this request has {tokens}: the limit is {limit}")
        return job

    def _leave(self, job: _Job) -> None:
        if job in self._queue:
            self._queue.remove(job)
        self._release(job)

    def _release(self, job: _Job) -> None:
        if job.pages is not None and not self._running(job):
            self._pool.release(job.pages)
            job.pages = None

    def _running(self, job: _Job) -> bool:
        return any(job is running for running in self._pass)

    async def drain(self) -> None:
        """Accepts nothing more and returns when everything accepted is answered."""
        self._closed = True
        while self._queue and not self._gone.is_set():
            await asyncio.sleep(0.01)
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while not self._gone.is_set():
                if not self._queue:
                    self._work.clear()
                    await self._work.wait()
                self._drop_expired()
                if self._queue:
                    await self._one_pass()
        except Exception as error:
            self._give_up(f"the batcher itself failed: {error!r}")  # or every caller would wait for ever
            raise

    def _drop_expired(self) -> None:
        now = self._clock()
        for job in list(self._queue):
            if job.deadline is not None and now >= job.deadline:
                self._fail(job, Expired("the deadline came before this request's turn"))

    def _fail(self, job: _Job, error: BatchingError) -> None:
        self._queue.remove(job)
        if not job.done.done():
            job.done.set_exception(error)

    def _compose(self) -> list[tuple[_Job, Group]]:
        """The next pass: whose turn comes first, as much as its budget holds."""
        queue = sorted(self._queue, key=lambda job: job.turn)
        counts = take([job.waiting() for job in queue], self._limits.max_pass_tokens, self._limits.max_pass_items)
        return [(job, self._group(job, count)) for job, count in zip(queue, counts, strict=True) if count]

    def _group(self, job: _Job, count: int) -> Group:
        first = len(job.scored)
        last = first + count
        prefix = len(job.request.prefix)
        if last < len(job.request.items) and prefix and not job.naive and job.pages is None:
            job.pages = self._pool.allocate(-(-prefix // self._limits.page_size))  # None: computed once more
        return Group(
            job.request,
            tuple(range(first, last)),
            job.choice.strategies[first:last],
            prefix if job.cached else 0,
            job.pages,
            job.choice.packed_rows,
        )

    async def _one_pass(self) -> None:
        started = self._clock()
        composed = self._compose()
        jobs = self._pass = [job for job, _ in composed]
        try:
            batch = pack([group for _, group in composed])
            packed = self._clock() - started
            reads = await self._execute(batch)
            scored = unpack(batch, reads)
        except Exception as error:  # noqa: BLE001 - whatever it was, it fails this pass and no other
            self._pass = ()
            self._failed_pass(jobs, error)
            return
        self._pass = ()
        self._failures = 0
        self._learn_rate(batch.tokens, self._clock() - started)
        for number, (job, group) in enumerate(composed):
            job.plan_seconds += packed + reads.plan_seconds
            job.forward_seconds += reads.forward_seconds
            self._advance(job, group, [scored[number, item] for item in group.items])

    def _learn_rate(self, tokens: int, seconds: float) -> None:
        if seconds > 0:
            self._rate += 0.2 * (tokens / seconds - self._rate)

    def _failed_pass(self, jobs: Sequence[_Job], error: Exception) -> None:
        self._failures += 1
        for job in jobs:
            if job in self._queue:
                failure = DeviceFailed(f"{type(error).__name__} in the forward pass")
                failure.__cause__ = error
                self._fail(job, failure)
            self._release(job)
        if self._failures >= FAILURES_IN_A_ROW:
            self._give_up(f"{FAILURES_IN_A_ROW} passes in a row failed")

    def _give_up(self, reason: str) -> None:
        """Nothing runs any more: whoever waits is told."""
        self._reason = reason
        self._gone.set()
        for job in list(self._queue):
            self._fail(job, Closed("the device is gone"))

    def _advance(self, job: _Job, group: Group, scored: list[Scored]) -> None:
        waiting = job.waiting()
        job.computed += sum(waiting.items[: len(scored)]) + waiting.prefix * (len(scored) if job.naive else 1)
        job.scored += scored
        job.passes += 1
        job.cached = job.cached or group.pages is not None
        if job not in self._queue:  # cancelled while it ran
            self._release(job)
            return
        if not job.remaining:
            self._queue.remove(job)
            if not job.done.done():
                job.done.set_result(self._answer(job))

    def _answer(self, job: _Job) -> RequestScores:
        elapsed = self._clock() - job.submitted
        return RequestScores(
            scored=tuple(job.scored[place] for place in job.places),
            reason=job.choice.reason,
            computed_tokens=job.computed,
            cached_prefix_tokens=0,
            passes=job.passes,
            queue_seconds=max(0.0, elapsed - job.plan_seconds - job.forward_seconds),
            plan_seconds=job.plan_seconds,
            forward_seconds=job.forward_seconds,
        )
