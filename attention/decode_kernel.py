"""Decode steps in Triton, by launches whose sizes depend on the number of beams alone.

`cascade_decode` is two a layer. The first scans the prompt: a CTA has a tile of beams (the query heads of a group
packed with them), one KV head and a part of the keys. The second has a beam and a KV head: it keeps the beam's new K/V,
scans the beam's own history slot by slot, and merges that with the parts of the first by their log-sum-exp.
`batch_decode` is the second alone, which then scans the prompt too. Lengths are read on the device, so that one CUDA
graph serves every prompt and every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.fused_kernel import LOG2_E, _descriptor, _masked_step, _step
from attention.tiles import PROCESSORS, WAVES

# Of `meta`: beams; tokens of the prompt; keys of a beam's history, the new one included; slot of the prompt's first
# token where its slots follow one another.
BEAMS, PROMPT, OWN, FIRST = range(4)
META = 4
PARTS_AT_ONCE = 8  # of the prompt's parts that a beam merges in one go
DOT_ROWS = 16  # query rows that a product on tensor cores has at least


@dataclass(frozen=True, slots=True)
class DecodeBlocks:
    """How the kernels are built.

    rows, keys, warps, stages  of the prompt's kernel: packed query rows, keys of a block, warps, loads in flight
    part_keys                  of the prompt, at least: a shorter part costs more to merge than it saves
    few_keys, few_stages       of the beams' kernel without tensor cores, of a cascade with fewer than DOT_ROWS query
                               heads a KV head
    few_programs               of it, at least: a beam's history takes it more steps, which idle processors do not hide
    dot_keys, dot_warps        of the beams' kernel on tensor cores
    whole_keys, whole_warps    of it where a beam scans the prompt too
    """

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3
    part_keys: int = 128
    few_keys: int = 8
    few_stages: int = 2
    few_programs: int = 2 * PROCESSORS + 1
    dot_keys: int = 32
    dot_warps: int = 2
    whole_keys: int = 64
    whole_warps: int = 4

    def tiles(self, beams: int, heads: int, kv_heads: int) -> int:
        """Tiles of so many beams."""
        return -(-beams // (self.rows * kv_heads // heads))

    def splits(self, beams: int, heads: int, kv_heads: int) -> int:
        """Parts that the prompt may be cut into: as many as run at once."""
        return max(1, PROCESSORS * WAVES // (self.tiles(beams, heads, kv_heads) * kv_heads))


@dataclass(frozen=True, slots=True, eq=False)
class DecodeArrays:
    """A step on the device.

    meta     [META] int32
    prompt   [..] int32 slots of the prompt's tokens; None: they follow one another
    history  [beams, own] int32 slots, row after row without gaps; the new token's last
    """

    meta: Tensor
    prompt: Tensor | None
    history: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DecodeParts:
    """Partial results over the prompt: out [tiles, splits, kv_heads, rows, head_dim] and log2-sum-exp, in fp32."""

    out: Tensor
    lse: Tensor
    splits: int

    @classmethod
    def make(cls, beams: int, shape: tuple[int, int, int], blocks: DecodeBlocks, device: torch.device) -> DecodeParts:
        """shape: heads, kv_heads, head_dim"""
        heads, kv_heads, head_dim = shape
        splits = blocks.splits(beams, heads, kv_heads)
        parts = (blocks.tiles(beams, heads, kv_heads), splits, kv_heads, blocks.rows)
        out = torch.empty((*parts, head_dim), dtype=torch.float32, device=device)
        return cls(out, torch.empty(parts, dtype=torch.float32, device=device), splits)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: tuple[Tensor, Tensor],
    step: DecodeArrays,
    parts: DecodeParts | None,
    out: Tensor,
    scale: float,
    blocks: DecodeBlocks = DecodeBlocks(),
    tma: bool = True,
) -> None:
    """Attention of a step's new tokens into `out`; keeps their K/V.

    q [beams, heads, head_dim] and k, v [beams, kv_heads, head_dim] may be views of one wider tensor (rows strided), and
    have rows for at least as many beams as `meta` says; held: K and V of a layer, [.., kv_heads, head_dim] contiguous;
    out like q, contiguous. parts: of a cascade; None: each beam scans the whole prompt. tma: consecutive slots are
    loaded by the tensor memory accelerator.
    """
    beams, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    consecutive = step.prompt is None
    held_k, held_v = (x.view(-1, kv_heads, head_dim) for x in held)
    slots = step.meta if step.prompt is None else step.prompt
    shape: dict[str, Any] = {"HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim, "CONSECUTIVE": consecutive}
    shape |= {"M": blocks.rows, "SPLITS": 1 if parts is None else parts.splits, "SHORTEST": blocks.part_keys}
    part_out, part_lse = (out, out) if parts is None else (parts.out, parts.lse)
    if parts is not None:
        use_tma = tma and consecutive
        sources = [_descriptor(x, blocks.keys) if use_tma else x for x in (held_k, held_v)]
        tiles = blocks.tiles(beams, heads, kv_heads)
        _prompt[(tiles * kv_heads * parts.splits,)](
            q, *sources, held_k, held_v, part_out, part_lse, step.meta, slots, q.stride(0), scale * LOG2_E,
            **shape, N=blocks.keys, TMA=use_tma, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    group = triton.next_power_of_2(heads // kv_heads)
    if parts is not None and group < DOT_ROWS and beams * kv_heads >= blocks.few_programs:
        _own_few[(beams * kv_heads,)](
            q, k, v, held_k, held_v, part_out, part_lse, out, step.meta, step.history,
            q.stride(0), k.stride(0), scale * LOG2_E, **shape, G=group, N=blocks.few_keys, STAGES=blocks.few_stages,
            P=min(PARTS_AT_ONCE, triton.next_power_of_2(parts.splits)), num_warps=max(1, group // 2), num_stages=1,
        )  # fmt: skip
        return
    _own[(beams * kv_heads,)](
        q, k, v, held_k, held_v, part_out, part_lse, out, step.meta, slots, step.history,
        q.stride(0), k.stride(0), scale * LOG2_E, **shape, WHOLE=parts is None,
        G=max(DOT_ROWS, group), N=blocks.whole_keys if parts is None else blocks.dot_keys,
        num_warps=blocks.whole_warps if parts is None else blocks.dot_warps, num_stages=3 if parts is None else 2,
    )  # fmt: skip


@triton.jit
def _used_splits(prompt, SPLITS: tl.constexpr, SHORTEST: tl.constexpr):
    """Parts that a prompt of this length is cut into."""
    return tl.maximum(tl.minimum(SPLITS, prompt // SHORTEST), 1)


@triton.jit
def _prompt(
    q, k, v, held_k, held_v, part_out, part_lse, meta, slots, q_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr, N: tl.constexpr, CONSECUTIVE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile of beams on its part of the prompt; the parts are whole blocks, but for the end of the last one."""
    program = tl.program_id(0)
    head = program % KV_HEADS
    split = program // KV_HEADS % SPLITS
    tile = program // (KV_HEADS * SPLITS)
    beams = tl.load(meta)
    total_keys = tl.load(meta + 1)
    used = _used_splits(total_keys, SPLITS, SHORTEST)
    group: tl.constexpr = HEADS // KV_HEADS
    per_tile: tl.constexpr = M // group
    if (tile * per_tile >= beams) | (split >= used):
        return
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    n = tl.arange(0, N)
    row = tl.minimum(tile * per_tile + m // group, beams - 1)
    column = head * D
    query = tl.load(q + row[:, None] * q_stride + (head * group + m % group)[:, None] * D + d[None, :])
    acc = tl.zeros([M, D], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    blocks = (total_keys + N - 1) // N
    begin = blocks * split // used * N
    end = tl.minimum(blocks * (split + 1) // used * N, total_keys)
    whole = end - (end - begin) % N
    first = tl.load(meta + 3)
    for j in tl.range(begin, whole, N):
        if TMA:
            kb = k.load([first + j, column])
            vb = v.load([first + j, column])
        else:
            if CONSECUTIVE:
                slot = (first + j + n).to(tl.int64)
            else:
                slot = tl.load(slots + j + n).to(tl.int64)
            place = slot[:, None] * (KV_HEADS * D) + column + d[None, :]
            kb = tl.load(held_k + place)
            vb = tl.load(held_v + place)
        acc, total, top = _step(query, kb, vb, acc, total, top, scale)
    if whole < end:
        live = whole + n < end
        if CONSECUTIVE:
            slot = (first + whole + n).to(tl.int64)
        else:
            slot = tl.load(slots + whole + n, live, 0).to(tl.int64)
        place = slot[:, None] * (KV_HEADS * D) + column + d[None, :]
        kb = tl.load(held_k + place, live[:, None], 0.0)  # what lies behind the prompt may be NaN
        vb = tl.load(held_v + place, live[:, None], 0.0)
        acc, total, top = _masked_step(query, kb, vb, live[None, :], acc, total, top, scale)
    seen = total > 0
    acc = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
    lse = tl.where(seen, top + tl.math.log2(tl.where(seen, total, 1.0)), float("-inf"))
    place = ((tile * SPLITS + split) * KV_HEADS + head) * M + m
    tl.store(part_out + place[:, None] * D + d[None, :], acc)
    tl.store(part_lse + place, lse)


@triton.jit
def _own(
    q, k, v, held_k, held_v, part_out, part_lse, out, meta, prompt_slots, history, q_stride, kv_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr, G: tl.constexpr, N: tl.constexpr, CONSECUTIVE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A beam's query heads of one group on its own keys, then merged with the parts over the prompt, or on all of the
    prompt's keys too."""
    program = tl.program_id(0)
    head = program % KV_HEADS
    beam = program // KV_HEADS
    if beam >= tl.load(meta):
        return
    prompt = tl.load(meta + 1)
    own = tl.load(meta + 2)
    group: tl.constexpr = HEADS // KV_HEADS
    per_tile: tl.constexpr = M // group
    g = tl.arange(0, G)
    d = tl.arange(0, D)
    n = tl.arange(0, N)
    column = head * D
    new = beam.to(tl.int64) * kv_stride + column + d
    new_k = tl.load(k + new)
    new_v = tl.load(v + new)
    slots = history + beam * own
    kept = tl.load(slots + own - 1).to(tl.int64) * (KV_HEADS * D) + column + d
    tl.store(held_k + kept, new_k)
    tl.store(held_v + kept, new_v)
    at = (head * group + tl.minimum(g, group - 1))[:, None] * D + d[None, :]
    query = tl.load(q + beam.to(tl.int64) * q_stride + at)
    acc = tl.zeros([G, D], tl.float32)
    total = tl.zeros([G], tl.float32)
    top = tl.full([G], float("-inf"), tl.float32)
    for j in tl.range(0, own, N):
        old = j + n < own - 1
        is_new = (j + n == own - 1)[:, None]
        slot = tl.load(slots + j + n, old, 0).to(tl.int64)
        place = slot[:, None] * (KV_HEADS * D) + column + d[None, :]
        kb = tl.where(is_new, new_k[None, :], tl.load(held_k + place, old[:, None], 0.0))
        vb = tl.where(is_new, new_v[None, :], tl.load(held_v + place, old[:, None], 0.0))
        acc, total, top = _masked_step(query, kb, vb, (j + n < own)[None, :], acc, total, top, scale)
    if WHOLE:
        first = tl.load(meta + 3)
        for j in tl.range(0, prompt, N):
            live = j + n < prompt
            if CONSECUTIVE:
                slot = (first + j + n).to(tl.int64)
            else:
                slot = tl.load(prompt_slots + j + n, live, 0).to(tl.int64)
            place = slot[:, None] * (KV_HEADS * D) + column + d[None, :]
            kb = tl.load(held_k + place, live[:, None], 0.0)
            vb = tl.load(held_v + place, live[:, None], 0.0)
            acc, total, top = _masked_step(query, kb, vb, live[None, :], acc, total, top, scale)
    elif prompt > 0:
        tile = beam // per_tile
        for split in range(_used_splits(prompt, SPLITS, SHORTEST)):
            part = ((tile * SPLITS + split) * KV_HEADS + head) * M + beam % per_tile * group + tl.minimum(g, group - 1)
            lse = tl.load(part_lse + part)
            peak = tl.maximum(top, lse)
            weight = tl.math.exp2(lse - peak)
            fade = tl.math.exp2(top - peak)
            acc = acc * fade[:, None] + tl.load(part_out + part[:, None] * D + d[None, :]) * weight[:, None]
            total = total * fade + weight
            top = peak
    place = (beam * HEADS + head * group + g)[:, None] * D + d[None, :]
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=(g < group)[:, None])


@triton.jit
def _own_few(
    q, k, v, held_k, held_v, part_out, part_lse, out, meta, history, q_stride, kv_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, STAGES: tl.constexpr,
    CONSECUTIVE: tl.constexpr,
):  # fmt: skip
    """`_own` of a cascade without tensor cores: no rows are computed that are not there, and no part is read for them.
    A group of a few query heads would leave most of a product's rows empty."""
    program = tl.program_id(0)
    head = program % KV_HEADS
    beam = program // KV_HEADS
    if beam >= tl.load(meta):
        return
    prompt = tl.load(meta + 1)
    own = tl.load(meta + 2)
    group: tl.constexpr = HEADS // KV_HEADS
    per_tile: tl.constexpr = M // group
    g = tl.arange(0, G)
    d = tl.arange(0, D)
    n = tl.arange(0, N)
    p = tl.arange(0, P)
    row = tl.minimum(g, group - 1)
    column = head * D
    new = beam.to(tl.int64) * kv_stride + column + d
    new_k = tl.load(k + new)
    new_v = tl.load(v + new)
    slots = history + beam * own
    kept = tl.load(slots + own - 1).to(tl.int64) * (KV_HEADS * D) + column + d
    tl.store(held_k + kept, new_k)
    tl.store(held_v + kept, new_v)
    at = (head * group + row)[:, None] * D + d[None, :]
    query = tl.load(q + beam.to(tl.int64) * q_stride + at).to(tl.float32) * scale
    acc = tl.zeros([G, D], tl.float32)
    total = tl.zeros([G], tl.float32)
    top = tl.full([G], float("-inf"), tl.float32)
    for j in tl.range(0, own, N, num_stages=STAGES):
        old = j + n < own - 1
        is_new = (j + n == own - 1)[:, None]
        slot = tl.load(slots + j + n, old, 0).to(tl.int64)
        place = slot[:, None] * (KV_HEADS * D) + column + d[None, :]
        kb = tl.where(is_new, new_k[None, :], tl.load(held_k + place, old[:, None], 0.0)).to(tl.float32)
        vb = tl.where(is_new, new_v[None, :], tl.load(held_v + place, old[:, None], 0.0)).to(tl.float32)
        scores = tl.sum(query[:, None, :] * kb[None, :, :], 2)
        scores = tl.where((j + n < own)[None, :], scores, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, 1))
        weight = tl.math.exp2(scores - peak[:, None])
        fade = tl.math.exp2(top - peak)
        acc = acc * fade[:, None] + tl.sum(weight[:, :, None] * vb[None, :, :], 1)
        total = total * fade + tl.sum(weight, 1)
        top = peak
    if prompt > 0:
        used = _used_splits(prompt, SPLITS, SHORTEST)
        first = beam // per_tile * SPLITS
        for begin in range(0, used, P):
            live = begin + p < used
            part = ((first + begin + p)[None, :] * KV_HEADS + head) * M + (beam % per_tile * group + row)[:, None]
            lse = tl.load(part_lse + part, live[None, :], float("-inf"))
            values = tl.load(part_out + part[:, :, None] * D + d[None, None, :], live[None, :, None], 0.0)
            peak = tl.maximum(top, tl.max(lse, 1))
            weight = tl.math.exp2(lse - peak[:, None])
            fade = tl.math.exp2(top - peak)
            acc = acc * fade[:, None] + tl.sum(weight[:, :, None] * values, 1)
            total = total * fade + tl.sum(weight, 1)
            top = peak
    place = (beam * HEADS + head * group + g)[:, None] * D + d[None, :]
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=(g < group)[:, None])
