"""The exceptions of the service, and the one table that turns them into status codes.

PrefixRankError
├── RequestError           the caller's fault
│   └── InvalidRequest     one or more fields are wrong; names each with its value and limit
├── Unauthenticated        no token, or one that is not known
├── Forbidden              a token that is another tenant's
├── Overloaded             load, and only load
│   └── RateLimited        this caller's own load
├── DeadlineExceeded       the caller's deadline came first
├── Unsupported            what this service was not started for
├── Unavailable            starting, draining, or the device is gone
└── StartError             the service cannot start as configured (never on the wire)
    ├── ConfigError        an unknown or malformed setting
    ├── ProfileError       the profile does not fit the tokenizer or the model
    └── ModelError         the checkpoint is not one that this service can score exactly
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class PrefixRankError(Exception):
    """Base of everything raised on purpose."""


class RequestError(PrefixRankError):
    """The caller's fault."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One bad field: its path in the request, the value as far as it helps, and what is allowed."""

    field: str
    value: str
    limit: str

    def __str__(self) -> str:
        return f"{self.field}: {self.limit}, got {self.value}" if self.value else f"{self.field}: {self.limit}"


class InvalidRequest(RequestError):
    """One or more fields are wrong; names each with its value and limit."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        assert violations, "an invalid request violates something"
        self.violations = tuple(violations)
        super().__init__("; ".join(str(v) for v in self.violations[:5]))

    @classmethod
    def of(cls, field: str, limit: str, value: object = "") -> InvalidRequest:
        return cls([Violation(field, str(value), limit)])


class Overloaded(PrefixRankError):
    """Load, and only load."""


class RateLimited(Overloaded):
    """This caller's own load."""


class Unauthenticated(PrefixRankError):
    """No token, or one that is not known."""


class Forbidden(PrefixRankError):
    """A token that is another tenant's."""


class DeadlineExceeded(PrefixRankError):
    """The caller's deadline came first."""


class Unsupported(PrefixRankError):
    """What this service was not started for."""


class Unavailable(PrefixRankError):
    """Starting, draining, or the device is gone."""


class StartError(PrefixRankError):
    """The service cannot start as configured."""


class ConfigError(StartError):
    """An unknown or malformed setting."""


class ProfileError(StartError):
    """The profile does not fit the tokenizer or the model."""


class ModelError(StartError):
    """The checkpoint is not one that this service can score exactly."""


def first_line(error: Exception) -> str:
    """The first line of what a library says, the next ones too where it only leads to them, and the kind of error
    where that alone says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    leading = next((n for n, line in enumerate(lines) if not line.endswith(":")), len(lines))
    line = " ".join(lines[: leading + 1])[:300]
    return line if len(line.split()) > 2 else f"{type(error).__name__} {line}".strip()
