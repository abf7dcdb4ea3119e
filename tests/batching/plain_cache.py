"""The prefix cache in its plainest form: every block for itself, found by all the tokens up to its end."""

import math
from dataclasses import dataclass

from batching.eviction import HALF_LIFE
from batching.prefix_cache import GHOSTS


@dataclass
class PlainBlock:
    before: int
    tokens: int
    users: int = 0
    wanted: float = -math.inf
    wishes: int = 0


class PlainCache:
    """Of one salt, whose passes all end well. A block's name is its prefix."""

    def __init__(self, pages, page_size, cost):
        self.pages, self.page_size, self.cost = pages, page_size, cost
        self.blocks, self.ghosts = {}, {}
        self.wishes = self.evicted = 0

    def names(self, ids):
        ends = [*range(self.page_size, len(ids), self.page_size), len(ids)] if ids else []
        return [ids[:end] for end in ends]

    def hit(self, ids):
        return max((len(name) for name in self.names(ids) if name in self.blocks), default=0)

    def acquire(self, ids):
        """Names of the blocks that it now holds."""
        names = [name for name in self.names(ids) if name in self.blocks]
        for name in names:
            self.blocks[name].users += 1
        for name in self.names(ids)[len(names) :]:
            if len(self.blocks) == self.pages and not self.evict():
                break
            before = len(names[-1]) if names else 0
            wanted, wishes = self.ghosts.pop(name, (-math.inf, 0))
            self.blocks[name] = PlainBlock(before, len(name) - before, 1, wanted, wishes)
            names.append(name)
        while len(self.ghosts) > GHOSTS * self.pages:
            del self.ghosts[next(iter(self.ghosts))]
        for name in names:
            self.want(self.blocks[name])
        return names

    def want(self, block):
        self.wishes += 1
        block.wishes += 1
        block.wanted = math.log2(2.0**block.wanted + 2.0 ** (self.wishes / (HALF_LIFE * self.pages)))

    def release(self, names):
        for name in names:
            self.blocks[name].users -= 1

    def evict(self):
        """The block that is least worth keeping, of those that nobody holds and nothing continues."""
        continued = {name[: block.before] for name, block in self.blocks.items()}
        loose = [name for name, block in self.blocks.items() if not block.users and name not in continued]
        if loose:
            least = min(loose, key=self.worth)
            block = self.blocks.pop(least)
            self.ghosts[least] = block.wanted, block.wishes
            self.evicted += 1
        return bool(loose)

    def worth(self, name):
        block = self.blocks[name]
        return block.wanted + math.log2(self.cost(block.before, block.tokens))
