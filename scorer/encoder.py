"""Texts to ids: control tokens in the profile's text, none in a user's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerFast

from batching.types import Ints
from scorer.errors import ProfileError
from scorer.prepending import Prepending, prepending, without_prepending
from scorer.profile import SEAM
from scorer.stretches import STRETCH, LeastTokens, separable, stretches
from scorer.template import Piece, Slot, filled

CUT_REACH = 16  # tokens around a limit among which the best place to cut is looked for
_SHOWN_IDS = 8
_STRETCHES_A_CALL = 4  # encoded in parallel; their records are a hundred times the text


@dataclass(frozen=True, slots=True)
class Control:
    """A control token of a template. Some swallow the white space beside them, whoever wrote it."""

    id: int
    text: str
    strips_left: bool
    strips_right: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Text and slots between two control tokens: the unit that a tokenizer encodes without regard to its neighbours.

    starts  the tokenizer puts a space of its own before it
    """

    pieces: tuple[Piece, ...]
    strip_start: bool
    strip_end: bool
    starts: bool

    def text(self, values: Mapping[str, str]) -> str:
        text = filled(self.pieces, values)
        text = text.lstrip() if self.strip_start else text
        return text.rstrip() if self.strip_end else text


Part = Control | Run


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of a text that is encoded on its own.

    character, token, word  index of its first one in the whole; word: None where words are not known
    kept                    its encoding; None: made again when asked for, as a long text's are too large to keep
    """

    text: str
    tokenizer: Tokenizer
    character: int
    token: int
    word: int | None
    kept: Encoding | None

    @property
    def encoding(self) -> Encoding:
        if self.kept is None:
            self.kept = self.tokenizer.encode(self.text, add_special_tokens=False)
        return self.kept


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A text in ids. It is one piece, unless it is long or control tokens in it had to be broken up.

    unwritable  it still holds a control token, one that cannot be broken up
    """

    ids: Ints
    pieces: tuple[_Piece, ...]
    unwritable: bool = False

    def _piece(self, token: int) -> _Piece:
        return next(piece for piece in reversed(self.pieces) if piece.token <= token)

    def span(self, token: int) -> tuple[int, int]:
        """First character and the one behind the last of a token."""
        piece = self._piece(token)
        start, end = piece.encoding.token_to_chars(token - piece.token) or (0, 0)
        return piece.character + start, piece.character + end

    def tokens_within(self, characters: int) -> int:
        """How many of the first tokens lie in the first `characters` and nowhere else."""
        count = 0
        while count < len(self.ids) and self.span(count)[1] <= characters:
            count += 1
        return count

    def tokens_behind(self, characters: int) -> int:
        """How many tokens hold a character behind the first `characters`."""
        return len(self.ids) - self.tokens_within(characters)

    def words_before(self, token: int, words: int, floor: int) -> int:
        """The first token of the word so many before this one's; `floor` where words are long or not known."""
        first = token
        while first > floor and self._distance(first - 1, token, words):
            first -= 1
            if token - first > CUT_REACH:
                return floor
        return first

    def words_after(self, token: int, words: int) -> int:
        """The token behind the word so many after this one's, or as far as the reach goes."""
        last = token
        while last < len(self.ids) and last - token < CUT_REACH and self._distance(last, token, words):
            last += 1
        return last

    def _distance(self, one: int, other: int, words: int) -> bool:
        """Whether two tokens are at most so many words apart: the tokenizer merges nothing across words."""
        a, b = self._word(one), self._word(other)
        return a is None or b is None or abs(a - b) <= words

    def _word(self, token: int) -> int | None:
        piece = self._piece(token)
        within = piece.encoding.token_to_word(token - piece.token)
        return None if within is None or piece.word is None else piece.word + within


class Encoder:
    """A tokenizer twice: as it is, for the profile's text, and blind to control tokens, for a user's.

    Each twice again where the tokenizer puts a space before a text: without that for texts that go on behind another.
    All are private copies whose settings nobody changes, so threads may share them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, templates: str) -> None:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # Nothing is cut or padded; a post-processor would add tokens and move offsets.
        state |= {"truncation": None, "padding": None, "post_processor": None}
        controls = [token for token in state["added_tokens"] if _is_control(token, templates)]
        for token in controls:  # those not called special, such as <think>, bind as much in a template that has them
            token["special"] = True
        self._prepending = prepending(state)
        self._separable = self._prepending is Prepending.NOTHING and separable(state)
        self.least_tokens = LeastTokens(state)
        self._as_is = _copies(state, self._prepending)
        self._blind = _copies(state, self._prepending)
        for tokenizer_ in self._blind.values():
            tokenizer_.encode_special_tokens = True
        self.control_texts = tuple(token["content"] for token in controls)
        self._controls = {t["id"]: Control(t["id"], t["content"], t["lstrip"], t["rstrip"]) for t in controls}
        self.unknown = _unknown_id(state["model"], self._as_is[True])
        forbidden = [id_ for id_ in self._controls if id_ != self.unknown]
        self._forbidden = np.zeros(max([*self._as_is[True].get_vocab().values(), 0]) + 1, dtype=np.bool_)
        self._forbidden[forbidden] = True
        self._lead = _leading_ids(tokenizer)

    def profile_text(self, text: str) -> Ints:
        """Ids of a whole string in which control tokens are control tokens. Nothing is added."""
        return self._ids(self._as_is[True], text)

    def following_texts(self, texts: Sequence[str], after: Part) -> list[Ints]:
        """Ids of texts in which control tokens are control tokens, each behind that part of a template."""
        if self._prepending is not Prepending.NOTHING:
            return [self._following_text(text, after) for text in texts]
        if any(map(self._is_long, texts)):
            return [self._ids(self._as_is[False], text) for text in texts]
        encodings = self._as_is[False].encode_batch_fast(list(texts), add_special_tokens=False)
        return [ints(encoding.ids) for encoding in encodings]

    def user_texts(self, texts: Sequence[str], starts: bool) -> list[Encoded]:
        """Texts in which no control token exists, whatever is written there. starts: see Run."""
        if any(map(self._is_long, texts)) and len(texts) > 1:
            return [self.user_text(text, starts) for text in texts]
        if len(texts) == 1 and self._is_long(texts[0]) and (encoded := self._long(texts[0])) is not None:
            return [encoded]
        encodings = self._blind[starts].encode_batch(list(texts), add_special_tokens=False)
        return [self._guarded(text, encoding, starts) for text, encoding in zip(texts, encodings, strict=True)]

    def user_text(self, text: str, starts: bool) -> Encoded:
        """The same for one."""
        return self.user_texts([text], starts)[0]

    def with_lead(self, ids: Ints) -> Ints:
        """`ids` behind what the tokenizer puts before a text (BOS), unless that is there already."""
        return ids if np.array_equal(ids[: len(self._lead)], self._lead) else np.concatenate([self._lead, ids])

    def text_of(self, id_: int) -> str:
        """What a token writes."""
        return str(self._as_is[False].decode([id_], skip_special_tokens=False))

    def render(self, parts: Sequence[Part], values: Mapping[str, str]) -> Ints | None:
        """Ids of a template with its slots filled; None where a value cannot be written as plain text."""
        encoded = [self.user_text(part.text(values), part.starts) for part in parts if isinstance(part, Run)]
        if any(e.unwritable for e in encoded):
            return None
        ids = iter(encoded)
        made = [ints([part.id]) if isinstance(part, Control) else next(ids).ids for part in parts]
        return np.concatenate([ints([]), *made])

    def fixed(self, parts: Sequence[Part]) -> Ints:
        """Ids of a part of a template that takes no text."""
        ids = self.render(parts, {})
        assert ids is not None, "a template's control tokens are split off its text"
        return ids

    def split(self, pieces: Sequence[Piece], after: Part | None = None) -> list[Part]:
        """A template as control tokens and the runs of text between them.

        after  the part that it goes on behind; None where a string begins with it
        """
        made: list[Part] = []
        left = after
        run: list[Piece] = []
        for part in (*self._parts(pieces), None):  # None: the end closes the last run
            if isinstance(part, str) or (isinstance(part, Slot) and part.name != SEAM):
                run.append(part)
                continue
            control = part if isinstance(part, Control) else None
            if run:
                strip_start = isinstance(left, Control) and left.strips_right
                made.append(Run(tuple(run), strip_start, bool(control and control.strips_left), self._starts(left)))
            if control:
                made.append(control)
            left, run = control, []
        return made

    def _parts(self, pieces: Sequence[Piece]) -> Iterator[Control | Piece]:
        for piece in pieces:
            if isinstance(piece, Slot):
                yield piece
                continue
            done = 0
            encoding = self._as_is[True].encode(piece, add_special_tokens=False)
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
                control = self._controls.get(token)
                # The unknown token stands for text that has no token, and only there where it is written for itself.
                if control and (token != self.unknown or piece[start:end].strip() == control.text):
                    yield from filter(None, [piece[done:start]])
                    yield control
                    done = end
            yield from filter(None, [piece[done:]])

    def _starts(self, after: Part | None) -> bool:
        if after is None:
            return self._prepending is not Prepending.NOTHING
        return isinstance(after, Control) and self._prepending is Prepending.STRETCH

    def _following_text(self, text: str, after: Part) -> Ints:
        made = [ints([])]
        for part in self.split([text], after):
            if isinstance(part, Control):
                made.append(ints([part.id]))
            else:
                made.append(ints(self._as_is[part.starts].encode(part.text({}), add_special_tokens=False).ids))
        return np.concatenate(made)

    def _is_long(self, text: str) -> bool:
        return self._separable and len(text) > 2 * STRETCH

    def _ids(self, tokenizer: Tokenizer, text: str) -> Ints:
        """Ids of one text as the tokenizer has them, of a long one in stretches."""
        if not self._is_long(text):
            return ints(tokenizer.encode(text, add_special_tokens=False).ids)
        return np.concatenate([ints(e.ids) for _, e in _in_stretches(text, tokenizer.encode_batch_fast)])

    def _long(self, text: str) -> Encoded | None:
        """A long text in stretches, so that what it takes beyond its ids does not grow with it.

        None where a stretch reaches a control token. Tokenizers that are not separable, and texts without seams such
        as one endless word or Chinese without spaces, are encoded whole: about two hundred bytes a character.
        """
        tokenizer = self._blind[False]
        pieces: list[_Piece] = []
        made: list[Ints] = []
        character = token = 0
        word: int | None = 0
        for part, encoding in _in_stretches(text, tokenizer.encode_batch):
            ids = ints(encoding.ids)
            if self._forbidden[ids].any():
                return None
            kept = encoding if len(part) > 2 * STRETCH else None  # twice is too slow
            pieces.append(_Piece(part, tokenizer, character, token, word, kept))
            made.append(ids)
            character, token = character + len(part), token + len(ids)
            last = encoding.token_to_word(len(ids) - 1) if len(ids) else None
            word = None if word is None or last is None else word + last + 1
        return Encoded(np.concatenate(made), tuple(pieces))

    def _guarded(self, text: str, encoding: Encoding, starts: bool) -> Encoded:
        """Some vocabularies reach a control token by merging plain text: then the text is broken up there."""
        ids = ints(encoding.ids)
        if not self._forbidden[ids].any():
            return Encoded(ids, (_Piece(text, self._blind[starts], 0, 0, 0, encoding),))
        pieces: list[_Piece] = []
        character = token = 0
        for part in self._broken_up(text):
            tokenizer = self._blind[starts and not pieces]
            encoding = tokenizer.encode(part, add_special_tokens=False)
            pieces.append(_Piece(part, tokenizer, character, token, None, encoding))
            character, token = character + len(part), token + len(encoding.ids)
        ids = np.concatenate([ints(piece.encoding.ids) for piece in pieces])
        return Encoded(ids, tuple(pieces), unwritable=bool(self._forbidden[ids].any()))

    def _broken_up(self, text: str) -> list[str]:
        """The text in parts, none of which holds a control token's text: each is split behind its first character."""
        inside = [f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in self.control_texts if len(t) > 1]
        return re.split("|".join(inside), text) if inside else [text]


def _in_stretches(text: str, encode: Callable[..., list[Encoding]]) -> Iterator[tuple[str, Encoding]]:
    """Each stretch of a text and its encoding."""
    parts = stretches(text)
    while some := list(islice(parts, _STRETCHES_A_CALL)):
        yield from zip(some, encode(some, add_special_tokens=False), strict=True)


def _copies(state: Mapping[str, Any], prepends: Prepending) -> dict[bool, Tokenizer]:
    """The tokenizer for texts before which it puts a space (True) and for others."""
    whole = Tokenizer.from_str(json.dumps(state))
    if prepends is Prepending.NOTHING:
        return {True: whole, False: whole}
    return {True: whole, False: Tokenizer.from_str(json.dumps(without_prepending(state)))}


def _is_control(token: Mapping[str, Any], templates: str) -> bool:
    return bool(token["special"]) or bool(token["content"].strip() and token["content"] in templates)


def _unknown_id(model: Mapping[str, Any], tokenizer: Tokenizer) -> int | None:
    """The token that the tokenizer writes for text it has no token for; None where every text has tokens."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    unknown = model.get("unk_token")
    return None if unknown is None else tokenizer.token_to_id(unknown)


def _leading_ids(tokenizer: PreTrainedTokenizerFast) -> Ints:
    """What the tokenizer puts before a text unasked. What it puts behind one (EOS) is never wanted here."""
    whole, bare = (tokenizer("a", add_special_tokens=added).input_ids for added in (True, False))
    for first in range(len(whole)):
        if whole[first : first + len(bare)] == bare:
            return ints(whole[:first])
    raise ProfileError("the tokenizer changes a text's own tokens when it adds BOS: prefix and item cannot be joined")


def ints(ids: Sequence[int] | Ints) -> Ints:
    """Token ids as every plan and batch has them."""
    return np.asarray(ids, dtype=np.int32)


def shown(ids: Ints) -> str:
    """The first few ids, for a message."""
    return f"[{', '.join(map(str, ids[:_SHOWN_IDS].tolist()))}{', ...' if len(ids) > _SHOWN_IDS else ''}]"
