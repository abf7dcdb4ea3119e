"""The proof at start that prefix and item, encoded apart, are the tokens of the two encoded together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from batching.types import Ints
from scorer.encoder import shown
from scorer.errors import ProfileError
from scorer.profile import DOCUMENT

AWKWARD_QUERIES = ("what is the capital of France", " Leading and trailing space ", "7 größte Städte?\n", "中文 🙂")
AWKWARD_DOCUMENTS = (
    "plain words",
    " leading space",
    "\nnewline",
    "\r\n\r\nwindows lines\r\n",
    "\ttab",
    "7 digits",
    "1234567",
    "🙂",
    "中文",
    "密码重置：打开设置。",
    "'s",
    "'ll do",
    "</think>",
    "trailing newline\n",
    "trailing newlines\n\n",
    "trailing spaces   ",
    "trailing digit 7",
    "ends with a stop.",
    'ends with a quote"',
    "\u0301combining mark first",
    "\u0338stroke first",
    "e\u0301 decomposed e\u0301",
    "ends with a letter that may combine e",
    "\u200bzero width",
    "\u202egnirts",
    "\ufeffBOM",
    "\x00",
    ":",
    "-",
    "a",
)


SPACES = f"let the item begin with a space or a control token, and so what follows {DOCUMENT}"
STRIPS = (
    "the tokenizer's Strip normalizer takes the spaces at the ends of each text away, other ones of a text in parts: "
    f"take it out of tokenizer.json, or put control tokens right before and behind {DOCUMENT}"
)


@dataclass(frozen=True, slots=True, eq=False)
class Apart:
    """A query and a document as this service writes and encodes them.

    texts  the prefix, the item up to the end of the document, and what follows
    ids    of the prefix and of the item
    tail   how many of the item's last tokens follow the document
    """

    query: str
    document: str
    texts: tuple[str, str, str]
    ids: tuple[Ints, Ints]
    tail: int


def check_seams(profile: str, apart: Apart, encode: Callable[[str], Ints], normalizer: object = None) -> None:
    """Raises ProfileError naming the seam, the document and the ids where the tokenizer merges across a seam.

    encode      the tokenizer itself, not our copies of it
    normalizer  the tokenizer's
    """
    expected, found = encode("".join(apart.texts)), np.concatenate(apart.ids)
    if np.array_equal(expected, found):
        return
    first_seam_holds = np.array_equal(encode("".join(apart.texts[:2])), found[: len(found) - apart.tail])
    at = max(_first_difference(expected, found) - 2, 0)
    raise ProfileError(
        f"profile {profile}: the tokenizer merges across the seam "
        f"{'document | what follows it' if first_seam_holds else 'prefix | item'} for document {apart.document!r}, "
        f"query {apart.query!r}: from token {at} on together {shown(expected[at:])}, apart {shown(found[at:])}; "
        + (STRIPS if "Strip(" in repr(normalizer) else SPACES)
    )


def _first_difference(a: Ints, b: Ints) -> int:
    shorter = min(len(a), len(b))
    return int(np.argmax(np.append(a[:shorter] != b[:shorter], True)))
