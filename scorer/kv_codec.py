"""K/V of a page as bytes, layer after layer, for the tiers below the GPU: as it is, or in eight bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

Layers = list[tuple[Tensor, Tensor]]  # K and V of each layer, [pages, page_size, kv_heads, head_dim]
Shapes = Sequence[tuple[torch.Size, torch.Size, torch.dtype]]  # of one page of each layer


class Codec(ABC):
    """Between tensors and bytes. Sizes follow from the shapes alone."""

    name: str

    @abstractmethod
    def size(self, shapes: Shapes) -> int:
        """Bytes of one page."""

    @abstractmethod
    def encode(self, layers: Layers) -> list[bytes]:
        """The bytes of each page."""

    @abstractmethod
    def decode(self, contents: Sequence[bytes], shapes: Shapes) -> Layers:
        """The tensors of these pages."""


class Exact(Codec):
    """Byte for byte."""

    name = "exact"

    def size(self, shapes: Shapes) -> int:
        return sum((k.numel() + v.numel()) * dtype.itemsize for k, v, dtype in shapes)

    def encode(self, layers: Layers) -> list[bytes]:
        parts = [_raw(tensor) for pair in layers for tensor in pair]
        return [row.numpy().tobytes() for row in torch.cat(parts, 1)]

    def decode(self, contents: Sequence[bytes], shapes: Shapes) -> Layers:
        rows = _rows(contents)
        sizes = [shape.numel() * dtype.itemsize for k, v, dtype in shapes for shape in (k, v)]
        parts = iter(torch.split(rows, sizes, 1))
        return [(_as(next(parts), dtype, k), _as(next(parts), dtype, v)) for k, v, dtype in shapes]


class Fp8(Codec):
    """e4m3 with one scale a page, layer and head: half the bytes of bf16, for a small drift of scores."""

    name = "fp8"
    LARGEST = 448.0  # of e4m3

    def size(self, shapes: Shapes) -> int:
        return sum(shape.numel() + 4 * shape[-2] for k, v, _ in shapes for shape in (k, v))

    def encode(self, layers: Layers) -> list[bytes]:
        parts = [part for pair in layers for tensor in pair for part in self._quantised(tensor)]
        return [row.numpy().tobytes() for row in torch.cat(parts, 1)]

    def _quantised(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        values = tensor.float()
        scale = (values.abs().amax(dim=(1, 3)) / self.LARGEST).clamp(min=1e-12)  # [pages, heads]
        small = (values / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        return _raw(scale), _raw(small)

    def decode(self, contents: Sequence[bytes], shapes: Shapes) -> Layers:
        rows = _rows(contents)
        sizes = [n for k, v, _ in shapes for shape in (k, v) for n in (4 * shape[-2], shape.numel())]
        parts = iter(torch.split(rows, sizes, 1))

        def restored(shape: torch.Size, dtype: torch.dtype) -> Tensor:
            scale = _as(next(parts), torch.float32, shape[-2:-1])
            small = _as(next(parts), torch.float8_e4m3fn, shape)
            return (small.float() * scale[:, None, :, None]).to(dtype)

        return [(restored(k, dtype), restored(v, dtype)) for k, v, dtype in shapes]


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Exact(), Fp8())}


def _raw(tensor: Tensor) -> Tensor:
    """[pages, bytes]"""
    return tensor.contiguous().flatten(1).view(torch.uint8)


def _rows(contents: Sequence[bytes]) -> Tensor:
    return torch.stack([torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents])


def _as(raw: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return raw.contiguous().view(dtype).view(-1, *shape)
