"""The ASGI application: endpoints, gate, and errors in each API's shape. Its OpenAPI page is /docs."""

from __future__ import annotations

from typing import Any

import grpc
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from scorer.http import rerank, score, texts
from scorer.http.asking import Asker, CallerGone, NotAsked, count_refused
from scorer.http.gate import Gate
from scorer.http.problems import BAD_REQUEST, HTTP_CODES, complaints, problem, shaped, unread
from scorer.refusal import Refusal, Refused
from scorer.service import ScorerService

_NOT_ENDPOINTS = (404, 499)  # of the codes: no endpoint answers with them
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"description": name.name.lower(), "content": {"application/json": {"schema": {"type": "object"}}}}
    for name, code in HTTP_CODES.items()
    if code not in _NOT_ENDPOINTS
}
TEI_ERRORS = ERRORS | {
    422: {"description": "validation", "content": {"application/json": {"schema": {"type": "object"}}}},
    424: {"description": "backend", "content": {"application/json": {"schema": {"type": "object"}}}},
}


def make_app(service: ScorerService, version: str, max_body_bytes: int, timeout_seconds: float) -> FastAPI:
    """The application over a service, which may still be loading its model."""
    app = FastAPI(
        title="PrefixRank",
        version=version,
        description="Scores documents that share one prefix, in the shapes of other rerankers' APIs.",
    )
    asker = Asker(service, timeout_seconds)
    app.include_router(rerank.router(asker, ERRORS))
    app.include_router(texts.router(asker, TEI_ERRORS))
    app.include_router(score.router(asker, ERRORS))

    @app.get("/health", responses={503: ERRORS[503]})
    async def health() -> dict[str, str]:
        """200 once the model is proved and until the service drains."""
        return {"model": asker.info().model}

    _add_handlers(app, service)
    app.add_middleware(Gate, service=service, max_body_bytes=max_body_bytes)
    return app


def _add_handlers(app: FastAPI, service: ScorerService) -> None:
    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        if isinstance(error, NotAsked):
            count_refused(service, request, error.refusal.code)
        return problem(request.url.path, error.refusal)

    @app.exception_handler(CallerGone)
    async def gone(request: Request, error: CallerGone) -> Response:
        return Response(status_code=HTTP_CODES[grpc.StatusCode.CANCELLED])

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        count_refused(service, request, grpc.StatusCode.INVALID_ARGUMENT)
        return shaped(request.url.path, BAD_REQUEST, complaints(error.errors()))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == BAD_REQUEST:  # FastAPI's, of a body that json gave up on
            count_refused(service, request, grpc.StatusCode.INVALID_ARGUMENT)
            return shaped(request.url.path, BAD_REQUEST, unread(error.__cause__))
        return shaped(request.url.path, error.status_code, str(error.detail), error.headers)

    @app.exception_handler(Exception)
    async def ours(request: Request, error: Exception) -> JSONResponse:
        return problem(request.url.path, Refusal(grpc.StatusCode.INTERNAL, service.calls.internal(error)))
