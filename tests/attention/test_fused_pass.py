"""A pass of the fused strategy alone is cut by segments as its plan is token by token, to the int."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.cuts import Cut
from attention.fused_pass import FusedPass
from attention.layout import Layout, Segment
from attention.mask import visible
from attention.planner import plan
from attention.plans import Pages, Strategy
from attention.residency import Residency
from attention.tiles import Tiles, expand, tile
from tests.attention.draw import cases, examples

CUTS = st.builds(
    Cut, st.sampled_from([1, 7, 16, 64]), st.sampled_from([0, 1, 8]), st.sampled_from([8, 32]), st.booleans()
)


def planned(layout, pages):
    made = plan(layout, [Strategy.FUSED] * len(layout.leaves), pages)
    return made.launches[0], Residency.of(layout, pages, made)


@given(case=cases(), cut=CUTS, shortest=st.sampled_from([1, 5, 10_000]))
@examples(300)
def test_equals_the_plan(case, cut, shortest):
    layout, pages = case
    launch, found = planned(layout, pages)
    if len(found.copy_from):
        with pytest.raises(AssertionError, match=r"^the pages of one path begin where its segments do$"):
            FusedPass.of(layout, pages, cut, shortest)
        return
    made = FusedPass.of(layout, pages, cut, shortest)
    expected = tile(launch, layout.rows, found.place, found.cached_slots, cut, shortest)
    pairs = [(getattr(made.tiles, field.name), getattr(expected, field.name)) for field in fields(Tiles)]
    for got, want in [*pairs, (made.keep_rows, found.store_rows), (made.keep_slots, found.store_slots)]:
        assert got.dtype == want.dtype == np.int32
        np.testing.assert_array_equal(got, want)
    assert made.tiles.tiles.flags.c_contiguous


@given(case=cases(deep=False), cut=CUTS)
@examples(100)
def test_counts_are_the_mask(case, cut):
    """By the kernel's rules, without the plan."""
    layout, pages = case
    made = FusedPass.of(layout, pages, cut, 5)
    _, found = planned(layout, pages)
    token_of = {slot: i for i, slot in enumerate(found.cached_slots.tolist())}
    by_place = np.array([token_of[slot] for slot in made.tiles.slots.tolist()], np.int32)
    counts = expand(replace(made.tiles, slots=by_place), found.place)
    np.testing.assert_array_equal(counts, visible(layout).astype(np.int32))


def test_items_that_others_lie_between_share_what_is_before_them():
    """A prefix with items before and behind those of a longer one."""
    given = [(-1, 40, 40), (0, 3), (0, 24), (2, 5), (2, 6), (0, 7)]
    layout = Layout.of([Segment(*one) for one in given])
    pages = Pages(16, 5, (np.array([4, 0, 2], np.int32), *[None] * 5))
    made = FusedPass.of(layout, pages, Cut(64, 8))
    launch, found = planned(layout, pages)
    expected = tile(launch, layout.rows, found.place, found.cached_slots, Cut(64, 8))
    np.testing.assert_array_equal(made.tiles.tiles, expected.tiles)
    assert len(made.tiles.slots) == 40, "kept once for all"
    assert made.tiles.runs.tolist() == [[3, 24]]


def test_what_is_cached_lies_in_pages():
    layout = Layout.of([Segment(-1, 16, 16), Segment(0, 2)])
    with pytest.raises(AssertionError, match=r"^segment 0 has cached tokens but no kept pages$"):
        FusedPass.of(layout, Pages.scratch(layout, 16), Cut(64, 8))
