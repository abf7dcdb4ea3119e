"""How long a batch stays open for others to join. Pure; time is given."""

from __future__ import annotations

import math

MAX_SECONDS = 0.002
BUSY = 0.7  # part of the time that the device works, from which on waiting costs no one an idle device
MEMORY_SECONDS = 0.5
WORTH = 0.2  # requests that turns of the event loop brought, in the mean of the last few times
TRY_AGAIN = 8  # passes, one of which tries it all the same


class Window:
    """Not at all where the device idles; the busier it is and the closer together the arrivals, the longer, up to
    MAX_SECONDS."""

    def __init__(self, most: float = MAX_SECONDS) -> None:
        self._most = most
        self._gap = math.inf
        self._last = -math.inf
        self._busy = 0.0
        self._ended = -math.inf

    def arrived(self, now: float) -> None:
        """A request came."""
        gap = now - self._last
        if math.isfinite(gap):
            self._gap = gap if math.isinf(self._gap) else self._gap + 0.2 * (gap - self._gap)
        self._last = now

    def ran(self, began: float, ended: float) -> None:
        """A pass ran."""
        span = ended - self._ended if math.isfinite(self._ended) else ended - began
        if span > 0:
            kept = math.exp(-span / MEMORY_SECONDS)
            self._busy = self._busy * kept + min(1.0, (ended - began) / span) * (1 - kept)
        self._ended = ended

    def seconds(self, queued_tokens: int, pass_tokens: int, slack: float, now: float) -> float:
        """How long to wait from now on. slack: how long the most urgent request may be kept."""
        gap = max(self._gap, now - self._last)
        if queued_tokens >= pass_tokens or self._busy < BUSY or 2 * gap > self._most:
            return 0.0
        return max(0.0, min(2 * gap, slack))


class Turns:
    """Whether to let the event loop turn before a pass is planned. Calls that came meanwhile wait for turns of it, one
    call a turn, and planning a pass holds it up: where it is what limits, each call would get a pass of its own. Where
    nobody waits, turns only cost time; so it is tried now and then, and done as long as it brings requests."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._passes = 0

    def worth_trying(self) -> bool:
        self._passes += 1
        return self._mean >= WORTH or self._passes % TRY_AGAIN == 0

    def brought(self, requests: int) -> None:
        """How many came while the loop turned."""
        self._mean += (requests - self._mean) / 4
