import numpy as np
import pytest
from hypothesis import given

from attention.layout import Layout, LayoutError, Segment, indptr, ranges, unshared
from attention.mask import visible
from tests.attention.draw import cases, examples


def test_positions_restart_behind_the_prefix():
    layout = Layout.of([Segment(-1, 3), Segment(0, 2), Segment(0, 3)])
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4, 5]


def test_cached_tokens_are_keys_but_no_rows():
    layout = Layout.of([Segment(-1, 3, cached=2), Segment(0, 2, reads=(1,))])
    assert layout.rows == 3
    assert layout.tokens == 5
    assert layout.row_tokens.tolist() == [2, 3, 4]
    assert layout.read_rows.tolist() == [2]


def test_visible_is_ancestors_and_self_causally():
    layout = Layout.of([Segment(-1, 2), Segment(0, 1), Segment(0, 2)])
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    np.testing.assert_array_equal(visible(layout), np.array(expected, bool))


def test_a_window_counts_the_row_itself():
    layout = Layout.of([Segment(-1, 2), Segment(0, 2)])
    np.testing.assert_array_equal(visible(layout, 2)[3], [False, False, True, True])


@given(case=cases())
@examples(60)
def test_a_row_sees_as_many_tokens_as_its_position_says(case):
    layout, _ = case
    np.testing.assert_array_equal(visible(layout).sum(axis=1), layout.position_ids + 1)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "a layout has at least one segment"),
        ([Segment(0, 1)], "a parent is -1 or an earlier segment"),
        ([Segment(-2, 1)], "a parent is -1 or an earlier segment"),
        ([Segment(-1, 0)], "a segment has at least one token, and at most all of them cached"),
        ([Segment(-1, 2, cached=-1)], "a segment has at least one token, and at most all of them cached"),
        ([Segment(-1, 2, cached=3)], "a segment has at least one token, and at most all of them cached"),
        (
            [Segment(-1, 4, cached=2), Segment(0, 2, cached=1)],
            "a segment with cached tokens continues a wholly cached parent",
        ),
        ([Segment(-1, 4, reads=(4,))], "a read lies inside the computed part of its segment"),
        ([Segment(-1, 4, cached=2, reads=(1,))], "a read lies inside the computed part of its segment"),
    ],
)
def test_impossible_layouts_are_refused(segments, message):
    with pytest.raises(LayoutError) as refused:
        Layout.of(segments)
    assert str(refused.value) == message


# A prefix of three, on it an item of two and a branch of four tokens, on the branch two items; and a lone segment.
FOREST = [
    Segment(-1, 3),
    Segment(0, 2, reads=(1,)),
    Segment(0, 4, reads=(0, 3)),
    Segment(2, 1, reads=(0,)),
    Segment(2, 5, reads=(2, 4)),
    Segment(-1, 6, reads=(5,)),
]


def test_where_everything_lies():
    layout = Layout.of(FOREST)
    assert layout.start.tolist() == [0, 3, 3, 7, 7, 0]
    assert layout.token_start.tolist() == layout.row_start.tolist() == [0, 3, 5, 9, 10, 15, 21]
    assert (layout.segments, layout.tokens, layout.rows) == (6, 21, 21)
    assert layout.is_leaf.tolist() == [False, True, False, True, True, True]
    assert layout.leaves.tolist() == [1, 3, 4, 5]
    assert [layout.path(s) for s in range(6)] == [(0,), (0, 1), (0, 2), (0, 2, 3), (0, 2, 4), (5,)]
    assert [tree.tolist() for tree in layout.trees] == [[0, 1, 2, 3, 4], [5]]
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5]
    assert layout.read_rows.tolist() == [4, 5, 8, 9, 12, 14, 20]
    names = "parent length cached read_indptr read_offsets start token_start row_start leaves position_ids read_rows"
    arrays = [getattr(layout, name) for name in names.split()]
    assert {array.dtype for array in (*arrays, layout.row_tokens, *layout.trees)} == {np.dtype(np.int32)}


def test_what_is_cached_has_no_rows():
    layout = Layout.of([Segment(-1, 3, cached=3), Segment(0, 4, cached=1, reads=(1, 3)), Segment(0, 2, reads=(0,))])
    assert layout.row_start.tolist() == [0, 0, 3, 5]
    assert layout.token_start.tolist() == [0, 3, 7, 9]
    assert layout.row_tokens.tolist() == [4, 5, 6, 7, 8]
    assert layout.position_ids.tolist() == [4, 5, 6, 3, 4]
    assert layout.read_rows.tolist() == [0, 2, 3]


def test_unshared_gives_every_leaf_ancestors_of_its_own():
    """Copies of each path, root first; the reads of the leaves only, as an inner segment's would be read more than
    once; nothing cached."""
    layout, source = unshared(Layout.of(FOREST))
    assert source.tolist() == [0, 1, 0, 2, 3, 0, 2, 4, 5]
    assert source.dtype == np.int32
    assert layout.parent.tolist() == [-1, 0, -1, 2, 3, -1, 5, 6, -1]
    assert layout.length.tolist() == [3, 2, 3, 4, 1, 3, 4, 5, 6]
    assert layout.cached.tolist() == [0] * 9
    assert layout.read_indptr.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 4, 5]
    assert layout.read_offsets.tolist() == [1, 0, 2, 4, 5]


def test_unshared_computes_what_was_cached():
    layout, _ = unshared(Layout.of([Segment(-1, 3, cached=3), Segment(0, 2, reads=(1,)), Segment(0, 2)]))
    assert layout.cached.tolist() == [0, 0, 0, 0]
    assert layout.rows == 10


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [([5, 0, 9], [2, 0, 3], [5, 6, 9, 10, 11]), ([], [], []), ([7], [1], [7]), ([3, 3], [2, 2], [3, 4, 3, 4])],
)
def test_ranges(first, count, expected):
    made = ranges(np.array(first, np.int32), np.array(count, np.int32))
    assert made.tolist() == expected
    assert made.dtype == np.int32


def test_indptr():
    assert indptr([2, 0, 3]).tolist() == [0, 2, 2, 5]
    assert indptr([]).tolist() == [0]
    assert indptr([1]).dtype == np.int32


# --- who sees whom, by hand


def test_a_forest_by_hand():
    """Each row by the tokens that it sees: its segment's ancestors whole, its own up to itself, other trees never."""
    seen = visible(Layout.of(FOREST))
    rows = {0: [0], 2: [0, 1, 2], 4: [0, 1, 2, 3, 4], 5: [0, 1, 2, 5], 9: [0, 1, 2, 5, 6, 7, 8, 9]}
    rows |= {10: [0, 1, 2, 5, 6, 7, 8, 10], 14: [0, 1, 2, *range(5, 9), *range(10, 15)], 15: [15], 20: [*range(15, 21)]}
    for row, tokens in rows.items():
        assert np.flatnonzero(seen[row]).tolist() == tokens
    assert seen.dtype == np.bool_


@pytest.mark.parametrize(
    ("window", "tokens"), [(1, [14]), (2, [13, 14]), (5, [*range(10, 15)]), (6, [8, *range(10, 15)])]
)
def test_a_window_goes_on_in_the_parent(window, tokens):
    """The last row of segment 4 is position 11; positions 3-6 are tokens 5-8."""
    assert np.flatnonzero(visible(Layout.of(FOREST), window)[14]).tolist() == tokens


def test_a_part_of_the_segments_with_their_ancestors():
    layout = Layout.of(FOREST)
    part = visible(layout, segments=np.array([0, 2, 4], np.int32))
    rows, tokens = ([*range(3), *range(5, 9), *range(10, 15)] for _ in range(2))
    np.testing.assert_array_equal(part, visible(layout)[np.ix_(rows, tokens)])


def test_cached_tokens_are_seen_and_see_nothing():
    seen = visible(Layout.of([Segment(-1, 3, cached=2), Segment(0, 2)]))
    expected = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    np.testing.assert_array_equal(seen, np.array(expected, bool))
