"""Evicted prefixes in slower stores: copied down off the hot path, found again, and brought up while requests wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from attention.kv_pages import KvPages
from batching.tiering import Found, Rates
from batching.types import Ints
from scorer.kv_codec import Codec, Layers
from scorer.kv_entry import BadEntry
from scorer.kv_stores import Store
from scorer.tier_totals import TierTotals

log = logging.getLogger(__name__)
T = TypeVar("T")

IO_THREADS = 2
FAULTS = 3  # in a row, after which a store rests
REST_SECONDS = 10.0


class OnDevice(Protocol):
    """Calls a function on the device's thread, between passes."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


@dataclass(slots=True, eq=False)
class _Watched:
    """A store that rests after faults, and how often what it may hold was there."""

    store: Store
    faults: int = 0
    resting_until: float = 0.0
    likely: float = 1.0


class KvTiers:
    """Stores, the fastest first, below one KvPages. It implements batching.tiering.Tiers.

    run  the device's thread: pages are copied there
    """

    def __init__(
        self,
        kv_pages: KvPages,
        codec: Codec,
        stores: Sequence[Store],
        run: OnDevice,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kv_pages = kv_pages
        self._codec = codec
        self._stores = [_Watched(store) for store in stores]
        self._run = run
        self._clock = clock
        self._io = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="tiers")
        self.totals = TierTotals()

    @property
    def names(self) -> list[str]:
        return [watched.store.name for watched in self._stores]

    def rates(self) -> Rates:
        """First beliefs about these stores."""
        return Rates({watched.store.name: watched.store.first for watched in self._stores})

    def found(self, keys: Sequence[bytes]) -> Found | None:
        """The leading run of which one store likely has most; of equal ones in the fastest."""
        best: Found | None = None
        if not self._kv_pages.ready:
            return None
        size = self._codec.size(self._kv_pages.shapes())
        for watched in self._awake():
            run = next((n for n, key in enumerate(keys) if not watched.store.has(key)), len(keys))
            if run and (best is None or run * watched.likely > best.blocks * best.likely):
                best = Found(watched.store.name, run, run * size, watched.likely)
        return best

    def _awake(self) -> list[_Watched]:
        now = self._clock()
        return [watched for watched in self._stores if watched.resting_until <= now]

    async def read(self, found: Found, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The contents, from the first on, as many as are there and sound."""
        watched = next(each for each in self._stores if each.store.name == found.tier)
        stop: list[bool] = []
        try:
            reading = asyncio.get_running_loop().run_in_executor(self._io, self._read, watched, keys, stop)
            contents = await asyncio.shield(reading)
        finally:
            stop.append(True)  # whoever gave up needs no more of them
        watched.likely += 0.2 * (len(contents) / len(keys) - watched.likely)
        return contents

    def _read(self, watched: _Watched, keys: Sequence[bytes], stop: list[bool]) -> list[bytes]:
        wanted = self._codec.size(self._kv_pages.shapes())
        contents: list[bytes] = []
        for key in keys:
            content = None if stop else self._got(watched, key)
            if content is None:
                break
            if len(content) != wanted:
                self.totals.fault(watched.store.name, "foreign")
                break
            contents.append(content)
        self.totals.add(watched.store.name, "up", sum(map(len, contents)))
        return contents

    def _got(self, watched: _Watched, key: bytes) -> bytes | None:
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

    async def fill(self, pages: Ints, contents: Sequence[bytes]) -> float:
        """Copies contents into pages on the device's thread, between passes; seconds of decoding and copying."""
        if not len(pages):
            return 0.0
        began = time.perf_counter()
        layers = await asyncio.get_running_loop().run_in_executor(
            self._io, self._codec.decode, contents, self._kv_pages.shapes()
        )
        decoded = time.perf_counter()

        def copy() -> float:
            started = time.perf_counter()
            self._kv_pages.copy_in(pages.tolist(), layers)
            return time.perf_counter() - started

        return decoded - began + await self._run(copy)

    async def store(self, keys: Sequence[bytes], pages: Ints) -> None:
        """Copies pages out on the device's thread, between passes; encoding and writing go on behind that."""
        layers = await self._run(lambda: self._kv_pages.copy_out(pages.tolist()))
        self._io.submit(self._write, list(keys), layers)

    def _write(self, keys: Sequence[bytes], layers: Layers) -> None:
        contents = self._codec.encode(layers)
        for watched in self._awake():
            for key, content in zip(keys, contents, strict=True):
                try:
                    watched.store.put(key, content)
                except OSError as error:
                    self._trouble(watched, error)
                    break
                watched.faults = 0
                self.totals.add(watched.store.name, "down", len(content))

    def flush(self) -> None:
        """Returns when everything that was to be written is. Blocks."""
        self._io.submit(lambda: None).result()
        self._io.shutdown(wait=True)
        self._io = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="tiers")

    def close(self) -> None:
        """Ends what is under way, then lets go of the stores."""
        self._io.shutdown(wait=True, cancel_futures=False)
        for watched in self._stores:
            watched.store.close()
