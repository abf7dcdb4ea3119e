"""The servicer: one call in, one answer or one status out, counted once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import grpc
from google.protobuf.message import Message

from batching.scheduler import Asked
from prefixrank.v1 import scorer_pb2 as pb
from prefixrank.v1 import scorer_pb2_grpc as pb_grpc
from scorer.access import ANYONE, Access, Caller
from scorer.access_log import log_call, log_search, log_warm
from scorer.beam_service import beam_search
from scorer.calls import Calls, cancelled
from scorer.config import MiB
from scorer.drift import Sampler, check_forever
from scorer.errors import Unauthenticated, Unavailable
from scorer.metrics import Metrics
from scorer.refusal import STATUS_CODES, Refused, abort, refusal_of
from scorer.reply import model_info
from scorer.score_request import Answered, score_request
from scorer.stream import answers
from scorer.threads import on_daemon
from scorer.together import Entrance, Part, score_together
from scorer.tokenized import PRIORITIES
from scorer.tokenizer_threads import TokenizerThreads
from scorer.tracing import NO_TRACE, NoTracer, Tracer, trace_of
from scorer.undecodable import Undecodable
from scorer.warm import warm

if TYPE_CHECKING:
    from scorer.runtime import Runtime

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Asking = TypeVar("Asking", pb.ScoreRequest, pb.WarmPrefixRequest, pb.BeamSearchRequest)  # all of them name a tenant
Ahead = TypeVar("Ahead", pb.WarmPrefixRequest, pb.BeamSearchRequest)
Found = TypeVar("Found", pb.WarmPrefixResponse, pb.BeamSearchResponse)

SERVICE = pb.DESCRIPTOR.services_by_name["ScorerService"].full_name
SCORE_METHODS = frozenset(f"/{SERVICE}/{method}" for method in ("Score", "ScoreStream", "WarmPrefix", "BeamSearch"))


class _Told(NamedTuple, Generic[Ahead, Found]):
    """How a call is called and logged; what stands there for a request that could not be read, and for an answer never
    given."""

    method: str
    unread: Ahead
    nothing: Found
    log: Callable[[Ahead, Found, grpc.StatusCode, float, Caller], None]


class ScorerService(pb_grpc.ScorerServiceServicer):
    """Every method of the service. Refuses with UNAVAILABLE before `serve` and after `refuse`."""

    def __init__(
        self,
        metrics: Metrics,
        version: str,
        max_tokenizing_bytes: int = 256 * MiB,
        access: Access | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = NoTracer() if tracer is None else tracer
        self.access = Access() if access is None else access
        self._metrics = metrics
        self._version = version
        self._sampler = Sampler()
        self._runtime: Runtime | None = None
        self._refusing: str | None = "the service is starting"
        self._fingerprint: asyncio.Future[str] | None = None
        self.calls = Calls(metrics)
        self.tokenizers = TokenizerThreads(max_tokenizing_bytes, metrics.batching)

    def serve(self, runtime: Runtime) -> None:
        """From now on calls are scored by `runtime`."""
        self._runtime, self._refusing = runtime, None
        self._metrics.serving.set(1)
        self._metrics.watch_queue(lambda: runtime.batcher.queued_tokens)
        runtime.batcher.observer = self._metrics.batching
        totals = None if runtime.tiers is None else runtime.tiers.totals
        self._metrics.batching.watch_cache(runtime.batcher.cache, runtime.batcher.ahead, totals)
        self._metrics.model.info(_model_labels(runtime))
        self._metrics.divided(runtime.memory.budget, runtime.memory.parts)

    def refuse(self, reason: str) -> None:
        """From now on new calls get UNAVAILABLE with this reason; accepted ones go on."""
        self._refusing = reason
        self._metrics.serving.set(0)

    async def check_forever(self, seconds: float) -> None:
        """Scores a sample of what was served again, alone, every so many seconds, until cancelled."""
        runtime = self._accepting()
        submit, kind = runtime.batcher.submit, runtime.profile.kind
        await check_forever(self._sampler, submit, kind, runtime.tolerance, seconds, self._metrics.checked)

    def close(self) -> None:
        self.tokenizers.close()
        self._tracer.close()

    async def Score(  # noqa: N802
        self,
        request: pb.ScoreRequest | Undecodable,
        context: grpc.aio.ServicerContext[pb.ScoreRequest, pb.ScoreResponse],
    ) -> pb.ScoreResponse:
        """Scores the documents of one request; see the proto for the statuses."""
        try:
            caller = self.access.caller(authorization(context.invocation_metadata()))
            return await self.answer(request, context.time_remaining(), caller, trace_of(context.invocation_metadata()))
        except Refused as error:
            await abort(context, error.refusal)

    async def answer(
        self,
        request: pb.ScoreRequest | Undecodable,
        remaining: float | None = None,
        caller: Caller = ANYONE,
        trace: Mapping[str, str] = NO_TRACE,
        parts: Sequence[Part] = (),
        check: Callable[[pb.ScoreResponse], None] | None = None,
    ) -> pb.ScoreResponse:
        """Scores one call, counts it once and logs it once, whatever protocol it came by.

        remaining: seconds to the caller's deadline; trace: its W3C trace context; parts: of a call with several
        queries, whose own one is unset; check: raises InvalidRequest where the caller's protocol cannot say the answer.
        Raises Refused. Cancelling the awaiting task cancels the work.
        """
        started = time.perf_counter()
        deadline = _deadline(remaining)
        code, response = grpc.StatusCode.OK, pb.ScoreResponse()
        span = self._tracer.begin(trace)
        self.calls.enter()
        try:
            response = await self.score(self._admitted(request, caller), deadline, parts)
            if check is not None:
                check(response)
            return response
        except asyncio.CancelledError:
            code = cancelled(remaining, time.perf_counter() - started)
            raise
        except Exception as error:
            refusal = self.calls.refusal(error)
            code = refusal.code
            raise Refused(refusal) from error
        finally:
            self.calls.leave(code)
            span.end(response, code)
            read = request.told if isinstance(request, Undecodable) else request
            seconds = time.perf_counter() - started
            asyncio.get_running_loop().call_soon(log_call, read, response, code, seconds, caller)  # behind the reply

    def _admitted(self, request: Asking | Undecodable, caller: Caller) -> Asking:
        """The request under its caller's tenant. Raises InvalidRequest, Forbidden or RateLimited."""
        decoded = _decoded(request)
        decoded.tenant = caller.tenant_of(decoded.tenant)
        self.access.count(caller)
        return decoded

    async def ScoreStream(  # noqa: N802
        self,
        requests: AsyncIterator[pb.ScoreStreamRequest | Undecodable],
        context: grpc.aio.ServicerContext[pb.ScoreStreamRequest, pb.ScoreStreamResponse],
    ) -> AsyncIterator[pb.ScoreStreamResponse]:
        """Scores requests as they come and answers each when it is done; see the proto."""
        metadata = context.invocation_metadata()
        caller = ANYONE

        async def known() -> AsyncIterator[pb.ScoreStreamRequest | Undecodable]:
            """Each request is a call of its own: a token that is no longer known sends no more of them."""
            nonlocal caller
            async for request in requests:
                try:
                    caller = self.access.caller(authorization(metadata))
                except Unauthenticated as error:
                    told = request.told if isinstance(request, Undecodable) else request.request
                    self.calls.refused(STATUS_CODES[Unauthenticated], told=told)
                    raise Refused(refusal_of(error, STATUS_CODES[Unauthenticated])) from None
                yield request

        async def call(request: pb.ScoreRequest | Undecodable, remaining: float | None) -> pb.ScoreResponse:
            return await self.answer(request, remaining, caller, trace_of(metadata))

        try:
            async with aclosing(answers(known(), context.time_remaining, call)) as answered:
                async for response in answered:
                    yield response
        except Refused as error:
            await abort(context, error.refusal)

    async def WarmPrefix(  # noqa: N802
        self,
        request: pb.WarmPrefixRequest | Undecodable,
        context: grpc.aio.ServicerContext[pb.WarmPrefixRequest, pb.WarmPrefixResponse],
    ) -> pb.WarmPrefixResponse:
        """Computes a prefix before its documents are known; see the proto."""

        async def work(asked: pb.WarmPrefixRequest, deadline: float | None) -> pb.WarmPrefixResponse:
            on_thread = partial(self.tokenizers.run, asked=Asked(asked.tenant), deadline=deadline)
            return await warm(self._accepting(), asked, deadline, on_thread)

        told = _Told("WarmPrefix", pb.WarmPrefixRequest(), pb.WarmPrefixResponse(), log_warm)
        return await self._once(request, context, work, told)

    async def BeamSearch(  # noqa: N802
        self,
        request: pb.BeamSearchRequest | Undecodable,
        context: grpc.aio.ServicerContext[pb.BeamSearchRequest, pb.BeamSearchResponse],
    ) -> pb.BeamSearchResponse:
        """Generates the most probable continuations of a prompt; see the proto."""

        async def work(asked: pb.BeamSearchRequest, deadline: float | None) -> pb.BeamSearchResponse:
            who = Asked(asked.tenant, PRIORITIES.get(asked.priority, 0))
            on_thread = partial(self.tokenizers.run, asked=who, deadline=deadline)
            response = await beam_search(self._accepting(), asked, deadline, on_thread)
            self._metrics.searched(response, asked.priority)
            return response

        told = _Told("BeamSearch", pb.BeamSearchRequest(), pb.BeamSearchResponse(), log_search)
        return await self._once(request, context, work, told)

    async def _once(
        self,
        request: Ahead | Undecodable,
        context: grpc.aio.ServicerContext[Ahead, Found],
        work: Callable[[Ahead, float | None], Awaitable[Found]],
        told: _Told[Ahead, Found],
    ) -> Found:
        """Answers one call that only gRPC has, counts it once and logs it once. Its status is what the caller saw."""
        started, caller, code = time.perf_counter(), ANYONE, grpc.StatusCode.CANCELLED
        remaining, response = context.time_remaining(), told.nothing
        span = self._tracer.begin(trace_of(context.invocation_metadata()), told.method)
        self.calls.enter()
        try:
            deadline = _deadline(remaining)
            caller = self.access.caller(authorization(context.invocation_metadata()))
            response = await work(self._admitted(request, caller), deadline)
            code = grpc.StatusCode.OK
            return response
        except asyncio.CancelledError:
            code = cancelled(remaining, time.perf_counter() - started)
            raise
        except Exception as error:  # noqa: BLE001  every call ends with a status
            refusal = self.calls.refusal(error)
            code = refusal.code
            await abort(context, refusal)
        finally:
            self.calls.leave(code)
            span.end(response, code)
            read = told.unread if isinstance(request, Undecodable) else request
            told.log(read, response, code, time.perf_counter() - started, caller)

    async def GetModelInfo(  # noqa: N802
        self,
        request: pb.GetModelInfoRequest | Undecodable,
        context: grpc.aio.ServicerContext[pb.GetModelInfoRequest, pb.GetModelInfoResponse],
    ) -> pb.GetModelInfoResponse:
        """Says what is served."""
        try:
            asked = _decoded(request)
            info = self.info()
            if asked.fingerprint:
                info.fingerprint = await self.fingerprint()
            return info
        except Exception as error:  # noqa: BLE001  every call ends with a status
            await abort(context, self.calls.refusal(error))

    def info(self) -> pb.GetModelInfoResponse:
        """What is served. Raises Unavailable."""
        return model_info(self._accepting(), self._version)

    async def fingerprint(self) -> str:
        """Of all that a score depends on beside rounding; the first one takes as long as reading the checkpoint does,
        and one reading serves all who ask meanwhile. A stop does not wait for it.

        Raises Unavailable.
        """
        runtime = self._accepting()
        if self._fingerprint is None or self._fingerprint.done():
            self._fingerprint = asyncio.ensure_future(on_daemon("fingerprint", runtime.fingerprint))
        return await asyncio.shield(self._fingerprint)

    async def score(
        self, request: pb.ScoreRequest, deadline: float | None = None, parts: Sequence[Part] = ()
    ) -> pb.ScoreResponse:
        """Scores one request, of which there may be parts. `deadline` is in seconds of time.monotonic().

        Raises the exceptions of `scorer.refusal.STATUS_CODES`. Cancelling the awaiting task cancels the work.
        """

        if parts:
            started, runtime = time.perf_counter(), self._accepting()
            entrance = Entrance(runtime.batcher.submit, runtime.batcher.max_queue_tokens)

            async def told(part: pb.ScoreRequest) -> pb.ScoreResponse:
                return (await self._answered(part, deadline, entrance)).response

            response = await score_together(request, parts, runtime.limits, told)
            response.timings.total_seconds = time.perf_counter() - started
            results: Sequence[pb.DocumentResult] = response.results
        else:
            response, results, *_ = await self._answered(request, deadline)
        self._metrics.answered(response, results, request.priority)
        return response

    async def _answered(
        self, request: pb.ScoreRequest, deadline: float | None, entrance: Entrance | None = None
    ) -> Answered:
        """The answer, of which a sample is scored again."""
        answered = await score_request(self._accepting(), self.tokenizers, request, deadline, entrance)
        if answered.request is not None and answered.scores is not None:
            self._sampler.offer(answered.request, answered.scores)
        return answered

    def _accepting(self) -> Runtime:
        if self._refusing is not None:
            raise Unavailable(self._refusing)
        assert self._runtime is not None, "serve() gives a runtime"
        return self._runtime


def _deadline(remaining: float | None) -> float | None:
    """In seconds of time.monotonic()."""
    return None if remaining is None else time.monotonic() + remaining


def authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | bytes | None:
    """The Authorization header among a call's metadata."""
    return next((value for key, value in metadata or () if key == "authorization"), None)


def _decoded(request: M | Undecodable) -> M:
    """Raises InvalidRequest where it is no message."""
    if isinstance(request, Undecodable):
        raise request.error()
    return request


def _model_labels(runtime: Runtime) -> dict[str, str]:
    info, profile = runtime.info, runtime.profile
    return {
        "model": info.model,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "device": info.device,
        "backend": info.backend,
        "profile": profile.name,
        "profile_revision": info.profile_revision,
    }
