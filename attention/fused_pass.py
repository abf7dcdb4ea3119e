"""A pass that the `fused` strategy computes alone, from its layout to tiles and to what is kept of it.

The same as `attention.planner`'s launch, cut by `attention.tiles`, but by segments instead of token by token: what a
replayed pass waits for on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention.cost import PACKED_ROWS
from attention.cuts import Cut
from attention.draft import Draft
from attention.layout import Ints, Layout, siblings
from attention.plans import Pages
from attention.residency import cached_slots
from attention.tiles import SHORTEST_SPLIT, Requests, Shared, Tiles


@dataclass(frozen=True, slots=True, eq=False)
class FusedPass:
    """keep_rows, keep_slots: [k] rows whose K/V outlives the pass, and where."""

    tiles: Tiles
    keep_rows: Ints
    keep_slots: Ints

    @classmethod
    def of(cls, layout: Layout, pages: Pages, cut: Cut, shortest_split: int = SHORTEST_SPLIT) -> FusedPass:
        """All leaves of a layout under the fused strategy."""
        draft, groups = Draft(layout, pages, None, PACKED_ROWS), siblings(layout, layout.leaves)
        for path, _ in groups:
            draft.keep(path)
        assert not draft.copies, "the pages of one path begin where its segments do"
        item_start = np.repeat(layout.row_start[:-1], np.diff(layout.row_start))
        tiles = _requests(layout, cached_slots(layout, pages), groups).cut(item_start, cut, shortest_split)
        return cls(tiles, *draft.written())


def _requests(layout: Layout, slots: dict[int, Ints], groups: list[tuple[tuple[int, ...], Ints]]) -> Requests:
    """A request for each inner segment, once, and one for the items behind it that follow one another."""
    requests, row_start = Requests(), layout.row_start.tolist()
    behind = {-1: Shared()}  # what is shared by all that continues a segment
    for path, leaves in groups:
        parent = -1
        for segment in path:
            if segment not in behind:
                behind[segment] = _inner(requests, behind[parent], segment, row_start, slots)
            parent = segment
        for first, last in _stretches(leaves):
            requests.add(row_start[first], row_start[last + 1] - row_start[first], behind[parent])
    return requests


def _inner(requests: Requests, above: Shared, segment: int, row_start: list[int], slots: dict[int, Ints]) -> Shared:
    """Adds what is computed of an inner segment, and returns what all that continues it shares."""
    if segment in slots:
        above = Shared(segment, (*above.slots, slots[segment]), above.runs)
    first, rows = row_start[segment], row_start[segment + 1] - row_start[segment]
    if not rows:
        return above
    requests.add(first, rows, above)
    return above._replace(runs=_joined(above.runs, first, rows))


def _joined(runs: tuple[tuple[int, int], ...], first: int, rows: int) -> tuple[tuple[int, int], ...]:
    """One run more; rows that follow on the last one make it longer."""
    if runs and sum(runs[-1]) == first:
        return (*runs[:-1], (runs[-1][0], runs[-1][1] + rows))
    return (*runs, (first, rows))


def _stretches(leaves: Ints) -> list[tuple[int, int]]:
    """(first, last) of leaves that follow one another; others may lie between."""
    first, last = int(leaves[0]), int(leaves[-1])
    if last - first + 1 == len(leaves):
        return [(first, last)]
    gaps = np.flatnonzero(np.diff(leaves) != 1)
    return list(zip(leaves[np.append(0, gaps + 1)].tolist(), leaves[np.append(gaps, -1)].tolist(), strict=True))
