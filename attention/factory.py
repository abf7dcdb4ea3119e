"""How an attention is made by name. Heavy imports happen here, for the one that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attention.plans import HeadShape
from attention.strategy import Attention

if TYPE_CHECKING:
    from attention.kv_pages import KvPages
    from attention.timing import TimeModel


def make(
    backend: str, kv_pages: KvPages, shape: HeadShape | None = None, time_model: TimeModel | None = None
) -> Attention:
    """The attention called `backend`.

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
