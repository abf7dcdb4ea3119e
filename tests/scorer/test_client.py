"""The public client, against small servers of the tests' own."""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from prefixrank.v1 import scorer_pb2 as pb
from prefixrank.v1 import scorer_pb2_grpc as pb_grpc
from scorer.client import SERVICE, AsyncScorerClient, ScorerClient, ScorerError, build_request


class Recording(pb_grpc.ScorerServiceServicer):
    """Keeps requests; a document "a b c" scores 3. The query "fail" gets `refusal`."""

    def __init__(self):
        self.requests = []
        self.refusal = (grpc.StatusCode.INTERNAL, "internal error, id 1", None)

    def Score(self, request, context):  # noqa: N802
        self.requests.append(request)
        if request.query.text == "fail":
            code, message, detail = self.refusal
            if detail is not None:
                packed = any_pb2.Any()
                packed.Pack(detail)
                status = status_pb2.Status(code=code.value[0], message=message, details=[packed])
                context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            context.abort(code, message)
        response = pb.ScoreResponse(request_id=request.request_id)
        for index, document in enumerate(request.documents):
            score = len(document.text.split())
            response.results.add(
                id=document.id or str(index), index=index, score=score, status=pb.DOCUMENT_STATUS_OK, tokens=score
            )
        response.usage.computed_tokens = 5
        return response

    def GetModelInfo(self, request, context):  # noqa: N802
        return pb.GetModelInfoResponse(model="m", fingerprint="f" if request.fingerprint else "")


@contextmanager
def recording(serving=True, servicer=None):
    """A recording server: yields (target, servicer, health)."""
    server = grpc.server(ThreadPoolExecutor(2))
    servicer, checks = servicer or Recording(), health.HealthServicer()
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    checks.set(SERVICE.decode(), status)
    pb_grpc.add_ScorerServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", servicer, checks
    finally:
        server.stop(0).wait()


def call(target, flavour, method, *args, **kwargs):
    """One call through the client of either flavour."""
    if flavour == "sync":
        with ScorerClient(target) as client:
            return getattr(client, method)(*args, **kwargs)

    async def scenario():
        async with AsyncScorerClient(target) as client:
            return await getattr(client, method)(*args, **kwargs)

    return asyncio.run(scenario())


both = pytest.mark.parametrize("flavour", ["sync", "async"])


def test_importing_it_loads_no_model_code():
    heavy = ("torch", "numpy", "transformers", "pydantic", "rich", "prometheus_client", "google.rpc")
    code = f"import sys, scorer.client; print([m for m in {heavy!r} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_request_holds_what_was_asked_and_nothing_else():
    assert build_request("q", ["a"]) == pb.ScoreRequest(
        query=pb.QueryPrefix(text="q"),
        documents=[pb.Document(text="a")],
        options=pb.ScoreOptions(outputs=pb.OutputOptions()),
    )
    full = build_request(
        "q",
        ["a", "b"],
        ids=["x", "y"],
        instruction="i",
        request_id="r",
        top_n=1,
        max_tokens_per_document=9,
        truncation=pb.TRUNCATION_LEFT,
        strategy=pb.STRATEGY_NAIVE,
        label_logits=True,
        vocabulary_probabilities=True,
        label_texts=["yes", "no"],
        tenant="t",
        priority=pb.PRIORITY_HIGH,
    )
    assert full == pb.ScoreRequest(
        request_id="r",
        query=pb.QueryPrefix(text="q", instruction="i"),
        documents=[pb.Document(id="x", text="a"), pb.Document(id="y", text="b")],
        options=pb.ScoreOptions(
            strategy=pb.STRATEGY_NAIVE,
            max_tokens_per_document=9,
            truncation=pb.TRUNCATION_LEFT,
            top_n=1,
            outputs=pb.OutputOptions(label_logits=True, vocabulary_probabilities=True),
            label_texts=["yes", "no"],
        ),
        tenant="t",
        priority=pb.PRIORITY_HIGH,
    )


def test_an_empty_instruction_is_not_an_absent_one():
    assert build_request("q", ["a"], instruction="").query.HasField("instruction")
    assert not build_request("q", ["a"]).query.HasField("instruction")


@pytest.mark.parametrize("ids", [["x"], [], ["x", "y", "z"]])
def test_ids_go_with_documents(ids):
    with pytest.raises(ValueError, match=f"{len(ids)} ids for 2 documents"):
        build_request("q", ["a", "b"], ids=ids)


def test_no_option_is_ignored():
    with pytest.raises(TypeError, match="top_k"):
        build_request("q", ["a"], top_k=3)


@both
def test_scores_and_model_info(flavour):
    with recording() as (target, servicer, _):
        response = call(target, flavour, "score", "q", ["a b", "c"], ids=["x", "y"], request_id="r")
        assert [(r.id, r.score) for r in response.results] == [("x", 2), ("y", 1)]
        assert servicer.requests[0].request_id == "r"
        request = pb.ScoreRequest(raw_text="prefix", documents=[pb.Document(raw_text="item")])
        call(target, flavour, "score_request", request)
        assert servicer.requests[1] == request
        assert call(target, flavour, "model_info") == pb.GetModelInfoResponse(model="m")
        assert call(target, flavour, "model_info", fingerprint=True).fingerprint == "f"


@both
def test_bad_fields_are_named(flavour):
    with recording() as (target, servicer, _):
        fields = [error_details_pb2.BadRequest.FieldViolation(field="documents", description="at most 3, got 4")]
        detail = error_details_pb2.BadRequest(field_violations=fields)
        servicer.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "documents: at most 3, got 4", detail)
        with pytest.raises(ScorerError) as caught:
            call(target, flavour, "score", "fail", ["a"])
    error = caught.value
    assert str(error) == "INVALID_ARGUMENT: documents: at most 3, got 4"
    assert [(v.field, v.description) for v in error.violations] == [("documents", "at most 3, got 4")]
    assert error.retry_after_seconds is None


@both
def test_overload_tells_when_to_come_again(flavour):
    with recording() as (target, servicer, _):
        retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=2, nanos=500_000_000))
        servicer.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry)
        with pytest.raises(ScorerError) as caught:
            call(target, flavour, "score", "fail", ["a"])
    assert caught.value.retry_after_seconds == 2.5


@both
def test_a_status_without_details(flavour):
    with recording() as (target, _, _), pytest.raises(ScorerError) as caught:
        call(target, flavour, "score", "fail", ["a"])
    assert (caught.value.code, caught.value.violations) == (grpc.StatusCode.INTERNAL, ())


@both
def test_nobody_there(flavour):
    with pytest.raises(ScorerError, match="UNAVAILABLE"):
        call("127.0.0.1:1", flavour, "score", "q", ["a"], timeout=5)


@both
def test_waits_until_serving(flavour):
    with recording(serving=False) as (target, _, checks), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, target, flavour, "wait_until_serving", 10)
        with pytest.raises(TimeoutError):
            call(target, flavour, "wait_until_serving", 0.2)
        assert not waiting.done()
        checks.set(SERVICE.decode(), health_pb2.HealthCheckResponse.SERVING)
        waiting.result(5)


@both
def test_waits_for_a_server_that_is_not_up_yet_and_not_for_ever(flavour):
    with pytest.raises(TimeoutError, match=r"not serving after 0\.3 s"):
        call("127.0.0.1:1", flavour, "wait_until_serving", 0.3)
