"""The best continuations of all beams, found on the device without sorting a vocabulary for each of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 128  # tokens: the vocabulary is searched by the best of each chunk first


def top_candidates(logits: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best of scores[beam] + log-probability, best first; fewer where there are not so many.

    logits [n, vocabulary] fp32; scores [n] fp32. Returns log-probabilities [count] fp32, beams and tokens.
    What is among the best lies in one of the `count` chunks with the best maxima, so only these are searched whole.
    """
    count = min(count, logits.numel())
    lse = logits.logsumexp(dim=-1)
    shift = scores - lse
    if pad := -logits.shape[1] % CHUNK:
        logits = functional.pad(logits, (0, pad), value=-torch.inf)
    chunks = logits.view(len(logits), -1, CHUNK)
    maxima = (chunks.amax(-1) + shift[:, None]).flatten()
    chosen = maxima.topk(min(count, len(maxima)), sorted=False).indices
    per_beam = chunks.shape[1]
    beam = chosen // per_beam
    values = chunks.flatten(0, 1)[chosen] + shift[beam][:, None]
    best = values.flatten().topk(count).indices
    beams = beam[best // CHUNK]
    tokens = chosen[best // CHUNK] % per_beam * CHUNK + best % CHUNK
    return logits[beams, tokens] - lse[beams], beams, tokens


def pair_log_probs(logits: Tensor, beams: Tensor, tokens: Tensor) -> Tensor:
    """[m] fp32 log-probability of tokens[i] behind beam beams[i]. logits: [n, vocabulary] fp32."""
    return logits[beams, tokens] - logits.logsumexp(dim=-1)[beams]
