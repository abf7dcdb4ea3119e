"""The paged K/V tensors that outlive a pass."""

from __future__ import annotations

import torch
from torch import Tensor


class KvPages:
    """For each layer, K and V of `pages * page_size` slots, slot = page * page_size + offset.

    A layer's tensors take the shape of the first rows written to them, as layers of one model may differ in heads.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v: [len(slots), kv_heads, head_dim]"""
        if layer not in self._layers:
            shape = (self.pages * self.page_size, *k.shape[1:])
            self._layers[layer] = (k.new_empty(shape), v.new_empty((shape[0], *v.shape[1:])))
        held_k, held_v = self._layers[layer]
        held_k[slots] = k
        held_v[slots] = v

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """[len(slots), kv_heads, head_dim] each"""
        k, v = self._layers[layer]
        return torch.index_select(k, 0, slots), torch.index_select(v, 0, slots)
