"""What goes with every call of a client beside the request: its deadline, and its metadata."""

from __future__ import annotations

import math
import sys
from numbers import Real
from typing import Any

from prefixrank.v1 import scorer_pb2 as pb
from scorer import affinity

# gRPC counts a deadline as nanoseconds since 1970 in 64 bits, which end in the year 2262: what lies behind is the past.
MOST_SECONDS = 4e9


def seconds(name: str, given: object) -> float:
    """A time that gRPC can hold. Raises ValueError where `given` is none."""
    number: Any = given if isinstance(given, Real) and not isinstance(given, bool) else math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name}: a positive finite number of seconds, got {given!r}")
    return float(min(number, MOST_SECONDS))


def deadline(given: object) -> float | None:
    """The timeout of a call; None for a call that may take for ever. Raises ValueError."""
    return None if given is None else seconds("timeout", given)


def bearer(token: str | None) -> str | None:
    """A token as a header may hold it, without the white space round it. The errors do not tell it.

    Raises ValueError for a character that no header holds, TypeError for what is no text.
    """
    if token is None:
        return None
    if not isinstance(token, str):
        raise TypeError(f"token: a string, got {type(token).__name__}")
    token = token.strip()
    for place, character in enumerate(token, 1):
        if not " " <= character <= "~":
            raise ValueError(f"token: printable ASCII, got U+{ord(character):04X} at character {place}")
    return token


def metadata(request: object, token: str | None) -> tuple[tuple[str, str], ...]:
    """The headers of a call; `request`: its only one, where it has only one."""
    with_prefix = pb.ScoreRequest | pb.WarmPrefixRequest | pb.BeamSearchRequest
    found = affinity.affinity(request) if isinstance(request, with_prefix) else ""
    own = ((affinity.HEADER, found),) if found else ()
    authorization = (("authorization", f"Bearer {token}"),) if token else ()
    return own + authorization + _trace()


def _trace() -> tuple[tuple[str, str], ...]:
    """The current span as W3C trace context, in a program that has OpenTelemetry loaded."""
    propagate = sys.modules.get("opentelemetry.propagate")
    carrier: dict[str, str] = {}
    if propagate is not None:
        propagate.inject(carrier)
    return tuple(carrier.items())
