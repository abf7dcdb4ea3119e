"""Passes on the device: given to it, waited for, and what came of them told to whoever queues the requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from batching.composer import Composer, Part
from batching.errors import DeviceGone
from batching.job import Job
from batching.observer import Observer
from batching.packing import pack, unpack
from batching.pass_time import Work
from batching.prefix_cache import PrefixCache
from batching.runs import Run
from batching.scheduler import Scheduler
from batching.types import PackedBatch, Reads, Scored
from batching.window import Window

# A pass is enqueued before its awaitable first waits: whatever the device is given later runs later.
Execute = Callable[[PackedBatch], Awaitable[Reads]]
FAILURES_IN_A_ROW = 3  # failed passes after which the device is taken to be gone


class Requests(Protocol):
    """Whoever queues the requests that passes are composed of."""

    observer: Observer

    def hand_out(self, parts: Sequence[Part], scored: Mapping[int, Sequence[Scored]]) -> None:
        """A pass ended. scored: of each part's items, by its number."""

    def fail(self, parts: Sequence[Part], error: BaseException) -> None:
        """A pass failed."""

    def pass_ended(self) -> None:
        """There is room for another pass."""

    def give_up(self, reason: str) -> None:
        """The device is gone: no pass will run any more."""


class Passes:
    """Those that the device has. Lives on the event loop of its requests.

    running  the parts of all of them: whose pages the device is using
    """

    def __init__(
        self,
        execute: Execute,
        requests: Requests,
        composer: Composer,
        cache: PrefixCache,
        scheduler: Scheduler,
        window: Window,
        clock: Callable[[], float],
        max_pass_tokens: int,
    ) -> None:
        self.execute = execute
        self.running: list[Part] = []
        self._requests = requests
        self._composer = composer
        self._cache = cache
        self._scheduler = scheduler
        self._window = window
        self._clock = clock
        self._max_pass_tokens = max_pass_tokens
        self._tasks: set[asyncio.Task[None]] = set()
        self._free_at = self._ended_at = -math.inf
        self._failures = 0

    def __len__(self) -> int:
        """Passes that the device has, or whose scores are being handed out."""
        return len(self._tasks)

    def start(self, parts: Sequence[Part]) -> None:
        """Gives the device a pass, in the loop's next turn."""
        self.running += parts
        running = asyncio.create_task(self._run(parts))
        self._tasks.add(running)
        running.add_done_callback(self._ended)

    def has(self, job: Job) -> bool:
        """Whether a part of it runs."""
        return any(part.job is job for part in self.running)

    def writing(self) -> set[Run]:
        """What the device writes at the moment, though another pass may have written the same already."""
        leases = ((part.job.lease, part.group.cached) for part in self.running)
        return {run for lease, read in leases if lease is not None for run in lease.behind(read)}

    def computing(self) -> dict[Job, Work]:
        """What the device computes of requests at the moment, beside what counts as cached."""
        works: dict[Job, Work] = {}
        for part in self.running:
            job = part.job
            works[job] = works.get(job, Work()) + part.beside(self._composer.cached(job))
        return works

    def end(self, now: float) -> float:
        """When what runs is expected to end."""
        return self._free_at if self.running else now

    async def cancel(self) -> None:
        """Waits for no pass any longer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, running: asyncio.Task[None]) -> None:
        self._tasks.discard(running)
        self._requests.pass_ended()
        if not running.cancelled() and (error := running.exception()) is not None:
            self._requests.give_up(f"the batcher itself failed: {error!r}")

    async def _run(self, parts: Sequence[Part]) -> None:
        began = self._clock()
        work = sum((part.work for part in parts), Work())
        starts = began if len(self._tasks) < 2 else max(began, self._free_at)  # behind the pass that runs
        self._free_at = starts + self._scheduler.pass_time.share(work, max(work.tokens, 1))
        try:
            batch = pack([part.group for part in parts], self._cache.page_size)
            packed = self._clock() - began
            self._tell(parts)
            reads = await self.execute(batch)
            scored = unpack(batch, reads)
        except (Exception, asyncio.CancelledError) as error:  # whatever it was, it fails this pass and no other
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            self._not_running(parts)
            self._failed(parts, error)
            return
        self._not_running(parts)
        seconds = self._ran(batch, began)
        self._composer.finish(parts, _sound(reads, batch))
        for part in parts:
            _charge(part, packed + reads.plan_seconds, reads.forward_seconds)
        self._requests.hand_out(parts, scored)
        # Behind the replies, which are what callers wait for.
        asyncio.get_running_loop().call_soon(self._scheduler.pass_time.learn, work, seconds)

    def _tell(self, parts: Sequence[Part]) -> None:
        """Those who wait for no more than that a prefix is on its way."""
        for job in (part.job for part in parts):
            if job.coming is not None and job.lease is not None and job.lease.tokens == len(job.request.prefix):
                job.coming(self._cache.held_again(job.lease))
                job.coming = None

    def _not_running(self, parts: Sequence[Part]) -> None:
        self.running = [part for part in self.running if not any(part is ended for ended in parts)]

    def _ran(self, batch: PackedBatch, began: float) -> float:
        """The seconds that the device took for it."""
        ended = self._clock()
        began = max(began, self._ended_at)  # it had to wait for the one before it
        self._failures, self._ended_at = 0, ended
        self._window.ran(began, ended)
        requests = len(set(batch.shares.requests))
        self._requests.observer.ran(batch.tokens, batch.tokens / self._max_pass_tokens, requests)
        return ended - began

    def _failed(self, parts: Sequence[Part], error: BaseException) -> None:
        self._failures += 1
        self._composer.finish(parts, sound=False)
        self._requests.fail(parts, error)
        if isinstance(error, DeviceGone):
            self._requests.give_up(str(error))
        elif self._failures >= FAILURES_IN_A_ROW:
            self._requests.give_up(f"{FAILURES_IN_A_ROW} passes in a row failed")


def _charge(part: Part, plan_seconds: float, forward_seconds: float) -> None:
    job = part.job
    job.computed += part.work.tokens
    job.passes += 1
    job.plan_seconds += plan_seconds
    job.forward_seconds += forward_seconds


def _sound(reads: Reads, batch: PackedBatch) -> bool:
    """Whether all that was read is finite. Where it is not, NaN may have spread to prefix pages, so none are kept."""
    return bool(np.isfinite(reads.logits).all() and np.isfinite(reads.lse[batch.normalize]).all())
