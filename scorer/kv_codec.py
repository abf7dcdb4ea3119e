"""K/V of a page as bytes for the tiers below the GPU: as it is, or in eight bits."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Codec(ABC):
    """Between values and bytes, on whatever device they are. Sizes follow from the shapes alone."""

    name: str

    @abstractmethod
    def size(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Bytes of one page of K or V of one layer. shape: [page_size, kv_heads, head_dim]."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """[pages, page_size, kv_heads, head_dim] -> [pages, bytes] uint8"""

    @abstractmethod
    def decode(self, rows: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """[pages, bytes] uint8 -> [pages, *shape]"""


class Exact(Codec):
    """Byte for byte."""

    name = "exact"

    def size(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return shape.numel() * dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        return _raw(values)

    def decode(self, rows: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return _as(rows, dtype, shape)


class Fp8(Codec):
    """e4m3 with one scale a page, layer and head: half the bytes of bf16, for a small drift of scores."""

    name = "fp8"
    LARGEST = 448.0  # of e4m3

    def size(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return shape.numel() + self._scale_bytes(shape)

    def _scale_bytes(self, shape: torch.Size) -> int:
        return torch.float32.itemsize * shape[-2]

    def encode(self, values: Tensor) -> Tensor:
        whole = values.float()
        scale = (whole.abs().amax(dim=(1, 3)) / self.LARGEST).clamp(min=1e-12)  # [pages, heads]
        small = (whole / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        return torch.cat((_raw(scale), _raw(small)), 1)

    def decode(self, rows: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        at = self._scale_bytes(shape)
        scale = _as(rows[:, :at], torch.float32, shape[-2:-1])
        small = _as(rows[:, at:], torch.float8_e4m3fn, shape)
        return (small.float() * scale[:, None, :, None]).to(dtype)


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Exact(), Fp8())}


def _raw(tensor: Tensor) -> Tensor:
    """[pages, bytes]"""
    return tensor.contiguous().flatten(1).view(torch.uint8)


def _as(rows: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """[pages, *shape]"""
    return rows.contiguous().view(dtype).view(-1, *shape)
