"""The tiles of the `fused` strategy's kernel: which rows a CTA takes and which keys it scans, as plain arrays.

A tile is a run of consecutive rows behind one path. It scans, in this order: cached keys by their slots, runs of rows
that all of its rows see (the path's computed part, and what came before in their own segment), and its own part under
the mask `item_start[row] <= key <= row`. A tile with very many keys may be split; its parts are merged afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from attention.cost import LaunchShape
from attention.layout import Ints, indptr, ranges
from attention.plans import Launch, MaskKind, RaggedKv

# Columns of a tile: rows [ROW, ROW + ROWS); keys at slots [SLOT, SLOT + SLOTS) of `slots`; runs [RUN, RUN_END) of
# `runs`, then rows [BEFORE, OWN), all unmasked; rows [OWN, OWN_END) masked. PART: its partial result, -1: none.
ROW, ROWS, SLOT, SLOTS, RUN, RUN_END, BEFORE, OWN, OWN_END, PART = range(10)
COLUMNS = 12  # a power of two is not needed, a multiple of 16 bytes is
PROCESSORS = 132  # of an H100 or H200; two CTAs of the kernel share one
SHORTEST_SPLIT = 256  # keys: a shorter part costs more to merge than it saves
WAVES = 2  # parts that a processor should get when there are too few tiles: as many as it runs at once


class Cut(NamedTuple):
    """How a kernel cuts: rows of a tile, KV heads, each of which has a CTA for every tile, and keys of a block.

    aligned: every item begins a tile of its own, so that its rows meet their keys in the same blocks wherever it stands
    """

    tokens: int
    columns: int
    keys: int = 64
    aligned: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """What one launch's CTAs do, largest first.

    tiles       [n, COLUMNS]
    slots       cached keys of all paths, by slot
    runs        [r, 2]  first row and rows of each run
    item_start  [rows]  first row that the row may see of the masked part
    merges      [m, 4]  first row, rows, first part, parts
    """

    tiles: Ints
    slots: Ints
    runs: Ints
    item_start: Ints
    merges: Ints

    @property
    def parts(self) -> int:
        return int(self.merges[:, 3].sum())


def tile(
    launch: Launch,
    rows: int,
    place: Ints,
    cached_slots: Ints,
    cut: Cut,
    shortest_split: int = SHORTEST_SPLIT,
) -> Tiles:
    """Cuts a fused launch into tiles.

    rows: of the pass; place: [tokens of the layout] place in (cached tokens, then rows); cached_slots: [cached]
    """
    assert launch.mask is MaskKind.MULTI_ITEM, "fused launches mask by items"
    assert launch.multi_item is not None, "a multi-item launch carries its arrays"
    assert isinstance(launch.kv, RaggedKv), "fused launches name their keys token by token"
    builder = _Builder(rows, len(cached_slots))
    for b in range(launch.requests):
        first, last = int(launch.qo_indptr[b]), int(launch.qo_indptr[b + 1])
        keys = place[launch.kv.kv_tokens[launch.kv.kv_indptr[b] : launch.kv.kv_indptr[b + 1]]]
        stride = launch.multi_item.token_pos_in_items_len
        fresh = max(0, len(keys) - int(launch.multi_item.prefix_len_ptr[b]))
        places = launch.multi_item.token_pos_in_items_ptr[b * stride : b * stride + fresh].astype(np.int32)
        builder.request(launch.q_rows[first:last], keys[: len(keys) - (last - first)], places, cut)
    return builder.finish(cached_slots, cut.columns, shortest_split)


class _Builder:
    def __init__(self, rows: int, cached: int) -> None:
        self._cached = cached
        self._item_start = np.zeros(rows, np.int32)
        self._tiles: list[Ints] = []
        self._slots: list[Ints] = []
        self._slot_of: dict[bytes, int] = {}  # the tiles of one path, and paths with one history, share their slots
        self._runs: list[Ints] = []
        self._slot_count = 0
        self._run_count = 0

    def request(self, rows: Ints, shared: Ints, places: Ints, cut: Cut) -> None:
        """shared: places of the keys before the first row; places: of the last rows in their items, from 1."""
        first, count = int(rows[0]), len(rows)
        assert int(rows[-1]) == first + count - 1, "the rows of a fused request follow one another"
        start = np.full(count, first, np.int32)
        if len(places):
            start[count - len(places) :] = rows[count - len(places) :] - places + 1
        self._item_start[first : first + count] = start
        slots, runs = shared[shared < self._cached], _runs(shared[shared >= self._cached] - self._cached)
        begin = _cuts(start - first, cut, len(shared))
        end = np.append(begin[1:], count)
        tiles = np.zeros((len(begin), COLUMNS), np.int32)
        tiles[:, ROW] = first + begin
        tiles[:, ROWS] = end - begin
        tiles[:, SLOT], tiles[:, SLOTS] = self._place(slots), len(slots)
        tiles[:, RUN], tiles[:, RUN_END] = self._run_count, self._run_count + len(runs)
        tiles[:, BEFORE] = start[begin]
        tiles[:, OWN] = first + _own_begin(start - first, begin, end, cut.keys)
        tiles[:, OWN_END] = first + end
        tiles[:, PART] = -1
        self._tiles.append(tiles)
        self._runs.append(runs)
        self._run_count += len(runs)

    def _place(self, slots: Ints) -> int:
        """Where these slots begin among those of all paths."""
        key = slots.tobytes()
        if key not in self._slot_of:
            self._slot_of[key] = self._slot_count
            self._slots.append(slots)
            self._slot_count += len(slots)
        return self._slot_of[key]

    def finish(self, cached_slots: Ints, columns: int, shortest_split: int) -> Tiles:
        tiles, runs = np.concatenate(self._tiles), np.concatenate(self._runs)
        keys = _keys(tiles, runs)
        tiles, runs, merges = _split(tiles, runs, keys, columns, shortest_split)
        order = np.argsort(-_keys(tiles, runs), kind="stable")
        slots = cached_slots[np.concatenate(self._slots)] if self._slot_count else np.zeros(0, np.int32)
        return Tiles(np.ascontiguousarray(tiles[order]), slots, runs, self._item_start, merges)


def _runs(rows: Ints) -> Ints:
    """[r, 2] first row and length of each stretch of consecutive rows."""
    if not len(rows):
        return np.zeros((0, 2), np.int32)
    begins = np.concatenate([[0], np.flatnonzero(np.diff(rows) != 1) + 1])
    lengths = np.diff(np.append(begins, len(rows)))
    return np.stack([rows[begins], lengths], axis=1).astype(np.int32)


def _cuts(start: Ints, cut: Cut, shared: int) -> Ints:
    """First row of each tile. start: [rows] first row of each row's item, both counted from 0.

    A tile may begin inside an item and reach into the next ones. It then scans that item's beginning under the mask,
    for rows that mostly do not see it, which is cheaper than a half-empty tile unless the item is longer than the
    shared part.
    """
    count, tokens = len(start), cut.tokens
    changes = np.append(np.flatnonzero(np.diff(start)) + 1, count)  # first row of each later item
    if cut.aligned:
        lengths = np.diff(changes, prepend=0)
        tiles = -(-lengths // tokens)
        within: Ints = (np.arange(int(tiles.sum())) - np.repeat(np.cumsum(tiles) - tiles, tiles)).astype(np.int32)
        return np.repeat(changes - lengths, tiles).astype(np.int32) + within * np.int32(tokens)
    even = np.arange(0, count, tokens, dtype=np.int32)
    ends = np.minimum(even + tokens, count) - 1
    if not ((start[ends] != start[even]) & (even - start[even] > shared)).any():
        return even
    cuts, at, begin = [], 0, 0
    for end in changes.tolist():  # of one item after the other; a few ints at a time are faster than arrays
        while at < end:
            cuts.append(at)
            at = end if end < at + tokens and at - begin > shared else at + tokens
        begin = end
    return np.array(cuts, np.int32)


def _own_begin(start: Ints, begin: Ints, end: Ints, keys: int) -> Ints:
    """Where the masked part of each tile [begin, end) begins; all counted from the request's first row.

    In a tile of one item, what came before is seen by all of its rows: whole blocks of keys, so that only one block of
    the tile is partial.
    """
    before = begin - start[begin]
    whole: Ints = start[begin] + before // keys * np.int32(keys)
    return np.where(start[begin] == start[end - 1], whole, start[begin])


def count_blocks(shape: LaunchShape, cut: Cut) -> tuple[Ints, Ints, Ints]:
    """[n] blocks of keys without a mask, blocks with one, and keys of each tile of a fused launch, by its lengths."""
    counted, item = [], 0
    for q_len, kv_len, prefix in zip(
        shape.q_lens.tolist(), shape.kv_lens.tolist(), shape.prefix_lens.tolist(), strict=True
    ):
        start, shared = np.zeros(q_len, np.int32), kv_len - q_len
        if kv_len > prefix:
            last = item + int(np.searchsorted(np.cumsum(shape.items[item:]), q_len)) + 1
            lengths = shape.items[item:last]
            start, item = np.repeat(indptr(lengths)[:-1], lengths), last
        begin = _cuts(start, cut, shared)
        end = np.append(begin[1:], q_len)
        own = _own_begin(start, begin, end, cut.keys)
        full = shared // cut.keys + (own - start[begin]) // cut.keys
        masked = int(shared % cut.keys > 0) + -(-(end - own) // cut.keys)
        counted.append(np.stack([full, masked, shared + end - start[begin]]))
    full, masked, keys = np.concatenate(counted, axis=1).astype(np.int32)
    return full, masked, keys


def _keys(tiles: Ints, runs: Ints) -> Ints:
    """[n] keys that each tile scans."""
    total = indptr(runs[:, 1])
    shared: Ints = tiles[:, SLOTS] + total[tiles[:, RUN_END]] - total[tiles[:, RUN]]
    return shared + tiles[:, OWN_END] - tiles[:, BEFORE]


def parts_of(keys: Ints, columns: int, shortest: int = SHORTEST_SPLIT) -> Ints:
    """[n] parts that each tile's keys are cut into: more than one where it has more than its share of all keys.

    All parts together run at once where they can: one more than there is room for would wait for another to end.
    """
    room = max(len(keys), PROCESSORS * WAVES // columns) if columns else 0
    even = max(shortest, int(keys.sum()) * columns // (PROCESSORS * WAVES))
    parts = np.where(2 * keys > 3 * even, -(-keys // even), 1)
    while columns and (parts > 1).any() and parts.sum() > room:
        even += -(-even // 16)
        parts = np.where(2 * keys > 3 * even, -(-keys // even), 1)
    return parts


def _split(tiles: Ints, runs: Ints, keys: Ints, columns: int, shortest: int) -> tuple[Ints, Ints, Ints]:
    """Tiles with more than their share of the keys, in parts. Returns tiles, runs and merges."""
    unmasked = keys - (tiles[:, OWN_END] - tiles[:, OWN])
    parts = np.where(unmasked > 0, parts_of(keys, columns, shortest), 1)
    merges = np.zeros((0, 4), np.int32)
    if (parts == 1).all():
        return tiles, runs, merges
    made: list[Ints] = [tiles[parts == 1]]
    made_runs, run_count, part = [runs], len(runs), 0
    merged = []
    for one, count in zip(tiles[parts > 1], parts[parts > 1].tolist(), strict=True):
        pieces, piece_runs = _pieces(one, runs, count, run_count, part)
        made.append(pieces)
        made_runs.append(piece_runs)
        merged.append((one[ROW], one[ROWS], part, len(pieces)))
        run_count += len(piece_runs)
        part += len(pieces)
    return np.concatenate(made), np.concatenate(made_runs), np.array(merged, np.int32)


def _pieces(one: Ints, runs: Ints, count: int, first_run: int, first_part: int) -> tuple[Ints, Ints]:
    """One tile in at most `count` parts of about as many keys: the unmasked keys dealt out, the masked ones with the
    last part."""
    before = np.array([[one[BEFORE], one[OWN] - one[BEFORE]]], np.int32)
    stretches = np.concatenate([runs[one[RUN] : one[RUN_END]], before])
    ends = indptr(stretches[:, 1]) + one[SLOTS]  # place of each stretch among the unmasked keys
    unmasked = int(ends[-1])
    bounds = np.unique(np.linspace(0, unmasked, count + 1).astype(np.int32))
    pieces = np.tile(one, (len(bounds) - 1, 1))
    piece_runs: list[tuple[int, int]] = []
    for i, (low, high) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        pieces[i, SLOT] = one[SLOT] + min(low, int(one[SLOTS]))
        pieces[i, SLOTS] = min(high, int(one[SLOTS])) - min(low, int(one[SLOTS]))
        pieces[i, RUN] = first_run + len(piece_runs)
        for (row, _), begin, end in zip(stretches.tolist(), ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            a, b = max(low, begin), min(high, end)
            if a < b:
                piece_runs.append((row + a - begin, b - a))
        pieces[i, RUN_END] = first_run + len(piece_runs)
    pieces[:, BEFORE] = pieces[:, OWN]
    pieces[:-1, OWN_END] = pieces[:-1, OWN]
    pieces[:, PART] = first_part + np.arange(len(pieces))
    return pieces, np.array(piece_runs, np.int32).reshape(-1, 2)


def expand(made: Tiles, place: Ints) -> Ints:
    """[rows, tokens] how many times each row attends to each token, by the kernel's own rules.

    place: as for `tile`; here the slots of `made` are to be places themselves (cached_slots = arange).
    """
    token_at = np.argsort(place)
    cached = len(place) - len(made.item_start)
    counts = np.zeros((len(made.item_start), len(place)), np.int32)
    for one in made.tiles:
        rows = np.arange(one[ROW], one[ROW] + one[ROWS])
        runs = made.runs[one[RUN] : one[RUN_END]]
        stretches = ranges(np.append(runs[:, 0], one[BEFORE]), np.append(runs[:, 1], one[OWN] - one[BEFORE]))
        seen = np.concatenate([made.slots[one[SLOT] : one[SLOT] + one[SLOTS]], stretches + cached])
        np.add.at(counts, (rows[:, None], token_at[seen][None, :]), 1)
        own = np.arange(one[OWN], one[OWN_END])
        visible = (own <= rows[:, None]) & (own >= made.item_start[rows][:, None])
        counts[np.ix_(rows, token_at[own + cached])] += visible
    return counts
