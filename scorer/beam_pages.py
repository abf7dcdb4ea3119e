"""Where the beams' own K/V lies."""

from __future__ import annotations

import asyncio

import numpy as np

from attention.layout import Ints
from batching.page_pool import PagePool


class BeamPages:
    """The pages of the beams' own K/V: ids from `first` on, dealt out to whole searches in the order that they came."""

    def __init__(self, first: int, pages: int, page_size: int) -> None:
        self.tokens = pages * page_size
        self._first = first
        self._page_size = page_size
        self._pool = PagePool(pages)
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, tokens: int) -> Ints:
        """Page ids for so many tokens, as soon as they are free. Raises AssertionError where there never are."""
        assert tokens <= self.tokens, "checked when the search was accepted"
        count = -(-tokens // self._page_size)
        async with self._turn:
            while self._pool.free < count:
                self._freed.clear()
                await self._freed.wait()
        return np.array([self._pool.take() for _ in range(count)], np.int32) + np.int32(self._first)

    def give_back(self, pages: Ints) -> None:
        for page in reversed((pages - np.int32(self._first)).tolist()):
            self._pool.release(page)
        self._freed.set()

    def slots(self, pages: Ints, tokens: Ints) -> Ints:
        """Where the tokens with these numbers of a search lie."""
        size = np.int32(self._page_size)
        slots: Ints = (pages[tokens // size] * size + tokens % size).astype(np.int32)
        return slots
