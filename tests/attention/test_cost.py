"""The counts are the article's, and the lengths alone tell what a plan will be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.cost import LaunchShape, bins, cost, scans, shapes, shapes_of
from attention.layout import Layout, Segment, unshared
from attention.planner import plan
from attention.plans import HeadShape, MaskKind, Pages, Strategy
from attention.timing import Fit
from tests.attention.draw import examples

HEADS = HeadShape(16, 8, 128, 128**-0.5, None)

ARTICLE_5_1 = {
    Strategy.NAIVE: (26, 1448),
    Strategy.DIRECT_RAGGED: (14, 824),
    Strategy.CASCADE: (15, 728),
    Strategy.MULTI_ITEM: (13, 728),
    Strategy.CUSTOM_MASK: (13, 1352),
}


@pytest.mark.parametrize("strategy", ARTICLE_5_1)
def test_article_5_1(strategy):
    counted = cost(shapes(strategy, 96, 0, np.array([4, 4])), 0, 8, HEADS)
    assert (counted.ctas, counted.kv_tokens_scanned) == ARTICLE_5_1[strategy]


@pytest.mark.parametrize("strategy", Strategy)
@given(
    prefix=st.integers(1, 300),
    cached=st.booleans(),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=30),
    rows=st.sampled_from([64, 128]),
)
@examples(60)
def test_lengths_alone_tell_the_launches(strategy, prefix, cached, lengths, rows):
    have = prefix if cached and strategy is not Strategy.NAIVE else 0
    layout = Layout.of([Segment(-1, prefix, have), *[Segment(0, n) for n in lengths]])
    if strategy is Strategy.NAIVE:
        layout, _ = unshared(layout)
    pages = Pages.scratch(layout, 16)
    if have:
        kept = np.arange(-(-prefix // 16), dtype=np.int32)
        pages = Pages(16, len(kept), (kept, *[None] * len(lengths)))
    real = shapes_of(plan(layout, [strategy] * len(lengths), pages, packed_rows=rows))
    told = shapes(strategy, prefix, have, np.array(lengths), rows)
    assert len(real) == len(told)
    for a, b in zip(real, told, strict=True):
        assert (a.mask, a.paged) == (b.mask, b.paged)
        for name in ("q_lens", "kv_lens", "prefix_lens", "max_items", "items"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
            assert getattr(a, name).dtype == getattr(b, name).dtype == np.int32, name


def test_a_fit_finds_a_law_again():
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 5, (400, 3))
    law = np.exp(0.3 + x @ [0.5, -0.2, 0.1] + 0.05 * x[:, 0] * x[:, 1])
    fit = Fit.of(x[:300], law[:300], ridge=1e-6)
    np.testing.assert_allclose(fit.milliseconds(x[300:]), law[300:], rtol=0.01)


# --- counts, tile by tile


def counted(shape, tile):
    """(tiles, keys) by walking over every tile."""
    tiles = keys = 0
    for b, (q, kv) in enumerate(zip(shape.q_lens.tolist(), shape.kv_lens.tolist(), strict=True)):
        for begin in range(0, q, tile):
            first = kv - q + begin
            last = min(first + tile, kv)
            if shape.mask in (MaskKind.NONE, MaskKind.CUSTOM):
                seen = kv
            elif shape.mask is MaskKind.CAUSAL or first < shape.prefix_lens[b]:
                seen = last
            else:  # the prefix, then back to the beginning of the longest item that may reach into the tile
                seen = shape.prefix_lens[b] + last - max(shape.prefix_lens[b], first - shape.max_items[b])
            tiles, keys = tiles + 1, keys + int(seen)
    return tiles, keys


@pytest.mark.parametrize("mask", MaskKind)
@given(
    tile=st.sampled_from([1, 8, 64]),
    requests=st.lists(
        st.tuples(st.integers(1, 150), st.integers(0, 200), st.integers(0, 100), st.integers(1, 60)),
        min_size=1,
        max_size=6,
    ),
)
@examples(60)
def test_tiles_and_keys_are_those_of_a_walk_over_all_tiles(mask, tile, requests):
    q, more, prefix, longest = (np.array(column, np.int32) for column in zip(*requests, strict=True))
    shape = LaunchShape(mask, True, q, q + more, np.minimum(prefix, q + more), longest)
    tiles, keys = counted(shape, tile)
    assert scans(shape, tile) == (tiles, keys, keys * tile)


def test_a_tile_that_begins_where_the_items_do_looks_no_further_back():
    shape = LaunchShape(MaskKind.MULTI_ITEM, True, *(np.array([n], np.int32) for n in (16, 116, 100, 4)))
    assert scans(shape, 8) == (2, 108 + 100 + 116 - 104, (108 + 112) * 8)


def test_flops_bytes_and_launches():
    two = [
        LaunchShape(MaskKind.CAUSAL, True, np.array([10], np.int32), np.array([30], np.int32)),
        LaunchShape(MaskKind.NONE, True, np.array([3, 4], np.int32), np.array([50, 60], np.int32)),
    ]
    found = cost(two, 5, 8, HEADS)
    keys = 28 + 30 + 50 + 60
    assert (found.ctas, found.kv_tokens_scanned, found.launches) == (4, keys, 7)
    assert found.flops == 4 * 16 * 128 * keys * 8
    assert found.bytes == 2 * 128 * (2 * 8 * keys + 2 * 16 * 17)
    assert cost(two, 5, 8, HEADS, itemsize=1).bytes == found.bytes / 2


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=30), rows=st.sampled_from([1, 64, 128]))
@examples(100)
def test_bins_are_filled_one_after_the_other(lengths, rows):
    begins, ends = bins(np.array(lengths, np.int32), rows)
    assert (begins.dtype, ends.dtype) == (np.int32, np.int32)
    expected, room = [], -1
    for i, length in enumerate(lengths):
        if length > room:
            expected.append(i)
            room = rows
        room -= length
    assert begins.tolist() == expected
    assert ends.tolist() == [*expected[1:], len(lengths)]
