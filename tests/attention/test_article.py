"""The article's table, to the edges of its rows."""

import pytest

from attention.article import (
    APPENDED,
    DEFAULT,
    FEW,
    FEW_REQUESTS,
    LONG_AND_MANY_SHORT,
    LONG_PREFIX,
    NEW_PREFIX_SHORT_ITEMS,
    SHORT_ITEM,
    SHORT_PREFIX,
    SHORT_PREFIX_MANY,
    SHORTEST_ITEM,
    row,
)


@pytest.mark.parametrize(
    ("prefix", "item", "items", "cached", "expected"),
    [
        (LONG_PREFIX, SHORTEST_ITEM, FEW, False, FEW_REQUESTS),
        (LONG_PREFIX, SHORTEST_ITEM, FEW + 1, False, LONG_AND_MANY_SHORT),
        (LONG_PREFIX - 1, SHORTEST_ITEM, FEW + 1, False, NEW_PREFIX_SHORT_ITEMS),
        (LONG_PREFIX, SHORTEST_ITEM + 0.1, FEW + 1, True, DEFAULT),
        (SHORT_PREFIX, 100.0, FEW + 1, True, SHORT_PREFIX_MANY),
        (SHORT_PREFIX + 1, 100.0, FEW + 1, True, APPENDED),
        (SHORT_PREFIX + 1, SHORT_ITEM, FEW + 1, True, DEFAULT),
        (SHORT_PREFIX + 1, SHORT_ITEM, FEW + 1, False, NEW_PREFIX_SHORT_ITEMS),
        (SHORT_PREFIX + 1, SHORT_ITEM + 0.1, FEW + 1, False, DEFAULT),
    ],
)
def test_the_edges_of_its_rows(prefix, item, items, cached, expected):
    assert row(prefix, item, items, cached) is expected
