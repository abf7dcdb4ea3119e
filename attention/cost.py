"""What a plan costs, counted: tiles, keys scanned, FLOPs, bytes, launches.

A CTA takes one tile of query rows of one request and one KV head, and scans the keys that the tile can see.
`attention.timing` turns lengths into milliseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attention.layout import Ints
from attention.plans import HeadShape, Launch, MaskKind, MultiItem, PagedKv, Plan, Strategy

PACKED_ROWS = 128  # query rows of one request of packed_multi_item: one tile of the widest kernel
GROUP_ROWS = (16, 64)  # direct_ragged_grouped: requests up to 16 rows, up to 64, and longer ones launch apart


def _none() -> Ints:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class LaunchShape:
    """One launch by its lengths alone, for B requests.

    q_lens, kv_lens  [B]
    prefix_lens      [B]  under the multi-item mask: keys before the first item
    max_items        [B]  under the multi-item mask: longest item
    items            lengths of all items, request after request; of the fused strategy alone
    """

    mask: MaskKind
    paged: bool
    q_lens: Ints
    kv_lens: Ints
    prefix_lens: Ints = field(default_factory=_none)
    max_items: Ints = field(default_factory=_none)
    items: Ints = field(default_factory=_none)

    @property
    def rows(self) -> int:
        return int(self.q_lens.sum())


def shape_of(launch: Launch, page_size: int) -> LaunchShape:
    """A planned launch by its lengths."""
    multi = launch.multi_item
    return LaunchShape(
        launch.mask,
        isinstance(launch.kv, PagedKv),
        np.diff(launch.qo_indptr),
        launch.kv.lengths(page_size),
        _none() if multi is None else multi.prefix_len_ptr.astype(np.int32),
        _none() if multi is None else multi.max_item_len_ptr.astype(np.int32),
        _none() if multi is None or isinstance(launch.kv, PagedKv) else _item_lengths(multi),
    )


def _item_lengths(multi: MultiItem) -> Ints:
    """Lengths of all items, from the places of their tokens."""
    places = multi.token_pos_in_items_ptr
    begins = np.flatnonzero(places == 1)
    padding = np.append(places[1:] <= 1, True)  # an item ends before the next one, or before padding
    return (np.flatnonzero(padding & (places > 0)) - begins + 1).astype(np.int32)


def scans(shape: LaunchShape, tile: int) -> tuple[int, int, int]:
    """(tiles, keys scanned by all tiles, padded pairs): per KV head, `tile` query rows a tile.

    Padded pairs count a partial tile as a whole one, as the kernel computes it.
    """
    counts = -(-shape.q_lens // tile)
    request = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    q_len, kv_len = shape.q_lens[request].astype(np.int64), shape.kv_lens[request].astype(np.int64)
    first = kv_len - q_len + nth * tile
    last = np.minimum(first + tile, kv_len)
    if shape.mask in (MaskKind.NONE, MaskKind.CUSTOM):
        scanned = kv_len
    elif shape.mask is MaskKind.CAUSAL:
        scanned = last
    else:
        prefix, longest = shape.prefix_lens[request], shape.max_items[request]
        scanned = prefix + last - np.maximum(prefix, first - longest)  # what lies before its items, and its window
    return len(request), int(scanned.sum()), int(scanned.sum()) * tile


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one layer.

    ctas, kv_tokens_scanned  per KV head
    flops                    of QK and PV over all heads, partial tiles counted as they are
    bytes                    K and V as the CTAs read them (from wherever), Q in, output out
    launches                 kernels, merges included
    """

    ctas: int
    kv_tokens_scanned: int
    flops: float
    bytes: float
    launches: int


def cost(shapes: Sequence[LaunchShape], merges: int, q_tile: int, heads: HeadShape, itemsize: int = 2) -> Cost:
    """The counts of some launches at a tile of q_tile tokens."""
    counted = [scans(shape, q_tile) for shape in shapes]
    scanned = sum(s for _, s, _ in counted)
    rows = sum(shape.rows for shape in shapes)
    return Cost(
        ctas=sum(tiles for tiles, _, _ in counted),
        kv_tokens_scanned=scanned,
        flops=4.0 * heads.heads * heads.head_dim * sum(pairs for *_, pairs in counted),
        bytes=float(itemsize * heads.head_dim * (2 * heads.kv_heads * scanned + 2 * heads.heads * rows)),
        launches=len(shapes) + merges,
    )


def shapes_of(plan: Plan) -> list[LaunchShape]:
    """Every launch of a plan by its lengths."""
    return [shape_of(launch, plan.page_size) for launch in plan.launches]


def shapes(
    strategy: Strategy, prefix: int, cached: int, lengths: Ints, packed_rows: int = PACKED_ROWS
) -> list[LaunchShape]:
    """The launches that a strategy makes of one prefix and its items, without planning them.

    prefix: tokens; cached: how many of them have their K/V already; lengths: [M] tokens of the items.
    """
    lengths = np.asarray(lengths, np.int32)
    fresh = prefix - cached
    own = [_shape(MaskKind.CAUSAL, lengths, prefix + lengths)]
    inner = [_shape(MaskKind.CAUSAL, [fresh], [prefix])] if fresh else []
    match strategy:
        case Strategy.NAIVE:
            return [_shape(MaskKind.CAUSAL, prefix + lengths, prefix + lengths)]
        case Strategy.DIRECT_RAGGED:
            return [
                _shape(MaskKind.CAUSAL, lengths + np.eye(1, len(lengths), dtype=np.int32)[0] * fresh, prefix + lengths)
            ]
        case Strategy.SPLIT_CACHE:
            return inner + own
        case Strategy.DIRECT_RAGGED_GROUPED:
            return _grouped(inner + own)
        case Strategy.CASCADE | Strategy.CASCADE_CONTIGUOUS:
            paged = strategy is Strategy.CASCADE
            shared = [_shape(MaskKind.NONE, [lengths.sum()], [prefix], paged)] if prefix else []
            first = [_shape(MaskKind.CAUSAL, [fresh], [prefix], paged)] if fresh else []
            return [*first, *shared, _shape(MaskKind.CAUSAL, lengths, lengths, paged)]
        case Strategy.MULTI_ITEM:
            total = int(lengths.sum())
            return [_items([fresh + total], [prefix + total], prefix, [int(lengths.max())])]
        case Strategy.PACKED_MULTI_ITEM:
            return [_packed(prefix, fresh, lengths, packed_rows)]
        case Strategy.FUSED:
            q, kv, longest = [int(lengths.sum())], [prefix + int(lengths.sum())], [int(lengths.max())]
            if fresh:
                q, kv, longest = [fresh, *q], [prefix, *kv], [1, *longest]
            return [_items(q, kv, prefix, longest, paged=False, items=lengths)]
        case _:
            total = int(lengths.sum())
            return [_shape(MaskKind.CUSTOM, [fresh + total], [prefix + total])]


def _shape(mask: MaskKind, q_lens: Any, kv_lens: Any, paged: bool = True) -> LaunchShape:
    return LaunchShape(mask, paged, np.asarray(q_lens, np.int32), np.asarray(kv_lens, np.int32))


def _items(
    q_lens: Any, kv_lens: Any, prefix: int, longest: Any, paged: bool = True, items: Ints | None = None
) -> LaunchShape:
    q = np.asarray(q_lens, np.int32)
    return LaunchShape(
        MaskKind.MULTI_ITEM,
        paged,
        q,
        np.asarray(kv_lens, np.int32),
        np.full_like(q, prefix),
        np.asarray(longest, np.int32),
        _none() if items is None else items,
    )


def _grouped(parts: Sequence[LaunchShape]) -> list[LaunchShape]:
    q, kv = (np.concatenate([getattr(part, name) for part in parts]) for name in ("q_lens", "kv_lens"))
    group = np.searchsorted(GROUP_ROWS, q)
    return [_shape(MaskKind.CAUSAL, q[group == g], kv[group == g]) for g in np.unique(group)]


def _packed(prefix: int, fresh: int, lengths: Ints, packed_rows: int) -> LaunchShape:
    begins, ends = bins(lengths, packed_rows)
    total = np.concatenate([[0], np.cumsum(lengths)])
    rows = total[ends] - total[begins]
    longest = np.maximum.reduceat(lengths, begins)
    if fresh:
        rows, longest = np.concatenate([[fresh], rows]), np.concatenate([[1], longest])
    kv = prefix + rows
    if fresh:
        kv[0] = prefix
    return _items(rows, kv, prefix, longest)


def bins(lengths: Ints, rows: int) -> tuple[Ints, Ints]:
    """[begin, end) of consecutive items filled up to `rows` tokens; a longer item is a bin of its own."""
    total = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]  # a list: it is searched number by number
    begins, begin = [], 0
    while begin < len(lengths):
        begins.append(begin)
        begin = max(bisect_right(total, total[begin] + rows, begin) - 1, begin + 1)
    ends = [*begins[1:], len(lengths)]
    return np.array(begins, np.int32), np.array(ends, np.int32)
