"""How long a decode step's attention takes by each strategy on one machine: a fitted law, and the rule that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention.decode import DecodeStrategy
from attention.fields import Fields

Reals = NDArray[np.float64]

MOST_MS = 1e4  # of any part of a layer's time that a calibration tells: more is damage
FEW_BEAMS = 32  # with the 8 KV heads that laws are fitted with: see DecodeBlocks.few_programs


class DecodePoint(NamedTuple):
    """prompt: tokens; beams; own: tokens of each beam's history."""

    prompt: int
    beams: int
    own: int


def _features(strategy: DecodeStrategy, point: DecodePoint) -> list[float]:
    """What a strategy's time is a sum of: a launch, keys that one CTA scans, keys that all of them scan. Of few beams a
    cascade scans their own keys by another kernel."""
    prompt, beams, own = (float(x) for x in point)
    if strategy is DecodeStrategy.BATCH_DECODE:
        return [1.0, prompt + own, beams * (prompt + own)]
    few = float(beams <= FEW_BEAMS)
    return [1.0, own, beams * own, prompt, beams * prompt, beams, few, few * own]


@dataclass(frozen=True, slots=True)
class DecodeLaw:
    """Milliseconds of one layer are the sum of features times these, none of which is negative."""

    milliseconds: Mapping[DecodeStrategy, tuple[float, ...]]

    def time(self, strategy: DecodeStrategy, point: DecodePoint) -> float:
        """Predicted milliseconds of one layer."""
        return float(np.dot(self.milliseconds[strategy], _features(strategy, point)))

    def choose(self, point: DecodePoint) -> DecodeStrategy:
        """The strategy that is predicted to be faster."""
        return min(DecodeStrategy, key=lambda strategy: self.time(strategy, point))

    @classmethod
    def fit(cls, rows: Sequence[tuple[DecodeStrategy, DecodePoint, float]]) -> DecodeLaw:
        """rows: (strategy, point, measured milliseconds); relative errors weigh alike. Raises ValueError where a
        strategy has fewer rows than unknowns."""
        found = {}
        for strategy in DecodeStrategy:
            mine = [(_features(strategy, point), ms) for s, point, ms in rows if s is strategy]
            x, y = np.array([f for f, _ in mine]), np.array([ms for _, ms in mine])
            if len(mine) < len(_features(strategy, DecodePoint(1, 1, 1))):
                raise ValueError(f"{len(mine)} measurements of {strategy} are too few to fit")
            found[strategy] = tuple(float(c) for c in _not_negative(x / y[:, None], np.ones(len(y))))
        return cls(found)

    def as_lists(self) -> dict[str, list[float]]:
        """For JSON."""
        return {strategy.value: list(terms) for strategy, terms in self.milliseconds.items()}

    @classmethod
    def of(cls, given: Fields) -> DecodeLaw:
        """What `as_lists` gave. Raises ValueError with the field's path where it is something else."""
        counts = {strategy: len(_features(strategy, DecodePoint(1, 1, 1))) for strategy in DecodeStrategy}
        return cls({s: tuple(given.numbers(s.value, count, 0.0, MOST_MS)) for s, count in counts.items()})


def _not_negative(x: Reals, y: Reals) -> Reals:
    """Least squares without negative parts, by leaving out the most negative until none is."""
    used = np.ones(x.shape[1], np.bool_)
    found = np.zeros(x.shape[1])
    while used.any():
        solved = np.linalg.lstsq(x[:, used], y, rcond=None)[0]
        if (solved >= 0).all():
            found[used] = solved
            return found
        used[np.flatnonzero(used)[np.argmin(solved)]] = False
    return found


def crossover(law: DecodeLaw, beams: int, own: int, among: Sequence[int]) -> int | None:
    """The first of these prompt lengths from which on cascade_decode is predicted to be faster; None: at none."""
    faster: Callable[[int], bool] = lambda prompt: (  # noqa: E731
        law.choose(DecodePoint(prompt, beams, own)) is DecodeStrategy.CASCADE_DECODE
    )
    ordered = sorted(among)
    return next((p for i, p in enumerate(ordered) if all(map(faster, ordered[i:]))), None)


# One layer with heads 16/8 and head_dim 128 in bf16, fitted to what `prefixrank bench decode --quick` measured on an
# H200 on 2026-11-30.
BUILT_IN = DecodeLaw(
    {
        DecodeStrategy.BATCH_DECODE: (0.00798971, 5.96129e-06, 5.14539e-07),
        DecodeStrategy.CASCADE_DECODE: (
            0.00663964,
            7.94035e-06,
            1.52761e-06,
            1.60145e-06,
            8.77937e-09,
            2.1199e-05,
            0.00557612,
            0,
        ),
    }
)
