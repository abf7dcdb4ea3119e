"""/v1/rerank and /v2/rerank: Cohere's, Jina's and Voyage's requests and answers."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from prefixrank.v1 import scorer_pb2 as pb
from scorer.http.asking import Asker, best_first, invalid, outputs, relevance, require_one, status_name, tokens

UINT32 = (1 << 32) - 1
Positive = Annotated[int, Field(ge=1, le=UINT32)]
# A constraint, if an empty one, lets pydantic read a text; without one it passes a surrogate that has no other half.
Unicode = Annotated[str, Field(min_length=0)]
Text = Annotated[str, Field(min_length=1)]
Model = Annotated[Unicode | None, Field(description="one model is served; its name is in the answer")]


def either(told: str) -> Discriminator:
    """Of alternatives that are tagged TEXT, OBJECT, IDS, LIST or LISTS only the one that is meant is looked at."""
    return Discriminator(_meant, "alternatives", f"Input should be {told}")


TEXT, OBJECT, IDS, LIST, LISTS = (Tag(name) for name in ("<text>", "<object>", "<ids>", "<list>", "<lists>"))


def _meant(value: Any) -> str | None:
    match value:
        case str():
            return TEXT.tag
        case dict() | BaseModel():
            return OBJECT.tag
        case [list(), *_]:
            return LISTS.tag
        case [int(), *_]:
            return IDS.tag
        case list():
            return LIST.tag
    return None


class Strict(BaseModel):
    """A request: an unknown field is refused, never ignored. Null is as good as absent, whatever the field: clients
    send what they were not given as null."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, None] = Field(init=False)


class TextDocument(Strict):
    text: Unicode


TextOrObject = Annotated[
    Annotated[Unicode, TEXT] | Annotated[TextDocument, OBJECT], either("a text or an object with a text")
]


class RerankV1(Strict):
    """Cohere's v1, Jina's and Voyage's request. With top_k or truncation the answer is Voyage's."""

    query: Text
    documents: Annotated[list[TextOrObject], Field(min_length=1)]
    model: Model = None
    top_n: Positive | None = None
    top_k: Positive | None = None
    truncation: bool | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Positive | None = None
    rank_fields: list[Literal["text"]] | None = None

    @property
    def voyage(self) -> bool:
        return "top_k" in self.model_fields_set or "truncation" in self.model_fields_set


class RerankV2(Strict):
    """Cohere's v2 request."""

    query: Text
    documents: Annotated[list[Unicode], Field(min_length=1)]
    model: Model = None
    top_n: Positive | None = None
    max_tokens_per_doc: Positive | None = None
    return_documents: bool | None = None
    priority: Annotated[int | None, Field(ge=0, le=999, description="0 first; above 0 is the low class")] = 0


class Result(BaseModel):
    """One document's place. relevance_score is 0 where the document has no score: `status` and `message` then say why,
    and it is listed behind all that have one."""

    index: int
    relevance_score: float
    document: str | TextDocument | None = None
    status: str | None = None
    message: str | None = None


class Usage(BaseModel):
    total_tokens: int
    prompt_tokens: int


class Ranking(BaseModel):
    """Cohere's and Jina's answer."""

    id: str
    model: str
    results: list[Result]
    usage: Usage
    meta: dict[str, Any]


class VoyageUsage(BaseModel):
    total_tokens: int


class VoyageRanking(BaseModel):
    """Voyage's answer."""

    object: Literal["list"] = "list"
    data: list[Result]
    model: str
    usage: VoyageUsage


def router(asker: Asker, errors: dict[int | str, dict[str, Any]]) -> APIRouter:
    """The two endpoints."""
    made = APIRouter(tags=["rerank"], responses=errors)

    @made.post("/v1/rerank", response_model_exclude_none=True)
    async def rerank_v1(body: RerankV1, request: Request) -> Ranking | VoyageRanking:
        """As Cohere v1, Jina and Voyage."""
        return await _rerank_v1(asker, body, request)

    @made.post("/v2/rerank", response_model_exclude_none=True)
    async def rerank_v2(body: RerankV2, request: Request) -> Ranking:
        """As Cohere v2."""
        priority = pb.PRIORITY_LOW if body.priority else pb.PRIORITY_NORMAL
        asked = _asked(asker, body.query, body.documents, body.max_tokens_per_doc or 0, priority=priority)
        response = await asker.score(asked, request, require_one)
        return _ranking(response, _results(response, body.documents, body.top_n, body.return_documents, False), "2")

    return made


async def _rerank_v1(asker: Asker, body: RerankV1, request: Request) -> Ranking | VoyageRanking:
    if body.top_n is not None and body.top_k is not None:
        raise invalid("top_k", "give top_n or top_k, not both")
    texts = [d if isinstance(d, str) else d.text for d in body.documents]
    truncation = pb.TRUNCATION_NONE if body.truncation is False else pb.TRUNCATION_UNSPECIFIED
    asked = _asked(asker, body.query, texts, body.max_tokens_per_doc or 0, truncation)
    response = await asker.score(asked, request, require_one)
    results = _results(response, texts, body.top_k or body.top_n, body.return_documents, not body.voyage)
    if not body.voyage:
        return _ranking(response, results, "1")
    return VoyageRanking(data=results, model=response.model, usage=VoyageUsage(total_tokens=tokens(response)))


def _asked(
    asker: Asker,
    query: str,
    documents: list[str],
    max_tokens: int,
    truncation: pb.Truncation.ValueType = pb.TRUNCATION_UNSPECIFIED,
    priority: pb.Priority.ValueType = pb.PRIORITY_UNSPECIFIED,
) -> pb.ScoreRequest:
    """Raises Refused where nothing is served."""
    return pb.ScoreRequest(
        query=pb.QueryPrefix(text=query),
        documents=[pb.Document(text=text) for text in documents],
        options=pb.ScoreOptions(
            max_tokens_per_document=max_tokens, truncation=truncation, outputs=outputs(asker.info())
        ),
        priority=priority,
    )


def _results(
    response: pb.ScoreResponse, texts: list[str], top: int | None, with_documents: bool | None, wrapped: bool
) -> list[Result]:
    """Best first. wrapped: a document comes back as {"text": ...}."""
    ordered = best_first(list(response.results))[: top or None]
    made = []
    for result in ordered:
        text = texts[result.index]
        document = (TextDocument(text=text) if wrapped else text) if with_documents else None
        made.append(_result(result, document))
    return made


def _result(result: pb.DocumentResult, document: str | TextDocument | None) -> Result:
    if result.HasField("score"):
        return Result(index=result.index, relevance_score=relevance(result), document=document)
    status = status_name(result)
    return Result(index=result.index, relevance_score=0.0, document=document, status=status, message=result.message)


def _ranking(response: pb.ScoreResponse, results: list[Result], version: str) -> Ranking:
    counted = tokens(response)
    return Ranking(
        id=response.request_id or str(uuid.uuid4()),
        model=response.model,
        results=results,
        usage=Usage(total_tokens=counted, prompt_tokens=counted),
        meta={"api_version": {"version": version}, "tokens": {"input_tokens": counted}},
    )
