"""Beam search as arithmetic over arrays: which beams go on, which are finished, and when it ends. Pure.

The rules are those of transformers' generate(num_beams=...), so that both find the same sequences. Each step sees the
best max(2, 1 + eos ids) * num_beams continuations: those that end among the first num_beams of them are finished, the
best num_beams of the others go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention.layout import Ints
from batching.trie import ROOT, Pairs, Trie
from batching.types import Floats


class EarlyStopping(StrEnum):
    """When a search with num_beams finished sequences ends.

    HEURISTIC  once the best running beam is worse at its length than the worst finished one (transformers' False)
    FULL       at once (transformers' True)
    NEVER      once no running beam can become better, at the longest length where that helps it
    """

    HEURISTIC = "heuristic"
    FULL = "full"
    NEVER = "never"


class Ended(StrEnum):
    """Why a sequence is finished."""

    EOS = "eos"
    LENGTH = "length"
    CONSTRAINT = "constraint"  # an allowed sequence is complete, and there is no eos to say so


ENDED = tuple(Ended)


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """length_penalty: a sequence's score is the sum of its log-probabilities over its length to this power, in float64,
    which holds what float32 does not: 256 ** 16."""

    num_beams: int
    max_new_tokens: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    eos_ids: tuple[int, ...] = ()

    @property
    def candidates(self) -> int:
        """Continuations that a step looks at: enough that num_beams of them do not end with eos."""
        return max(2, 1 + len(self.eos_ids)) * self.num_beams

    @property
    def slots(self) -> int:
        """Places for the K/V of generated tokens: the last ones of a search are never computed."""
        return self.num_beams * (self.max_new_tokens - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Continuations of the running beams. log_probs [n]: fp32, of token tokens[i] behind beam beams[i]."""

    log_probs: Floats
    beams: Ints
    tokens: Ints

    def take(self, chosen: NDArray[np.int64]) -> Candidates:
        return Candidates(self.log_probs[chosen], self.beams[chosen], self.tokens[chosen])


class Hypothesis(NamedTuple):
    """A finished sequence. tokens: eos included; log_probs: of each of them."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    score: float
    ended: Ended


@dataclass(slots=True, eq=False)
class BeamState:
    """A search between two steps. n beams run, t tokens are generated.

    scores     [n]     fp32 sum of log-probabilities, best first
    tokens     [n, t]
    log_probs  [n, t]
    nodes      [n]     where each beam stands in the trie
    finished   best first, at most num_beams
    """

    options: BeamOptions
    trie: Trie | None = None
    scores: Floats = field(default_factory=lambda: np.zeros(1, np.float32))
    tokens: Ints = field(default_factory=lambda: np.zeros((1, 0), np.int32))
    log_probs: Floats = field(default_factory=lambda: np.zeros((1, 0), np.float32))
    nodes: Ints = field(default_factory=lambda: np.full(1, ROOT, np.int32))
    finished: list[Hypothesis] = field(default_factory=list)
    done: bool = False

    @property
    def length(self) -> int:
        """Tokens generated so far."""
        return int(self.tokens.shape[1])

    def wanted(self) -> Pairs | None:
        """The continuations whose log-probabilities the next step needs; None: the best ones of all."""
        return None if self.trie is None else self.trie.pairs(self.nodes, self.options.eos_ids)

    def advance(self, given: Candidates) -> Ints:
        """Takes a step's continuations, in any order. Returns [n] which beam each running one continues."""
        assert not self.done, "a search that ended takes no step"
        best, totals = self._best(given)
        length = self.length + 1
        ended = self._ended(best, length)
        self._finish(best, totals, ended, length)
        goes_on = np.flatnonzero(ended == 0)[: self.options.num_beams]
        self._go_on(best.take(goes_on), totals[goes_on])
        self.done = not len(goes_on) or not self._improvable() or self._full()
        return best.beams[goes_on]

    def _best(self, given: Candidates) -> tuple[Candidates, Floats]:
        totals = self.scores[given.beams] + given.log_probs
        order = np.argsort(-totals, kind="stable")[: self.options.candidates]
        order = order[totals[order] > -np.inf]
        return given.take(order), totals[order]

    def _ended(self, best: Candidates, length: int) -> NDArray[np.int8]:
        """Why each of them ends with its token, as its place in ENDED, counted from 1; 0: it does not."""
        ended = np.zeros(len(best.tokens), np.int8)
        if self.trie is not None and not self.options.eos_ids:
            nodes = self.trie.step(self.nodes[best.beams], best.tokens)
            ended[self.trie.leaf(nodes)] = 1 + ENDED.index(Ended.CONSTRAINT)
        if length == self.options.max_new_tokens:
            ended[:] = 1 + ENDED.index(Ended.LENGTH)
        ended[np.isin(best.tokens, self.options.eos_ids)] = 1 + ENDED.index(Ended.EOS)
        return ended

    def _finish(self, best: Candidates, totals: Floats, ended: NDArray[np.int8], length: int) -> None:
        """Of those that end, only the first num_beams count: the others are there as a reserve."""
        ends = np.flatnonzero(ended[: self.options.num_beams])
        if not len(ends):
            return
        scores = totals[ends].astype(np.float64) / length**self.options.length_penalty
        tokens, log_probs = self._continued(best.take(ends))
        rows = (zip(*tokens.T.tolist(), strict=True), zip(*log_probs.T.tolist(), strict=True), scores.tolist())
        self.finished += map(Hypothesis, *rows, [ENDED[why - 1] for why in ended[ends].tolist()])
        self.finished.sort(key=attrgetter("score"), reverse=True)
        del self.finished[self.options.num_beams :]

    def _continued(self, chosen: Candidates) -> tuple[Ints, Floats]:
        """[n, t + 1] tokens and log-probabilities."""
        tokens = np.column_stack([self.tokens[chosen.beams], chosen.tokens])
        log_probs = np.column_stack([self.log_probs[chosen.beams], chosen.log_probs])
        return tokens.astype(np.int32, copy=False), log_probs.astype(np.float32, copy=False)

    def _go_on(self, chosen: Candidates, totals: Floats) -> None:
        if self.trie is not None and len(chosen.tokens):
            self.nodes = self.trie.step(self.nodes[chosen.beams], chosen.tokens)
        self.scores = totals
        self.tokens, self.log_probs = self._continued(chosen)

    def _full(self) -> bool:
        early = self.options.early_stopping is EarlyStopping.FULL
        return early and len(self.finished) == self.options.num_beams

    def _improvable(self) -> bool:
        """Whether the best running beam may still beat the worst finished one."""
        if len(self.finished) < self.options.num_beams:
            return True
        penalty, length = self.options.length_penalty, self.length
        if self.options.early_stopping is EarlyStopping.NEVER and penalty > 0:
            length = self.options.max_new_tokens
        best = float(self.scores[0]) / length**penalty
        return bool(best > self.finished[-1].score)


class Ancestry:
    """Where each running beam's generated tokens have their K/V: rows of slots, which forking copies instead of K/V.

    Slot 0 holds the prompt's last token, which all beams share; the beams of step t have slots 1 + t * width and on.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self.slots = np.zeros((1, 1), np.int32)  # [beams, tokens]

    @property
    def steps(self) -> int:
        """Tokens of each row."""
        return int(self.slots.shape[1])

    def fork(self, parents: Ints) -> None:
        """Beam i continues beam parents[i]; its new token gets a slot of its own."""
        assert len(parents) <= self._width, "a step has at most `width` beams"
        own = 1 + (self.steps - 1) * self._width + np.arange(len(parents), dtype=np.int32)
        self.slots = np.column_stack([self.slots[parents], own]).astype(np.int32)
