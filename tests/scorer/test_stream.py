"""Many requests on one call, and prefixes sent ahead, behind a real gRPC server on loopback."""

import asyncio
import threading
import time

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from batching.errors import CannotFinish, Expired
from prefixrank.v1 import scorer_pb2 as pb
from prefixrank.v1 import scorer_pb2_grpc as pb_grpc
from scorer import stream as streaming
from scorer.client import ScorerClient, ScorerError, build_request
from scorer.tracing import OtelTracer
from tests.scorer.test_service import FakeRuntime, count, ended, really, served
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.timeout(60)


def numbered(n, **options):
    return [build_request("q", ["a " * (i + 1)], request_id=f"r{i}", **options) for i in range(n)]


async def collected(stream):
    return {request_id: answer async for request_id, answer in stream}


def on_stream(requests, runtime=None, **options):
    """(answers by id, codes that ended) of one stream to a fresh server."""

    async def scenario():
        async with served(runtime or FakeRuntime()) as at:
            return await collected(at.client.score_stream(requests, **options)), ended(at.metrics)

    return asyncio.run(scenario())


def test_each_request_gets_its_own_answer():
    answers, codes = on_stream(numbered(40))
    assert {id_: answer.results[0].tokens for id_, answer in answers.items()} == {f"r{i}": i + 1 for i in range(40)}
    assert all(answer.request_id == id_ for id_, answer in answers.items())
    assert codes == {"OK": 40}


def test_an_empty_stream_ends_well():
    assert on_stream([]) == ({}, {})


def test_who_is_done_first_is_answered_first():
    async def scenario():
        runtime = FakeRuntime()
        slow, submit = asyncio.Event(), runtime.batcher.submit

        async def slowly(request, deadline=None):
            if request.priority:
                await slow.wait()
            return await submit(request, deadline)

        runtime.batcher.submit = slowly
        tokenize = runtime.tokenization.tokenize

        def marked(request):
            made = tokenize(request)
            object.__setattr__(made.request, "priority", int(request.request_id == "r0"))
            return made

        runtime.tokenization.tokenize = marked
        async with served(runtime) as at:
            order = []
            async for request_id, _ in at.client.score_stream(numbered(3)):
                order.append(request_id)
                if len(order) == 2:
                    slow.set()
            return order

    assert asyncio.run(scenario())[-1] == "r0"


def test_an_error_is_an_answer_and_the_stream_lives():
    bad = build_request("q", [], request_id="bad")
    answers, codes = on_stream([*numbered(2), bad, *numbered(5)[2:]])
    error = answers.pop("bad")
    assert isinstance(error, ScorerError)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in error.violations] == ["documents"]
    assert len(answers) == 5
    assert codes == {"OK": 5, "INVALID_ARGUMENT": 1}


def test_the_error_is_google_rpc_status_to_the_byte():
    async def scenario():
        async with (
            served(FakeRuntime(error=CannotFinish("too late", 0.25))) as at,
            grpc.aio.insecure_channel(at.target) as channel,
        ):
            call = pb_grpc.ScorerServiceStub(channel).ScoreStream()
            await call.write(pb.ScoreStreamRequest(request=numbered(1)[0]))
            return await call.read()

    response = asyncio.run(scenario())
    status = status_pb2.Status.FromString(response.error.SerializeToString())
    assert (status.code, status.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "too late")
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 250


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.ScoreStreamRequest(request=build_request("q", ["a"])), "request.request_id"),
        (pb.ScoreStreamRequest(request=numbered(1)[0], timeout_seconds=-1), "timeout_seconds"),
        (pb.ScoreStreamRequest(request=numbered(1)[0], timeout_seconds=float("nan")), "timeout_seconds"),
        (pb.ScoreStreamRequest(request=numbered(1)[0], timeout_seconds=float("inf")), "timeout_seconds"),
        (pb.ScoreStreamRequest(request=numbered(1)[0], timeout_seconds=1e308), "timeout_seconds: between 0 and 1e+06"),
        (pb.ScoreStreamRequest(request=numbered(1)[0], timeout_seconds=1.1e6), "timeout_seconds: between 0 and 1e+06"),
    ],
)
def test_a_bad_message_is_told_by_field(message, field):
    async def scenario():
        async with served(FakeRuntime()) as at, grpc.aio.insecure_channel(at.target) as channel:
            call = pb_grpc.ScorerServiceStub(channel).ScoreStream()
            await call.write(message)
            bad = await call.read()
            await call.write(pb.ScoreStreamRequest(request=build_request("q", ["a"], request_id="good")))
            return bad, await call.read()

    bad, good = asyncio.run(scenario())
    assert bad.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert field in bad.error.message
    assert good.request_id == "good"
    assert good.response.results


def test_bytes_that_are_no_message_are_answered_too():
    async def scenario():
        async with served(FakeRuntime()) as at, grpc.aio.insecure_channel(at.target) as channel:
            raw = channel.stream_stream(
                "/prefixrank.v1.ScorerService/ScoreStream", None, pb.ScoreStreamResponse.FromString
            )
            call = raw()
            await call.write(b"\xff\xff\xff")
            return await call.read()

    assert asyncio.run(scenario()).error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_an_id_under_way_is_not_taken_twice_and_is_free_again_afterwards():
    async def scenario():
        runtime = FakeRuntime()
        runtime.batcher.gate.clear()
        async with served(runtime) as at, grpc.aio.insecure_channel(at.target) as channel:
            call = pb_grpc.ScorerServiceStub(channel).ScoreStream()
            message = pb.ScoreStreamRequest(request=numbered(1)[0])
            for _ in range(2):
                await call.write(message)
            twice = await call.read()
            runtime.batcher.gate.set()
            first = await call.read()
            await call.write(message)
            return twice, first, await call.read()

    twice, first, again = asyncio.run(scenario())
    assert "'r0'" in twice.error.message
    assert "still under way" in twice.error.message
    assert (twice.request_id, first.request_id) == ("", "r0"), "nobody takes it for the first one's"
    assert first.response.results
    assert again.response.results


def test_a_message_that_is_refused_is_logged_with_what_is_known_of_it(caplog):
    caplog.set_level("INFO", "scorer.access")
    request = build_request("q", ["a", "b"], request_id="r0")
    request.tenant = "shop"
    bad = pb.ScoreStreamRequest(request=request, timeout_seconds=-1)

    async def scenario():
        async with served(FakeRuntime()) as at, grpc.aio.insecure_channel(at.target) as channel:
            call = pb_grpc.ScorerServiceStub(channel).ScoreStream()
            await call.write(bad)
            await call.read()
            await call.done_writing()
            await call.code()

    asyncio.run(scenario())
    (record,) = [r for r in caplog.records if r.name == "scorer.access"]
    assert (record.request_id, record.tenant, record.documents) == ("r0", "shop", 2)
    assert record.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("kind", ["list", "async", "sync client"])
@pytest.mark.parametrize("bad", ["r1", ""])
def test_our_client_sends_no_request_that_could_not_be_told_from_another(kind, bad):
    """Those before it are answered; it and what is behind it were never sent, which the caller hears at the end."""
    requests = [*numbered(3), build_request("q", ["a"], request_id=bad), build_request("q", ["a"], request_id="z")]

    async def one_by_one():
        for request in requests:
            yield request

    async def all_of(stream, answers):
        async for request_id, _ in stream:
            answers.append(request_id)

    def at_once(target, answers):
        with ScorerClient(target) as client:
            for request_id, _ in client.score_stream(requests):
                answers.append(request_id)

    async def scenario():
        runtime, answers = FakeRuntime(), []
        runtime.batcher.gate.clear()
        asyncio.get_running_loop().call_later(0.2, runtime.batcher.gate.set)
        async with served(runtime) as at:
            if kind == "sync client":
                call = asyncio.to_thread(at_once, at.target, answers)
            else:
                call = all_of(at.client.score_stream(requests if kind == "list" else one_by_one()), answers)
            with pytest.raises(ValueError, match="request_id"):
                await call
            return sorted(answers), ended(at.metrics)

    answers, codes = asyncio.run(scenario())
    assert (answers, codes) == (["r0", "r1", "r2"], {"OK": 3})


def test_an_id_is_free_for_our_client_once_its_answer_was_given():
    async def scenario():
        answered = asyncio.Event()

        async def twice():
            yield numbered(1)[0]
            await answered.wait()
            yield numbered(1)[0]

        async with served(FakeRuntime()) as at:
            ids = []
            async for request_id, _ in at.client.score_stream(twice()):
                ids.append(request_id)
                answered.set()
            return ids

    assert asyncio.run(scenario()) == ["r0", "r0"]


def test_each_request_has_its_own_deadline_and_none_outlives_the_call():
    runtime = FakeRuntime()
    on_stream(numbered(2), runtime, request_timeout=3.0, timeout=20.0)
    on_stream(numbered(2), runtime, request_timeout=30.0, timeout=5.0)
    on_stream(numbered(2), runtime, request_timeout=None, timeout=None)
    left = [None if deadline is None else deadline - time.monotonic() for deadline in runtime.batcher.deadlines]
    assert all(1.0 < seconds <= 3.0 for seconds in left[:2])
    assert all(2.0 < seconds <= 5.1 for seconds in left[2:4])
    assert left[4:] == [None, None]


def test_a_deadline_that_comes_first_is_an_error_of_its_request():
    answers, codes = on_stream(numbered(2), FakeRuntime(error=Expired("late")))
    assert {answer.code for answer in answers.values()} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert codes == {"DEADLINE_EXCEEDED": 2}


@pytest.mark.parametrize("partial", [False, True])
def test_a_deadline_that_has_come_is_refused_before_anything(partial):
    runtime = FakeRuntime()
    answers, codes = on_stream(numbered(3, partial_ok=partial), runtime, request_timeout=1e-9)
    assert {str(answer) for answer in answers.values()} == {"DEADLINE_EXCEEDED: its deadline has come"}
    assert codes == {"DEADLINE_EXCEEDED": 3}
    assert runtime.tokenization.texts == {}


def gated(runtime):
    """Lets nothing through the runtime's tokenizer until the gate opens."""
    gate, tokenize = threading.Event(), runtime.tokenization.tokenize
    runtime.tokenization.tokenize = lambda request: gate.wait(20) and tokenize(request)
    return gate


@pytest.mark.parametrize("partial", [False, True])
def test_a_deadline_holds_while_the_tokenizer_has_other_texts(partial):
    """With partial_ok every document is told to have had no turn; the reply still comes in time."""

    async def scenario():
        runtime = FakeRuntime()
        gate = gated(runtime)
        async with served(runtime) as at:
            began = time.monotonic()
            requests = numbered(6, partial_ok=partial)
            answers = await collected(at.client.score_stream(requests, request_timeout=0.5))
            took = time.monotonic() - began
            gate.set()
            misses = count(at.metrics, "deadline_misses_total")
        return answers, took, misses, ended(at.metrics), runtime

    answers, took, misses, codes, runtime = asyncio.run(scenario())
    assert took >= 0.4, "at their deadline, not before"
    assert (len(answers), misses, runtime.batcher.submitted) == (6, 6, 0)
    assert runtime.batcher.sizes == [], "nothing was learned of what was not tokenized"
    if partial:
        assert codes == {"OK": 6}
        results = [answer.results[0] for answer in answers.values()]
        assert {(r.id, r.status, r.HasField("score")) for r in results} == {("0", pb.DOCUMENT_STATUS_DEADLINE, False)}
        assert {r.message for r in results} == {"the deadline came before it was tokenized"}
    else:
        assert codes == {"DEADLINE_EXCEEDED": 6}
        assert {answer.code for answer in answers.values()} == {grpc.StatusCode.DEADLINE_EXCEEDED}


@pytest.mark.parametrize("method", ["WarmPrefix", "BeamSearch"])
def test_a_deadline_holds_for_calls_without_documents_too(method, model_dir):
    async def scenario(at, runtime):
        gate, prefix = threading.Event(), runtime.tokenization.prefix
        runtime.tokenization.prefix = lambda request: gate.wait(20) and prefix(request)
        asked = {
            "WarmPrefix": pb.WarmPrefixRequest(raw_text="xyz"),
            "BeamSearch": pb.BeamSearchRequest(raw_text="xyz", num_beams=2, max_new_tokens=4),
        }[method]
        async with grpc.aio.insecure_channel(at.target) as channel:
            call = getattr(pb_grpc.ScorerServiceStub(channel), method)
            codes = {await call(asked, timeout=0.3).code() for _ in range(3)}
        await at.service.calls.idle()
        gate.set()
        return codes, ended(at.metrics)

    codes, counted = really(model_dir, scenario)
    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert counted == {"DEADLINE_EXCEEDED": 3}


def test_texts_that_wait_for_the_tokenizer_count_at_the_first_look():
    async def scenario():
        runtime = FakeRuntime()
        gate, looks = gated(runtime), []
        runtime.batcher.admit_bytes = lambda size, asked, deadline, texts: looks.append(texts)
        async with served(runtime) as at:
            reading = asyncio.create_task(collected(at.client.score_stream(numbered(5))))
            while len(looks) < 5:
                await asyncio.sleep(0.01)
            gate.set()
            await reading
        return looks

    looks = asyncio.run(scenario())
    assert [len(texts.sizes) for texts in looks] == [0, 1, 2, 3, 4]
    assert {texts.most_tokens for texts in looks} == {8192 + 512}


def test_cancelling_the_stream_cancels_what_is_under_way():
    async def scenario():
        runtime = FakeRuntime()
        runtime.batcher.gate.clear()
        async with served(runtime) as at, grpc.aio.insecure_channel(at.target) as channel:
            call = pb_grpc.ScorerServiceStub(channel).ScoreStream()
            for request in numbered(5):
                await call.write(pb.ScoreStreamRequest(request=request))
            while runtime.batcher.submitted < 5:
                await asyncio.sleep(0.01)
            call.cancel()
            await at.service.calls.idle()
            return runtime.batcher.cancelled, ended(at.metrics), count(at.metrics, "in_flight_requests")

    cancelled, codes, left = asyncio.run(scenario())
    assert cancelled == 5
    assert codes == {"CANCELLED": 5}
    assert left == 0


def test_a_stream_is_not_read_on_while_too_much_is_under_way(monkeypatch):
    monkeypatch.setattr(streaming, "MAX_UNDER_WAY", 4)

    async def scenario():
        runtime = FakeRuntime()
        runtime.batcher.gate.clear()
        async with served(runtime) as at:
            reading = asyncio.create_task(collected(at.client.score_stream(numbered(20))))
            while runtime.batcher.submitted < 4:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            most = runtime.batcher.submitted
            runtime.batcher.gate.set()
            return most, await reading

    most, answers = asyncio.run(scenario())
    assert most == 4
    assert len(answers) == 20


def test_while_the_service_drains_new_requests_of_a_stream_are_refused_and_accepted_ones_answered():
    async def scenario():
        runtime = FakeRuntime()
        runtime.batcher.gate.clear()
        async with served(runtime) as at, grpc.aio.insecure_channel(at.target) as channel:
            call = pb_grpc.ScorerServiceStub(channel).ScoreStream()
            accepted, late = numbered(2)
            await call.write(pb.ScoreStreamRequest(request=accepted))
            while not runtime.batcher.submitted:
                await asyncio.sleep(0.01)
            at.service.refuse("the service is draining")
            await call.write(pb.ScoreStreamRequest(request=late))
            refused = await call.read()
            runtime.batcher.gate.set()
            return refused, await call.read()

    refused, answered = asyncio.run(scenario())
    assert (refused.request_id, refused.error.code) == ("r1", grpc.StatusCode.UNAVAILABLE.value[0])
    assert answered.request_id == "r0"
    assert answered.response.results


# --- over a tiny real model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def warming(text, tenant="t", **fields):
    return pb.WarmPrefixRequest(query=pb.QueryPrefix(text=text), tenant=tenant, **fields)


def test_a_warmed_prefix_is_cached_for_its_tenant(model_dir):
    async def scenario(at, runtime):
        warmed = await at.client.warm_prefix(warming("capital of France", request_id="w", ttl_seconds=5))
        again = await at.client.warm_prefix(warming("capital of France"))
        mine = await at.client.score("capital of France", ["Paris", "Rice"], tenant="t")
        other = await at.client.score("capital of France", ["Paris", "Rice"], tenant="u")
        return warmed, again, mine, other

    warmed, again, mine, other = really(model_dir, scenario)
    assert (warmed.status, again.status) == (pb.WARM_STATUS_WARMED, pb.WARM_STATUS_ALREADY_WARM)
    assert (warmed.request_id, warmed.ttl_seconds, again.ttl_seconds) == ("w", 5, 60)
    assert warmed.prefix_tokens == warmed.kept_tokens == again.cached_prefix_tokens == mine.usage.prefix_tokens
    assert mine.usage.cached_prefix_tokens == mine.usage.prefix_tokens
    assert mine.usage.computed_tokens == mine.usage.item_tokens
    assert other.usage.cached_prefix_tokens == 0
    for one, two in zip(mine.results, other.results, strict=True):
        assert one.score == pytest.approx(two.score, abs=1e-4)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.WarmPrefixRequest(), "query.text"),
        (warming("  "), "query.text"),
        (warming("q", ttl_seconds=-1), "ttl_seconds"),
        (warming("q", ttl_seconds=1e9), "ttl_seconds"),
        (warming("q", ttl_seconds=float("nan")), "ttl_seconds"),
        (pb.WarmPrefixRequest(token_ids=pb.TokenIds(ids=[1 << 30])), "token_ids.ids"),
    ],
)
def test_a_bad_prefix_is_refused_by_field(model_dir, request_, field):
    async def scenario(at, runtime):
        with pytest.raises(ScorerError) as caught:
            await at.client.warm_prefix(request_)
        return caught.value

    error = really(model_dir, scenario)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in error.violations] == [field]


def test_the_known_beginning_of_a_prefix_can_be_warmed_too(model_dir):
    async def scenario(at, runtime):
        ids = list(range(40, 110))
        await at.client.warm_prefix(pb.WarmPrefixRequest(token_ids=pb.TokenIds(ids=ids[:50])))
        request = pb.ScoreRequest(
            token_ids=pb.TokenIds(ids=ids), documents=[pb.Document(token_ids=pb.TokenIds(ids=[5, 6]))]
        )
        return await at.client.score_request(request)

    assert really(model_dir, scenario).usage.cached_prefix_tokens == 48


def test_where_the_query_stands_in_the_items_there_is_nothing_to_warm():
    async def scenario():
        runtime = FakeRuntime(kind="query_likelihood")
        runtime.profile.prefix = "Passage:"
        async with served(runtime) as at:
            return await at.client.warm_prefix(warming("q")), runtime.batcher.submitted

    response, submitted = asyncio.run(scenario())
    assert response.status == pb.WARM_STATUS_NOTHING_TO_WARM
    assert submitted == 0


@pytest.mark.parametrize("method", ["WarmPrefix", "Score", "BeamSearch"])
@pytest.mark.parametrize("end", ["OK", "DEADLINE_EXCEEDED", "CANCELLED", "INVALID_ARGUMENT"])
def test_every_kind_of_call_is_counted_logged_and_traced_as_its_caller_saw_it(method, end, caplog, model_dir):
    caplog.set_level("INFO", "scorer.access")
    ids = [] if end == "INVALID_ARGUMENT" else [40, 41, 42]
    asked = {
        "WarmPrefix": pb.WarmPrefixRequest(raw_text="x" * len(ids), request_id="r1", tenant="shop"),
        "Score": pb.ScoreRequest(
            raw_text="x" * len(ids), request_id="r1", tenant="shop", documents=[pb.Document(raw_text="Paris")]
        ),
        "BeamSearch": pb.BeamSearchRequest(
            raw_text="x" * len(ids), request_id="r1", tenant="shop", num_beams=2, max_new_tokens=4
        ),
    }[method]

    async def scenario(at, runtime):
        gate, execute = asyncio.Event(), runtime.batcher.passes.execute

        async def later(batch):
            await gate.wait()
            return await execute(batch)

        if end in ("DEADLINE_EXCEEDED", "CANCELLED"):
            runtime.batcher.passes.execute = later
        async with grpc.aio.insecure_channel(at.target) as channel:
            call = getattr(pb_grpc.ScorerServiceStub(channel), method)
            calling = call(asked, timeout=0.3 if end == "DEADLINE_EXCEEDED" else 20.0)
            if end == "CANCELLED":
                while not runtime.batcher.passes.running:
                    await asyncio.sleep(0.01)
                calling.cancel()
            code = await calling.code()
            await at.service.calls.idle()
            gate.set()
            await asyncio.sleep(0.01)  # the log's line is behind the reply
            return code.name, ended(at.metrics)

    traces, spans = TracerProvider(), InMemorySpanExporter()
    traces.add_span_processor(SimpleSpanProcessor(spans))
    code, codes = really(model_dir, scenario, tracer=OtelTracer(traces))
    (span,) = [s for s in spans.get_finished_spans() if s.parent is None]
    status = grpc.StatusCode[end].value[0]
    assert (span.name.rpartition("/")[2], span.attributes["rpc.grpc.status_code"]) == (method, status)
    assert (span.attributes["prefixrank.prefix_tokens"] > 0) == span.status.is_unset == (end == "OK")
    (record,) = [r for r in caplog.records if r.name == "scorer.access"]
    assert (code, codes, record.code) == (end, {end: 1}, end)
    assert (record.request_id, record.tenant, record.message) == (
        "r1",
        "shop",
        {"WarmPrefix": "warm_prefix", "Score": "score", "BeamSearch": "beam_search"}[method],
    )
    assert (record.prefix_tokens > 0) == (end == "OK")


EXTREMES = (0.0, -0.0, 5e-324, 1e-9, 1e-3, 1.0, 3600.0, 1e6, 1000000.1, 1e9, 1e18, 1e300, 1.7e308, float("inf"))


def test_no_number_of_seconds_is_our_fault(model_dir):
    """Each in company, so that turns are compared: an answer, or a status that is the caller's or says load."""
    seconds = [sign * number for number in (*EXTREMES, float("nan")) for sign in (1, -1)]
    messages = [
        pb.ScoreStreamRequest(
            request=build_request(f"q {i}", [f"Paris {i}"], request_id=f"{i}", priority=i % 4), timeout_seconds=number
        )
        for i, number in enumerate(seconds * 3)
    ]

    async def scenario(at, runtime):
        async with grpc.aio.insecure_channel(at.target) as channel:
            stub = pb_grpc.ScorerServiceStub(channel)
            warmings = [
                stub.WarmPrefix(warming("q", ttl_seconds=number), timeout=patience)
                for number in seconds
                for patience in (1e-9, 30.0, 1e9)
            ]
            answers = [answer async for answer in stub.ScoreStream(iter(messages), timeout=None)]
            return answers, {await call.code() for call in warmings}, ended(at.metrics)

    answers, warmed, codes = really(model_dir, scenario)
    assert len(answers) == len(messages)
    allowed = {"OK", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CANCELLED"}
    assert codes.keys() <= allowed
    assert codes["OK"] > 20
    assert {code.name for code in warmed} <= allowed
    refused = {a.request_id for a in answers if a.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]}
    assert refused == {m.request.request_id for m in messages if not 0 <= m.timeout_seconds <= 1e6}


def test_a_stream_over_a_real_model_equals_single_calls(model_dir):
    async def scenario(at, runtime):
        requests = [
            build_request(f"query {i % 3}", [f"text {i} {j}" for j in range(i + 1)], request_id=f"{i}")
            for i in range(9)
        ]
        answers = await collected(at.client.score_stream(requests))
        single = {request.request_id: await at.client.score_request(request) for request in requests}
        return answers, single

    answers, single = really(model_dir, scenario)
    for request_id, alone in single.items():
        for one, two in zip(answers[request_id].results, alone.results, strict=True):
            assert one.score == pytest.approx(two.score, abs=1e-4)
