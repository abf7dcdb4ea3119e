"""/rerank: text-embeddings-inference's request and answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from prefixrank.v1 import scorer_pb2 as pb
from scorer.http.asking import Asker, best_first, outputs, relevance, require_all
from scorer.http.rerank import Strict, Text, Unicode

_SIDES = {"right": pb.TRUNCATION_RIGHT, "left": pb.TRUNCATION_LEFT}


class TextsRequest(Strict):
    """text-embeddings-inference's request. truncate: unset cuts as the profile does."""

    query: Text
    texts: Annotated[list[Unicode], Field(min_length=1)]
    raw_scores: bool | None = False
    return_text: bool | None = False
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = "Right"


class Rank(BaseModel):
    """One text's place. score: the probability, or with raw_scores the log-odds."""

    index: int
    score: float
    text: str | None = None


def router(asker: Asker, errors: dict[int | str, dict[str, Any]]) -> APIRouter:
    """The endpoint."""
    made = APIRouter(tags=["rerank"], responses=errors)

    @made.post("/rerank", response_model_exclude_none=True)
    async def rerank(body: TextsRequest, request: Request) -> list[Rank]:
        """As text-embeddings-inference."""
        side = _SIDES[(body.truncation_direction or "right").lower()]
        side = pb.TRUNCATION_NONE if body.truncate is False else side
        asked = pb.ScoreRequest(
            query=pb.QueryPrefix(text=body.query),
            documents=[pb.Document(text=text) for text in body.texts],
            options=pb.ScoreOptions(truncation=side, outputs=outputs(asker.info())),
        )
        response = await asker.score(asked, request, require_all)
        return [_rank(result, body) for result in best_first(list(response.results))]

    return made


def _rank(result: pb.DocumentResult, body: TextsRequest) -> Rank:
    score = result.score if body.raw_scores else relevance(result)
    return Rank(index=result.index, score=score, text=body.texts[result.index] if body.return_text else None)
