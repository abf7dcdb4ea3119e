"""LoRA adapters as PEFT saves them: scores are PEFT's own, or the start is refused by name."""

import json
import sys

import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from attention.plans import Strategy
from scorer import adapters
from scorer.errors import ModelError
from scorer.fingerprint import checkpoint_of
from scorer.loading import load_model
from scorer.runtime import Runtime
from tests.cases.live import PROFILE, TOLERANCE, live, plain_tokenizer
from tests.scorer.test_classification import DOCUMENTS, ONE, QUERY
from tests.tiny import tiny_model_dir

CLASSES = {"CAUSAL_LM": AutoModelForCausalLM, "SEQ_CLS": AutoModelForSequenceClassification}
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture
def base(tmp_path):
    return tiny_model_dir(tmp_path / "base")


def trained(base, directory, task, config=LoraConfig, **options):
    """An adapter whose every tensor was moved away from where it began."""
    given = {} if task == "CAUSAL_LM" else {"num_labels": 1}
    model = CLASSES[task].from_pretrained(base, **given)
    made = get_peft_model(model, config(**{"task_type": task, "target_modules": TARGETS, **options}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    made.save_pretrained(directory)
    return directory


@torch.no_grad()
def truth(base, directory, task, profile):
    """PEFT's own model, the adapter beside the weights, one document at a time."""
    given = {} if task == "CAUSAL_LM" else {"num_labels": 1}
    model = PeftModel.from_pretrained(CLASSES[task].from_pretrained(base, **given), directory).eval()
    found = []
    for document in DOCUMENTS:
        text = (profile.prefix + profile.item).replace("{query}", QUERY).replace("{document}", document)
        logits = model(input_ids=torch.tensor([plain_tokenizer(base)(text).input_ids]), use_cache=False).logits
        if task == "CAUSAL_LM":
            yes, no = plain_tokenizer(base).convert_tokens_to_ids(["yes", "no"])
            found.append(float(logits[0, -1, yes] - logits[0, -1, no]))
        else:
            found.append(float(logits[0, 0]))
    return np.array(found)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("CAUSAL_LM", {"r": 4}),
        ("CAUSAL_LM", {"r": 4, "modules_to_save": ["lm_head"], "use_rslora": True}),
        ("CAUSAL_LM", {"r": 4, "use_dora": True}),
        ("SEQ_CLS", {"r": 4}),
    ],
    ids=["words", "own head", "dora", "classes"],
)
def test_an_adapter_scores_as_peft_has_it(task, options, base, tmp_path):
    directory = trained(base, tmp_path / "adapter", task, **options)
    profile = PROFILE if task == "CAUSAL_LM" else ONE
    expected = truth(base, directory, task, profile)
    assert np.ptp(expected) > 0.1
    with live(directory, profile, tmp_path) as server:
        for strategy in (None, Strategy.DIRECT_RAGGED, Strategy.MULTI_ITEM, Strategy.REFERENCE):
            np.testing.assert_allclose(server.scores(QUERY, DOCUMENTS, strategy), expected, rtol=0, atol=TOLERANCE)
    if task == "CAUSAL_LM":
        with live(base, profile, tmp_path) as server:
            assert np.abs(server.scores(QUERY, DOCUMENTS) - expected).max() > 0.01, "the adapter changes something"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": [*TARGETS, "lm_head"]},
        {"target_modules": [*TARGETS, "embed_tokens"]},
        {"target_modules": [*TARGETS, "embed_tokens", "lm_head"]},
        {"target_modules": [*TARGETS, "lm_head"], "ensure_weight_tying": True},
        {"target_modules": [*TARGETS, "embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["lm_head"], "use_dora": True},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"trainable_token_indices": [270, 300]},
        {"bias": "all"},
        {"layers_to_transform": [1]},
    ],
    ids=str,
)
def test_an_adapter_at_either_end_scores_as_peft_has_it(options, tied, tmp_path):
    """Embeddings that are the head too are changed at the end that the adapter names, and at that alone."""
    base = tiny_model_dir(tmp_path / "base", "qwen2", tie_word_embeddings=tied)
    directory = trained(base, tmp_path / "adapter", "CAUSAL_LM", r=4, **options)
    ids = np.array([5, 300, 301, 77, 270], np.int32)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory).eval()
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(ids[None])).logits[0]
    model = load_model(str(directory), "float32", "cpu", False)
    np.testing.assert_allclose(model.alone(ids, len(ids)), expected, rtol=0, atol=TOLERANCE)
    hidden = theirs.get_base_model().model(input_ids=torch.tensor(ids[None])).last_hidden_state[0]
    np.testing.assert_allclose(model.every_logit(hidden), expected[:, : model.vocabulary], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_merge_that_is_not_peft_s_own_model_is_refused(dtype, tmp_path, monkeypatch):
    """Here: one that moves both ends of tied embeddings. What rounding moves is far less, in every type."""
    base = tiny_model_dir(tmp_path / "base", tie_word_embeddings=True)
    directory = trained(base, tmp_path / "adapter", "CAUSAL_LM", r=4, target_modules=["lm_head"])
    load_model(str(directory), dtype, "cpu", False)
    experts = tiny_model_dir(tmp_path / "experts", "mixtral", num_local_experts=4, num_hidden_layers=9)
    routed = trained(experts, tmp_path / "routed", "CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    load_model(str(routed), dtype, "cpu", False)
    monkeypatch.setattr(adapters, "_untie", lambda wrapped: None)
    with pytest.raises(ModelError, match=r"embed_tokens computes what is \d\S* of its size away from PEFT's own"):
        load_model(str(directory), dtype, "cpu", False)


def test_an_adapter_that_is_not_finite_is_refused(base, tmp_path):
    directory = trained(base, tmp_path / "adapter", "CAUSAL_LM", r=4)
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[min(tensors)][0, 0] = float("nan")
    save_file(tensors, path)
    refused(directory, "cannot be merged|away from PEFT's own")


def change(directory, **values):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def without(directory, ending):
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}
    assert len(kept) < len(tensors)
    save_file(kept, path)


def refused(directory, told):
    with pytest.raises(ModelError, match=told):
        load_model(str(directory), "auto", "cpu", False)


def test_an_adapter_without_its_trained_head_is_refused(base, tmp_path):
    directory = trained(base, tmp_path / "adapter", "SEQ_CLS", r=4)
    without(directory, "score.weight")
    refused(directory, r"adapter' lacks 1 tensors, such as score.weight: scores would be random")


def test_an_adapter_that_lacks_a_tensor_is_refused(base, tmp_path):
    directory = trained(base, tmp_path / "adapter", "CAUSAL_LM", r=4)
    without(directory, "layers.1.self_attn.q_proj.lora_B.weight")
    refused(directory, r"lacks 1 tensors, such as .*layers\.1\.self_attn\.q_proj\.lora_B.*: scores would be random")


def test_an_adapter_with_tensors_that_have_no_place_is_refused(base, tmp_path):
    directory = trained(base, tmp_path / "adapter", "CAUSAL_LM", r=4)
    change(directory, target_modules=["q_proj", "v_proj"])
    refused(directory, r"3|6 tensors have no place, such as .*down_proj.*")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"base_model_name_or_path": "someone/a-model"},
            "base model 'someone/a-model', which is not here: set base_model",
        ),
        ({"base_model_name_or_path": None}, "base_model_name_or_path names no model"),
        ({"task_type": "TOKEN_CLS"}, "task_type 'TOKEN_CLS', but only CAUSAL_LM and SEQ_CLS are scored"),
        ({"peft_type": "PREFIX_TUNING"}, "peft_type 'PREFIX_TUNING', but only LORA is merged"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens switch the adapter on within a text"),
        ({"r": "many"}, "does not load"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_merged_exactly_is_refused(values, told, base, tmp_path):
    directory = trained(base, tmp_path / "adapter", "CAUSAL_LM", r=4)
    change(directory, **values)
    refused(directory, told)


def test_other_kinds_of_adapters_are_refused(base, tmp_path):
    directory = trained(base, tmp_path / "adapter", "CAUSAL_LM", IA3Config, feedforward_modules=["down_proj"])
    refused(directory, "peft_type 'IA3', but only LORA is merged")


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}"])
def test_a_damaged_configuration_is_refused(damage, base, tmp_path):
    directory = trained(base, tmp_path / "adapter", "CAUSAL_LM", r=4)
    (directory / "adapter_config.json").write_text(damage)
    refused(directory, "not a PEFT adapter's configuration")


def test_damaged_tensors_are_refused(base, tmp_path):
    directory = trained(base, tmp_path / "adapter", "CAUSAL_LM", r=4)
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    refused(directory, r"adapter_model\.safetensors")
    path.unlink()
    refused(directory, r"adapter_model\.safetensors")


def test_an_adapter_is_not_sharded_and_the_reason_is_that(base, tmp_path):
    directory = trained(base, tmp_path / "adapter", "CAUSAL_LM", r=4)
    with pytest.raises(ModelError, match="is a LoRA adapter, and tensor_parallel 2 shards only a directory of saf"):
        load_model(str(directory), "auto", "cpu", False, ranks=2)


def test_what_git_left_in_the_place_of_a_base_model_is_named(base, tmp_path):
    directory = trained(base, tmp_path / "adapter", "CAUSAL_LM", r=4)
    (base / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\n")
    refused(directory, r"base/model\.safetensors is a Git LFS pointer")


def test_without_peft_it_says_what_to_install(base, tmp_path, monkeypatch):
    directory = trained(base, tmp_path / "adapter", "CAUSAL_LM", r=4)
    monkeypatch.setitem(sys.modules, "peft", None)
    refused(directory, r"pip install 'prefixrank\[lora\]'")


def test_an_adapter_with_a_tokenizer_of_its_own_uses_it(base, tmp_path):
    directory = trained(base, tmp_path / "adapter", "CAUSAL_LM", r=4)
    with live(directory, PROFILE, tmp_path) as server:
        assert isinstance(server.runtime, Runtime)
        theirs = server.ids("q", "a document")
    plain_tokenizer(base).save_pretrained(directory)
    with live(directory, PROFILE, tmp_path) as server:
        assert server.ids("q", "a document") == theirs


def test_kept_prefixes_are_those_of_this_adapter_on_this_base_model(base, tmp_path):
    """What tells them apart on disk and across restarts changes with either."""
    directory = trained(base, tmp_path / "adapter", "CAUSAL_LM", r=4)

    def identity():
        return checkpoint_of(str(directory))

    before = identity()
    assert identity() == before
    tiny_model_dir(base, seed=1)
    other_base = identity()
    without(directory, "layers.1.self_attn.q_proj.lora_B.weight")
    assert len({before, other_base, identity()}) == 3
