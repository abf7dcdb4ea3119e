"""In front of every endpoint: who calls, and what a body may be. Health alone is open."""

from __future__ import annotations

import re
from collections.abc import Mapping

import grpc
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scorer.errors import Unauthenticated
from scorer.http.asking import count_refused
from scorer.http.problems import problem
from scorer.refusal import STATUS_CODES, VALUE_CHARACTERS, Refusal, refusal_of
from scorer.service import ScorerService

DISCARDED = 4  # times the limit that is read of a body before its sender is cut off
_JSON = re.compile(r"application/(?:[^/]+\+)?json", re.IGNORECASE)
OPEN_PATHS = frozenset({"/health"})


class Gate:
    """ASGI middleware. A refused caller's body is not read; a body that is too large is not kept."""

    def __init__(self, app: ASGIApp, service: ScorerService, max_body_bytes: int) -> None:
        self._app = app
        self._service = service
        self._most = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        request = Request(scope)
        try:
            scope["caller"] = self._service.access.caller(request.headers.get("authorization"))
        except Unauthenticated as error:
            return await self._refused(request, refusal_of(error, STATUS_CODES[Unauthenticated]))(scope, receive, send)
        body = await _body(receive, self._most)
        if body is None:
            told = f"the body has more than max_message_bytes = {self._most}"
            too_large = self._refused(request, Refusal(grpc.StatusCode.OUT_OF_RANGE, told))
            too_large.headers["connection"] = "close"
            return await too_large(scope, receive, send)
        if body and (told := _no_json(request.headers)):
            refused = self._refused(request, Refusal(grpc.StatusCode.INVALID_ARGUMENT, told))
            return await refused(scope, receive, send)
        return await self._app(scope, _replayed(body, receive), send)

    def _refused(self, request: Request, refusal: Refusal) -> JSONResponse:
        count_refused(self._service, request, refusal.code)
        return problem(request.url.path, refusal)


def _no_json(headers: Mapping[str, str]) -> str:
    """What the headers say of a body that makes it unreadable; empty where they say JSON."""
    kind, encoding = headers.get("content-type", ""), headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        return f"content-encoding: only a body as it is, got {encoding[:VALUE_CHARACTERS]!r}"
    if not _JSON.fullmatch(kind.partition(";")[0].strip()):
        return f"content-type: application/json, got {kind[:VALUE_CHARACTERS]!r}"
    return ""


async def _body(receive: Receive, most: int) -> bytes | None:
    """The whole body; None where it is too large.

    What is too much is read and thrown away, for a while: a connection that is closed on a sender loses the answer.
    """
    parts: list[bytes] = []
    size = 0
    while size <= most * DISCARDED:
        message = await receive()
        part = message.get("body", b"")
        size += len(part)
        if size <= most:
            parts.append(part)
        if message["type"] != "http.request" or not message.get("more_body", False):
            return b"".join(parts) if size <= most else None
        if size > most:
            parts.clear()
    return None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, then whatever comes after it."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return replay
