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
        # (1, tokens, pairs) of each pass, divided by what it took: relative errors are what counts.
        self._rows = np.zeros((REMEMBERED, 3))
        self._learned = 0
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)
        self._fit = self._prior
        self.margin = 1.0

    @property
    def known(self) -> bool:
        return self._learned >= KNOWN_PASSES

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
        row = np.array((1.0, work.tokens, work.pairs)) / seconds
        self._rows[self._learned % REMEMBERED] = row
        self._learned += 1
        self._fit = self._fitted(self._prior / max(float(self._prior @ row), 1e-12))

    def _fitted(self, prior: NDArray[np.float64]) -> NDArray[np.float64]:
        """prior: the coefficients taken for true before anything was measured, at the speed of the last pass."""
        rows = self._rows[: min(self._learned, REMEMBERED)]
        scale = np.maximum(rows.max(axis=0), 1e-12)
        products = rows.T @ rows / np.outer(scale, scale) + PRIOR_WEIGHT * np.eye(3)
        target = rows.sum(axis=0) / scale + PRIOR_WEIGHT * prior * scale
        free = np.arange(3)
        while True:
            fit = np.zeros(3)
            fit[free] = np.linalg.solve(products[np.ix_(free, free)], target[free]) / scale[free]
            if (fit >= 0).all():
                return fit
            free = np.flatnonzero(fit > 0)
