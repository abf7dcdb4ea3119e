"""What a request must be like, told field by field and all at once."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prefixrank.v1 import scorer_pb2 as pb
from scorer.config import Limits
from scorer.errors import InvalidRequest, Violation
from scorer.profile import Profile

_STRATEGIES, _TRUNCATIONS, _PRIORITIES = map(frozenset, (e.values() for e in (pb.Strategy, pb.Truncation, pb.Priority)))
SHOWN_CHARACTERS = 80  # of a user's text in a message


class Violations:
    """Collects what is wrong with a request, so that the caller hears of all of it at once."""

    def __init__(self) -> None:
        self._found: list[Violation] = []

    def add(self, field: str, limit: str, value: object = "") -> None:
        """One more bad field."""
        self._found.append(Violation(field, short(str(value)), limit))

    def check(self) -> None:
        """Raises InvalidRequest if anything was found."""
        if self._found:
            raise InvalidRequest(self._found)


class Given(NamedTuple):
    """A request's documents by column, read once: a look into a message costs more than one into a list.

    ids       empty ones filled in
    contents  which form each has; None where it has none
    targets   target_tokens of each
    """

    documents: Sequence[pb.Document]
    ids: Sequence[str]
    contents: Sequence[str | None]
    targets: Sequence[int]

    @classmethod
    def of(cls, documents: Sequence[pb.Document]) -> Given:
        """As they were sent."""
        return cls(
            documents,
            [document.id or str(index) for index, document in enumerate(documents)],
            [document.WhichOneof("content") for document in documents],
            [document.target_tokens for document in documents],
        )


def check_documents(request: pb.ScoreRequest, profile: Profile, limits: Limits, bad: Violations) -> Given:
    """The documents, none where there are too many. Their ids must differ, and each have a content to be scored."""
    count, most = len(request.documents), limits.max_documents
    if not 1 <= count <= most:
        bad.add("documents", f"between 1 and {most} documents", count)
        return Given.of(())
    given = Given.of(request.documents[:])
    likelihood = profile.kind == "query_likelihood"
    if likelihood or len(set(given.ids)) < count or None in given.contents or any(given.targets):
        _check_each(request, given, profile, bad)
    return given


def _check_each(request: pb.ScoreRequest, given: Given, profile: Profile, bad: Violations) -> None:
    seen: set[str] = set()
    for index, (document, id_, content, _) in enumerate(zip(*given, strict=True)):
        if id_ in seen:
            bad.add(f"documents[{index}].id", "unique within the request", repr(id_[:SHOWN_CHARACTERS]))
        seen.add(id_)
        if content is None:
            bad.add(f"documents[{index}]", "one of text, raw_text and token_ids")
        elif complaint := _target_complaint(request, document, profile):
            bad.add(f"documents[{index}].target_tokens", complaint, document.target_tokens)


def check_prefix(request: pb.ScoreRequest, profile: Profile, limits: Limits, bad: Violations) -> None:
    """That there is a prefix of a form that the profile has a place for."""
    match request.WhichOneof("prefix"):
        case None:
            bad.add("query.text", "a query, or instead of it raw_text or token_ids as the whole prefix")
        case "query":
            if is_blank(request.query.text):
                bad.add("query.text", "not blank", repr(request.query.text[:SHOWN_CHARACTERS]))
            if request.query.HasField("instruction") and profile.instruction is None:
                bad.add("query.instruction", f"absent: profile {profile.name} has no place for one")
        case "raw_text":
            if not request.raw_text:
                bad.add("raw_text", "not empty")
        case "token_ids":
            ids, size = request.token_ids.ids, limits.vocabulary_size
            if not ids:
                bad.add("token_ids.ids", "not empty")
            elif (highest := int(np.asarray(ids).max())) >= size:  # an array tells it many times as fast
                bad.add("token_ids.ids", f"below the vocabulary size {size}", highest)


def check_options(request: pb.ScoreRequest, profile: Profile, limits: Limits, bad: Violations) -> None:
    """That the enums are known, no document may be longer than the profile allows, and the outputs exist."""
    options = request.options
    for field, value, known in (
        ("options.strategy", options.strategy, _STRATEGIES),
        ("options.truncation", options.truncation, _TRUNCATIONS),
        ("priority", request.priority, _PRIORITIES),
    ):
        if value not in known:
            bad.add(field, f"between {min(known)} and {max(known)}", value)
    if options.outputs.vocabulary_probabilities and profile.kind == "classification":
        bad.add("options.outputs.vocabulary_probabilities", "absent: the checkpoint's head has classes, no vocabulary")
    asked = options.max_tokens_per_document
    if asked > limits.max_tokens_per_document:
        bad.add("options.max_tokens_per_document", f"at most {limits.max_tokens_per_document}", asked)


def is_blank(text: str) -> bool:
    """Whether nothing of it can be seen: white space and format characters such as zero-width space and BOM."""
    return all(c.isspace() or unicodedata.category(c) == "Cf" for c in text)


def short(text: str) -> str:
    """The beginning of a user's text, for a message."""
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def _target_complaint(request: pb.ScoreRequest, document: pb.Document, profile: Profile) -> str:
    if profile.kind != "query_likelihood":
        return "0: only query likelihood predicts tokens" if document.target_tokens else ""
    if document.WhichOneof("content") != "text":
        return "" if document.target_tokens else "at least 1: how many of the item's last tokens are the query"
    if request.WhichOneof("prefix") != "query":
        return "text needs query.text to predict; or give raw_text or token_ids and the number of tokens to predict"
    return "0: a text document's item ends with the query" if document.target_tokens else ""
