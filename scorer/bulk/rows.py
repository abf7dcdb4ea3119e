"""Rows to requests and back. Pure but for the awaited answers: no files."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from prefixrank.v1 import scorer_pb2 as pb
from scorer.client_errors import ScorerError

T = TypeVar("T")
Ask = Callable[[pb.ScoreRequest], Awaitable[pb.ScoreResponse]]
Row = tuple[object, object]  # query, document: text, or whatever stands in their place

INVALID = "INVALID"
TRIES = 3  # of a request that fails for no fault of its own
WAIT_SECONDS = 1.0
TELL_SECONDS = 30.0
TOO_LARGE = "larger than max"  # gRPC's own words for a message over a limit; its code is that of a full queue


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """What became of one row. score: None unless status is OK."""

    status: str
    message: str = ""
    score: float | None = None
    probability: float | None = None
    document_tokens: int = 0
    truncated: bool = False


class Patience:
    """Says now and then that nothing but refusals come, so that a job that waits is not taken for one that hangs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = self._told = clock()

    def answered(self) -> None:
        """There was room."""
        self._since = self._told = self._clock()

    def refused(self, error: ScorerError) -> None:
        """There was none."""
        now = self._clock()
        if now - self._told >= TELL_SECONDS:
            self._told = now
            waited = f"the scorer has had no room for {now - self._since:.0f} s, still trying"
            print(f"prefixrank: {waited}: {error.message}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Options:
    """documents: of one request at most; concurrency: requests under way."""

    documents: int = 256
    concurrency: int = 8
    max_tokens_per_document: int = 0
    patience: Patience = field(default_factory=Patience)


async def score_rows(rows: Sequence[Row], ask: Ask, options: Options) -> list[ScoredRow]:
    """One result a row, in the rows' order; equal queries of these rows share their prefix.

    A bad row gets its status and costs no other its score. Raises ScorerError where the scorer itself fails.
    """
    results: list[ScoredRow | None] = [_malformed(row) for row in rows]
    turns = asyncio.Semaphore(options.concurrency)

    async def score(query: str, places: list[int]) -> None:
        async with turns:
            documents = [str(rows[place][1]) for place in places]
            for place, result in zip(places, await _scored(query, documents, ask, options), strict=True):
                results[place] = result

    async with asyncio.TaskGroup() as group:
        for query, places in _groups(rows, results, options.documents):
            group.create_task(score(query, places))
    return [result for result in results if result is not None]


def _malformed(row: Row) -> ScoredRow | None:
    for name, value in zip(("query", "document"), row, strict=True):
        if isinstance(value, UnicodeDecodeError):
            bad = f"byte 0x{value.object[value.start]:02x} at byte {value.start + 1}"
            return ScoredRow(INVALID, f"{name}: UTF-8 text, got {bad}")
        if not isinstance(value, str):
            return ScoredRow(INVALID, f"{name}: a text, got {'null' if value is None else type(value).__name__}")
    return None


def _groups(rows: Sequence[Row], done: Sequence[object], most: int) -> Iterator[tuple[str, list[int]]]:
    """Places of the rows of each query, at most so many at once."""
    places: dict[str, list[int]] = {}
    for place, (query, _) in enumerate(rows):
        if done[place] is None:
            places.setdefault(str(query), []).append(place)
    for query, found in places.items():
        for first in range(0, len(found), most):
            yield query, found[first : first + most]


async def _scored(query: str, documents: list[str], ask: Ask, options: Options) -> list[ScoredRow]:
    """Where a request is refused as it is, its halves are tried: one bad document is found in a few calls."""
    request = pb.ScoreRequest(
        query=pb.QueryPrefix(text=query),
        documents=[pb.Document(text=document) for document in documents],
        options=pb.ScoreOptions(max_tokens_per_document=options.max_tokens_per_document),
        priority=pb.PRIORITY_LOW,
    )
    try:
        response = await patiently(lambda: ask(request), options.patience)
    except ScorerError as error:
        if not _is_of_these(error):
            raise
        if len(documents) == 1 or any(v.field.startswith("query") for v in error.violations):
            return [ScoredRow(INVALID, error.message)] * len(documents)
        half = len(documents) // 2
        parts = [await _scored(query, part, ask, options) for part in (documents[:half], documents[half:])]
        return parts[0] + parts[1]
    return [_row(result) for result in response.results]


def _is_of_these(error: ScorerError) -> bool:
    """Whether fewer of these texts may be taken; what is wrong with an option is wrong for every row."""
    texts = all(violation.field.startswith(("query", "documents")) for violation in error.violations)
    return _too_large(error) or (error.code is grpc.StatusCode.INVALID_ARGUMENT and texts)


def _too_large(error: ScorerError) -> bool:
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and TOO_LARGE in error.message


async def patiently(call: Callable[[], Awaitable[T]], patience: Patience) -> T:
    """Waits while the scorer has no room; tries again a few times where it failed. Raises ScorerError."""
    failed = 0
    while True:
        try:
            answer = await call()
            patience.answered()
            return answer
        except ScorerError as error:
            if error.code is grpc.StatusCode.INVALID_ARGUMENT or _too_large(error):
                patience.answered()
                raise
            if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                patience.refused(error)
            else:
                failed += 1
            if failed == TRIES:
                raise
            await asyncio.sleep(error.retry_after_seconds or WAIT_SECONDS)


def _row(result: pb.DocumentResult) -> ScoredRow:
    status = pb.DocumentStatus.Name(result.status).removeprefix("DOCUMENT_STATUS_")
    return ScoredRow(
        status,
        result.message,
        result.score if result.HasField("score") else None,
        result.probability if result.HasField("probability") else None,
        result.document_tokens,
        result.truncated,
    )
