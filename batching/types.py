"""What travels between tokenisation, the batcher and the device: ids and offsets, no text and no tensors."""

from __future__ import annotations

# Records that every item has are named tuples: they are made in a third of a frozen dataclass's time.
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from attention.layout import Layout, indptr, ranges
from attention.plans import Strategy

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
NONE = np.zeros(0, np.int32)


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


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedRequest:
    """A prefix and the items behind it.

    prefix     [P]  token ids; P may be 0
    items           given as any sequence of them, kept by column
    normalize       also read the log-sum-exp over the vocabulary at every read
    strategy        None: the service chooses
    tenant          whose share and whose cached prefixes these are
    priority        class: higher ones have their turn earlier
    partial_ok      at the deadline, take what is scored
    """

    prefix: Ints
    items: Items
    normalize: bool = False
    strategy: Strategy | None = None
    tenant: str = ""
    priority: int = 0
    partial_ok: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.items, Items):
            object.__setattr__(self, "items", Items.of(self.items))

    @property
    def item_tokens(self) -> int:
        return len(self.items.ids)

    @property
    def tokens(self) -> int:
        return len(self.prefix) + self.item_tokens


class Scored(NamedTuple):
    """What the model said of one item.

    logits  [r, k]  fp32, raw logits of the item's read_ids
    lse     [r]     fp32, log-sum-exp over the vocabulary; None unless the request asked to normalize
    """

    logits: Floats
    lse: Floats | None
    strategy: Strategy


class Share(NamedTuple):
    """Where one range of a pass's reads belongs: reads [first, last) are item `item` of request `request`."""

    request: int
    item: int
    first: int
    last: int
    strategy: Strategy


class Shares(Sequence[Share]):
    """Those of a pass by column: reads [bounds[i], bounds[i + 1]) are item items[i] of request requests[i]. As a
    sequence it makes each when it is asked for."""

    __slots__ = ("bounds", "items", "requests", "strategies")

    def __init__(
        self, requests: Sequence[int], items: Sequence[int], bounds: Sequence[int], strategies: Sequence[Strategy]
    ) -> None:
        self.requests, self.items, self.bounds, self.strategies = requests, items, bounds, strategies

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Share: ...

    @overload
    def __getitem__(self, index: slice) -> list[Share]: ...

    def __getitem__(self, index: int | slice) -> Share | list[Share]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        return Share(self.requests[i], self.items[i], self.bounds[i], self.bounds[i + 1], self.strategies[i])


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """One forward pass as plain arrays. T rows are computed, R of them are read.

    input_ids     [T]    token id of each row
    position_ids  [T]    position of each row along its own path
    read_rows     [R]    rows whose hidden state goes to the head, ascending within a share
    read_indptr   [R+1]  read_ids[read_indptr[r]:read_indptr[r+1]] are wanted at read r
    read_ids      [..]   token ids
    normalize     [R]    whether the log-sum-exp over the vocabulary is wanted there
    leaf_strategies      the strategy of each leaf segment of `layout`, in segment order
    pages                for each segment of `layout`: ids of the pages that keep its K/V beyond this pass, or None
    packed_rows          rows of a packed_multi_item request
    """

    layout: Layout
    leaf_strategies: tuple[Strategy, ...]
    input_ids: Ints
    position_ids: Ints
    read_rows: Ints
    read_indptr: Ints
    read_ids: Ints
    normalize: NDArray[np.bool_]
    shares: Shares
    pages: tuple[Ints | None, ...]
    packed_rows: int

    @property
    def tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """What the device returns for one PackedBatch.

    logits  [len(read_ids)]  fp32
    lse     [R]              fp32, NaN where not asked for
    """

    logits: Floats
    lse: Floats
    plan_seconds: float = 0.0
    forward_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class RequestScores:
    """A request's answer: one Scored an item, in the request's order, and what it cost.

    scored                None for an item whose deadline came first
    cached_prefix_tokens  of the prefix: in the cache when the request had its first turn
    """

    scored: tuple[Scored | None, ...]
    reason: str
    computed_tokens: int
    cached_prefix_tokens: int
    passes: int
    queue_seconds: float
    plan_seconds: float
    forward_seconds: float
