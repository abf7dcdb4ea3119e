"""Ids of the K/V pages that outlive a pass. Ids only: the tensors are the device's."""

from __future__ import annotations


class PagePool:
    """A free list of page ids 0 .. pages-1."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._taken = bytearray(pages)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A page, or None if there is none."""
        if not self._free:
            return None
        page = self._free.pop()
        self._taken[page] = True
        return page

    def release(self, page: int) -> None:
        assert self._taken[page], "a page is released once"
        self._taken[page] = False
        self._free.append(page)
