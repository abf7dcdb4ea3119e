"""A row of `prefixrank bench attention`, and the article's figures that it is held against."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention.plans import Strategy

HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 8, 128, 16

# Published with the article: P, S, M -> ms of naive, split_cache, direct_ragged, cascade, multi_item, custom_mask.
ARTICLE_STRATEGIES = (
    Strategy.NAIVE,
    Strategy.SPLIT_CACHE,
    Strategy.DIRECT_RAGGED,
    Strategy.CASCADE,
    Strategy.MULTI_ITEM,
    Strategy.CUSTOM_MASK,
)
ARTICLE = {
    (96, 4, 2): (0.037, 0.049, 0.036, 0.114, 0.038, 0.048),
    (96, 4, 32): (0.094, 0.060, 0.043, 0.115, 0.059, 0.071),
    (96, 256, 2): (0.086, 0.137, 0.113, 0.163, 0.131, 0.159),
    (96, 256, 32): (0.437, 0.404, 0.346, 0.505, 0.551, 12.508),
    (8196, 4, 2): (9.883, 5.361, 5.425, 5.452, 5.295, 12.668),
    (8196, 4, 32): (145.487, 5.909, 7.422, 5.557, 5.448, 13.007),
    (8196, 256, 2): (10.469, 6.039, 5.953, 6.312, 5.906, 14.085),
    (8196, 256, 32): (154.564, 14.692, 14.094, 15.245, 14.133, 51.788),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy at one point. kernel: fa2, fa3, or auto (launch by launch); times in ms of one layer."""

    table: str
    prefix: int
    item: int
    items: int
    dtype: str
    strategy: str
    packed_rows: int
    kernel: str
    event_mean: float
    event_median: float
    gpu: float
    predicted: float

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.table, self.prefix, self.item, self.items, self.strategy, self.packed_rows, self.kernel)


def read_rows(path: Path) -> list[Row]:
    """Every row measured so far."""
    if not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
