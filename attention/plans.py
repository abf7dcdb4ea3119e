"""The strategies: from a layout to a plan of index arrays.

A Plan says which launches compute a pass's attention: which rows query, which pages they read, under which mask. It
holds ints and numpy arrays only, in FlashInfer's nouns, so that a machine without a GPU can prove it: `expand` turns
any plan into a matrix of counts by the kernels' own rules, and the matrix must be exactly 1 where `mask.visible` is
True and 0 elsewhere.

K/V lives in pages of `page_size` tokens. Page j of a path holds its positions [j * page_size, (j + 1) * page_size), and
only the last page of a request may be partial. So a segment that begins inside a page gets a copy of its own of that
page's earlier tokens (`_Draft.tail`), and every page before it is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from attention.layout import Ints, Layout, LayoutError, indptr, ranges
from attention.mask import visible

MAX_ITEM_TOKENS = 65_535  # token_pos_in_items and max_item_len are uint16 in the kernels


class Strategy(StrEnum):
    """The ways to compute a pass. The names are those of the enum, the flag, the metric label and the bench row."""

    NAIVE = "naive"
    DIRECT_RAGGED = "direct_ragged"
    MULTI_ITEM = "multi_item"
    REFERENCE = "reference"


class MaskKind(StrEnum):
    """What a launch's kernel masks. All but CUSTOM follow from the lengths and the multi-item arrays."""

    CAUSAL = "causal"
    MULTI_ITEM = "multi_item"
    CUSTOM = "custom"


@dataclass(frozen=True, slots=True, eq=False)
class MultiItem:
    """The multi-item mask of a launch of B requests.

    prefix_len_ptr          [B] uint32           tokens before the first item
    token_pos_in_items_ptr  [B * stride] uint16  place of each later token in its item, counted from 1; 0 is padding
    token_pos_in_items_len  stride, the same for every request
    max_item_len_ptr        [B] uint16           longest item: the kernel looks no further back than that
    """

    prefix_len_ptr: NDArray[np.uint32]
    token_pos_in_items_ptr: NDArray[np.uint16]
    token_pos_in_items_len: int
    max_item_len_ptr: NDArray[np.uint16]


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel call over B requests with paged K/V.

    q_rows                  [qo_indptr[B]]  rows of the pass that query, request after request
    qo_indptr               [B+1]
    paged_kv_indptr         [B+1]
    paged_kv_indices        [..]            pages of each request, in order of position
    paged_kv_last_page_len  [B]             1..page_size
    window_left             keys further back than this many positions are masked; -1: none are
    custom_mask             bool, the requests' [q_len, kv_len] matrices flattened one after the other
    """

    mask: MaskKind
    q_rows: Ints
    qo_indptr: Ints
    paged_kv_indptr: Ints
    paged_kv_indices: Ints
    paged_kv_last_page_len: Ints
    window_left: int = -1
    multi_item: MultiItem | None = None
    custom_mask: NDArray[np.bool_] | None = None

    @property
    def requests(self) -> int:
        return len(self.qo_indptr) - 1

    def kv_lens(self, page_size: int) -> Ints:
        """[B] keys of each request."""
        return (np.diff(self.paged_kv_indptr) - 1) * np.int32(page_size) + self.paged_kv_last_page_len


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Where a pass's K/V lives.

    page_size      tokens of a page
    first_scratch  pages with this id and above are free for the plan to use during the pass
    kept           for each segment, the ids of the pages that keep its K/V beyond the pass, or None. They hold the
                   segment's positions and, before them, those of its ancestors that share its first page.
    """

    page_size: int
    first_scratch: int
    kept: tuple[Ints | None, ...]

    @classmethod
    def scratch(cls, layout: Layout, page_size: int) -> Pages:
        """Nothing kept: the whole pass in scratch pages."""
        return cls(page_size, 0, (None,) * layout.segments)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A pass's attention, for one (window, soft cap).

    append_rows/_slots  the K/V of row append_rows[i] is written to slot append_slots[i] before the launches
                        (slot = page * page_size + offset); a row may be written more than once
    copy_from/_to       cached K/V copied between slots before the launches
    num_pages           one more than the highest page id in use
    logits_soft_cap     cap of the attention logits; 0: none
    """

    page_size: int
    num_pages: int
    append_rows: Ints
    append_slots: Ints
    copy_from: Ints
    copy_to: Ints
    launches: tuple[Launch, ...]
    logits_soft_cap: float = 0.0


def plan(
    layout: Layout,
    strategies: Sequence[Strategy],
    pages: Pages,
    window: int | None = None,
    soft_cap: float = 0.0,
) -> Plan:
    """One plan for the whole pass; leaf i of `layout.leaves` is computed by strategies[i].

    Shared rows belong to the first launch that needs them, as their K/V is written before any launch runs.
    Raises LayoutError where a strategy cannot compute its leaves.
    """
    if len(strategies) != len(layout.leaves):
        raise LayoutError(f"{len(layout.leaves)} leaves need as many strategies, got {len(strategies)}")
    draft = _Draft(layout, pages, window)
    launches: list[Launch] = []
    for strategy in dict.fromkeys(strategies):
        leaves = layout.leaves[[chosen == strategy for chosen in strategies]]
        launches.append(_STRATEGIES[strategy](draft, leaves))
    return draft.finish(launches, soft_cap)


class _Draft:
    """A plan in the making: which page holds what, and which rows a launch has claimed."""

    def __init__(self, layout: Layout, pages: Pages, window: int | None) -> None:
        self.layout = layout
        self.page_size = pages.page_size
        self._window = window
        self._kept = pages.kept
        self._next_page = pages.first_scratch
        self.pages_of: dict[int, Ints] = {}
        self._claimed: set[int] = set()
        self._append: list[tuple[Ints, Ints]] = []
        self.copies: list[tuple[Ints, Ints]] = []

    def window(self, leaves: Ints) -> int | None:
        """The window as far as the paths of these leaves meet it: a longer one is exactly causal."""
        longest = int((self.layout.start[leaves] + self.layout.length[leaves]).max())
        return None if self._window is None or self._window >= longest else self._window

    def new_pages(self, count: int) -> Ints:
        first = self._next_page
        self._next_page += count
        return np.arange(first, first + count, dtype=np.int32)

    def claim(self, path: Sequence[int]) -> Ints:
        """The rows along `path` that no launch computes yet; afterwards they are taken. Always a suffix of the path."""
        layout = self.layout
        fresh = np.array([s for s in path if s not in self._claimed], np.int32)
        self._claimed.update(path)
        return ranges(layout.row_start[fresh], np.diff(layout.row_start)[fresh])

    def home(self, path: Sequence[int]) -> Ints:
        """The pages of a path of inner segments, in order of position; writes what is not there yet."""
        layout, size = self.layout, self.page_size
        table: list[Ints] = []
        for depth, segment in enumerate(path):
            if segment not in self.pages_of:
                self._settle(path[: depth + 1])
            table.append(self.pages_of[segment])
        first = [int(layout.start[s]) // size for s in path]
        before_next = [after - before for before, after in pairwise(first)]
        shared = [pages[:count] for pages, count in zip(table, before_next, strict=False)]
        return np.concatenate([*shared, *table[-1:]]) if table else np.zeros(0, np.int32)

    def _settle(self, path: Sequence[int]) -> None:
        """Gives the last segment of `path` its pages and writes its rows there."""
        layout, size, segment = self.layout, self.page_size, path[-1]
        start, length, cached = (int(a[segment]) for a in (layout.start, layout.length, layout.cached))
        kept = self._kept[segment]
        needed = -(-(start + length) // size) - start // size
        assert kept is None or len(kept) == needed, f"segment {segment} needs {needed} pages, was given {len(kept)}"
        assert kept is not None or cached == 0, f"segment {segment} has cached tokens but no kept pages"
        pages = self.new_pages(needed) if kept is None else kept
        self.pages_of[segment] = pages
        if cached == 0:
            self.tail(path[:-1], pages[:1])
        slots = self.slots(pages, start % size + cached, length - cached)
        self.append(np.arange(layout.row_start[segment], layout.row_start[segment + 1], dtype=np.int32), slots)

    def tail(self, path: Sequence[int], first_pages: Ints) -> None:
        """Copies the path's tokens that lie in its last, partial page to the beginning of each of `first_pages`."""
        layout, size = self.layout, self.page_size
        for segment in reversed(path):
            start, end = int(layout.start[segment]), int(layout.start[segment] + layout.length[segment])
            if segment == path[-1]:
                page_start = end // size * size
            for position in range(max(start, page_start), end):
                self._copy_token(segment, position, first_pages * np.int32(size) + np.int32(position % size))

    def _copy_token(self, segment: int, position: int, to: Ints) -> None:
        layout, size = self.layout, self.page_size
        start, cached = int(layout.start[segment]), int(layout.cached[segment])
        if position - start < cached:
            page = self.pages_of[segment][position // size - start // size]
            self.copies.append((np.full_like(to, page * size + position % size), to))
        else:
            self.append(np.full_like(to, layout.row_start[segment] + position - start - cached), to)

    def append(self, rows: Ints, slots: Ints) -> None:
        self._append.append((rows, slots))

    def slots(self, pages: Ints, offset: int, count: int) -> Ints:
        place = np.arange(offset, offset + count, dtype=np.int32)
        return (pages[place // self.page_size] * np.int32(self.page_size) + place % self.page_size).astype(np.int32)

    def finish(self, launches: Sequence[Launch], soft_cap: float) -> Plan:
        append_rows, append_slots = _joined(self._append)
        copy_from, copy_to = _joined(self.copies)
        kept = [int(pages.max()) + 1 for pages in self._kept if pages is not None and len(pages)]
        return Plan(
            page_size=self.page_size,
            num_pages=max([self._next_page, *kept]),
            append_rows=append_rows,
            append_slots=append_slots,
            copy_from=copy_from,
            copy_to=copy_to,
            launches=tuple(launches),
            logits_soft_cap=soft_cap,
        )


def _joined(pairs: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    none = np.zeros(0, np.int32)
    first = [pair[0] for pair in pairs]
    second = [pair[1] for pair in pairs]
    return np.concatenate([none, *first]), np.concatenate([none, *second])


def _siblings(layout: Layout, leaves: Ints) -> list[tuple[tuple[int, ...], Ints]]:
    """The leaves by the path that they continue, in order of first appearance."""
    parents = layout.parent[leaves]
    order = dict.fromkeys(int(p) for p in parents)
    return [(layout.path(parent), leaves[parents == parent]) for parent in order]


def _direct_ragged(draft: _Draft, leaves: Ints) -> Launch:
    """Scheme 3: every leaf a request over its whole path; the first of them also queries the rows it shares."""
    groups = [_ragged_group(draft, path, siblings) for path, siblings in _siblings(draft.layout, leaves)]
    window = draft.window(leaves)
    return Launch(
        mask=MaskKind.CAUSAL,
        q_rows=np.concatenate([rows for rows, *_ in groups]),
        qo_indptr=indptr(np.concatenate([q_lens for _, q_lens, *_ in groups])),
        paged_kv_indptr=indptr(np.concatenate([counts for *_, counts, _, _ in groups])),
        paged_kv_indices=np.concatenate([indices for *_, indices, _ in groups]),
        paged_kv_last_page_len=np.concatenate([last for *_, last in groups]),
        window_left=-1 if window is None else window - 1,
    )


def _ragged_group(draft: _Draft, path: tuple[int, ...], leaves: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Requests of the leaves behind one path: q_rows, q_lens, pages each, page ids, last page lengths.

    Written over arrays: a pass may have thousands of leaves.
    """
    layout, size = draft.layout, draft.page_size
    assert (layout.cached[leaves] == 0).all(), "leaves with cached tokens are not planned yet"
    table = draft.home(path)
    start, length = int(layout.start[leaves[0]]), layout.length[leaves]
    shared, tail = table[: start // size], start % size
    own = -(-(start + length) // size) - np.int32(start // size)
    first = draft.new_pages(int(own.sum()))[indptr(own)[:-1]]
    if tail:
        draft.tail(path, first)
    rows = ranges(layout.row_start[leaves], length)
    draft.append(rows, ranges(first * np.int32(size) + np.int32(tail), length))
    counts = (own + len(shared)).astype(np.int32)
    indices = np.empty(int(counts.sum()), np.int32)
    begins = indptr(counts)[:-1]
    indices[(begins[:, None] + np.arange(len(shared))).ravel()] = np.tile(shared, len(leaves))
    indices[ranges(begins + np.int32(len(shared)), own)] = ranges(first, own)
    inherited = draft.claim(path)
    q_lens = length.copy()
    q_lens[0] += len(inherited)
    return np.concatenate([inherited, rows]), q_lens, counts, indices, (start + length - 1) % size + 1


def _naive(draft: _Draft, leaves: Ints) -> Launch:
    """Scheme 1: nothing shared. The sharing has to be undone in the layout, since it takes more rows."""
    layout = draft.layout
    children = np.bincount(layout.parent[layout.parent >= 0], minlength=layout.segments)
    above = layout.parent[leaves]
    while (above := above[above >= 0]).size:
        if (children[above] > 1).any() or layout.cached[above].any():
            raise LayoutError("naive computes a prefix for every item: give it layout.unshared(layout)")
        above = layout.parent[above]
    return _direct_ragged(draft, leaves)


def _multi_item(draft: _Draft, leaves: Ints) -> Launch:
    """Scheme 5a: one request a path, [path, item, item, ...], under the multi-item mask.

    Items are numbered from 1 and no delimiter token stands between them: row t sees key k if k <= t and
    (k < prefix_len or k > t - pos[t]), which is the wanted mask to the token.
    """
    layout = draft.layout
    if (window := draft.window(leaves)) is not None:
        raise LayoutError(
            f"multi_item measures a sliding window in packed distance, and {window} tokens are fewer than prefix and "
            "item: use direct_ragged"
        )
    longest = int(layout.length[leaves].max())
    if longest > MAX_ITEM_TOKENS:
        raise LayoutError(f"multi_item takes items of up to {MAX_ITEM_TOKENS} tokens, got {longest}: use direct_ragged")
    groups = _siblings(layout, leaves)
    requests = [_multi_item_request(draft, path, siblings) for path, siblings in groups]
    lengths = [layout.length[siblings] for _, siblings in groups]
    stride = max(int(length.sum()) for length in lengths)
    places = np.zeros((len(groups), stride), np.uint16)
    for row, length in zip(places, lengths, strict=True):
        row[: length.sum()] = ranges(np.ones_like(length), length)
    return Launch(
        mask=MaskKind.MULTI_ITEM,
        q_rows=np.concatenate([rows for rows, _, _ in requests]),
        qo_indptr=indptr([len(rows) for rows, _, _ in requests]),
        paged_kv_indptr=indptr([len(table) for _, table, _ in requests]),
        paged_kv_indices=np.concatenate([table for _, table, _ in requests]),
        paged_kv_last_page_len=np.array([last for _, _, last in requests], np.int32),
        multi_item=MultiItem(
            prefix_len_ptr=np.array([layout.start[siblings[0]] for _, siblings in groups], np.uint32),
            token_pos_in_items_ptr=places.ravel(),
            token_pos_in_items_len=stride,
            max_item_len_ptr=np.array([length.max() for length in lengths], np.uint16),
        ),
    )


def _multi_item_request(draft: _Draft, path: tuple[int, ...], leaves: Ints) -> tuple[Ints, Ints, int]:
    """One path and the leaves behind it as one logical request: q_rows, page ids, last page length."""
    layout, size = draft.layout, draft.page_size
    table = draft.home(path)
    start, length = int(layout.start[leaves[0]]), layout.length[leaves]
    total = start + int(length.sum())
    own = draft.new_pages(-(-total // size) - start // size)
    if start % size:
        draft.tail(path, own[:1])
    rows = ranges(layout.row_start[leaves], length)
    draft.append(rows, draft.slots(own, start % size, len(rows)))
    inherited = draft.claim(path)
    return np.concatenate([inherited, rows]), np.concatenate([table[: start // size], own]), (total - 1) % size + 1


def _reference(draft: _Draft, leaves: Ints) -> Launch:
    """The dense oracle: each tree of the forest as one request under an explicit rows x tokens mask."""
    layout, size = draft.layout, draft.page_size
    trees = [tree for tree in layout.trees if np.isin(tree, leaves).any()]
    if len(leaves) != sum(layout.is_leaf[tree].sum() for tree in trees):
        raise LayoutError("reference computes whole trees: give it every leaf of a request")
    seen = visible(layout, draft.window(leaves))
    rows = [ranges(layout.row_start[tree], np.diff(layout.row_start)[tree]) for tree in trees]
    tokens = [ranges(layout.token_start[tree], layout.length[tree]) for tree in trees]
    tables = [_reference_pages(draft, tree) for tree in trees]
    return Launch(
        mask=MaskKind.CUSTOM,
        q_rows=np.concatenate(rows),
        qo_indptr=indptr([len(r) for r in rows]),
        paged_kv_indptr=indptr([len(table) for table in tables]),
        paged_kv_indices=np.concatenate(tables),
        paged_kv_last_page_len=np.array([(len(t) - 1) % size + 1 for t in tokens], np.int32),
        custom_mask=np.concatenate([seen[np.ix_(r, t)].ravel() for r, t in zip(rows, tokens, strict=True)]),
    )


def _reference_pages(draft: _Draft, tree: Ints) -> Ints:
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


_STRATEGIES: dict[Strategy, Callable[[_Draft, Ints], Launch]] = {
    Strategy.NAIVE: _naive,
    Strategy.DIRECT_RAGGED: _direct_ragged,
    Strategy.MULTI_ITEM: _multi_item,
    Strategy.REFERENCE: _reference,
}
