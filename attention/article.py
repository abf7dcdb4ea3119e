"""The article's table of recommendations (its section 5.3), to be held against what a machine measures."""

from __future__ import annotations

from dataclasses import dataclass

from attention.plans import Strategy

FEW = 4  # requests: "M <= 4"
SHORT_PREFIX = 96  # tokens: "P <= 96"
LONG_PREFIX = 2048  # tokens: "P in the thousands"
SHORTEST_ITEM = 4  # tokens: "S <= 4"
SHORT_ITEM = 16  # tokens: items of which several fit into one tile of query rows


@dataclass(frozen=True, slots=True)
class Row:
    """One row: when it applies, and what it recommends, best first."""

    scene: str
    recommends: tuple[Strategy, ...]


ARBITRARY_MASK = Row("an arbitrary mask", (Strategy.CUSTOM_MASK,))
FEW_REQUESTS = Row("few requests (M <= 4)", (Strategy.DIRECT_RAGGED, Strategy.NAIVE))
LONG_AND_MANY_SHORT = Row(
    "long prefix, large batch, very short items",
    (Strategy.MULTI_ITEM, Strategy.CASCADE, Strategy.SPLIT_CACHE),
)
SHORT_PREFIX_MANY = Row("short prefix, large batch", (Strategy.DIRECT_RAGGED,))
APPENDED = Row("prefix K/V exists, longer items", (Strategy.DIRECT_RAGGED,))
NEW_PREFIX_SHORT_ITEMS = Row("prefix K/V new, short items", (Strategy.MULTI_ITEM,))
DEFAULT = Row("the general case", (Strategy.DIRECT_RAGGED,))
ROWS = (
    ARBITRARY_MASK,
    FEW_REQUESTS,
    LONG_AND_MANY_SHORT,
    SHORT_PREFIX_MANY,
    APPENDED,
    NEW_PREFIX_SHORT_ITEMS,
    DEFAULT,
)


def row(prefix: int, mean_item: float, items: int, cached: bool, arbitrary_mask: bool = False) -> Row:
    """The row that applies. prefix, mean_item: tokens; items: how many; cached: the prefix K/V exists already."""
    if arbitrary_mask:
        return ARBITRARY_MASK
    if items <= FEW:
        return FEW_REQUESTS
    if prefix >= LONG_PREFIX and mean_item <= SHORTEST_ITEM:
        return LONG_AND_MANY_SHORT
    if prefix <= SHORT_PREFIX:
        return SHORT_PREFIX_MANY
    if cached and mean_item > SHORT_ITEM:
        return APPENDED
    if not cached and mean_item <= SHORT_ITEM:
        return NEW_PREFIX_SHORT_ITEMS
    return DEFAULT
