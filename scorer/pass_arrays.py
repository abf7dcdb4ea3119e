"""What a pass of the hand-fused path needs on the device, as one array of ints in the shape of its CUDA graph. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention.cuts import Cut
from attention.layout import Ints
from attention.tiles import BEFORE, COLUMNS, OWN, OWN_END, PART, PROCESSORS, ROW, ROWS, WAVES, Tiles

LABELS = 16  # distinct label tokens of a pass whose logits a graph computes
SPLIT_TOKENS = 2_048  # a pass of more rows fills the machine without splitting a tile's keys
READ_SHARE = 8  # graphs are made for one read in so many tokens, and for a read at every token
ALIGNED_ITEMS = 2_048  # items and prefixes of a pass whose items all begin tiles
CACHED_TOKENS = 65_536  # cached keys that one pass may name


class GraphKey(NamedTuple):
    """What a captured graph is made for.

    tokens, reads  rows of the pass and rows that are read, padding included
    paged          reads cached prefixes or keeps new ones
    split          some tiles are computed in parts
    """

    tokens: int
    reads: int
    paged: bool
    split: bool


class Part(NamedTuple):
    """One array's place among the ints."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class PassArrays:
    """A pass, before it is padded.

    ids, positions  [n]
    reads           [r]  rows
    labels          [l]  distinct token ids, at most LABELS of them; empty where the logits are gathered read by read
    keep_rows, keep_slots  [k]  rows whose K/V outlives the pass, and where
    """

    ids: Ints
    positions: Ints
    reads: Ints
    labels: Ints
    tiles: Tiles
    keep_rows: Ints
    keep_slots: Ints

    @property
    def paged(self) -> bool:
        return bool(len(self.keep_rows) or len(self.tiles.slots))


def token_buckets(most: int) -> tuple[int, ...]:
    """Sizes up to `most` tokens: steps of an eighth or less, so that padding stays small."""
    sizes = [32, 64, 128, 192, *range(256, 2_048, 128), *range(2_048, 4_096, 256), *range(4_096, most, 512)]
    return (*[size for size in sizes if size < most], most)


def tile_capacity(tokens: int, cut: Cut, split: bool) -> int:
    """Tiles that a graph of so many tokens has room for: full ones, and a partial one for each of many requests."""
    partial = min(tokens, ALIGNED_ITEMS) if cut.aligned else 16 + tokens // 32
    return 2 * -(-tokens // cut.tokens) + partial + (part_capacity(tokens, cut) if split else 0)


def part_capacity(tokens: int, cut: Cut) -> int:
    """Parts that `attention.tiles` may cut a pass of at most SPLIT_TOKENS into."""
    return WAVES * PROCESSORS // cut.columns + 1 + tile_capacity(min(tokens, SPLIT_TOKENS), cut, split=False)


def graph_key(arrays: PassArrays, buckets: tuple[int, ...], cut: Cut) -> GraphKey | None:
    """The smallest graph that takes the pass, None where none does."""
    if len(arrays.tiles.slots) > CACHED_TOKENS:
        return None
    split = len(arrays.tiles.merges) > 0
    least = max(len(arrays.ids), len(arrays.keep_rows))  # a row may be kept in several pages
    for tokens in buckets[bisect_left(buckets, least) :]:
        padding = -(-(tokens - len(arrays.ids)) // cut.tokens)
        if len(arrays.tiles.tiles) + padding <= tile_capacity(tokens, cut, split):
            few = few_reads(tokens)
            return GraphKey(tokens, few if len(arrays.reads) <= few else tokens, arrays.paged, split)
    return None


def few_reads(tokens: int) -> int:
    """Reads of the usual graph of so many tokens."""
    return min(tokens, max(32, tokens // READ_SHARE))


@cache
def places(key: GraphKey, cut: Cut) -> tuple[tuple[Part, ...], int]:
    """Where each array of such a graph lies, and the ints of all of them."""
    tiles = tile_capacity(key.tokens, cut, key.split)
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("ids", (key.tokens,)),
        ("positions", (key.tokens,)),
        ("item_start", (key.tokens,)),
        ("reads", (key.reads,)),
        ("labels", (LABELS,)),
        ("tiles", (tiles, COLUMNS)),
        ("last_tiles", (tiles, COLUMNS)),
        ("runs", (4 * tiles, 2)),
        ("merges", (tiles if key.split else 1, 4)),
        ("keep_rows", (key.tokens if key.paged else 1,)),
        ("keep_slots", (key.tokens if key.paged else 1,)),
        ("cached", (1,)),
        ("slots", (CACHED_TOKENS if key.paged else 1,)),
    ]
    parts, begin = [], 0
    for name, shape in shapes:
        end = begin + int(np.prod(shape))
        parts.append(Part(name, shape, begin, end))
        begin = -(-end // 4) * 4
    return tuple(parts), begin


def fill(arrays: PassArrays, key: GraphKey, parts: tuple[Part, ...], cut: Cut, into: Ints) -> int:
    """Writes the padded pass into `into` and returns how many ints of it are used.

    Padding rows see themselves alone; padding tiles have no rows; padding reads repeat the first one.
    """
    n, tiles = len(arrays.ids), arrays.tiles.tiles
    given: dict[str, tuple[Sequence[Ints], int]] = {  # one after the other, and what follows them
        "ids": ([arrays.ids], 0),
        "positions": ([arrays.positions], 0),
        "item_start": ([arrays.tiles.item_start, np.arange(n, key.tokens, dtype=np.int32)], 0),
        "reads": ([arrays.reads], int(arrays.reads[0]) if len(arrays.reads) else 0),
        "labels": ([arrays.labels], 0),
        "tiles": ([tiles, _padding_tiles(n, key.tokens, cut.tokens)], 0),
        "last_tiles": ([tiles[_read(arrays)]], 0),
        "runs": ([arrays.tiles.runs], 0),
        "merges": ([arrays.tiles.merges], 0),
        "keep_rows": ([arrays.keep_rows], -1),
        "keep_slots": ([arrays.keep_slots], 0),
        "cached": ([np.array([len(arrays.tiles.slots)], np.int32)], 0),
    }
    slots = parts[-1]
    for part in parts[:-1]:
        filled, padding = given[part.name]
        into[_put(filled, part, into) : part.end] = padding
    return max(slots.begin + 1, _put([arrays.tiles.slots], slots, into))


def _put(filled: Sequence[Ints], part: Part, into: Ints) -> int:
    """Writes arrays one after the other and returns where they end."""
    end = part.begin
    for array in filled:
        begin, end = end, end + array.size
        assert end <= part.end, f"{part.name} has {end - part.begin} ints, its graph {part.shape}"
        into[begin:end] = array.ravel()
    return end


def _read(arrays: PassArrays) -> NDArray[np.bool_]:
    """Which tiles hold a row that is read; of a split tile, all parts."""
    first, rows, reads = arrays.tiles.tiles[:, ROW], arrays.tiles.tiles[:, ROWS], np.sort(arrays.reads)
    wanted: NDArray[np.bool_] = np.searchsorted(reads, first + rows) > np.searchsorted(reads, first)
    return wanted


def _padding_tiles(first: int, tokens: int, tile_tokens: int) -> Ints:
    begin = np.arange(first, tokens, tile_tokens, dtype=np.int32)
    tiles = np.zeros((len(begin), COLUMNS), np.int32)
    end = np.minimum(begin + tile_tokens, tokens)
    tiles[:, ROW], tiles[:, ROWS] = begin, end - begin
    tiles[:, BEFORE], tiles[:, OWN], tiles[:, OWN_END], tiles[:, PART] = begin, begin, end, -1
    return tiles
