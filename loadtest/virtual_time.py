"""An event loop whose clock jumps: what waits an hour is done at once, and every run of it is the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Final. `time()` stands still while callbacks run and jumps to the next timer when none is left.

    No thread and no socket may take part: nothing waits for them.
    """

    def __init__(self) -> None:
        super().__init__(_NoWaiting(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _NoWaiting(selectors.DefaultSelector):
    """Asked to wait, it moves the clock instead."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits for something that no timer will bring")
        self._loop.now += max(timeout, 0.0)
        return super().select(0)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, in virtual time that begins at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
