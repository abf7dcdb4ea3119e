"""Checkpoints on disk: what loads, what is refused and by which name, and how far a context goes."""

import json
import logging
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

from attention.plans import Strategy
from batching.items import Item
from batching.types import TokenizedRequest
from scorer.config import Config
from scorer.errors import ModelError, StartError
from scorer.loading import load_model
from scorer.profile import load_profile, record_golden
from scorer.runtime import Runtime
from scorer.selfcheck import alone_all, deviation
from tests.models import engine
from tests.tiny import tiny_model_dir

COMMON = {"vocab_size": 211, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
GPT = {**COMMON, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
NEO = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 512}
REFUSED = {
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 8}),
    "gpt_neo": ("GPTNeoForCausalLM", {**COMMON, "hidden_size": 64, **NEO}),
    "bloom": ("BloomForCausalLM", {**COMMON, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "mamba": ("MambaForCausalLM", {**COMMON, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    "mpt": ("MptForCausalLM", {**COMMON, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 512}),
    "falcon": (
        "FalconForCausalLM",
        {**COMMON, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    ),
    "stablelm": ("StableLmForCausalLM", LLAMA),
    "lfm2": ("Lfm2ForCausalLM", {**LLAMA, "layer_types": ["conv", "full_attention"]}),
}
OPT = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
ACCEPTED = {
    "gpt2": GPT,
    "opt": {**COMMON, **OPT, "max_position_embeddings": 512},
    "phi3": LLAMA,
    "gemma2": {**LLAMA, "query_pre_attn_scalar": 16, "sliding_window": 32},
    "gpt_neox": LLAMA,
}


def saved(directory, family, **config):
    """A seeded model on disk, without a tokenizer; its matrices large enough to tell documents apart."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory)
    return directory


def load(directory):
    return load_model(str(directory), "auto", "cpu", allow_download=False)


def request(prefix, lengths, vocabulary=211):
    draw = np.random.default_rng(0)
    ids = [draw.integers(3, vocabulary, n, np.int32) for n in (prefix, *lengths)]
    reads = np.array([[5, 6]], np.int32)
    return TokenizedRequest(ids[0], tuple(Item(i, np.array([len(i) - 1], np.int32), reads) for i in ids[1:]))


def packed_deviation(model, asked):
    """The largest difference to transformers one document at a time, over strategies that need no whole window."""
    expected = alone_all(model, asked)
    strategies = (Strategy.DIRECT_RAGGED, Strategy.NAIVE, Strategy.REFERENCE)
    return max(deviation(engine(model), [(asked, expected)], s, "label_logits").logit for s in strategies)


# --- families


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_cannot_be_packed_are_refused_by_name(family, tmp_path):
    architecture, config = REFUSED[family]
    with pytest.raises(StartError, match=architecture):
        load(saved(tmp_path, family, **config))


@pytest.mark.parametrize("family", ACCEPTED)
def test_families_that_go_through_the_interface_are_packed_exactly(family, tmp_path):
    model = load(saved(tmp_path, family, **ACCEPTED[family]))
    assert packed_deviation(model, request(20, (1, 7, 30, 7))) <= 1e-4


# --- damage


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tied(request):
    return request.param


def without(directory, *endings):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    gone = [name for name in tensors if name.endswith(endings)]
    save_file({name: t for name, t in tensors.items() if name not in gone}, path, {"format": "pt"})
    return gone


@pytest.mark.parametrize("tensor", ["layers.1.self_attn.q_proj.weight", "embed_tokens.weight", "lm_head.weight"])
def test_missing_tensors_are_refused(tensor, tied, tmp_path):
    gone = without(saved(tmp_path, "llama", **LLAMA, tie_word_embeddings=tied), tensor)
    if not gone:
        assert tied
        assert load(tmp_path).vocabulary == 211  # a tied head has no tensor of its own
        return
    with pytest.raises(ModelError, match=r"lacks \d+ tensors, such as .*: scores would be random"):
        load(tmp_path)


def test_all_missing_tensors_are_counted(tmp_path):
    without(saved(tmp_path, "llama", **LLAMA), "q_proj.weight")
    with pytest.raises(ModelError, match=r"lacks 2 tensors, such as model.layers.0.self_attn.q_proj.weight"):
        load(tmp_path)


def truncate(data):
    return data[: len(data) // 2]


def empty(data):
    return b""


def flip_header(data):
    return data[:9] + bytes([data[9] ^ 0x80]) + data[10:]


def flip_length(data):
    return bytes([data[0] ^ 1]) + data[1:]


def no_header(data):
    return b"\0" * 64


@pytest.mark.parametrize("damage", [truncate, empty, flip_header, flip_length, no_header])
def test_damaged_weights_are_refused_in_words(damage, tmp_path):
    path = saved(tmp_path, "llama", **LLAMA) / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=r"^model '.*' does not load: .{15,}"):
        load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "many"},
        {"hidden_size": -64},
        {"hidden_size": 63},
        {"num_attention_heads": 0},
        {"num_hidden_layers": None},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 0},
        {"vocab_size": 1 << 12},
        {"intermediate_size": 7},
        {"hidden_act": "none such"},
        {"model_type": "none such"},
        {"rope_parameters": {"rope_type": "none such"}},
    ],
    ids=str,
)
def test_bad_values_in_the_configuration_are_refused(change, tmp_path):
    path = saved(tmp_path, "llama", **LLAMA) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError):
        load(tmp_path)


def configured(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def with_tensors(directory, **tensors):
    path = directory / "model.safetensors"
    save_file(load_file(path) | tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        (
            "llama",
            {"num_hidden_layers": 1},
            r"9 tensors that LlamaForCausalLM has no place for, such as model\.layers\.1\.input_layernorm.*"
            r"config\.json does not fit the checkpoint, see num_hidden_layers 1: the checkpoint has 2$",
        ),
        (
            "qwen3",
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            r"4 tensors .*self_attn\.k_norm.*, see model_type 'llama'$",
        ),
        ("gemma2", {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, "see model_type 'gemma'$"),
        ("qwen2", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "and Linear no place for it"),
        ("qwen3", {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "model_type 'qwen2'|lacks"),
    ],
    ids=["a layer less", "qwen3 as llama", "gemma2 as gemma", "qwen2 as llama", "qwen3 as qwen2"],
)
def test_a_configuration_of_less_than_the_checkpoint_is_refused(family, change, told, tmp_path):
    """Scores by a part of what was trained would look like scores."""
    configured(saved(tmp_path, family, **LLAMA), **change)
    with pytest.raises(ModelError, match=told):
        load(tmp_path)


@pytest.mark.parametrize("name", ["v_head.summary.weight", "score.weight", "mtp.layers.0.weight", "lm_heads.0.weight"])
def test_a_head_beside_the_decoder_is_told_and_not_used(name, tmp_path, caplog):
    """Of values, of classes, or one that drafts: what it computes is not read."""
    plain = load(saved(tmp_path / "plain", "llama", **LLAMA))
    with_tensors(saved(tmp_path / "more", "llama", **LLAMA), **{name: torch.ones(3)})
    more = load(tmp_path / "more")
    assert f"beside its decoder have no place in LlamaForCausalLM and are not used, such as {name}" in caplog.text
    ids = np.arange(5, dtype=np.int32)
    # Where the file has the tensors elsewhere in a page, products may round in another order.
    torch.testing.assert_close(more.alone(ids, 1), plain.alone(ids, 1))


def test_any_tensor_that_the_model_has_not_is_refused(tmp_path):
    with_tensors(saved(tmp_path, "llama", **LLAMA), **{"model.memory.weight": torch.ones(3)})
    with pytest.raises(ModelError, match=r"has 1 tensors that .* such as model\.memory\.weight: .* model_type 'llama'"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"),
        ("gpt2", "transformer.h.0.attn.bias"),
    ],
)
def test_buffers_that_older_versions_saved_are_not_needed(family, name, tmp_path):
    with_tensors(saved(tmp_path, family, **ACCEPTED.get(family, LLAMA)), **{name: torch.ones(8)})
    assert load(tmp_path).vocabulary == 211


def test_a_head_of_words_beside_one_of_classes_is_not_needed(tmp_path):
    config = CONFIG_MAPPING["llama"](**LLAMA, num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with_tensors(tmp_path, **{"lm_head.weight": torch.ones(211, 64)})
    assert len(load(tmp_path).classes) == 2


def test_a_head_that_differs_from_embeddings_is_used_though_the_configuration_ties_them(tmp_path):
    configured(saved(tmp_path, "llama", **LLAMA), tie_word_embeddings=True)
    hidden = torch.ones(1, 64)
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    np.testing.assert_allclose(load(tmp_path).every_logit(hidden)[0], (head @ hidden[0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"model_type": 7}'])
def test_a_configuration_that_is_none_is_refused(text, tmp_path):
    (saved(tmp_path, "llama", **LLAMA) / "config.json").write_text(text)
    with pytest.raises(ModelError, match="does not load"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["[]", "", "{}", "null", '{"model": 1}'])
def test_a_tokenizer_that_is_none_is_refused(text, tmp_path):
    tiny_model_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match="tokenizer"):
        Runtime.load(Config.read({"model": str(tmp_path), "profile": "instruct"}, {})).close()


REMOTE = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}


@pytest.mark.parametrize("model_type", ["llama", "own"])
def test_code_of_the_checkpoint_is_neither_run_nor_asked_about(model_type, tmp_path, monkeypatch):
    saved(tmp_path, "llama", **LLAMA)
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nOwnConfig = OwnModel = None\n")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": REMOTE, "model_type": model_type}))

    class Asked:
        def __getattr__(self, name):
            raise AssertionError("it asks on standard input")

    monkeypatch.setattr(sys, "stdin", Asked())
    if model_type == "llama":  # transformers' own code does it
        assert load(tmp_path).architecture == "LlamaForCausalLM"
    else:
        with pytest.raises(ModelError, match="does not load"):
            load(tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_what_git_left_in_the_place_of_a_file_is_named(name, tmp_path):
    path = tiny_model_dir(tmp_path) / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")
    with pytest.raises(ModelError, match=rf"{name} is a Git LFS pointer and not the file itself: fetch it by git lfs"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"vocab_size": 600},
            r"2 tensors are of other sizes .*, such as lm_head.weight: \[211, 64\], by .* \[600, 64\]$",
        ),
        ({"num_attention_heads": 2}, r"4 tensors are of other sizes .* \[64, 64\], by config.json \[64, 32\]$"),
        ({"rms_norm_eps": "abc"}, "rms_norm_eps.*expected float, got str"),
        ({"hidden_act": "none such"}, "config.json has hidden_act 'none such', which transformers does not know"),
        ({"layer_types": ["full_attention"]}, "does not load: .*layer_types"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_configuration_is_told(change, told, tmp_path):
    configured(saved(tmp_path, "qwen3" if "layer_types" in change else "llama", **LLAMA), **change)
    with pytest.raises(ModelError, match=told):
        load(tmp_path)


def test_the_path_that_the_model_takes_is_told(tmp_path, caplog):
    record_golden(tmp_path / "p.toml", load_profile("instruct"), ())
    with caplog.at_level(logging.INFO, "scorer"):
        given = {"model": str(tiny_model_dir(tmp_path)), "profile": str(tmp_path / "p.toml"), "device": "cpu"}
        Runtime.load(Config.read(given, environ={})).close()
    (told,) = [r for r in caplog.records if "hand-fused" in r.message]
    assert told.levelno == logging.INFO
    assert told.message.startswith("no hand-fused path: it runs on an NVIDIA GPU; the model runs by its own modules")


def test_pickled_weights_are_not_opened(tmp_path):
    saved(tmp_path, "llama", **LLAMA)
    weights = tmp_path / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "pytorch_model.bin")
    load(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match=r"does not load: .*model\.safetensors"):
        load(tmp_path)


# --- contexts


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("family", "config", "limit"),
    [
        ("llama", {"max_position_embeddings": 64, "rope_parameters": DYNAMIC}, 64),
        ("phi3", {"max_position_embeddings": 256, "rope_parameters": LONG}, 64),
    ],
    ids=["dynamic", "longrope"],
)
def test_rotary_that_depends_on_the_length_is_exact_up_to_its_limit(family, config, limit, tmp_path):
    model = load(saved(tmp_path, family, **(LLAMA | config | {"original_max_position_embeddings": 64})))
    assert model.max_context == limit
    assert f"exact up to {limit} tokens" in model.context_note
    assert packed_deviation(model, request(24, (1, 10, limit - 24, 3))) <= 1e-4
    before = alone_all(model, request(24, (10,)))[0].logits
    model.alone(np.arange(3, 3 + limit + 1, dtype=np.int32), 1)  # past the limit the frequencies do change
    past = request(24, (limit - 24 + 1, 10))
    assert packed_deviation(model, past) > 1e-4
    assert np.allclose(alone_all(model, request(24, (10,)))[0].logits, before, atol=1e-5)


# --- small limits at the start


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def start(directory, **settings):
    runtime = Runtime.load(Config.read({"model": str(directory), "profile": "instruct", **settings}, {}))
    try:
        runtime.check()
    finally:
        runtime.close()


@pytest.mark.parametrize(
    "settings", [{"max_documents": 1}, {"max_context_tokens": 300}, {"max_pass_tokens": 1}], ids=str
)
def test_small_limits_start(directory, settings, caplog):
    caplog.set_level(logging.INFO)
    start(directory, **settings)
    assert "packed equals alone" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [{"max_context_tokens": 10}, {"max_context_tokens": 60}, {"max_request_tokens": 10}, {"max_request_tokens": 1}],
    ids=str,
)
def test_limits_that_let_nothing_through_are_named(directory, settings):
    with pytest.raises(StartError, match=next(iter(settings))):
        start(directory, **settings)


def test_a_golden_pair_that_the_limits_refuse_is_named(directory, tmp_path):
    profile = tmp_path / "golden.toml"
    record_golden(profile, load_profile("instruct"), [("word " * 250, "a document", 0.5)])
    with pytest.raises(StartError, match=r"golden pair \('word .*', 'a document'\) through: raise max_context_tokens"):
        start(directory, max_context_tokens=300, profile=str(profile))


# --- numbers in other forms than the configuration says


def quantised(directory, scale, **method):
    """Every projection as FP8 with a scale for each 16 x 16 block; returns the tensors that this stands for."""
    path, stored, plain = directory / "model.safetensors", {}, {}
    for name, weight in load_file(path).items():
        stored[name] = plain[name] = weight
        if name.endswith("proj.weight"):
            rows, columns = weight.shape
            blocks = weight.view(rows // 16, 16, columns // 16, 16)
            scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            stored[name] = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
            stored[name.replace("weight", scale)] = scales
            numbers = stored[name].float().view(blocks.shape) * scales[:, None, :, None]
            plain[name] = numbers.view(rows, columns)
    save_file(stored, path, {"format": "pt"})
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | ({"quantization_config": method} if method else {})))
    return plain


def test_fp8_weights_are_scored_as_the_numbers_they_stand_for(tmp_path):
    made = saved(tmp_path, "llama", **LLAMA)
    expected = load(made)
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    plain = quantised(tmp_path, "weight_scale_inv", **method)
    before = alone_all(expected, request(20, (1, 7, 30)))
    expected.hf.load_state_dict(plain, strict=False)
    after = alone_all(expected, request(20, (1, 7, 30)))
    model = load(tmp_path)
    assert model.dtype is torch.float32
    assert packed_deviation(model, request(20, (1, 7, 30))) <= 1e-4
    for got, want, unquantised in zip(alone_all(model, request(20, (1, 7, 30))), after, before, strict=True):
        np.testing.assert_allclose(got.logits, want.logits, rtol=0, atol=1e-5)
        assert np.abs(want.logits - unquantised.logits).max() > 1e-3, "eight bits are not the same numbers"


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({"quant_method": "nonesuch"}, "quantised by 'nonesuch', which transformers does not know"),
        ({"bits": 8}, "quantised by None, which transformers does not know"),
        ({}, r"has a tensor model\.layers\.0\..*weight_scale, and Linear no place for it"),
    ],
    ids=["unknown", "nameless", "untold"],
)
def test_numbers_whose_form_is_not_known_are_refused(method, told, tmp_path):
    quantised(saved(tmp_path, "llama", **LLAMA), "weight_scale", **method)
    with pytest.raises(ModelError, match=told):
        load(tmp_path)


def test_a_bias_that_the_configuration_does_not_tell_of_is_refused(tmp_path):
    path = saved(tmp_path, "llama", **LLAMA, attention_bias=True) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_bias": False}))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\.self_attn\.\w_proj\.bias, and Linear no place"):
        load(tmp_path)
