"""A padded pass still attends as its layout says, and its padding to itself alone."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.cuts import Cut
from attention.layout import Layout, Segment
from attention.mask import visible
from attention.planner import plan
from attention.plans import Pages, Strategy
from attention.residency import Residency
from attention.tiles import ROW, ROWS, expand, tile
from scorer.pass_arrays import (
    LABELS,
    SPLIT_TOKENS,
    PassArrays,
    few_reads,
    fill,
    graph_key,
    part_capacity,
    places,
    tile_capacity,
    token_buckets,
)
from tests.attention.draw import cases

BUCKETS = token_buckets(4096)


def arrays_of(layout, pages, cut, shortest=256):
    planned = plan(layout, [Strategy.FUSED] * len(layout.leaves), pages)
    found = Residency.of(layout, pages, planned)
    slots = np.arange(layout.tokens - layout.rows, dtype=np.int32)  # a slot stands for its place, as `expand` wants it
    tiles = tile(planned.launches[0], layout.rows, found.place, slots, cut, shortest)
    ids = np.arange(layout.rows, dtype=np.int32)
    labels = np.array([3, 5], np.int32)
    return PassArrays(
        ids, layout.position_ids, layout.read_rows, labels, tiles, found.store_rows, found.store_slots
    ), found.place


def filled(arrays, cut):
    key = graph_key(arrays, BUCKETS, cut)
    parts, size = places(key, cut)
    into = np.full(size, 77, np.int32)
    used = fill(arrays, key, parts, cut, into)
    return key, {p.name: into[p.begin : p.end].reshape(p.shape) for p in parts}, used, size


@given(case=cases(), tokens=st.sampled_from([4, 16, 64]), shortest=st.sampled_from([3, 256]))
@settings(max_examples=100, deadline=None)
def test_counts_are_the_mask_and_padding_sees_itself(case, tokens, shortest):
    layout, pages = case
    cut = Cut(tokens, 8)
    arrays, place = arrays_of(layout, pages, cut, shortest)
    key, views, used, size = filled(arrays, cut)
    assert used <= size
    extra = key.tokens - layout.rows
    wide = np.append(place, len(place) + np.arange(extra)).astype(np.int32)
    names = ("tiles", "slots", "runs", "item_start", "merges")
    counts = expand(replace(arrays.tiles, **{name: views[name] for name in names}), wide)
    np.testing.assert_array_equal(counts[: layout.rows, : layout.tokens], visible(layout).astype(np.int32))
    np.testing.assert_array_equal(counts[layout.rows :, layout.tokens :], np.eye(extra, dtype=np.int32))
    assert not counts[: layout.rows, layout.tokens :].any()
    assert not counts[layout.rows :, : layout.tokens].any()


@given(case=cases())
@settings(max_examples=50, deadline=None)
def test_the_last_layer_covers_every_read(case):
    layout, pages = case
    cut = Cut(16, 8)
    arrays, _ = arrays_of(layout, pages, cut)
    _, views, _, _ = filled(arrays, cut)
    covered = np.concatenate([np.arange(r, r + n) for r, n in views["last_tiles"][:, [ROW, ROWS]]])
    assert np.isin(layout.read_rows, covered).all()
    np.testing.assert_array_equal(views["reads"][: len(layout.read_rows)], layout.read_rows)
    assert np.isin(views["reads"], layout.read_rows).all()
    np.testing.assert_array_equal(views["labels"], [3, 5] + [0] * (LABELS - 2))


@given(case=cases(), columns=st.integers(1, 32), tokens=st.sampled_from([8, 64, 128]))
@settings(max_examples=100, deadline=None)
def test_what_is_split_fits_its_graph(case, columns, tokens):
    layout, pages = case
    cut = Cut(tokens, columns)
    arrays, _ = arrays_of(layout, pages, cut, shortest=1)
    assert arrays.tiles.parts <= part_capacity(SPLIT_TOKENS, cut)
    filled(arrays, cut)


def test_buckets_pad_little_and_end_at_the_limit():
    for most in (500, 4096, 16_384, 20_000):
        buckets = np.array(token_buckets(most))
        assert buckets[-1] == most
        assert (np.diff(buckets) > 0).all()
        large = buckets[buckets >= 1024]
        assert (np.diff(large) <= large[:-1] / 8).all()


def test_a_pass_beyond_the_graphs_has_no_key():
    layout = Layout.of([Segment(-1, 5000), Segment(0, 5, reads=(4,))])
    cut = Cut(64, 8)
    arrays, _ = arrays_of(layout, Pages.scratch(layout, 16), cut)
    assert graph_key(arrays, BUCKETS, cut) is None


def test_many_short_requests_find_room():
    """A hundred requests, each with its partial tiles."""
    layout = Layout.of([s for i in range(100) for s in (Segment(-1, 20), Segment(2 * i, 10, reads=(9,)))])
    cut = Cut(64, 8)
    arrays, _ = arrays_of(layout, Pages.scratch(layout, 16), cut)
    key = graph_key(arrays, BUCKETS, cut)
    assert len(arrays.tiles.tiles) <= tile_capacity(key.tokens, cut, key.split)
    assert key.reads == few_reads(key.tokens)


def test_a_row_that_several_pages_keep_takes_a_graph_with_room_for_it():
    """A prefix that ends inside a page, kept again at the beginning of each page that continues it."""
    layout = Layout.of([Segment(-1, 5), *[Segment(0, 12), Segment(0, 12)], Segment(1, 1), Segment(2, 1)])
    kept = Pages(
        16, 5, tuple(np.arange(n, n + count, dtype=np.int32) for n, count in ((0, 1), (1, 2), (3, 2))) + (None,) * 2
    )
    arrays, _ = arrays_of(layout, kept, Cut(16, 8))
    assert len(arrays.keep_rows) > len(arrays.ids)
    key, views, _, _ = filled(arrays, Cut(16, 8))
    assert key.tokens >= len(arrays.keep_rows)
    np.testing.assert_array_equal(views["keep_rows"][: len(arrays.keep_rows)], arrays.keep_rows)
