"""Listwise profiles: documents see those before them, as transformers would read the whole list; nobody else does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention.plans import Strategy
from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import build_request
from scorer.drift import Sampler, drift
from scorer.heads import reads_apart
from scorer.profile import Profile, load_profile
from scorer.reply import per_document
from tests.cases.live import OK, PROFILE, TOLERANCE, all_apart, live, plain_model, plain_tokenizer, wire
from tests.scorer.test_classification import classifier_dir
from tests.tiny import tiny_model_dir

QUERY = "what is the capital of France"
DOCUMENTS = ["The capital of Brazil is Brasília.", "The capital of France is Paris.", "x", "Bananas grow. " * 6, "x"]
LISTWISE = PROFILE.model_copy(update={"name": "tiny-listwise", "listwise": True})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), max_position_embeddings=16_384)


@pytest.fixture(scope="module")
def listwise(directory, tmp_path_factory):
    with live(directory, LISTWISE, tmp_path_factory.mktemp("profile")) as made:
        yield made


@torch.no_grad()
def truth(directory, documents, labels, query=QUERY):
    """Log-odds where each document ends, of the whole list as one text through transformers' own eager attention."""
    tokenizer = plain_tokenizer(directory)
    ids = tokenizer(PROFILE.prefix.replace("{query}", query)).input_ids
    ends = []
    for document in documents:
        ids += tokenizer(PROFILE.item.replace("{document}", document)).input_ids
        ends.append(len(ids) - 1)
    logits = plain_model(directory)(torch.tensor([ids]), use_cache=False).logits[0, ends]
    return (logits[:, labels[0]] - logits[:, labels[1]]).numpy()


@pytest.mark.parametrize("strategy", [None, *Strategy])
def test_each_document_is_read_behind_those_before_it(strategy, listwise):
    expected = truth(listwise.directory, DOCUMENTS, listwise.labels)
    assert all_apart(expected), "even equal documents, as they stand in different places"
    response = listwise.score(QUERY, DOCUMENTS, strategy)
    np.testing.assert_allclose([r.score for r in response.results], expected, rtol=0, atol=TOLERANCE)
    chosen = wire(Strategy.CUSTOM_MASK if strategy is None else strategy)
    assert {r.strategy for r in response.results} == {chosen}
    assert response.strategy.reason.startswith("listwise, each document sees those before it: ")


def test_order_and_company_matter_here_and_nowhere_else(listwise, directory, tmp_path):
    scores = listwise.scores(QUERY, DOCUMENTS)
    assert np.abs(listwise.scores(QUERY, DOCUMENTS[::-1])[::-1] - scores)[1:-1].min() > 1e-3
    assert np.abs(listwise.scores(QUERY, DOCUMENTS[1:]) - scores[1:]).min() > 1e-3
    with live(directory, PROFILE, tmp_path, check=False) as isolated:
        alone = isolated.scores(QUERY, DOCUMENTS)
        np.testing.assert_allclose(alone, isolated.truth(QUERY, DOCUMENTS), rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(isolated.scores(QUERY, DOCUMENTS[::-1])[::-1], alone, rtol=0, atol=TOLERANCE)
    assert scores[0] == pytest.approx(alone[0], abs=TOLERANCE), "the first one has nobody before it"
    assert np.abs(scores - alone)[1:].min() > 1e-3


def test_what_is_not_scored_is_not_seen(listwise):
    """A blank document keeps its place in the answer and has none in the list."""
    documents = [DOCUMENTS[0], "  \n", DOCUMENTS[1], "\u200b"]
    results = listwise.score(QUERY, documents, ids=["a", "b", "c", "d"]).results
    assert [r.status for r in results] == [OK, pb.DOCUMENT_STATUS_EMPTY, OK, pb.DOCUMENT_STATUS_EMPTY]
    scores = [r.score for r in results if r.status == OK]
    expected = truth(listwise.directory, DOCUMENTS[:2], listwise.labels)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=TOLERANCE)
    assert [r.id for r in results] == ["a", "b", "c", "d"]


def test_a_list_is_one_sequence_in_its_usage(listwise):
    usage = listwise.score(QUERY, DOCUMENTS).usage
    assert usage.computed_tokens + usage.cached_prefix_tokens == usage.prefix_tokens + usage.item_tokens
    assert usage.saved_tokens == usage.cached_prefix_tokens


def test_a_long_list_runs_without_a_square_mask(listwise):
    documents = [f"{text} {number}" for number in range(60) for text in DOCUMENTS]
    response = listwise.score(QUERY, documents)
    assert response.usage.item_tokens > 4096
    assert {r.strategy for r in response.results} == {wire(Strategy.DIRECT_RAGGED)}
    expected = truth(listwise.directory, documents, listwise.labels)
    np.testing.assert_allclose([r.score for r in response.results], expected, rtol=0, atol=TOLERANCE)


def test_a_list_longer_than_the_context_is_refused_with_both_numbers(directory, tmp_path):
    with live(directory, LISTWISE, tmp_path, check=False, max_context_tokens=300) as server:
        told = server.refused(build_request(QUERY, ["a b c d e f g"] * 40))
        assert list(told) == ["documents"]
        assert "at most 300 tokens in all, prefix included" in told["documents"]
        assert len(server.scores(QUERY, ["a b c d e f g"] * 5, max_tokens_per_document=100)) == 5


def test_the_caller_is_told(listwise, directory, tmp_path):
    assert listwise.runner.run(listwise.at.client.model_info()).listwise
    with live(directory, PROFILE, tmp_path, check=False) as isolated:
        assert not isolated.runner.run(isolated.at.client.model_info()).listwise


@pytest.mark.parametrize("strategy", [None, Strategy.DIRECT_RAGGED])
def test_labels_probabilities_and_the_best_come_as_elsewhere(strategy, listwise):
    options = {"label_logits": True, "vocabulary_probabilities": True}
    results = listwise.score(QUERY, DOCUMENTS, strategy, **options).results
    for result in results:
        yes, no = result.label_logits
        assert yes.logit - no.logit == pytest.approx(result.score, abs=1e-5)
        assert 0 < yes.vocabulary_probability < 1
    best = listwise.score(QUERY, DOCUMENTS, strategy, top_n=2).results
    assert [r.index for r in best] == np.argsort([-r.score for r in results])[:2].tolist()


def test_classes_are_read_behind_each_document_too(tmp_path):
    directory = classifier_dir(tmp_path / "model", classes=1)
    update = {"kind": "classification", "labels": ("LABEL_0",), "positive": "LABEL_0", "item": " {document} End."}
    with live(directory, LISTWISE.model_copy(update=update), tmp_path) as server:
        listed = server.scores(QUERY, DOCUMENTS)
        for count in range(1, len(DOCUMENTS) + 1):  # a shorter list is the beginning of a longer one
            np.testing.assert_allclose(server.scores(QUERY, DOCUMENTS[:count]), listed[:count], rtol=0, atol=TOLERANCE)
        assert all_apart(listed)


def test_the_check_that_goes_on_after_the_start_takes_lists(listwise):
    request = listwise.runtime.tokenization.tokenize(build_request(QUERY, DOCUMENTS)).request
    sampler = Sampler(0)

    async def scenario():
        submit = listwise.runtime.batcher.submit
        sampler.offer(request, await submit(request, None))
        return await drift(sampler.take(), submit, "label_logits")

    assert listwise.runner.run(scenario()) < TOLERANCE
    scored = listwise.runner.run(listwise.runtime.batcher.submit(request, None)).scored
    assert [len(part.logits) for part in reads_apart(scored[0])] == [1] * len(DOCUMENTS)


def test_query_likelihood_and_chats_have_no_lists():
    fields = load_profile("smollm2-query-likelihood").model_dump(exclude={"golden"})
    with pytest.raises(ValueError, match="listwise: query_likelihood reads the query behind one document"):
        Profile.model_validate(fields | {"listwise": True})
    fields = load_profile("instruct").model_dump()
    with pytest.raises(ValueError, match="listwise: a chat template would close"):
        Profile.model_validate(fields | {"listwise": True})


def test_revisions_tell_lists_apart_and_are_otherwise_what_they_were():
    assert LISTWISE.revision != PROFILE.revision
    assert PROFILE.model_copy(update={"listwise": False}).revision == PROFILE.revision
    assert load_profile("qwen3-reranker").revision == "8d866a008ea1"


def test_at_the_deadline_a_list_has_all_of_its_scores_or_none(listwise):
    tokenized = listwise.runtime.tokenization.tokenize(build_request(QUERY, [*DOCUMENTS, " "]))

    async def scenario():
        submit = listwise.runtime.batcher.submit
        return await submit(tokenized.request, None)

    scores = listwise.runner.run(scenario())
    assert [None if s is None else s.logits.shape for s in per_document(tokenized, scores).scored] == [(1, 2)] * 5
    late = per_document(tokenized, replace(scores, scored=(None,)))
    assert late.scored == (None,) * 5
