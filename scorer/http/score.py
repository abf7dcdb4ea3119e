"""/v1/score as SGLang answers it, and /score as vLLM does."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from prefixrank.v1 import scorer_pb2 as pb
from scorer.http.asking import Asker, invalid, outputs, relevance, require_all, tokens
from scorer.http.rerank import IDS, LIST, LISTS, TEXT, UINT32, Model, Strict, Text, Unicode, either
from scorer.together import Part

TokenId = Annotated[int, Field(ge=0, le=UINT32)]
Ids = Annotated[list[TokenId], Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]


class ItemsRequest(Strict):
    """SGLang's request: query and items are the whole prompt as text or ids; no template goes around them.
    label_token_ids: one or two; unset: the profile's."""

    query: Annotated[Annotated[Text, TEXT] | Annotated[Ids, IDS], either("a text or a list of token ids")]
    items: Annotated[
        Annotated[Text, TEXT] | Annotated[Texts, LIST] | Annotated[list[Ids], LISTS],
        either("a text, a list of texts or a list of lists of token ids"),
    ]
    label_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=2)] | None = None
    apply_softmax: bool | None = False
    item_first: bool | None = False
    model: Model = None


class ScoreUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class ItemsAnswer(BaseModel):
    """scores: for each item each label's probability under the whole vocabulary, or with apply_softmax among the
    labels."""

    object: Literal["scoring"] = "scoring"
    scores: list[list[float]]
    model: str
    usage: ScoreUsage


class PairsRequest(Strict):
    """vLLM's request: one text_1 and one or more text_2, or as many of the one as of the other."""

    text_1: Annotated[Annotated[Text, TEXT] | Annotated[Texts, LIST], either("a text or a list of texts")]
    text_2: Annotated[
        Annotated[Unicode, TEXT] | Annotated[list[Unicode], Field(min_length=1), LIST],
        either("a text or a list of texts"),
    ]
    model: Model = None
    use_activation: bool | None = True


class PairScore(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class PairsAnswer(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: ScoreUsage


def router(asker: Asker, errors: dict[int | str, dict[str, Any]]) -> APIRouter:
    """The two endpoints."""
    made = APIRouter(tags=["score"], responses=errors)

    @made.post("/v1/score")
    async def score_items(body: ItemsRequest, request: Request) -> ItemsAnswer:
        """As SGLang."""
        response = await asker.score(_items_request(body), request, require_all)
        scores = [_probabilities(result.label_logits, bool(body.apply_softmax)) for result in response.results]
        return ItemsAnswer(scores=scores, model=response.model, usage=_usage(tokens(response)))

    @made.post("/score")
    async def score_pairs(body: PairsRequest, request: Request) -> PairsAnswer:
        """As vLLM."""
        return await _score_pairs(asker, body, request)

    return made


def _items_request(body: ItemsRequest) -> pb.ScoreRequest:
    if body.item_first:
        raise invalid("item_first", "only false: documents follow the prefix that they share")
    items = [body.items] if isinstance(body.items, str) else body.items
    if isinstance(body.query, str) != isinstance(items[0], str):
        raise invalid("items", "text where query is text, token ids where query is token ids")
    asked = pb.ScoreRequest(
        options=pb.ScoreOptions(
            label_token_ids=body.label_token_ids or (),
            outputs=pb.OutputOptions(label_logits=True, vocabulary_probabilities=True),
        )
    )
    if isinstance(body.query, str):
        asked.raw_text = body.query
    else:
        asked.token_ids.ids.extend(body.query)
    for item in items:
        if isinstance(item, str):
            asked.documents.add(raw_text=item)
        else:
            asked.documents.add(token_ids=pb.TokenIds(ids=item))
    return asked


def _probabilities(labels: Sequence[pb.LabelScore], softmax: bool) -> list[float]:
    if not softmax:
        return [label.vocabulary_probability for label in labels]
    highest = max(label.logit for label in labels)
    shares = [math.exp(label.logit - highest) for label in labels]
    return [share / sum(shares) for share in shares]


async def _score_pairs(asker: Asker, body: PairsRequest, request: Request) -> PairsAnswer:
    queries, documents = _pairs(body)
    places: dict[str, list[int]] = {}
    for place, query in enumerate(queries):
        places.setdefault(query, []).append(place)
    asked = pb.ScoreRequest(
        documents=[pb.Document(text=text) for text in documents],
        options=pb.ScoreOptions(outputs=outputs(asker.info())),
    )
    parts = [Part(query, found) for query, found in places.items()]
    if len(parts) == 1:
        asked.query.text, parts = parts[0].query, []
    response = await asker.score(asked, request, require_all, parts)
    scores = [result.score if body.use_activation is False else relevance(result) for result in response.results]
    return PairsAnswer(
        id=f"score-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=response.model,
        data=[PairScore(index=place, score=score) for place, score in enumerate(scores)],
        usage=_usage(tokens(response)),
    )


def _pairs(body: PairsRequest) -> tuple[list[str], list[str]]:
    """A query for each document, and the documents."""
    queries = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    documents = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        raise invalid("text_2", f"one text_1, or as many as text_2: got {len(queries)} and {len(documents)}")
    return queries, documents


def _usage(counted: int) -> ScoreUsage:
    return ScoreUsage(prompt_tokens=counted, total_tokens=counted)
