"""One call over several queries, as pairs of texts ask for: scored side by side, told as one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from prefixrank.v1 import scorer_pb2 as pb
from scorer.config import Limits
from scorer.errors import InvalidRequest, Violation

MAX_UNDER_WAY = 256  # queries of one call: the others wait

Score = Callable[[pb.ScoreRequest], Awaitable[pb.ScoreResponse]]


class Part(NamedTuple):
    """What a call asks of one query. places: of its documents in the call, at least one."""

    query: str
    places: Sequence[int]


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
