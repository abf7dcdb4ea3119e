"""The position-wise operators of the hand-fused path, twice: in Triton for a GPU, in torch for everything else.

They round where transformers' modules round, so that both bodies and the modules agree to the last bits of the type.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from scorer.quantized import FP8, FP8_MAX, Quantized, Rows

HOPPER = (9, 0)  # compute capability
# Of a pass, from which on `swiglu`'s kernel is used. On an H200 it takes 0.94, 0.87 and 0.96 of the time of product and
# `silu_mul` at 1,024 rows of Qwen3-0.6B, 4B and 8B, 0.86, 0.93 and 0.95 at 16,384, and 1.05 to 1.35 at 256.
SWIGLU_ROWS = 1024
BLOCK_ROWS = 4096  # the bodies in torch take so many rows at a time: their temporaries are in fp32


def rms_norm(x: Tensor, weight: Tensor, eps: float, quantized: bool = False) -> Rows:
    """[n, width] like x: x over its root mean square, times weight."""
    if x.is_cuda:
        from scorer import fused_triton

        return fused_triton.rms_norm(x, None, weight, eps, quantized)
    return _finish(_norm(x, weight, eps), quantized)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, quantized: bool = False) -> Rows:
    """x += delta in place; [n, width] the norm of the sum."""
    if x.is_cuda:
        from scorer import fused_triton

        return fused_triton.rms_norm(x, delta, weight, eps, quantized)
    x += delta
    return _finish(_norm(x, weight, eps), quantized)


def quantize(x: Tensor) -> Quantized:
    """Each row by its own largest value."""
    if x.is_cuda:
        from scorer import fused_triton

        return fused_triton.quantize(x)
    scales = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return Quantized((x.float() / scales).to(FP8), scales)


def _finish(x: Tensor, quantized: bool) -> Rows:
    return quantize(x) if quantized else x


def rotate(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    table: Tensor,
    positions: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    """Norms each query and key head (where the family does) and turns it by its position, in place.

    qkv [n, (heads + 2 kv_heads) * head_dim]; table [positions, head_dim] fp32, cosines then sines; positions [n] int32
    """
    if qkv.is_cuda:
        from scorer import fused_triton

        fused_triton.rotate(qkv, heads, kv_heads, table, positions, norms, eps)
        return
    for begin in range(0, len(qkv), BLOCK_ROWS):
        rows = slice(begin, begin + BLOCK_ROWS)
        _rotate(qkv[rows], heads, kv_heads, table, positions[rows], norms, eps)


def _rotate(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    table: Tensor,
    positions: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    head_dim = table.shape[1]
    x = qkv[:, : (heads + kv_heads) * head_dim].view(len(qkv), heads + kv_heads, head_dim)
    if norms is not None:
        x = torch.cat([_norm(x[:, :heads], norms[0], eps), _norm(x[:, heads:], norms[1], eps)], dim=1)
    cos, sin = table[positions.long()].chunk(2, dim=1)
    first, second = x.float().chunk(2, dim=2)
    turned = (first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None])
    qkv[:, : (heads + kv_heads) * head_dim] = torch.cat(turned, dim=2).to(qkv.dtype).flatten(1)


def silu_mul(gate_up: Tensor, quantized: bool = False) -> Rows:
    """[n, width] from [n, 2 width]: silu of the first half times the second."""
    if gate_up.is_cuda:
        from scorer import fused_triton

        return fused_triton.silu_mul_quantized(gate_up) if quantized else fused_triton.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return _finish(functional.silu(gate) * up, quantized)


def swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """`silu_mul` of the product: [n, ffn] from x [n, hidden] and weight [2 ffn, hidden], both contiguous.

    On a GPU the products are never written. A row's result depends on no other row, nor on how many there are.
    """
    if x.is_cuda:
        from scorer import fused_triton

        return fused_triton.swiglu(x, weight)
    return cast(Tensor, silu_mul(functional.linear(x, weight)))


def swiglu_rows(weight: Tensor) -> int | None:
    """Rows of a pass from which on `swiglu` is faster than a product and `silu_mul`; None: it has no kernel here.

    weight: [2 ffn, hidden]
    """
    if not weight.is_cuda or torch.cuda.get_device_capability(weight.device) != HOPPER:
        return None
    fits = weight.is_contiguous() and weight.shape[1] % 8 == 0 and len(weight) % 16 == 0
    return SWIGLU_ROWS if fits and weight.dtype in (torch.bfloat16, torch.float16) else None


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if len(x) > BLOCK_ROWS:
        out = torch.empty_like(x)
        for begin in range(0, len(x), BLOCK_ROWS):
            out[begin : begin + BLOCK_ROWS] = _norm(x[begin : begin + BLOCK_ROWS], weight, eps)
        return out
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
