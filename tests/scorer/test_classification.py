"""Sequence-classification heads: transformers' own classes of [prefix, document], read packed."""

import asyncio
import math

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification

from attention.plans import WINDOWLESS, Strategy
from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import build_request
from scorer.config import Config
from scorer.errors import ModelError, ProfileError
from scorer.loading import load_model
from scorer.profile import Profile, load_profile, record_golden
from scorer.runtime import Runtime
from tests.cases.live import TOLERANCE, UNCUT, live, plain_tokenizer, wire
from tests.scorer.http.test_app import Http
from tests.tiny import tiny_model_dir, tiny_tokenizer

QUERY = "what is the capital of France"
DOCUMENTS = ["The capital of France is Paris.", "x", "Bananas grow in warm climates. " * 8, "密码重置：打开设置。🙂"]
ONE = Profile(
    name="one",
    kind="classification",
    prefix="<|im_start|>user\nQuery: {query}\nPassage:",
    item=" {document} End.<|im_end|>\n<|im_start|>assistant\n",
    labels=("LABEL_0",),
    positive="LABEL_0",
)
TWO = ONE.model_copy(update={"name": "two", "labels": ("relevant", "off topic"), "positive": "relevant"})
NAMES = {
    "id2label": {0: "off topic", 1: "unsure", 2: "relevant"},
    "label2id": {"off topic": 0, "unsure": 1, "relevant": 2},
}
FAMILIES = {
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    "mistral": {"sliding_window": 24},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": None},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
}


def classifier_dir(directory, family="qwen3", classes=1, **overrides):
    """A seeded checkpoint with a classification head, as transformers saves one."""
    tokenizer = tiny_tokenizer()
    tiny_model_dir(directory, family, **overrides)  # for its tokenizer and configuration
    config = CONFIG_MAPPING[family].from_pretrained(directory)
    config.num_labels = classes
    for name, value in (NAMES if classes == 3 else {}).items():
        setattr(config, name, value)
    torch.manual_seed(7)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@torch.no_grad()
def truth(directory, profile, query=QUERY, documents=DOCUMENTS):
    """[documents, classes] by transformers' own class for such checkpoints, one document at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, attn_implementation="eager").float()
    texts = [(profile.prefix + profile.item).replace("{query}", query).replace("{document}", d) for d in documents]
    ids = [torch.tensor([plain_tokenizer(directory)(text).input_ids]) for text in texts]
    return np.array([model(input_ids=each, use_cache=False).logits[0].tolist() for each in ids])


@pytest.mark.parametrize("family", FAMILIES)
def test_one_class_is_its_logit_and_that_its_log_odds(family, tmp_path):
    directory = classifier_dir(tmp_path / "model", family, **FAMILIES[family])
    expected = truth(directory, ONE)[:, 0]
    assert np.ptp(expected) > 0.1
    with live(directory, ONE, tmp_path) as server:
        windowed = FAMILIES[family].get("sliding_window") is not None
        for strategy in [None, *(s for s in Strategy if not (windowed and s in WINDOWLESS))]:
            np.testing.assert_allclose(server.scores(QUERY, DOCUMENTS, strategy), expected, rtol=0, atol=TOLERANCE)
        result = server.score(QUERY, DOCUMENTS[:1]).results[0]
        assert result.score_kind == pb.SCORE_KIND_LOG_ODDS
        assert result.log_odds == result.score
        assert result.probability == pytest.approx(1 / (1 + math.exp(-result.score)), abs=1e-12)


@pytest.mark.parametrize("strategy", Strategy)
def test_two_of_three_classes_are_log_odds_by_their_names(strategy, tmp_path):
    directory = classifier_dir(tmp_path / "model", classes=3)
    expected = truth(directory, TWO)
    with live(directory, TWO, tmp_path) as server:
        response = server.score(QUERY, DOCUMENTS, strategy, label_logits=True)
        odds = expected[:, 2] - expected[:, 0]
        np.testing.assert_allclose([r.score for r in response.results], odds, rtol=0, atol=TOLERANCE)
        for result, row in zip(response.results, expected, strict=True):
            assert result.score_kind == pb.SCORE_KIND_LOG_ODDS
            assert [(x.label, x.token_id) for x in result.label_logits] == [("relevant", 2), ("off topic", 0)]
            np.testing.assert_allclose([x.logit for x in result.label_logits], row[[2, 0]], rtol=0, atol=TOLERANCE)
        info = server.runner.run(server.at.client.model_info())
        assert [(label.text, label.positive) for label in info.labels] == [("relevant", True), ("off topic", False)]
        assert info.vocabulary_size == len(plain_tokenizer(directory))
        assert {wire(strategy)} == {r.strategy for r in response.results}


def test_what_only_a_vocabulary_has_is_refused_by_its_field(tmp_path):
    directory = classifier_dir(tmp_path / "model")
    with live(directory, ONE, tmp_path) as server:
        for field, request in (
            ("options.label_texts", build_request("q", ["a"], label_texts=["yes"])),
            ("options.label_token_ids", pb.ScoreRequest(options=pb.ScoreOptions(label_token_ids=[0]))),
            (
                "options.outputs.vocabulary_probabilities",
                pb.ScoreRequest(options=pb.ScoreOptions(outputs=pb.OutputOptions(vocabulary_probabilities=True))),
            ),
            ("documents[0].target_tokens", pb.ScoreRequest(documents=[pb.Document(id="a", text="b", target_tokens=1)])),
        ):
            if not request.HasField("query"):
                request.query.text = "q"
            if not request.documents:
                request.documents.add(text="a")
            assert list(server.refused(request)) == [field]


def test_profile_and_head_must_be_of_one_kind(tmp_path):
    classes, words = classifier_dir(tmp_path / "classes"), tiny_model_dir(tmp_path / "words")
    with pytest.raises(ProfileError, match="label_logits, and Qwen3ForSequenceClassification has classes LABEL_0"):
        Runtime.load(Config.read({"model": str(classes), "profile": "instruct"}, {}))
    with (
        pytest.raises(ProfileError, match="classification, and Qwen3ForCausalLM has a language-model head"),
        live(words, ONE, tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"labels": ("LABEL_1",), "positive": "LABEL_1"}, "has no class 'LABEL_1', but 'LABEL_0'"),
        ({"item": " {document} End.<|endoftext|>"}, "items end with the pad token 0"),
    ],
    ids=["class", "pad"],
)
def test_a_profile_that_does_not_fit_the_head_is_told_why(change, told, tmp_path):
    directory = classifier_dir(tmp_path / "model")
    with pytest.raises(ProfileError, match=told), live(directory, ONE.model_copy(update=change), tmp_path):
        pass


def test_a_head_that_was_never_trained_is_refused(tmp_path):
    """The weights of a language model under an architecture that says it classifies."""
    directory = tiny_model_dir(tmp_path)
    config = CONFIG_MAPPING["qwen3"].from_pretrained(directory)
    config.architectures = ["Qwen3ForSequenceClassification"]
    config.save_pretrained(directory)
    with pytest.raises(ModelError, match=r"lacks 1 tensors, such as score.weight: scores would be random"):
        load_model(str(directory), "auto", "cpu", False)


def test_a_classifier_that_sees_both_ways_is_refused(tmp_path):
    config = CONFIG_MAPPING["bert"](hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=96)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="BertForSequenceClassification has no linear classification head on its last"):
        load_model(str(tmp_path), "auto", "cpu", False)


def test_the_converted_qwen3_reranker_has_the_templates_of_the_one_it_was_made_of():
    one, other = load_profile("qwen3-reranker-seq-cls"), load_profile("qwen3-reranker")
    assert (one.prefix, one.item, one.instruction, one.limits) == (
        other.prefix,
        other.item,
        other.instruction,
        other.limits,
    )
    assert one.kind == "classification"
    assert not one.verified
    assert one.limits.max_tokens_per_document > UNCUT


def test_over_http_one_class_has_its_probability(tmp_path):
    """As clients of other rerankers know it: the sigmoid of the logit."""
    directory = classifier_dir(tmp_path / "model")
    expected = 1 / (1 + np.exp(-truth(directory, ONE)[:, 0]))
    record_golden(profile := tmp_path / "one.toml", ONE, ())
    runtime = Runtime.load(Config.read({"model": str(directory), "profile": str(profile)}, {}))

    async def scenario():
        async with Http(runtime) as http:
            return (await http.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})).json()

    results = sorted(asyncio.run(scenario())["results"], key=lambda result: result["index"])
    np.testing.assert_allclose([r["relevance_score"] for r in results], expected, rtol=0, atol=TOLERANCE)
