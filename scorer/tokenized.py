"""What a request is before any model sees it: its ids, its labels, and a verdict on each document."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from batching.types import TokenizedRequest
from prefixrank.v1 import scorer_pb2 as pb

PRIORITIES = {pb.PRIORITY_UNSPECIFIED: 0, pb.PRIORITY_LOW: -1, pb.PRIORITY_NORMAL: 0, pb.PRIORITY_HIGH: 1}


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


class DocumentTokens(NamedTuple):
    """What became of one document before any model saw it.

    tokens                    of the whole item, template included; 0 where it is not scored
    document_tokens           of the document as scored, template not counted
    original_document_tokens  before it was cut
    item                      index into the TokenizedRequest's items; None where it is not scored
    """

    id: str
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
    listwise   the request's one item holds all documents, and `item` of each is its read
    labels     the positive one first; empty for query likelihood
    """

    request: TokenizedRequest | None
    documents: tuple[DocumentTokens, ...]
    labels: tuple[Label, ...]
    prefix_tokens: int
    listwise: bool = False


def untokenized(request: pb.ScoreRequest) -> Tokenized:
    """What is known of a request whose deadline came before it was tokenized."""
    told = "the deadline came before it was tokenized"
    documents = tuple(
        DocumentTokens(document.id or str(index), Status.DEADLINE, told, 0, 0, 0, False, None)
        for index, document in enumerate(request.documents)
    )
    return Tokenized(None, documents, (), 0)


def given_in_ids(request: pb.ScoreRequest) -> bool:
    """Whether there is no text to tokenize."""
    if request.WhichOneof("prefix") != "token_ids":
        return False
    return {document.WhichOneof("content") for document in request.documents} <= {"token_ids"}
