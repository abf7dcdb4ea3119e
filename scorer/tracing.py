"""OpenTelemetry: a span for each call of ScorerService but GetModelInfo, with one inside it for each stage that the
answer tells of, under the caller's trace."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import grpc

from prefixrank.v1 import scorer_pb2 as pb
from scorer.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

CARRIED = ("traceparent", "tracestate")
NO_TRACE: Mapping[str, str] = MappingProxyType({})
STAGES = ("tokenize", "queue", "plan", "forward")  # in this order, and they do not overlap
SERVICE = "prefixrank.v1.ScorerService"

Answer = pb.ScoreResponse | pb.BeamSearchResponse | pb.WarmPrefixResponse


def trace_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> Mapping[str, str]:
    """The W3C trace context among a call's metadata or headers."""
    return {key: value for key, value in metadata or () if key in CARRIED and isinstance(value, str)}


class Span(ABC):
    """One call under way."""

    @abstractmethod
    def end(self, response: Answer, code: grpc.StatusCode) -> None:
        """The call has ended. response: empty unless it was answered."""


class Tracer(ABC):
    """Where calls' spans go."""

    @abstractmethod
    def begin(self, trace: Mapping[str, str], method: str = "Score") -> Span:
        """A call of this method begins now. trace: the caller's W3C trace context."""

    @abstractmethod
    def close(self) -> None:
        """Sends what is left."""


class _NoSpan(Span):
    def end(self, response: Answer, code: grpc.StatusCode) -> None:
        return None


class NoTracer(Tracer):
    """Traces nothing."""

    _span = _NoSpan()

    def begin(self, trace: Mapping[str, str], method: str = "Score") -> Span:
        return self._span

    def close(self) -> None:
        return None


def make_tracer(endpoint: str | None, version: str) -> Tracer:
    """Sends spans to an OTLP/gRPC collector. Raises ConfigError where the extra is missing."""
    if endpoint is None:
        return NoTracer()
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"otlp_endpoint needs the otel extra, pip install 'prefixrank[otel]': {error}") from None
    resource = Resource.create({"service.name": "prefixrank", "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"))))
    return OtelTracer(provider)


class OtelTracer(Tracer):
    """Over OpenTelemetry's SDK."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("prefixrank")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, trace: Mapping[str, str], method: str = "Score") -> Span:
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(dict(trace))
        now = time.time_ns()
        span = self._tracer.start_span(f"{SERVICE}/{method}", context, SpanKind.SERVER, start_time=now)
        return _OtelSpan(self, span, now)

    def stages(self, parent: OtelSpan, response: Answer, began: int) -> None:
        """A span for each stage of an answered call that tells them, one after the other."""
        from opentelemetry.trace import set_span_in_context

        if isinstance(response, pb.WarmPrefixResponse):
            return
        context = set_span_in_context(parent)
        for stage in STAGES:
            ended = began + round(getattr(response.timings, f"{stage}_seconds") * 1e9)
            self._tracer.start_span(stage, context, start_time=began).end(ended)
            began = ended

    def close(self) -> None:
        self._provider.shutdown()


def _answered(response: Answer) -> dict[str, int]:
    if isinstance(response, pb.WarmPrefixResponse):
        return {
            "prefixrank.prefix_tokens": response.prefix_tokens,
            "prefixrank.cached_prefix_tokens": response.cached_prefix_tokens,
            "prefixrank.kept_tokens": response.kept_tokens,
        }
    if isinstance(response, pb.BeamSearchResponse):
        own = {"prefixrank.sequences": len(response.sequences), "prefixrank.steps": response.steps}
    else:
        own = {"prefixrank.documents": len(response.results)}
    return own | {
        "prefixrank.prefix_tokens": response.usage.prefix_tokens,
        "prefixrank.cached_prefix_tokens": response.usage.cached_prefix_tokens,
        "prefixrank.computed_tokens": response.usage.computed_tokens,
        "prefixrank.passes": response.passes,
    }


class _OtelSpan(Span):
    def __init__(self, tracer: OtelTracer, span: OtelSpan, began: int) -> None:
        self._tracer = tracer
        self._span = span
        self._began = began

    def end(self, response: Answer, code: grpc.StatusCode) -> None:
        from opentelemetry.trace import Status, StatusCode

        told: dict[str, str | int] = {
            "rpc.system": "grpc",
            "rpc.grpc.status_code": code.value[0],
            **_answered(response),
        }
        self._span.set_attributes(told)
        if code is grpc.StatusCode.OK:
            self._tracer.stages(self._span, response, self._began)
        else:
            self._span.set_status(Status(StatusCode.ERROR, code.name))
        self._span.end()
