"""Rows in FP8, as the hand-fused path hands them from a kernel to the next matrix product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


class Quantized(NamedTuple):
    """values [n, width] in FP8, and the fp32 scale [n, 1] that each row is to be multiplied by."""

    values: Tensor
    scales: Tensor


Rows = Tensor | Quantized
