"""Errors in the shape that each API's clients read, and the one table of HTTP codes."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from google.rpc import error_details_pb2
from starlette.responses import JSONResponse

from scorer.refusal import RETRY_SECONDS, Refusal

HTTP_CODES: dict[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.OUT_OF_RANGE: 413,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
BAD_REQUEST, METHOD_NOT_ALLOWED = 400, 405

# How text-embeddings-inference names and numbers what it refuses.
_TEI: dict[int, tuple[int, str]] = {
    400: (422, "Validation"),
    413: (413, "Validation"),
    429: (429, "Overloaded"),
    500: (424, "Backend"),
    503: (503, "Unhealthy"),
}
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}

# The names of the gRPC request's fields, where another API has its own.
_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "/rerank": (("query.text", "query"), ("documents", "texts")),
    "/v1/score": (("raw_text", "query"), ("token_ids.ids", "query"), ("documents", "items"), ("options.", "")),
    "/score": (("query.text", "text_1"), ("documents", "text_2")),
}
_RERANK_NAMES = (("query.text", "query"), ("options.max_tokens_per_document", "max_tokens_per_doc"))


def problem(path: str, refusal: Refusal) -> JSONResponse:
    """The answer of a call that was refused."""
    code = HTTP_CODES.get(refusal.code, 500)
    headers = {"retry-after": str(RETRY_SECONDS)} if code == HTTP_CODES[grpc.StatusCode.RESOURCE_EXHAUSTED] else {}
    if code == HTTP_CODES[grpc.StatusCode.UNAUTHENTICATED]:
        headers["www-authenticate"] = "Bearer"
    return shaped(path, code, _message(path, refusal), headers)


def shaped(path: str, code: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """A code and a message in the shape of the path's API."""
    code, body = _SHAPES.get(path, _ours)(code, message)
    return JSONResponse(body, code, headers=dict(headers or {}))


def complaints(errors: Sequence[Any]) -> str:
    """What FastAPI and pydantic found wrong with a body, without what was sent."""
    return "; ".join(dict.fromkeys(_complaint(error) for error in errors[:5]))


def unread(error: BaseException | None) -> str:
    """Why a body could not be read as JSON at all."""
    if isinstance(error, RecursionError):
        return "body: nested too deeply"
    return "body: no JSON in UTF-8"


_SAID = {
    "string_unicode": "no valid Unicode: a surrogate without its other half",
    "none_required": "Extra inputs are not permitted",  # the only fields that must be null are those nobody knows
    "model_attributes_type": "Input should be an object",
}
_ALTERNATIVE = re.compile(r"<\w+>")  # the tag of one of a field's alternatives


def _complaint(error: Any) -> str:
    if error["type"] == "json_invalid":
        return f"body: no JSON: {error['ctx']['error']} at character {error['loc'][-1]}"
    return f"{_place(error['loc'])}: {_SAID.get(error['type'], error['msg'])}"


def _place(parts: Sequence[object]) -> str:
    # "body" is FastAPI's.
    named = [str(part) for part in parts[1:] if not _ALTERNATIVE.fullmatch(str(part))]
    return re.sub(r"\.(\d+)", r"[\1]", ".".join(named)) or "body"


def _message(path: str, refusal: Refusal) -> str:
    if not isinstance(refusal.detail, error_details_pb2.BadRequest):
        return refusal.message
    names = _NAMES.get(path, _RERANK_NAMES)
    return "; ".join(f"{_renamed(v.field, names)}: {v.description}" for v in refusal.detail.field_violations)


def _renamed(field: str, names: Sequence[tuple[str, str]]) -> str:
    for ours, theirs in names:
        if field.startswith(ours):
            return theirs + field.removeprefix(ours)
    return field


def _cohere(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"id": str(uuid.uuid4()), "message": message}


def _cohere_jina_voyage(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"id": str(uuid.uuid4()), "message": message, "detail": message}


def _tei(code: int, message: str) -> tuple[int, dict[str, Any]]:
    code, kind = _TEI.get(code, (code, "Unknown"))
    return code, {"error": message, "error_type": kind}


def _sglang(code: int, message: str) -> tuple[int, dict[str, Any]]:
    kind = _TYPES.get(code, "InternalServerError")
    return code, {"object": "error", "message": message, "type": kind, "param": None, "code": code}


def _vllm(code: int, message: str) -> tuple[int, dict[str, Any]]:
    kind = _TYPES.get(code, "InternalServerError")
    return code, {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _ours(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"message": message}


# Of the paths that score.
_SHAPES: dict[str, Callable[[int, str], tuple[int, dict[str, Any]]]] = {
    "/v1/rerank": _cohere_jina_voyage,
    "/v2/rerank": _cohere,
    "/rerank": _tei,
    "/v1/score": _sglang,
    "/score": _vllm,
}
PATHS = frozenset(_SHAPES)
