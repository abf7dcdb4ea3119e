"""Cutting a document that has too many tokens: the longest part that fits, encoded as if it had been cut by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefixrank.v1 import scorer_pb2 as pb
from scorer.body import Body
from scorer.encoder import CUT_REACH, Encoded, Encoder

_CUTS_A_CALL = 32
_CUT_WORDS = 3  # words re-encoded with a candidate cut; the words before them do not change


@dataclass(frozen=True, slots=True)
class Cutting:
    """A request's wish for documents that are too long."""

    limit: int
    side: int


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """What is left of a document, and its encoding behind the item's head."""

    text: str
    encoded: Encoded


class Cutter:
    """Cuts the documents of one profile."""

    def __init__(self, encoder: Encoder, body: Body) -> None:
        self._encoder = encoder
        self._body = body

    def cut(self, documents: Mapping[int, tuple[str, Encoded]], limit: int, side: int) -> dict[int, Cut]:
        """The longest part of each document that has at most `limit` tokens; where nothing is left, it is missing.

        documents  trimmed texts and their encodings behind the item's head, under any number
        """
        cut = self._cut_left if side == pb.TRUNCATION_LEFT else self._cut_right
        texts = {i: self._body.trimmed(cut(text, encoded, limit)) for i, (text, encoded) in documents.items()}
        made: dict[int, Cut] = {}
        while texts := {i: text for i, text in texts.items() if text}:
            encodings = self._encoder.user_texts([self._body.head + text for text in texts.values()], self._body.starts)
            made |= {i: Cut(text, e) for (i, text), e in zip(texts.items(), encodings, strict=True)}
            long = [i for i in texts if made[i].encoded.tokens_behind(len(self._body.head)) > limit]
            texts = {i: self._shorter(made.pop(i).text, side) for i in long}
        return made

    def _shorter(self, text: str, side: int) -> str:
        return self._body.trimmed(text[1:] if side == pb.TRUNCATION_LEFT else text[:-1])

    def _cut_right(self, body: str, whole: Encoded, limit: int) -> str:
        """The longest beginning that has at most `limit` tokens when it is encoded on its own.

        A word cut in two may have other tokens than it had whole, so candidates around the limit are encoded: with a
        few words before them, whose tokens stay as they are, not with the whole document.
        """
        head = len(self._body.head)
        first = whole.tokens_within(head)
        over = first + limit
        start, stop = whole.words_before(over, _CUT_WORDS, first), whole.words_after(over, 1)
        low = whole.span(start)[0] - head if start > first else 0
        high = len(body) if stop == len(whole.ids) else whole.span(stop)[0] - head
        if low == 0:
            cut = self._first_fit(range(high, 0, -1), lambda c: body[:c], limit, begins=True)
        else:
            cut = self._first_fit(range(high, low, -1), lambda c: body[low:c], limit - (start - first), begins=False)
        return body[: low if cut is None else cut]

    def _cut_left(self, body: str, whole: Encoded, limit: int) -> str:
        """The longest end that has at most `limit` tokens when it is encoded on its own; see `_cut_right`."""
        head, count = len(self._body.head), len(whole.ids)
        first = whole.tokens_within(head)
        over = count - limit - 1
        start = whole.words_before(over, 1, max(first, over - CUT_REACH))
        stop = whole.words_after(over, _CUT_WORDS)
        low = max(whole.span(start)[0] - head, 0)
        high = len(body) if stop == count else whole.span(stop)[0] - head
        cut = self._first_fit(range(low, high), lambda c: body[c:high], limit - (count - stop), begins=True)
        return body[high if cut is None else cut :]

    def _first_fit(self, cuts: range, window: Callable[[int], str], limit: int, begins: bool) -> int | None:
        """The first cut whose window has at most `limit` tokens. begins: the window is the document's beginning."""
        head, starts = (self._body.head, self._body.starts) if begins else ("", False)
        for begin in range(0, len(cuts), _CUTS_A_CALL):
            some = cuts[begin : begin + _CUTS_A_CALL]
            for cut, encoded in zip(
                some, self._encoder.user_texts([head + window(cut) for cut in some], starts), strict=True
            ):
                if encoded.tokens_behind(len(head)) <= limit:
                    return cut
        return None
