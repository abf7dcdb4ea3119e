"""The `fused` strategy's kernel in Triton: one launch, a CTA for each tile of `attention.tiles` and KV head.

A tile packs the query heads of a group with its rows. It keeps a running maximum and sum (online softmax) over the
keys that all of its rows see, in blocks without a mask, and then over its own part under the items' mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.cuts import Cut
from attention.tiles import COLUMNS

GATHER_ROWS = 8  # rows of a CTA of `gather_rows`
HOPPER, AMPERE = (9, 0), (8, 0)  # compute capabilities: H100 and later, A100
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the kernel is built: packed query rows and keys of a block, warps, loads in flight.

    tma: contiguous keys are loaded by the tensor memory accelerator
    """

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3
    tma: bool = True

    @classmethod
    def of(cls, head_dim: int, capability: tuple[int, int] | None = None) -> Blocks:
        """What was measured to be fastest on an H200; wide heads, and GPUs with less shared memory or without the
        accelerator, take what fits them (there it was not measured). capability: of the GPU, None: the one at hand."""
        if capability is None:
            capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else HOPPER
        tma, roomy = capability >= HOPPER, capability >= HOPPER or capability == AMPERE
        if head_dim <= 128:
            return cls(stages=3 if roomy else 2, tma=tma)
        return cls(64, 64, 4, 2, tma) if roomy else cls(64, 32, 4, 1, tma)

    def cut(self, heads: int, kv_heads: int) -> Cut:
        """How passes are cut for this kernel."""
        return Cut(max(1, self.rows * kv_heads // heads), kv_heads, self.keys)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTiles:
    """`attention.tiles.Tiles` on the device, perhaps longer than needed: a tile or merge of no rows does nothing.

    merges: None where nothing was split
    """

    tiles: Tensor
    runs: Tensor
    item_start: Tensor
    merges: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Partial results: out [parts, kv_heads, rows of a block, head_dim] and their log2-sum-exp, in fp32."""

    out: Tensor
    lse: Tensor

    @classmethod
    def make(cls, parts: int, kv_heads: int, rows: int, head_dim: int, device: torch.device) -> Parts:
        shape = (parts, kv_heads, rows)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cached: tuple[Tensor, Tensor] | None,
    tiles: DeviceTiles,
    parts: Parts | None,
    out: Tensor,
    scale: float,
    blocks: Blocks,
) -> None:
    """Attention of every tile into `out`.

    q [rows, heads, head_dim] and k, v [rows, kv_heads, head_dim] may be views of one wider tensor (rows strided);
    cached: K and V of the tiles' slots one after the other (see `gather_rows`), [.., kv_heads, head_dim] contiguous,
    None where no tile has any; out [rows, heads, head_dim] contiguous.
    """
    heads, head_dim = q.shape[1:]
    kv_heads = k.shape[1]
    assert (tiles.merges is None) == (parts is None), "what was split is merged"
    old = (k, v) if cached is None else cached
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim}
    state = (parts.out, parts.lse) if parts else (out, out)
    arrays = (tiles.tiles, tiles.runs, tiles.item_start)
    kinds = {"CACHED": cached is not None, "SPLIT": parts is not None, "COLUMNS": COLUMNS}
    grid = (len(tiles.tiles) * kv_heads,)
    sources = [_descriptor(x, blocks.keys) if blocks.tma else x for x in (k, v, *old)]
    _fused[grid](
        q, *sources, out, *state, *arrays, q.stride(0), k.stride(0), scale * LOG2_E,
        **shape, **kinds, M=blocks.rows, N=blocks.keys, TMA=blocks.tma,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    if parts is not None and tiles.merges is not None:
        _merge[(len(tiles.merges) * kv_heads,)](
            parts.out, parts.lse, out, tiles.merges, **shape, M=blocks.rows, num_warps=4
        )


def keep_rows(k: Tensor, v: Tensor, held_k: Tensor, held_v: Tensor, rows: Tensor, slots: Tensor) -> None:
    """The K/V of rows[i] goes to slots[i]; nothing where rows[i] < 0.

    k, v: [n, kv_heads, head_dim], rows strided; held_k, held_v: [.., kv_heads, head_dim] contiguous
    """
    width = k.shape[1] * k.shape[2]
    _keep_rows[(len(rows),)](k, v, held_k, held_v, rows, slots, k.stride(0), width, triton.next_power_of_2(width))


def gather_rows(k: Tensor, v: Tensor, to_k: Tensor, to_v: Tensor, slots: Tensor, count: Tensor) -> None:
    """Row slots[i] of k and v goes to row i of to_k and to_v, for i < count.

    The tensor memory accelerator wants its rows one after the other, and reading scattered pages for every tile costs
    more than copying them once a layer. All [.., kv_heads, head_dim] contiguous; slots [n]; count [1].
    """
    width = k.shape[-2] * k.shape[-1]
    grid = (triton.cdiv(len(slots), GATHER_ROWS),)
    _gather_rows[grid](k, v, to_k, to_v, slots, count, width, triton.next_power_of_2(width), GATHER_ROWS, num_warps=4)


def _descriptor(x: Tensor, keys: int) -> Any:
    """x as the memory accelerator takes it: [rows, kv_heads * head_dim]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [keys, x.shape[2]])


@triton.jit
def _keep_rows(k, v, held_k, held_v, rows, slots, stride, width: tl.constexpr, block: tl.constexpr):
    i = tl.program_id(0)
    row = tl.load(rows + i)
    if row < 0:
        return
    slot = tl.load(slots + i).to(tl.int64) * width
    at = tl.arange(0, block)
    inside = at < width
    tl.store(held_k + slot + at, tl.load(k + row * stride + at, inside), inside)
    tl.store(held_v + slot + at, tl.load(v + row * stride + at, inside), inside)


@triton.jit
def _gather_rows(
    k, v, to_k, to_v, slots, count, width: tl.constexpr, block: tl.constexpr, rows: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0) * rows
    total = tl.load(count)
    if first >= total:
        return
    i = first + tl.arange(0, rows)
    at = tl.arange(0, block)
    live = (i < total)[:, None] & (at < width)[None, :]
    source = tl.load(slots + i, i < total, 0).to(tl.int64)[:, None] * width + at[None, :]
    target = i.to(tl.int64)[:, None] * width + at[None, :]
    tl.store(to_k + target, tl.load(k + source, live), live)
    tl.store(to_v + target, tl.load(v + source, live), live)


@triton.jit
def _step(q, k, v, acc, total, top, scale):
    """One block of keys that every row sees. q [M, D]; k, v [N, D]; acc [M, D]; total, top [M]."""
    scores = tl.dot(q, tl.trans(k))
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    p = tl.math.exp2(scores * scale - new[:, None])
    fade = tl.math.exp2(top - new)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
    return acc, total * fade + tl.sum(p, 1), new


@triton.jit
def _masked_step(q, k, v, seen, acc, total, top, scale):
    """One block of keys, of which each row sees some or none. seen [M, N] or [1, N]."""
    scores = tl.where(seen, tl.dot(q, tl.trans(k)), float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    base = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing yet
    p = tl.math.exp2(scores * scale - base[:, None])
    fade = tl.math.exp2(top - base)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
    return acc, total * fade + tl.sum(p, 1), new


@triton.jit
def _rows(
    source, first, last, column, stride,
    TMA: tl.constexpr, WHOLE: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """[N, D] rows from `first` on. WHOLE: none is `last` or later; else such rows are zero, or another's under TMA."""
    if TMA:
        block = source.load([first, column])
    else:
        at = first + tl.arange(0, N)
        place = source + at[:, None] * stride + column + tl.arange(0, D)[None, :]
        if WHOLE:
            block = tl.load(place)
        else:
            block = tl.load(place, mask=(at < last)[:, None], other=0.0)
    return block


@triton.jit
def _fused(
    q, k, v, old_k, old_v, out, part_out, part_lse, tiles, runs, item_start, q_stride, kv_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    TMA: tl.constexpr, CACHED: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = program % KV_HEADS
    tile = tiles + (program // KV_HEADS) * COLUMNS
    rows = tl.load(tile + 1)
    if rows == 0:
        return
    first = tl.load(tile)
    group: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    n = tl.arange(0, N)
    row = first + tl.minimum(m // group, rows - 1)
    column = head * D
    query = tl.load(q + row[:, None] * q_stride + (head * group + m % group)[:, None] * D + d[None, :])
    acc = tl.zeros([M, D], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)

    if CACHED:
        slot = tl.load(tile + 2)
        slot_end = slot + tl.load(tile + 3)
        whole = slot_end - (slot_end - slot) % N
        for j in tl.range(slot, whole, N):
            kb = _rows(old_k, j, whole, column, KV_HEADS * D, TMA, True, N, D)
            vb = _rows(old_v, j, whole, column, KV_HEADS * D, TMA, True, N, D)
            acc, total, top = _step(query, kb, vb, acc, total, top, scale)
        if whole < slot_end:
            kb = _rows(old_k, whole, slot_end, column, KV_HEADS * D, TMA, False, N, D)
            vb = _rows(old_v, whole, slot_end, column, KV_HEADS * D, TMA, False, N, D)
            acc, total, top = _masked_step(query, kb, vb, (whole + n < slot_end)[None, :], acc, total, top, scale)

    run = tl.load(tile + 4)
    run_end = tl.load(tile + 5)
    before = tl.load(tile + 6)
    own = tl.load(tile + 7)
    own_end = tl.load(tile + 8)
    for r in range(run, run_end + 1):
        begin = before
        end = own
        if r < run_end:
            begin = tl.load(runs + 2 * r)
            end = begin + tl.load(runs + 2 * r + 1)
        whole = end - (end - begin) % N
        for j in tl.range(begin, whole, N):
            kb = _rows(k, j, whole, column, kv_stride, TMA, True, N, D)
            vb = _rows(v, j, whole, column, kv_stride, TMA, True, N, D)
            acc, total, top = _step(query, kb, vb, acc, total, top, scale)
        if whole < end:
            kb = _rows(k, whole, end, column, kv_stride, TMA, False, N, D)
            vb = _rows(v, whole, end, column, kv_stride, TMA, False, N, D)
            acc, total, top = _masked_step(query, kb, vb, (whole + n < end)[None, :], acc, total, top, scale)

    start = tl.load(item_start + row)
    for j in tl.range(own, own_end, N):
        kb = _rows(k, j, own_end, column, kv_stride, TMA, False, N, D)
        vb = _rows(v, j, own_end, column, kv_stride, TMA, False, N, D)
        key = (j + n)[None, :]
        seen = (key <= row[:, None]) & (key >= start[:, None])
        acc, total, top = _masked_step(query, kb, vb, seen, acc, total, top, scale)

    acc = acc / total[:, None]
    live = m // group < rows
    if SPLIT:
        part = tl.load(tile + 9)
        if part >= 0:
            place = (part * KV_HEADS + head) * M + m
            tl.store(part_out + place[:, None] * D + d[None, :], acc)
            tl.store(part_lse + place, top + tl.math.log2(total))
            return
    place = (row[:, None] * HEADS + (head * group + m % group)[:, None]) * D + d[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _merge(
    part_out, part_lse, out, merges,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The parts of one tile and KV head, weighted by their sums."""
    program = tl.program_id(0)
    head = program % KV_HEADS
    merge = merges + (program // KV_HEADS) * 4
    rows = tl.load(merge + 1)
    if rows == 0:
        return
    first = tl.load(merge)
    part = tl.load(merge + 2)
    count = tl.load(merge + 3)
    group: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    acc = tl.zeros([M, D], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    for i in range(part, part + count):
        place = (i * KV_HEADS + head) * M + m
        lse = tl.load(part_lse + place)
        new = tl.maximum(top, lse)
        weight = tl.math.exp2(lse - new)
        fade = tl.math.exp2(top - new)
        acc = acc * fade[:, None] + tl.load(part_out + place[:, None] * D + d[None, :]) * weight[:, None]
        total = total * fade + weight
        top = new
    row = first + m // group
    place = (row[:, None] * HEADS + (head * group + m % group)[:, None]) * D + d[None, :]
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=(m // group < rows)[:, None])
