"""The shapes that the model is timed at, their floors, and models of true shape with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from batching.items import Item, Items
from batching.types import TokenizedRequest
from scorer.model import ATTENTION_NAME, ScoringModel

# (prefix tokens, tokens of an item, items)
Shape = tuple[int, int, int]
SATURATION: tuple[Shape, ...] = (
    (512, 64, 32), (2048, 64, 32), (512, 256, 32), (2048, 16, 128), (96, 32, 100), (8192, 64, 32),
)  # fmt: skip
SHAPES: tuple[Shape, ...] = (*SATURATION, (70, 90, 100), (120, 180, 10))
# More and more items behind one prefix: beyond a pass they run as several over the same keys and values.
SCALING: tuple[Shape, ...] = tuple((512, 64, items) for items in (32, 64, 128, 256, 512, 1000))
DENSE_FLOPS = 790e12
ATTENTION_FLOPS = 600e12
BANDWIDTH = 4.3e12
LABELS = np.array([[9693, 2152]], np.int32)
VOCABULARY = 151_936


@dataclass(frozen=True, slots=True)
class Size:
    """A Qwen3's shape."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tied: bool

    @property
    def block_parameters(self) -> int:
        """Weights that every token meets: all but embeddings and head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    def floor(self, shape: Shape, cached: int = 0) -> float:
        """Seconds that a request of this shape takes at least on an H200."""
        prefix, length, items = shape
        fresh = prefix - cached
        tokens = fresh + items * length
        pairs = fresh * cached + fresh * (fresh + 1) / 2 + items * (length * prefix + length * (length + 1) / 2)
        dense = 2 * self.block_parameters * tokens
        attention = 4 * self.layers * self.heads * self.head_dim * pairs
        return max(dense / DENSE_FLOPS + attention / ATTENTION_FLOPS, 2 * self.block_parameters / BANDWIDTH)

    def config(self, vocabulary: int, layers: int | None = None) -> Qwen3Config:
        """transformers' configuration of it; layers: None: all."""
        return Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=self.tied,
            max_position_embeddings=40_960,
        )

    def flops(self, shape: Shape) -> float:
        """Dense FLOPs of one request."""
        return 2.0 * self.block_parameters * (shape[0] + shape[1] * shape[2])


SIZES = {
    "0.6B": Size(28, 1024, 16, 8, 128, 3072, True),
    "4B": Size(36, 2560, 32, 8, 128, 9728, True),
    "8B": Size(36, 4096, 32, 8, 128, 12_288, False),
}


def random_model(size: Size, layers: int | None = None) -> ScoringModel:
    """bf16 on the GPU, seeded. Values do not change the time, as long as they are not zeros."""
    config = size.config(VOCABULARY, layers)
    torch.manual_seed(0)
    with torch.device("cuda"):
        auto: Any = AutoModelForCausalLM
        made = auto.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16)
    return ScoringModel(made, "random")


def request(shape: Shape, seed: int) -> TokenizedRequest:
    """Seeded random token ids, two labels read at the last token of every item."""
    prefix, length, items = shape
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCABULARY - 1000, prefix + items * length).astype(np.int32)
    last = np.array([length - 1], np.int32)
    parts = np.split(ids[prefix:], items)
    return TokenizedRequest(ids[:prefix], Items.of(Item(part, last, LABELS) for part in parts))
