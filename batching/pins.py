"""Which blocks are kept from eviction, for whom and until when. Pure; time is given."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Promise:
    """keys: blocks of a prefix, from the first on, that are kept until then."""

    owner: bytes
    keys: list[bytes]
    until: float


class Pins:
    """Who is alone may have all of it; where others want some too, each may keep an equal part.

    A prefix is named by its last block. What was promised for it last counts, so that it can be shortened; blocks that
    prefixes have in common stay until the last of these promises ends. Owners have no block in common.
    """

    def __init__(self, most: int) -> None:
        """most: blocks that may be kept at a time."""
        self._most = most
        self._promises: dict[bytes, Promise] = {}
        self._ends: list[tuple[float, bytes]] = []
        self._names: dict[bytes, set[bytes]] = {}  # of the promises, by the block that they keep
        self._kept: Counter[bytes] = Counter()  # blocks, by owner

    def has(self, key: bytes, now: float) -> bool:
        """Whether the block is kept."""
        self._expire(now)
        return key in self._names

    def pin(self, owner: bytes, keys: Sequence[bytes], until: float, now: float) -> int:
        """Keeps the blocks of a prefix; returns how many of them, from the first on, are kept until then."""
        if not keys:
            return 0
        self._expire(now)
        room = self._room(owner, sum(key not in self._names for key in keys))
        promise = self._promises[keys[-1]] = Promise(owner, [], until)
        for key in keys:
            if key not in self._names:
                if not room:
                    break
                room -= 1
                self._kept[owner] += 1
            self._names.setdefault(key, set()).add(keys[-1])
            promise.keys.append(key)
        self._remember(keys[-1], promise)
        return len(promise.keys)

    def _remember(self, name: bytes, promise: Promise) -> None:
        if not promise.keys:
            del self._promises[name]
            return
        heapq.heappush(self._ends, (promise.until, name))
        if len(self._ends) > 64 + 4 * len(self._promises):  # most are of promises that were renewed
            self._ends = [(each.until, name) for name, each in self._promises.items()]
            heapq.heapify(self._ends)

    def drop(self, key: bytes) -> None:
        """The block is gone, and so is what continues it."""
        for name in list(self._names.get(key, ())):
            kept = self._promises[name].keys
            self._shorten(name, len(kept) - kept.index(key))

    def clear(self) -> None:
        """Keeps nothing any more."""
        for name in list(self._promises):
            self._end(name)

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, name = heapq.heappop(self._ends)
            if name in self._promises and self._promises[name].until <= now:  # else it was renewed
                self._end(name)

    def _end(self, name: bytes) -> None:
        if name in self._promises:
            self._shorten(name, len(self._promises[name].keys))

    def _shorten(self, name: bytes, by: int) -> int:
        """Keeps so many blocks fewer, the last ones, and forgets what keeps none; returns how many are kept by nobody
        else."""
        promise, freed = self._promises[name], 0
        for _ in range(by):
            key = promise.keys.pop()
            self._names[key].discard(name)
            if not self._names[key]:
                del self._names[key]
                freed += 1
        self._kept[promise.owner] -= freed
        if not promise.keys:
            del self._promises[name]
        return freed

    def _room(self, owner: bytes, wanted: int) -> int:
        """How many blocks more this owner may keep, others keeping less where they have more than their part."""
        owners = {name for name, kept in self._kept.items() if kept} | {owner}
        self._kept = Counter({name: kept for name, kept in self._kept.items() if kept})
        part = self._most // len(owners)
        need = min(wanted, part - self._kept[owner]) - self._free
        for other in sorted(owners - {owner}, key=lambda name: -self._kept[name]):
            if need > 0:
                need -= self._take(other, min(need, self._kept[other] - part))
        return max(0, self._free)

    @property
    def _free(self) -> int:
        return self._most - len(self._names)

    def _take(self, owner: bytes, wanted: int) -> int:
        """Ends promises of an owner, or their last blocks, the one that would end first before the others."""
        taken = 0
        own = [name for name, promise in self._promises.items() if promise.owner == owner]
        for name in sorted(own, key=lambda name: self._promises[name].until):
            while taken < wanted and name in self._promises:
                taken += self._shorten(name, 1)
        return taken
