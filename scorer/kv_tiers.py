"""Evicted prefixes in slower stores: copied down off the hot path, found again, and brought up while requests wait."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from batching.tiering import Found, Rates
from batching.types import Ints
from scorer.kv_copies import PageCopies
from scorer.kv_entry import BadEntry
from scorer.kv_stores import Store
from scorer.threads import on_thread
from scorer.tier_totals import TierTotals

log = logging.getLogger(__name__)

READERS = 2
FAULTS = 3  # in a row, after which a store rests
REST_SECONDS = 10.0
MOST_BEHIND = 256 << 20  # bytes that wait to be written: what comes then is not copied down


@dataclass(slots=True, eq=False)
class _Watched:
    """A store that rests after faults, and how often what it may hold was there."""

    store: Store
    faults: int = 0
    resting_until: float = 0.0
    likely: float = 1.0


class Behind(Exception):
    """The stores are slower than what there is to be written."""


class KvTiers:
    """Stores, the fastest first, below the pages. It implements batching.tiering.Tiers.

    Pages are copied on one thread, stores are read on others and written on another, all beside the passes.
    """

    def __init__(
        self, copies: PageCopies, stores: Sequence[Store], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._copies = copies
        self._stores = [_Watched(store) for store in stores]
        self._clock = clock
        self._reading = ThreadPoolExecutor(READERS, thread_name_prefix="tier-reads")
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="tier-copies")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="tier-writes")
        self._behind = 0
        self._counting = threading.Lock()
        self.totals = TierTotals()

    @property
    def names(self) -> list[str]:
        return [watched.store.name for watched in self._stores]

    def rates(self) -> Rates:
        """First beliefs about these stores."""
        return Rates({watched.store.name: watched.store.first for watched in self._stores})

    def found(self, keys: Sequence[bytes]) -> list[Found]:
        """For each store the leading run that it has, or may have; the fastest first."""
        size = self._copies.row_bytes
        runs = (
            (each, next((n for n, key in enumerate(keys) if not each.store.has(key)), len(keys)))
            for each in self._awake()
        )
        return [Found(each.store.name, run, run * size, each.likely, each.store.sure) for each, run in runs if run]

    def _awake(self) -> list[_Watched]:
        now = self._clock()
        return [watched for watched in self._stores if watched.resting_until <= now]

    async def read(self, found: Found, keys: Sequence[bytes]) -> Sequence[Tensor]:
        """The contents, from the first on, as many as are there and sound."""
        watched = next(each for each in self._stores if each.store.name == found.tier)
        stop: list[bool] = []
        try:
            contents = await asyncio.shield(on_thread(self._reading, self._read, watched, keys, stop))
        finally:
            stop.append(True)  # whoever gave up needs no more of them
        watched.likely += 0.2 * (len(contents) / len(keys) - watched.likely)
        return contents

    def _read(self, watched: _Watched, keys: Sequence[bytes], stop: list[bool]) -> list[Tensor]:
        contents: list[Tensor] = []
        for key in keys:
            content = None if stop else self._got(watched, key)
            if content is None:
                break
            if len(content) != self._copies.row_bytes:
                self.totals.fault(watched.store.name, "foreign")
                break
            contents.append(content)
        self.totals.add(watched.store.name, "up", sum(map(len, contents)))
        return contents

    def _got(self, watched: _Watched, key: bytes) -> Tensor | None:
        try:
            content = watched.store.get(key)
        except BadEntry as error:
            self.totals.fault(watched.store.name, error.reason)
            log.warning("%s tier: %s; the block is computed again", watched.store.name, error)
            return None
        except OSError as error:
            self._trouble(watched, error)
            return None
        watched.faults = 0
        return content

    def _trouble(self, watched: _Watched, error: OSError) -> None:
        self.totals.fault(watched.store.name, "io")
        watched.faults += 1
        if watched.faults >= FAULTS:
            watched.resting_until = self._clock() + REST_SECONDS
            log.warning("%s tier rests for %g s: %s", watched.store.name, REST_SECONDS, error)

    async def fill(self, pages: Ints, contents: Sequence[Tensor]) -> float:
        """Copies contents into pages that nobody else uses; the seconds that it took once it was its turn."""

        def copy() -> float:
            began = time.perf_counter()
            self._copies.into(pages, contents)
            return time.perf_counter() - began

        return await on_thread(self._copying, copy) if len(pages) else 0.0

    async def store(self, keys: Sequence[bytes], pages: Ints) -> None:
        """Copies pages out; returns when they may change, and writing goes on behind that. Raises Behind."""
        size = len(keys) * self._copies.row_bytes
        with self._counting:
            if self._behind and self._behind + size > MOST_BEHIND:
                raise Behind(f"{self._behind} bytes wait to be written")
            self._behind += size
        try:
            contents = await on_thread(self._copying, self._copies.out, pages)
            self._writing.submit(self._write, list(keys), contents, size)
        except BaseException:
            self._caught_up(size)
            raise

    def _caught_up(self, size: int) -> None:
        with self._counting:
            self._behind -= size

    def _write(self, keys: Sequence[bytes], contents: Sequence[Tensor], size: int) -> None:
        try:
            for watched in self._awake():
                self._write_to(watched, keys, contents)
        finally:
            self._caught_up(size)

    def _write_to(self, watched: _Watched, keys: Sequence[bytes], contents: Sequence[Tensor]) -> None:
        for key, content in zip(keys, contents, strict=True):
            try:
                watched.store.put(key, content)
            except OSError as error:
                self._trouble(watched, error)
                return
            watched.faults = 0
            self.totals.add(watched.store.name, "down", len(content))

    def flush(self) -> None:
        """Returns when everything that was to be written is. Blocks."""
        self._copying.submit(lambda: None).result()
        self._writing.submit(lambda: None).result()

    def close(self) -> None:
        """Ends what is under way, then lets go of the stores."""
        for pool in (self._copying, self._reading, self._writing):
            pool.shutdown(wait=True)
        for watched in self._stores:
            watched.store.close()
