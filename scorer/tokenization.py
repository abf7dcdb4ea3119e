"""From a request's text to token ids: templates, labels, control tokens, cuts, and the proof that they are exact.

Everything is tokenised once; the ids of the prefix and of each item are the same whether an item runs alone or packed.
Text of the profile may hold control tokens, text of a user never does.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import jinja2
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
_CUT_REACH = 16  # tokens around a limit among which the best place to cut is looked for
_CUT_WORDS = 3  # words re-encoded with a candidate cut; the words before them do not change
_SENTINEL = "PREFIXRANKCONTENT"
_UNLIMITED = 1 << 30
_UNLIMITED = 1 << 30

_STRATEGIES = {
    number: Strategy(name.removeprefix("STRATEGY_").lower()) if number else None for name, number in pb.Strategy.items()
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
    """Where a template takes a text; the name is the placeholder."""

    name: str


_Piece = str | _Slot


@dataclass(frozen=True, slots=True)
class _Run:
    """Text and slots between two control tokens: the unit that a tokenizer encodes without regard to its neighbours."""

    pieces: tuple[_Piece, ...]
    strip_start: bool
    strip_end: bool

    def text(self, values: Mapping[str, str]) -> str:
        text = _filled(self.pieces, values)
        text = text.lstrip() if self.strip_start else text
        return text.rstrip() if self.strip_end else text


@dataclass(frozen=True, slots=True, eq=False)
class _Encoded:
    """A text in ids. It is one piece, unless control tokens in it had to be broken up.

    pieces      (index of the first character, index of the first token, encoding) of each
    unwritable  it still holds a control token, one that cannot be broken up
    """

    ids: Ints
    pieces: tuple[tuple[int, int, Encoding], ...]
    unwritable: bool = False

    def span(self, token: int) -> tuple[int, int]:
        """First character and the one behind the last of a token."""
        character, first, encoding = next(piece for piece in reversed(self.pieces) if piece[1] <= token)
        start, end = encoding.token_to_chars(token - first) or (0, 0)
        return character + start, character + end

    def tokens_within(self, characters: int) -> int:
        """How many of the first tokens lie in the first `characters` and nowhere else."""
        count = 0
        while count < len(self.ids) and self.span(count)[1] <= characters:
            count += 1
        return count

    def words_before(self, token: int, words: int, floor: int) -> int:
        """The first token of the word so many before this one's; `floor` where words are long or not known."""
        first = token
        while first > floor and self._distance(first - 1, token, words):
            first -= 1
            if token - first > _CUT_REACH:
                return floor
        return first

    def words_after(self, token: int, words: int) -> int:
        """The token behind the word so many after this one's, or as far as the reach goes."""
        last = token
        while last < len(self.ids) and last - token < _CUT_REACH and self._distance(last, token, words):
            last += 1
        return last

    def _distance(self, one: int, other: int, words: int) -> bool:
        """Whether two tokens are at most so many words apart: the tokenizer merges nothing across words."""
        if len(self.pieces) > 1:
            return True
        a, b = (self.pieces[0][2].token_to_word(token) for token in (one, other))
        return a is None or b is None or abs(a - b) <= words


class _Encoder:
    """A tokenizer twice: as it is, for the profile's text, and blind to control tokens, for a user's.

    Both are private copies whose settings nobody changes, so threads may share them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, templates: str) -> None:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # Nothing is cut or padded; a post-processor would add tokens and move offsets.
        state |= {"truncation": None, "padding": None, "post_processor": None}
        self._as_is = Tokenizer.from_str(json.dumps(state))
        controls = [token for token in state["added_tokens"] if _is_control(token, templates)]
        for token in controls:  # those not called special, such as <think>, bind as much in a template that has them
            token["special"] = True
        self._blind = Tokenizer.from_str(json.dumps(state))
        self._blind.encode_special_tokens = True
        self.control_texts = tuple(token["content"] for token in controls)
        self._controls = {token["id"]: _Control(token["id"], token["lstrip"], token["rstrip"]) for token in controls}
        self.unknown = _unknown_id(state["model"], self._as_is)
        forbidden = [id_ for id_ in self._controls if id_ != self.unknown]
        self._forbidden = np.zeros(max([*self._as_is.get_vocab().values(), 0]) + 1, dtype=np.bool_)
        self._forbidden[forbidden] = True
        self._lead = _leading_ids(tokenizer)

    def profile_texts(self, texts: Sequence[str]) -> list[Ints]:
        """Ids of texts in which control tokens are control tokens. Nothing is added."""
        return [_ints(e.ids) for e in self._as_is.encode_batch_fast(list(texts), add_special_tokens=False)]

    def profile_text(self, text: str) -> Ints:
        """The same for one."""
        return self.profile_texts([text])[0]

    def user_texts(self, texts: Sequence[str]) -> list[_Encoded]:
        """Texts in which no control token exists, whatever is written there."""
        encodings = self._blind.encode_batch(list(texts), add_special_tokens=False)
        return [self._guarded(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def user_text(self, text: str) -> _Encoded:
        """The same for one."""
        return self.user_texts([text])[0]

    def with_lead(self, ids: Ints) -> Ints:
        """`ids` behind what the tokenizer puts before a text (BOS), unless that is there already."""
        return ids if np.array_equal(ids[: len(self._lead)], self._lead) else np.concatenate([self._lead, ids])

    def text_of(self, id_: int) -> str:
        """What a token writes."""
        return str(self._as_is.decode([id_], skip_special_tokens=False))

    def render(self, parts: Sequence[_Control | _Run], values: Mapping[str, str]) -> Ints | None:
        """Ids of a template with its slots filled; None where a value cannot be written as plain text."""
        runs = [part.text(values) for part in parts if isinstance(part, _Run)]
        encoded = self.user_texts(runs)
        if any(e.unwritable for e in encoded):
            return None
        ids = iter(encoded)
        made = [_ints([part.id]) if isinstance(part, _Control) else next(ids).ids for part in parts]
        return np.concatenate([_ints([]), *made])

    def split(self, pieces: Sequence[_Piece]) -> list[_Control | _Run]:
        """A template as control tokens and the runs of text between them."""
        made: list[_Control | _Run] = []
        left: _Control | None = None
        run: list[_Piece] = []
        for part in (*self._parts(pieces), None):  # None: the end closes the last run
            if isinstance(part, str | _Slot):
                run.append(part)
                continue
            if run:
                made.append(_Run(tuple(run), bool(left and left.strips_right), bool(part and part.strips_left)))
            if part:
                made.append(part)
            left, run = part, []
        return made

    def _parts(self, pieces: Sequence[_Piece]) -> Iterator[_Control | _Piece]:
        for piece in pieces:
            if isinstance(piece, _Slot):
                yield piece
                continue
            done = 0
            encoding = self._as_is.encode(piece, add_special_tokens=False)
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
                if token in self._controls:
                    yield from filter(None, [piece[done:start]])
                    yield self._controls[token]
                    done = end
            yield from filter(None, [piece[done:]])

    def _guarded(self, text: str, encoding: Encoding) -> _Encoded:
        """Some vocabularies reach a control token by merging plain text: then the text is broken up there."""
        ids = _ints(encoding.ids)
        if not self._forbidden[ids].any():
            return _Encoded(ids, ((0, 0, encoding),))
        pieces: list[tuple[int, int, Encoding]] = []
        character = token = 0
        for part in self._broken_up(text):
            encoding = self._blind.encode(part, add_special_tokens=False)
            pieces.append((character, token, encoding))
            character, token = character + len(part), token + len(encoding.ids)
        ids = np.concatenate([_ints(piece[2].ids) for piece in pieces])
        return _Encoded(ids, tuple(pieces), unwritable=bool(self._forbidden[ids].any()))

    def _broken_up(self, text: str) -> list[str]:
        """The text in parts, none of which holds a control token's text: each is split behind its first character."""
        inside = [f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in self.control_texts if len(t) > 1]
        return re.split("|".join(inside), text) if inside else [text]


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
            return _ints(whole[:first])
    raise ProfileError("the tokenizer changes a text's own tokens when it adds BOS: prefix and item cannot be joined")


def _ints(ids: Sequence[int] | Ints) -> Ints:
    return np.asarray(ids, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class _Tail:
    """What follows the document. targets: how many of the last tokens are the query to be predicted."""

    ids: Ints
    targets: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Body:
    """Where the document goes in an item: ids before it, text encoded together with it, and what comes after."""

    before: Ints
    head: str
    strip_start: bool
    strip_end: bool
    after: tuple[_Control | _Run, ...]

    def trimmed(self, document: str) -> str:
        """The document as the control tokens beside it leave it."""
        document = document.lstrip() if self.strip_start else document
        return document.rstrip() if self.strip_end else document


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """One document on its way: its verdict, its item's ids where there are any, and its counts."""

    status: Status
    message: str = ""
    ids: Ints | None = None
    targets: int = 0
    document_tokens: int = 0
    original_document_tokens: int = 0
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class _Cutting:
    """A request's wish for documents that are too long."""

    limit: int
    side: int


class _Violations:
    """Collects what is wrong with a request, so that the caller hears of all of it at once."""

    def __init__(self) -> None:
        self._found: list[Violation] = []

    def add(self, field: str, limit: str, value: object = "") -> None:
        """One more bad field."""
        self._found.append(Violation(field, _short(str(value)), limit))

    def check(self) -> None:
        """Raises InvalidRequest if anything was found."""
        if self._found:
            raise InvalidRequest(self._found)


class Tokenization:
    """Turns requests into ids under one profile. Threads may share it.

    labels  the profile's, the positive one first
    """

    labels: tuple[Label, ...]

    def __init__(self, tokenizer: PreTrainedTokenizerFast, profile: Profile, limits: Limits) -> None:
        """Raises ProfileError where the profile's templates or labels do not fit the tokenizer."""
        self._tokenizer = tokenizer
        self._profile = profile
        self._limits = limits
        self._prefix_pieces, self._item_pieces = _template_pieces(tokenizer, profile)
        self._encoder = _Encoder(
            tokenizer, "\n".join(p for p in (*self._prefix_pieces, *self._item_pieces) if isinstance(p, str))
        )
        self._prefix = self._encoder.split(self._prefix_pieces)
        self._body = _body(self._encoder, self._encoder.split(self._item_pieces))
        self._head_tokens = len(self._encoder.user_text(self._body.head).ids)
        self._unknown = tokenizer.unk_token_id  # SmolLM2's is <|endoftext|>, which its vocabulary never falls back to
        self._fixed_tail = (
            None if profile.kind == "query_likelihood" else _Tail(_own_text(self._encoder, self._body.after))
        )
        self.labels = self._profile_labels()

    # ------------------------------------------------------------------ requests

    def tokenize(self, request: pb.ScoreRequest) -> Tokenized:
        """The request in ids, and a verdict on each document. Raises InvalidRequest naming every bad field."""
        bad = _Violations()
        ids = self._check_documents(request, bad)
        self._check_prefix(request, bad)
        labels = self._request_labels(request.options, bad)
        cutting = self._check_options(request, bad)
        bad.check()
        prefix = self._prefix_ids(request, bad)
        tail = self._tail(request.query.text, bad)
        bad.check()
        reads = self._read_documents(request, cutting, len(prefix), tail, bad)
        total = len(prefix) + sum(len(read.ids) for read in reads if read.ids is not None)
        if total > self._limits.max_request_tokens:
            bad.add("documents", f"at most {self._limits.max_request_tokens} tokens in all, prefix included", total)
        bad.check()
        return self._assembled(request, ids, labels, prefix, reads)

    def _check_documents(self, request: pb.ScoreRequest, bad: _Violations) -> list[str]:
        """The documents' ids, empty ones filled in."""
        count, most = len(request.documents), self._limits.max_documents
        if not 1 <= count <= most:
            bad.add("documents", f"between 1 and {most} documents", count)
            return []
        ids = [document.id or str(index) for index, document in enumerate(request.documents)]
        seen: set[str] = set()
        for index, document in enumerate(request.documents):
            if ids[index] in seen:
                bad.add(f"documents[{index}].id", "unique within the request", repr(ids[index][:_SHOWN_CHARACTERS]))
            seen.add(ids[index])
            if document.WhichOneof("content") is None:
                bad.add(f"documents[{index}]", "one of text, raw_text and token_ids")
            elif complaint := self._target_complaint(request, document):
                bad.add(f"documents[{index}].target_tokens", complaint, document.target_tokens)
        return ids

    def _target_complaint(self, request: pb.ScoreRequest, document: pb.Document) -> str:
        if self._profile.kind != "query_likelihood":
            return "0: only query likelihood predicts tokens" if document.target_tokens else ""
        if document.WhichOneof("content") != "text":
            return "" if document.target_tokens else "at least 1: how many of the item's last tokens are the query"
        if request.WhichOneof("prefix") != "query":
            return "text needs query.text to predict; or give raw_text or token_ids and the number of tokens to predict"
        return "0: a text document's item ends with the query" if document.target_tokens else ""

    def _check_prefix(self, request: pb.ScoreRequest, bad: _Violations) -> None:
        match request.WhichOneof("prefix"):
            case None:
                bad.add("query.text", "a query, or instead of it raw_text or token_ids as the whole prefix")
            case "query":
                if _is_blank(request.query.text):
                    bad.add("query.text", "not blank", repr(request.query.text[:_SHOWN_CHARACTERS]))
                if request.query.HasField("instruction") and self._profile.instruction is None:
                    bad.add("query.instruction", f"absent: profile {self._profile.name} has no place for one")
            case "raw_text":
                if not request.raw_text:
                    bad.add("raw_text", "not empty")
            case "token_ids":
                self._check_ids("token_ids.ids", request.token_ids.ids, bad)

    def _check_ids(self, field: str, ids: Sequence[int], bad: _Violations) -> None:
        if not ids:
            bad.add(field, "not empty")
        elif (highest := max(ids)) >= self._limits.vocabulary_size:
            bad.add(field, f"below the vocabulary size {self._limits.vocabulary_size}", highest)

    def _check_options(self, request: pb.ScoreRequest, bad: _Violations) -> _Cutting:
        options, limits = request.options, self._limits
        for field, value, known in (
            ("options.strategy", options.strategy, pb.Strategy.values()),
            ("options.truncation", options.truncation, pb.Truncation.values()),
            ("priority", request.priority, pb.Priority.values()),
        ):
            if value not in known:
                bad.add(field, f"between {min(known)} and {max(known)}", value)
        asked = options.max_tokens_per_document
        if asked > limits.max_tokens_per_document:
            bad.add("options.max_tokens_per_document", f"at most {limits.max_tokens_per_document}", asked)
        return _Cutting(asked or limits.default_tokens_per_document, options.truncation)

    def _prefix_ids(self, request: pb.ScoreRequest, bad: _Violations) -> Ints:
        field = {"query": "query.text", "raw_text": "raw_text", "token_ids": "token_ids.ids"}
        which = request.WhichOneof("prefix")
        assert which is not None, "checked before"
        ids: Ints | None
        if which == "query":
            ids = self._query_prefix_ids(request.query, bad)
        elif which == "raw_text":
            ids = self._encoder.with_lead(self._encoder.profile_text(request.raw_text))
        else:
            ids = _ints(request.token_ids.ids)
        if ids is None:
            bad.add(field[which], "text that can be written without a control token")
            return _ints([])
        most = self._limits.max_context_tokens
        if len(ids) >= most:
            bad.add(field[which], f"a prefix of fewer than {most} tokens, which it shares with an item", len(ids))
        if ids.size and (highest := int(ids.max())) >= self._limits.vocabulary_size:
            bad.add(field[which], f"token ids below the vocabulary size {self._limits.vocabulary_size}", highest)
        return ids

    def _query_prefix_ids(self, query: pb.QueryPrefix, bad: _Violations) -> Ints | None:
        tokens, most = len(self._encoder.user_text(query.text).ids), self._limits.max_query_tokens
        if tokens > most:
            bad.add("query.text", f"at most {most} tokens", f"{tokens} tokens")
        ids = self._encoder.render(self._prefix, self._values(query.text, _instruction(query)))
        return None if ids is None else self._encoder.with_lead(ids)

    def _values(self, query: str, instruction: str | None) -> dict[str, str]:
        return {QUERY: query, INSTRUCTION: self._profile.instruction or "" if instruction is None else instruction}

    def _tail(self, query: str, bad: _Violations) -> _Tail:
        if self._fixed_tail is not None:
            return self._fixed_tail
        ids = self._encoder.render(self._body.after, {QUERY: query})
        if ids is None:
            bad.add("query.text", "text that can be written without a control token")
            return _Tail(_ints([]))
        last = self._body.after[-1]
        assert isinstance(last, _Run), "the item of a query_likelihood profile ends with the query"
        encoded = self._encoder.user_text(last.text({QUERY: query}))
        return _Tail(ids, len(encoded.ids) - encoded.tokens_within(len(last.text({QUERY: ""}))))

    # ------------------------------------------------------------------ labels

    def _profile_labels(self) -> tuple[Label, ...]:
        made = []
        for text in self._profile.ordered_labels:
            token, complaint = self._label_token(text)
            if token is None:
                raise ProfileError(f"profile {self._profile.name}: label {text!r} {complaint}")
            made.append(Label(text, token))
        if len({label.token_id for label in made}) != len(made):
            raise ProfileError(f"profile {self._profile.name}: the labels are the same token {made[0].token_id}")
        return tuple(made)

    def _label_token(self, text: str) -> tuple[int | None, str]:
        """The one token that a label is, or what is wrong with it. Case and leading space tell labels apart."""
        ids = self._encoder.profile_text(text)
        if len(ids) != 1:
            return None, f"must be exactly one token, it is {len(ids)}: {_shown(ids)}"
        token = int(ids[0])
        if token in (self._encoder.unknown, self._unknown):
            return None, f"is not in the vocabulary: it is the unknown token {token}"
        if token >= self._limits.vocabulary_size:
            return None, f"is token {token}, but the model has only {self._limits.vocabulary_size}"
        return token, ""

    def _request_labels(self, options: pb.ScoreOptions, bad: _Violations) -> tuple[Label, ...]:
        texts, ids = options.label_texts, options.label_token_ids
        if not texts and not ids:
            return self.labels
        field = "options.label_texts" if texts else "options.label_token_ids"
        if self._profile.kind == "query_likelihood":
            bad.add(field, "absent: query likelihood reads the query, not labels")
            return ()
        if texts and ids:
            bad.add(field, "absent where options.label_token_ids are given", len(texts))
            return ()
        if len(texts or ids) > 2:
            bad.add(field, "one or two", len(texts or ids))
            return ()
        labels = self._labels_of_texts(texts, bad) if texts else self._labels_of_ids(ids, bad)
        if len(labels) == 2 and labels[0].token_id == labels[1].token_id:
            bad.add(f"{field}[1]", "a token other than the first label's", labels[1].token_id)
        return labels

    def _labels_of_texts(self, texts: Sequence[str], bad: _Violations) -> tuple[Label, ...]:
        made = []
        for index, text in enumerate(texts):
            token, complaint = self._label_token(text)
            if token is None:
                bad.add(f"options.label_texts[{index}]", complaint, repr(text[:_SHOWN_CHARACTERS]))
            else:
                made.append(Label(text, token))
        return tuple(made)

    def _labels_of_ids(self, ids: Sequence[int], bad: _Violations) -> tuple[Label, ...]:
        for index, token in enumerate(ids):
            if token >= self._limits.vocabulary_size:
                limit = f"below the vocabulary size {self._limits.vocabulary_size}"
                bad.add(f"options.label_token_ids[{index}]", limit, token)
        bad.check()
        return tuple(Label(self._encoder.text_of(token), token) for token in ids)

    # ------------------------------------------------------------------ documents

    def _read_documents(
        self, request: pb.ScoreRequest, cutting: _Cutting, prefix_tokens: int, tail: _Tail, bad: _Violations
    ) -> list[_Read]:
        room = self._limits.max_context_tokens - prefix_tokens
        reads: dict[int, _Read] = {}
        texts: dict[int, str] = {}
        raw: dict[int, str] = {}
        for index, document in enumerate(request.documents):
            content = document.WhichOneof("content")
            if content == "token_ids":
                reads[index] = self._whole(document.token_ids.ids, document.target_tokens, room)
            elif _is_blank(text := document.text if content == "text" else document.raw_text):
                reads[index] = _Read(Status.EMPTY, "the document has no visible text")
            else:
                (texts if content == "text" else raw)[index] = text
        for batch in _batches(raw):
            encoded = self._encoder.profile_texts([raw[index] for index in batch])
            for index, ids in zip(batch, encoded, strict=True):
                reads[index] = self._whole(ids, request.documents[index].target_tokens, room)
        for batch in _batches(texts):
            read = self._read_texts([texts[index] for index in batch], cutting, room, tail)
            reads.update(zip(batch, read, strict=True))
        for index, document in enumerate(request.documents):
            ids_, targets = reads[index].ids, document.target_tokens
            if ids_ is not None and targets >= len(ids_):
                bad.add(f"documents[{index}].target_tokens", f"fewer than the item's {len(ids_)} tokens", targets)
        return [reads[index] for index in range(len(request.documents))]

    def _whole(self, ids: Sequence[int] | Ints, targets: int, room: int) -> _Read:
        """A document that is the whole item already."""
        if not len(ids):
            return _Read(Status.EMPTY, "the document has no tokens")
        if (highest := int(max(ids))) >= self._limits.vocabulary_size:
            return _Read(Status.INVALID, f"token id {highest} is not below {self._limits.vocabulary_size}")
        if len(ids) > room:
            return _too_long(len(ids), room, "a document given as the whole item is never cut")
        return _Read(Status.OK, "", _ints(ids), targets, len(ids), len(ids))

    def _out_of_vocabulary(self, ids: Ints) -> bool:
        return bool(ids.size) and int(ids.max()) >= self._limits.vocabulary_size

    def _read_texts(self, texts: Sequence[str], cutting: _Cutting, room: int, tail: _Tail) -> list[_Read]:
        head = self._body.head
        template = len(self._body.before) + self._head_tokens + len(tail.ids)
        limit = min(cutting.limit, room - template)
        bodies = [self._body.trimmed(text) for text in texts]
        encoded = self._encoder.user_texts([head + body for body in bodies])
        own = [_own_tokens(e, head) for e in encoded]
        long = {i for i in range(len(texts)) if own[i] > limit and not encoded[i].unwritable}
        cuts: dict[int, str] = {}
        if cutting.side != pb.TRUNCATION_NONE and limit > 0:
            cut = self._cut_left if cutting.side == pb.TRUNCATION_LEFT else self._cut_right
            cuts = {i: self._body.trimmed(cut(bodies[i], encoded[i], limit)) for i in long}
            encoded = self._fitted(cuts, encoded, limit, cutting.side)
        reads = []
        for i, found in enumerate(encoded):
            if i in long and not cuts.get(i):
                why = "no character fits" if i in cuts else "the document is not to be cut"
                reads.append(_too_long(own[i], max(limit, 0), why))
            else:
                reads.append(self._read_text(found, tail, own[i], cuts.get(i)))
        return reads

    def _read_text(self, encoded: _Encoded, tail: _Tail, original: int, cut: str | None) -> _Read:
        ids = np.concatenate([self._body.before, encoded.ids, tail.ids])
        if encoded.unwritable:
            return _Read(Status.INVALID, "the document holds a control token that cannot be written as text")
        if self._out_of_vocabulary(ids):
            return _Read(Status.INVALID, f"the text has tokens beyond the model's {self._limits.vocabulary_size}")
        if cut is not None and _is_blank(cut):
            return _Read(Status.EMPTY, "nothing but white space fits the limit", original_document_tokens=original)
        own = _own_tokens(encoded, self._body.head)
        return _Read(Status.OK, "", ids, tail.targets, own, original, truncated=cut is not None)

    # ------------------------------------------------------------------ cutting

    def _cut_right(self, body: str, whole: _Encoded, limit: int) -> str:
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
        lead = self._body.head if low == 0 else ""
        fixed = start - first if low > 0 else 0
        cut = self._first_fit(range(high, low, -1), lambda c: lead + body[low:c], lead, limit - fixed)
        return body[: low if cut is None else cut]

    def _cut_left(self, body: str, whole: _Encoded, limit: int) -> str:
        """The longest end that has at most `limit` tokens when it is encoded on its own; see `_cut_right`."""
        head, count = len(self._body.head), len(whole.ids)
        first = whole.tokens_within(head)
        over = count - limit - 1
        start, stop = whole.words_before(over, 1, first), whole.words_after(over, _CUT_WORDS)
        low = max(whole.span(start)[0] - head, 0)
        high = len(body) if stop == count else whole.span(stop)[0] - head
        lead = self._body.head
        cut = self._first_fit(range(low, high), lambda c: lead + body[c:high], lead, limit - (count - stop))
        return body[high if cut is None else cut :]

    def _first_fit(self, cuts: range, window: Callable[[int], str], lead: str, limit: int) -> int | None:
        for begin in range(0, len(cuts), _CUTS_A_CALL):
            some = cuts[begin : begin + _CUTS_A_CALL]
            for cut, encoded in zip(some, self._encoder.user_texts([window(cut) for cut in some]), strict=True):
                if _own_tokens(encoded, lead) <= limit:
                    return cut
        return None

    def _fitted(self, cuts: dict[int, str], encoded: Sequence[_Encoded], limit: int, side: int) -> list[_Encoded]:
        """Encodes what was cut; where it does not fit after all, cuts on. Changes `cuts`."""
        made = list(encoded)
        open_ = [i for i, text in cuts.items() if text]
        while open_:
            again = self._encoder.user_texts([self._body.head + cuts[i] for i in open_])
            made_now = dict(zip(open_, again, strict=True))
            open_ = [i for i in open_ if _own_tokens(made_now[i], self._body.head) > limit]
            for i in open_:
                cuts[i] = self._body.trimmed(cuts[i][1:] if side == pb.TRUNCATION_LEFT else cuts[i][:-1])
            open_ = [i for i in open_ if cuts[i]]
            for i, found in made_now.items():
                made[i] = found
        return made

    # ------------------------------------------------------------------ putting together

    def _assembled(
        self, request: pb.ScoreRequest, ids: Sequence[str], labels: tuple[Label, ...], prefix: Ints, reads: list[_Read]
    ) -> Tokenized:
        items: list[Item] = []
        documents: list[DocumentTokens] = []
        for index, read in enumerate(reads):
            item = None if read.ids is None else len(items)
            if read.ids is not None:
                items.append(_item(read.ids, read.targets, labels))
            documents.append(
                DocumentTokens(
                    id=ids[index],
                    index=index,
                    status=read.status,
                    message=read.message,
                    tokens=0 if read.ids is None else len(read.ids),
                    document_tokens=read.document_tokens,
                    original_document_tokens=read.original_document_tokens,
                    truncated=read.truncated,
                    item=item,
                )
            )
        tokenized = TokenizedRequest(
            prefix=prefix,
            items=tuple(items),
            normalize=self._profile.kind == "query_likelihood" or request.options.outputs.vocabulary_probabilities,
            strategy=_STRATEGIES[request.options.strategy],
            tenant=request.tenant,
            priority=_PRIORITIES[request.priority],
        )
        return Tokenized(tokenized if items else None, tuple(documents), labels, len(prefix))

    # ------------------------------------------------------------------ proof

    def render(self, query: str, document: str, instruction: str | None = None) -> tuple[str, str]:
        """Prefix and item as text, control tokens written out: what a caller without this service would tokenize."""
        values = self._values(query, instruction) | {DOCUMENT: document}
        return _filled(self._prefix_pieces, values), _filled(self._item_pieces, values)

    def prove(self) -> None:
        """Shows on awkward texts that prefix and item, encoded apart, are the tokens of the two encoded together.

        Raises ProfileError naming the seam, the document and the ids.
        """
        plain = [d for d in _AWKWARD_DOCUMENTS if not any(text in d for text in self._encoder.control_texts)]
        uncut = _Cutting(_UNLIMITED, pb.TRUNCATION_NONE)
        for query in _AWKWARD_QUERIES:
            self._prove_chat(query)
            bad = _Violations()
            prefix = self._query_prefix_ids(pb.QueryPrefix(text=query), bad)
            tail = self._tail(query, bad)
            assert prefix is not None, "the queries of the proof hold no control tokens"
            reads = self._read_texts(plain, uncut, _UNLIMITED, tail)
            for document, read in zip(plain, reads, strict=True):
                if read.ids is not None:
                    self._prove_seams(query, document, prefix, read.ids, len(tail.ids))

    def _prove_seams(self, query: str, document: str, prefix: Ints, item: Ints, tail: int) -> None:
        prefix_text, item_text = self.render(query, document)
        expected, found = self._plain_ids(prefix_text + item_text), np.concatenate([prefix, item])
        if np.array_equal(expected, found):
            return
        place = self._item_pieces.index(_Slot(DOCUMENT))
        until_tail = prefix_text + _filled(self._item_pieces[: place + 1], {DOCUMENT: document})
        first_seam_holds = np.array_equal(self._plain_ids(until_tail), found[: len(found) - tail])
        at = max(_first_difference(expected, found) - 2, 0)
        raise ProfileError(
            f"profile {self._profile.name}: the tokenizer merges across the seam "
            f"{'document | what follows it' if first_seam_holds else 'prefix | item'} for document {document!r}, "
            f"query {query!r}: from token {at} on together {_shown(expected[at:])}, apart {_shown(found[at:])}; "
            f"let the item begin with a space or a control token, and so what follows {DOCUMENT}"
        )

    def _plain_ids(self, text: str) -> Ints:
        """By the tokenizer itself, not by our copies of it."""
        return self._encoder.with_lead(_ints(self._tokenizer(text, add_special_tokens=False).input_ids))

    def _prove_chat(self, query: str) -> None:
        """A chat template may trim or rewrite what is put into it."""
        if self._profile.format != "chat":
            return
        document = "a document"
        values = self._values(query, None) | {DOCUMENT: document}
        content = _filled((*_pieces(self._profile.prefix), *_pieces(self._profile.item)), values)
        if _chat(self._tokenizer, self._profile, content) != "".join(self.render(query, document)):
            raise ProfileError(
                f"profile {self._profile.name}: the chat template changes the message {_short(content)!r}"
            )


def _template_pieces(tokenizer: PreTrainedTokenizerFast, profile: Profile) -> tuple[list[_Piece], list[_Piece]]:
    """Prefix and item, the chat template's share included."""
    prefix, item = _pieces(profile.prefix), _pieces(profile.item)
    if profile.format == "text":
        return prefix, item
    parts = _chat(tokenizer, profile, _SENTINEL).split(_SENTINEL)
    if len(parts) != 2:
        raise ProfileError(f"profile {profile.name}: the chat template has the user's message {len(parts) - 1} times")
    return _joined([parts[0], *prefix]), _joined([*item, parts[1]])


def _pieces(template: str) -> list[_Piece]:
    parts = re.split(f"({'|'.join(map(re.escape, (QUERY, DOCUMENT, INSTRUCTION)))})", template)
    return [_Slot(part) if part in (QUERY, DOCUMENT, INSTRUCTION) else part for part in parts if part]


def _joined(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Without two texts in a row: a control token may lie across them."""
    made: list[_Piece] = []
    for piece in pieces:
        if made and isinstance(last := made[-1], str) and isinstance(piece, str):
            made[-1] = last + piece
        else:
            made.append(piece)
    return made


def _filled(pieces: Sequence[_Piece], values: Mapping[str, str]) -> str:
    return "".join(values[piece.name] if isinstance(piece, _Slot) else piece for piece in pieces)


def _chat(tokenizer: PreTrainedTokenizerFast, profile: Profile, content: str) -> str:
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


def _body(encoder: _Encoder, parts: Sequence[_Control | _Run]) -> _Body:
    at = next(i for i, part in enumerate(parts) if isinstance(part, _Run) and _Slot(DOCUMENT) in part.pieces)
    run = parts[at]
    assert isinstance(run, _Run), "a slot lies in a run"
    place = run.pieces.index(_Slot(DOCUMENT))
    before = _own_text(encoder, parts[:at])
    head, rest = _filled(run.pieces[:place], {}), run.pieces[place + 1 :]
    after = ([_Run(rest, False, run.strip_end)] if rest else []) + list(parts[at + 1 :])
    return _Body(before, head, run.strip_start and not head, run.strip_end and not rest, tuple(after))


def _own_text(encoder: _Encoder, parts: Sequence[_Control | _Run]) -> Ints:
    """Ids of a part of a template that takes no text."""
    ids = encoder.render(parts, {})
    assert ids is not None, "a template's control tokens are split off its text"
    return ids


def _item(ids: Ints, targets: int, labels: Sequence[Label]) -> Item:
    """Reads the labels behind the last token; or each target token at its predecessor."""
    if not targets:
        return Item(ids, _ints([len(ids) - 1]), _ints([label.token_id for label in labels])[None])
    return Item(ids, np.arange(len(ids) - targets - 1, len(ids) - 1, dtype=np.int32), ids[len(ids) - targets :, None])


def _instruction(query: pb.QueryPrefix) -> str | None:
    return query.instruction if query.HasField("instruction") else None


def _own_tokens(encoded: _Encoded, head: str) -> int:
    """Tokens of a document that was encoded behind `head`: one that holds characters of both is the document's."""
    return len(encoded.ids) - encoded.tokens_within(len(head))


def _too_long(tokens: int, limit: int, why: str) -> _Read:
    return _Read(Status.TOO_LONG, f"{tokens} tokens, at most {limit} fit; {why}", original_document_tokens=tokens)


def _is_blank(text: str) -> bool:
    """Whether nothing of it can be seen: white space and format characters such as zero-width space and BOM."""
    return all(c.isspace() or unicodedata.category(c) == "Cf" for c in text)


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


def _first_difference(a: Ints, b: Ints) -> int:
    shorter = min(len(a), len(b))
    return int(np.argmax(np.append(a[:shorter] != b[:shorter], True)))


def _shown(ids: Ints) -> str:
    return f"[{', '.join(map(str, ids[:_SHOWN_IDS].tolist()))}{', ...' if len(ids) > _SHOWN_IDS else ''}]"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
