"""From a request's text to token ids: templates, labels, control tokens, cuts, and the proof that they are exact.

Everything is tokenised once; the ids of the prefix and of each item are the same whether an item runs alone or packed.
Text of the profile may hold control tokens, text of a user never does.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attention.plans import Strategy
from batching.types import Ints, Item, TokenizedRequest
from prefixrank.v1 import scorer_pb2 as pb
from scorer.config import Limits
from scorer.errors import InvalidRequest, ModelError, ProfileError, Violation
from scorer.profile import DOCUMENT, INSTRUCTION, QUERY, Profile

_SHOWN_CHARACTERS = 80  # of a user's text in a message
_SHOWN_IDS = 8
_BATCH_CHARACTERS = 1 << 22  # text encoded in one call: the tokenizer's records are a hundred times the text
_CUTS_A_CALL = 32
_CUT_REACH = 64  # tokens around a limit among which the best place to cut is looked for
_CUT_WORDS = 3  # words re-encoded with a candidate cut; the words before them do not change
_SENTINEL = "PREFIXRANKCONTENT"

_STRATEGIES = {
    pb.STRATEGY_UNSPECIFIED: None,
    pb.STRATEGY_NAIVE: Strategy.NAIVE,
    pb.STRATEGY_DIRECT_RAGGED: Strategy.DIRECT_RAGGED,
    pb.STRATEGY_MULTI_ITEM: Strategy.MULTI_ITEM,
    pb.STRATEGY_REFERENCE: Strategy.REFERENCE,
}
_PRIORITIES = {pb.PRIORITY_UNSPECIFIED: 0, pb.PRIORITY_LOW: -1, pb.PRIORITY_NORMAL: 0, pb.PRIORITY_HIGH: 1}

_AWKWARD_QUERIES = ("what is the capital of France", " Leading and trailing space ", "7 größte Städte?\n", "中文 🙂")
_AWKWARD_DOCUMENTS = (
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
    "ends with a quote\"",
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


class Status(StrEnum):
    """What happened to a document: the proto's DocumentStatus, without its prefix and in lower case."""

    OK = "ok"
    EMPTY = "empty"
    TOO_LONG = "too_long"
    NUMERIC_ERROR = "numeric_error"
    DEADLINE = "deadline"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Label:
    """A text and the one token it is."""

    text: str
    token_id: int


@dataclass(frozen=True, slots=True)
class DocumentTokens:
    """What became of one document before any model saw it.

    index                     position in the request
    tokens                    of the whole item, template included; 0 where it is not scored
    document_tokens           of the document as scored, template not counted
    original_document_tokens  before it was cut
    item                      index into the TokenizedRequest's items; None where it is not scored
    """

    id: str
    index: int
    status: Status
    message: str
    tokens: int
    document_tokens: int
    original_document_tokens: int
    truncated: bool
    item: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Tokenized:
    """A request in ids.

    request    None where no document can be scored
    documents  one for each of the request's, in its order
    labels     the positive one first; empty for query likelihood
    """

    request: TokenizedRequest | None
    documents: tuple[DocumentTokens, ...]
    labels: tuple[Label, ...]
    prefix_tokens: int


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint: a directory, or a .gguf file. Never goes to the network. Raises ModelError."""
    place = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    try:
        tokenizer = AutoTokenizer.from_pretrained(place[0], local_files_only=True, **place[1])
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{path} has no tokenizer that transformers can load: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(f"the tokenizer of {path} is a {type(tokenizer).__name__}; it needs one with a tokenizer.json")
    return tokenizer


@dataclass(frozen=True, slots=True)
class _Control:
    """A control token of a template. Some swallow the white space beside them, whoever wrote it."""

    id: int
    strips_left: bool
    strips_right: bool


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a template takes a text."""

    name: str


@dataclass(frozen=True, slots=True)
class _Run:
    """Text and slots between two control tokens: the unit that a tokenizer encodes without regard to its neighbours."""

    pieces: tuple[str | _Slot, ...]
    strip_start: bool
    strip_end: bool

    def text(self, values: Mapping[str, str]) -> str:
        text = "".join(values[piece.name] if isinstance(piece, _Slot) else piece for piece in self.pieces)
        text = text.lstrip() if self.strip_start else text
        return text.rstrip() if self.strip_end else text


@dataclass(frozen=True, slots=True, eq=False)
class _Encoded:
    """A user's text in ids. It is one piece, unless control tokens in it had to be broken up.

    pieces  (index of the first character, index of the first token, encoding) of each
    """

    ids: Ints
    pieces: tuple[tuple[int, int, Encoding], ...]

    def span(self, token: int) -> tuple[int, int]:
        """First character and the one behind the last of a token."""
        character, first, encoding = next(piece for piece in reversed(self.pieces) if piece[1] <= token)
        start, end = encoding.token_to_chars(token - first) or (0, 0)
        return character + start, character + end

    def word(self, token: int) -> int | None:
        """Index of the token's word: the tokenizer merges nothing across words. None where it is not known."""
        return self.pieces[0][2].token_to_word(token) if len(self.pieces) == 1 else None

    def tokens_within(self, characters: int) -> int:
        """How many of the first tokens lie in the first `characters` and nowhere else."""
        count = 0
        while count < len(self.ids) and self.span(count)[1] <= characters:
            count += 1
        return count


class _Encoder:
    """A tokenizer twice: as it is, for the profile's text, and blind to control tokens, for a user's.

    Both are private copies, whose settings nobody changes, so that threads may share them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, templates: str) -> None:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # Neither cuts nor pads, and no post-processor: it adds tokens and moves offsets.
        state |= {"truncation": None, "padding": None, "post_processor": None}
        self._as_is = Tokenizer.from_str(json.dumps(state))
        controls = [token for token in state["added_tokens"] if _is_control(token, templates)]
        for token in controls:  # those that are not called special, such as <think>, are as binding in a template
            token["special"] = True
        self._blind = Tokenizer.from_str(json.dumps(state))
        self._blind.encode_special_tokens = True
        self.controls = {
            token["id"]: _Control(token["id"], bool(token["lstrip"]), bool(token["rstrip"])) for token in controls
        }
        self.control_texts = tuple(token["content"] for token in controls)
        self._inside_control = re.compile("|".join(f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in self.control_texts if len(t) > 1) or r"(?!)")
        highest = max([self._as_is.get_vocab_size(with_added_tokens=True), *self.controls], default=0)
        self._is_control = np.zeros(highest + 1, dtype=np.bool_)
        unknown = _unknown_id(state["model"], self._as_is)
        self._is_control[[i for i in self.controls if i != unknown]] = True
        self.unknown = unknown
        self.lead = _leading_ids(tokenizer)

    def profile_text(self, text: str) -> Ints:
        """Ids of text in which control tokens are control tokens; nothing added."""
        return _ints(self._as_is.encode(text, add_special_tokens=False).ids)

    def profile_texts(self, texts: Sequence[str]) -> list[Ints]:
        """The same for many."""
        return [_ints(e.ids) for e in self._as_is.encode_batch_fast(list(texts), add_special_tokens=False)]

    def user_texts(self, texts: Sequence[str]) -> list[_Encoded]:
        """Texts in which no control token exists, whatever is written there."""
        encodings = self._blind.encode_batch(list(texts), add_special_tokens=False)
        return [self._guarded(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def user_text(self, text: str) -> _Encoded:
        """The same for one."""
        return self.user_texts([text])[0]

    def with_lead(self, ids: Ints) -> Ints:
        """`ids` behind what the tokenizer puts before a text (BOS), unless that is there already."""
        lead = _ints(self.lead)
        return ids if np.array_equal(ids[: len(lead)], lead) else np.concatenate([lead, ids])

    def split(self, pieces: Iterable[str | _Slot]) -> list[_Control | _Run]:
        """A template as control tokens and the runs between them; empty runs are left out."""
        flat = [part for piece in _joined(pieces) for part in self._split_text(piece)]
        made: list[_Control | _Run] = []
        left: _Control | None = None
        open_: list[str | _Slot] = []
        for part in (*flat, None):
            if isinstance(part, str | _Slot):
                open_.append(part)
                continue
            if open_:
                made.append(_Run(tuple(open_), bool(left and left.strips_right), bool(part and part.strips_left)))
            if part:
                made.append(part)
            left, open_ = part, []
        return made

    def _split_text(self, piece: str | _Slot) -> Iterator[_Control | _Slot | str]:
        if isinstance(piece, _Slot):
            yield piece
            return
        done = 0
        encoding = self._as_is.encode(piece, add_special_tokens=False)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self.controls:
                if piece[done:start]:
                    yield piece[done:start]
                yield self.controls[token]
                done = end
        if piece[done:]:
            yield piece[done:]

    def _guarded(self, text: str, encoding: Encoding) -> _Encoded:
        """A vocabulary may reach a control token by merging plain text: then the text is encoded in two halves of it."""
        ids = _ints(encoding.ids)
        if not self._is_control[ids].any():
            return _Encoded(ids, ((0, 0, encoding),))
        pieces: list[tuple[int, int, Encoding]] = []
        kept: list[Ints] = []
        character = token = 0
        for part in self._inside_control.split(text):
            encoding = self._blind.encode(part, add_special_tokens=False)
            pieces.append((character, token, encoding))
            kept.append(_ints(encoding.ids))
            character, token = character + len(part), token + len(encoding.ids)
        ids = np.concatenate(kept)
        # A control token of one character cannot be broken up. It stays out of what the model reads.
        ids = np.where(self._is_control[ids], self._replacement, ids)
        return _Encoded(ids, tuple(pieces))
