"""Ids of the K/V pages that outlive a pass. Ids only: the tensors are the device's."""

from __future__ import annotations

import numpy as np

from attention.layout import Ints


class PagePool:
    """A free list of page ids 0 .. pages-1. What is released last is taken first."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.free = pages
        self._free = np.arange(pages - 1, -1, -1, dtype=np.int32)  # the first `free` of it are
        self._taken = np.zeros(pages, bool)

    def take(self, count: int) -> Ints:
        """So many pages, or as many as there are."""
        left = max(0, self.free - count)
        pages: Ints = self._free[left : self.free][::-1].copy()
        self.free = left
        self._taken[pages] = True
        return pages

    def release(self, pages: Ints) -> None:
        """Gives back distinct pages, of which the last will be taken first."""
        assert self._taken[pages].all(), "a page is released once"
        self._taken[pages] = False
        self._free[self.free : self.free + len(pages)] = pages
        self.free += len(pages)
