"""The paged K/V tensors."""

from __future__ import annotations

import torch
from torch import Tensor


class KvPages:
    """For each layer, K and V in `pages` pages of `page_size` tokens; slot = page * page_size + offset.

    A layer's tensors take the shape of the first rows written to them, as layers of one model may differ in heads.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """[pages, page_size, kv_heads, head_dim] each, made like the rows k and v if the layer has none yet."""
        if layer not in self._layers:
            pages = (self.pages, self.page_size)
            self._layers[layer] = (k.new_empty((*pages, *k.shape[1:])), v.new_empty((*pages, *v.shape[1:])))
        return self._layers[layer]

    @torch.inference_mode()
    def zero(self, first_page: int) -> None:
        """Clears every page from `first_page` on."""
        for held in self._layers.values():
            for cache in held:
                cache[first_page:] = 0

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v: [len(slots), kv_heads, head_dim]"""
        held_k, held_v = self.layer(layer, k, v)
        held_k.flatten(0, 1)[slots] = k
        held_v.flatten(0, 1)[slots] = v

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """[len(slots), kv_heads, head_dim] each"""
        k, v = self._layers[layer]
        return torch.index_select(k.flatten(0, 1), 0, slots), torch.index_select(v.flatten(0, 1), 0, slots)

    @property
    def layers(self) -> int:
        """How many have their tensors."""
        return len(self._layers)

    def tensors(self) -> list[Tensor]:
        """K, then V, of layer after layer, [pages, page_size, kv_heads, head_dim] each."""
        return [held for _, pair in sorted(self._layers.items()) for held in pair]
