"""One call over several queries, as pairs of texts ask for: scored side by side, told as one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from batching.errors import NotAdmitted
from batching.types import RequestScores, TokenizedRequest
from prefixrank.v1 import scorer_pb2 as pb
from scorer.config import Limits
from scorer.errors import InvalidRequest, Violation

MAX_UNDER_WAY = 256  # queries of one call: the others wait

QUEUE_PART = 0.5  # of the queue that one call may fill: who comes meanwhile finds room

Score = Callable[[pb.ScoreRequest], Awaitable[pb.ScoreResponse]]
Submit = Callable[[TokenizedRequest, float | None], Coroutine[Any, Any, RequestScores]]


class Part(NamedTuple):
    """What a call asks of one query. places: of its documents in the call, at least one."""

    query: str
    places: Sequence[int]


class Entrance:
    """Where the parts of one call go into the queue, one after the other: none is refused for what stands there of the
    same call, but waits until some of it is done."""

    def __init__(self, submit: Submit, queue_tokens: int) -> None:
        """submit: refuses, if it does, before it first waits."""
        self._submit = submit
        self._most = queue_tokens * QUEUE_PART
        self._turn = asyncio.Lock()
        self._inside: dict[asyncio.Task[RequestScores], int] = {}

    async def submit(self, request: TokenizedRequest, deadline: float | None) -> RequestScores:
        """Its scores. Raises what the given submit does, NotAdmitted only where nothing of the call is inside."""
        async with self._turn:
            task = await self._entered(request, deadline)
        return await task

    async def _entered(self, request: TokenizedRequest, deadline: float | None) -> asyncio.Task[RequestScores]:
        while True:
            while self._inside and sum(self._inside.values()) + request.tokens > self._most:
                await self._one_done()
            task = asyncio.create_task(self._submit(request, deadline))
            try:
                await asyncio.sleep(0)  # it begins
            except asyncio.CancelledError:
                task.cancel()
                raise
            if not (self._inside and task.done() and isinstance(task.exception(), NotAdmitted)):
                self._inside[task] = request.tokens
                task.add_done_callback(self._inside.pop)
                return task
            await self._one_done()

    async def _one_done(self) -> None:
        await asyncio.wait(self._inside, return_when=asyncio.FIRST_COMPLETED)


async def score_together(
    whole: pb.ScoreRequest, parts: Sequence[Part], limits: Limits, score: Score
) -> pb.ScoreResponse:
    """The results of all of the call's documents in its order. Its timings are those of the part that took longest.

    Raises what the first part to fail does; the others are cancelled then, as they are with the call.
    """
    if (count := len(whole.documents)) > limits.max_documents:
        raise InvalidRequest.of("documents", f"between 1 and {limits.max_documents} documents", count)
    room = asyncio.Semaphore(MAX_UNDER_WAY)

    async def one(part: Part) -> pb.ScoreResponse:
        async with room:
            return await _score(whole, part, score)

    tasks = [asyncio.ensure_future(one(part)) for part in parts]
    try:
        return _merged(whole, parts, await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _score(whole: pb.ScoreRequest, part: Part, score: Score) -> pb.ScoreResponse:
    asked = pb.ScoreRequest(
        request_id=whole.request_id,
        tenant=whole.tenant,
        priority=whole.priority,
        query=pb.QueryPrefix(text=part.query),
        documents=[whole.documents[place] for place in part.places],
        options=whole.options,
    )
    try:
        return await score(asked)
    except InvalidRequest as error:
        raise InvalidRequest([_in_whole(violation, part.places) for violation in error.violations]) from None


def _in_whole(violation: Violation, places: Sequence[int]) -> Violation:
    """Under the name that the field has in the whole call."""
    field = re.sub(r"^documents\[(\d+)]", lambda found: f"documents[{places[int(found[1])]}]", violation.field)
    field = re.sub(r"^query\.text$", f"query.text[{places[0]}]", field)
    return Violation(field, violation.value, violation.limit)


def _merged(whole: pb.ScoreRequest, parts: Sequence[Part], responses: Sequence[pb.ScoreResponse]) -> pb.ScoreResponse:
    slowest = max(responses, key=lambda response: response.timings.total_seconds)
    made = pb.ScoreResponse(
        request_id=whole.request_id,
        timings=slowest.timings,
        model=slowest.model,
        profile=slowest.profile,
        profile_revision=slowest.profile_revision,
        passes=max(response.passes for response in responses),  # the parts may have shared them
    )
    by_place = {}
    for part, response in zip(parts, responses, strict=True):
        for place, result in zip(part.places, response.results, strict=True):
            by_place[place] = result
            result.index = place
        for field in pb.Usage.DESCRIPTOR.fields_by_name:
            setattr(made.usage, field, getattr(made.usage, field) + getattr(response.usage, field))
        made.strategy.shares.extend(response.strategy.shares)
    made.results.extend(by_place[place] for place in sorted(by_place))
    return made
