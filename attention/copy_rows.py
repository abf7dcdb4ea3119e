"""One small Triton kernel: rows of K and V from one place to another, in one launch."""

import triton
import triton.language as tl
from torch import Tensor


def copy_rows(k: Tensor, v: Tensor, to_k: Tensor, to_v: Tensor, source: Tensor, target: Tensor) -> None:
    """Row source[i] of k and v goes to row target[i] of to_k and to_v.

    k, v, to_k, to_v: contiguous, [.., kv_heads, head_dim]; source, target: [n] int32 on the same device, n >= 1.
    """
    width = k.shape[-2] * k.shape[-1]
    _copy_rows[(len(source),)](k, v, to_k, to_v, source, target, width, triton.next_power_of_2(width))


@triton.jit
def _copy_rows(k, v, to_k, to_v, source, target, width: tl.constexpr, block: tl.constexpr):
    i = tl.program_id(0)
    a = tl.load(source + i).to(tl.int64) * width
    b = tl.load(target + i).to(tl.int64) * width
    at = tl.arange(0, block)
    inside = at < width
    tl.store(to_k + b + at, tl.load(k + a + at, inside), inside)
    tl.store(to_v + b + at, tl.load(v + a + at, inside), inside)
