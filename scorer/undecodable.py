"""What cannot be taken as a request, on its way to the one place that refuses and counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixrank.v1 import scorer_pb2 as pb
from scorer.errors import InvalidRequest, Violation


@dataclass(frozen=True, slots=True)
class Undecodable:
    """What arrived instead of a request: bytes that are no message, or one that its stream has no place for.

    told: what can be logged of it
    """

    problem: Violation
    told: pb.ScoreRequest = field(default_factory=pb.ScoreRequest)

    @classmethod
    def of(cls, kind: str, size: int) -> Undecodable:
        """`size` bytes instead of a message of this kind."""
        return cls(Violation("request", f"{size} bytes that are none", f"the bytes of a {kind}"))

    def error(self) -> InvalidRequest:
        return InvalidRequest([self.problem])
