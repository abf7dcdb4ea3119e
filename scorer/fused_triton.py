"""`scorer.fused_ops` on a GPU: each reads and writes its rows once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scorer.quantized import FP8, FP8_MAX, Quantized, Rows

SILU_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class ProductTile:
    """How `swiglu` is built: rows, and columns of each half, that a program computes at once; depth of a step;
    warps; steps that are loaded ahead.

    group    tiles of so many rows follow one another at each column: what they share stays in the L2 cache
    flatten  the next tile is loaded while one is stored
    per_sm   programs at once on a multiprocessor
    """

    rows: int = 128
    columns: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 4
    group: int = 8
    flatten: bool = True
    per_sm: int = 1


def rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, quantized: bool) -> Rows:
    """The norm of x, or of x + delta, which then replaces x. x, delta: [n, width] contiguous."""
    out, scales = _places(x, x.shape[1], quantized)
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    _rms_norm[(len(x),)](
        x, x if delta is None else delta, weight, out, scales, eps,
        WIDTH=width, ADD=delta is not None, QUANTIZED=quantized, BLOCK=block, MOST=FP8_MAX,
        num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return Quantized(out, scales) if quantized else out


def quantize(x: Tensor) -> Quantized:
    """See `scorer.fused_ops.quantize`. x: [n, width] contiguous."""
    out, scales = _places(x, x.shape[1], quantized=True)
    block = triton.next_power_of_2(x.shape[1])
    warps = min(8, max(1, block // 512))
    _quantize[(len(x),)](x, out, scales, WIDTH=x.shape[1], BLOCK=block, MOST=FP8_MAX, num_warps=warps)
    return Quantized(out, scales)


def _places(x: Tensor, width: int, quantized: bool) -> tuple[Tensor, Tensor]:
    """Where a kernel writes its rows and, if any, their scales."""
    if not quantized:
        return torch.empty((len(x), width), dtype=x.dtype, device=x.device), x
    out = torch.empty((len(x), width), dtype=FP8, device=x.device)
    return out, torch.empty((len(x), 1), dtype=torch.float32, device=x.device)


@triton.jit
def _store(value, out, scales, row, at, inside, WIDTH: tl.constexpr, QUANTIZED: tl.constexpr, MOST: tl.constexpr):
    """A row as it is, or in FP8 with its scale."""
    if QUANTIZED:
        wide = value.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(wide), 0), 1e-12) / MOST
        tl.store(scales + row, scale)
        tl.store(out + row * WIDTH + at, (wide / scale).to(tl.float8e4nv), inside)
    else:
        tl.store(out + row * WIDTH + at, value, inside)


@triton.jit
def _quantize(x, out, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    _store(tl.load(x + row * WIDTH + at, inside, 0.0), out, scales, row, at, inside, WIDTH, True, MOST)


@triton.jit
def _rms_norm(
    x, delta, weight, out, scales, eps,
    WIDTH: tl.constexpr, ADD: tl.constexpr, QUANTIZED: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(x + row * WIDTH + at, inside, 0.0)
    if ADD:
        value = value + tl.load(delta + row * WIDTH + at, inside, 0.0)
        tl.store(x + row * WIDTH + at, value, inside)
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    scaled = tl.load(weight + at, inside, 0.0) * normed.to(value.dtype)
    _store(scaled, out, scales, row, at, inside, WIDTH, QUANTIZED, MOST)


def rotate(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    table: Tensor,
    positions: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    """In place; see `scorer.fused_ops.rotate`. qkv: [n, ..] contiguous."""
    head_dim = table.shape[1]
    all_heads = heads + kv_heads
    q_weight, k_weight = (table, table) if norms is None else norms
    _rotate[(len(qkv),)](
        qkv, table, positions, q_weight, k_weight, qkv.shape[1], eps,
        HEADS=heads, ALL=all_heads, HALF=head_dim // 2, NORM=norms is not None,
        BLOCK=triton.next_power_of_2(all_heads), num_warps=4,
    )  # fmt: skip


@triton.jit
def _rotate(
    qkv, table, positions, q_weight, k_weight, stride, eps,
    HEADS: tl.constexpr, ALL: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    position = tl.load(positions + row)
    head = tl.arange(0, BLOCK)[:, None]
    at = tl.arange(0, HALF)[None, :]
    inside = (head < ALL) & (at < HALF)
    place = qkv + row.to(tl.int64) * stride + head * (2 * HALF) + at
    first = tl.load(place, inside, 0.0)
    second = tl.load(place + HALF, inside, 0.0)
    dtype = first.dtype
    if NORM:
        a, b = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        is_query = head < HEADS
        w1 = tl.where(is_query, tl.load(q_weight + at), tl.load(k_weight + at))
        w2 = tl.where(is_query, tl.load(q_weight + HALF + at), tl.load(k_weight + HALF + at))
        first = w1 * (a * scale).to(dtype)
        second = w2 * (b * scale).to(dtype)
    a, b = first.to(tl.float32), second.to(tl.float32)
    cos = tl.load(table + position.to(tl.int64) * (2 * HALF) + at)
    sin = tl.load(table + position.to(tl.int64) * (2 * HALF) + HALF + at)
    tl.store(place, (a * cos - b * sin).to(dtype), inside)
    tl.store(place + HALF, (b * cos + a * sin).to(dtype), inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `scorer.fused_ops.silu_mul`. gate_up: [n, 2 width] contiguous."""
    width = gate_up.shape[1] // 2
    out = torch.empty((len(gate_up), width), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(len(gate_up), triton.cdiv(width, SILU_BLOCK))](gate_up, out, WIDTH=width, BLOCK=SILU_BLOCK, num_warps=4)
    return out


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + at, inside, 0.0)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + at, inside, 0.0)
    tl.store(out + row * WIDTH + at, _gated(gate, up), inside)


@triton.jit
def _gated(gate, up):
    """silu(gate) * up, each step rounded to their type."""
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up


def silu_mul_quantized(gate_up: Tensor) -> Quantized:
    """See `scorer.fused_ops.silu_mul`: a program takes a whole row, as its largest value scales it."""
    width = gate_up.shape[1] // 2
    out, scales = _places(gate_up, width, quantized=True)
    block = triton.next_power_of_2(width)
    _silu_mul_quantized[(len(gate_up),)](gate_up, out, scales, WIDTH=width, BLOCK=block, MOST=FP8_MAX, num_warps=8)
    return Quantized(out, scales)


@triton.jit
def _silu_mul_quantized(gate_up, out, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + at, inside, 0.0)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + at, inside, 0.0)
    _store(_gated(gate, up), out, scales, row, at, inside, WIDTH, True, MOST)


def swiglu(x: Tensor, weight: Tensor, tile: ProductTile = ProductTile()) -> Tensor:
    """See `scorer.fused_ops.swiglu`, with its widths multiples of 8: the memory accelerator's rows are whole 16 bytes,
    and what a tile has beyond the arrays is loaded as zeros and not stored."""
    (n, hidden), ffn = x.shape, len(weight) // 2
    assert hidden % 8 == ffn % 8 == 0, f"widths {hidden} and {ffn} are no multiples of 8"
    out = torch.empty((n, ffn), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(n, tile.rows) * triton.cdiv(ffn, tile.columns)
    _swiglu[(min(tiles, tile.per_sm * _multiprocessors(x.device)),)](
        _descriptor(x, [tile.rows, tile.depth]),
        _descriptor(weight.view(2, ffn, hidden), [2, tile.columns, tile.depth]),
        _descriptor(out, [tile.rows, tile.columns]),
        n, HIDDEN=hidden, FFN=ffn, M=tile.rows, N=tile.columns, K=tile.depth, GROUP=tile.group, FLATTEN=tile.flatten,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _multiprocessors(device: torch.device) -> int:
    """Of the GPU; one where there is none, for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _descriptor(x: Tensor, block: list[int]) -> Any:
    """x as the memory accelerator takes it, in blocks."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


# n is no constant of the kernel: a pass of any length runs what was compiled at the start.
@triton.jit(do_not_specialize=["n"])
def _swiglu(
    x, weight, out, n, HIDDEN: tl.constexpr, FFN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """x [n, HIDDEN]; weight [2, FFN, HIDDEN]; out [n, FFN]. Each row is summed in one order, whatever n is.

    A block of gate's rows and one of up's are one operand: [2 N, K], loaded at once, fills the widest product that
    the tensor cores have. The halves of the result lie in the same threads.
    """
    rows = tl.cdiv(n, M)
    columns: tl.constexpr = (FFN + N - 1) // N
    for tile in tl.range(tl.program_id(0), rows * columns, tl.num_programs(0), flatten=FLATTEN):
        first = tile // (GROUP * columns) * GROUP
        group = tl.minimum(rows - first, GROUP)
        row = (first + tile % (GROUP * columns) % group) * M
        column = tile % (GROUP * columns) // group * N
        sums = tl.zeros([M, 2 * N], tl.float32)
        for k in tl.range(0, HIDDEN, K):
            halves = tl.reshape(weight.load([0, column, k]), [2 * N, K])
            sums = tl.dot(x.load([row, k]), tl.trans(halves), sums)
        gate, up = tl.split(tl.permute(tl.reshape(sums, [M, 2, N]), (0, 2, 1)))
        out.store([row, column], _gated(gate.to(out.dtype), up.to(out.dtype)))
