"""A request for texts, built from Python's own values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from prefixrank.v1 import scorer_pb2 as pb

ONE = ("query", "instruction", "request_id", "tenant")  # texts of a request
MANY = ("documents", "ids", "label_texts")


class RequestOptions(TypedDict, total=False):
    """What a request for texts may say beside query and documents. The proto explains each; unset leaves the choice to
    the service."""

    ids: Sequence[str] | None
    instruction: str | None
    request_id: str
    top_n: int
    max_tokens_per_document: int
    truncation: pb.Truncation.ValueType
    strategy: pb.Strategy.ValueType
    label_logits: bool
    vocabulary_probabilities: bool
    label_texts: Sequence[str]
    partial_ok: bool
    tenant: str
    priority: pb.Priority.ValueType


def build_request(query: str, documents: Sequence[str], **options: Unpack[RequestOptions]) -> pb.ScoreRequest:
    """A request for texts. Without `ids`, a document's id is its position.

    Raises ValueError where there is not one id for each document or where a text is no Unicode text (half a surrogate
    pair), TypeError for an unknown option and for what is no text. Each names the text.
    """
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options {sorted(unknown)}")
    ids = options.get("ids")
    if ids is None:
        ids = [""] * len(documents)
    texts = {name: value for name, value in options.items() if value is not None}
    texts.update(query=query, documents=documents, ids=ids)
    _check_kinds(texts)
    if len(ids) != len(documents):
        raise ValueError(f"{len(ids)} ids for {len(documents)} documents")
    try:
        return _request(query, documents, ids, options)
    except UnicodeEncodeError:
        raise ValueError(_not_unicode(texts)) from None


def _check_kinds(given: Mapping[str, Any]) -> None:
    """Raises TypeError for what is no text, and for one text in the place of many: its letters would be taken."""
    for name in ONE:
        if not isinstance(given.get(name, ""), str):
            raise TypeError(f"{name}: a string, got {type(given[name]).__name__}")
    for name in MANY:
        texts = given.get(name, ())
        if isinstance(texts, str | bytes):
            raise TypeError(f"{name}: a list of strings, got one {type(texts).__name__}")
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"{name}[{index}]: a string, got {type(text).__name__}")


def _not_unicode(given: Mapping[str, Any]) -> str:
    """Which text could not be encoded, and where."""
    named = [(name, given.get(name, "")) for name in ONE]
    named += [(f"{name}[{index}]", text) for name in MANY for index, text in enumerate(given.get(name, ()))]
    surrogates = ((n, place, c) for n, text in named for place, c in enumerate(text, 1) if "\ud800" <= c <= "\udfff")
    name, place, half = next(surrogates)
    return f"{name}: not UTF-8 text: code point U+{ord(half):04X} at character {place}"


def _request(query: str, documents: Sequence[str], ids: Sequence[str], options: RequestOptions) -> pb.ScoreRequest:
    return pb.ScoreRequest(
        request_id=options.get("request_id", ""),
        query=pb.QueryPrefix(text=query, instruction=options.get("instruction")),
        documents=[pb.Document(id=id, text=text) for id, text in zip(ids, documents, strict=True)],
        options=pb.ScoreOptions(
            strategy=options.get("strategy", pb.STRATEGY_UNSPECIFIED),
            max_tokens_per_document=options.get("max_tokens_per_document", 0),
            truncation=options.get("truncation", pb.TRUNCATION_UNSPECIFIED),
            top_n=options.get("top_n", 0),
            outputs=pb.OutputOptions(
                label_logits=options.get("label_logits", False),
                vocabulary_probabilities=options.get("vocabulary_probabilities", False),
            ),
            label_texts=options.get("label_texts", ()),
            partial_ok=options.get("partial_ok", False),
        ),
        tenant=options.get("tenant", ""),
        priority=options.get("priority", pb.PRIORITY_UNSPECIFIED),
    )
