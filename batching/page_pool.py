"""Ids of the K/V pages that outlive a pass. Ids only: the tensors are the device's."""

from __future__ import annotations

import numpy as np

from attention.layout import Ints


class PagePool:
    """A free list of page ids 0 .. pages-1."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> Ints | None:
        """`count` pages, or None if there are not so many."""
        if count > len(self._free):
            return None
        return np.array([self._free.pop() for _ in range(count)], np.int32)

    def release(self, pages: Ints) -> None:
        returned = pages.tolist()
        assert not set(returned) & set(self._free), "a page is released once"
        self._free.extend(reversed(returned))
