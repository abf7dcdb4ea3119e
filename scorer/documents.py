"""From a request's documents to items' ids: what is scored, what is cut, and what is not scored and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention.layout import NONE
from attention.plans import ITEM_LIMITED, MAX_ITEM_TOKENS
from batching.types import Ints
from prefixrank.v1 import scorer_pb2 as pb
from scorer.body import Body
from scorer.encoder import Encoded, Encoder, Part
from scorer.tokenized import Status
from scorer.truncation import Cutter, Cutting
from scorer.validation import Given, Violations, is_blank

# Text encoded in one call. The tokenizer's records are a hundred times the text, and freeing them holds up the others.
_BATCH_CHARACTERS = 1 << 18
# These strategies keep the position within an item in 16 bits.
_ITEM_LIMITED = frozenset(pb.Strategy.Value(f"STRATEGY_{strategy.name}") for strategy in ITEM_LIMITED)


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """What follows the document. targets: how many of the last tokens are the query to be predicted."""

    ids: Ints
    targets: int = 0


class Read(NamedTuple):
    """One document on its way: its verdict, its item's ids where there are any, and its counts."""

    status: Status
    message: str = ""
    ids: Ints | None = None
    targets: int = 0
    document_tokens: int = 0
    original_document_tokens: int = 0
    truncated: bool = False


class Reads(NamedTuple):
    """The verdicts on all documents of a request, by column.

    ids      [T]  of the items of those that are scored, one after the other
    lengths       tokens of each; 0 where it is not scored
    """

    statuses: Sequence[Status]
    messages: Sequence[str]
    ids: Ints
    lengths: Sequence[int]
    targets: Sequence[int]
    document_tokens: Sequence[int]
    original_document_tokens: Sequence[int]
    truncated: Sequence[bool]

    @classmethod
    def of(cls, reads: Sequence[Read]) -> Reads:
        """Of one or more."""
        statuses, messages, own, *others = zip(*reads, strict=True)
        ids = np.concatenate([NONE, *[one for one in own if one is not None]])
        return cls(statuses, messages, ids, [0 if one is None else len(one) for one in own], *others)

    @classmethod
    def all_whole(cls, ids: Ints, lengths: Sequence[int]) -> Reads:
        """Of documents that are whole items, none of which is refused."""
        count = len(lengths)
        nothing, uncut = [0] * count, [False] * count
        return cls([Status.OK] * count, [""] * count, ids, lengths, nothing, lengths, lengths, uncut)


class Documents:
    """Reads the documents of one profile."""

    def __init__(self, encoder: Encoder, prefix_end: Part, body: Body, vocabulary_size: int) -> None:
        self._encoder = encoder
        self._prefix_end = prefix_end
        self._body = body
        self._vocabulary_size = vocabulary_size
        self._cutter = Cutter(encoder, body)
        self._template_tokens = len(body.before) + len(encoder.user_text(body.head, body.starts).ids)

    def read(
        self, given: Given, options: pb.ScoreOptions, cutting: Cutting, room: int, tail: Tail, bad: Violations
    ) -> Reads:
        """A verdict on each of the request's documents. room: how many tokens an item may have."""
        limited = options.strategy in _ITEM_LIMITED
        places = [index for index, content in enumerate(given.contents) if content == "token_ids"]
        ids, lengths = _joined([given.documents[index] for index in places])
        if len(places) == len(given.contents) and not any(given.targets):
            most = min(room, MAX_ITEM_TOKENS) if limited else room
            if 0 < min(lengths) <= max(lengths) <= most and int(ids.max()) < self._vocabulary_size:
                return Reads.all_whole(ids.astype(np.int32), lengths)
        whole = self._read_ids(ids, lengths, [given.targets[index] for index in places], room)
        made = self._read_others(given, dict(zip(places, whole, strict=True)), cutting, room, tail)
        for index, (read, target) in enumerate(zip(made, given.targets, strict=True)):
            if read.ids is not None and target >= len(read.ids):
                bad.add(f"documents[{index}].target_tokens", f"fewer than the item's {len(read.ids)} tokens", target)
        return Reads.of([_within_strategy(read, options.strategy) for read in made] if limited else made)

    def _read_others(self, given: Given, reads: dict[int, Read], cutting: Cutting, room: int, tail: Tail) -> list[Read]:
        """reads: of the documents given as ids; completed and put in order."""
        texts: dict[int, str] = {}
        raw: dict[int, str] = {}
        for index, (document, _, content, _) in enumerate(zip(*given, strict=True)):
            if content == "token_ids":
                continue
            if content == "raw_text" and (least := self._encoder.least_tokens(document.raw_text)) > room:
                told = f"at least {least} tokens in {len(document.raw_text)} characters, at most {room} fit"
                reads[index] = Read(Status.TOO_LONG, told, original_document_tokens=least)
            elif is_blank(text := document.text if content == "text" else document.raw_text):
                reads[index] = Read(Status.EMPTY, "the document has no visible text")
            else:
                (texts if content == "text" else raw)[index] = text
        for batch in _batches(raw):
            encoded = self._encoder.following_texts([raw[index] for index in batch], self._prefix_end)
            for index, own in zip(batch, encoded, strict=True):
                reads[index] = self._whole(own, int(own.max(initial=0)), given.targets[index], room)
        for batch in _batches(texts):
            read = self.read_texts([texts[index] for index in batch], cutting, room, tail)
            reads.update(zip(batch, read, strict=True))
        return [reads[index] for index in range(len(given.documents))]

    def _read_ids(
        self, given: NDArray[np.uint32], lengths: Sequence[int], targets: Sequence[int], room: int
    ) -> list[Read]:
        """The documents given as ids, of so many each: checked and narrowed all at once."""
        narrow = given.astype(np.int32)  # where the vocabulary ends before 2^31, and so do all that are scored
        highest = _highest(given, lengths)
        reads, begin = [], 0
        for target, length, most in zip(targets, lengths, highest, strict=True):
            reads.append(self._whole(narrow[begin : begin + length], most, target, room))
            begin += length
        return reads

    def _whole(self, ids: Ints, highest: int, targets: int, room: int) -> Read:
        """A document that is the whole item already. highest: of its ids."""
        if highest >= self._vocabulary_size:
            return Read(Status.INVALID, f"token id {highest} is not below {self._vocabulary_size}")
        if not len(ids):
            return Read(Status.EMPTY, "the document has no tokens")
        if len(ids) > room:
            return _too_long(len(ids), room, "a document given as the whole item is never cut")
        return Read(Status.OK, "", ids, targets, len(ids), len(ids))

    def read_texts(self, texts: Sequence[str], cutting: Cutting, room: int, tail: Tail) -> list[Read]:
        """The same for documents given as text, which the profile's template goes around."""
        head = len(self._body.head)
        limit = min(cutting.limit, room - self._template_tokens - len(tail.ids))
        bodies = [self._body.trimmed(text) for text in texts]
        encoded = self._encoder.user_texts([self._body.head + body for body in bodies], self._body.starts)
        own = [e.tokens_behind(head) for e in encoded]
        long = [i for i, e in enumerate(encoded) if own[i] > limit and not e.unwritable]
        may_cut = cutting.side != pb.TRUNCATION_NONE and limit > 0
        cuts = self._cutter.cut({i: (bodies[i], encoded[i]) for i in long}, limit, cutting.side) if may_cut else {}
        reads = [self._read_text(bodies[i], e, tail, own[i]) for i, e in enumerate(encoded)]
        for i in long:
            if i in cuts:
                reads[i] = self._read_text(cuts[i].text, cuts[i].encoded, tail, own[i], truncated=True)
            else:
                why = "no character fits" if cutting.side != pb.TRUNCATION_NONE else "the document is not to be cut"
                reads[i] = _too_long(own[i], max(limit, 0), why)
        return reads

    def _read_text(self, text: str, encoded: Encoded, tail: Tail, original: int, truncated: bool = False) -> Read:
        ids = np.concatenate([self._body.before, encoded.ids, tail.ids])
        if encoded.unwritable:
            return Read(Status.INVALID, "the document holds a control token that cannot be written as text")
        if ids.size and int(ids.max()) >= self._vocabulary_size:
            return Read(Status.INVALID, f"the text has tokens beyond the model's {self._vocabulary_size}")
        if truncated and is_blank(text):
            return Read(Status.EMPTY, "nothing but white space fits the limit", original_document_tokens=original)
        own = encoded.tokens_behind(len(self._body.head))
        return Read(Status.OK, "", ids, tail.targets, own, original, truncated)


def _joined(documents: Sequence[pb.Document]) -> tuple[NDArray[np.uint32], list[int]]:
    """The ids of documents given as such, one after the other, and how many each has."""
    parts = [document.token_ids.ids for document in documents]
    ids = pb.TokenIds().ids  # from one field an array is made faster than from many, with a new protobuf many times
    for part in parts:
        ids.extend(part)
    return np.asarray(ids, np.uint32), list(map(len, parts))


def _highest(ids: NDArray[np.uint32], lengths: Sequence[int]) -> list[int]:
    """The highest id of each of the documents that these ids are of, 0 where it has none."""
    counts = np.array(lengths, np.int64)
    highest, some = np.zeros(len(counts), np.int64), np.flatnonzero(counts)
    if len(some):
        highest[some] = np.maximum.reduceat(ids, (np.cumsum(counts) - counts)[some])
    found: list[int] = highest.tolist()
    return found


def _too_long(tokens: int, limit: int, why: str) -> Read:
    return Read(Status.TOO_LONG, f"{tokens} tokens, at most {limit} fit; {why}", original_document_tokens=tokens)


def _within_strategy(read: Read, strategy: pb.Strategy.ValueType) -> Read:
    """What is left of a verdict where the strategy asked for limits an item's length."""
    if read.ids is None or len(read.ids) <= MAX_ITEM_TOKENS:
        return read
    name = pb.Strategy.Name(strategy).removeprefix("STRATEGY_").lower()
    told = f"an item of {len(read.ids)} tokens, {name} takes at most {MAX_ITEM_TOKENS}; direct_ragged takes it"
    return Read(Status.TOO_LONG, told, original_document_tokens=read.original_document_tokens)


def _batches(texts: Mapping[int, str]) -> Iterator[list[int]]:
    """The keys, in groups whose texts are encoded in one call."""
    batch: list[int] = []
    characters = 0
    for index, text in texts.items():
        if batch and characters + len(text) > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
        batch.append(index)
        characters += len(text)
    if batch:
        yield batch
