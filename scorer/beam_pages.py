"""Where the beams' own K/V lies."""

from __future__ import annotations

import numpy as np

from attention.layout import Ints
from batching.page_pool import PagePool


class BeamPages:
    """The pages of the beams' own K/V: ids from `first` on, dealt out to whole searches."""

    def __init__(self, first: int, pages: int, page_size: int) -> None:
        self.pages = pages
        self.tokens = pages * page_size
        self._first = first
        self._page_size = page_size
        self._pool = PagePool(pages)

    def count(self, tokens: int) -> int:
        """Pages for so many tokens."""
        return -(-tokens // self._page_size)

    def take(self, count: int) -> Ints:
        """Ids of so many pages, which must be free."""
        return self._pool.take(count) + np.int32(self._first)

    def give_back(self, pages: Ints) -> None:
        self._pool.release(pages[::-1] - np.int32(self._first))

    def slots(self, pages: Ints, tokens: Ints) -> Ints:
        """Where the tokens with these numbers of a search lie."""
        size = np.int32(self._page_size)
        slots: Ints = (pages[tokens // size] * size + tokens % size).astype(np.int32)
        return slots
