"""The tiles of the `fused` strategy's kernel: which rows a CTA takes and which keys it scans, as plain arrays.

A tile is a run of consecutive rows behind one path. It scans, in this order: cached keys by their slots, runs of rows
that all of its rows see (the path's computed part, and what came before in their own segment), and its own part under
the mask `item_start[row] <= key <= row`. A tile with very many keys may be split; its parts are merged afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from attention.cuts import Cut, cut_rows
from attention.layout import NONE, Ints, indptr, ranges
from attention.plans import Launch, MaskKind, RaggedKv

# Columns of a tile: rows [ROW, ROW + ROWS); keys at slots [SLOT, SLOT + SLOTS) of `slots`; runs [RUN, RUN_END) of
# `runs`, then rows [BEFORE, OWN), all unmasked; rows [OWN, OWN_END) masked. PART: its partial result, -1: none.
ROW, ROWS, SLOT, SLOTS, RUN, RUN_END, BEFORE, OWN, OWN_END, PART = range(10)
COLUMNS = 12  # a power of two is not needed, a multiple of 16 bytes is
PROCESSORS = 132  # of an H100 or H200; two CTAs of the kernel share one
SHORTEST_SPLIT = 256  # keys: a shorter part costs more to merge than it saves
WAVES = 2  # parts that a processor should get when there are too few tiles: as many as it runs at once


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
    requests, item_start = Requests(), np.zeros(rows, np.int32)
    stride, cached = launch.multi_item.token_pos_in_items_len, len(cached_slots)
    for b in range(launch.requests):
        own = launch.q_rows[launch.qo_indptr[b] : launch.qo_indptr[b + 1]]
        first, count = int(own[0]), len(own)
        assert int(own[-1]) == first + count - 1, "the rows of a fused request follow one another"
        keys = place[launch.kv.kv_tokens[launch.kv.kv_indptr[b] : launch.kv.kv_indptr[b + 1]]]
        fresh = max(0, len(keys) - int(launch.multi_item.prefix_len_ptr[b]))
        places = launch.multi_item.token_pos_in_items_ptr[b * stride : b * stride + fresh].astype(np.int32)
        item_start[own] = first
        item_start[own[count - fresh :]] = own[count - fresh :] - places + 1
        shared = keys[: len(keys) - count]
        slots = shared[shared < cached]
        runs = _runs(shared[shared >= cached] - cached)
        requests.add(first, count, Shared(slots.tobytes(), (cached_slots[slots],), runs))
    return requests.cut(item_start, cut, shortest_split)


class Shared(NamedTuple):
    """The keys that all rows of a request see: cached ones by their slots, then runs of rows.

    name  the same for the same slots, which are then kept once for all requests
    runs  (first row, rows) of each
    """

    name: Hashable = None
    slots: tuple[Ints, ...] = ()
    runs: tuple[tuple[int, int], ...] = ()


class Requests:
    """What a launch computes: runs of consecutive rows, each behind keys that all of its rows see."""

    def __init__(self) -> None:
        self._requests: list[tuple[int, ...]] = []  # first row, rows, shared keys, and SLOT to RUN_END of its tiles
        self._slots: list[Ints] = []
        self._slot_of: dict[Hashable, int] = {}  # the tiles of one path, and paths with one history, share their slots
        self._slot_count = 0
        self._runs: list[tuple[int, int]] = []

    def add(self, first: int, rows: int, shared: Shared) -> None:
        slots, runs = sum(map(len, shared.slots)), len(self._runs)
        if shared.name not in self._slot_of:
            self._slot_of[shared.name] = self._slot_count
            self._slots += shared.slots
            self._slot_count += slots
        self._runs += shared.runs
        keys = slots + sum(count for _, count in shared.runs)
        self._requests.append((first, rows, keys, self._slot_of[shared.name], slots, runs, len(self._runs)))

    def cut(self, item_start: Ints, cut: Cut, shortest_split: int) -> Tiles:
        """item_start: [rows of the pass] first row that each may see of its own part."""
        given, runs = np.array(self._requests, np.int32), np.array(self._runs, np.int32).reshape(-1, 2)
        made = cut_rows(given[:, 0], given[:, 1], given[:, 2], item_start, cut)
        start = item_start[made.begin]
        tiles = np.zeros((len(start), COLUMNS), np.int32)
        tiles[:, ROW], tiles[:, ROWS] = made.begin, made.end - made.begin
        tiles[:, SLOT : RUN_END + 1] = given[made.request, 3:]
        tiles[:, BEFORE], tiles[:, OWN], tiles[:, OWN_END], tiles[:, PART] = start, made.own, made.end, -1
        keys = given[made.request, 2] + made.end - start
        tiles, runs, merges = _split(tiles, runs, keys, cut.columns, shortest_split)
        order = np.argsort(-(_keys(tiles, runs) if len(merges) else keys), kind="stable")
        return Tiles(tiles[order], np.concatenate([NONE, *self._slots]), runs, item_start, merges)


def _runs(rows: Ints) -> tuple[tuple[int, int], ...]:
    """(first row, length) of each stretch of consecutive rows."""
    if not len(rows):
        return ()
    begins = np.append(0, np.flatnonzero(np.diff(rows) != 1) + 1)
    lengths = np.diff(np.append(begins, len(rows)))
    return tuple(zip(rows[begins].tolist(), lengths.tolist(), strict=True))


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
    merges = np.zeros((0, 4), np.int32)
    if 2 * int(keys.max()) <= 3 * shortest:  # as `parts_of` says
        return tiles, runs, merges
    unmasked = keys - (tiles[:, OWN_END] - tiles[:, OWN])
    parts = np.where(unmasked > 0, parts_of(keys, columns, shortest), 1)
    if (parts == 1).all():
        return tiles, runs, merges
    split = tiles[parts > 1]
    of, low, high = _dealt(unmasked[parts > 1], parts[parts > 1])
    pieces, own = split[of], split[of, OWN]
    first_slot, end_slot = np.minimum(low, pieces[:, SLOTS]), np.minimum(high, pieces[:, SLOTS])
    piece_runs, counts = _piece_runs(split, runs, of, low, high)
    run = indptr(counts) + np.int32(len(runs))
    pieces[:, SLOT] += first_slot
    pieces[:, SLOTS], pieces[:, RUN], pieces[:, RUN_END] = end_slot - first_slot, run[:-1], run[1:]
    pieces[:, BEFORE], pieces[:, PART] = own, np.arange(len(of))
    more = of[1:] == of[:-1]  # the masked keys go with the last part
    pieces[:-1, OWN_END][more] = own[:-1][more]
    part = indptr(np.bincount(of).astype(np.int32))
    merges = np.column_stack([split[:, ROW], split[:, ROWS], part[:-1], np.diff(part)])
    return np.concatenate([tiles[parts == 1], pieces]), np.concatenate([runs, piece_runs]), merges


def _dealt(unmasked: Ints, parts: Ints) -> tuple[Ints, Ints, Ints]:
    """(which tile, [begin, end) among its unmasked keys) of each part: about as many keys as its tile's others, and at
    least one."""
    of = np.repeat(np.arange(len(parts), dtype=np.int32), parts)
    nth, each = ranges(np.zeros_like(parts), parts), (unmasked / parts)[of]
    low, high = (nth * each).astype(np.int32), ((nth + 1) * each).astype(np.int32)
    high[np.cumsum(parts) - 1] = unmasked
    some = low < high
    return of[some], low[some], high[some]


def _piece_runs(split: Ints, runs: Ints, of: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """The runs of each part [low, high) of the unmasked keys of tile of[i], part after part, and how many each has."""
    count = split[:, RUN_END] - split[:, RUN] + 1  # stretches of a tile: its runs, then what is before its own part
    at = indptr(count)
    stretches = np.zeros((int(at[-1]), 2), np.int32)
    stretches[ranges(at[:-1], count - 1)] = runs[ranges(split[:, RUN], count - 1)]
    stretches[at[1:] - 1, 0], stretches[at[1:] - 1, 1] = split[:, BEFORE], split[:, OWN] - split[:, BEFORE]
    total = indptr(stretches[:, 1])
    begin = total[:-1] + np.repeat(split[:, SLOTS] - total[at[:-1]], count)  # among the unmasked keys of its tile
    piece, met = np.repeat(np.arange(len(of), dtype=np.int32), count[of]), ranges(at[of], count[of])
    skipped = np.maximum(low[piece] - begin[met], 0)
    keys = np.minimum(high[piece] - begin[met], stretches[met, 1]) - skipped
    made, some = np.column_stack([stretches[met, 0] + skipped, keys]), keys > 0
    return made[some], np.bincount(piece[some], minlength=len(of)).astype(np.int32)


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
