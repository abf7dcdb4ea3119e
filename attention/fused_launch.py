"""One launch of the `fused` strategy, prepared once a pass and run once a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attention.fused_kernel import Blocks, DeviceTiles, Parts, fused, gather_rows
from attention.layout import Ints
from attention.plans import HeadShape, Launch, MaskKind, RaggedKv
from attention.tiles import tile

Upload = Callable[[NDArray[Any]], Tensor]


def is_fused(launch: Launch) -> bool:
    """Whether a launch is for this kernel: FlashInfer's have item masks over pages only."""
    return launch.mask is MaskKind.MULTI_ITEM and isinstance(launch.kv, RaggedKv)


@dataclass(frozen=True, slots=True, eq=False)
class FusedLaunch:
    """A launch, cut into tiles and uploaded. slots, count: of cached keys, None where there are none."""

    tiles: DeviceTiles
    slots: Tensor | None
    count: Tensor | None
    parts: int
    blocks: Blocks
    scale: float

    @classmethod
    def of(
        cls, launch: Launch, rows: int, place: Ints, cached_slots: Ints, shape: HeadShape, upload: Upload
    ) -> FusedLaunch:
        """rows, place, cached_slots: as for `attention.tiles.tile`. upload: flat."""
        blocks = Blocks.of(shape.head_dim)
        made = tile(launch, rows, place, cached_slots, blocks.cut(shape.heads, shape.kv_heads))
        runs = made.runs if len(made.runs) else np.zeros((1, 2), np.int32)
        tiles, stretches, start = (upload(x).view(x.shape) for x in (made.tiles, runs, made.item_start))
        merges = upload(made.merges).view(made.merges.shape) if made.parts else None
        return cls(
            DeviceTiles(tiles, stretches, start, merges),
            upload(made.slots) if len(made.slots) else None,
            upload(np.array([len(made.slots)], np.int32)) if len(made.slots) else None,
            made.parts,
            blocks,
            shape.scale,
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor, held: tuple[Tensor, Tensor], out: Tensor) -> None:
        """q, out [rows, heads, head_dim]; k, v [rows, kv_heads, head_dim]; held: a layer's pages."""
        cached = None
        if self.slots is not None and self.count is not None:
            cached = k.new_empty((len(self.slots), *k.shape[1:])), v.new_empty((len(self.slots), *v.shape[1:]))
            gather_rows(*held, *cached, self.slots, self.count)
        parts = Parts.make(self.parts, k.shape[1], self.blocks.rows, k.shape[2], q.device) if self.parts else None
        fused(q, k, v, cached, self.tiles, parts, out, self.scale, self.blocks)
