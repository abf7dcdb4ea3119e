"""How often blocks that left the index were wanted, remembered for when they come again. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from batching.runs import Spot, equal_blocks


@dataclass(slots=True, eq=False)
class Ghost:
    """Blocks that were evicted or withdrawn together. level, wishes, spot: as of `Run`."""

    ids: bytes
    level: float
    wishes: int
    spot: Spot


class Ghosts:
    """What left first is forgotten first: of a prefix the end before the beginning. Where some of the blocks that left
    together come again, the others count as if they left then."""

    def __init__(self, most: int, block_bytes: int) -> None:
        """most: blocks that are remembered."""
        self.blocks = 0
        self._most = most
        self._block_bytes = block_bytes
        self._ghosts: OrderedDict[tuple[Spot | bytes, bytes], Ghost] = OrderedDict()

    def remember(self, at: Spot | bytes, ghost: Ghost) -> None:
        """at: behind which block it stood, or whose prefix it began."""
        self._ghosts[at, ghost.ids[: self._block_bytes]] = ghost
        self.blocks += self._count(ghost.ids)

    def take(self, at: Spot | bytes, ids: bytes) -> Ghost | None:
        """What is remembered of the first ones of these blocks, as many as were wanted alike; it is no more
        afterwards."""
        ghost = self._taken(at, ids)
        while ghost is not None:
            # Whoever wanted what went on otherwise in between wanted less of the end: then these are not alike.
            more = self._taken(ghost.spot, ids[len(ghost.ids) :], ghost)
            if more is None:
                break
            ghost = Ghost(ghost.ids + more.ids, more.level, more.wishes, more.spot)
        return ghost

    def _taken(self, at: Spot | bytes, ids: bytes, like: Ghost | None = None) -> Ghost | None:
        key = at, ids[: self._block_bytes]
        ghost = self._ghosts.get(key)
        if ghost is None or (like is not None and (like.level, like.wishes) != (ghost.level, ghost.wishes)):
            return None
        del self._ghosts[key]
        self.blocks -= self._count(ghost.ids)
        size = equal_blocks(ghost.ids, ids, 0, self._block_bytes) * self._block_bytes
        if size < len(ghost.ids):
            spot = Spot()
            self.remember(spot, Ghost(ghost.ids[size:], ghost.level, ghost.wishes, ghost.spot))
            ghost = Ghost(ghost.ids[:size], ghost.level, ghost.wishes, spot)
        return ghost

    def forget(self) -> None:
        """What there are too many of."""
        while self.blocks > self._most:
            key, ghost = next(iter(self._ghosts.items()))
            kept = max(0, self._count(ghost.ids) - (self.blocks - self._most))
            self.blocks -= self._count(ghost.ids) - kept
            if not kept:
                del self._ghosts[key]
            else:
                ghost.ids, ghost.spot = ghost.ids[: kept * self._block_bytes], Spot()

    def _count(self, ids: bytes) -> int:
        return -(-len(ids) // self._block_bytes)
