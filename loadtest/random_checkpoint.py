"""A checkpoint of a Qwen3's true shape with random weights and a small tokenizer: time does not depend on values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from loadtest.shapes import Size
from loadtest.workload import WORDS

VOCABULARY = 1_024  # the head is read at two labels only, so its size costs nothing but disk
# The template is as long as a Qwen3-Reranker's: 61 tokens before the documents, 13 in each.
PROFILE = """\
name = "random"
kind = "label_logits"
prefix = "@INSTRUCTION@\\nQuery: {query}\\nPassage:"
item = " {document}\\n@QUESTION@\\nRelevant: "
labels = ["yes", "no"]
positive = "yes"

[limits]
max_query_tokens = 16000
default_tokens_per_document = 4096
max_tokens_per_document = 16000
""".replace("@INSTRUCTION@", " ".join(WORDS[:54])).replace("@QUESTION@", " ".join(WORDS[54:61]))


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
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = ["yes", "no", "Query", "Passage", "Relevant", *WORDS]
    tokenizer.train_from_iterator([start + word for word in words for start in ("", " ")] * 50, trainer)
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>", model_max_length=40_960
    )
