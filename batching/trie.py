"""What a beam may be continued with, where only some sequences are allowed: a trie as arrays. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention.layout import Ints, indptr, ranges

ROOT = 0


class Pairs(NamedTuple):
    """Allowed continuations of some beams: token tokens[i] of beam beams[i], each pair once."""

    beams: Ints
    tokens: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """Allowed sequences of token ids. Nodes are numbered by depth, so node i + 1 is where edge i leads.

    children  [nodes + 1]  edges children[node]:children[node + 1] leave the node
    edges     [edges]      (node, token) as one number, ascending
    terminal  [nodes]      an allowed sequence ends here
    """

    children: Ints
    edges: NDArray[np.int64]
    terminal: NDArray[np.bool_]

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> Trie:
        """Builds the trie, a level at a time. Raises ValueError where there is no sequence or an empty one."""
        length = np.array([len(sequence) for sequence in sequences], np.int32)
        if not len(length) or not length.min():
            raise ValueError("a constraint has at least one sequence, and each at least one token")
        flat = np.array([token for sequence in sequences for token in sequence], np.int64)
        begin = indptr(length)[:-1]
        node = np.zeros(len(length), np.int64)
        level, nodes = np.arange(len(length)), 1
        edges, ends = [], [np.zeros(1, np.bool_)]
        for depth in range(int(length.max())):
            level = level[length[level] > depth]
            new, place = np.unique(_key(node[level], flat[begin[level] + depth]), return_inverse=True)
            edges.append(new)
            node[level] = nodes + place
            ends.append(np.bincount(place, weights=length[level] == depth + 1) > 0)
            nodes += len(new)
        every = np.concatenate(edges)
        return cls(indptr(np.bincount(every >> 32, minlength=nodes).astype(np.int32)), every, np.concatenate(ends))

    @property
    def nodes(self) -> int:
        return len(self.terminal)

    def leaf(self, nodes: Ints) -> NDArray[np.bool_]:
        """Whether nothing continues each of these nodes."""
        leaf: NDArray[np.bool_] = self.children[nodes] == self.children[nodes + 1]
        return leaf

    def pairs(self, nodes: Ints, eos_ids: Sequence[int]) -> Pairs:
        """What may follow beams that stand at these nodes: the trie's tokens, and eos where a sequence ends."""
        count = self.children[nodes + 1] - self.children[nodes]
        beams = np.repeat(np.arange(len(nodes), dtype=np.int32), count)
        tokens = (self.edges[ranges(self.children[nodes], count)] & 0xFFFFFFFF).astype(np.int32)
        ended = np.flatnonzero(self.terminal[nodes]).astype(np.int32)
        if not len(eos_ids) or not len(ended):
            return Pairs(beams, tokens)
        eos = np.array(sorted(set(eos_ids)), np.int32)
        more, last = np.repeat(ended, len(eos)), np.tile(eos, len(ended))
        new = ~np.isin(_key(more, last), _key(beams, tokens))  # an allowed sequence may name its eos itself
        return Pairs(np.concatenate([beams, more[new]]), np.concatenate([tokens, last[new]]))

    def step(self, nodes: Ints, tokens: Ints) -> Ints:
        """The node behind each (node, token), which must be an edge."""
        return (np.searchsorted(self.edges, _key(nodes, tokens)) + 1).astype(np.int32)


def _key(high: NDArray[np.integer], low: NDArray[np.integer]) -> NDArray[np.int64]:
    return (high.astype(np.int64) << 32) | low.astype(np.int64)
