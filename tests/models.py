"""Tiny seeded models, built in memory from their configurations: no tokenizer, no files."""

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from attention.factory import make
from attention.kv_pages import KvPages
from scorer.engine import Engine
from scorer.model import ATTENTION_NAME, ScoringModel

SMALL = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
# Each family with what is special about it: rotary variants, windows, caps, experts, biases, tied heads.
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "mistral-window": {"sliding_window": 24},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 512},
    "gpt_neox": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}


@cache
def tiny(family: str, seed: int = 0) -> ScoringModel:
    """A seeded model whose logits differ between documents by far more than rounding."""
    given = {**SMALL, **FAMILIES[family]}
    config = CONFIG_MAPPING[family.split("-")[0]](**given)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                spread = 1.0 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return ScoringModel(model, family)


def engine(model: ScoringModel, page_size: int = 16, pages: int = 256, **kwargs) -> Engine:
    return Engine(model, make("torch", KvPages(pages, page_size)), page_size, pages, **kwargs)


def last_prefix_token_hidden(launch):
    """A multi-item launch broken on purpose: no item sees the last token of its prefix."""
    arrays = launch.multi_item
    places = np.concatenate([[1], arrays.token_pos_in_items_ptr]).astype(np.uint16)
    shorter = replace(
        arrays,
        prefix_len_ptr=arrays.prefix_len_ptr - 1,
        token_pos_in_items_ptr=places,
        token_pos_in_items_len=len(places),
    )
    return replace(launch, multi_item=shorter)
