import numpy as np
import pytest
from hypothesis import given, settings

from attention.layout import Layout, LayoutError, Segment
from attention.mask import visible
from tests.attention.draw import cases


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
@settings(max_examples=60, deadline=None)
def test_a_row_sees_as_many_tokens_as_its_position_says(case):
    layout, _ = case
    np.testing.assert_array_equal(visible(layout).sum(axis=1), layout.position_ids + 1)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "at least one segment"),
        ([Segment(0, 1)], "earlier segment"),
        ([Segment(-2, 1)], "earlier segment"),
        ([Segment(-1, 0)], "at least one token"),
        ([Segment(-1, 2, cached=3)], "at most all"),
        ([Segment(-1, 4, cached=2), Segment(0, 2, cached=1)], "wholly cached parent"),
        ([Segment(-1, 4, reads=(4,))], "inside the computed part"),
        ([Segment(-1, 4, cached=2, reads=(1,))], "inside the computed part"),
    ],
)
def test_impossible_layouts_are_refused(segments, message):
    with pytest.raises(LayoutError, match=message):
        Layout.of(segments)
