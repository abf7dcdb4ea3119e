"""Tiny seeded checkpoints on disk: a tokenizer trained on a page of text, and a model of three small layers."""

import json
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LABELS = ["Yes", "No", "yes", "no", " Yes", " No", " yes", " no"]

_TEXT = """\
Query: what is the capital of France? Passage: The capital of France is Paris. The capital of Brazil is Brasilia.
London is the capital of the United Kingdom. Berlin is where the German government sits. Bananas grow in warm climates.
Is the passage relevant to the query? Answer only Yes or No. You judge search results. End of passage. Question:
How do I reset my password? Open settings, choose security, then reset the password. Seven ways to cook rice.
Yes No yes no Yes No yes no Yes, yes. No, no. The user and the assistant talk to the system about documents and queries.
Judge whether the document meets the requirements. Please write a question based on this passage. It's what we'll do.
"""
_MERGED = ["a\n\n", "wait...", "1977", " x"]  # what a seam may split, and a word of one token


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The labels alone and often: each becomes one token, with and without its space.
    tokenizer.train_from_iterator([*_TEXT.splitlines() * 4, *LABELS * 50, *_MERGED * 50], trainer)
    return tokenizer.to_str()


def tiny_tokenizer(
    *, bos: bool = False, pad: bool = True, chat: bool = True, added: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 512 tokens with ChatML's control tokens.

    bos    put <|endoftext|> before every text, as Llama's do
    pad    have a pad token
    chat   have a chat template
    added  plain tokens beyond the trained vocabulary
    """
    tokenizer = Tokenizer.from_str(_trained())
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>" if pad else None,
    )
    made.chat_template = CHAT_TEMPLATE if chat else None
    return made


@cache
def _sentence_pieces(model: str) -> str:
    """A vocabulary with "▁" for the space, and a token for each byte."""
    special = ["<unk>", "<s>", "</s>"]
    pieces, trainer = {
        "bpe": (models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True), trainers.BpeTrainer),
        "unigram": (models.Unigram(), trainers.UnigramTrainer),
    }[model]
    options = {} if model == "bpe" else {"unk_token": "<unk>"}
    tokenizer = Tokenizer(pieces)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    lines = [*_TEXT.splitlines() * 4, *LABELS * 50]
    tokenizer.train_from_iterator(
        lines, trainer(vocab_size=250, special_tokens=special, show_progress=False, **options)
    )
    state = json.loads(tokenizer.to_str())
    vocabulary, bytes_ = state["model"]["vocab"], [f"<0x{byte:02X}>" for byte in range(256)]
    if model == "bpe":
        vocabulary.update({text: len(vocabulary) + i for i, text in enumerate(bytes_)})
    else:
        vocabulary.extend([text, -30.0] for text in bytes_)
        state["model"]["byte_fallback"] = True
    return json.dumps(state)


def prepending_tokenizer(
    model: Literal["bpe", "unigram"] = "bpe",
    prepend: Literal["normalizer", "always", "first"] = "normalizer",
    *,
    plain: tuple[AddedToken, ...] = (),
) -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: it writes "▁" before a text, by a normalizer or by Metaspace.

    plain  added tokens that are not control tokens
    """
    tokenizer = Tokenizer.from_str(_sentence_pieces(model))
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = None
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL[1:]])
    tokenizer.add_tokens(list(plain))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = CHAT_TEMPLATE
    return made


def tiny_model_dir(
    directory: Path,
    family: str = "qwen3",
    seed: int = 0,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **overrides: object,
) -> Path:
    """Writes a seeded model and its tokenizer into `directory` and returns it.

    The weights are larger than a fresh model's, so that documents' logits differ by far more than rounding.
    """
    tokenizer = tokenizer or tiny_tokenizer()
    config = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.25,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**config, **overrides}))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
