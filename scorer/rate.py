"""A token bucket: pure, the caller brings the time."""

from __future__ import annotations


class TokenBucket:
    """rate: tokens a second; burst: how many may be saved up; now: in seconds of the caller's clock."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        assert rate > 0, "a bucket fills"
        assert burst >= 1, "a bucket holds at least one token"
        self._rate, self._burst = rate, burst
        self._level, self._at = burst, now

    def take(self, now: float) -> bool:
        """One token, if there is one."""
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        if self._level < 1:
            return False
        self._level -= 1
        return True
