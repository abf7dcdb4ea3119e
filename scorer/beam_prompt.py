"""A search's prompt: its K/V on the way, then held."""

from __future__ import annotations

import asyncio
from typing import Any

from attention.layout import Ints
from batching.batcher import Batcher
from batching.holding import Held, hold
from batching.runs import Lease
from batching.scheduler import Asked


class Prompt:
    """Begins where it is made. Whoever makes it must `leave`."""

    def __init__(self, batcher: Batcher, ids: Ints, asked: Asked, deadline: float | None) -> None:
        """ids: those whose K/V is wanted, at least one."""
        self._cache = batcher.cache
        self._early: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._left = False
        self._holding = asyncio.create_task(hold(batcher, ids, asked, deadline, self._told))
        self._holding.add_done_callback(self._ended)

    @property
    def under_way(self) -> bool:
        """Whether it is not held yet: of what the batcher has not answered, one request is this. Any thread may ask."""
        return not self._holding.done()

    async def coming(self) -> Lease | None:
        """Pages in which what is enqueued from now on finds the K/V, though it may turn out not to be sound; None where
        it is there already, or never comes."""
        either: set[asyncio.Future[Any]] = {self._early, self._holding}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return self._early.result() if self._early.done() and not self._holding.done() else None

    async def held(self) -> tuple[Held, bool]:
        """The K/V, and whether it is what `coming` gave. Raises as `hold` does."""
        held = await self._holding
        return held, self._early.done() and self._early.result().last is held.lease.last

    def leave(self) -> None:
        """Nobody needs it any more."""
        self._left = True
        if self._early.done():
            self._cache.release(self._early.result())
        if not self._holding.cancel():
            self._ended(self._holding)

    def _told(self, lease: Lease) -> None:
        if self._left:
            self._cache.release(lease)
        else:
            self._early.set_result(lease)

    def _ended(self, holding: asyncio.Task[Held]) -> None:
        """Looks at what came of it, so that asyncio does not complain of an exception that nobody saw."""
        if not holding.cancelled() and holding.exception() is None and self._left:
            self._cache.release(holding.result().lease)
