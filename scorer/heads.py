"""From the logits of one item to its score. Pure; the model's fp32 numbers are combined in double precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from batching.types import Scored

Kind = Literal["label_logits", "query_likelihood", "classification"]


class Verdict(NamedTuple):
    """What one document gets. All numbers are finite; `finite` is False, and nothing else is set, where one was not.

    score                     as its kind says: log-odds, one label's logit, or a mean natural-log probability
    log_odds, probability     None unless there are two labels, or one class: its logit is its log-odds, as such heads
                              are trained
    label_logits              [k], positive label first; empty under query_likelihood
    vocabulary_probabilities  [k], under the softmax over the whole vocabulary; empty unless it was normalised
    """

    finite: bool
    score: float | None = None
    log_odds: float | None = None
    probability: float | None = None
    label_logits: tuple[float, ...] = ()
    vocabulary_probabilities: tuple[float, ...] = ()


NOT_FINITE = Verdict(finite=False)


def verdict(scored: Scored, kind: Kind) -> Verdict:
    """The score of one item: one read of the labels or classes, or one target token at each of several reads."""
    logits: list[list[float]] = scored.logits.tolist()
    lse: list[float] = [] if scored.lse is None else scored.lse.tolist()
    if not all(map(math.isfinite, lse)):
        return NOT_FINITE
    for row in logits:
        if not all(map(math.isfinite, row)):
            return NOT_FINITE
    if kind == "query_likelihood":
        return _query_likelihood(logits, lse)
    return _label_logits(logits, lse, kind == "classification")


def all_log_odds(scored: Sequence[Scored | None], kind: Kind) -> list[float] | None:
    """The log-odds of many items, as `verdict` gives them one by one. None unless all of them have theirs: each was
    scored by two labels or one class, without normalisation, and is finite."""
    if kind == "query_likelihood":
        return None
    logits = [one.logits for one in scored if one is not None and one.lse is None]
    shapes = {read.shape for read in logits}
    if len(logits) < len(scored) or shapes not in ({(1, 2)}, {(1, 1)} if kind == "classification" else set()):
        return None
    rows = np.concatenate(logits).astype(np.float64)  # as Python's own floats are
    if not np.isfinite(rows).all():
        return None
    odds: list[float] = (rows[:, 0] - rows[:, 1] if rows.shape[1] == 2 else rows[:, 0]).tolist()
    return odds


def reads_apart(scored: Scored) -> list[Scored]:
    """Each read of an item on its own, such as those of the documents of a listwise item."""
    lse = scored.lse
    return [
        Scored(scored.logits[i : i + 1], None if lse is None else lse[i : i + 1], scored.strategy)
        for i in range(len(scored.logits))
    ]


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)) without overflow at either end."""
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    e = math.exp(x)
    return e / (1.0 + e)


def _label_logits(logits: list[list[float]], lse: list[float], classes: bool) -> Verdict:
    assert len(logits) == 1, "labels are read once, at the item's last token"
    row = tuple(logits[0])
    assert len(row) in (1, 2), "one label or two"
    log_odds = row[0] - row[1] if len(row) == 2 else row[0] if classes else None
    # Rounding may put a logit above the log-sum-exp that contains it.
    vocabulary = tuple(math.exp(min(0.0, x - lse[0])) for x in row) if lse else ()
    if log_odds is None:
        return Verdict(True, row[0], None, None, row, vocabulary)
    return Verdict(True, log_odds, log_odds, sigmoid(log_odds), row, vocabulary)


def _query_likelihood(logits: list[list[float]], lse: list[float]) -> Verdict:
    assert logits, "query likelihood reads at least one token"
    assert len(logits) == len(lse), "query likelihood needs the log-sum-exp of every read"
    return Verdict(finite=True, score=math.fsum(row[0] - z for row, z in zip(logits, lse, strict=True)) / len(lse))
