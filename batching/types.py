"""What travels between tokenisation, the batcher and the device: ids and offsets, no text and no tensors."""

from __future__ import annotations

# Records that every item has are named tuples: they are made in a third of a frozen dataclass's time.
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from attention.layout import Layout
from attention.plans import Strategy
from batching.items import Items

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


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
        self, requests: Sequence[int], items: Sequence[int], bounds: list[int], strategies: Sequence[Strategy]
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
