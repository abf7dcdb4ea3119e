"""How a call ends that gets no answer: the status codes, the message, and the details that fit into a header."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from batching.errors import Closed, Expired, NotAdmitted
from scorer.errors import (
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    Overloaded,
    Unauthenticated,
    Unavailable,
    Unsupported,
    Violation,
)

RETRY_SECONDS = 1

# Status details travel base64-coded in a header beside the percent-coded message; the header list is limited to 8 kB.
DETAILS_BYTES = 4096
MESSAGE_BYTES = 1024
VIOLATION_BYTES = DETAILS_BYTES - MESSAGE_BYTES - 128
MAX_VIOLATIONS = 50
VALUE_CHARACTERS = 100
LIMIT_CHARACTERS = 300

# The one table of exceptions and status codes. What is not here, such as a pass that failed, is our fault: INTERNAL.
STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotAdmitted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Expired: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Closed: grpc.StatusCode.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a call ends that gets no answer."""

    code: grpc.StatusCode
    message: str
    detail: Message | None = None

    def status(self) -> status_pb2.Status:
        """As google.rpc.Status, the form in which details travel."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        if self.detail is not None:
            packed = any_pb2.Any()
            packed.Pack(self.detail)
            status.details.append(packed)
        return status


class Refused(Exception):
    """A call that ends without an answer, and how."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(refusal.message)


def status_code(error: Exception) -> grpc.StatusCode | None:
    """The code of an exception of the table or of a class derived from one; None for all others."""
    return next((STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES), None)


def refusal_of(error: Exception, code: grpc.StatusCode) -> Refusal:
    """What the caller is told of an exception that has a code."""
    if isinstance(error, InvalidRequest):
        return _invalid(error.violations)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(1e9 * (error.retry_after if isinstance(error, NotAdmitted) else RETRY_SECONDS)))
        return Refusal(code, _cut(str(error)), error_details_pb2.RetryInfo(retry_delay=delay))
    return Refusal(code, _cut(str(error)))


async def abort(context: grpc.aio.ServicerContext[Any, Any], refusal: Refusal) -> NoReturn:
    """Ends the call with this refusal."""
    details = () if refusal.detail is None else (("grpc-status-details-bin", refusal.status().SerializeToString()),)
    await context.abort(refusal.code, refusal.message, details)


def _invalid(violations: Sequence[Violation]) -> Refusal:
    """Names as many of the violations as fit, the first ones first."""
    detail = error_details_pb2.BadRequest()
    shown: list[Violation] = []
    for violation in map(_shortened, violations[:MAX_VIOLATIONS]):
        told = f"{violation.limit}, got {violation.value}" if violation.value else violation.limit
        detail.field_violations.add(field=violation.field, description=told)
        if detail.ByteSize() > VIOLATION_BYTES:
            del detail.field_violations[-1]
            break
        shown.append(violation)
    left = len(violations) - len(shown)
    message = _cut("; ".join(map(str, shown[:5])), f" (and {left} more)" if left else "")
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message, detail)


def _shortened(violation: Violation) -> Violation:
    return Violation(
        _printable(violation.field, VALUE_CHARACTERS),
        _printable(violation.value, VALUE_CHARACTERS),
        _printable(violation.limit, LIMIT_CHARACTERS),
    )


def _printable(text: str, characters: int) -> str:
    """One short line, whatever the caller sent."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in text[: characters + 1])
    return line if len(line) <= characters else line[: characters - 1] + "…"


def _cut(message: str, tail: str = "") -> str:
    """Shortens a status message to MESSAGE_BYTES as it travels, keeping `tail`."""
    ends = list(accumulate(map(_wire_bytes, message + tail)))
    if not ends or ends[-1] <= MESSAGE_BYTES:
        return message + tail
    tail = f"…{tail}"
    return message[: bisect_right(ends, MESSAGE_BYTES - sum(map(_wire_bytes, tail)))] + tail


def _wire_bytes(character: str) -> int:
    """Bytes of one character of a status message: percent-coded unless it is plain ASCII."""
    return 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
