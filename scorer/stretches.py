"""Texts far over any limit: how many tokens they have at least, and where they may be encoded in parts.

Both are read off the tokenizer's JSON, and only where they hold for every text; elsewhere texts are encoded whole.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

_State = Mapping[str, Any]

STRETCH = 1 << 16  # characters, or more where no seam follows
_SEAM = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")

_COMPOSED = 4  # canonical composition makes one character of four at most
_NORMALIZERS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_KEEPING = {"ByteLevel", "Digits", "Metaspace"}  # pre-tokenizers that drop nothing
# A pattern that looks behind, or ahead beyond white space, may match otherwise where a text is cut.
_LOOKS_AROUND = re.compile(r"\(\?<|\(\?=|\(\?!|\(\?>|[+*?]\+|\{[\d,]+\}\+|\\[bBAGzZ]|\$|(?<!\[)\^")


class LeastTokens:
    """The fewest tokens that a text may have. Final."""

    def __init__(self, state: _State) -> None:
        """state: a tokenizer's JSON."""
        normalizers = _nodes(state["normalizer"], "normalizers")
        self._bytes = any(n["type"] == "ByteLevel" for n in (*normalizers, *_pre_tokenizers(state)))
        vocabulary = state["model"]["vocab"]
        # Bytes that are no token vanish.
        gone = [byte for byte, letter in enumerate(_alphabet()) if self._bytes and letter not in vocabulary]
        self._vanish = bytes(gone)
        self._each = _length_of_a_token(state, self._bytes)
        self._composed = max((_NORMALIZERS.get(node["type"], 1) for node in normalizers), default=1)
        self._swallows = any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])

    def __call__(self, text: str) -> int:
        """0 where nothing is known. Takes no longer than a look at the text."""
        if self._each is None:
            return 0
        seen = "".join(text.split()) if self._swallows else text
        length = len(seen.encode().translate(None, self._vanish)) if self._bytes else len(seen)
        return -(-length // (self._each * (1 if text.isascii() else self._composed)))


def _alphabet() -> list[str]:
    """How a byte-level tokenizer writes each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(0x100 + n) for n in range(0x100))
    return [chr(byte) if byte in printable else next(others) for byte in range(0x100)]


def _length_of_a_token(state: _State, bytes_: bool) -> int | None:
    """Characters, or bytes, of a normalized text that one token stands for at most; None where that has no limit."""
    model = state["model"]
    if model["type"] != "BPE" or not all(map(_keeps_length, _nodes(state["normalizer"], "normalizers"))):
        return None
    if not all(map(_keeps_text, _pre_tokenizers(state))):
        return None
    alone = model.get("unk_token") is not None and not model.get("fuse_unk")  # an unknown character is one token
    falls_back = bool(model.get("byte_fallback")) and all(f"<0x{b:02X}>" in model["vocab"] for b in range(256))
    if not (bytes_ or alone or falls_back):  # unknown characters vanish or are one token together
        return None
    return max([1, *map(len, model["vocab"]), *(len(token["content"].encode()) for token in state["added_tokens"])])


def _keeps_length(normalizer: _State) -> bool:
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and len(normalizer["content"]) >= len(pattern)
    return normalizer["type"] in _NORMALIZERS


def _keeps_text(pre_tokenizer: _State) -> bool:
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _KEEPING


def separable(state: _State) -> bool:
    """Whether a text has the tokens of its stretches, each encoded on its own.

    So it is where the tokenizer merges within words only, begins a word at each space between two ASCII letters, and
    finds words without looking past that space.
    """
    model, steps = state["model"], _pre_tokenizers(state)
    if model["type"] != "BPE" or model.get("dropout") or not steps:
        return False
    composing = all(n["type"] in ("NFC", "NFD", "NFKC", "NFKD") for n in _nodes(state["normalizer"], "normalizers"))
    across = any(
        re.search("[A-Za-z] ", token["content"]) or (token["rstrip"] and token["content"][-1:].isalpha())
        for token in state["added_tokens"]
    )
    if not composing or across or not all(map(_looks_no_farther, steps)):
        return False
    # Each step splits there for every pair of letters, or finds nothing among letters and spaces.
    probe = " ".join(f"q{a} {b}q" for a in string.ascii_letters for b in string.ascii_letters)
    seams = {match.start() for match in _SEAM.finditer(probe)}
    starts = [_starts(step, state, probe) for step in steps]
    return any(seams <= found for found in starts) and all(seams <= found or found == {0} for found in starts)


def _looks_no_farther(step: _State) -> bool:
    if step["type"] == "Split":
        pattern = step["pattern"].get("Regex")
        known = "" if pattern is None else pattern.replace(r"(?!\S)", "")
        return pattern is not None and not _LOOKS_AROUND.search(known)
    return step["type"] == "Digits" or (step["type"] == "ByteLevel" and not step["add_prefix_space"])


def _starts(step: _State, state: _State, text: str) -> set[int]:
    """Where this pre-tokenizer's pieces of an ASCII text begin."""
    alone = Tokenizer.from_str(json.dumps({**state, "pre_tokenizer": step, "model": _NO_MODEL, "added_tokens": []}))
    assert alone.pre_tokenizer is not None, "it was given one"
    return {start for _, (start, _) in alone.pre_tokenizer.pre_tokenize_str(text)}


_NO_MODEL = {"type": "BPE", "vocab": {}, "merges": []}


def stretches(text: str, length: int = STRETCH) -> Iterator[str]:
    """The parts of a text that a separable tokenizer may encode apart. A text without seams is one."""
    begin = 0
    while len(text) - begin > 2 * length and (seam := _SEAM.search(text, begin + length)):
        yield text[begin : seam.start()]
        begin = seam.start()
    yield text[begin:]


def _pre_tokenizers(state: _State) -> list[_State]:
    return _nodes(state["pre_tokenizer"], "pretokenizers")


def _nodes(node: _State | None, parts: str) -> list[_State]:
    """A step and, where it is a sequence, the steps in it."""
    if node is None:
        return []
    return [each for part in node[parts] for each in _nodes(part, parts)] if node["type"] == "Sequence" else [node]
