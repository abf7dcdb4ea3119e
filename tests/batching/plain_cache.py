"""The prefix cache in its plainest form: every block for itself, found by all the tokens up to its end."""

import math
from dataclasses import dataclass

from batching.eviction import HALF_LIFE
from batching.pins import Pins
from batching.prefix_cache import GHOSTS, MAX_PINNED


@dataclass(eq=False)
class PlainBlock:
    name: tuple
    before: int
    tokens: int
    users: int = 0
    wanted: float = -math.inf
    wishes: int = 0
    written: bool = False
    indexed: bool = True
    stored: bool = False

    @property
    def end(self):
        return self.before + self.tokens


class PlainCache:
    """A block's name is whose prefix it is and all its tokens up to the block's end. A lease is a list of blocks."""

    def __init__(self, pages, page_size, cost, ghosts=GHOSTS):
        self.pages, self.page_size, self.cost, self.most_ghosts = pages, page_size, cost, ghosts * pages
        self.blocks, self.ghosts, self.pins = {}, {}, Pins(int(MAX_PINNED * pages))
        self.free = pages
        self.wishes = self.evicted = self.withdrawn = self.hits = self.misses = 0

    def names(self, salt, ids):
        ends = [*range(self.page_size, len(ids), self.page_size), len(ids)] if ids else []
        return [(salt, ids[:end]) for end in ends]

    def hit(self, salt, ids):
        return max((len(name[1]) for name in self.names(salt, ids) if name in self.blocks), default=0)

    def held(self, salt, ids):
        return self.again([self.blocks[name] for name in self.names(salt, ids) if name in self.blocks])

    def again(self, lease):
        for block in lease:
            block.users += 1
        return list(lease)

    def registered(self, salt, ids, now):
        lease = self.held(salt, ids)
        for name in self.names(salt, ids)[len(lease) :]:
            if not self.free and not self.evict(now):
                break
            before = lease[-1].end if lease else 0
            self.blocks[name] = PlainBlock(name, before, len(name[1]) - before, 1, *self.ghosts.pop(name, ()))
            self.free -= 1
            lease.append(self.blocks[name])
        self.forget()
        return lease

    def acquire(self, salt, ids, now):
        hit, lease = self.hit(salt, ids), self.registered(salt, ids, now)
        self.hits, self.misses = self.hits + hit, self.misses + len(ids) - hit
        for block in lease:
            self.wishes += 1
            block.wishes += 1
            block.wanted = math.log2(2.0**block.wanted + 2.0 ** (self.wishes / (HALF_LIFE * self.pages)))
        return lease

    def commit(self, lease):
        for block in lease:
            block.written = True

    def written(self, lease):
        return next((block.before for block in lease if not block.written), lease[-1].end if lease else 0)

    def withdraw(self, failed):
        """failed: (lease, leading tokens that were written) of each request."""
        spoiled = {block.name for lease, read in failed for block in lease if block.indexed and block.before >= read}
        for block in list(self.blocks.values()):
            if not spoiled.isdisjoint(self.names(*block.name)):
                self.unindex(block)
                self.withdrawn += 1
        self.forget()

    def release(self, lease):
        for block in reversed(lease):
            block.users -= 1
            if not block.users and block.indexed and not block.written:
                self.unindex(block)
                self.withdrawn += 1
            elif not block.users and not block.indexed:
                self.free += 1
        self.forget()

    def unindex(self, block):
        del self.blocks[block.name]
        self.ghosts[block.name] = block.wanted, block.wishes
        self.pins.drop(block.name)
        block.indexed = False
        self.free += not block.users

    def forget(self):
        while len(self.ghosts) > self.most_ghosts:
            del self.ghosts[next(iter(self.ghosts))]

    def evict(self, now):
        """The block that is least worth keeping, of those that nobody holds or keeps and nothing continues."""
        continued = {(salt, ids[: self.blocks[salt, ids].before]) for salt, ids in self.blocks}
        free = (block for block in self.blocks.values() if not block.users and block.name not in continued)
        loose = [block for block in free if not self.pins.has(block.name, now)]
        if loose:
            self.unindex(min(loose, key=lambda block: block.wanted + math.log2(self.cost(block.before, block.tokens))))
            self.evicted += 1
        return bool(loose)

    def clear(self):
        self.pins.clear()
        while self.evict(math.inf):
            pass
        self.forget()

    def pin(self, lease, until, now):
        """Leading tokens that are kept."""
        names = [block.name for block in lease if block.indexed]
        kept = self.pins.pin(names[0][0], names, until, now) if names else 0
        return lease[kept - 1].end if kept else 0
