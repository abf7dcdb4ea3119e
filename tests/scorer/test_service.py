"""The servicer behind a real gRPC server on loopback, over a fake runtime and, at the end, a tiny real one."""

import asyncio
import json
import logging
import math
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
import torch
from google.rpc import error_details_pb2, status_pb2

from attention.plans import Strategy
from batching.errors import Closed, DeviceFailed, Expired, QueueFull, refuse_expired
from batching.items import Item
from batching.page_pool import PagePool
from batching.prefix_cache import PrefixCache
from batching.scheduler import NOTHING_AHEAD
from batching.select import StrategyError
from batching.types import RequestScores, Scored, TokenizedRequest
from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import CHANNEL_OPTIONS, AsyncScorerClient, ScorerError, build_request
from scorer.config import Config, Limits
from scorer.errors import InvalidRequest, Violation
from scorer.logs import formatter
from scorer.memory import MemoryPlan
from scorer.metrics import Metrics
from scorer.register import register
from scorer.runtime import Runtime
from scorer.service import ScorerService
from scorer.tokenization import DocumentTokens, Label, Status, Tokenized
from tests.tiny import tiny_model_dir

PREFIX_TOKENS = 10
YES_NO = (Label("yes", 1), Label("no", 2))
LIMITS = Limits(2000, 1 << 20, 8192, 8192, 512, 512, 4096, 64 << 20, 1000)


class FakeTokenization:
    """A word is a token. A document "logits 1 2" will get these logits; blank ones are EMPTY."""

    def __init__(self, labels=YES_NO, seconds=0.0):
        self.labels = tuple(labels)
        self.seconds = seconds
        self.texts = {}

    def tokenize(self, request):
        time.sleep(self.seconds)
        if not request.documents:
            raise InvalidRequest.of("documents", "at least one document", 0)
        documents, items = [], []
        for index, document in enumerate(request.documents):
            text = document.text or document.raw_text
            words = text.split()
            status = Status.OK if words else Status.EMPTY
            number = len(self.texts) + 1
            self.texts[number] = text
            documents.append(
                DocumentTokens(
                    id=document.id or str(index),
                    status=status,
                    message="" if words else "no text",
                    tokens=len(words),
                    document_tokens=len(words),
                    original_document_tokens=len(words),
                    truncated=False,
                    item=len(items) if words else None,
                )
            )
            if words:
                last = np.array([len(words) - 1], np.int32)
                items.append(Item(np.full(len(words), number, np.int32), last, np.array([[1, 2]], np.int32)))
        prefix = np.zeros(PREFIX_TOKENS, np.int32)
        normalize = request.options.outputs.vocabulary_probabilities
        return Tokenized(
            TokenizedRequest(prefix, tuple(items), normalize) if items else None,
            tuple(documents),
            self.labels,
            PREFIX_TOKENS,
        )


class FakeBatcher:
    """Scores at once, or when `gate` opens; `error` is raised instead."""

    def __init__(self, texts, error=None):
        self.texts = texts
        self.error = error
        self.gate = asyncio.Event()
        self.gate.set()
        self.gone = asyncio.Event()
        self.submitted, self.cancelled, self.deadlines = 0, 0, []
        self.looked_at, self.sizes = [], []
        self.cache, self.ahead = PrefixCache(PagePool(0), 16), None
        self.queued_tokens, self.max_queue_tokens = 0, 1 << 20
        self.drained = False

    async def submit(self, request, deadline=None):
        self.submitted += 1
        self.deadlines.append(deadline)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        scored = tuple(self._scored(item, request.normalize) for item in request.items)
        return RequestScores(
            scored=scored,
            reason="a fake",
            computed_tokens=request.tokens,
            cached_prefix_tokens=0,
            passes=1,
            queue_seconds=0.001,
            plan_seconds=0.002,
            forward_seconds=0.003,
        )

    def _scored(self, item, normalize):
        words = self.texts[item.ids[0]].split()
        logits = [float(x) for x in words[1:]] if words[0] == "logits" else [len(words) / 8, 0.0]
        strategy = Strategy.MULTI_ITEM if len(words) < 4 else Strategy.DIRECT_RAGGED
        return Scored(np.array([logits], np.float32), np.array([5.0], np.float32) if normalize else None, strategy)

    def admit_bytes(self, size, asked, deadline, texts=NOTHING_AHEAD):
        refuse_expired(deadline, time.monotonic())
        self.looked_at.append((size, asked))

    def learn_size(self, size, tokens):
        self.sizes.append((size, tokens))

    async def failed(self):
        await self.gone.wait()
        return "three passes in a row failed"

    async def drain(self):
        self.drained = True


class FakeRuntime:
    def __init__(self, labels=YES_NO, kind="label_logits", seconds=0.0, error=None):
        self.profile = SimpleNamespace(name="fake-profile", kind=kind, verified=True, listwise=False)
        self.tokenization = FakeTokenization(labels, seconds)
        self.batcher = FakeBatcher(self.tokenization.texts, error)
        self.limits = LIMITS
        self.memory = MemoryPlan(1000, 8192, 8192, 0, 0, {"weights": 600, "cache": 300})
        self.tolerance = 1e-4
        self.info = SimpleNamespace(
            profile_revision="abc123",
            model="fake-model",
            architecture="FakeForCausalLM",
            dtype="float32",
            device="cpu",
            backend="torch",
            vocabulary_size=1000,
            strategies=(Strategy.NAIVE, Strategy.MULTI_ITEM),
        )
        self.tiers = None
        self.beams, self.no_beams, self.constraints = None, "a fake searches no beams", {}
        self.closed = False

    def fingerprint(self):
        return f"fake {self.info.profile_revision}"

    def close(self):
        self.closed = True


@asynccontextmanager
async def served(runtime, **limits):
    """A client of a server over `runtime` (None: not loaded yet), with the service and its metrics."""
    metrics = Metrics("1.2.3")
    service = ScorerService(metrics, "1.2.3", **limits)
    if runtime is not None:
        service.serve(runtime)
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    register(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncScorerClient(f"127.0.0.1:{port}") as client:
            yield SimpleNamespace(client=client, service=service, metrics=metrics, target=f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
        service.close()


def ask(request, runtime=None):
    """One request to a fresh server."""

    async def scenario():
        async with served(runtime or FakeRuntime()) as at:
            return await at.client.score_request(request)

    return asyncio.run(scenario())


def refused(request, runtime=None):
    with pytest.raises(ScorerError) as caught:
        ask(request, runtime)
    return caught.value


def count(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"prefixrank_{name}", labels)


def ended(metrics):
    """Codes of the calls that ended, with how many."""
    codes = {code.name: int(count(metrics, "requests_total", code=code.name)) for code in grpc.StatusCode}
    return {code: n for code, n in codes.items() if n}


# --- the reply


def test_results_come_in_request_order_with_their_own_scores():
    response = ask(build_request("q", ["a b", "a b c d e", "a"], ids=["x", "y", "z"], request_id="r1"))
    assert [(r.id, r.index, r.score, r.tokens) for r in response.results] == [
        ("x", 0, 0.25, 2),
        ("y", 1, 0.625, 5),
        ("z", 2, 0.125, 1),
    ]
    assert {r.status for r in response.results} == {pb.DOCUMENT_STATUS_OK}
    assert {r.score_kind for r in response.results} == {pb.SCORE_KIND_LOG_ODDS}
    assert response.request_id == "r1"
    assert (response.model, response.profile, response.profile_revision) == ("fake-model", "fake-profile", "abc123")
    assert response.passes == 1


def test_one_document_works():
    assert len(ask(build_request("q", ["a b"])).results) == 1


def test_top_n_sorts_and_leaves_out_what_has_no_score():
    documents = ["a", "", "a b c", "logits nan 0", "a b c"]
    response = ask(build_request("q", documents, top_n=4))
    assert [r.index for r in response.results] == [2, 4, 0]
    assert [r.index for r in ask(build_request("q", documents, top_n=1)).results] == [2]


@pytest.mark.parametrize("top_n", [1, 2, 3, 9])
def test_behind_the_best_of_a_part_stand_those_that_had_no_turn(top_n):
    """So a top N is known to be one of all documents, or of how many, and whom an earlier ranking has to place."""
    runtime = FakeRuntime()
    submit = runtime.batcher.submit

    async def cut(request, deadline=None):
        answer = await submit(request, deadline)
        return replace(answer, scored=tuple(None if i in (0, 2) else one for i, one in enumerate(answer.scored)))

    runtime.batcher.submit = cut
    documents = ["a b c d", "", "a", "a b c", "a b", "logits nan 0"]
    results = ask(build_request("q", documents, top_n=top_n, partial_ok=True), runtime).results
    assert [r.index for r in results] == [*[4, 2][:top_n], 0, 3]
    late = [r for r in results if r.status == pb.DOCUMENT_STATUS_DEADLINE]
    assert [(r.id, r.HasField("score")) for r in late] == [("0", False), ("3", False)]
    assert [r.status for r in results[: -len(late)]] == [pb.DOCUMENT_STATUS_OK] * min(top_n, 2)


def test_where_all_had_their_turn_the_best_stand_alone():
    results = ask(build_request("q", ["a", "a b", ""], top_n=1, partial_ok=True)).results
    assert [r.index for r in results] == [1]


def test_blank_documents_get_a_status_and_no_score():
    response = ask(build_request("q", ["", "a", "   ", "\n"]))
    assert [r.status for r in response.results] == [pb.DOCUMENT_STATUS_EMPTY, pb.DOCUMENT_STATUS_OK] + [
        pb.DOCUMENT_STATUS_EMPTY
    ] * 2
    assert [r.HasField("score") for r in response.results] == [False, True, False, False]
    assert response.results[0].message == "no text"
    assert response.results[1].score == ask(build_request("q", ["a"])).results[0].score
    assert (response.usage.item_tokens, response.usage.computed_tokens) == (1, PREFIX_TOKENS + 1)


def test_all_blank_is_still_an_answer():
    runtime = FakeRuntime()
    response = ask(build_request("q", ["", " "]), runtime)
    assert len(response.results) == 2
    assert response.passes == 0
    assert response.usage.computed_tokens == response.usage.saved_tokens == 0
    assert runtime.batcher.submitted == 0


def test_near_one_the_log_odds_stay_apart():
    response = ask(build_request("q", [f"logits {x} 0" for x in (20.0, 20.1, 25.0, 30.0)]))
    scores = [r.score for r in response.results]
    assert scores == sorted(set(scores))
    assert response.results[3].probability > 0.999999


def test_very_negative_logits_are_finite():
    (result,) = ask(build_request("q", ["logits -100 50"])).results
    assert result.log_odds == -150
    assert 0 <= result.probability < 1e-60


def test_sigmoid_of_log_odds_is_the_softmax():
    for result in ask(build_request("q", [f"logits {x} 1.5" for x in (-3, 0, 0.7, 9)], label_logits=True)).results:
        yes, no = (math.exp(label.logit) for label in result.label_logits)
        assert result.probability == pytest.approx(yes / (yes + no), abs=1e-6)
        assert result.probability == pytest.approx(1 / (1 + math.exp(-result.log_odds)), abs=1e-6)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_no_number_leaves_where_one_is_not_finite(bad):
    async def scenario():
        async with served(FakeRuntime()) as at:
            response = await at.client.score("q", ["a", f"logits {bad} 0", "a b"], label_logits=True)
            return response, count(at.metrics, "non_finite_scores_total")

    response, counted = asyncio.run(scenario())
    good, sick, other = response.results
    assert sick.status == pb.DOCUMENT_STATUS_NUMERIC_ERROR
    assert sick.message
    assert not any(sick.HasField(name) for name in ("score", "log_odds", "probability"))
    assert not sick.label_logits
    assert (good.score, other.score) == (0.125, 0.25)
    assert response.usage.item_tokens == 3
    assert counted == 1


def test_one_label_has_a_logit_and_no_probability():
    (result,) = ask(build_request("q", ["logits 2.5"]), FakeRuntime(labels=[Label("yes", 1)])).results
    assert (result.score, result.score_kind) == (2.5, pb.SCORE_KIND_LABEL_LOGIT)
    assert not result.HasField("log_odds")
    assert not result.HasField("probability")


def test_query_likelihood_names_its_kind():
    runtime = FakeRuntime(labels=(), kind="query_likelihood")
    request = build_request("q", ["logits 2.5"], vocabulary_probabilities=True)  # the fake normalises on this
    request.options.outputs.Clear()
    tokenize = runtime.tokenization.tokenize

    def normalised(request):
        tokenized = tokenize(request)
        return replace(tokenized, request=replace(tokenized.request, normalize=True))

    runtime.tokenization.tokenize = normalised
    (result,) = ask(request, runtime).results
    assert (result.score, result.score_kind) == (-2.5, pb.SCORE_KIND_MEAN_LOG_PROBABILITY)
    assert not result.HasField("probability")


def test_label_logits_come_on_request():
    (plain,) = ask(build_request("q", ["logits 2 1"])).results
    (full,) = ask(build_request("q", ["logits 2 1"], vocabulary_probabilities=True)).results
    assert not plain.label_logits
    assert [(x.label, x.token_id, x.logit) for x in full.label_logits] == [("yes", 1, 2.0), ("no", 2, 1.0)]
    assert full.label_logits[0].vocabulary_probability == pytest.approx(math.exp(2 - 5))
    (logits,) = ask(build_request("q", ["logits 2 1"], label_logits=True)).results
    assert not logits.label_logits[0].HasField("vocabulary_probability")


def test_usage_sums():
    documents = ["a " * n for n in range(1, 8)]
    usage = ask(build_request("q", documents)).usage
    asked_alone = 7 * PREFIX_TOKENS + sum(range(1, 8))
    assert usage.prefix_tokens + usage.item_tokens == PREFIX_TOKENS + sum(range(1, 8))
    assert usage.computed_tokens + usage.saved_tokens == asked_alone
    assert usage.saved_tokens == 6 * PREFIX_TOKENS


def test_the_strategy_and_its_reason_are_told():
    response = ask(build_request("q", ["a", "a b", "a b c d e"]))
    assert {s.strategy: s.documents for s in response.strategy.shares} == {
        pb.STRATEGY_MULTI_ITEM: 2,
        pb.STRATEGY_DIRECT_RAGGED: 1,
    }
    assert response.strategy.reason == "a fake"
    assert response.results[2].strategy == pb.STRATEGY_DIRECT_RAGGED


def test_the_stages_do_not_overlap():
    timings = ask(build_request("q", ["a"]), FakeRuntime(seconds=0.02)).timings
    assert timings.tokenize_seconds >= 0.02
    assert (timings.queue_seconds, timings.plan_seconds, timings.forward_seconds) == (0.001, 0.002, 0.003)
    assert timings.total_seconds >= timings.tokenize_seconds


def test_model_info():
    async def scenario():
        async with served(FakeRuntime()) as at:
            told = await at.client.model_info(fingerprint=True)
            return await at.client.model_info(), told.fingerprint, at.metrics

    info, fingerprint, metrics = asyncio.run(scenario())
    assert (info.fingerprint, fingerprint) == ("", "fake abc123")
    assert (info.model, info.architecture, info.backend) == ("fake-model", "FakeForCausalLM", "torch")
    assert [(x.text, x.token_id, x.positive) for x in info.labels] == [("yes", 1, True), ("no", 2, False)]
    assert info.score_kind == pb.SCORE_KIND_LOG_ODDS
    assert info.strategies == [pb.STRATEGY_NAIVE, pb.STRATEGY_MULTI_ITEM]
    assert (info.limits.max_documents, info.limits.max_message_bytes) == (2000, 64 << 20)
    assert (info.version, info.vocabulary_size, info.profile_verified) == ("1.2.3", 1000, True)
    assert (info.memory.budget_bytes, info.memory.weights_bytes, info.memory.cache_bytes) == (1000, 600, 300)
    assert count(metrics, "memory_bytes", part="budget") == 1000
    assert count(metrics, "memory_bytes", part="weights") == 600
    assert any(s.labels.get("model") == "fake-model" for f in metrics.registry.collect() for s in f.samples)


# --- refusals


def test_no_documents_is_the_callers_fault():
    error = refused(pb.ScoreRequest())
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [(v.field, v.description) for v in error.violations] == [("documents", "at least one document, got 0")]


class Refusing:
    """A tokenization that finds every request invalid."""

    labels = ()

    def __init__(self, violations):
        self.violations = violations

    def tokenize(self, request):
        raise InvalidRequest(self.violations)


def refusing(*violations):
    runtime = FakeRuntime()
    runtime.tokenization = Refusing(violations)
    return runtime


@pytest.mark.parametrize("text", ["x", "é" * 5000, "\n\x00" * 5000, "👩‍👩‍👧‍👦" * 500, "%" * 5000])
def test_details_fit_in_four_kilobytes_however_much_is_wrong(text):
    violations = [Violation(f"documents[{i}].id", text, f"unique, {text}") for i in range(10_000)]
    status_bytes = []

    async def scenario():
        async with served(refusing(*violations)) as at:
            call = at.client._stub.Score(build_request("q", ["a"]))
            status_bytes.append(dict(await call.trailing_metadata())["grpc-status-details-bin"])
            return await call.code(), await call.details()

    code, message = asyncio.run(scenario())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert len(status_bytes[0]) <= 4096
    status = status_pb2.Status.FromString(status_bytes[0])
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    assert bad_request.field_violations[0].field == "documents[0].id"
    assert all(len(v.description) <= 300 + 100 + 10 for v in bad_request.field_violations)
    assert "\n" not in message
    assert f"and {10_000 - len(bad_request.field_violations)} more" in message


def test_a_value_is_shortened():
    error = refused(build_request("q", ["a"]), refusing(Violation("query.text", "z" * 5000, "at most 512 tokens")))
    assert error.violations[0].description == "at most 512 tokens, got " + "z" * 99 + "…"


def test_a_strategy_that_cannot_compute_it_is_a_bad_field():
    error = refused(build_request("q", ["a"]), FakeRuntime(error=StrategyError("multi_item takes up to 3: naive")))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [(v.field, v.description) for v in error.violations] == [
        ("options.strategy", "multi_item takes up to 3: naive")
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QueueFull("9 tokens wait"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Expired("the deadline came first"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (Closed("the service is stopping"), grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_what_the_batcher_refuses_keeps_its_reason(error, code):
    told = refused(build_request("q", ["a"]), FakeRuntime(error=error))
    assert (told.code, told.message) == (code, str(error))
    assert told.retry_after_seconds == (1 if code is grpc.StatusCode.RESOURCE_EXHAUSTED else None)


@pytest.mark.parametrize("error", [DeviceFailed("RuntimeError in the forward pass"), KeyError("secret of the house")])
def test_our_own_faults_say_nothing_but_an_id_that_the_log_has(error, caplog):
    told = refused(build_request("q", ["a"]), FakeRuntime(error=error))
    assert told.code is grpc.StatusCode.INTERNAL
    error_id = told.message.removeprefix("internal error, id ")
    assert len(error_id) == 12
    (record,) = [r for r in caplog.records if r.name == "scorer.calls"]
    assert error_id in record.getMessage()
    assert record.exc_info[1] is error


def test_unavailable_before_the_model_is_there_and_while_draining():
    async def scenario():
        async with served(None) as at:
            with pytest.raises(ScorerError, match="UNAVAILABLE: the service is starting"):
                await at.client.score("q", ["a"])
            with pytest.raises(ScorerError, match="UNAVAILABLE: the service is starting"):
                await at.client.model_info()
            at.service.serve(FakeRuntime())
            await at.client.score("q", ["a"])
            at.service.refuse("the service is draining")
            with pytest.raises(ScorerError, match="UNAVAILABLE: the service is draining"):
                await at.client.score("q", ["a"])
            return ended(at.metrics)

    assert asyncio.run(scenario()) == {"UNAVAILABLE": 2, "OK": 1}


# --- every call ends once


async def until(condition, seconds=5.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def test_the_low_class_has_times_of_its_own():
    async def scenario():
        async with served(FakeRuntime()) as at:
            await at.client.score_request(build_request("q", ["a"], priority=pb.PRIORITY_LOW))
            return at.metrics.registry

    labels = {"method": "score", "stage": "total"}
    count = partial(asyncio.run(scenario()).get_sample_value, "prefixrank_stage_seconds_count")
    assert (count({**labels, "priority": "low"}), count({**labels, "priority": "normal"})) == (1, 0)


def test_a_deadline_and_a_cancellation_are_counted_as_what_they_are_and_stop_the_work():
    async def scenario():
        runtime = FakeRuntime()
        runtime.batcher.gate.clear()
        async with served(runtime) as at:
            with pytest.raises(ScorerError) as late:
                await at.client.score("q", ["a"], timeout=0.1)
            await until(lambda: runtime.batcher.cancelled == 1)
            gone = asyncio.create_task(at.client.score("q", ["a"]))
            await until(lambda: runtime.batcher.submitted == 2)
            assert count(at.metrics, "in_flight_requests") == 1
            gone.cancel()
            await until(lambda: runtime.batcher.cancelled == 2)
            await at.service.calls.idle()
            return late.value.code, ended(at.metrics), count(at.metrics, "in_flight_requests")

    code, codes, in_flight = asyncio.run(scenario())
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert codes == {"DEADLINE_EXCEEDED": 1, "CANCELLED": 1}
    assert in_flight == 0


def test_the_calls_deadline_is_the_requests():
    async def scenario():
        runtime = FakeRuntime()
        async with served(runtime) as at:
            await at.client.score("q", ["a"], timeout=20)
            await at.client.score("q", ["a"], timeout=None)
        return runtime.batcher.deadlines

    with_deadline, without = asyncio.run(scenario())
    assert 15 < with_deadline - time.monotonic() < 20.3  # gRPC rounds it up by as much as a hundredth
    assert without is None


def test_every_ending_is_counted_once():
    async def scenario():
        runtime = FakeRuntime()
        async with served(runtime) as at:
            await at.client.score("q", ["a", ""])
            for error in (QueueFull("full"), Expired("late"), ValueError("bug")):
                runtime.batcher.error = error
                with pytest.raises(ScorerError):
                    await at.client.score("q", ["a"])
            with pytest.raises(ScorerError):
                await at.client.score("q", [])
            documents = {s: count(at.metrics, "documents_total", status=s) for s in ("ok", "empty")}
            return ended(at.metrics), documents, count(at.metrics, "internal_errors_total")

    codes, documents, internal = asyncio.run(scenario())
    assert codes == {
        "OK": 1,
        "RESOURCE_EXHAUSTED": 1,
        "DEADLINE_EXCEEDED": 1,
        "INTERNAL": 1,
        "INVALID_ARGUMENT": 1,
    }
    assert documents == {"ok": 1, "empty": 1}
    assert internal == 1


def test_the_queues_depth_is_the_batchers():
    async def scenario():
        runtime = FakeRuntime()
        async with served(runtime) as at:
            runtime.batcher.queued_tokens = 77
            return count(at.metrics, "queue_tokens")

    assert asyncio.run(scenario()) == 77


def test_tokenising_does_not_hold_up_the_loop():
    async def scenario():
        runtime = FakeRuntime(seconds=0.05)
        async with served(runtime) as at:
            calls = [asyncio.create_task(at.client.score("q", ["a"] * 20)) for _ in range(16)]
            await until(lambda: count(at.metrics, "in_flight_requests") == 16)
            waits = []
            while not all(call.done() for call in calls):
                started = time.perf_counter()
                await at.client.model_info()
                waits.append(time.perf_counter() - started)
            assert threading.active_count() < 16
            return waits

    waits = sorted(asyncio.run(scenario()))
    assert len(waits) > 50
    assert waits[len(waits) // 2] < 0.02


def test_the_log_has_one_line_a_call_and_no_text(caplog):
    caplog.set_level(logging.INFO, "scorer.access")
    ask(build_request("my secret query", ["my secret document"], request_id="a b\nforged=1", tenant="t\r\n"))
    refused(build_request("my secret query", [], request_id="r" * 5000))
    records = [r for r in caplog.records if r.name == "scorer.access"]
    answered, refusal = [formatter(text=False).format(r) for r in records]
    assert len(answered.splitlines()) == len(refusal.splitlines()) == 1
    told = json.loads(answered)
    assert (told["request_id"], told["tenant"], told["code"]) == ("a b\nforged=1", "t\r\n", "OK")
    assert (told["documents"], told["prefix_tokens"]) == (1, 10)
    assert json.loads(refusal)["code"] == "INVALID_ARGUMENT"
    assert "r" * 101 not in refusal
    assert "secret" not in answered + refusal
    for record in records:
        assert len(formatter(text=True).format(record).splitlines()) == 1


# --- a real runtime, a tiny model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def really(model_dir, scenario, **limits):
    """Runs `scenario(at, runtime)` on a server that scores for real."""

    async def run():
        runtime = Runtime.load(Config.read({"model": str(model_dir), "profile": "instruct"}, environ={}))
        try:
            async with served(runtime, **limits) as at:
                return await scenario(at, runtime)
        finally:
            await runtime.batcher.drain()
            runtime.close()

    return asyncio.run(run())


def test_bad_requests_are_named_by_field(model_dir):
    requests = {
        "documents": build_request("q", []),
        "query": build_request("", ["a"]),
        "documents[1].id": build_request("q", ["one", "two"], ids=["x", "x"]),
    }

    async def scenario(at, runtime):
        for request in requests.values():
            with pytest.raises(ScorerError) as caught:
                await at.client.score_request(request)
            caught_errors.append(caught.value)

    caught_errors = []
    really(model_dir, scenario)
    assert {error.code for error in caught_errors} == {grpc.StatusCode.INVALID_ARGUMENT}
    for field, error in zip(requests, caught_errors, strict=True):
        assert error.violations[0].field.startswith(field.split("[")[0])
    assert "x" in caught_errors[2].message


def test_duplicate_texts_get_equal_bits_and_are_computed_once(model_dir):
    async def scenario(at, runtime):
        return await at.client.score("q", ["same text", "other", "same text"])

    response = really(model_dir, scenario)
    first, other, again = response.results
    assert first.score == again.score != other.score
    usage = response.usage
    assert usage.computed_tokens == usage.prefix_tokens + first.tokens + other.tokens
    assert usage.item_tokens == 2 * first.tokens + other.tokens
    assert usage.computed_tokens + usage.saved_tokens == 3 * usage.prefix_tokens + usage.item_tokens


def test_neighbours_blank_ones_too_change_no_score(model_dir):
    async def scenario(at, runtime):
        together = await at.client.score("q", ["", "a", "   ", "\n", "b c d e f"])
        alone = await at.client.score("q", ["a"])
        return together, alone

    together, alone = really(model_dir, scenario)
    assert [r.HasField("score") for r in together.results] == [False, True, False, False, True]
    assert together.results[1].score == pytest.approx(alone.results[0].score, abs=1e-4)


def test_one_nan_in_the_weights_costs_only_the_documents_that_reach_it(model_dir):
    async def scenario(at, runtime):
        sick_id = runtime.tokenization.tokenize(build_request("q", ["7"])).request.items[0].ids
        healthy_id = runtime.tokenization.tokenize(build_request("q", ["b"])).request.items[0].ids
        (sick,) = set(sick_id.tolist()) - set(healthy_id.tolist())
        await at.client.score("q", ["a b"])  # from here on the prefix is cached, so both compute the same rows
        before = await at.client.score("q", ["a b", "x 7", "b c d"])
        with torch.no_grad():
            runtime.engine.model.hf.get_input_embeddings().weight[sick] = math.nan
        after = await at.client.score("q", ["a b", "x 7", "b c d"])
        return before, after, count(at.metrics, "non_finite_scores_total")

    before, after, counted = really(model_dir, scenario)
    assert [r.status for r in after.results] == [
        pb.DOCUMENT_STATUS_OK,
        pb.DOCUMENT_STATUS_NUMERIC_ERROR,
        pb.DOCUMENT_STATUS_OK,
    ]
    assert not after.results[1].HasField("score")
    for i in (0, 2):
        assert after.results[i].score == pytest.approx(before.results[i].score, abs=1e-6)
    assert counted == 1


# --- what arrives


@pytest.mark.parametrize(("method", "kind"), [("Score", "ScoreRequest"), ("GetModelInfo", "GetModelInfoRequest")])
def test_bytes_that_are_no_message_are_the_callers_fault(method, kind):
    async def scenario():
        async with served(FakeRuntime()) as at, grpc.aio.insecure_channel(at.target) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/prefixrank.v1.ScorerService/{method}")(b"\xff\xff\xff")
            return caught.value, ended(at.metrics)

    error, codes = asyncio.run(scenario())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == f"request: the bytes of a prefixrank.v1.{kind}, got 3 bytes that are none"
    assert codes == ({"INVALID_ARGUMENT": 1} if method == "Score" else {})


def test_bytes_that_wait_for_the_tokenizer_are_bounded():
    """The first two calls have the threads; what waits behind them is counted too, until it is tokenised."""
    runtime = FakeRuntime()
    gate = threading.Event()
    tokenize = runtime.tokenization.tokenize
    runtime.tokenization.tokenize = lambda request: gate.wait(10) and tokenize(request)

    async def scenario():
        async with served(runtime, max_tokenizing_bytes=10_000) as at:
            calls = []
            for bytes_ in (3000, 6000, 9000):
                calls.append(asyncio.create_task(at.client.score("q", ["a" * 3000])))
                await until(lambda bytes_=bytes_: at.service.tokenizers.bytes > bytes_)
            with pytest.raises(ScorerError, match=r"RESOURCE_EXHAUSTED: 90\d\d bytes wait to be tokenized"):
                await at.client.score("q", ["a" * 3000])
            calls[2].cancel()
            await until(lambda: at.service.tokenizers.bytes < 7000)  # it had no thread yet
            gate.set()
            await asyncio.gather(*calls[:2])
            assert at.service.tokenizers.bytes == 0
            await at.client.score("q", ["a" * 30_000])  # an idle service takes anything legal
            return ended(at.metrics)

    assert asyncio.run(scenario()) == {"OK": 3, "CANCELLED": 1, "RESOURCE_EXHAUSTED": 1}
