"""The calls under way, whatever protocol they came by: each is counted once, and ends with a status."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid

import grpc

from batching.scheduler import CALLERS_CLOCK, CALLERS_CLOCK_SECONDS
from prefixrank.v1 import scorer_pb2 as pb
from scorer.access import ANYONE, Caller
from scorer.access_log import log_refused
from scorer.metrics import Metrics
from scorer.refusal import Refusal, refusal_of, status_code

log = logging.getLogger(__name__)

NOTHING_TOLD = pb.ScoreRequest()


class Calls:
    """Counts them.

    in_flight  calls that have begun and not ended
    """

    def __init__(self, metrics: Metrics) -> None:
        self.in_flight = 0
        self._metrics = metrics
        self._last = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """One begins. It must leave."""
        self.in_flight += 1
        self._last = time.monotonic()
        self._idle.clear()
        self._metrics.in_flight.inc()

    def leave(self, code: grpc.StatusCode) -> None:
        """One ended so."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(code.name).inc()

    def refused(self, code: grpc.StatusCode, caller: Caller = ANYONE, told: pb.ScoreRequest = NOTHING_TOLD) -> None:
        """Counts and logs a scoring call that was refused before it began. told: what is known of it."""
        self._metrics.requests.labels(code.name).inc()
        log_refused(told, code, caller)

    async def idle(self) -> None:
        """Returns once no call is under way."""
        await self._idle.wait()

    async def quiet(self, seconds: float, at_most: float) -> None:
        """Returns once no call has come for so long; callers need a moment to see that the service stops."""
        end = time.monotonic() + at_most
        while (now := time.monotonic()) < end and now - self._last < seconds:
            await asyncio.sleep(seconds / 4)

    def refusal(self, error: Exception) -> Refusal:
        """What the caller is told of it."""
        code = status_code(error)
        if code is None:
            return Refusal(grpc.StatusCode.INTERNAL, self.internal(error))
        return refusal_of(error, code)

    def internal(self, error: Exception) -> str:
        """Logs and counts an error of our own making; what the caller is told of it."""
        error_id = uuid.uuid4().hex[:12]
        self._metrics.internal_errors.inc()
        log.error("internal error error_id=%s", error_id, exc_info=error)
        return f"internal error, id {error_id}"


def cancelled(remaining: float | None, elapsed: float) -> grpc.StatusCode:
    """What a call ended by that was cancelled after `elapsed` of the seconds it had: by its deadline, or its caller."""
    if remaining is None or elapsed < remaining - max(remaining * CALLERS_CLOCK, CALLERS_CLOCK_SECONDS):
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.DEADLINE_EXCEEDED
