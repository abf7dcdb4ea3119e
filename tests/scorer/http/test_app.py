"""The HTTP port of a listening server over a fake runtime: shapes, refusals, limits, and callers who go away."""

import asyncio
import json
import math
import os
import re
import signal
import socket
import ssl
from itertools import chain

import httpx
import pytest
import uvicorn
from prometheus_client import generate_latest

from batching.errors import DeviceFailed, Expired, QueueFull
from prefixrank.v1 import scorer_pb2 as pb
from scorer.errors import InvalidRequest
from scorer.http import listener
from scorer.http.app import make_app
from scorer.http.problems import HTTP_CODES
from scorer.http.rerank import RerankV1, RerankV2
from scorer.http.score import ItemsRequest, PairsRequest
from scorer.http.texts import TextsRequest
from scorer.metrics import Metrics
from scorer.service import ScorerService
from scorer.tokenization import Label
from tests.certificates import Pki
from tests.scorer.test_server import Life, run
from tests.scorer.test_service import FakeRuntime, until

TOKEN, SHOP_TOKEN = "a-token-of-sixteen-or-more", "the-shops-token-0123456789"
PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score")
DOCUMENTS = ["logits 1 2", "logits 4 2", "logits 3 2"]
BODIES = {
    "/v1/rerank": {"query": "q", "documents": DOCUMENTS},
    "/v2/rerank": {"query": "q", "documents": DOCUMENTS},
    "/rerank": {"query": "q", "texts": DOCUMENTS},
    "/v1/score": {"query": "q", "items": DOCUMENTS},
    "/score": {"text_1": "q", "text_2": DOCUMENTS},
}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


EXPECTED = [sigmoid(1 - 2), sigmoid(4 - 2), sigmoid(3 - 2)]


class Http(Life):
    """A server with an HTTP port, and a client of it."""

    def __init__(self, runtime=None, **settings):
        super().__init__(runtime or FakeRuntime(), http_port=0, **settings)

    async def __aenter__(self):
        await super().__aenter__()
        await self.listening()
        self.client = httpx.AsyncClient(base_url=f"http://{self.addresses.http}", trust_env=False, timeout=10)
        return self

    async def __aexit__(self, *exception):
        await self.client.aclose()
        await super().__aexit__(*exception)

    async def post(self, path, body=None, **kwargs):
        return await self.client.post(path, json=BODIES[path] if body is None else body, **kwargs)


def asked(path, body=None, runtime=None, **settings):
    """One request to a fresh server."""

    async def scenario():
        async with Http(runtime, **settings) as http:
            return await http.post(path, body)

    return asyncio.run(scenario())


def message(path, answer):
    """What an error says, from the place where the API's clients look."""
    body = answer.json()
    if path == "/rerank":
        return body["error"]
    return body["error"]["message"] if path == "/score" else body["message"]


# --- answers


def test_cohere_v1_and_jina():
    answer = asked("/v1/rerank", {**BODIES["/v1/rerank"], "top_n": 2, "return_documents": True, "model": "any"})
    assert answer.status_code == 200
    told = answer.json()
    assert [r["index"] for r in told["results"]] == [1, 2]
    assert [r["relevance_score"] for r in told["results"]] == pytest.approx([EXPECTED[1], EXPECTED[2]])
    assert told["results"][0]["document"] == {"text": DOCUMENTS[1]}
    assert told["model"] == "fake-model"
    assert told["usage"] == {"total_tokens": 19, "prompt_tokens": 19}
    assert told["meta"]["api_version"] == {"version": "1"}


def test_documents_may_be_objects_with_a_text():
    documents = [{"text": DOCUMENTS[0]}, DOCUMENTS[1]]
    answer = asked("/v1/rerank", {"query": "q", "documents": documents, "rank_fields": ["text"]})
    assert [r["index"] for r in answer.json()["results"]] == [1, 0]
    assert "document" not in answer.json()["results"][0]


def test_cohere_v2_answers_all_best_first():
    told = asked("/v2/rerank").json()
    assert [r["index"] for r in told["results"]] == [1, 2, 0]
    assert told["meta"]["api_version"] == {"version": "2"}


@pytest.mark.parametrize("extra", [{"top_k": 2}, {"truncation": True}, {"truncation": False, "top_k": 1}])
def test_voyage_is_known_by_its_fields(extra):
    told = asked("/v1/rerank", {**BODIES["/v1/rerank"], **extra}).json()
    assert told["object"] == "list"
    assert [r["index"] for r in told["data"]] == [1, 2, 0][: extra.get("top_k", 3)]
    assert told["usage"] == {"total_tokens": 19}


def test_text_embeddings_inference():
    told = asked("/rerank", {**BODIES["/rerank"], "return_text": True}).json()
    assert [r["index"] for r in told] == [1, 2, 0]
    assert told[0] == {"index": 1, "score": pytest.approx(EXPECTED[1]), "text": DOCUMENTS[1]}
    raw = asked("/rerank", {**BODIES["/rerank"], "raw_scores": True, "truncate": True}).json()
    assert [r["score"] for r in raw] == pytest.approx([2, 1, -1])


def test_vllm_one_against_many_and_pairs():
    told = asked("/score").json()
    assert [d["score"] for d in told["data"]] == pytest.approx(EXPECTED)
    assert [d["index"] for d in told["data"]] == [0, 1, 2]
    pairs = asked("/score", {"text_1": ["a", "b", "a"], "text_2": DOCUMENTS, "use_activation": False}).json()
    assert [d["score"] for d in pairs["data"]] == pytest.approx([-1, 2, 1])
    assert asked("/score", {"text_1": "q", "text_2": DOCUMENTS[0]}).json()["data"][0]["score"] < 0.5


PAIRS = {"text_1": ["a", "b", "a", "c"], "text_2": [*DOCUMENTS, "logits 7 2"], "use_activation": False}


def test_pairs_with_several_queries_are_one_call(caplog):
    """One of the caller's rate, of the counts, of the log, of the documents' limit and of the deadline."""
    caplog.set_level("INFO", "scorer.access")

    async def scenario():
        async with Http(max_requests_per_second=0.001) as http:
            http.runtime.batcher.gate.clear()
            call = asyncio.create_task(http.post("/score", PAIRS, headers={"x-request-id": "r-1"}))
            await until(lambda: http.runtime.batcher.submitted == 3)  # all of them, before one is answered
            http.runtime.batcher.gate.set()
            answer = await call
            assert [d["score"] for d in answer.json()["data"]] == pytest.approx([-1, 2, 1, 5])
            assert answer.json()["usage"]["total_tokens"] == 3 * 10 + 4 * 3
            page = (await http.client.get(f"http://{http.addresses.metrics}/metrics")).text
            for line in (
                'requests_total{code="OK"} 1.0',
                'documents_total{status="ok"} 4.0',
                "request_documents_count 1.0",
                "request_documents_sum 4.0",
            ):
                assert f"prefixrank_{line}" in page
            assert (await http.post("/score", PAIRS)).status_code == 429
            assert http.runtime.batcher.submitted == 3

    run(scenario)
    records = [r for r in caplog.records if r.name == "scorer.access"]
    assert [(r.request_id, r.code, r.documents) for r in records] == [
        ("r-1", "OK", 4),
        ("", "RESOURCE_EXHAUSTED", 4),
    ]


def test_pairs_have_one_deadline():
    async def scenario():
        async with Http(http_timeout_seconds=0.2) as http:
            http.runtime.batcher.gate.clear()
            assert (await http.post("/score", PAIRS)).status_code == 504
            assert len(set(http.runtime.batcher.deadlines)) == 1
            await until(lambda: http.runtime.batcher.cancelled == 3)

    run(scenario)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"text_1": ["a", "b"], "text_2": ["ok", ""]}, "text_2[1]: EMPTY"),
        ({"text_1": ["a", "b", "a"], "text_2": ["ok", "ok", " "]}, "text_2[2]: EMPTY"),
        ({"text_1": ["a", "b"] * 1001, "text_2": ["ok"] * 2002}, "text_2: between 1 and 2000 documents, got 2002"),
    ],
)
def test_of_pairs_the_bad_one_is_named(body, told):
    runtime = FakeRuntime()
    answer = asked("/score", body, runtime)
    assert answer.status_code == 400
    assert message("/score", answer).startswith(told)
    assert runtime.batcher.submitted <= 2


@pytest.mark.parametrize(("field", "told"), [("query.text", "text_1[3]"), ("documents[0].text", "text_2[3].text")])
def test_one_query_that_fails_ends_the_others(field, told):
    async def scenario():
        runtime = FakeRuntime()
        tokenize = runtime.tokenization.tokenize

        def picky(request):
            if request.query.text == "c":
                raise InvalidRequest.of(field, "not so", "c")
            return tokenize(request)

        runtime.tokenization.tokenize = picky
        async with Http(runtime) as http:
            http.runtime.batcher.gate.clear()
            answer = await http.post("/score", PAIRS)
            assert (answer.status_code, message("/score", answer)) == (400, f"{told}: not so, got c")
            assert runtime.batcher.cancelled == runtime.batcher.submitted

    run(scenario)


def test_a_single_labels_relevance_is_its_probability_in_the_vocabulary():
    runtime = FakeRuntime(labels=[Label("yes", 1)])
    runtime.batcher._scored = lambda item, normalize: single_label(normalize)
    (result, *_) = asked("/v2/rerank", runtime=runtime).json()["results"]
    assert result["relevance_score"] == pytest.approx(math.exp(4 - 5))


def single_label(normalize):
    import numpy as np

    from attention.plans import Strategy
    from batching.types import Scored

    assert normalize
    return Scored(np.array([[4.0]], np.float32), np.array([5.0], np.float32), Strategy.MULTI_ITEM)


def test_a_document_without_a_score_comes_last_and_says_why():
    (first, second) = asked("/v2/rerank", {"query": "q", "documents": ["", "a b"]}).json()["results"]
    assert (first["index"], second["index"]) == (1, 0)
    assert (second["relevance_score"], second["status"], second["message"]) == (0.0, "EMPTY", "no text")
    assert "status" not in first


@pytest.mark.parametrize(("path", "name"), [("/rerank", "texts"), ("/score", "text_2"), ("/v1/rerank", "documents")])
def test_where_nothing_else_can_be_said_a_document_without_a_score_is_an_error(path, name):
    answer = asked(path, {**BODIES[path], name: ["", " "]})
    assert answer.status_code == (422 if path == "/rerank" else 400)
    assert message(path, answer).startswith(f"{name}[0]: ")


# --- refusals


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("error", "code"), [(QueueFull("full"), 429), (Expired("late"), 504), (DeviceFailed("boom"), 500)]
)
def test_the_services_refusals_in_each_ones_own_shape(path, error, code):
    answer = asked(path, runtime=FakeRuntime(error=error))
    assert answer.status_code == (424 if (path, code) == ("/rerank", 500) else code)
    assert message(path, answer)
    assert "boom" not in answer.text
    assert ("retry-after" in answer.headers) == (code == 429)
    if path == "/rerank":
        assert answer.json()["error_type"] == {429: "Overloaded", 504: "Unknown", 500: "Backend"}[code]
    if path == "/v1/rerank":
        assert answer.json()["detail"] == answer.json()["message"]
    if path == "/v1/score":
        assert (answer.json()["object"], answer.json()["code"]) == ("error", code)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v2/rerank", {"documents": ["a"]}, "query: Field required"),
        ("/v2/rerank", {"query": "q", "documents": []}, "documents: List should have at least 1 item"),
        ("/v2/rerank", {"query": "q", "documents": ["a", 3]}, "documents[1]: Input should be a valid string"),
        ("/v2/rerank", {"query": "q", "documents": ["a"], "relevant_spans": {}}, "relevant_spans: Extra inputs"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n: Input should be greater than"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "max_chunks_per_doc": 2}, "max_chunks_per_doc: Extra"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 1, "top_k": 1}, "not both"),
        ("/v1/score", {"query": "q", "items": ["a"], "item_first": True}, "item_first: only false"),
        ("/v1/score", {"query": "q", "items": [[1]]}, "items: text where query is text"),
        ("/v1/score", {"query": "q", "items": ["a"], "label_token_ids": [1, 2, 3]}, "label_token_ids: List should"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2: one text_1"),
        ("/rerank", {"query": "q", "texts": ["a"], "truncation_direction": "Up"}, "truncation_direction: Input"),
    ],
)
def test_a_bad_field_is_named(path, body, told):
    answer = asked(path, body)
    assert answer.status_code == (422 if path == "/rerank" else 400)
    assert told in message(path, answer)


NOT_SO = [
    ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 1, "top_k": 1}),
    ("/v1/score", {"query": "q", "items": ["a"], "item_first": True}),
    ("/v1/score", {"query": "q", "items": [[1]]}),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}),
    ("/score", {"text_1": "q"}),
]
NO_SCORE = [
    ("/v1/rerank", {"query": "q", "documents": ["", " "]}),
    ("/v2/rerank", {"query": "q", "documents": [""]}),
    ("/rerank", {"query": "q", "texts": ["a", ""]}),
    ("/v1/score", {"query": "q", "items": ["a", ""]}),
    ("/score", {"text_1": "q", "text_2": ["a", ""]}),
    ("/score", {"text_1": ["q", "r"], "text_2": ["a", ""]}),
]


@pytest.mark.parametrize(("path", "body"), NOT_SO + NO_SCORE)
def test_a_refusal_is_counted_and_logged_once_as_its_caller_saw_it(path, body, caplog):
    caplog.set_level("INFO", "scorer.access")

    async def scenario():
        async with Http() as http:
            answer = await http.post(path, body, headers={"x-request-id": "r-1", "x-prefixrank-tenant": "shop"})
            assert answer.status_code == (422 if path == "/rerank" else 400)
            assert await counted(http) == {"INVALID_ARGUMENT": 1.0}

    run(scenario)
    records = [r for r in caplog.records if r.name == "scorer.access"]
    assert [(r.request_id, r.tenant, r.code) for r in records] == [("r-1", "shop", "INVALID_ARGUMENT")]


@pytest.mark.parametrize("path", PATHS)
def test_what_comes_before_a_model_is_served_is_counted_once(path):
    metrics = Metrics("1.2.3")
    app = make_app(ScorerService(metrics, "1.2.3"), "1.2.3", 1 << 20, 10.0)

    async def scenario():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            assert (await client.post(path, json=BODIES[path])).status_code == 503
            assert (await client.get("/health")).status_code == 503

    run(scenario)
    assert calls(generate_latest(metrics.registry).decode()) == {"UNAVAILABLE": 1.0}


async def counted(http):
    return calls((await http.client.get(f"http://{http.addresses.metrics}/metrics")).text)


def calls(page):
    """By their code."""
    found = re.findall(r'^prefixrank_requests_total\{code="(\w+)"} (\S+)$', page, re.MULTILINE)
    return {code: float(count) for code, count in found if float(count)}


V1 = "/v1/rerank"
ITEMS = "items: Input should be a text, a list of texts or a list of lists of token ids"
WRONG_KINDS = [
    ("/v1/score", {"query": "q", "items": [1]}, ITEMS),
    ("/v1/score", {"query": "q", "items": 1}, ITEMS),
    ("/v1/score", {"query": "q", "items": ["a", 1]}, "items[1]: Input should be a valid string"),
    ("/v1/score", {"query": [1], "items": [[1], [-1]]}, "items[1][0]: Input should be greater than or equal to 0"),
    ("/v1/score", {"query": "q", "items": []}, "items: List should have at least 1 item after validation, not 0"),
    ("/v1/score", {"query": {}, "items": ["a"]}, "query: Input should be a text or a list of token ids"),
    ("/score", {"text_1": 1, "text_2": "a"}, "text_1: Input should be a text or a list of texts"),
    ("/score", {"text_1": "q", "text_2": [[]]}, "text_2: Input should be a text or a list of texts"),
    (
        "/v1/rerank",
        {"query": "q", "documents": ["a", 1]},
        "documents[1]: Input should be a text or an object with a text",
    ),
    (V1, {"query": "q", "documents": [{}]}, "documents[0].text: Field required"),
    (
        "/v1/rerank",
        {"query": "q", "documents": [{"text": "a", "x": 1}]},
        "documents[0].x: Extra inputs are not permitted",
    ),
    (V1, {"query": None, "documents": ["a"]}, "query: Input should be a valid string"),
    ("/v2/rerank", [1], "body: Input should be an object"),
]


def test_what_is_wrong_is_told_once_and_not_every_alternative():
    async def scenario():
        async with Http() as http:
            for path, body, told in WRONG_KINDS:
                assert message(path, await http.post(path, body)) == told

    run(scenario)


GZIP = {"content-encoding": "gzip"}


@pytest.mark.parametrize(
    ("body", "headers", "told"),
    [
        (b'{"query":', {}, "body: no JSON: Expecting value at character 9"),
        (b"\x80", {}, "body: no JSON in UTF-8"),
        (b"[" * 100_000, {}, "body: nested too deeply"),
        (b"{}", GZIP, "content-encoding: only a body as it is, got 'gzip'"),
        (b"{}", {"content-type": "text/plain"}, "content-type: application/json, got 'text/plain'"),
        (b"{}", {"content-type": ""}, "content-type: application/json, got ''"),
    ],
)
def test_a_body_that_cannot_be_read_is_told_why_counted_and_logged(body, headers, told, caplog):
    caplog.set_level("INFO", "scorer.access")

    async def scenario():
        async with Http() as http:
            headers_ = {"content-type": "application/json", "x-request-id": "r-1"} | headers
            for path in PATHS:
                answer = await http.client.post(path, content=body, headers=headers_)
                assert (answer.status_code, message(path, answer)) == (422 if path == "/rerank" else 400, told)
            page = (await http.client.get(f"http://{http.addresses.metrics}/metrics")).text
            assert f'prefixrank_requests_total{{code="INVALID_ARGUMENT"}} {len(PATHS)}.0' in page

    run(scenario)
    records = [(r.request_id, r.code, r.caller) for r in caplog.records if r.name == "scorer.access"]
    assert records == [("r-1", "INVALID_ARGUMENT", "anyone")] * len(PATHS)


def test_json_has_many_names():
    async def scenario():
        async with Http() as http:
            for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
                data, headers = json.dumps(BODIES["/v2/rerank"]), {"content-type": kind}
                answer = await http.client.post("/v2/rerank", content=data, headers=headers)
                assert answer.status_code == 200, answer.text

    run(scenario)


NAMES = {
    "/v1/rerank": RerankV1,
    "/v2/rerank": RerankV2,
    "/rerank": TextsRequest,
    "/v1/score": ItemsRequest,
    "/score": PairsRequest,
}


@pytest.mark.parametrize("path", PATHS)
def test_null_is_as_good_as_absent(path):
    """Clients send what they were not given as null, fields that we do not know among it."""
    optional = [name for name, field in NAMES[path].model_fields.items() if not field.is_required()]
    kept = {"top_k", "truncation"}  # they tell Voyage's client from others, null or not

    def same(answer):
        return {key: value for key, value in answer.items() if key not in ("id", "created")}

    async def scenario():
        async with Http() as http:
            plain = (await http.post(path)).json()
            for names in ([n for n in optional if n not in kept], ["max_chunks_per_doc", "of_the_future"]):
                answer = await http.post(path, BODIES[path] | dict.fromkeys(names))
                assert answer.status_code == 200, answer.text
                told = answer.json()
                assert told == plain if isinstance(plain, list) else same(told) == same(plain)
            assert (await http.post(path, BODIES[path] | {"of_the_future": 1})).status_code in (400, 422)

    run(scenario)


def test_voyages_nulls_get_voyages_answer():
    told = asked("/v1/rerank", {**BODIES["/v1/rerank"], "top_k": None}).json()
    assert [r["index"] for r in told["data"]] == [1, 2, 0]


@pytest.mark.parametrize(("side", "kept"), [("left", "LEFT"), ("Left", "LEFT"), ("right", "RIGHT"), ("Right", "RIGHT")])
def test_the_side_to_cut_is_spelt_either_way(side, kept):
    runtime = FakeRuntime()
    seen, tokenize = [], runtime.tokenization.tokenize
    runtime.tokenization.tokenize = lambda request: seen.append(request.options.truncation) or tokenize(request)
    answer = asked("/rerank", {**BODIES["/rerank"], "truncation_direction": side}, runtime)
    assert (answer.status_code, seen) == (200, [pb.Truncation.Value(f"TRUNCATION_{kept}")])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"query": "\\ud800", "documents": ["a"]}']
)
def test_what_is_no_request_is_a_bad_request(body):
    async def scenario():
        async with Http() as http:
            return await http.client.post("/v2/rerank", content=body, headers={"content-type": "application/json"})

    answer = asyncio.run(scenario())
    assert answer.status_code == 400
    assert answer.json()["message"]


# Bodies with every field that holds a text, in every form that it may have.
ALL_TEXTS = [
    ("/v1/rerank", RerankV1, {"query": "q", "documents": ["a", {"text": "b"}], "model": "m", "rank_fields": ["text"]}),
    ("/v2/rerank", RerankV2, {"query": "q", "documents": ["a", "b"], "model": "m"}),
    ("/rerank", TextsRequest, {"query": "q", "texts": ["a", "b"], "truncation_direction": "Left"}),
    ("/v1/score", ItemsRequest, {"query": "q", "items": ["a", "b"], "model": "m"}),
    ("/v1/score", ItemsRequest, {"query": "q", "items": "a", "model": "m"}),
    ("/score", PairsRequest, {"text_1": ["q", "r"], "text_2": ["a", "b"], "model": "m"}),
    ("/score", PairsRequest, {"text_1": "q", "text_2": "a", "model": "m"}),
]


HALVES = ["\ud800", "a\udfffb", "\udc00\ud800", "word " * 2000 + "\udbff"]


def with_each_text(body, made, path=""):
    """(the place, the body) with each text in turn replaced by `made`, and with it as one more name of each object."""
    parts = body.items() if isinstance(body, dict) else enumerate(body)
    if isinstance(body, dict):
        yield "", {**body, made: 1}
    for key, value in parts:
        place = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".removeprefix(".")
        inner = [(place, made)] if isinstance(value, str) else with_each_text(value, made, place)
        for at, changed in inner:
            whole = body.copy()
            whole[key] = changed
            yield at, whole


@pytest.mark.parametrize(("path", "model", "body"), ALL_TEXTS)
def test_the_bodies_have_every_field_that_holds_a_text(path, model, body):
    fields = model.model_json_schema()["properties"]
    assert {name for name, field in fields.items() if '"string"' in json.dumps(field)} == set(body)


@pytest.mark.parametrize(("path", "model", "body"), ALL_TEXTS)
def test_half_a_surrogate_is_refused_wherever_it_is(path, model, body):
    """JSON can write what no UTF-8 has; a text's other half may have been cut off by its sender."""

    async def scenario():
        async with Http() as http:
            headers = {"content-type": "application/json"}
            assert (await http.post(path, body)).status_code == 200
            for place, damaged in chain.from_iterable(with_each_text(body, made) for made in HALVES):
                answer = await http.client.post(path, content=json.dumps(damaged), headers=headers)
                assert answer.status_code == (422 if path == "/rerank" else 400), (place, answer.text)
                told = message(path, answer)
                assert place in told
                assert len(told) < 1000, "what was sent is not sent back"
                if place not in ("", "rank_fields[0]", "truncation_direction"):
                    assert told == f"{place}: no valid Unicode: a surrogate without its other half"
            assert http.runtime.batcher.submitted == 1 + (path == "/score" and isinstance(body["text_1"], list))

    run(scenario)


@pytest.mark.parametrize("text", ["\U0001f642", "\uffff", "\0", "e\u0301"])
def test_whole_characters_pass_however_they_are_written(text):
    """json writes what is beyond the first plane as two surrogates."""

    async def scenario():
        async with Http() as http:
            for path in PATHS:
                name = {"/rerank": "texts", "/v1/score": "items", "/score": "text_2"}.get(path, "documents")
                data = json.dumps({**BODIES[path], name: ["a", text]})
                answer = await http.client.post(path, content=data, headers={"content-type": "application/json"})
                assert answer.status_code == 200, answer.text

    run(scenario)


def test_an_unknown_path_and_method_are_told():
    async def scenario():
        async with Http() as http:
            assert (await http.client.get("/v3/rerank")).status_code == 404
            assert (await http.client.get("/v2/rerank")).status_code == 405

    run(scenario)


def test_a_body_over_the_limit_is_refused_with_and_without_a_length(caplog):
    async def chunks():
        for _ in range(40):
            yield b" " * 100

    async def scenario():
        async with Http(max_message_bytes=2000) as http:
            answer = await http.post("/v2/rerank", {"query": "q", "documents": ["x" * 2000]})
            assert answer.status_code == 413
            assert "max_message_bytes = 2000" in answer.json()["message"]
            assert (await http.client.post("/v2/rerank", content=chunks())).status_code == 413
            assert (await http.post("/v2/rerank")).status_code == 200
            page = (await http.client.get(f"http://{http.addresses.metrics}/metrics")).text
            assert 'prefixrank_requests_total{code="OUT_OF_RANGE"} 2.0' in page

    caplog.set_level("INFO", "scorer.access")
    run(scenario)
    assert [r.code for r in caplog.records if r.name == "scorer.access"] == ["OUT_OF_RANGE", "OUT_OF_RANGE", "OK"]


# --- callers


def test_only_health_is_open_without_a_token(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n{SHOP_TOKEN} shop\n")

    async def scenario():
        async with Http(auth_tokens_file=str(tokens)) as http:
            assert (await http.client.get("/health")).status_code == 200
            for path in ("/openapi.json", "/docs", "/nothing"):
                assert (await http.client.get(path)).status_code == 401
            for path in PATHS:
                answer = await http.post(path)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "Authorization: Bearer TOKEN" in message(path, answer)
            assert http.runtime.batcher.submitted == 0
            good = {"authorization": f"Bearer {TOKEN}"}
            assert (await http.post("/v2/rerank", headers=good)).status_code == 200
            assert (await http.client.get("/openapi.json", headers=good)).status_code == 200
            page = (await http.client.get(f"http://{http.addresses.metrics}/metrics")).text
            assert f'prefixrank_requests_total{{code="UNAUTHENTICATED"}} {len(PATHS)}.0' in page
            shop = {"authorization": f"Bearer {SHOP_TOKEN}", "x-prefixrank-tenant": "bank"}
            assert (await http.post("/v2/rerank", headers=shop)).status_code == 403

    run(scenario)


def test_tenant_and_request_id_come_from_headers(caplog):
    caplog.set_level("INFO", "scorer.access")

    async def scenario():
        async with Http() as http:
            headers = {"x-request-id": "r-1", "x-prefixrank-tenant": "shop"}
            assert (await http.post("/v2/rerank", headers=headers)).json()["id"] == "r-1"

    run(scenario)
    (record,) = [r for r in caplog.records if r.name == "scorer.access"]
    assert (record.request_id, record.tenant, record.code) == ("r-1", "shop", "OK")


def test_with_mutual_tls_only_a_known_client_gets_in(tmp_path):
    pki = Pki.made(tmp_path)

    async def scenario():
        async with Http(**pki.settings()) as http:
            url = f"https://{http.addresses.http}/v2/rerank"
            certificate = (str(pki.path("client.crt")), str(pki.path("client.key")))
            context = ssl.create_default_context(cafile=pki.path("ca.crt"))
            async with httpx.AsyncClient(verify=context, trust_env=False) as stranger:
                with pytest.raises(httpx.TransportError):
                    await stranger.post(url, json=BODIES["/v2/rerank"])
            context.load_cert_chain(*certificate)
            async with httpx.AsyncClient(verify=context, trust_env=False) as known:
                assert (await known.post(url, json=BODIES["/v2/rerank"])).status_code == 200
            assert http.runtime.batcher.submitted == 1

    run(scenario)


def tls_call(port, context, session=None):
    """One request on a connection of its own: the session that it could resume. Raises OSError where it is let down."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname="localhost", session=session) as secured,
    ):
        secured.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        if not (told := secured.recv(64)).startswith(b"HTTP/1.1 200"):
            raise ConnectionError(told)
        return secured.session


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_who_the_old_client_authority_signed_is_out_once_there_is_a_new_one(tmp_path, caplog, monkeypatch, version):
    monkeypatch.setattr(listener, "RELOAD_SECONDS", 0.05)
    (tmp_path / "other").mkdir()
    pki, other = Pki.made(tmp_path), Pki.made(tmp_path / "other")
    trusted = tmp_path / "clients.crt"
    trusted.write_bytes(pki.path("ca.crt").read_bytes())

    def client(its):
        context = ssl.create_default_context(cafile=pki.path("ca.crt"))
        context.maximum_version = version
        context.load_cert_chain(its.path("client.crt"), its.path("client.key"))
        return context

    async def scenario():
        async with Http(**pki.settings() | {"tls_client_ca": str(trusted)}) as http:
            port = int(http.addresses.http.rpartition(":")[2])

            async def call(context, session=None):
                return await asyncio.to_thread(tls_call, port, context, session)

            async def gets_in(context, session=None):
                try:
                    return bool(await call(context, session))
                except OSError:
                    return False

            mine, theirs = client(pki), client(other)
            session = await call(mine)
            assert not await gets_in(theirs)
            async with httpx.AsyncClient(verify=mine, trust_env=False) as kept:
                assert (await kept.get(f"https://localhost:{port}/health")).status_code == 200
                trusted.write_bytes(other.path("ca.crt").read_bytes())
                await until(lambda: "certificates read again" in caplog.text)
                assert await gets_in(theirs)
                assert not await gets_in(mine)
                assert not await gets_in(mine, session)
                assert (await kept.get(f"https://localhost:{port}/health")).status_code == 200
            for damaged in ("half a renewal", other.path("ca.crt").read_text()[:300]):
                caplog.clear()
                trusted.write_text(damaged)
                await until(lambda: "the ones in use stay" in caplog.text)
                assert await gets_in(theirs)
                assert not await gets_in(mine)
            trusted.write_bytes(pki.path("ca.crt").read_bytes())
            await until(lambda: "certificates read again" in caplog.text)
            assert await gets_in(mine)
            assert not await gets_in(theirs)

    caplog.set_level("INFO")
    run(scenario)


def test_a_renewal_that_fails_is_told_and_tried_again_and_a_stop_waits_for_one_that_has_begun(caplog, monkeypatch):
    monkeypatch.setattr(listener, "RELOAD_SECONDS", 0.01)
    tried, context = [], ssl.create_default_context()
    begun, done = asyncio.Event(), []

    class Server:
        started = True

        async def renew(self, listening, given):
            tried.append(given)
            if len(tried) == 1:
                raise RuntimeError("no room")
            begun.set()
            await asyncio.sleep(0.05)
            done.append(given)

    async def scenario():
        stopping, made = asyncio.Event(), [context]
        renewing = asyncio.create_task(listener._renew(Server(), None, lambda: made.pop() if made else None, stopping))
        await begun.wait()
        stopping.set()
        await renewing

    run(scenario)
    assert (tried, done) == ([context, context], [context])
    assert "cannot take the new certificates yet: RuntimeError('no room')" in caplog.text


def test_a_renewal_that_is_cancelled_leaves_what_listens_to_be_closed():
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as listening:
            settings = uvicorn.Config(make_app(ScorerService(Metrics("1"), "1"), "1", 1, 1.0), lifespan="off")
            settings.load()
            server = listener._Server(settings)
            server.lifespan = settings.lifespan_class(settings)
            await server.startup(sockets=[listening.dup()])
            (first,) = before = server.servers
            renewing = asyncio.create_task(server.renew(listening, None))
            await asyncio.sleep(0)
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            assert renewing.cancelled()
            assert server.servers is before
            assert first.is_serving()
            first.close()

    run(scenario)


def test_a_caller_who_goes_away_cancels_the_work():
    async def scenario():
        async with Http() as http:
            http.runtime.batcher.gate.clear()
            call = asyncio.create_task(http.post("/v2/rerank"))
            await until(lambda: http.runtime.batcher.submitted == 1)
            call.cancel()
            await until(lambda: http.runtime.batcher.cancelled == 1)

    run(scenario)


def test_the_deadline_is_the_settings():
    async def scenario():
        async with Http(http_timeout_seconds=0.1) as http:
            http.runtime.batcher.gate.clear()
            answer = await http.post("/v2/rerank")
            assert answer.status_code == 504
            assert http.runtime.batcher.deadlines[0] is not None

    run(scenario)


# --- life


def test_health_follows_the_services_life_and_a_drain_answers_what_was_accepted():
    async def scenario():
        async with Http() as http:
            http.runtime.batcher.gate.clear()
            accepted = asyncio.create_task(http.post("/v2/rerank"))
            await until(lambda: http.runtime.batcher.submitted == 1)
            assert (await http.client.get("/health")).json() == {"model": "fake-model"}
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            assert (await http.client.get("/health")).status_code == 503
            refused = await http.post("/rerank")
            assert (refused.status_code, refused.json()["error_type"]) == (503, "Unhealthy")
            http.runtime.batcher.gate.set()
            assert (await accepted).status_code == 200
            assert await http.exit_code() == 0

    run(scenario)


def test_a_taken_port_is_a_clear_error(caplog):
    async def scenario():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            async with Life(http_port=taken.getsockname()[1]) as life:
                assert await life.exit_code() == 1

    run(scenario)
    assert "for HTTP" in caplog.text


def test_every_code_of_a_refusal_has_its_number():
    from scorer.refusal import STATUS_CODES

    assert set(STATUS_CODES.values()) <= HTTP_CODES.keys()
