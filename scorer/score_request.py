"""One request to score, on its way through the service: tokenised, scored, told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from batching.errors import Expired
from batching.scheduler import Asked
from batching.select import StrategyError
from batching.types import RequestScores, TokenizedRequest
from prefixrank.v1 import scorer_pb2 as pb
from scorer.errors import InvalidRequest
from scorer.reply import document_results, per_document, score_response
from scorer.threads import guarded
from scorer.together import Entrance, Submit
from scorer.tokenized import PRIORITIES, Tokenized, given_in_ids, untokenized
from scorer.tokenizer_threads import TokenizerThreads

if TYPE_CHECKING:
    from scorer.runtime import Runtime

# Ids need no tokenizer, only Python, which one thread runs at a time: for a small request another thread costs more
# than it takes.
INLINE_BYTES = 64 * 1024

# What partial_ok keeps of the deadline for the reply: so many seconds, and more for each document (its result takes a
# few microseconds, ten where others want the processor too), but no more than this part of what is left.
REPLY_SECONDS, REPLY_DOCUMENT_SECONDS, REPLY_PART = 0.02, 2e-5, 0.15


class Answered(NamedTuple):
    """results: of all documents, also where the response keeps the best. scores: None where none could be scored."""

    response: pb.ScoreResponse
    results: Sequence[pb.DocumentResult]
    request: TokenizedRequest | None
    scores: RequestScores | None


async def score_request(
    runtime: Runtime,
    tokenizers: TokenizerThreads,
    request: pb.ScoreRequest,
    deadline: float | None,
    entrance: Entrance | None = None,
) -> Answered:
    """Scores one request. `deadline` is in seconds of time.monotonic(); entrance: of the call that it is a part of.

    Raises the exceptions of `scorer.refusal.STATUS_CODES`. Cancelling the awaiting task cancels the work.
    """
    started = time.perf_counter()
    deadline = _reply_in_time(request, deadline)
    size = request.ByteSize()
    asked = Asked(request.tenant, PRIORITIES.get(request.priority, 0), request.options.partial_ok)
    if size <= INLINE_BYTES and given_in_ids(request):
        runtime.batcher.admit_bytes(size, asked, deadline)
        tokenized = guarded(runtime.tokenization.tokenize, request)
        runtime.batcher.learn_size(size, tokenized.request.tokens if tokenized.request else 0)
    else:
        tokenized = await _on_thread(runtime, tokenizers, request, size, asked, deadline)
    tokenize_seconds = time.perf_counter() - started
    submit = runtime.batcher.submit if entrance is None else entrance.submit
    scores = None if tokenized.request is None else await _submit(submit, tokenized.request, deadline)
    by_document = None if scores is None else per_document(tokenized, scores)
    whole = document_results(request, tokenized, by_document, runtime.profile.kind)
    results = whole.results[:]  # as objects, which would otherwise be made anew by each who looks at them
    response = score_response(request, runtime, tokenized, by_document, whole)
    response.timings.tokenize_seconds = tokenize_seconds
    response.timings.total_seconds = time.perf_counter() - started
    return Answered(response, results, tokenized.request, scores)


async def _on_thread(
    runtime: Runtime,
    tokenizers: TokenizerThreads,
    request: pb.ScoreRequest,
    size: int,
    asked: Asked,
    deadline: float | None,
) -> Tokenized:
    """Raises Expired, unless the caller takes a part, be it none."""
    each = request.options.max_tokens_per_document or runtime.limits.default_tokens_per_document
    most = runtime.limits.max_context_tokens + each * len(request.documents)
    runtime.batcher.admit_bytes(size, asked, deadline, tokenizers.ahead(size, most, asked, deadline))
    try:
        tokenized = await tokenizers.run(
            runtime.tokenization.tokenize, request, size, most, asked=asked, deadline=deadline
        )
    except Expired:
        if not asked.partial:
            raise
        return untokenized(request)
    runtime.batcher.learn_size(size, tokenized.request.tokens if tokenized.request else 0)
    return tokenized


def _reply_in_time(request: pb.ScoreRequest, deadline: float | None) -> float | None:
    """Who takes a part at the deadline must have it before: a little time is kept for the reply."""
    if deadline is None or not request.options.partial_ok:
        return deadline
    reply = REPLY_SECONDS + REPLY_DOCUMENT_SECONDS * len(request.documents)
    return deadline - min(reply, REPLY_PART * (deadline - time.monotonic()))


async def _submit(submit: Submit, request: TokenizedRequest, deadline: float | None) -> RequestScores:
    """Raises Expired where the deadline came before it was accepted, unless the caller takes a part, be it none."""
    try:
        return await submit(request, deadline)
    except StrategyError as error:
        raise InvalidRequest.of("options.strategy", str(error)) from error
    except Expired as error:
        if not request.partial_ok:
            raise
        return RequestScores((None,) * len(request.items), str(error), 0, 0, 0, 0.0, 0.0, 0.0)
