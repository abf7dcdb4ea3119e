"""Spans as a real OTLP collector on loopback receives them."""

import asyncio
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import httpx
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.sdk.trace import TracerProvider

from prefixrank.v1 import scorer_pb2_grpc
from scorer.client import AsyncScorerClient, ScorerError, build_request
from scorer.errors import ConfigError
from scorer.tracing import STAGES, make_tracer, trace_of
from tests.scorer.test_server import Life, run

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Collector(otlp_grpc.TraceServiceServicer):
    def __init__(self):
        self.spans, self.resources = [], []

    def Export(self, request, context):  # noqa: N802
        for resource in request.resource_spans:
            self.resources.append(resource.resource)
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return otlp.ExportTraceServiceResponse()


@contextmanager
def collecting():
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0)


def attributes(span):
    return {a.key: a.value.int_value or a.value.string_value for a in span.attributes}


def test_a_call_is_a_span_of_the_callers_trace_with_its_stages_inside():
    with collecting() as (collector, endpoint):

        async def scenario():
            async with (
                Life(otlp_endpoint=endpoint, http_port=0) as life,
                grpc.aio.insecure_channel(await life.listening()) as channel,
            ):
                stub = scorer_pb2_grpc.ScorerServiceStub(channel)
                await stub.Score(build_request("a secret", ["secret words"]), metadata=[("traceparent", TRACEPARENT)])
                url = f"http://{life.addresses.http}/v2/rerank"
                async with httpx.AsyncClient(trust_env=False) as client:
                    body = {"query": "a secret", "documents": ["secret words"]}
                    await client.post(url, json=body, headers={"traceparent": TRACEPARENT})

        run(scenario)
    calls = [span for span in collector.spans if span.name.endswith("/Score")]
    assert [(c.trace_id.hex(), c.parent_span_id.hex()) for c in calls] == [(TRACE, PARENT)] * 2
    for call in calls:
        stages = [s for s in collector.spans if s.parent_span_id == call.span_id]
        assert [s.name for s in stages] == list(STAGES)
        assert stages[0].start_time_unix_nano == call.start_time_unix_nano
        for before, after in itertools.pairwise(stages):
            assert before.end_time_unix_nano == after.start_time_unix_nano
        assert attributes(call)["prefixrank.documents"] == 1
    assert b"secret" not in b"".join(span.SerializeToString() for span in collector.spans)
    assert {"service.name", "service.version"} <= {a.key for a in collector.resources[0].attributes}


def test_a_refusal_is_a_span_in_error():
    with collecting() as (collector, endpoint):

        async def scenario():
            async with (
                Life(otlp_endpoint=endpoint) as life,
                AsyncScorerClient(await life.listening()) as client,
            ):
                with pytest.raises(ScorerError):
                    await client.score("q", [])

        run(scenario)
    (span,) = collector.spans
    assert (span.status.message, attributes(span)["rpc.grpc.status_code"]) == ("INVALID_ARGUMENT", 3)


def test_without_a_context_a_call_is_a_trace_of_its_own():
    with collecting() as (collector, endpoint):

        async def scenario():
            async with Life(otlp_endpoint=endpoint) as life, AsyncScorerClient(await life.listening()) as client:
                await client.score("q", ["a"])

        run(scenario)
    (call,) = [span for span in collector.spans if span.name.endswith("/Score")]
    assert call.parent_span_id == b""
    assert trace_of([("traceparent", b"\xff"), ("other", "x"), ("tracestate", "a=b")]) == {"tracestate": "a=b"}


def test_our_client_passes_its_programs_span_on():
    with collecting() as (collector, endpoint):

        async def scenario():
            async with Life(otlp_endpoint=endpoint) as life, AsyncScorerClient(await life.listening()) as client:
                span = TracerProvider().get_tracer("caller").start_span("search")
                with trace.use_span(span):
                    await client.score("q", ["a"])
                return span.get_span_context().span_id

        parent = asyncio.run(scenario())
    (call,) = [span for span in collector.spans if span.name.endswith("/Score")]
    assert int.from_bytes(call.parent_span_id, "big") == parent


def test_without_the_extra_the_start_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"prefixrank\[otel\]"):
        make_tracer("http://127.0.0.1:4317", "1")


def test_without_a_collector_the_service_works():
    async def scenario():
        async with (
            Life(otlp_endpoint="http://127.0.0.1:9") as life,
            AsyncScorerClient(await life.listening()) as client,
        ):
            assert len((await client.score("q", ["a"])).results) == 1

    run(scenario)
