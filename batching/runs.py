"""What the prefix cache is asked for and what it keeps: prefixes in blocks of one page each. Pure.

Blocks that came together, and that everyone who held one of them held all of, are one run: what is done for a prefix
is done a few times for its runs and not hundreds of times for its pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np

from attention.layout import Ints

KEY_BYTES = 16
TOKEN_BYTES = 4  # of a token id, as prefixes are compared


class Spot:
    """A place in the tree of all prefixes, behind some block: nothing but itself."""

    __slots__ = ()


@dataclass(eq=False)
class Chain:
    """A prefix as the cache knows it: one cache, in which it remembers its place.

    salt   who may share it
    ids    its token ids, as bytes
    whole  the last run of which all was found in it: the next look begins there. A run that is indexed stands behind
           the same tokens as ever and has the same, but for those at its end, which may be evicted
    """

    salt: bytes
    ids: bytes
    page_size: int
    whole: Run | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids) // TOKEN_BYTES

    @property
    def block_bytes(self) -> int:
        return self.page_size * TOKEN_BYTES

    @property
    def blocks(self) -> int:
        """Only the last one may be partial."""
        return -(-len(self.ids) // self.block_bytes)

    @property
    def root(self) -> tuple[bytes, bytes]:
        """Equal for those who have their first block in common."""
        return self.salt, self.ids[: self.block_bytes]

    @cached_property
    def keys(self) -> tuple[bytes, ...]:
        """The blocks' names: a hash of each one's tokens and of the block before it, so equal beginnings have equal
        names. Made when something is first asked for by name; what is kept in tiers is found by these."""
        keys = []
        parent = blake2b(self.salt, digest_size=KEY_BYTES).digest()
        for begin in range(0, len(self.ids), self.block_bytes):
            block = self.ids[begin : begin + self.block_bytes]
            parent = blake2b(block, digest_size=KEY_BYTES, key=parent).digest()
            keys.append(parent)
        return tuple(keys)

    def beginning(self, blocks: int) -> Chain:
        """Its first blocks."""
        return Chain(self.salt, self.ids[: blocks * self.block_bytes], self.page_size)


def chain(salt: bytes, ids: Ints, page_size: int) -> Chain:
    """A prefix of token ids [n], int32."""
    assert ids.itemsize == TOKEN_BYTES, "token ids are int32"
    return Chain(salt, ids.tobytes(), page_size)


def equal_blocks(ids: bytes, asked: bytes, begin: int, block_bytes: int) -> int:
    """How many leading blocks of `ids` stand in `asked` from byte `begin` on. A partial block equals no longer one."""
    if asked.startswith(ids, begin) and (len(ids) % block_bytes == 0 or begin + len(ids) == len(asked)):
        return -(-len(ids) // block_bytes)
    size = min(len(ids), len(asked) - begin)
    ours, theirs = np.frombuffer(ids, np.int32, size // TOKEN_BYTES), asked[begin : begin + size]
    differ = ours != np.frombuffer(theirs, np.int32)
    return (int(differ.argmax()) if differ.any() else len(differ)) * TOKEN_BYTES // block_bytes


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive blocks of a prefix, one a page. Others continue it behind its last block only; who holds it holds all
    of it.

    owner     whose prefix it is
    parent    the run that it continues, if any
    begin     blocks of the prefix before it
    ids       its token ids, as bytes
    pages     [blocks]
    spot      behind its last block
    users     leases that hold it: it is not evicted meanwhile
    children  indexed runs that continue it
    level     log2 of how often each block was wanted, late wishes counting more, less what it has through its place;
              remembered beyond its eviction
    wishes    how often it was wanted; remembered beyond its eviction
    stored    whether it was copied to the tiers below
    entry     the last that it had in the order of eviction
    names     of its blocks, where one of them was pinned ever
    """

    owner: bytes
    parent: Run | None
    begin: int
    ids: bytes
    pages: Ints
    spot: Spot
    level: float = -math.inf
    wishes: int = 0
    users: int = 1
    children: int = 0
    written: bool = False
    indexed: bool = True
    stored: bool = False
    entry: int = 0
    names: tuple[bytes, ...] | None = None

    @property
    def end(self) -> int:
        """Blocks of the prefix up to and with this run."""
        return self.begin + len(self.pages)

    @property
    def at(self) -> Spot | bytes:
        """Where it begins."""
        return self.owner if self.parent is None else self.parent.spot


@dataclass(slots=True, eq=False)
class Lease:
    """The blocks of one request, held until it is released: a beginning of its prefix, all of it if there was room.

    last  the last of its runs: the others are those that it continues
    hit   leading tokens that were indexed already when it was taken: written, or about to be by the same pass
    """

    chain: Chain
    last: Run | None
    hit: int

    @property
    def runs(self) -> list[Run]:
        """In order. What was one run may be two later."""
        return self.behind(0)[::-1]

    def behind(self, tokens: int) -> list[Run]:
        """Its runs from so many leading tokens on, the last one first."""
        first, runs, run = -(-tokens // self.chain.page_size), [], self.last
        while run is not None and run.begin >= first:
            runs.append(run)
            run = run.parent
        return runs

    @property
    def withdrawn(self) -> bool:
        """Whether a pass that failed may have spoiled some of its pages since."""
        return self.last is not None and not self.last.indexed  # what continues a withdrawn run is withdrawn with it

    @property
    def blocks(self) -> int:
        return self.last.end if self.last is not None else 0

    @property
    def tokens(self) -> int:
        return min(self.blocks * self.chain.page_size, self.chain.tokens)

    @property
    def pages(self) -> Ints:
        pages = [run.pages for run in self.runs]
        return pages[0] if len(pages) == 1 else np.concatenate([np.zeros(0, np.int32), *pages])

    @property
    def written(self) -> int:
        """Leading tokens whose K/V is in the pages."""
        run = self.last
        while run is not None and not run.written:
            run = run.parent
        return min(run.end * self.chain.page_size, self.chain.tokens) if run is not None else 0
