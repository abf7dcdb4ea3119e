"""The search for the best continuations, and the step that follows from them, in Triton.

A beam whose score is -inf is padding: its row is not read, and nothing behind it is chosen. NaN stays NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scorer.step_ints import EOS_AT, ROOM

PART = 16  # chunks of a row that a program reads
PICKED = 128  # continuations that a program writes


def scan(logits: Tensor, scores: Tensor, sums: tuple[Tensor, Tensor], lse: Tensor, maxima: Tensor, chunk: int) -> None:
    """Reads logits [n, vocabulary] fp32 once: their log-sum-exp into lse [n], and the best total of each chunk of
    tokens, which is scores[row] + log-probability, into maxima [n, chunks]. sums: two of [n, at least chunks / PART],
    to work in."""
    beams, vocabulary = logits.shape
    chunks = maxima.shape[1]
    parts = triton.cdiv(chunks, PART)
    _scan[(beams, parts)](
        logits, scores, maxima, *sums, vocabulary, chunks, sums[0].stride(0), PART=PART, CHUNK=chunk, num_warps=4
    )
    _total[(beams,)](
        scores, maxima, *sums, lse, chunks, parts, sums[0].stride(0),
        PARTS=triton.next_power_of_2(parts), BLOCK=min(2048, triton.next_power_of_2(chunks)), num_warps=4,
    )  # fmt: skip


@triton.jit
def _scan(
    logits, scores, maxima, tops, sums, vocabulary, chunks, stride, PART: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """A part of a row: its chunks' maxima, its own maximum, and the sum of exponentials under that."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    if tl.load(scores + row) == float("-inf"):
        return
    chunk = part * PART + tl.arange(0, PART)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    value = tl.load(logits + row.to(tl.int64) * vocabulary + token, token < vocabulary, float("-inf"))
    best = tl.max(value, 1)
    top = tl.max(best, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(maxima + row.to(tl.int64) * chunks + chunk, best, chunk < chunks)
    tl.store(tops + row * stride + part, top)
    tl.store(sums + row * stride + part, tl.sum(tl.sum(tl.exp(value - base), 1), 0))


@triton.jit
def _total(
    scores, maxima, tops, sums, lse, chunks, parts, stride, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A row's log-sum-exp from its parts, and its maxima as totals. Of padding only these are of use."""
    row = tl.program_id(0)
    score = tl.load(scores + row)
    part = tl.arange(0, PARTS)
    inside = part < parts
    top = tl.load(tops + row * stride + part, inside, float("-inf"))
    peak = tl.max(top, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    under = tl.exp(top - base)
    whole = base + tl.log(tl.sum(tl.load(sums + row * stride + part, inside, 0.0) * under, 0))
    tl.store(lse + row, whole)
    for begin in range(0, chunks, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        place = maxima + row.to(tl.int64) * chunks + at
        best = tl.load(place, at < chunks, 0.0)
        tl.store(place, tl.where(score == float("-inf"), score, score + (best - whole)), at < chunks)


def totals(logits: Tensor, scores: Tensor, lse: Tensor, chosen: Tensor, chunks: int, chunk: int) -> Tensor:
    """[len(chosen), chunk] totals behind each token of the chosen chunks, which are numbered row after row."""
    out = torch.empty((len(chosen), chunk), dtype=torch.float32, device=logits.device)
    _totals[(len(chosen),)](logits, scores, lse, chosen, out, logits.shape[1], chunks, CHUNK=chunk, num_warps=1)
    return out


@triton.jit
def _totals(logits, scores, lse, chosen, out, vocabulary, chunks, CHUNK: tl.constexpr):
    program = tl.program_id(0)
    number = tl.load(chosen + program)
    row = number // chunks
    at = tl.arange(0, CHUNK)
    token = number % chunks * CHUNK + at
    score = tl.load(scores + row)
    inside = token < vocabulary
    value = tl.load(logits + row.to(tl.int64) * vocabulary + token, inside, float("-inf"))
    total = tl.where(inside, score + (value - tl.load(lse + row)), float("-inf"))
    tl.store(out + program * CHUNK + at, tl.where(score == float("-inf"), score, total))


def pick(logits: Tensor, scores: Tensor, lse: Tensor, chosen: Tensor, best: Tensor, chunks: int, chunk: int) -> Tensor:
    """[3, len(best)] int32: the bits of the log-probabilities, rows, tokens. best: places among the chosen chunks'
    tokens. What is behind padding has -inf."""
    found = torch.empty((3, len(best)), dtype=torch.int32, device=logits.device)
    _pick[(triton.cdiv(len(best), PICKED),)](
        logits, scores, lse, chosen, best, found, logits.shape[1], chunks, len(best),
        CHUNK=chunk, BLOCK=PICKED, num_warps=4,
    )  # fmt: skip
    return found


@triton.jit
def _pick(
    logits, scores, lse, chosen, best, found, vocabulary, chunks, count, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = at < count
    place = tl.load(best + at, wanted, 0)
    number = tl.load(chosen + place // CHUNK)
    row = number // chunks
    token = number % chunks * CHUNK + place % CHUNK
    inside = wanted & (token < vocabulary) & (tl.load(scores + row) != float("-inf"))
    value = tl.load(logits + row.to(tl.int64) * vocabulary + token, inside, float("-inf"))
    log_prob = tl.where(inside, value - tl.load(lse + row), float("-inf"))
    tl.store(found + at, log_prob.to(tl.int32, bitcast=True), wanted)
    tl.store(found + count + at, row.to(tl.int32), wanted)
    tl.store(found + 2 * count + at, token.to(tl.int32), wanted)


def advance(
    found: Tensor, ahead: Tensor, step: Tensor, following: Tensor, own: int, widest: int, page_size: int
) -> None:
    """Writes the step that follows from `found`, by the rules of `batching.beams`, as `scorer.step_ints` lays steps
    out. own: keys of a beam's history in `step`. A program copies a column of the history, the last one does the rest.
    """
    count = found.shape[1]
    _advance[(own + 1,)](
        found, ahead, step, following, count,
        BLOCK=triton.next_power_of_2(count), WIDEST=widest, PAGE=page_size, ROOM=ROOM, EOS_AT=EOS_AT,
        num_warps=4 if count <= 512 else 8,
    )  # fmt: skip


@triton.jit
def _advance(
    found, ahead, step, following, count,
    BLOCK: tl.constexpr, WIDEST: tl.constexpr, PAGE: tl.constexpr, ROOM: tl.constexpr, EOS_AT: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0)
    positions: tl.constexpr = ROOM + WIDEST
    scores: tl.constexpr = ROOM + 2 * WIDEST
    history: tl.constexpr = ROOM + 3 * WIDEST
    width = tl.load(ahead)
    prompt = tl.load(step + 1)
    own = tl.load(step + 2)
    i = tl.arange(0, BLOCK)
    inside = i < tl.minimum(tl.load(ahead + 1), count)
    log_prob = tl.load(found + i, inside, 0).to(tl.float32, bitcast=True)
    beam = tl.load(found + count + i, inside, 0)
    token = tl.load(found + 2 * count + i, inside, 0)
    score = tl.load(step + scores + beam, inside, 0).to(tl.float32, bitcast=True)
    total = score + log_prob
    goes_on = inside & (total > float("-inf"))
    for eos in range(tl.load(ahead + 2)):
        goes_on = goes_on & (token != tl.load(ahead + EOS_AT + eos))
    rank = tl.cumsum(goes_on.to(tl.int32), 0) - 1
    goes_on = goes_on & (rank < width)
    beams = tl.sum(goes_on.to(tl.int32), 0)
    place = following + history + rank * (own + 1) + column
    if column < own:
        tl.store(place, tl.load(step + history + beam * own + column, goes_on, 0), goes_on)
    else:
        number = 1 + (own - 1) * width + rank
        page = tl.load(ahead + ROOM + number // PAGE, goes_on, 0)
        tl.store(place, page * PAGE + number % PAGE, goes_on)
        tl.store(following, beams)
        tl.store(following + 1, prompt)
        tl.store(following + 2, own + 1)
        tl.store(following + 3, tl.load(step + 3))
        row = tl.arange(0, WIDEST)
        nothing = tl.full([WIDEST], float("-inf"), tl.float32).to(tl.int32, bitcast=True)
        tl.store(following + scores + row, nothing, row >= beams)
        tl.store(following + ROOM + rank, token, goes_on)
        tl.store(following + positions + rank, prompt + own, goes_on)
        tl.store(following + scores + rank, total.to(tl.int32, bitcast=True), goes_on)
