"""Bytes that are no message."""

from __future__ import annotations

from dataclasses import dataclass

from scorer.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Undecodable:
    """What arrived instead of a message of this kind."""

    kind: str
    bytes: int

    def error(self) -> InvalidRequest:
        return InvalidRequest.of("request", f"the bytes of a {self.kind}", f"{self.bytes} bytes that are none")
