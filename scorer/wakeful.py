"""An event loop that stays awake between calls that follow one another.

A processor that sleeps wakes slowly, in a virtual machine above all, and a call alone waits a handful of times: for the
network, for a thread, for the device. So for a while after each event the loop naps, too short for the processor to
sleep deeply, and without the interpreter, which other threads have meanwhile.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

NAP_SECONDS = 50e-6
FEW_FILES = 1024  # descriptors beyond it select does not take


class WakefulSelector(selectors.DefaultSelector):
    """The platform's selector; naps for `awake` seconds after an event, in place of sleeping until the next."""

    def __init__(self, awake: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.awake = awake
        self._clock = clock
        self._until = clock() + awake

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As the platform's: what is ready, at the latest after `timeout` seconds; None: whenever something is."""
        now = self._clock()
        end = None if timeout is None else now + timeout
        while now < self._until and (end is None or now < end):
            if found := super().select(0):
                self._until = now + self.awake
                return found
            self.nap()
            now = self._clock()
        found = super().select(None if end is None else max(0.0, end - now))
        if found:
            self._until = self._clock() + self.awake
        return found

    def nap(self) -> None:
        """At most NAP_SECONDS; an event ends it, unless the process has very many files."""
        if self.fileno() < FEW_FILES:
            select.select([self.fileno()], [], [], NAP_SECONDS)
        else:
            time.sleep(NAP_SECONDS)


class WakefulLoop(asyncio.SelectorEventLoop):
    """One that sleeps as usual until it is told to stay awake."""

    def __init__(self) -> None:
        self._own = WakefulSelector()
        super().__init__(self._own)

    def stay_awake(self, seconds: float) -> None:
        """From now on, for so long after each event; 0: it sleeps at once."""
        self._own.awake = seconds


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, on a loop that can stay awake."""
    with asyncio.Runner(loop_factory=WakefulLoop) as runner:
        return runner.run(main)


def stay_awake(seconds: float) -> None:
    """Tells the running loop, where it is one that can."""
    if isinstance(loop := asyncio.get_running_loop(), WakefulLoop):
        loop.stay_awake(seconds)
