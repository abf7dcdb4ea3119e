"""Every causal family that the installed transformers knows, tiny and seeded: packed equals alone, or refused by name.

`make test-families` runs it in some minutes. It says which families it could not make small, and why.
"""

from collections import defaultdict

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

from attention.plans import WINDOWLESS, Strategy
from scorer.errors import ModelError
from scorer.model import ATTENTION_NAME, ScoringModel
from scorer.selfcheck import alone_all, deviation
from tests.models import engine
from tests.scorer.test_model import request

pytestmark = pytest.mark.target
MOST = 30_000_000  # parameters of a model that is tiny
WINDOW = 24
# Whatever of these a configuration has is set: small sizes under all their names, and windows and chunks to pass.
SIZES = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64, "intermediate_size": 96, "ffn_dim": 96,
    "ffn_hidden_size": 96, "intermediate_size_mlp": 96, "num_hidden_layers": 4, "num_layers": 4, "n_layer": 4,
    "n_layers": 4, "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4, "num_key_value_heads": 2,
    "multi_query_group_num": 2, "head_dim": 16, "kv_channels": 16, "rotary_dim": 8, "max_position_embeddings": 512,
    "n_positions": 512, "vocab_size": 211, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2, "attention_chunk_size": WINDOW,
    "query_pre_attn_scalar": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_topk": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "n_shared_experts": 1,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "state_size": 8,
    "mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_state": 8,
}  # fmt: skip
# Latent attention repeats no keys, and its rotary part is as long as a head is called.
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24}
PARTS = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1}


def small(family):
    """A configuration of the family with small sizes; of the text part, where there are others."""
    kind = CONFIG_MAPPING[family]
    plain = kind()
    text = plain.get_text_config()
    sizes = {name: value for name, value in SIZES.items() if hasattr(text, name)}
    if hasattr(text, "kv_lora_rank"):
        sizes |= {name: value for name, value in LATENT.items() if hasattr(text, name)}
        sizes |= {"num_key_value_heads": 4}
    if text is plain:
        return kind(**sizes)
    others = {name: part() for name, part in kind.sub_configs.items() if name != "text_config"}
    made = {name: {k: v for k, v in PARTS.items() if hasattr(part, k)} for name, part in others.items()}
    return kind(text_config=sizes, **made)


def seeded(config):
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    assert size <= MOST, f"{size} parameters"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                spread = 1.0 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return model


def outcome(family):
    """(kind, what is to be told)."""
    try:
        model = seeded(small(family))
    except Exception as error:  # noqa: BLE001  what a family's own checks raise is not ours to list
        if error.args == (ATTENTION_NAME,):
            return "refused", "an attention of its own"
        return "too special to make small", f"{type(error).__name__}: {str(error)[:80]}"
    try:
        made = ScoringModel(model, family)
    except ModelError as error:
        return ("refused" if type(model).__name__ in str(error) else "NAMELESS"), str(error)[:100]
    asked = request(37, (1, 5, 17, 40))
    expected = alone_all(made, asked)
    windowed = any(key.window is not None and key.window < 77 for key in made.mask_keys)
    worst = max(
        deviation(engine(made), [(asked, expected)], strategy, "label_logits").logit
        for strategy in Strategy
        if not (windowed and strategy in WINDOWLESS)
    )
    return ("exact", f"{worst:.1e}") if worst <= 1e-4 else ("WRONG", f"{worst:.1e}")


def test_every_family_is_exact_or_refused():
    found = defaultdict(dict)
    for family in sorted(FAMILIES):
        kind, told = outcome(family)
        found[kind][family] = told
        print(f"{family:30} {kind:10} {told}", flush=True)
    assert not found["WRONG"], found["WRONG"]
    assert not found["NAMELESS"], "a refusal names the family"
    assert len(found["exact"]) >= 60
    assert len(found["refused"]) >= 40
    assert len(found["too special to make small"]) <= 40
