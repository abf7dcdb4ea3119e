"""What computes a pass's attention, and how one is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from attention.layout import Layout
from attention.plans import HeadShape, MaskKey, Pages, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from attention.kv_pages import KvPages
    from attention.timing import TimeModel


# (layer, q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim], scale, key) -> [rows, heads, head_dim]
Attend = Callable[[int, "Tensor", "Tensor", "Tensor", float, MaskKey], "Tensor"]


class Attention(ABC):
    """Runs any plan of a pass. One object lives as long as its engine.

    isolates_nan  NaN in the keys or values that a row does not see leaves the row as it is
    """

    name: str
    isolates_nan: bool

    @abstractmethod
    def begin(self, layout: Layout, pages: Pages, plans: Mapping[MaskKey, Plan]) -> Attend:
        """Prepares one pass, once for all of its layers; the answer is called layer after layer."""

    @abstractmethod
    def scrub(self, first_page: int) -> None:
        """Removes what a pass may have left in pages from `first_page` on, after it met NaN."""


def make(
    backend: str, kv_pages: KvPages, shape: HeadShape | None = None, time_model: TimeModel | None = None
) -> Attention:
    """The attention called `backend`. Heavy imports happen here, for the one that is asked for.

    shape: what all layers have in common; None if they differ. time_model: chooses the kernel of each launch.
    Raises ValueError saying what to use instead.
    """
    if backend == "torch":
        from attention.torch_backend import TorchAttention

        return TorchAttention(kv_pages)
    if backend == "flashinfer":
        if shape is None:
            raise ValueError("the layers of this model differ in their heads: use the torch backend")
        try:
            from attention.flashinfer_backend import FlashInferAttention
        except ImportError as error:
            raise ValueError(f"FlashInfer is not installed ({error}): pip install 'prefixrank[gpu]'") from error

        return FlashInferAttention(kv_pages, shape, time_model)
    raise ValueError(f"unknown attention backend {backend!r}: use 'torch' or 'flashinfer'")
