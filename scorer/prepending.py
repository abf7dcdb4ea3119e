"""Tokenizers that write a space of their own before a text, as Llama 2's and Mistral's do: "Yes" becomes "▁Yes".

A text that goes on behind another one must not get that space: for it there is a copy of the tokenizer that writes
none. All is done on the tokenizer's JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from scorer.errors import ProfileError

_State = Mapping[str, Any]


class Prepending(Enum):
    """Before what the tokenizer writes a space."""

    NOTHING = "nothing"
    STRING = "the whole string, where it begins with text"
    STRETCH = "the whole string and each text behind an added token"


def prepending(state: _State) -> Prepending:
    """What this tokenizer does. Raises ProfileError where a text in parts cannot have the ids of the whole."""
    normalizes = _normalizer(state["normalizer"]) != state["normalizer"]
    if not normalizes and _pre_tokenizer(state["pre_tokenizer"]) == state["pre_tokenizer"]:
        return Prepending.NOTHING
    if not normalizes and _first(state["pre_tokenizer"]).get("prepend_scheme") == "first":
        return Prepending.STRING
    for token in state["added_tokens"]:
        if normalizes and token["normalized"]:
            complaint = (
                'has "normalized": true, so whether a text holds it depends on the text before it; make it false'
            )
        elif not token["special"]:
            complaint = 'may stand in a document, and changes the text behind it; give it "special": true'
        else:
            continue
        raise ProfileError(
            f"the tokenizer puts a space before each text behind an added token (a Prepend normalizer, or Metaspace "
            f'with "prepend_scheme": "always"), and its added token {token["content"]!r} {complaint} in tokenizer.json'
        )
    return Prepending.STRETCH


def without_prepending(state: _State) -> dict[str, Any]:
    """The same tokenizer, but that it writes no space of its own; nor does it take one off when it decodes."""
    return {
        **state,
        "normalizer": _normalizer(state["normalizer"]),
        "pre_tokenizer": _pre_tokenizer(state["pre_tokenizer"]),
        "decoder": _decoder(state["decoder"]),
    }


def _normalizer(node: _State | None) -> _State | None:
    if node is None or node["type"] == "Prepend":
        return None
    if node["type"] == "Sequence":
        kept = [part for part in map(_normalizer, node["normalizers"]) if part is not None]
        return {**node, "normalizers": kept}
    return node


def _pre_tokenizer(node: _State | None) -> _State | None:
    """Only the first one sees where a text begins; behind a splitting one, each word gets its space wherever it is."""
    if node is None:
        return None
    if node["type"] == "Sequence" and node["pretokenizers"]:
        first, *others = node["pretokenizers"]
        return {**node, "pretokenizers": [_pre_tokenizer(first), *others]}
    if node["type"] == "Metaspace":
        return {**node, "prepend_scheme": "never"}
    return {**node, "add_prefix_space": False} if node["type"] == "ByteLevel" else node


def _first(node: _State) -> _State:
    return _first(node["pretokenizers"][0]) if node["type"] == "Sequence" else node


def _decoder(node: _State | None) -> _State | None:
    if node is None or node["type"] == "Strip":
        return None
    if node["type"] == "Sequence":
        kept = [part for part in map(_decoder, node["decoders"]) if part is not None]
        return {**node, "decoders": kept}
    return {**node, "prepend_scheme": "never"} if node["type"] == "Metaspace" else node
