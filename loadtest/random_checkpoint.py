"""A checkpoint of a Qwen3's true shape with random weights and a small tokenizer: time does not depend on values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from loadtest.shapes import Size

VOCABULARY = 1_024  # the head is read at two labels only, so its size costs nothing but disk
PROFILE = """\
name = "random"
kind = "label_logits"
prefix = "Query: {query}\\nPassage:"
item = " {document}\\nRelevant: "
labels = ["yes", "no"]
positive = "yes"

[limits]
max_query_tokens = 16000
default_tokens_per_document = 4096
max_tokens_per_document = 16000
"""


def write_checkpoint(size: Size, directory: Path, seed: int = 0) -> Path:
    """Writes it unless it is there; returns the profile beside it."""
    profile = directory / "profile.toml"
    if profile.exists():
        return profile
    directory.mkdir(parents=True, exist_ok=True)
    _tokenizer().save_pretrained(directory)
    torch.manual_seed(seed)
    config = size.config(VOCABULARY)
    auto: Any = AutoModelForCausalLM
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        auto.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    profile.write_text(PROFILE, encoding="utf-8")  # last: it says that the rest is there
    return profile


def _tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["yes", "no", " yes", " no", "Query", "Passage", "Relevant"] * 50, trainer)
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>", model_max_length=40_960
    )
