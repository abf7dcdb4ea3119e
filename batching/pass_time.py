"""How long work takes on the device: a little model, fitted to the passes that were run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FIRST_RATE = 2000.0  # tokens/s that the device is taken to compute until it has shown its own rate
PRIOR_WEIGHT = 0.05  # of that belief beside one measured pass
KNOWN_PASSES = 4  # measured passes from which on a prediction may refuse a caller
REMEMBERED = 64  # passes
MARGIN_QUANTILE = 0.9
MOST_MARGIN = 2.0  # or passes that compile something would have everyone refused for a while


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be computed.

    tokens  rows of the passes
    pairs   keys that these rows see, summed over rows
    """

    tokens: int = 0
    pairs: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.pairs + other.pairs)

    def __sub__(self, other: Work) -> Work:
        return Work(max(0, self.tokens - other.tokens), max(0.0, self.pairs - other.pairs))

    @classmethod
    def of(cls, prefix: int, cached: int, items: Sequence[int], prefix_each: bool = False) -> Work:
        """Of a prefix whose first `cached` tokens have their K/V already, and items behind it."""
        return cls.sums(prefix, cached, len(items), sum(items), sum(n * n for n in items), prefix_each)

    @classmethod
    def sums(cls, prefix: int, cached: int, count: int, total: int, squares: int, prefix_each: bool = False) -> Work:
        """The same for `count` items of `total` tokens, whose squares sum to `squares`.

        prefix_each: every item computes the prefix for itself.
        """
        times = count if prefix_each else 1
        fresh = prefix if prefix_each else prefix - cached
        prefixes = times * fresh * (2 * prefix - fresh) / 2
        return cls(times * fresh + total, prefixes + prefix * total + squares / 2)


class PassTime(Protocol):
    """Predicts and may learn from what it is told."""

    def share(self, work: Work, pass_tokens: int) -> float:
        """Seconds that some work adds to the passes it is part of."""

    def learn(self, work: Work, seconds: float) -> None:
        """What one pass took."""

    @property
    def margin(self) -> float:
        """Factor by which a careful promise exceeds the prediction."""

    @property
    def known(self) -> bool:
        """Whether enough was measured to refuse a caller by it."""


class FittedPassTime:
    """seconds = fixed + a * tokens + b * pairs, by least squares over the last passes, no coefficient below zero."""

    def __init__(self, rate: float = FIRST_RATE) -> None:
        self._prior = np.array([1e-3, 1.0 / rate, 1e-5 / rate])
        self._passes: deque[tuple[float, float, float]] = deque(maxlen=REMEMBERED)
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)
        self._fit = self._prior
        self.margin = 1.0

    @property
    def known(self) -> bool:
        return len(self._passes) >= KNOWN_PASSES

    def seconds(self, work: Work) -> float:
        """Of one pass with this work."""
        return float(self._fit @ (1.0, work.tokens, work.pairs))

    def share(self, work: Work, pass_tokens: int) -> float:
        fixed, a, b = self._fit
        return float(fixed * work.tokens / pass_tokens + a * work.tokens + b * work.pairs)

    def learn(self, work: Work, seconds: float) -> None:
        if seconds <= 0 or work.tokens <= 0:
            return
        if self.known:
            self._ratios.append(seconds / max(self.seconds(work), 1e-9))
            rank = math.ceil(MARGIN_QUANTILE * len(self._ratios)) - 1
            self.margin = min(max(1.0, sorted(self._ratios)[rank]), MOST_MARGIN)
        self._passes.append((work.tokens, work.pairs, seconds))
        self._fit = self._fitted()

    def _fitted(self) -> NDArray[np.float64]:
        """Relative errors are what counts, so each row is divided by what the pass took."""
        told = np.array(self._passes)
        rows = np.column_stack([np.ones(len(told)), told[:, :2]]) / told[:, 2:]
        scale = np.maximum(np.abs(rows).max(axis=0), 1e-12)
        prior = self._prior * told[-1, 2] / max(float(self._prior @ (1.0, *told[-1, :2])), 1e-12)
        free = np.ones(3, np.bool_)
        fit = np.zeros(3)
        while free.any():
            x = rows[:, free] / scale[free]
            ridge = PRIOR_WEIGHT * np.eye(int(free.sum()))
            target = x.sum(axis=0) + PRIOR_WEIGHT * prior[free] * scale[free]
            fit[:] = 0.0
            fit[free] = np.linalg.solve(x.T @ x + ridge, target) / scale[free]
            if (fit >= 0).all():
                break
            free &= fit >= 0
        return fit
