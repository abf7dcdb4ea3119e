"""How long one search has the device before others get it. Pure; time is given."""

from __future__ import annotations

from collections.abc import Callable


class Turn:
    """Begins where it is made."""

    def __init__(self, seconds: float, most: float, wanted: Callable[[], bool], timer: Callable[[], float]) -> None:
        """seconds: that it lasts where others wait; most: where none does. wanted: whether others wait."""
        self._timer = timer
        self._wanted = wanted
        now = timer()
        self._ends, self._last = now + seconds, now + most

    def over(self) -> bool:
        now = self._timer()
        return now >= self._last or (now >= self._ends and self._wanted())
