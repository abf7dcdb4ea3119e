"""The gRPC servicer: one call in, one answer or one status out, counted once."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import quote

import grpc

from batching.select import StrategyError
from batching.types import RequestScores, TokenizedRequest
from prefixrank.v1 import scorer_pb2 as pb
from prefixrank.v1 import scorer_pb2_grpc as pb_grpc
from scorer.errors import InvalidRequest, Unavailable
from scorer.metrics import Metrics
from scorer.refusal import VALUE_CHARACTERS, Refusal, abort, refusal_of, status_code
from scorer.reply import document_results, model_info, score_response

if TYPE_CHECKING:
    from scorer.runtime import Runtime

log = logging.getLogger(__name__)
access_log = logging.getLogger("scorer.access")

TOKENIZER_THREADS = 2

# gRPC sends a timeout rounded up by as much as a hundredth: the caller gives up that much before our deadline comes.
DEADLINE_SLACK = 0.01


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
            await abort(context, refusal)
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
            return model_info(self._accepting(), self._version)
        except Exception as error:  # noqa: BLE001  every call ends with a status
            await abort(context, self._refusal(error))

    async def score(self, request: pb.ScoreRequest, deadline: float | None = None) -> pb.ScoreResponse:
        """Scores one request. `deadline` is in seconds of time.monotonic().

        Raises the exceptions of `scorer.refusal.STATUS_CODES`. Cancelling the awaiting task cancels the work.
        """
        started = time.perf_counter()
        runtime = self._accepting()
        loop = asyncio.get_running_loop()
        tokenized = await loop.run_in_executor(self._tokenizers, runtime.tokenization.tokenize, request)
        tokenize_seconds = time.perf_counter() - started
        scores = None if tokenized.request is None else await _submit(runtime, tokenized.request, deadline)
        results = document_results(request, tokenized, scores, runtime.profile.kind)
        response = score_response(request, runtime, tokenized, scores, results)
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
        code = status_code(error)
        if code is None:
            error_id = uuid.uuid4().hex[:12]
            self._metrics.internal_errors.inc()
            log.error("internal error error_id=%s", error_id, exc_info=error)
            return Refusal(grpc.StatusCode.INTERNAL, f"internal error, id {error_id}")
        return refusal_of(error, code)


async def _submit(runtime: Runtime, request: TokenizedRequest, deadline: float | None) -> RequestScores:
    try:
        return await runtime.batcher.submit(request, deadline)
    except StrategyError as error:
        raise InvalidRequest.of("options.strategy", str(error)) from error


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
