"""However a fused launch is cut and split, its tiles attend to each visible token exactly once and to nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.cost import shape_of
from attention.cuts import Cut, count_blocks
from attention.layout import Layout, Segment
from attention.mask import visible
from attention.planner import plan
from attention.plans import Pages, Strategy
from attention.residency import Residency
from attention.tiles import (
    BEFORE,
    COLUMNS,
    OWN,
    OWN_END,
    PART,
    ROW,
    ROWS,
    RUN,
    RUN_END,
    SLOT,
    SLOTS,
    expand,
    parts_of,
    tile,
)
from tests.attention.draw import cases, examples

KEYS = 32  # of a block


def cut(layout, pages, tokens, columns=8, shortest=10_000, aligned=False):
    made = plan(layout, [Strategy.FUSED] * len(layout.leaves), pages)
    place = Residency.of(layout, pages, made).place
    (launch,) = made.launches
    slots = np.arange(layout.tokens - layout.rows, dtype=np.int32)
    found = tile(launch, layout.rows, place, slots, Cut(tokens, columns, KEYS, aligned), shortest)
    for name, width in (("tiles", COLUMNS), ("slots", 0), ("runs", 2), ("item_start", 0), ("merges", 4)):
        array = getattr(found, name)
        assert array.dtype == np.int32, name
        assert array.shape[1:] == ((width,) if width else ()), name
    assert found.tiles.flags.c_contiguous
    return found, place


@given(case=cases(), tokens=st.sampled_from([1, 2, 7, 16, 64]), shortest=st.sampled_from([1, 5, 10_000]))
@examples(300)
def test_counts_are_the_mask(case, tokens, shortest):
    layout, pages = case
    tiles, place = cut(layout, pages, tokens, columns=0, shortest=shortest)
    np.testing.assert_array_equal(expand(tiles, place), visible(layout).astype(np.int32))
    assert (tiles.tiles[:, ROWS] <= tokens).all()
    assert (tiles.tiles[:, PART] >= -1).all()
    assert (np.diff(keys_of(tiles)) <= 0).all(), "the largest first, so that the last ones to run are short"


def keys_of(tiles):
    """Keys that each tile scans, all stretches together."""
    in_runs = np.concatenate([[0], np.cumsum(tiles.runs[:, 1])])
    shared = tiles.tiles[:, SLOTS] + in_runs[tiles.tiles[:, RUN_END]] - in_runs[tiles.tiles[:, RUN]]
    return shared + tiles.tiles[:, OWN_END] - tiles.tiles[:, BEFORE]


def blocks_of(tiles, place, cached, row):
    """The blocks of keys that a row meets, in order, as positions along its own path: what its bits depend on."""
    (one,) = [t for t in tiles.tiles if t[ROW] <= row < t[ROW] + t[ROWS]]
    runs = tiles.runs[one[RUN] : one[RUN_END]]
    stretches = [(one[SLOT], one[SLOT] + one[SLOTS]), *[(r, r + n) for r, n in runs], (one[BEFORE], one[OWN])]
    met, at = [], 0
    for begin, end in stretches:
        for j in range(begin, end, KEYS):
            count = min(KEYS, end - j)
            met.append((at, at + count))
            at += count
    first = max(int(one[OWN]), int(tiles.item_start[row]))
    assert first == one[OWN], "the masked part begins where the item does, or a whole block later"
    return [*met, (at, at + row - first)]


@given(case=cases(deep=False), tokens=st.sampled_from([4, 16, 64]), seed=st.integers(0, 99))
@examples(100)
def test_aligned_rows_meet_their_keys_in_the_same_blocks_whatever_stands_beside_them(case, tokens, seed):
    layout, pages = case
    tiles, place = cut(layout, pages, tokens, aligned=True)
    np.testing.assert_array_equal(expand(tiles, place), visible(layout).astype(np.int32))
    leaf = int(np.random.default_rng(seed).choice(layout.leaves))
    path = np.array(layout.path(leaf))
    alone = Layout.of([Segment(d - 1, int(layout.length[s]), int(layout.cached[s])) for d, s in enumerate(path)])
    kept = Pages(pages.page_size, pages.first_scratch, tuple(pages.kept[s] for s in path))
    tiles_alone, place_alone = cut(alone, kept, tokens, aligned=True)
    for offset in range(int(layout.length[leaf])):
        row, row_alone = int(layout.row_start[leaf]) + offset, int(alone.row_start[-2]) + offset
        assert blocks_of(tiles, place, 0, row) == blocks_of(tiles_alone, place_alone, 0, row_alone)


@given(case=cases(), tokens=st.sampled_from([4, 16]))
@examples(100)
def test_every_part_is_merged_once_into_the_rows_it_was_cut_from(case, tokens):
    layout, pages = case
    tiles, _ = cut(layout, pages, tokens, columns=0, shortest=3)
    parts = tiles.tiles[tiles.tiles[:, PART] >= 0]
    np.testing.assert_array_equal(np.sort(parts[:, PART]), np.arange(tiles.parts))
    for row, rows, first, count in tiles.merges:
        own = parts[(parts[:, PART] >= first) & (parts[:, PART] < first + count)]
        assert len(own) == count
        assert (own[:, ROW] == row).all()
        assert (own[:, ROWS] == rows).all()
    whole = tiles.tiles[tiles.tiles[:, PART] < 0]
    rows = [np.arange(r, r + n) for r, n in (*whole[:, [ROW, ROWS]], *tiles.merges[:, :2])]
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(layout.rows))


def test_few_long_tiles_are_split_and_many_are_not():
    few = Layout.of([Segment(-1, 8196, 8196), *[Segment(0, 4)] * 32])
    many = Layout.of([Segment(-1, 8196, 8196), *[Segment(0, 64)] * 512])
    kept = Pages(16, 513, (np.arange(513, dtype=np.int32), *[None] * 32))
    tiles, _ = cut(few, kept, 64, columns=8, shortest=256)
    assert tiles.parts >= 16
    parts = tiles.tiles[tiles.tiles[:, PART] >= 0]
    unmasked = keys_of(tiles)[tiles.tiles[:, PART] >= 0] - (parts[:, OWN_END] - parts[:, OWN])
    assert np.ptp(unmasked) <= 1, "parts have about as many keys"
    (whole,) = keys_of(cut(few, kept, 128, columns=8, shortest=100_000)[0])
    assert tiles.parts == 2 * parts_of(np.array([whole] * 2), 8)[0]
    tiles, _ = cut(many, Pages(16, 513, (*kept.kept[:1], *[None] * 512)), 64, columns=8, shortest=256)
    assert tiles.parts == 0


def test_a_long_item_before_a_short_prefix_ends_its_tile():
    """Else the next items' tile would scan the long item under the mask for nothing."""
    layout = Layout.of([Segment(-1, 8), Segment(0, 100), *[Segment(0, 10)] * 6])
    tiles, place = cut(layout, Pages.scratch(layout, 16), 64)
    assert 8 + 100 in tiles.tiles[:, OWN_END]
    np.testing.assert_array_equal(expand(tiles, place), visible(layout).astype(np.int32))


@given(
    prefix=st.integers(0, 200),
    cached=st.booleans(),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    tokens=st.sampled_from([8, 32, 64]),
)
@examples(100)
def test_lengths_alone_tell_the_blocks(prefix, cached, lengths, tokens):
    have = prefix if cached else 0
    segments = [Segment(-1, prefix, have)] if prefix else []
    layout = Layout.of([*segments, *[Segment(0 if prefix else -1, n) for n in lengths]])
    if prefix:
        kept = np.arange(-(-prefix // 16), dtype=np.int32)
        pages = Pages(16, len(kept), (kept, *[None] * len(lengths)))
    else:
        pages = Pages.scratch(layout, 16)
    made = plan(layout, [Strategy.FUSED] * len(lengths), pages)
    tiles, _ = cut(layout, pages, tokens)
    full, masked, keys = count_blocks(shape_of(made.launches[0], 16), Cut(tokens, 8, KEYS))
    assert len(full) == len(tiles.tiles)
    assert full.dtype == masked.dtype == keys.dtype == np.int32
    before, own = (tiles.tiles[:, b] - tiles.tiles[:, a] for a, b in ((BEFORE, OWN), (OWN, OWN_END)))
    shared = keys_of(tiles) - before - own
    assert (before % KEYS == 0).all(), "only the masked part has a partial block"
    np.testing.assert_array_equal(np.sort(keys), np.sort(shared + before + own))
    assert full.sum() == (shared // KEYS + before // KEYS).sum()
    assert masked.sum() == ((shared % KEYS > 0) + -(-own // KEYS)).sum()


@pytest.mark.parametrize("column", [ROW, OWN_END])
def test_a_tile_moved_by_a_row_is_caught(column):
    layout = Layout.of([Segment(-1, 40), *[Segment(0, 20)] * 4])
    tiles, place = cut(layout, Pages.scratch(layout, 16), 16)
    tiles.tiles[1, column] -= 1
    assert not np.array_equal(expand(tiles, place), visible(layout).astype(np.int32))
