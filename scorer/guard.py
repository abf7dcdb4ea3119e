"""The gate before every gRPC method: health is open, all else asks for a token where there are tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from scorer.access import Access
from scorer.errors import Unauthenticated
from scorer.refusal import STATUS_CODES, abort, refusal_of
from scorer.service import SCORE_METHODS, ScorerService, authorization

HEALTH_METHODS = "/grpc.health.v1.Health/"

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


class Guard(grpc.aio.ServerInterceptor):
    """Refuses before the message is read; a method that is added later is closed without asking for it."""

    def __init__(self, access: Access, service: ScorerService) -> None:
        self._access = access
        self._service = service

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        if details.method.startswith(HEALTH_METHODS):
            return await continuation(details)
        try:
            self._access.caller(authorization(details.invocation_metadata))
        except Unauthenticated as error:
            if details.method in SCORE_METHODS:
                self._service.calls.refused(STATUS_CODES[Unauthenticated])
            return _refusing(error)
        return await continuation(details)


def _refusing(error: Unauthenticated) -> Handler:
    async def refuse(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, refusal_of(error, STATUS_CODES[Unauthenticated]))

    return grpc.unary_unary_rpc_method_handler(refuse)
