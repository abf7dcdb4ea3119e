"""One HTTP request asks the service, under its caller, with its deadline, and gives up when the caller does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc
from starlette.requests import Request

from prefixrank.v1 import scorer_pb2 as pb
from scorer.access import ANYONE, Caller
from scorer.errors import InvalidRequest, Unavailable
from scorer.http.problems import PATHS
from scorer.refusal import Refusal, Refused, refusal_of
from scorer.service import ScorerService
from scorer.together import Part
from scorer.tracing import trace_of

REQUEST_ID = "x-request-id"
TENANT = "x-prefixrank-tenant"

Check = Callable[[pb.ScoreResponse], None]  # raises InvalidRequest where the API has no place for such an answer


class CallerGone(Exception):
    """Nobody waits for the answer any more."""


class NotAsked(Refused):
    """Refused before the service was asked, so it has not counted it."""


class Asker:
    """What the endpoints need of the service."""

    def __init__(self, service: ScorerService, timeout_seconds: float) -> None:
        self._service = service
        self._timeout = timeout_seconds

    def info(self) -> pb.GetModelInfoResponse:
        """What is served. Raises NotAsked."""
        try:
            return self._service.info()
        except Unavailable as error:
            raise NotAsked(refusal_of(error, grpc.StatusCode.UNAVAILABLE)) from None

    async def score(
        self, asked: pb.ScoreRequest, request: Request, check: Check, parts: Sequence[Part] = ()
    ) -> pb.ScoreResponse:
        """Every document's result in the request's order. parts: where it has several queries. Raises Refused, also as
        `check` finds, or CallerGone."""
        asked.request_id = _header(request, REQUEST_ID)
        asked.tenant = _header(request, TENANT)
        caller: Caller = request.scope.get("caller", ANYONE)
        work = asyncio.ensure_future(
            self._service.answer(asked, self._timeout, caller, trace_of(request.headers.items()), parts, check)
        )
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((work, gone), timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise CallerGone if gone.done() else Refused(_late(self._timeout))
        finally:
            for task in (work, gone):
                task.cancel()
                with suppress(asyncio.CancelledError, Refused):
                    await task


def relevance(result: pb.DocumentResult) -> float:
    """Between 0 and 1: the probability; of query likelihood exp of the mean log-probability, of a single label its
    probability under the whole vocabulary, which the request must have asked for."""
    if result.score_kind == pb.SCORE_KIND_MEAN_LOG_PROBABILITY:
        return math.exp(result.score)
    if result.score_kind == pb.SCORE_KIND_LABEL_LOGIT:
        return result.label_logits[0].vocabulary_probability
    return result.probability


def outputs(info: pb.GetModelInfoResponse) -> pb.OutputOptions:
    """What a request must ask for, so that `relevance` has it."""
    single = info.score_kind == pb.SCORE_KIND_LABEL_LOGIT
    return pb.OutputOptions(label_logits=single, vocabulary_probabilities=single)


def best_first(results: list[pb.DocumentResult]) -> list[pb.DocumentResult]:
    """By score; equal ones in the request's order, and last those without one."""
    return sorted(results, key=lambda r: (not r.HasField("score"), -r.score, r.index))


def require_all(response: pb.ScoreResponse) -> None:
    """Raises InvalidRequest where a document has no score, for an answer that has no place to say so."""
    for result in response.results:
        if result.status != pb.DOCUMENT_STATUS_OK:
            raise InvalidRequest.of(f"documents[{result.index}]", f"{status_name(result)}: {result.message}")


def require_one(response: pb.ScoreResponse) -> None:
    """Raises InvalidRequest where no document has a score."""
    if not any(result.HasField("score") for result in response.results):
        first = response.results[0]
        raise InvalidRequest.of(f"documents[{first.index}]", f"{first.message}; no other document has a score either")


def status_name(result: pb.DocumentResult) -> str:
    """Without the prefix that all of them have."""
    return pb.DocumentStatus.Name(result.status).removeprefix("DOCUMENT_STATUS_")


def tokens(response: pb.ScoreResponse) -> int:
    """Tokens that the request stands for: the prefix once, and every document."""
    return int(response.usage.prefix_tokens + response.usage.item_tokens)


def invalid(field: str, told: str) -> NotAsked:
    """A refusal of one field."""
    return NotAsked(Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {told}"))


def count_refused(service: ScorerService, request: Request, code: grpc.StatusCode) -> None:
    """Counts a request that was refused before it was one, where it was meant to score."""
    if request.url.path in PATHS:
        told = pb.ScoreRequest(request_id=_header(request, REQUEST_ID), tenant=_header(request, TENANT))
        service.calls.refused(code, request.scope.get("caller", ANYONE), told)


def _header(request: Request, name: str) -> str:
    return request.headers.get(name, "").encode("latin-1").decode("utf-8", "replace")


def _late(seconds: float) -> Refusal:
    return Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, f"http_timeout_seconds = {seconds:g} came before the scores")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
