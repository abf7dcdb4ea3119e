"""Model families as whole checkpoints: packed equals alone under every strategy that applies, or a start that is
refused by name."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from attention.plans import WINDOWLESS, Strategy
from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import build_request
from scorer.config import Config
from scorer.errors import StartError
from scorer.runtime import Runtime
from scorer.selfcheck import TOLERANCE
from scorer.verify import deviations
from tests.cases.live import live
from tests.tiny import tiny_model_dir

WINDOW = {"sliding_window": 24}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
SHARED = {"shared_expert_intermediate_size": 48}
WINDOWS = {**WINDOW, "use_sliding_window": True}
FAMILIES = {
    "qwen2": {},
    "qwen2 windows": {**WINDOWS, "max_window_layers": 1},
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True},
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama dynamic rotary": {"rope_parameters": DYNAMIC, "max_position_embeddings": 512},
    "mistral": {"sliding_window": None},
    "mistral window": WINDOW,
    "gemma": {},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {**WINDOW, **ALTERNATING, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": None},
    "phi3 window": WINDOW,
    "phi3 longrope": {"rope_parameters": LONG, "original_max_position_embeddings": 512},
    "gpt_neox": {"rope_parameters": HALF},
    "olmo": {},
    "olmo2": {},
    "olmo3": {**WINDOW, **ALTERNATING},
    "qwen3_moe": MIXTURE,
    "mixtral": {**MIXTURE, "sliding_window": None},
    "cohere2": {**WINDOW, **ALTERNATING},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3},
    "deepseek_v3": {**MIXTURE, **LATENT, **ROUTED},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_starts_and_every_strategy_equals_alone_or_says_which_does(family, tmp_path):
    """The start's own proof, then all strategies on short and long, plain and awkward documents."""
    model_type, _, what = family.partition(" ")
    directory = tiny_model_dir(tmp_path, model_type, **FAMILIES[family])
    runtime = Runtime.load(Config.read({"model": str(directory), "profile": "instruct", "threads": 1}, {}))
    try:
        runtime.check()
        found, refused = deviations(runtime)
        assert max(d.logit for d in found) <= TOLERANCE[torch.float32], found
        windowed = any(key.window is not None for key in runtime.engine.model.mask_keys)
        assert set(refused) == (WINDOWLESS if windowed else set())
        assert windowed == ("window" in what or "sliding_attention" in str(FAMILIES[family]) or model_type == "gemma2")
        assert {d.strategy for d in found} == set(Strategy) - set(refused)
    finally:
        runtime.close()


def test_a_head_tied_to_the_embeddings_is_the_embeddings(tmp_path):
    tied, untied = (
        tiny_model_dir(tmp_path / str(tie), "llama", tie_word_embeddings=tie, seed=1) for tie in (True, False)
    )
    for directory, same in ((tied, True), (untied, False)):
        model = AutoModelForCausalLM.from_pretrained(directory)
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == same


# --- one long neighbour


@pytest.mark.parametrize("family", ["llama dynamic rotary", "phi3 longrope"])
def test_where_the_longest_position_changes_the_frequencies_it_is_never_reached(family, tmp_path):
    """512 tokens are exact; what would go past them is cut or refused, and its neighbours are as alone."""
    directory = tiny_model_dir(tmp_path, family.split()[0], **FAMILIES[family])
    with live(directory, "instruct", tmp_path) as server:
        short = ["The capital of France is Paris.", "Bananas grow in warm climates.", "x"]
        alone = server.scores("what is the capital of France", short)
        long = "seven ways to cook rice " * 400
        request = build_request("what is the capital of France", [*short, long], max_tokens_per_document=512)
        results = server.send(request).results
        assert results[3].truncated
        prefix = server.send(request).usage.prefix_tokens
        assert prefix + results[3].tokens <= 512
        np.testing.assert_allclose([r.score for r in results[:3]], alone, rtol=0, atol=1e-4)
        whole = pb.ScoreRequest(query=pb.QueryPrefix(text="what is the capital of France"))
        whole.documents.extend(pb.Document(text=text) for text in short)
        whole.documents.add(token_ids=pb.TokenIds(ids=[5] * 512))
        results = server.send(whole).results
        assert results[3].status == pb.DOCUMENT_STATUS_TOO_LONG
        np.testing.assert_allclose([r.score for r in results[:3]], alone, rtol=0, atol=1e-4)
        assert "rotary: exact up to 512 tokens" in server.runtime.engine.model.context_note


# --- refused by name

REFUSED = {
    # windows in the mask that the layers' attention is not told of
    "qwen2_moe": ("Qwen2MoeForCausalLM: the mask of layer", {**MIXTURE, **WINDOWS, **SHARED, "max_window_layers": 1}),
    "phimoe": ("PhimoeForCausalLM: the mask of layer", {**MIXTURE, **WINDOW}),
    # masks of their own, and attention sinks
    "doge": ("DogeForCausalLM", {}),
    "gpt_oss": ("GptOssForCausalLM.*attention sinks", {**MIXTURE, **WINDOW}),
    # chunks instead of windows
    "llama4_text": ("Llama4ForCausalLM", {**MIXTURE, "attention_chunk_size": 24, "intermediate_size_mlp": 96}),
    # documents seen by the prefix
    "bert": ("BertLMHeadModel.*not causal", {}),
    # state space, linear attention and convolutions beside attention
    "qwen3_next": ("Qwen3NextForCausalLM: layers", {**MIXTURE, **SHARED}),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM: layers", {}),
    "rwkv": ("RwkvForCausalLM: layers", {}),
    # attention outside the interface
    "codegen": ("CodeGenForCausalLM: layers", {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8}),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_no_strategy_computes_is_refused_by_name(family, tmp_path):
    told, config = REFUSED[family]
    directory = tiny_model_dir(tmp_path, family, **config)
    with pytest.raises(StartError, match=told):
        Runtime.load(Config.read({"model": str(directory), "profile": "instruct"}, {})).close()


@pytest.mark.parametrize(("window", "refused"), [(4095, True), (4096, False), (1 << 17, False)])
def test_a_window_that_the_layers_are_not_told_of_matters_only_within_the_context(window, refused, tmp_path):
    """Phi-3.5-MoE's window is as long as its context: nothing to compute, nothing to refuse."""
    directory = tiny_model_dir(tmp_path, "phimoe", **MIXTURE, sliding_window=window)
    config = Config.read({"model": str(directory), "profile": "instruct"}, {})
    if refused:
        with pytest.raises(StartError, match="the mask of layer 0 at position 4095 is not what"):
            Runtime.load(config).close()
    else:
        runtime = Runtime.load(config)
        runtime.check()
        runtime.close()
