"""Many requests on one call: reads them as they come, answers each when it is done."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from prefixrank.v1 import scorer_pb2 as pb
from scorer.errors import Violation
from scorer.refusal import Refused
from scorer.undecodable import Undecodable

MAX_TIMEOUT_SECONDS = 1e6  # eleven days; who wants no deadline says 0
MAX_UNDER_WAY = 256  # requests of one stream: with more, it is not read on until some are answered


Call = Callable[[pb.ScoreRequest | Undecodable, float | None], Awaitable[pb.ScoreResponse]]  # raises Refused


async def answers(
    requests: AsyncIterator[pb.ScoreStreamRequest | Undecodable], remaining: Callable[[], float | None], call: Call
) -> AsyncGenerator[pb.ScoreStreamResponse, None]:
    """The answers to all of these requests, each when it is done.

    remaining: seconds until the deadline of the stream itself. Closing the iterator cancels what is under way. Where
    `requests` raises Refused, what it gave before is answered, and then it is raised.
    """
    stream = _Stream(remaining, call)
    reading = asyncio.create_task(stream.read(requests))
    try:
        while (response := await stream.next()) is not None:
            yield response
        await reading  # raises what ended the reading
    finally:
        await stream.cancel(reading)


class _Stream:
    """The requests of one call that are under way."""

    def __init__(self, remaining: Callable[[], float | None], call: Call) -> None:
        self._remaining = remaining
        self._call = call
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: set[str] = set()
        self._room = asyncio.Semaphore(MAX_UNDER_WAY)
        self._answered: asyncio.Queue[pb.ScoreStreamResponse | None] = asyncio.Queue()

    async def read(self, requests: AsyncIterator[pb.ScoreStreamRequest | Undecodable]) -> None:
        """Starts each request as it comes; after the last one waits for all. Raises Refused where `requests` does."""
        refused: Refused | None = None
        try:
            try:
                async for message in requests:
                    await self._room.acquire()
                    self._start(message)
            except Refused as error:
                refused = error
            await asyncio.gather(*self._tasks)
        finally:
            self._answered.put_nowait(None)
        if refused is not None:
            raise refused

    async def next(self) -> pb.ScoreStreamResponse | None:
        """The next answer; None after the last."""
        response = await self._answered.get()
        self._room.release()
        return response

    async def cancel(self, reading: asyncio.Task[None]) -> None:
        """Stops everything that is under way."""
        left = [reading, *self._tasks]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _start(self, message: pb.ScoreStreamRequest | Undecodable) -> None:
        asked = message if isinstance(message, Undecodable) else self._checked(message)
        request_id = "" if isinstance(message, Undecodable) else message.request.request_id
        if isinstance(asked, Undecodable) and request_id in self._under_way:
            request_id = ""  # under that id the first one is answered
        seconds = self._remaining()
        if not isinstance(message, Undecodable) and message.timeout_seconds > 0:
            seconds = min(message.timeout_seconds, math.inf if seconds is None else seconds)
        task = asyncio.create_task(self._answer(request_id, asked, seconds))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _checked(self, message: pb.ScoreStreamRequest) -> pb.ScoreRequest | Undecodable:
        problem = self._problem(message.request.request_id, message.timeout_seconds)
        if problem is not None:
            return Undecodable(problem, message.request)
        self._under_way.add(message.request.request_id)
        return message.request

    def _problem(self, request_id: str, timeout: float) -> Violation | None:
        if not request_id:
            return Violation("request.request_id", "", "not empty: answers are matched by it")
        if request_id in self._under_way:
            return Violation("request.request_id", repr(request_id), "of no request still under way")
        if not 0 <= timeout <= MAX_TIMEOUT_SECONDS:
            return Violation("timeout_seconds", str(timeout), f"between 0 and {MAX_TIMEOUT_SECONDS:g}")
        return None

    async def _answer(self, request_id: str, asked: pb.ScoreRequest | Undecodable, seconds: float | None) -> None:
        response = pb.ScoreStreamResponse(request_id=request_id)
        try:
            response.response.CopyFrom(await self._call(asked, seconds))
        except Refused as refused:
            response.error.MergeFromString(refused.refusal.status().SerializeToString())
        if not isinstance(asked, Undecodable):
            self._under_way.discard(request_id)
        self._answered.put_nowait(response)
