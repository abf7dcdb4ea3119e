"""A profile's templates as text: what is fixed, where a text goes, and the share of the tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jinja2
from transformers import PreTrainedTokenizerFast

from scorer.errors import ProfileError
from scorer.profile import DOCUMENT, INSTRUCTION, QUERY, SEAM, Profile

_SENTINEL = "PREFIXRANKCONTENT"
_SLOTS = (QUERY, DOCUMENT, INSTRUCTION, SEAM)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a template takes a text; the name is the placeholder. A seam takes none: there the encoding starts anew."""

    name: str


Piece = str | Slot


def template_pieces(tokenizer: PreTrainedTokenizerFast, profile: Profile) -> tuple[list[Piece], list[Piece]]:
    """Prefix and item, the chat template's share included."""
    prefix, item = pieces(profile.prefix), pieces(profile.item)
    if profile.format == "text":
        return prefix, item
    parts = chat(tokenizer, profile, _SENTINEL).split(_SENTINEL)
    if len(parts) != 2:
        raise ProfileError(f"profile {profile.name}: the chat template has the user's message {len(parts) - 1} times")
    return _joined([parts[0], *prefix]), _joined([*item, parts[1]])


def pieces(template: str) -> list[Piece]:
    """A template cut at its placeholders."""
    parts = re.split(f"({'|'.join(map(re.escape, _SLOTS))})", template)
    return [Slot(part) if part in _SLOTS else part for part in parts if part]


def filled(pieces: Sequence[Piece], values: Mapping[str, str]) -> str:
    """The template with its texts put in."""
    return "".join(values[piece.name] if isinstance(piece, Slot) else piece for piece in pieces)


def chat(tokenizer: PreTrainedTokenizerFast, profile: Profile, content: str) -> str:
    """The chat with this user's message, up to where the model answers."""
    if not tokenizer.chat_template:
        raise ProfileError(
            f"profile {profile.name} has format 'chat', but the tokenizer has no chat template; use 'text'"
        )
    system = [] if profile.system is None else [{"role": "system", "content": profile.system}]
    try:
        # Thinking off: the label is read right here. The date fixed, or scores would change from day to day.
        rendered = tokenizer.apply_chat_template(
            [*system, {"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
            date_string="26 Jul 2024",
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise ProfileError(f"profile {profile.name}: the tokenizer's chat template refuses it: {error}") from error
    return str(rendered)


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Without two texts in a row: a control token may lie across them."""
    made: list[Piece] = []
    for piece in pieces:
        if made and isinstance(last := made[-1], str) and isinstance(piece, str):
            made[-1] = last + piece
        else:
            made.append(piece)
    return made
