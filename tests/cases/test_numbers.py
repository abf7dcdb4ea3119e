"""Kinds of numbers: scores that are many, close, huge, half as precise, constant or none."""

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from attention.plans import Strategy
from prefixrank.v1 import scorer_pb2 as pb
from scorer.embedded import embedded_model
from scorer.errors import ConfigError, ModelError
from scorer.selfcheck import TOLERANCE
from tests.cases.live import OK, PROFILE, close, live, plain_tokenizer
from tests.tiny import tiny_model_dir

QUERY = "what is the capital of France"
TEXTS = ("The capital of France is Paris.", "Bananas grow.", "x")
DOCUMENTS = [f"{text} {number}" for number in range(8) for text in TEXTS]
NUMERIC_ERROR = pb.DOCUMENT_STATUS_NUMERIC_ERROR
every_strategy = pytest.mark.parametrize("strategy", [None, *Strategy])


def changed(directory, name, change):
    """The model on disk with one of its tensors changed in place."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors[name])
    save_file(tensors, path, {"format": "pt"})
    return directory


def label_rows(directory):
    return plain_tokenizer(directory).convert_tokens_to_ids(["yes", "no"])


@every_strategy
def test_many_probabilities_of_one_keep_the_order_of_their_log_odds(strategy, tmp_path):
    """Where every probability rounds to 1, the scores are still apart and in transformers' own order."""
    directory = tiny_model_dir(tmp_path / "model")
    yes, no = label_rows(directory)

    def certain(head):
        head[yes] *= 100
        head[no] = -head[yes]

    changed(directory, "lm_head.weight", certain)
    with live(directory, PROFILE, tmp_path, check=False) as server:
        truth, labels = server.truth(QUERY, DOCUMENTS), ["yes", "no"]
        if truth.mean() < 0:
            truth, labels = -truth, labels[::-1]
        sure = [DOCUMENTS[i] for i in np.argsort(-truth) if truth[i] > 40]
        assert len(sure) > 5
        results = server.score(QUERY, sure, strategy, label_texts=labels).results
        assert {r.probability for r in results} == {1.0}
        scores = [r.score for r in results]
        assert len(set(scores)) == len(scores)
        assert scores == sorted(scores, reverse=True)
        # A head a hundred times as large: so is what rounding leaves.
        np.testing.assert_allclose(scores, truth[[DOCUMENTS.index(d) for d in sure]], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("scale", [1e20, 1e30])
def test_huge_logits_are_scores_while_they_are_numbers(scale, tmp_path):
    directory = changed(tiny_model_dir(tmp_path / "model"), "lm_head.weight", lambda head: head.mul_(scale))
    with live(directory, PROFILE, tmp_path, check=False) as server:
        results = server.score(QUERY, DOCUMENTS, label_logits=True).results
        assert {r.status for r in results} == {OK}
        np.testing.assert_allclose([r.score for r in results], server.truth(QUERY, DOCUMENTS), rtol=1e-4)
        assert all(0.0 <= r.probability <= 1.0 for r in results)
        assert all(np.isfinite(x.logit) for r in results for x in r.label_logits)


def test_logits_past_the_largest_number_are_no_scores(tmp_path):
    directory = changed(tiny_model_dir(tmp_path / "model"), "lm_head.weight", lambda head: head.mul_(1e38))
    with live(directory, PROFILE, tmp_path, check=False) as server:
        results = server.score(QUERY, DOCUMENTS).results
        assert NUMERIC_ERROR in {r.status for r in results}
        for result in results:
            assert result.HasField("score") == (result.status == OK)
        assert server.metric("non_finite_scores_total") == sum(r.status == NUMERIC_ERROR for r in results)


@every_strategy
def test_a_query_whose_token_is_broken_spoils_its_own_call_only(strategy, tmp_path):
    """NaN in the prefix reaches every document behind it, and nothing once it is gone, kept pages included."""
    directory = tiny_model_dir(tmp_path / "model")
    (bad,) = plain_tokenizer(directory).convert_tokens_to_ids(["7"])
    changed(directory, "model.embed_tokens.weight", lambda rows: rows[bad].fill_(float("nan")))
    documents = [d for d in DOCUMENTS if "7" not in d]
    with live(directory, PROFILE, tmp_path, check=False, max_pass_tokens=128) as server:
        before = server.scores(QUERY, documents, strategy)
        spoilt = server.score("7 capitals", documents, strategy).results
        assert {r.status for r in spoilt} == {NUMERIC_ERROR}
        assert not any(r.HasField("score") for r in spoilt)
        assert server.metric("non_finite_scores_total") == len(documents)
        close(server.scores(QUERY, documents, strategy), before)


# --- half precision


@pytest.mark.parametrize(("model", "dtype"), [("tiny", "bfloat16"), ("tiny", "float16"), ("embedded", "bfloat16")])
def test_half_precision_keeps_the_order_of_what_is_further_apart_than_its_tolerance(model, dtype, tmp_path):
    directory = embedded_model() if model == "embedded" else tiny_model_dir(tmp_path / "model")
    profile = "smollm2" if model == "embedded" else PROFILE
    documents = DOCUMENTS[:6] if model == "embedded" else DOCUMENTS
    with live(directory, profile, tmp_path, check=False) as server:
        exact = server.scores(QUERY, documents)
    with live(directory, profile, tmp_path, check=False, dtype=dtype) as server:
        half = server.scores(QUERY, documents)
        tolerance = TOLERANCE[server.runtime.engine.model.dtype]
    np.testing.assert_allclose(half, exact, rtol=0, atol=tolerance)
    assert (half != exact).any(), "half precision is less precise"
    apart = exact[:, None] - exact[None, :] > 2 * tolerance
    assert apart.any()
    assert (half[:, None] > half[None, :])[apart].all()


@pytest.mark.parametrize("dtype", ["float8", "fp8", "int8", "float64", ""])
def test_other_precisions_are_refused_by_name(dtype, tmp_path):
    directory = tiny_model_dir(tmp_path / "model")
    with pytest.raises(ConfigError, match="dtype"), live(directory, PROFILE, tmp_path, dtype=dtype):
        pass


# --- scores that say nothing


def test_scores_that_are_all_alike_stop_the_start(tmp_path):
    """Labels whose rows of the head are equal: any document gets 0."""
    directory = tiny_model_dir(tmp_path / "model")
    yes, no = label_rows(directory)

    def alike(head):
        head[no] = head[yes]

    changed(directory, "lm_head.weight", alike)
    with (
        pytest.raises(ModelError, match=r"all \d samples score .*: the labels or the template do not fit"),
        live(directory, PROFILE, tmp_path),
    ):
        pass


def test_infinity_in_the_labels_head_stops_the_start(tmp_path):
    directory = tiny_model_dir(tmp_path / "model")
    yes, _ = label_rows(directory)
    changed(directory, "lm_head.weight", lambda head: head[yes].fill_(float("inf")))
    with pytest.raises(ModelError, match=r"gives \d of \d samples no finite score"), live(directory, PROFILE, tmp_path):
        pass
