"""Searches that wait for something which is given to one after the other, in an order of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from batching.searches import SearchTicket

Choose = Callable[[Collection[SearchTicket]], SearchTicket | None]


class Line:
    """Lives on one event loop."""

    def __init__(self, choose: Choose, give: Callable[[SearchTicket], None]) -> None:
        """choose: who of those that wait is next; None: nobody yet. give: what that one gets."""
        self._choose = choose
        self._give = give
        self._waiting: dict[SearchTicket, asyncio.Future[None]] = {}

    async def wait(self, search: SearchTicket) -> None:
        """Until it was given. Whoever is cancelled here may have been given, too."""
        given = self._waiting[search] = asyncio.get_running_loop().create_future()
        try:
            self.move()
            await given
        finally:
            self._waiting.pop(search, None)

    def move(self) -> None:
        """Gives to whoever may have it now."""
        while self._waiting and (chosen := self._choose(self._waiting.keys())) is not None:
            self._give(chosen)
            given = self._waiting.pop(chosen)
            if not given.done():
                given.set_result(None)
