"""What a client raises for a call that got a status instead of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import grpc

from prefixrank.v1 import scorer_pb2 as pb


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request: its path, and what is allowed with what was given."""

    field: str
    description: str


class ScorerError(Exception):
    """A call that got a status instead of an answer.

    code                 the gRPC status code
    message              in words
    violations           with INVALID_ARGUMENT: the bad fields
    retry_after_seconds  with RESOURCE_EXHAUSTED: when to come again
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: Sequence[FieldViolation] = (),
        retry_after_seconds: float | None = None,
    ) -> None:
        self.code = code
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_seconds = retry_after_seconds
        super().__init__(f"{code.name}: {message}")


def raise_unless_passing(error: ScorerError) -> None:
    """A server that is not up yet, or not in time, is waited for; anything else is wrong for good."""
    if error.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        raise error


def is_cancelled() -> bool:
    """Whether somebody asked this task to end: a CancelledError may also come out of what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def scorer_error(error: grpc.RpcError) -> ScorerError:
    """Errors of both channels have code(), details() and trailing_metadata(); only their bases do not say so."""
    call = cast("grpc.Call", error)
    violations, retry = _details(call.trailing_metadata() or ())
    return ScorerError(call.code(), call.details() or "", violations, retry)


def error_of(status: pb.Status) -> ScorerError:
    """What an error that came as a message says."""
    codes = {code.value[0]: code for code in grpc.StatusCode}
    return ScorerError(codes.get(status.code, grpc.StatusCode.UNKNOWN), status.message, *_told(status))


def _details(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[list[FieldViolation], float | None]:
    """What the status in a call's metadata says beside code and message."""
    status_bytes = next((value for key, value in metadata if key == "grpc-status-details-bin"), None)
    return _told(pb.Status.FromString(status_bytes)) if isinstance(status_bytes, bytes) else ([], None)


def _told(status: pb.Status) -> tuple[list[FieldViolation], float | None]:
    """Its details, where their messages are installed (googleapis-common-protos)."""
    try:
        from google.rpc import error_details_pb2
    except ImportError:
        return [], None
    violations: list[FieldViolation] = []
    retry: float | None = None
    for detail in status.details:
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            violations += [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
        elif detail.Unpack(retry_info):
            retry = retry_info.retry_delay.ToTimedelta().total_seconds()
    return violations, retry
