"""The documents of a request as they follow its prefix: one by one, or by column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import overload

import numpy as np

from attention.layout import NONE, Ints, indptr, ranges


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One document as it follows the prefix.

    ids           [n]     token ids, template included, n >= 1
    read_offsets  [r]     positions within the item whose next-token logits are read
    read_ids      [r, k]  the token ids whose logits are wanted at each of them
    """

    ids: Ints
    read_offsets: Ints
    read_ids: Ints

    def __post_init__(self) -> None:
        assert self.ids.ndim == 1, "ids is one row of token ids"
        assert len(self.ids) > 0, "an item has at least one token"
        assert self.read_ids.shape[:1] == self.read_offsets.shape, "one row of read_ids a read offset"
        offsets = self.read_offsets.tolist()
        assert not offsets or 0 <= min(offsets) <= max(offsets) < len(self.ids), "reads lie inside the item"


class Items(Sequence[Item]):
    """The M items of a request by column: what is done for each of them is done for all at once. As a sequence it gives
    views, made when they are asked for.

    ids           [T]   token ids, item after item
    lengths       [M]   tokens of each item, at least 1
    reads         [M]   how often each item is read
    read_offsets  [R]   positions within their items whose next-token logits are read, item after item
    widths        [R]   how many token ids' logits are wanted there
    read_ids      [..]  these ids, read after read
    """

    def __init__(self, ids: Ints, lengths: Ints, reads: Ints, read_offsets: Ints, widths: Ints, read_ids: Ints) -> None:
        self.ids, self.lengths = ids, lengths
        self.reads, self.read_offsets = reads, read_offsets
        self.widths, self.read_ids = widths, read_ids
        self._at_end: Ints | None = None  # what is read of each, where that is the same

    @classmethod
    def of(cls, items: Iterable[Item]) -> Items:
        """Of items that were made one by one."""
        made = list(items)
        return cls(
            _joined([item.ids for item in made]),
            np.array([len(item.ids) for item in made], np.int32),
            np.array([len(item.read_offsets) for item in made], np.int32),
            _joined([item.read_offsets for item in made]),
            np.array([item.read_ids.shape[1] for item in made for _ in item.read_ids], np.int32),
            _joined([item.read_ids.ravel() for item in made]),
        )

    @classmethod
    def read_at_end(cls, ids: Ints, lengths: Ints, read_ids: Ints) -> Items:
        """Each is read once, at its last token, for the same [k] ids."""
        count, width = len(lengths), len(read_ids)
        ones, widths = np.ones(count, np.int32), np.full(count, width, np.int32)
        made = cls(ids, lengths, ones, lengths - ones, widths, np.tile(read_ids, count))
        made._at_end = read_ids
        return made

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Items: ...

    def __getitem__(self, index: int | slice) -> Item | Items:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        index = range(len(self))[index]
        begin, read = int(self._begin[index]), int(self._read_begin[index])
        reads = int(self.reads[index])
        wanted = self.read_ids[self._width_begin[read] : self._width_begin[read + reads]]
        return Item(
            self.ids[begin : begin + int(self.lengths[index])],
            self.read_offsets[read : read + reads],
            wanted.reshape(reads, int(self.widths[read]) if reads else 0),
        )

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))

    def take(self, indices: Sequence[int]) -> Items:
        """Some of them, in this order. What follows one another is not copied."""
        first, count = (indices[0], len(indices)) if len(indices) else (0, 0)
        if list(indices) == list(range(first, first + count)):
            return self if count == len(self) else self._run(first, first + count)
        chosen = np.array(indices, np.int64)
        lengths, reads = self.lengths[chosen], self.reads[chosen]
        read = ranges(self._read_begin[chosen], reads)
        widths = self.widths[read]
        ids, wanted = ranges(self._begin[chosen], lengths), ranges(self._width_begin[read], widths)
        made = Items(self.ids[ids], lengths, reads, self.read_offsets[read], widths, self.read_ids[wanted])
        made._at_end = self._at_end
        return made

    def _run(self, first: int, last: int) -> Items:
        read, end = self._read_begin[first], self._read_begin[last]
        made = Items(
            self.ids[self._begin[first] : self._begin[last]],
            self.lengths[first:last],
            self.reads[first:last],
            self.read_offsets[read:end],
            self.widths[read:end],
            self.read_ids[self._width_begin[read] : self._width_begin[end]],
        )
        made._at_end = self._at_end
        return made

    @cached_property
    def keys(self) -> list[bytes]:
        """Of each, equal for items that get equal scores behind the same prefix: its ids, how far before its end it is
        read and for which ids. How many of both stands last, so that a key can be taken apart in one way only."""
        ids = _cut(self.ids, self._begin)
        if (wanted := self._at_end) is not None:
            tail = np.array([1, *wanted, 1, len(wanted)], np.int32).tobytes()
            return [own + tail for own in ids]
        ends = self._width_begin[self._read_begin]
        before = np.repeat(self.lengths, self.reads) - self.read_offsets
        counts = np.stack([self.reads, np.diff(ends)], 1)
        parts = ids, _cut(before, self._read_begin), _cut(self.read_ids, ends), map(bytes, counts)
        return list(map(b"".join, zip(*parts, strict=True)))

    @cached_property
    def squares(self) -> int:
        """The sum of their lengths' squares."""
        return int(np.square(self.lengths, dtype=np.int64).sum())

    @cached_property
    def _begin(self) -> Ints:
        """[M+1] where the ids of each item begin."""
        return indptr(self.lengths)

    @cached_property
    def _read_begin(self) -> Ints:
        return indptr(self.reads)

    @cached_property
    def _width_begin(self) -> Ints:
        return indptr(self.widths)


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([NONE, *parts], dtype=np.int32)


def _cut(column: Ints, begins: Ints) -> list[bytes]:
    """The bytes of column[begins[i]:begins[i + 1]], for each i."""
    whole, ends = column.tobytes(), (begins * column.itemsize).tolist()
    return [whole[begin:end] for begin, end in pairwise(ends)]
