"""The logits of all beams and the search for their best continuations on a GPU, over buffers that graphs share."""

from __future__ import annotations

import torch
from torch import Tensor

from scorer.beam_top import CHUNK
from scorer.beam_triton import PART, pick, scan, totals
from scorer.model import ScoringModel


class BeamHead:
    """What `read` leaves is there until the next `read`."""

    def __init__(self, model: ScoringModel, beams: int) -> None:
        """beams: of the widest step."""
        self._model = model
        self._chunks = -(-model.vocabulary // CHUNK)
        parts = -(-self._chunks // PART)
        sizes = ((beams, model.vocabulary), (beams, self._chunks), (beams, parts), (beams, parts), (beams,))
        made = (torch.zeros(size, dtype=torch.float32, device=model.device) for size in sizes)
        self._logits, self._maxima, self._tops, self._sums, self._lse = made

    @torch.inference_mode()
    def read(self, hidden: Tensor, scores: Tensor) -> None:
        """hidden [n, width]; scores [n] fp32, -inf: a row of padding."""
        n = len(hidden)
        logits = self._model.every_logit(hidden, self._logits[:n])
        scan(logits, scores, (self._tops, self._sums), self._lse, self._maxima[:n], CHUNK)

    @torch.inference_mode()
    def best(self, scores: Tensor, count: int) -> Tensor:
        """[3, count] int32: the bits of log-probabilities, beams and tokens of the `count` best of scores[beam] +
        log-probability, best first; fewer where there are not so many. What is behind padding, or impossible, has
        -inf; NaN comes first.

        What is among the best lies in one of the `count` chunks with the best maxima: only these are searched whole.
        """
        n = len(scores)
        logits, maxima = self._logits[:n], self._maxima[:n]
        count = min(count, logits.numel())
        chosen = maxima.flatten().topk(min(count, maxima.numel()), sorted=False).indices
        found = totals(logits, scores, self._lse, chosen, self._chunks, CHUNK)
        best = found.flatten().topk(count).indices
        return pick(logits, scores, self._lse, chosen, best, self._chunks, CHUNK)

    @torch.inference_mode()
    def log_probs(self, beams: Tensor, tokens: Tensor) -> Tensor:
        """[m] fp32, of token tokens[i] behind beam beams[i]."""
        return self._logits[beams, tokens] - self._lse[beams]
