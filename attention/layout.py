"""The geometry of one pass: a forest of segments.

A segment is a run of tokens that continues its parent. A token sees its segment's ancestors and, causally, its own
segment; nothing else. A request is a path (template, user, query) with leaves (items); a draft tree or beams with
common history are the same thing.

Tokens are numbered segment after segment. A token whose K/V is cached is a key only; every other token is also a row
of the pass, and rows are numbered in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
NONE = np.zeros(0, np.int32)


class LayoutError(ValueError):
    """A geometry that cannot be, or that a strategy cannot compute; the message says which to use instead."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One run of tokens, as a caller writes it down.

    parent  index of an earlier segment, or -1
    length  tokens, at least 1
    cached  how many of them, from the first on, have their K/V in pages already
    reads   offsets of the tokens whose final hidden state is wanted
    """

    parent: int
    length: int
    cached: int = 0
    reads: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Layout:
    """A forest of n segments, parents before children.

    parent        [n]    index of the parent, -1 for a root
    length        [n]    tokens of each segment
    cached        [n]    leading tokens whose K/V exists already
    read_indptr   [n+1]  read_offsets[read_indptr[s]:read_indptr[s + 1]] are the reads of segment s
    read_offsets  [R]    offsets within the segment
    """

    parent: Ints
    length: Ints
    cached: Ints
    read_indptr: Ints
    read_offsets: Ints

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> Layout:
        """Builds and validates a layout. Raises LayoutError."""
        given = tuple(segments)
        reads = [segment.reads for segment in given]
        made = cls(
            parent=np.array([s.parent for s in given], np.int32),
            length=np.array([s.length for s in given], np.int32),
            cached=np.array([s.cached for s in given], np.int32),
            read_indptr=indptr([len(r) for r in reads]),
            read_offsets=np.array([offset for r in reads for offset in r], np.int32),
        )
        made.validate()
        return made

    def validate(self) -> None:
        """Raises LayoutError where this is no geometry. The constructor trusts what is right as it was made."""
        n = len(self.parent)
        if n == 0:
            raise LayoutError("a layout has at least one segment")
        if not ((self.parent >= -1) & (self.parent < np.arange(n))).all():
            raise LayoutError("a parent is -1 or an earlier segment")
        if not ((self.length >= 1) & (self.cached >= 0) & (self.cached <= self.length)).all():
            raise LayoutError("a segment has at least one token, and at most all of them cached")
        has_parent = self.parent >= 0
        whole = self.cached == self.length
        if (has_parent & (self.cached > 0) & ~whole[self.parent]).any():
            raise LayoutError("a segment with cached tokens continues a wholly cached parent")
        reads_of = np.repeat(np.arange(n), np.diff(self.read_indptr))
        if not ((self.read_offsets >= self.cached[reads_of]) & (self.read_offsets < self.length[reads_of])).all():
            raise LayoutError("a read lies inside the computed part of its segment")

    @property
    def segments(self) -> int:
        return len(self.parent)

    @cached_property
    def start(self) -> Ints:
        """[n] position of each segment's first token along its path."""
        ends = np.zeros(self.segments + 1, np.int32)  # of inner segments; the last one stands before the roots
        for segment in self._inner:
            ends[segment] = ends[self.parent[segment]] + self.length[segment]
        start: Ints = ends[self.parent]
        return start

    @cached_property
    def _inner(self) -> list[int]:
        """The segments that others continue, parents first: few, however many items a pass has."""
        inner: list[int] = np.flatnonzero(~self.is_leaf).tolist()
        return inner

    @cached_property
    def token_start(self) -> Ints:
        """[n+1] index of each segment's first token, cached ones included."""
        return indptr(self.length)

    @cached_property
    def row_start(self) -> Ints:
        """[n+1] index of each segment's first row, that is, of its first token that is not cached."""
        return indptr(self.length - self.cached)

    @property
    def tokens(self) -> int:
        return int(self.token_start[-1])

    @property
    def rows(self) -> int:
        return int(self.row_start[-1])

    @cached_property
    def is_leaf(self) -> NDArray[np.bool_]:
        """[n]"""
        leaf = np.ones(self.segments, np.bool_)
        leaf[self.parent[self.parent >= 0]] = False
        return leaf

    @cached_property
    def leaves(self) -> Ints:
        """Indices of the segments that no other continues, ascending."""
        return np.flatnonzero(self.is_leaf).astype(np.int32)

    def path(self, segment: int) -> tuple[int, ...]:
        """The segment and its ancestors, root first."""
        path: list[int] = []
        while segment >= 0:
            path.append(segment)
            segment = int(self.parent[segment])
        return tuple(reversed(path))

    @cached_property
    def trees(self) -> tuple[Ints, ...]:
        """The segments of each tree of the forest, parents first."""
        root = np.arange(self.segments, dtype=np.int32)
        for segment in self._inner:
            root[segment] = root[self.parent[segment]] if self.parent[segment] >= 0 else segment
        root = np.where(self.parent < 0, root, root[self.parent])
        return tuple(np.flatnonzero(root == r).astype(np.int32) for r in np.flatnonzero(self.parent < 0))

    @cached_property
    def row_tokens(self) -> Ints:
        """[rows] token index of each row."""
        computed = self.length - self.cached
        return ranges(self.token_start[:-1] + self.cached, computed)

    @cached_property
    def position_ids(self) -> Ints:
        """[rows] position of each row along its own path: every item restarts where its prefix ends."""
        return ranges(self.start + self.cached, self.length - self.cached)

    @cached_property
    def read_rows(self) -> Ints:
        """[R] row of each read."""
        first = np.repeat(self.row_start[:-1] - self.cached, np.diff(self.read_indptr))
        return (first + self.read_offsets).astype(np.int32)


def unshared(layout: Layout) -> tuple[Layout, Ints]:
    """Every leaf with ancestors of its own and nothing cached: what a scorer without sharing computes.

    Returns the new layout and, for each of its segments, the segment it is a copy of.
    """
    segments: list[Segment] = []
    source: list[int] = []
    for leaf in layout.leaves:
        for depth, s in enumerate(layout.path(int(leaf))):
            reads = layout.read_offsets[layout.read_indptr[s] : layout.read_indptr[s + 1]] if s == leaf else ()
            parent = len(segments) - 1 if depth else -1
            segments.append(Segment(parent, int(layout.length[s]), reads=tuple(int(r) for r in reads)))
            source.append(s)
    return Layout.of(segments), np.array(source, np.int32)


def siblings(layout: Layout, leaves: Ints) -> list[tuple[tuple[int, ...], Ints]]:
    """The leaves by the path that they continue, in order of first appearance."""
    parents = layout.parent[leaves]
    if len(parents) and (parents == parents[0]).all():
        return [(layout.path(int(parents[0])), leaves)]
    order = dict.fromkeys(parents.tolist())
    return [(layout.path(parent), leaves[parents == parent]) for parent in order]


def indptr(lengths: Sequence[int] | Ints) -> Ints:
    """[n+1] running sum that starts at 0."""
    out = np.zeros(len(lengths) + 1, np.int32)
    np.add.accumulate(lengths, dtype=np.int32, out=out[1:])  # a cumsum with half its overhead: this runs often
    return out


def ranges(first: Ints, count: Ints) -> Ints:
    """The concatenation of first[i], first[i]+1, ... (count[i] of them)."""
    first, count = np.asarray(first), np.asarray(count)
    if not len(count):
        return np.zeros(0, np.int32)
    end = np.add.accumulate(count, dtype=np.int32)
    shift = first - end + count
    if (shift == shift[0]).all():  # one after the other, as the rows of a layout's items are
        return np.arange(shift[0], shift[0] + end[-1], dtype=np.int32)
    out: Ints = shift.astype(np.int32, copy=False).repeat(count)
    out += np.arange(end[-1], dtype=np.int32)
    return out
