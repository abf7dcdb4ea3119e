"""Kept pages as rows of bytes in host memory, and back, beside the passes that run meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from attention.kv_pages import KvPages
from attention.layout import Ints
from scorer.kv_codec import Codec

PORTION = 64  # pages copied at a time: enough to keep the bus busy, little beside the pages themselves

Shapes = Sequence[tuple[torch.Size, torch.Size]]  # of one page of each layer's K and V


class PageCopies:
    """A page is one row: K, then V, layer after layer, encoded.

    On a GPU a portion of pages is gathered or scattered layer by layer on a stream of its own, and crosses the bus
    through pinned memory; passes go on meanwhile. Callers hold the pages: no running pass reads or writes those that
    are filled, or writes those that are read. Threads may share it.
    """

    def __init__(
        self, kv_pages: KvPages, codec: Codec, shapes: Shapes, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> None:
        """Makes the layers' pages where no pass has: what a restart finds in a tier, the first request can use."""
        self._kv_pages = kv_pages
        self._codec = codec
        self._parts = [shape for pair in shapes for shape in pair]
        self._dtype = dtype
        self._lock = Lock()
        self._stream: torch.cuda.Stream | None = None
        sizes = [codec.size(shape, dtype) for shape in self._parts]
        self._bounds = np.cumsum([0, *sizes]).tolist()
        for layer, pair in enumerate(shapes):
            k, v = (torch.empty(0, *shape[1:], dtype=dtype, device=device) for shape in pair)
            kv_pages.layer(layer, k, v)

    @property
    def row_bytes(self) -> int:
        """Of one page."""
        return int(self._bounds[-1])

    @torch.inference_mode()
    def out(self, pages: Ints) -> list[Tensor]:
        """[row_bytes] uint8 in host memory for each page; returns when they are there."""
        rows: list[Tensor] = []
        for first in range(0, len(pages), PORTION):
            with self._beside_the_passes():
                rows += _to_host(self._gathered(pages[first : first + PORTION]))
        return rows

    @torch.inference_mode()
    def into(self, pages: Ints, rows: Sequence[Tensor]) -> None:
        """Fills the pages with what `out` gave; returns when they may be read."""
        for first in range(0, len(pages), PORTION):
            with self._beside_the_passes():
                part = slice(first, first + PORTION)
                self._scatter(pages[part], _to_device(rows[part], self._device))

    @property
    def _device(self) -> torch.device:
        return self._kv_pages.tensors()[0].device

    @contextmanager
    def _beside_the_passes(self) -> Iterator[None]:
        """Work enqueued inside has ended afterwards."""
        if self._device.type != "cuda":
            yield
            return
        with self._lock:
            self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    def _gathered(self, pages: Ints) -> Tensor:
        """[pages, row_bytes] on the pages' device"""
        chosen = self._chosen(pages)
        rows = torch.empty(len(pages), self.row_bytes, dtype=torch.uint8, device=self._device)
        for held, begin, end in self._layers():
            rows[:, begin:end] = self._codec.encode(held[chosen])
        return rows

    def _scatter(self, pages: Ints, rows: Tensor) -> None:
        chosen = self._chosen(pages)
        for held, begin, end in self._layers():
            held[chosen] = self._codec.decode(rows[:, begin:end], held.shape[1:], self._dtype)

    def _layers(self) -> Iterator[tuple[Tensor, int, int]]:
        """K and V of each layer, and where they stand in a row."""
        return zip(self._kv_pages.tensors(), self._bounds[:-1], self._bounds[1:], strict=True)

    def _chosen(self, pages: Ints) -> Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self._device)


def _to_host(rows: Tensor) -> list[Tensor]:
    if rows.device.type == "cpu":
        return list(rows)
    pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    pinned.copy_(rows, non_blocking=True)
    return list(pinned)


def _to_device(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """[rows, row_bytes]; rows that are pinned already cross the bus as they are."""
    if device.type == "cpu":
        return torch.stack(list(rows))
    made = torch.empty(len(rows), len(rows[0]), dtype=torch.uint8, device=device)
    for to, row in zip(made, rows, strict=True):
        to.copy_(row if row.is_pinned() else row.pin_memory(), non_blocking=True)
    return made
