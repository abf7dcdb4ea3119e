"""The gRPC servicer: one call in, one answer or one status out, counted once."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from attention.plans import Strategy
from batching.batcher import Closed, Expired, QueueFull
from batching.select import StrategyError
from batching.types import RequestScores, Scored, TokenizedRequest
from prefixrank.v1 import scorer_pb2 as pb
from prefixrank.v1 import scorer_pb2_grpc as pb_grpc
from scorer.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable, Violation
from scorer.heads import Kind, Verdict, verdict
from scorer.metrics import Metrics

if TYPE_CHECKING:
    from scorer.runtime import Runtime
    from scorer.tokenization import DocumentTokens, Label, Tokenized

log = logging.getLogger(__name__)
access_log = logging.getLogger("scorer.access")

TOKENIZER_THREADS = 2
RETRY_SECONDS = 1

# gRPC sends a timeout rounded up by as much as a hundredth: the caller gives up that much before our deadline comes.
DEADLINE_SLACK = 0.01

# Status details travel base64-coded in a header beside the percent-coded message; the header list is limited to 8 kB.
DETAILS_BYTES = 4096
MESSAGE_BYTES = 1024
VIOLATION_BYTES = DETAILS_BYTES - MESSAGE_BYTES - 128
MAX_VIOLATIONS = 50
VALUE_CHARACTERS = 100
LIMIT_CHARACTERS = 300

# The one table of exceptions and status codes. What is not here, such as a pass that failed, is our fault: INTERNAL.
STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Expired: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Closed: grpc.StatusCode.UNAVAILABLE,
}


class ScorerService(pb_grpc.ScorerServiceServicer):
    """Score and GetModelInfo. Refuses with UNAVAILABLE before `serve` and after `refuse`."""

    def __init__(self, metrics: Metrics, version: str) -> None:
        self._metrics = metrics
        self._version = version
        self._runtime: Runtime | None = None
        self._refusing: str | None = "the service is starting"
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._tokenizers = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")

    def serve(self, runtime: Runtime) -> None:
        """From now on calls are scored by `runtime`."""
        self._runtime, self._refusing = runtime, None
        self._metrics.watch_queue(lambda: runtime.batcher.queued_tokens)
        self._metrics.model.info(_model_labels(runtime))

    def refuse(self, reason: str) -> None:
        """From now on new calls get UNAVAILABLE with this reason; accepted ones go on."""
        self._refusing = reason

    async def idle(self) -> None:
        """Returns once no call is under way."""
        await self._idle.wait()

    def close(self) -> None:
        self._tokenizers.shutdown(wait=False, cancel_futures=True)

    async def Score(  # noqa: N802
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext[pb.ScoreRequest, pb.ScoreResponse]
    ) -> pb.ScoreResponse:
        """Scores the documents of one request; see the proto for the statuses."""
        started = time.perf_counter()
        remaining = context.time_remaining()
        deadline = None if remaining is None else time.monotonic() + remaining
        code, response = grpc.StatusCode.OK, pb.ScoreResponse()
        self._enter()
        try:
            response = await self.score(request, deadline)
            return response
        except asyncio.CancelledError:
            late = remaining is not None and time.perf_counter() - started >= remaining * (1 - DEADLINE_SLACK)
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            raise
        except Exception as error:  # noqa: BLE001  every call ends with a status
            refusal = self._refusal(error)
            code = refusal.code
            await _abort(context, refusal)
        finally:
            self._leave(code)
            _log_access(request, response, code, time.perf_counter() - started)

    async def GetModelInfo(  # noqa: N802
        self,
        request: pb.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetModelInfoRequest, pb.GetModelInfoResponse],
    ) -> pb.GetModelInfoResponse:
        """Says what is served."""
        try:
            return _model_info(self._accepting(), self._version)
        except Exception as error:  # noqa: BLE001  every call ends with a status
            await _abort(context, self._refusal(error))

    async def score(self, request: pb.ScoreRequest, deadline: float | None = None) -> pb.ScoreResponse:
        """Scores one request. `deadline` is in seconds of time.monotonic().

        Raises the exceptions of STATUS_CODES. Cancelling the awaiting task cancels the work.
        """
        started = time.perf_counter()
        runtime = self._accepting()
        loop = asyncio.get_running_loop()
        tokenized = await loop.run_in_executor(self._tokenizers, runtime.tokenization.tokenize, request)
        tokenize_seconds = time.perf_counter() - started
        scores = None if tokenized.request is None else await _submit(runtime, tokenized.request, deadline)
        results = _results(request, tokenized, scores, runtime.profile.kind)
        response = _response(request, runtime, tokenized, scores, results)
        response.timings.tokenize_seconds = tokenize_seconds
        response.timings.total_seconds = time.perf_counter() - started
        self._metrics.answered(response, results)
        return response

    def _accepting(self) -> Runtime:
        if self._refusing is not None:
            raise Unavailable(self._refusing)
        assert self._runtime is not None, "serve() gives a runtime"
        return self._runtime

    def _enter(self) -> None:
        self._in_flight += 1
        self._idle.clear()
        self._metrics.in_flight.inc()

    def _leave(self, code: grpc.StatusCode) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle.set()
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(code.name).inc()

    def _refusal(self, error: Exception) -> Refusal:
        code = next((STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES), None)
        if code is None:
            error_id = uuid.uuid4().hex[:12]
            self._metrics.internal_errors.inc()
            log.error("internal error error_id=%s", error_id, exc_info=error)
            return Refusal(grpc.StatusCode.INTERNAL, f"internal error, id {error_id}")
        if isinstance(error, InvalidRequest):
            return _invalid(error.violations)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=RETRY_SECONDS))
            return Refusal(code, _cut(str(error)), retry)
        return Refusal(code, _cut(str(error)))


async def _submit(runtime: Runtime, request: TokenizedRequest, deadline: float | None) -> RequestScores:
    try:
        return await runtime.batcher.submit(request, deadline)
    except StrategyError as error:
        raise InvalidRequest.of("options.strategy", str(error)) from error


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a call ends that gets no answer."""

    code: grpc.StatusCode
    message: str
    detail: Message | None = None

    def status(self) -> status_pb2.Status:
        """As google.rpc.Status, the form in which details travel."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        if self.detail is not None:
            packed = any_pb2.Any()
            packed.Pack(self.detail)
            status.details.append(packed)
        return status


async def _abort(context: grpc.aio.ServicerContext[Any, Any], refusal: Refusal) -> NoReturn:
    details = () if refusal.detail is None else (("grpc-status-details-bin", refusal.status().SerializeToString()),)
    await context.abort(refusal.code, refusal.message, details)


def _invalid(violations: Sequence[Violation]) -> Refusal:
    """Names as many of the violations as fit, the first ones first."""
    detail = error_details_pb2.BadRequest()
    shown: list[Violation] = []
    for violation in map(_shortened, violations[:MAX_VIOLATIONS]):
        told = f"{violation.limit}, got {violation.value}" if violation.value else violation.limit
        detail.field_violations.add(field=violation.field, description=told)
        if detail.ByteSize() > VIOLATION_BYTES:
            del detail.field_violations[-1]
            break
        shown.append(violation)
    left = len(violations) - len(shown)
    message = _cut("; ".join(map(str, shown[:5])), f" (and {left} more)" if left else "")
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message, detail)


def _shortened(violation: Violation) -> Violation:
    return Violation(
        _printable(violation.field, VALUE_CHARACTERS),
        _printable(violation.value, VALUE_CHARACTERS),
        _printable(violation.limit, LIMIT_CHARACTERS),
    )


def _printable(text: str, characters: int) -> str:
    """One short line, whatever the caller sent."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in text[: characters + 1])
    return line if len(line) <= characters else line[: characters - 1] + "…"


def _cut(message: str, tail: str = "") -> str:
    """Shortens a status message to MESSAGE_BYTES as it travels, keeping `tail`."""
    ends = list(accumulate(map(_wire_bytes, message + tail)))
    if not ends or ends[-1] <= MESSAGE_BYTES:
        return message + tail
    tail = f"…{tail}"
    return message[: bisect_right(ends, MESSAGE_BYTES - sum(map(_wire_bytes, tail)))] + tail


def _wire_bytes(character: str) -> int:
    """Bytes of one character of a status message: percent-coded unless it is plain ASCII."""
    return 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())


def _log_access(request: pb.ScoreRequest, response: pb.ScoreResponse, code: grpc.StatusCode, seconds: float) -> None:
    """One line a call. Identifiers are percent-coded, so they hold neither spaces nor newlines; no text is logged."""
    access_log.info(
        "request_id=%s tenant=%s code=%s documents=%d prefix_tokens=%d item_tokens=%d computed_tokens=%d passes=%d "
        "seconds=%.4f",
        quote(request.request_id[:VALUE_CHARACTERS]),
        quote(request.tenant[:VALUE_CHARACTERS]),
        code.name,
        len(request.documents),
        response.usage.prefix_tokens,
        response.usage.item_tokens,
        response.usage.computed_tokens,
        response.passes,
        seconds,
    )


def _strategy(strategy: Strategy) -> pb.Strategy.ValueType:
    return pb.Strategy.Value(f"STRATEGY_{strategy.name}")


def _score_kind(kind: Kind, labels: Sequence[Label]) -> pb.ScoreKind.ValueType:
    if kind == "query_likelihood":
        return pb.SCORE_KIND_MEAN_LOG_PROBABILITY
    return pb.SCORE_KIND_LOG_ODDS if len(labels) == 2 else pb.SCORE_KIND_LABEL_LOGIT


def _results(
    request: pb.ScoreRequest, tokenized: Tokenized, scores: RequestScores | None, kind: Kind
) -> list[pb.DocumentResult]:
    """One result a document, in the request's order."""
    score_kind = _score_kind(kind, tokenized.labels)
    results = []
    for document in tokenized.documents:
        result = _unscored(document)
        if scores is not None and document.item is not None:
            scored = scores.scored[document.item]
            result.strategy = _strategy(scored.strategy)
            _fill(result, verdict(scored, kind), tokenized.labels, request.options.outputs)
            if result.status == pb.DOCUMENT_STATUS_OK:
                result.score_kind = score_kind
        results.append(result)
    return results


def _unscored(document: DocumentTokens) -> pb.DocumentResult:
    return pb.DocumentResult(
        id=document.id,
        index=document.index,
        status=pb.DocumentStatus.Value(f"DOCUMENT_STATUS_{document.status.upper()}"),
        message=document.message,
        tokens=document.tokens,
        document_tokens=document.document_tokens,
        original_document_tokens=document.original_document_tokens,
        truncated=document.truncated,
    )


def _fill(result: pb.DocumentResult, given: Verdict, labels: Sequence[Label], outputs: pb.OutputOptions) -> None:
    if not given.finite:
        result.status = pb.DOCUMENT_STATUS_NUMERIC_ERROR
        result.message = "the model gave NaN or infinity for this document"
        return
    assert given.score is not None, "a finite verdict has a score"
    result.score = given.score
    if given.log_odds is not None and given.probability is not None:
        result.log_odds, result.probability = given.log_odds, given.probability
    if outputs.label_logits or outputs.vocabulary_probabilities:
        result.label_logits.extend(_label_scores(given, labels, outputs.vocabulary_probabilities))


def _label_scores(given: Verdict, labels: Sequence[Label], vocabulary: bool) -> Iterable[pb.LabelScore]:
    for i, (label, logit) in enumerate(zip(labels, given.label_logits, strict=True)):
        probability = given.vocabulary_probabilities[i] if vocabulary else None
        yield pb.LabelScore(label=label.text, token_id=label.token_id, logit=logit, vocabulary_probability=probability)


def _response(
    request: pb.ScoreRequest,
    runtime: Runtime,
    tokenized: Tokenized,
    scores: RequestScores | None,
    results: Sequence[pb.DocumentResult],
) -> pb.ScoreResponse:
    """The reply but for its own timings."""
    response = pb.ScoreResponse(
        request_id=request.request_id,
        results=_best(results, request.options.top_n) if request.options.top_n else results,
        usage=_usage(tokenized, scores, results),
        model=runtime.info.model,
        profile=runtime.profile.name,
        profile_revision=runtime.profile.revision,
    )
    if scores is None:
        response.strategy.reason = "no document could be scored"
        return response
    response.passes = scores.passes
    response.strategy.CopyFrom(_choice(scores.scored, scores.reason))
    response.timings.queue_seconds = scores.queue_seconds
    response.timings.plan_seconds = scores.plan_seconds
    response.timings.forward_seconds = scores.forward_seconds
    return response


def _best(results: Sequence[pb.DocumentResult], n: int) -> list[pb.DocumentResult]:
    """The n best, best first, equal scores in the request's order. What has no score has no rank: it is left out."""
    scored = [r for r in results if r.status == pb.DOCUMENT_STATUS_OK]
    return sorted(scored, key=lambda r: (-r.score, r.index))[:n]


def _choice(scored: Sequence[Scored], reason: str) -> pb.StrategyChoice:
    counts = Counter(s.strategy for s in scored)
    shares = [pb.StrategyShare(strategy=_strategy(s), documents=n) for s, n in sorted(counts.items())]
    return pb.StrategyChoice(shares=shares, reason=reason)


def _usage(tokenized: Tokenized, scores: RequestScores | None, results: Sequence[pb.DocumentResult]) -> pb.Usage:
    """Computed and saved add up to what scoring one document at a time would have computed."""
    items = [r.tokens for r in results if r.status == pb.DOCUMENT_STATUS_OK]
    alone = len(items) * tokenized.prefix_tokens + sum(items)
    computed = 0 if scores is None else scores.computed_tokens
    return pb.Usage(
        prefix_tokens=tokenized.prefix_tokens,
        cached_prefix_tokens=0 if scores is None else scores.cached_prefix_tokens,
        item_tokens=sum(items),
        computed_tokens=computed,
        # Documents that were computed and gave no number are computed tokens that nobody would call saved.
        saved_tokens=max(0, alone - computed),
    )


def _model_labels(runtime: Runtime) -> dict[str, str]:
    info, profile = runtime.info, runtime.profile
    return {
        "model": info.model,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "device": info.device,
        "backend": info.backend,
        "profile": profile.name,
        "profile_revision": profile.revision,
    }


def _model_info(runtime: Runtime, version: str) -> pb.GetModelInfoResponse:
    info, profile, limits = runtime.info, runtime.profile, runtime.limits
    labels = runtime.tokenization.labels
    return pb.GetModelInfoResponse(
        model=info.model,
        architecture=info.architecture,
        dtype=info.dtype,
        device=info.device,
        profile=profile.name,
        profile_revision=profile.revision,
        profile_verified=profile.verified,
        score_kind=_score_kind(profile.kind, labels),
        labels=[pb.LabelInfo(text=x.text, token_id=x.token_id, positive=i == 0) for i, x in enumerate(labels)],
        limits=pb.Limits(**{name: getattr(limits, name) for name in pb.Limits.DESCRIPTOR.fields_by_name}),
        strategies=[_strategy(s) for s in info.strategies],
        backend=info.backend,
        version=version,
        vocabulary_size=info.vocabulary_size,
    )
