"""From requests to one pass of arrays, and from the pass's reads back to requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from attention.cost import PACKED_ROWS
from attention.layout import NONE, Ints, Layout, LayoutError, indptr, ranges
from attention.plans import Strategy
from batching.items import Items
from batching.types import PackedBatch, Reads, Scored, Shares, TokenizedRequest


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The part of one request that goes into a pass.

    items       indices into request.items
    strategies  one an item
    cached      leading prefix tokens whose K/V is in `pages`
    pages       ids of the pages that keep K/V of the prefix beyond the pass, or None. They hold the whole prefix or, in
                whole pages, a beginning of it; groups that begin with the same pages share what is in them
    packed_rows rows of a packed_multi_item request
    """

    request: TokenizedRequest
    items: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    cached: int = 0
    pages: Ints | None = None
    packed_rows: int = PACKED_ROWS

    def __post_init__(self) -> None:
        assert self.items, "a group has at least one item"
        assert len(self.items) == len(self.strategies), "one strategy an item"
        assert self.cached == 0 or self.pages is not None, "a cached prefix lies in pages"
        naive = {strategy is Strategy.NAIVE for strategy in self.strategies}
        assert len(naive) == 1, "a naive item has a prefix of its own: naive goes for all items of a request or none"


def fold(items: Items) -> tuple[Items, Ints]:
    """Each distinct item once, and for every item given the place of its equal: equal documents get equal bits."""
    keys = items.keys
    if len(set(keys)) == len(keys):
        return items, np.arange(len(keys), dtype=np.int32)
    places: dict[bytes, int] = {}
    index = np.array([places.setdefault(key, len(places)) for key in keys], np.int32)
    return items.take(np.unique(index, return_index=True)[1].tolist()), index


def pack(groups: Sequence[Group], page_size: int | None = None) -> PackedBatch:
    """One pass over all groups; Share.request counts in `groups`.

    page_size: needed where pages are shared between groups, or hold less than a prefix.
    """
    rows = _Rows()
    kept: dict[int, list[int]] = {}  # groups by their first page
    strategies = [set(group.strategies) for group in groups]
    for number, group in enumerate(groups):
        if Strategy.NAIVE in strategies[number]:
            for item, strategy in zip(group.items, group.strategies, strict=True):
                single = replace(group, items=(item,), strategies=(strategy,))
                rows.items(number, single, rows.prefix(group.request.prefix))
        elif group.pages is None or not len(group.pages):
            rows.items(number, group, rows.prefix(group.request.prefix))
        else:
            kept.setdefault(int(group.pages[0]), []).append(number)
    for sharing in kept.values():
        _tree(rows, groups, sharing, page_size)
    packed = (
        group.packed_rows for group, of in zip(groups, strategies, strict=True) if Strategy.PACKED_MULTI_ITEM in of
    )
    return rows.batch(next(packed, PACKED_ROWS))


def _tree(rows: _Rows, groups: Sequence[Group], sharing: list[int], page_size: int | None) -> None:
    """Adds groups that begin with the same page: a segment for what all of them share, then what follows it."""
    work = [(sharing, 0, -1)]  # groups, pages that they have behind them, segment of these
    while work:
        numbers, first, parent = work.pop()
        pages = [_pages(groups[number]) for number in numbers]
        last = first + _common([table[first:] for table in pages])
        segment = rows.kept(groups[numbers[0]], first, last, page_size, parent)
        branches: dict[int, list[int]] = {}
        for number, table in zip(numbers, pages, strict=True):
            if len(table) > last:
                branches.setdefault(int(table[last]), []).append(number)
            else:
                rows.items(number, groups[number], rows.rest(groups[number], last, page_size, segment))
        work += [(branch, last, segment) for branch in branches.values()]


def _pages(group: Group) -> Ints:
    assert group.pages is not None, "only groups with kept pages share them"
    return group.pages


def _common(tables: Sequence[Ints]) -> int:
    """How many pages all of these begin with."""
    count = min(map(len, tables))
    if len(tables) == 1:
        return count
    same = np.logical_and.reduce([tables[0][:count] == table[:count] for table in tables[1:]])
    return int(np.argmin(same)) if not same.all() else count


class _Rows:
    """A pass in the making: entries of segments, entries of items, and arrays to be joined."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._length: list[int] = []
        self._cached: list[int] = []
        self._reads: list[int] = []
        self._pages: list[Ints | None] = []
        self._strategies: list[Strategy] = []
        self._ids: list[Ints] = []
        self._read_offsets: list[Ints] = [NONE]
        self._read_widths: list[Ints] = [NONE]
        self._read_ids: list[Ints] = [NONE]
        self._normalize: list[NDArray[np.bool_]] = []
        self._request: list[int] = []
        self._item: list[int] = []

    def prefix(self, ids: Ints) -> int:
        """Adds a prefix that no page keeps and returns its segment, -1 where there is none."""
        if not len(ids):
            return -1
        self._segment(-1, ids, 0, None)
        return len(self._parent) - 1

    def kept(self, group: Group, first: int, last: int, page_size: int | None, parent: int) -> int:
        """Adds what pages [first, last) of a group keep of its prefix, and returns its segment."""
        prefix, pages = group.request.prefix, _pages(group)[first:last]
        assert page_size or len(pages) == len(_pages(group)), "shared pages need the page size"
        begin, end = (0, len(prefix)) if page_size is None else (first * page_size, last * page_size)
        cached = min(max(group.cached - begin, 0), min(end, len(prefix)) - begin)
        if cached and parent >= 0 and self._cached[parent] < self._length[parent]:
            raise LayoutError("a segment with cached tokens continues a wholly cached parent")
        self._segment(parent, prefix[begin:end], cached, pages)
        return len(self._parent) - 1

    def rest(self, group: Group, pages: int, page_size: int | None, parent: int) -> int:
        """Adds what the pages do not hold of a group's prefix, if anything, and returns the last segment."""
        if page_size is None or pages * page_size >= len(group.request.prefix):
            return parent
        self._segment(parent, group.request.prefix[pages * page_size :], 0, None)
        return len(self._parent) - 1

    def items(self, request: int, group: Group, parent: int) -> None:
        """Adds the items of a group behind one prefix."""
        items = group.request.items.take(group.items)
        count = len(items)
        self._parent += [parent] * count
        self._length += items.lengths.tolist()
        self._cached += [0] * count
        self._reads += items.reads.tolist()
        self._pages += [None] * count
        self._request += [request] * count
        self._item += group.items
        self._strategies += group.strategies
        self._ids.append(items.ids)
        self._read_offsets.append(items.read_offsets)
        self._read_widths.append(items.widths)
        self._read_ids.append(items.read_ids)
        self._normalize.append(np.full(len(items.widths), group.request.normalize, np.bool_))

    def _segment(self, parent: int, ids: Ints, cached: int, pages: Ints | None) -> None:
        """A part of a prefix, which nobody reads."""
        self._parent.append(parent)
        self._length.append(len(ids))
        self._cached.append(cached)
        self._reads.append(0)
        self._pages.append(pages)
        self._ids.append(ids[cached:])

    def batch(self, packed_rows: int) -> PackedBatch:
        layout = Layout(
            parent=np.array(self._parent, np.int32),
            length=np.array(self._length, np.int32),
            cached=np.array(self._cached, np.int32),
            read_indptr=indptr(np.array(self._reads, np.int32)),
            read_offsets=np.concatenate(self._read_offsets),
        )
        strategies = tuple(self._strategies)
        bounds = layout.read_indptr[np.append(layout.leaves, layout.segments)]  # others than leaves are not read
        return PackedBatch(
            layout=layout,
            leaf_strategies=strategies,
            input_ids=np.concatenate(self._ids),
            position_ids=layout.position_ids,
            read_rows=layout.read_rows,
            read_indptr=indptr(np.concatenate(self._read_widths)),
            read_ids=np.concatenate(self._read_ids),
            normalize=np.concatenate(self._normalize),
            shares=Shares(self._request, self._item, bounds.tolist(), strategies),
            pages=tuple(self._pages),
            packed_rows=packed_rows,
        )


def alone(batch: PackedBatch, number: int) -> PackedBatch:
    """One item of a pass as a pass of its own over the same kept pages: shares[number], under direct_ragged."""
    layout, share = batch.layout, batch.shares[number]
    path = np.array(layout.path(int(layout.leaves[number])), np.int32)
    rows = ranges(layout.row_start[path], np.diff(layout.row_start)[path])
    first, last = batch.read_indptr[share.first], batch.read_indptr[share.last]
    reads = layout.read_offsets[layout.read_indptr[path[-1]] : layout.read_indptr[path[-1] + 1]]
    one = Layout(
        parent=np.arange(-1, len(path) - 1, dtype=np.int32),
        length=layout.length[path],
        cached=layout.cached[path],
        read_indptr=indptr([0] * (len(path) - 1) + [len(reads)]),
        read_offsets=reads,
    )
    return PackedBatch(
        layout=one,
        leaf_strategies=(Strategy.DIRECT_RAGGED,),
        input_ids=batch.input_ids[rows],
        position_ids=one.position_ids,
        read_rows=one.read_rows,
        read_indptr=batch.read_indptr[share.first : share.last + 1] - first,
        read_ids=batch.read_ids[first:last],
        normalize=batch.normalize[share.first : share.last],
        shares=Shares((share.request,), (share.item,), [0, share.last - share.first], (Strategy.DIRECT_RAGGED,)),
        pages=tuple(batch.pages[segment] for segment in path),
        packed_rows=batch.packed_rows,
    )


def unpack(batch: PackedBatch, reads: Reads) -> dict[int, list[Scored]]:
    """Of each group what was read of its items, in its order."""
    found: dict[int, list[Scored]] = {}
    for request, scored in zip(batch.shares.requests, _scored(batch, reads), strict=True):
        found.setdefault(request, []).append(scored)
    return found


def _scored(batch: PackedBatch, reads: Reads) -> Iterator[Scored]:
    """Of each share."""
    count, widths = len(batch.shares), np.diff(batch.read_indptr)
    once = batch.shares.bounds == list(range(len(widths) + 1))
    if once and not batch.normalize.any() and (widths == widths[0]).all():
        return map(Scored, reads.logits.reshape(count, 1, -1), repeat(None), batch.leaf_strategies)
    return _scored_apart(batch, reads)


def _scored_apart(batch: PackedBatch, reads: Reads) -> Iterator[Scored]:
    """The same where items are read more than once, or differently."""
    begins, normalize = batch.read_indptr.tolist(), batch.normalize.tolist()
    for _, _, first, last, strategy in batch.shares:
        logits = reads.logits[begins[first] : begins[last]].reshape(last - first, -1 if last > first else 0)
        normalized = last > first and normalize[first]  # all reads of an item alike
        yield Scored(logits, reads.lse[first:last] if normalized else None, strategy)
