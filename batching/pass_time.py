"""How long work takes on the device: a little model, fitted to the passes that were run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Protocol

FIRST_RATE = 2000.0  # tokens/s that the device is taken to compute until it has shown its own rate
PRIOR_WEIGHT = 0.05  # of that belief beside one measured pass
KNOWN_PASSES = 4  # measured passes from which on a prediction may refuse a caller
REMEMBERED = 64  # passes
MARGIN_QUANTILE = 0.9
MOST_MARGIN = 2.0  # or passes that compile something would have everyone refused for a while

Coefficients = tuple[float, float, float]  # seconds: a pass, a token, a pair


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
    """seconds = fixed + a * tokens + b * pairs, by least squares over the last passes, no coefficient below zero.

    In plain floats: callers wait for the loop that does this after every pass, and where other work has had the
    processor's caches, a library's solver for three unknowns takes three times as long.
    """

    def __init__(self, rate: float = FIRST_RATE) -> None:
        self._prior: Coefficients = (1e-3, 1.0 / rate, 1e-5 / rate)
        # 1, tokens and pairs of each pass, divided by what it took: relative errors are what counts.
        self._columns = [deque[float](maxlen=REMEMBERED) for _ in self._prior]
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)
        self._fit = self._prior
        self.margin = 1.0

    @property
    def known(self) -> bool:
        return len(self._columns[0]) >= KNOWN_PASSES

    def seconds(self, work: Work) -> float:
        """Of one pass with this work."""
        fixed, a, b = self._fit
        return fixed + a * work.tokens + b * work.pairs

    def share(self, work: Work, pass_tokens: int) -> float:
        fixed, a, b = self._fit
        return fixed * work.tokens / pass_tokens + a * work.tokens + b * work.pairs

    def learn(self, work: Work, seconds: float) -> None:
        if seconds <= 0 or work.tokens <= 0:
            return
        if self.known:
            self._ratios.append(seconds / max(self.seconds(work), 1e-9))
            rank = math.ceil(MARGIN_QUANTILE * len(self._ratios)) - 1
            self.margin = min(max(1.0, sorted(self._ratios)[rank]), MOST_MARGIN)
        row = 1.0 / seconds, work.tokens / seconds, work.pairs / seconds
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)
        speed = max(sum(map(mul, self._prior, row)), 1e-12)
        self._fit = self._fitted([value / speed for value in self._prior])

    def _fitted(self, prior: Sequence[float]) -> Coefficients:
        """prior: the coefficients taken for true before anything was measured, at the speed of the last pass."""
        columns, scale = self._columns, [max(1e-12, *column) for column in self._columns]
        products = [[0.0] * 3 for _ in range(3)]
        for i, j in ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)):
            products[i][j] = products[j][i] = sum(map(mul, columns[i], columns[j])) / (scale[i] * scale[j])
        for i in range(3):
            products[i][i] += PRIOR_WEIGHT
        target = [sum(columns[i]) / scale[i] + PRIOR_WEIGHT * prior[i] * scale[i] for i in range(3)]
        free = [0, 1, 2]
        while True:
            found = dict(zip(free, solved([[products[i][j] for j in free] + [target[i]] for i in free]), strict=True))
            fixed, a, b = (found.get(i, 0.0) / scale[i] for i in range(3))
            if min(fixed, a, b) >= 0:
                return fixed, a, b
            free = [i for i in free if found[i] > 0]


def solved(rows: list[list[float]]) -> list[float]:
    """x where each row says sum(row[i] * x[i]) = row[-1], of a positive definite matrix, which needs no pivots. The
    rows are used up."""
    for i, row in enumerate(rows):
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            below[i:] = [b - factor * a for a, b in zip(row[i:], below[i:], strict=True)]
    found: list[float] = []
    for i in reversed(range(len(rows))):
        known = sum(map(mul, rows[i][i + 1 :], found))
        found.insert(0, (rows[i][-1] - known) / rows[i][i])
    return found
