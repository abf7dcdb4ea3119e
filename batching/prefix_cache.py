"""Which page holds which tokens of which prefix: an index of blocks over the page pool. Pure; time is given.

A block is one page's worth of a prefix, named by a hash of its tokens and of the block before it, so equal beginnings
have equal names; the last block of a prefix may be partial, and nothing continues it. Blocks are indexed before they
are computed (registered), so that requests of one pass share a prefix that is not written yet; a pass that fails
withdraws what it registered. A block is evicted only where no one uses it and nothing continues it: the index always
holds whole beginnings.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from attention.layout import Ints
from batching.page_pool import PagePool
from batching.pins import Pins

KEY_BYTES = 16
HALF_LIFE = 32  # wishes for blocks, for each page of the pool, after which one counts half
GHOSTS = 4  # names of evicted blocks whose use is still remembered, for each page of the pool
MAX_PINNED = 0.5  # of the pool: the rest stays for those who pin nothing


@dataclass(frozen=True, slots=True)
class Chain:
    """A prefix as the cache knows it.

    salt    who may share it
    keys    names of its blocks
    tokens  in all of them; only the last block may be partial
    """

    salt: bytes
    keys: tuple[bytes, ...]
    tokens: int


def chain(salt: bytes, ids: Ints, page_size: int) -> Chain:
    """Names the blocks of a prefix."""
    keys = []
    parent = blake2b(salt, digest_size=KEY_BYTES).digest()
    for begin in range(0, len(ids), page_size):
        block = ids[begin : begin + page_size]
        parent = blake2b(block.tobytes(), digest_size=KEY_BYTES, key=parent).digest()
        keys.append(parent)
    return Chain(salt, tuple(keys), len(ids))


@dataclass(slots=True, eq=False)
class Block:
    """One page of a prefix.

    end       tokens of the prefix up to and with this block
    users     leases that hold it: it is not evicted meanwhile
    children  indexed blocks that continue it
    wanted    log2 of how often it was wanted, late wishes counting more; remembered beyond its eviction
    wishes    how often it was wanted; remembered beyond its eviction
    stored    whether it was copied to the tiers below
    owner     whose prefix it is: the salt of its name
    """

    key: bytes
    page: int
    parent: Block | None
    tokens: int
    end: int
    users: int = 0
    children: int = 0
    written: bool = False
    indexed: bool = True
    wanted: float = -math.inf
    wishes: int = 0
    stored: bool = False
    priority: float = 0.0
    owner: bytes = b""


@dataclass(slots=True, eq=False)
class Lease:
    """The blocks of one request, held until it is released: a beginning of its prefix, all of it if there was room.

    hit  leading tokens that were indexed already when it was taken: written, or about to be by the same pass
    """

    blocks: list[Block]
    hit: int

    @property
    def tokens(self) -> int:
        return self.blocks[-1].end if self.blocks else 0

    @property
    def pages(self) -> Ints:
        return np.array([block.page for block in self.blocks], np.int32)

    @property
    def written(self) -> int:
        """Leading tokens whose K/V is in the pages."""
        return next((block.end - block.tokens for block in self.blocks if not block.written), self.tokens)


@dataclass(slots=True)
class CacheCounts:
    """Since the start. hit_tokens, missed_tokens: of the prefixes that were leased."""

    hit_tokens: int = 0
    missed_tokens: int = 0
    evicted_blocks: int = 0
    withdrawn_blocks: int = 0


Cost = Callable[[int, int], float]  # (tokens before the block, tokens of it) -> what computing it again costs
Evicted = Callable[[Block], None]


def by_tokens(before: int, tokens: int) -> float:
    """The plainest recompute cost: a token is a token."""
    return float(tokens)


@dataclass(slots=True, eq=False)
class PrefixCache:
    """Final. filling: blocks whose pages are being filled, the first of each run with its place in the prefix; whose
    prefix has it there waits.

    Eviction takes the block that is least worth keeping: how often it was wanted, each time counting half as
    much HALF_LIFE later, times what computing it again costs. So what is not wanted any more goes, whatever it costs,
    and what is wanted all the time stays though something else was wanted last."""

    pool: PagePool
    page_size: int
    cost: Cost = by_tokens
    counts: CacheCounts = field(default_factory=CacheCounts)
    filling: list[tuple[int, bytes]] = field(default_factory=list)
    _blocks: dict[bytes, Block] = field(default_factory=dict)
    _heap: list[tuple[float, int, Block]] = field(default_factory=list)
    _pushed: int = 0
    _wishes: int = 0
    _ghosts: OrderedDict[bytes, tuple[float, int]] = field(default_factory=OrderedDict)
    _pins: Pins = field(init=False)

    def __post_init__(self) -> None:
        self._pins = Pins(int(MAX_PINNED * self.pool.pages))

    def __len__(self) -> int:
        return len(self._blocks)

    def chain(self, salt: bytes, ids: Ints) -> Chain:
        """Names the blocks of a prefix."""
        return chain(salt, ids, self.page_size)

    def hit_blocks(self, asked: Chain) -> int:
        """How many leading blocks are indexed; whole beginnings are, so halving finds the end."""
        low, high = 0, len(asked.keys)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if asked.keys[middle - 1] in self._blocks else (low, middle - 1)
        return low

    def hit(self, asked: Chain) -> int:
        """How many leading tokens are indexed."""
        return min(self.hit_blocks(asked) * self.page_size, asked.tokens)

    def held(self, asked: Chain) -> Lease:
        """Holds the blocks that are indexed, and registers none. Whoever holds must release."""
        return self.held_blocks([self._blocks[key] for key in asked.keys[: self.hit_blocks(asked)]])

    def held_blocks(self, blocks: Sequence[Block]) -> Lease:
        """Holds these blocks, a beginning of one prefix, once more."""
        for block in blocks:
            block.users += 1
        return Lease(list(blocks), blocks[-1].end if blocks else 0)

    def acquire(self, asked: Chain, now: float) -> Lease:
        """Holds the prefix's blocks and registers those that are missing, as far as pages can be had.

        Whoever acquires must release, and commit or withdraw what it registered.
        """
        lease = self.registered(asked, now)
        for block in lease.blocks:
            self._want(block)
        self.counts.hit_tokens += lease.hit
        self.counts.missed_tokens += asked.tokens - lease.hit
        return lease

    def registered(self, asked: Chain, now: float) -> Lease:
        """Like `acquire`, for someone who fills the missing blocks and wants none for himself."""
        lease = self.held(asked)
        for key in asked.keys[len(lease.blocks) :]:
            new = self._register(key, lease, asked, now)
            if new is None:
                break
            lease.blocks.append(new)
        return lease

    def _register(self, key: bytes, lease: Lease, asked: Chain, now: float) -> Block | None:
        page = self._page(now)
        if page is None:
            return None
        before = lease.tokens
        parent = lease.blocks[-1] if lease.blocks else None
        tokens = min(self.page_size, asked.tokens - before)
        block = Block(key, page, parent, tokens, before + tokens, users=1, owner=asked.salt)
        block.wanted, block.wishes = self._ghosts.pop(key, (-math.inf, 0))
        if parent is not None:
            parent.children += 1
        self._blocks[key] = block
        return block

    def _want(self, block: Block) -> None:
        """Counts a wish. Kept as a logarithm that only grows, so that old priorities need no update."""
        self._wishes += 1
        block.wishes += 1
        before, now = block.wanted, self._wishes / (HALF_LIFE * max(self.pool.pages, 1))
        most = max(before, now)
        block.wanted = most + math.log2(1.0 + 2.0 ** (min(before, now) - most))  # of both together; numpy takes longer

    def _page(self, now: float) -> int | None:
        page = self.pool.take()
        while page is None and self._evict(now):
            page = self.pool.take()
        return page

    def commit(self, lease: Lease) -> None:
        """The pass that computed the lease's blocks has ended well."""
        for block in lease.blocks:
            block.written = True

    def withdraw(self, leases: Iterable[Lease]) -> None:
        """The pass failed: what it was to write is in no index any more, and is freed as its users let go.

        What another pass under way continues stays: that one writes it too.
        """
        pending = {block.key: block for lease in leases for block in lease.blocks if not block.written}
        for block in sorted(pending.values(), key=lambda block: -block.end):
            if block.indexed and not block.children:
                self._unindex(block)
                self.counts.withdrawn_blocks += 1

    def release(self, lease: Lease) -> None:
        """Lets go of the blocks. One that nobody holds and nobody wrote is withdrawn."""
        for block in reversed(lease.blocks):
            block.users -= 1
            assert block.users >= 0, "a lease is released once"
            if block.users:
                continue
            if block.indexed and not block.written:
                self._unindex(block)
                self.counts.withdrawn_blocks += 1
            if block.indexed:
                self._may_go(block)
            else:
                self._free(block)
        lease.blocks = []

    def _unindex(self, block: Block) -> None:
        assert not block.children, "what continues a block leaves the index before it"
        del self._blocks[block.key]
        self._pins.drop(block.key)
        block.indexed = False
        if block.parent is not None:
            block.parent.children -= 1
            self._may_go(block.parent)

    def _free(self, block: Block) -> None:
        self.pool.release(block.page)

    def _may_go(self, block: Block) -> None:
        """A block that nobody holds and nothing continues gets its place in the order of eviction."""
        if block.users or block.children or not block.indexed:
            return
        cost = self.cost(block.end - block.tokens, block.tokens)
        block.priority = block.wanted + math.log2(max(cost, 1e-30))
        self._pushed += 1
        heapq.heappush(self._heap, (block.priority, self._pushed, block))
        if len(self._heap) > 64 + 4 * len(self._blocks):
            self._heap = [entry for entry in self._heap if self._valid(entry)]
            heapq.heapify(self._heap)

    def _valid(self, entry: tuple[float, int, Block]) -> bool:
        priority, _, block = entry
        return block.indexed and not block.users and not block.children and block.priority == priority

    def _evict(self, now: float) -> bool:
        """Frees one page. False where every block is held, continued or pinned."""
        kept: list[tuple[float, int, Block]] = []
        evicted = False
        while self._heap and not evicted:
            entry = heapq.heappop(self._heap)
            if not self._valid(entry):
                continue
            if self._pins.has(entry[2].key, now):
                kept.append(entry)
                continue
            self._drop(entry[2])
            evicted = True
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return evicted

    def clear(self) -> None:
        """Evicts all that nobody holds, and pins nothing any more."""
        self._pins.clear()
        while self._evict(math.inf):
            pass

    def _drop(self, block: Block) -> None:
        self._ghosts[block.key] = block.wanted, block.wishes
        if len(self._ghosts) > GHOSTS * self.pool.pages:
            self._ghosts.popitem(last=False)
        self._unindex(block)
        self._free(block)
        self.counts.evicted_blocks += 1

    def pin(self, lease: Lease, until: float, now: float) -> int:
        """Keeps the lease's blocks from eviction until then, whatever was said of this prefix before; returns how many
        tokens, from the first on, are kept.

        At most MAX_PINNED of the pool is pinned at a time, and of that an equal part for each salt that wants some.
        """
        blocks = [block for block in lease.blocks if block.indexed]
        kept = self._pins.pin(blocks[0].owner, [b.key for b in blocks], until, now) if blocks else 0
        return blocks[kept - 1].end if kept else 0

    def blocks(self, keys: Sequence[bytes]) -> list[Block]:
        """Those of the named blocks that are indexed."""
        return [self._blocks[key] for key in keys if key in self._blocks]
