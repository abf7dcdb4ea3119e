"""The strategies: one small function each, from a draft over a layout to launches.

A strategy takes the geometry that it supports and refuses the rest with a LayoutError that says what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attention.cost import GROUP_ROWS, PACKED_ROWS, bins
from attention.draft import Draft
from attention.layout import NONE, Ints, Layout, LayoutError, indptr, ranges, siblings
from attention.mask import visible
from attention.plans import (
    MAX_ITEM_TOKENS,
    Launch,
    MaskKind,
    MultiItem,
    PagedKv,
    Pages,
    Plan,
    RaggedKv,
    Strategy,
)

Made = tuple[list[Launch], list[tuple[int, int]]]  # launches, and merges among them


def plan(
    layout: Layout,
    strategies: Sequence[Strategy],
    pages: Pages,
    window: int | None = None,
    soft_cap: float = 0.0,
    packed_rows: int = PACKED_ROWS,
) -> Plan:
    """One plan for the whole pass; leaf i of `layout.leaves` is computed by strategies[i].

    Shared rows belong to the first launch that needs them, as their K/V is written before any launch runs.
    window: transformers' `sliding_window`. packed_rows: rows of a packed_multi_item request.
    Raises LayoutError where a strategy cannot compute its leaves.
    """
    if len(strategies) != len(layout.leaves):
        raise LayoutError(f"{len(layout.leaves)} leaves need as many strategies, got {len(strategies)}")
    draft = Draft(layout, pages, window, packed_rows)
    launches: list[Launch] = []
    merges: list[tuple[int, int]] = []
    for strategy in dict.fromkeys(strategies):
        leaves = layout.leaves[[chosen == strategy for chosen in strategies]]
        made, merged = _STRATEGIES[strategy](draft, leaves)
        merges += [(a + len(launches), b + len(launches)) for a, b in merged]
        launches += made
    return draft.finish(launches, merges, soft_cap)


def plan_visibility(layout: Layout, seen: NDArray[np.bool_], page_size: int) -> Plan:
    """custom_mask over an arbitrary visibility: [rows, tokens], such as a draft tree that is no forest of segments.

    Every row must see at least one token, as the kernels define nothing for one that sees none.
    """
    if seen.shape != (layout.rows, layout.tokens):
        raise LayoutError(f"the visibility of this layout is {layout.rows} x {layout.tokens}, got {seen.shape}")
    if not seen.any(axis=1).all():
        raise LayoutError("every row must see at least one token, itself if nothing else")
    draft = Draft(layout, Pages.scratch(layout, page_size), None, PACKED_ROWS)
    rows = [ranges(layout.row_start[tree], np.diff(layout.row_start)[tree]) for tree in layout.trees]
    tokens = [ranges(layout.token_start[tree], layout.length[tree]) for tree in layout.trees]
    of_trees = [seen[np.ix_(r, t)] for r, t in zip(rows, tokens, strict=True)]
    return draft.finish([_dense(draft, layout.trees, of_trees)], [], 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Requests:
    """Paged requests as arrays, to be concatenated, selected and launched.

    rows, q_lens  query rows one request after the other, and how many each has
    tables, page_counts, last  page ids one request after the other, how many each has, tokens in the last page
    """

    rows: Ints
    q_lens: Ints
    tables: Ints
    page_counts: Ints
    last: Ints

    @classmethod
    def one(cls, rows: Ints, table: Ints, tokens: int, page_size: int) -> _Requests:
        q_len, count, last = (np.array([n], np.int32) for n in (len(rows), len(table), (tokens - 1) % page_size + 1))
        return cls(rows, q_len, table, count, last)

    @classmethod
    def joined(cls, parts: Sequence[_Requests]) -> _Requests:
        fields = ("rows", "q_lens", "tables", "page_counts", "last")
        return cls(*(np.concatenate([NONE, *(getattr(part, name) for part in parts)]) for name in fields))

    def select(self, chosen: NDArray[np.bool_]) -> _Requests:
        if chosen.all():
            return self
        rows = ranges(indptr(self.q_lens)[:-1][chosen], self.q_lens[chosen])
        pages = ranges(indptr(self.page_counts)[:-1][chosen], self.page_counts[chosen])
        return _Requests(
            self.rows[rows], self.q_lens[chosen], self.tables[pages], self.page_counts[chosen], self.last[chosen]
        )

    def launch(self, mask: MaskKind, window: int | None = None, multi_item: MultiItem | None = None) -> Launch:
        return Launch(
            mask=mask,
            q_rows=self.rows,
            qo_indptr=indptr(self.q_lens),
            kv=PagedKv(indptr(self.page_counts), self.tables, self.last),
            window_left=-1 if window is None else window - 1,
            multi_item=multi_item,
        )


def _ragged(draft: Draft, path: tuple[int, ...], leaves: Ints, inherit: bool) -> _Requests:
    """Every leaf behind one path as a request over it; the first may also query the rows that it inherits."""
    layout = draft.layout
    if layout.cached[leaves].any():
        raise LayoutError("a leaf with cached tokens is an inner segment whose continuation is missing")
    length = layout.length[leaves]
    return _over(draft, path, ranges(layout.row_start[leaves], length), length, inherit)


def _over(draft: Draft, path: tuple[int, ...], rows: Ints, lengths: Ints, inherit: bool) -> _Requests:
    """Requests over one path that take `rows` one after the other, lengths[i] of them each.

    Written over arrays: a pass may have thousands of requests.
    """
    size, start = draft.page_size, _end(draft.layout, path)
    table = draft.home(path)
    shared, tail = table[: start // size], start % size
    own = (-(-(start + lengths) // size) - start // size).astype(np.int32)
    first = draft.new_pages(int(own.sum()))[indptr(own)[:-1]]
    if tail:
        draft.tail(path, first)
    draft.append(rows, ranges(first * np.int32(size) + np.int32(tail), lengths))
    counts = own + np.int32(len(shared))
    tables = np.empty(int(counts.sum()), np.int32)
    begins = indptr(counts)[:-1]
    tables[(begins[:, None] + np.arange(len(shared))).ravel()] = np.tile(shared, len(lengths))
    tables[ranges(begins + np.int32(len(shared)), own)] = ranges(first, own)
    inherited = draft.claim(path) if inherit else NONE
    q_lens = lengths.astype(np.int32)
    q_lens[0] += len(inherited)
    last = ((start + lengths - 1) % size + 1).astype(np.int32)
    return _Requests(np.concatenate([inherited, rows]), q_lens, tables, counts, last)


def _end(layout: Layout, path: Sequence[int]) -> int:
    """Positions of a path."""
    return int(layout.start[path[-1]] + layout.length[path[-1]]) if path else 0


def _inner(draft: Draft, leaves: Ints) -> _Requests:
    """The shared rows that these leaves need and no launch computes yet, as requests of their own."""
    parts = []
    for path, _ in siblings(draft.layout, leaves):
        if len(rows := draft.claim(path)):
            parts.append(_Requests.one(rows, draft.home(path), _end(draft.layout, path), draft.page_size))
    return _Requests.joined(parts)


def _direct_ragged(draft: Draft, leaves: Ints) -> Made:
    """Scheme 3: one launch; every leaf a request over its whole path, the first also queries the rows it shares."""
    made = _Requests.joined([_ragged(draft, path, own, True) for path, own in siblings(draft.layout, leaves)])
    return [made.launch(MaskKind.CAUSAL, draft.window(leaves))], []


def _naive(draft: Draft, leaves: Ints) -> Made:
    """Scheme 1: nothing shared. The sharing has to be undone in the layout, since it takes more rows."""
    layout = draft.layout
    children = np.bincount(layout.parent[layout.parent >= 0], minlength=layout.segments)
    above = layout.parent[leaves]
    while (above := above[above >= 0]).size:
        if (children[above] > 1).any() or layout.cached[above].any():
            raise LayoutError("naive computes a prefix for every item: give it layout.unshared(layout)")
        above = layout.parent[above]
    return _direct_ragged(draft, leaves)


def _split_cache(draft: Draft, leaves: Ints) -> Made:
    """Scheme 2 within one pass: a launch for the shared rows, then one for the leaves."""
    window = draft.window(leaves)
    shared = _inner(draft, leaves)
    own = _Requests.joined([_ragged(draft, path, these, False) for path, these in siblings(draft.layout, leaves)])
    return [part.launch(MaskKind.CAUSAL, window) for part in (shared, own) if len(part.q_lens)], []


def _direct_ragged_grouped(draft: Draft, leaves: Ints) -> Made:
    """Scheme 3 with launches by query length, so that a long prefix does not force short items into wide tiles."""
    window = draft.window(leaves)
    shared = _inner(draft, leaves)
    own = [_ragged(draft, path, these, False) for path, these in siblings(draft.layout, leaves)]
    everything = _Requests.joined([shared, *own])
    group = np.searchsorted(GROUP_ROWS, everything.q_lens)
    chosen = [everything.select(group == g) for g in np.unique(group)]
    return [part.launch(MaskKind.CAUSAL, window) for part in chosen], []


def _cascade(draft: Draft, leaves: Ints) -> Made:
    """Scheme 4: the shared rows causally; all leaves of a path on that path in one request; each leaf on itself."""
    layout, size = draft.layout, draft.page_size
    _refuse_window(draft, leaves, "cascade")
    shared_rows = _inner(draft, leaves)
    groups = siblings(layout, leaves)
    level_0 = _Requests.joined([_on_path(draft, path, own) for path, own in groups if path])
    length = layout.length[leaves]
    own = -(-length // size)
    first = draft.new_pages(int(own.sum()))[indptr(own)[:-1]]
    rows = ranges(layout.row_start[leaves], length)
    draft.append(rows, ranges(first * np.int32(size), length))
    level_1 = _Requests(rows, length, ranges(first, own), own.astype(np.int32), (length - 1) % size + 1)
    return _merged(
        [shared_rows.launch(MaskKind.CAUSAL)] if len(shared_rows.q_lens) else [],
        [level_0.launch(MaskKind.NONE)] if len(level_0.q_lens) else [],
        level_1.launch(MaskKind.CAUSAL),
    )


def _on_path(draft: Draft, path: tuple[int, ...], leaves: Ints) -> _Requests:
    """All rows of the leaves as one request over their path."""
    layout = draft.layout
    rows = ranges(layout.row_start[leaves], layout.length[leaves])
    return _Requests.one(rows, draft.home(path), int(layout.start[leaves[0]]), draft.page_size)


def _merged(shared: list[Launch], level_0: list[Launch], level_1: Launch) -> Made:
    launches = [*shared, *level_0, level_1]
    return launches, [(len(launches) - 1, len(shared))] if level_0 else []


def _cascade_contiguous(draft: Draft, leaves: Ints) -> Made:
    """Cascade without pages: K and V of every level lie one after the other, as the fastest kernels want them."""
    layout = draft.layout
    _refuse_window(draft, leaves, "cascade_contiguous")
    groups = siblings(layout, leaves)
    shared: list[tuple[Ints, Ints]] = []
    for path, _ in groups:
        draft.keep(path)
        if len(rows := draft.claim(path)):
            shared.append((rows, _path_tokens(layout, path)))
    own = [ranges(layout.row_start[these], layout.length[these]) for _, these in groups]
    level_0 = [(rows, _path_tokens(layout, path)) for rows, (path, _) in zip(own, groups, strict=True) if path]
    level_1 = Launch(
        mask=MaskKind.CAUSAL,
        q_rows=ranges(layout.row_start[leaves], layout.length[leaves]),
        qo_indptr=indptr(layout.length[leaves]),
        kv=RaggedKv(indptr(layout.length[leaves]), ranges(layout.token_start[leaves], layout.length[leaves])),
    )
    return _merged(
        [_contiguous(MaskKind.CAUSAL, shared)] if shared else [],
        [_contiguous(MaskKind.NONE, level_0)] if level_0 else [],
        level_1,
    )


def _contiguous(mask: MaskKind, requests: Sequence[tuple[Ints, Ints]]) -> Launch:
    """(rows, key tokens) of each request."""
    return Launch(
        mask=mask,
        q_rows=np.concatenate([rows for rows, _ in requests]),
        qo_indptr=indptr([len(rows) for rows, _ in requests]),
        kv=RaggedKv(indptr([len(keys) for _, keys in requests]), np.concatenate([keys for _, keys in requests])),
    )


def _path_tokens(layout: Layout, path: Sequence[int]) -> Ints:
    segments = np.array(path, np.int32)
    return ranges(layout.token_start[segments], layout.length[segments])


def _multi_item(draft: Draft, leaves: Ints) -> Made:
    """Scheme 5a: one request a path, [path, item, item, ...], under the multi-item mask.

    Items are numbered from 1 and no delimiter token stands between them: row t sees key k if k <= t and
    (k < prefix_len or k > t - pos[t]), which is the wanted mask to the token.
    """
    layout = draft.layout
    _refuse_items(draft, leaves, "multi_item")
    groups = []
    for path, own in siblings(layout, leaves):
        length = layout.length[own]
        total = np.array([length.sum()], np.int32)
        requests = _over(draft, path, ranges(layout.row_start[own], length), total, inherit=True)
        groups.append((requests, _ItemArrays.of(_end(layout, path), length, np.zeros(1, np.int32))))
    return [_multi_item_launch(groups)], []


def _packed_multi_item(draft: Draft, leaves: Ints) -> Made:
    """Many requests of at most packed_rows query rows, each some items under the multi-item mask, over shared pages.

    One tile holds the rows of several items and scans the prefix once for all of them; no long request unbalances the
    launch. The shared rows are requests without items.
    """
    layout = draft.layout
    _refuse_items(draft, leaves, "packed_multi_item")
    groups = []
    for path, own in siblings(layout, leaves):
        if len(inherited := draft.claim(path)):
            end = _end(layout, path)
            prefix = _Requests.one(inherited, draft.home(path), end, draft.page_size)
            groups.append((prefix, _ItemArrays.of(end, NONE, NONE)))
        length = layout.length[own]
        begins, _ = bins(length, draft.packed_rows)
        arrays = _ItemArrays.of(_end(layout, path), length, begins)
        requests = _over(draft, path, ranges(layout.row_start[own], length), arrays.totals, inherit=False)
        groups.append((requests, arrays))
    return [_multi_item_launch(groups)], []


@dataclass(frozen=True, slots=True, eq=False)
class _ItemArrays:
    """What the multi-item mask of B requests over one path follows from.

    prefix   tokens of the path
    places   place of each item token in its item, from 1, over all requests
    totals   [B] item tokens of each request
    longest  [B] its longest item
    """

    prefix: int
    places: Ints
    totals: Ints
    longest: Ints

    @classmethod
    def of(cls, prefix: int, lengths: Ints, begins: Ints) -> _ItemArrays:
        """lengths: of the items; begins: [B] first item of each request. No items: one request of the path alone."""
        if not len(lengths):
            return cls(prefix, NONE, np.zeros(1, np.int32), np.ones(1, np.int32))
        totals, longest = np.add.reduceat(lengths, begins), np.maximum.reduceat(lengths, begins)
        return cls(prefix, ranges(np.ones_like(lengths), lengths), totals.astype(np.int32), longest)


def _multi_item_launch(groups: Sequence[tuple[_Requests, _ItemArrays]]) -> Launch:
    arrays = _item_arrays([arrays for _, arrays in groups])
    return _Requests.joined([requests for requests, _ in groups]).launch(MaskKind.MULTI_ITEM, multi_item=arrays)


def _item_arrays(groups: Sequence[_ItemArrays]) -> MultiItem:
    """As the kernels take them: the places of all requests at one stride."""
    totals = np.concatenate([arrays.totals for arrays in groups])
    stride = max(1, int(totals.max()))
    places = np.zeros(len(totals) * stride, np.uint16)
    places[ranges(np.arange(len(totals), dtype=np.int32) * np.int32(stride), totals)] = np.concatenate(
        [arrays.places for arrays in groups]
    )
    return MultiItem(
        prefix_len_ptr=np.concatenate([np.full(len(arrays.totals), arrays.prefix, np.uint32) for arrays in groups]),
        token_pos_in_items_ptr=places,
        token_pos_in_items_len=stride,
        max_item_len_ptr=np.concatenate([arrays.longest for arrays in groups]).astype(np.uint16),
    )


def _fused(draft: Draft, leaves: Ints) -> Made:
    """One launch on contiguous K/V: the rows of several items share a tile, which scans the path once for all of them
    and then their own part under the multi-item mask. `attention.tiles` cuts it."""
    layout = draft.layout
    _refuse_items(draft, leaves, "fused")
    requests: list[tuple[Ints, Ints, _ItemArrays]] = []  # rows, keys, mask
    for path, own in siblings(layout, leaves):
        draft.keep(path)
        for depth in range(1, len(path) + 1):
            if len(rows := draft.claim(path[:depth])):
                arrays = _ItemArrays.of(_end(layout, path[:depth]), NONE, NONE)
                requests.append((rows, _path_tokens(layout, path[:depth]), arrays))
        before = _path_tokens(layout, path)
        for items in np.split(own, np.flatnonzero(np.diff(own) != 1) + 1):  # others may lie between
            length = layout.length[items]
            rows = ranges(layout.row_start[items], length)
            arrays = _ItemArrays.of(_end(layout, path), length, np.zeros(1, np.int32))
            requests.append((rows, np.concatenate([before, layout.row_tokens[rows]]), arrays))
    return [_fused_launch(requests)], []


def _fused_launch(requests: Sequence[tuple[Ints, Ints, _ItemArrays]]) -> Launch:
    return Launch(
        mask=MaskKind.MULTI_ITEM,
        q_rows=np.concatenate([rows for rows, _, _ in requests]),
        qo_indptr=indptr([len(rows) for rows, _, _ in requests]),
        kv=RaggedKv(indptr([len(keys) for _, keys, _ in requests]), np.concatenate([keys for _, keys, _ in requests])),
        multi_item=_item_arrays([arrays for _, _, arrays in requests]),
    )


def _custom_mask(draft: Draft, leaves: Ints) -> Made:
    """Scheme 5b: each tree of the forest as one request under an explicit matrix. Memory in rows x tokens."""
    layout = draft.layout
    trees = tuple(tree for tree in layout.trees if np.isin(tree, leaves).any())
    if len(leaves) != sum(layout.is_leaf[tree].sum() for tree in trees):
        raise LayoutError("custom_mask and reference compute whole trees: give them every leaf of a request")
    window = draft.window(leaves)
    return [_dense(draft, trees, [visible(layout, window, tree) for tree in trees])], []


def _dense(draft: Draft, trees: Sequence[Ints], seen: Sequence[NDArray[np.bool_]]) -> Launch:
    """seen: the [rows, tokens] matrix of each tree."""
    layout, size = draft.layout, draft.page_size
    rows = [ranges(layout.row_start[tree], np.diff(layout.row_start)[tree]) for tree in trees]
    tokens = [ranges(layout.token_start[tree], layout.length[tree]) for tree in trees]
    tables = [_tree_pages(draft, tree) for tree in trees]
    kv = PagedKv(
        paged_kv_indptr=indptr([len(table) for table in tables]),
        paged_kv_indices=np.concatenate(tables),
        paged_kv_last_page_len=np.array([(len(t) - 1) % size + 1 for t in tokens], np.int32),
    )
    return Launch(
        mask=MaskKind.CUSTOM,
        q_rows=np.concatenate(rows),
        qo_indptr=indptr([len(r) for r in rows]),
        kv=kv,
        custom_mask=np.concatenate([matrix.ravel() for matrix in seen]),
    )


def _tree_pages(draft: Draft, tree: Ints) -> Ints:
    """Pages that hold a tree's tokens one after the other."""
    layout = draft.layout
    pages = draft.new_pages(-(-int(layout.length[tree].sum()) // draft.page_size))
    for segment, offset in zip(tree, indptr(layout.length[tree]), strict=False):
        if not layout.is_leaf[segment]:
            draft.home(layout.path(int(segment)))
        length, cached = int(layout.length[segment]), int(layout.cached[segment])
        if cached:
            within = int(layout.start[segment]) % draft.page_size
            kept = draft.slots(draft.pages_of[int(segment)], within, cached)
            draft.copies.append((kept, draft.slots(pages, int(offset), cached)))
        rows = np.arange(layout.row_start[segment], layout.row_start[segment + 1], dtype=np.int32)
        draft.append(rows, draft.slots(pages, int(offset) + cached, length - cached))
    return pages


def _refuse_window(draft: Draft, leaves: Ints, name: str) -> None:
    if (window := draft.window(leaves)) is not None:
        raise LayoutError(
            f"{name} does not keep distances within a sliding window, and {window} tokens are fewer than prefix and "
            "item: use direct_ragged"
        )


def _refuse_items(draft: Draft, leaves: Ints, name: str) -> None:
    _refuse_window(draft, leaves, name)
    longest = int(draft.layout.length[leaves].max())
    if longest > MAX_ITEM_TOKENS:
        raise LayoutError(f"{name} takes items of up to {MAX_ITEM_TOKENS} tokens, got {longest}: use direct_ragged")


_STRATEGIES: dict[Strategy, Callable[[Draft, Ints], Made]] = {
    Strategy.NAIVE: _naive,
    Strategy.SPLIT_CACHE: _split_cache,
    Strategy.DIRECT_RAGGED: _direct_ragged,
    Strategy.DIRECT_RAGGED_GROUPED: _direct_ragged_grouped,
    Strategy.CASCADE: _cascade,
    Strategy.CASCADE_CONTIGUOUS: _cascade_contiguous,
    Strategy.MULTI_ITEM: _multi_item,
    Strategy.PACKED_MULTI_ITEM: _packed_multi_item,
    Strategy.FUSED: _fused,
    Strategy.CUSTOM_MASK: _custom_mask,
    Strategy.REFERENCE: _custom_mask,
}
