"""The clients that others' packages ship, and schemathesis, against a real process with a tiny model."""

import json
import math

import cohere
import httpx
import pytest
import schemathesis
import voyageai
import voyageai.error
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, checks
from transformers import AutoTokenizer

from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import ScorerClient
from scorer.demo import LOOPBACK_OPTIONS, Server
from tests.scorer.http.test_app import PATHS
from tests.tiny import tiny_model_dir

QUERY = "what is the capital of France"
DOCUMENTS = ["Bananas grow in warm climates.", "The capital of France is Paris.", "Seven ways to cook rice."]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model_dir):
    server = Server([f"--model={model_dir}", "--profile=instruct", "--threads=1", "--http-port=0"])
    try:
        server.wait_until_listening()
        yield server
    finally:
        assert server.stop() == 0


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


@pytest.fixture(scope="module")
def over_grpc(server):
    """The same documents' results, over gRPC."""
    with ScorerClient(server.target, channel_options=LOOPBACK_OPTIONS) as client:
        return client.score(QUERY, DOCUMENTS).results


def ranking(results):
    return sorted(range(len(results)), key=lambda i: -results[i].probability)


def test_coheres_client_v1(server, over_grpc):
    client = cohere.Client("any-key", base_url=f"http://{server.http}")
    told = client.rerank(query=QUERY, documents=DOCUMENTS, model="rerank-v3.5", return_documents=True)
    assert [r.index for r in told.results] == ranking(over_grpc)
    for result in told.results:
        assert result.relevance_score == pytest.approx(over_grpc[result.index].probability, abs=1e-6)
        assert result.document.text == DOCUMENTS[result.index]


def test_coheres_client_with_all_that_it_may_send_as_null(server, over_grpc):
    nothing = dict.fromkeys(("top_n", "rank_fields", "return_documents", "max_chunks_per_doc"))
    client = cohere.Client("any-key", base_url=f"http://{server.http}")
    told = client.rerank(query=QUERY, documents=DOCUMENTS, model="m", **nothing)
    assert [r.index for r in told.results] == ranking(over_grpc)
    newer = cohere.ClientV2("any-key", base_url=f"http://{server.http}")
    told = newer.rerank(query=QUERY, documents=DOCUMENTS, model="m", top_n=None, max_tokens_per_doc=None, priority=None)
    assert [r.index for r in told.results] == ranking(over_grpc)


def test_coheres_client_v2(server, over_grpc):
    client = cohere.ClientV2("any-key", base_url=f"http://{server.http}")
    told = client.rerank(query=QUERY, documents=DOCUMENTS, model="rerank-v3.5", top_n=2, max_tokens_per_doc=100)
    assert [r.index for r in told.results] == ranking(over_grpc)[:2]
    with pytest.raises(cohere.errors.BadRequestError, match="max_tokens_per_doc: at most"):
        client.rerank(query=QUERY, documents=DOCUMENTS, model="m", max_tokens_per_doc=1_000_000)


def test_voyages_client(server, over_grpc):
    voyageai.api_base = None
    client = voyageai.Client(api_key="any-key", base_url=f"http://{server.http}/v1")
    told = client.rerank(QUERY, DOCUMENTS, model="rerank-2", top_k=2)
    assert [r.index for r in told.results] == ranking(over_grpc)[:2]
    assert told.results[0].document == DOCUMENTS[ranking(over_grpc)[0]]
    assert told.total_tokens > 0
    with pytest.raises(voyageai.error.InvalidRequestError, match="query"):
        client.rerank(" ", DOCUMENTS, model="rerank-2")


def test_text_embeddings_inferences_request(server, over_grpc):
    """The request that its users' libraries send: a query and texts, then scores by index."""
    told = httpx.post(f"http://{server.http}/rerank", json={"query": QUERY, "texts": DOCUMENTS}).json()
    assert [r["index"] for r in told] == ranking(over_grpc)
    assert [r["score"] for r in told] == pytest.approx([over_grpc[r["index"]].probability for r in told], abs=1e-6)


@pytest.mark.parametrize("as_ids", [False, True])
def test_sglangs_scores_are_the_labels_probabilities(server, model_dir, as_ids):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    labels = [tokenizer.convert_tokens_to_ids(word) for word in ("Yes", "No")]
    query, items = "Query: France\n", ["Passage: Paris\nAnswer:", "Passage: rice\nAnswer:"]
    asked = pb.ScoreRequest(
        raw_text=query,
        documents=[pb.Document(raw_text=item) for item in items],
        options=pb.ScoreOptions(
            label_token_ids=labels, outputs=pb.OutputOptions(label_logits=True, vocabulary_probabilities=True)
        ),
    )
    with ScorerClient(server.target, channel_options=LOOPBACK_OPTIONS) as client:
        expected = client.score_request(asked).results
    if as_ids:
        query, *items = [tokenizer.encode(text, add_special_tokens=False) for text in (query, *items)]
    body = {"query": query, "items": items, "label_token_ids": labels, "model": "m"}
    told = httpx.post(f"http://{server.http}/v1/score", json=body).json()
    shares = httpx.post(f"http://{server.http}/v1/score", json={**body, "apply_softmax": True}).json()
    for told_of, share, result in zip(told["scores"], shares["scores"], expected, strict=True):
        assert told_of == pytest.approx([x.vocabulary_probability for x in result.label_logits], rel=1e-3)
        assert share == pytest.approx([result.probability, 1 - result.probability], abs=1e-4)
        assert math.isclose(sum(share), 1)


def test_vllms_request(server, over_grpc):
    told = httpx.post(f"http://{server.http}/score", json={"text_1": QUERY, "text_2": DOCUMENTS, "model": "m"}).json()
    assert [d["score"] for d in told["data"]] == pytest.approx([r.probability for r in over_grpc], abs=1e-6)


def test_pairs_score_as_each_does_alone(server):
    queries, texts = [QUERY, "how to cook rice", QUERY], DOCUMENTS
    url = f"http://{server.http}/score"
    together = httpx.post(url, json={"text_1": queries, "text_2": texts}).json()["data"]
    for pair, query, text in zip(together, queries, texts, strict=True):
        (alone,) = httpx.post(url, json={"text_1": query, "text_2": text}).json()["data"]
        assert pair["score"] == pytest.approx(alone["score"], abs=1e-5)


def test_too_long_a_text_that_is_not_to_be_cut(server):
    body = {"query": QUERY, "texts": ["word " * 5000], "truncate": False}
    told = httpx.post(f"http://{server.http}/rerank", json=body)
    assert told.status_code == 422
    assert told.json()["error_type"] == "Validation"
    assert "texts[0]: TOO_LONG" in told.json()["error"]


def test_schemathesis_finds_no_fault(server):
    schema = schemathesis.openapi.from_url(f"http://{server.http}/openapi.json")
    wanted = {
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    }
    held = [check for check in checks.CHECKS.get_all() if check.__name__ in wanted]
    assert {check.__name__ for check in held} == wanted
    called = set()
    for operation in schema.get_all_operations():
        for mode in GenerationMode if operation.ok().body else [GenerationMode.POSITIVE]:
            run_one(operation.ok(), mode, held, called)
    both = {(path, mode) for path in PATHS for mode in GenerationMode}
    assert called == both | {("/health", GenerationMode.POSITIVE)}


def run_one(operation, mode, held, called):
    """mode: requests that fit the schema, or that do not and must be refused."""

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    def each(case):
        called.add((operation.path, mode))
        case.call_and_validate(checks=held)

    each()


def test_the_openapi_page_names_the_endpoints(server):
    page = httpx.get(f"http://{server.http}/openapi.json").json()
    assert json.dumps(page["paths"]["/v2/rerank"]["post"]["requestBody"]).count("RerankV2") == 1
    assert httpx.get(f"http://{server.http}/docs").status_code == 200
