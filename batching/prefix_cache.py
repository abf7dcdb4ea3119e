"""Which page holds which tokens of which prefix: an index of blocks over the page pool. Pure; time is given.

A block is one page's worth of a prefix; it is found by its tokens and by what stands before it, so that equal
beginnings are found whoever wrote them. The last block of a prefix may be partial, and nothing continues it. Blocks are
indexed before they are computed (registered), so that requests of one pass share a prefix that is not written yet; a
pass that fails withdraws what it was to write. A block is evicted only where no one uses it and nothing continues it:
the index always holds whole beginnings. Blocks that have all of this in common are kept as one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from attention.layout import Ints
from batching.eviction import Cost, EvictionOrder, by_tokens
from batching.ghosts import Ghost, Ghosts
from batching.page_pool import PagePool
from batching.pins import Pins
from batching.runs import TOKEN_BYTES, Chain, Lease, Run, Spot, chain, equal_blocks

GHOSTS = 4  # evicted blocks whose use is still remembered, for each page of the pool
MAX_PINNED = 0.5  # of the pool: the rest stays for those who pin nothing


@dataclass(slots=True)
class CacheCounts:
    """Since the start. hit_tokens, missed_tokens: of the prefixes that were leased."""

    hit_tokens: int = 0
    missed_tokens: int = 0
    evicted_blocks: int = 0
    withdrawn_blocks: int = 0


@dataclass(slots=True, eq=False)
class PrefixCache:
    """Final. filling: blocks whose pages are being filled, the first of each run with its place in the prefix; whose
    prefix has it there waits."""

    pool: PagePool
    page_size: int
    cost: Cost = by_tokens
    counts: CacheCounts = field(default_factory=CacheCounts)
    filling: list[tuple[int, bytes]] = field(default_factory=list)
    _runs: dict[tuple[Spot | bytes, bytes], Run] = field(default_factory=dict)  # by where they begin, and how
    _blocks: int = 0  # of them
    _order: EvictionOrder = field(init=False)
    _ghosts: Ghosts = field(init=False)
    _pins: Pins = field(init=False)

    def __post_init__(self) -> None:
        self._order = EvictionOrder(self.pool.pages, self.page_size, self.cost)
        self._ghosts = Ghosts(GHOSTS * self.pool.pages, self._block_bytes)
        self._pins = Pins(int(MAX_PINNED * self.pool.pages))

    def __len__(self) -> int:
        """Blocks that are indexed. Any thread may ask."""
        return self._blocks

    @property
    def _block_bytes(self) -> int:
        return self.page_size * TOKEN_BYTES

    def chain(self, salt: bytes, ids: Ints) -> Chain:
        """A prefix as the cache knows it."""
        return chain(salt, ids, self.page_size)

    def _found(self, asked: Chain) -> tuple[Run | None, int]:
        """The last run that the prefix, or a beginning of it, goes through, and how many of the run's blocks."""
        size, last = self._block_bytes, asked.whole
        while last is not None and not last.indexed:
            last = last.parent
        blocks = len(last.pages) if last is not None else 0
        while last is None or blocks == len(last.pages):
            asked.whole = last
            at, begin = (asked.salt, 0) if last is None else (last.spot, last.end * size)
            run = self._runs.get((at, asked.ids[begin : begin + size]))
            if run is None:
                break
            last, blocks = run, equal_blocks(run.ids, asked.ids, begin, size)
        return last, blocks

    def hit_blocks(self, asked: Chain) -> int:
        """How many leading blocks are indexed."""
        last, blocks = self._found(asked)
        return last.begin + blocks if last is not None else 0

    def hit(self, asked: Chain) -> int:
        """How many leading tokens are indexed."""
        return min(self.hit_blocks(asked) * self.page_size, asked.tokens)

    def held(self, asked: Chain) -> Lease:
        """Holds the blocks that are indexed, and registers none. Whoever holds must release."""
        last, blocks = self._found(asked)
        if last is not None and blocks < len(last.pages):
            last = self._split(last, blocks)
        return self._held(asked, last)

    def held_again(self, lease: Lease) -> Lease:
        """Holds the same blocks once more."""
        return self._held(lease.chain, lease.last)

    def _held(self, asked: Chain, last: Run | None) -> Lease:
        lease = Lease(asked, last, 0)
        for run in lease.runs:
            run.users += 1
        lease.hit = lease.tokens
        return lease

    def _split(self, run: Run, blocks: int) -> Run:
        """Makes two of a run; returns the first, of so many blocks. The second is the run to all who know it."""
        size = blocks * self._block_bytes
        first = Run(
            run.owner, run.parent, run.begin, run.ids[:size], run.pages[:blocks].copy(), Spot(), run.level, run.wishes,
            run.users, 1, run.written, stored=run.stored, names=run.names and run.names[:blocks],
        )  # fmt: skip
        self._index(first)
        run.parent, run.begin, run.ids, run.pages = first, first.end, run.ids[size:], run.pages[blocks:].copy()
        run.names = run.names and run.names[blocks:]
        self._index(run)
        return first

    def _index(self, run: Run) -> None:
        self._runs[run.at, run.ids[: self._block_bytes]] = run

    def mark_stored(self, lease: Lease, blocks: int) -> None:
        """The first blocks of a lease were copied to the tiers below."""
        for run in lease.runs:
            if run.indexed and run.begin < blocks < run.end:
                run = self._split(run, blocks - run.begin)
            if run.end <= blocks:
                run.stored = True

    def acquire(self, asked: Chain, now: float) -> Lease:
        """Holds the prefix's blocks and registers those that are missing, as far as pages can be had.

        Whoever acquires must release, and commit or withdraw what it registered.
        """
        lease = self.registered(asked, now)
        self._order.want(lease)
        self.counts.hit_tokens += lease.hit
        self.counts.missed_tokens += asked.tokens - lease.hit
        return lease

    def registered(self, asked: Chain, now: float) -> Lease:
        """Like `acquire`, for someone who fills the missing blocks and wants none for himself."""
        lease = self.held(asked)
        if (missing := asked.blocks - lease.blocks) > 0:
            pages = self._pages(missing, now)
            while len(pages):
                lease.last = self._register(lease, pages)
                pages = pages[len(lease.last.pages) :].copy()
            self._ghosts.forget()
        return lease

    def _register(self, lease: Lease, pages: Ints) -> Run:
        """The next blocks of the lease's prefix, as many as were wanted alike, in the first of these pages."""
        parent, begin = lease.last, lease.blocks
        ids = lease.chain.ids[begin * self._block_bytes : (begin + len(pages)) * self._block_bytes]
        run = Run(lease.chain.salt, parent, begin, ids, pages, Spot())
        if (ghost := self._ghosts.take(run.at, ids)) is not None:
            run.ids, run.pages = ghost.ids, pages[: -(-len(ghost.ids) // self._block_bytes)].copy()
            run.level, run.wishes, run.spot = ghost.level, ghost.wishes, ghost.spot
        if parent is not None:
            parent.children += 1
        self._index(run)
        self._blocks += len(run.pages)
        return run

    def _pages(self, count: int, now: float) -> Ints:
        """So many, or as many as can be had."""
        if self.pool.free < count:
            self._evict(count - self.pool.free, now)
        return self.pool.take(count)

    def commit(self, lease: Lease) -> None:
        """The pass that computed the lease's blocks has ended well."""
        run = lease.last
        while run is not None and not run.written:
            run.written = True
            run = run.parent

    def withdraw(self, failed: Iterable[tuple[Lease, int]]) -> None:
        """The pass failed. failed: its leases, each with how many leading tokens it found written, and only read.

        What it was to write, and all that continues this, is in no index any more, and is freed as its users let go:
        also where another pass computed the same at the same time and ended well, as either may have written last.
        """
        spoiled = {run for lease, read in failed for run in lease.behind(read) if run.indexed}
        if any(run.children for run in spoiled):
            for run in sorted(self._runs.values(), key=lambda run: run.begin):
                if run.parent in spoiled:
                    spoiled.add(run)
        for run in sorted(spoiled, key=lambda run: -run.begin):
            self._withdraw(run)

    def _withdraw(self, run: Run) -> None:
        self._ghosts.remember(run.at, Ghost(run.ids, run.level, run.wishes, run.spot))
        self._ghosts.forget()
        self._unindex(run)
        self.counts.withdrawn_blocks += len(run.pages)
        if not run.users:
            self._free(run.pages)

    def release(self, lease: Lease) -> None:
        """Lets go of the blocks. One that nobody holds and nobody wrote is withdrawn."""
        for run in reversed(lease.runs):
            run.users -= 1
            assert run.users >= 0, "a lease is released once"
            if run.users:
                continue
            if not run.indexed:
                self._free(run.pages)
            elif run.written:
                self._order.push(run)
            else:
                self._withdraw(run)
        lease.last = None

    def _unindex(self, run: Run) -> None:
        assert not run.children, "what continues a run leaves the index before it"
        del self._runs[run.at, run.ids[: self._block_bytes]]
        self._blocks -= len(run.pages)
        for name in reversed(run.names or ()):
            self._pins.drop(name)
        run.indexed = False
        if run.parent is not None:
            run.parent.children -= 1
            self._order.push(run.parent)

    def _free(self, pages: Ints) -> None:
        """The first ones will be taken first, so that pages that lie side by side stay so."""
        self.pool.release(pages[::-1])

    def _evict(self, pages: int, now: float) -> None:
        """Frees so many pages, or all that are not held, continued or pinned."""
        freed, kept = 0, []
        while freed < pages and (run := self._order.pop()) is not None:
            blocks = min(self._loose(run, now), pages - freed)
            if blocks:
                self._drop(run, blocks)
                freed += blocks
            else:
                kept.append(run)
        for run in kept:
            self._order.push(run)

    def _loose(self, run: Run, now: float) -> int:
        """How many last blocks of a run may go before any other, where its last one is the next that goes."""
        loose = len(run.pages)
        if run.names is not None:  # pinned are the first ones, if any
            pinned = (n for n, name in enumerate(reversed(run.names)) if self._pins.has(name, now))
            loose = next(pinned, loose)
        return loose if len(run.ids) % self._block_bytes == 0 else min(loose, 1)

    def clear(self) -> None:
        """Evicts all that nobody holds, and pins nothing any more."""
        self._pins.clear()
        self._evict(self.pool.pages, math.inf)
        self._ghosts.forget()

    def _drop(self, run: Run, blocks: int) -> None:
        """Evicts the last blocks of a run, which nothing pins."""
        keep = len(run.pages) - blocks
        size = keep * self._block_bytes
        ghost = Ghost(run.ids[size:], run.level, run.wishes, run.spot)
        self._free(run.pages[keep:])
        self.counts.evicted_blocks += blocks
        if not keep:
            self._ghosts.remember(run.at, ghost)
            self._unindex(run)
            return
        self._blocks -= blocks
        run.ids, run.pages, run.spot = run.ids[:size], run.pages[:keep].copy(), Spot()
        run.names = run.names and run.names[:keep]
        self._ghosts.remember(run.spot, ghost)
        self._order.push(run)

    def pin(self, lease: Lease, until: float, now: float) -> int:
        """Keeps the lease's blocks from eviction until then, whatever was said of this prefix before; returns how many
        tokens, from the first on, are kept.

        At most MAX_PINNED of the pool is pinned at a time, and of that an equal part for each salt that wants some.
        """
        asked, blocks = lease.chain, 0
        for run in lease.runs:
            if run.indexed:
                run.names, blocks = asked.keys[run.begin : run.end], run.end
        kept = self._pins.pin(asked.salt, asked.keys[:blocks], until, now) if blocks else 0
        return min(kept * self.page_size, asked.tokens)
