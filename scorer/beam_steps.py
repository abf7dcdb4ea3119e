"""One step of a beam search on the device: the beams' new tokens in, their best continuations out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from attention.decode import Decode, DecodeStrategy, plan_decode
from attention.kv_pages import KvPages
from attention.layout import Ints
from attention.torch_decode import TorchDecode
from batching.beams import Candidates
from batching.trie import Pairs
from batching.types import Floats
from scorer.beam_top import pair_log_probs, top_candidates
from scorer.model import ScoringModel


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """What a device must know to go on by itself: the rules of `batching.beams` for a search without constraint.

    width    beams that go on, at most
    count    continuations among which they are
    eos_ids  behind which none goes on
    pages    where the search's own tokens lie, by number (`batching.beams.Ancestry`)
    """

    width: int
    count: int
    eos_ids: tuple[int, ...]
    pages: Ints


@dataclass(frozen=True, slots=True, eq=False)
class BeamStep:
    """What a step computes.

    tokens  [n]  each beam's new token
    scores  [n]  fp32 sum of log-probabilities up to and with it
    decode       where their keys are
    count        how many continuations are wanted, the best ones of all
    pairs        instead of them the log-probabilities of these
    ahead        how steps may follow
    """

    tokens: Ints
    scores: Floats
    decode: Decode
    count: int
    pairs: Pairs | None = None
    ahead: Ahead | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Stepped:
    """Continuations in any order, and the seconds that they took."""

    candidates: Candidates
    plan_seconds: float
    forward_seconds: float


class Steps(Protocol):
    """Computes steps, on the device thread: `submit` enqueues one, its answer waits for the result."""

    def submit(self, step: BeamStep) -> Callable[[], Stepped]: ...


@runtime_checkable
class Following(Protocol):
    """What steps may be able to do besides."""

    def follow(self) -> Callable[[], Stepped] | None:
        """Enqueues the step that follows from the last one's continuations, which need not have come back; None where
        it cannot, and a step must be submitted. Nothing else may have been submitted since."""


class ModelSteps:
    """Steps by the model's own modules, whatever its family."""

    def __init__(
        self, model: ScoringModel, kv_pages: KvPages, strategy: DecodeStrategy = DecodeStrategy.CASCADE_DECODE
    ) -> None:
        self._model = model
        self._attention = TorchDecode(kv_pages)
        self._strategy = strategy

    def submit(self, step: BeamStep) -> Callable[[], Stepped]:
        started = time.perf_counter()
        plans = {key: plan_decode(step.decode, self._strategy, key.window) for key in self._model.mask_keys}
        attend = self._attention.begin(step.decode, plans)
        planned = time.perf_counter()
        rows = np.arange(len(step.tokens), dtype=np.int32)
        positions = np.full(len(rows), step.decode.position, np.int32)
        hidden = self._model.forward(step.tokens, positions, rows, attend)
        found = self._continuations(hidden, step)
        stepped = Stepped(found, planned - started, time.perf_counter() - planned)
        return lambda: stepped

    @torch.inference_mode()
    def _continuations(self, hidden: Tensor, step: BeamStep) -> Candidates:
        logits = self._model.every_logit(hidden)
        if step.pairs is not None:
            at = (torch.from_numpy(part.astype(np.int64)).to(logits.device) for part in step.pairs)
            return Candidates(pair_log_probs(logits, *at).cpu().numpy(), *step.pairs)
        scores = torch.from_numpy(step.scores).to(logits.device)
        log_probs, beams, tokens = (part.cpu().numpy() for part in top_candidates(logits, scores, step.count))
        return Candidates(log_probs, beams.astype(np.int32), tokens.astype(np.int32))
