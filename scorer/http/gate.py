"""In front of every endpoint: who calls, and how large a body may be. Health alone is open."""

from __future__ import annotations

import grpc
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scorer.errors import Unauthenticated
from scorer.http.problems import problem
from scorer.refusal import STATUS_CODES, Refusal, refusal_of
from scorer.service import ScorerService

DISCARDED = 4  # times the limit that is read of a body before its sender is cut off
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
        try:
            scope["caller"] = self._service.access.caller(Request(scope).headers.get("authorization"))
        except Unauthenticated as error:
            self._service.refused(STATUS_CODES[Unauthenticated])
            refused = problem(scope["path"], refusal_of(error, STATUS_CODES[Unauthenticated]))
            return await refused(scope, receive, send)
        body = await _body(receive, self._most)
        if body is None:
            told = f"the body has more than max_message_bytes = {self._most}"
            too_large = problem(scope["path"], Refusal(grpc.StatusCode.OUT_OF_RANGE, told))
            too_large.headers["connection"] = "close"
            return await too_large(scope, receive, send)
        return await self._app(scope, _replayed(body, receive), send)


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
