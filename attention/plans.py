"""Plans: which rows query which keys, under which mask, in which launches. Ints and numpy arrays only.

The nouns are FlashInfer's. A machine without a GPU can prove a plan: `attention.expand` turns it into a matrix of
counts by the kernels' own rules, which must be exactly 1 where `mask.visible` is True and 0 elsewhere. Backend, tile
and split are chosen beside the plan, not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention.layout import Ints, Layout

MAX_ITEM_TOKENS = 65_535  # token_pos_in_items and max_item_len are uint16 in the kernels


class Strategy(StrEnum):
    """The ways to compute a pass. The names are those of the enum, the flag, the metric label and the bench row."""

    NAIVE = "naive"
    SPLIT_CACHE = "split_cache"
    DIRECT_RAGGED = "direct_ragged"
    DIRECT_RAGGED_GROUPED = "direct_ragged_grouped"
    CASCADE = "cascade"
    CASCADE_CONTIGUOUS = "cascade_contiguous"
    MULTI_ITEM = "multi_item"
    PACKED_MULTI_ITEM = "packed_multi_item"
    FUSED = "fused"
    CUSTOM_MASK = "custom_mask"
    REFERENCE = "reference"


# They compare places in the packed sequence, or none: exact only where no window is shorter than prefix and item.
WINDOWLESS = frozenset(
    {
        Strategy.CASCADE,
        Strategy.CASCADE_CONTIGUOUS,
        Strategy.MULTI_ITEM,
        Strategy.PACKED_MULTI_ITEM,
        Strategy.FUSED,
    }
)
# Their masks count an item's tokens in 16 bits.
ITEM_LIMITED = frozenset({Strategy.MULTI_ITEM, Strategy.PACKED_MULTI_ITEM, Strategy.FUSED})


# Their masks take rows x tokens.
DENSE = frozenset({Strategy.CUSTOM_MASK, Strategy.REFERENCE})


class MaskKind(StrEnum):
    """What a launch's kernel masks. NONE masks nothing; CUSTOM brings its matrix; the others follow from the arrays."""

    NONE = "none"
    CAUSAL = "causal"
    MULTI_ITEM = "multi_item"
    CUSTOM = "custom"


class MaskKey(NamedTuple):
    """What a model's layers may differ in: a pass has one plan for each."""

    window: int | None = None
    soft_cap: float = 0.0


class HeadShape(NamedTuple):
    """What a kernel is made for: heads of one layer, the softmax scale, and torch's dtype of q, k and v."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    dtype: Any


@dataclass(frozen=True, slots=True, eq=False)
class PagedKv:
    """Keys of B requests in pages.

    paged_kv_indptr         [B+1]
    paged_kv_indices        [..]  pages of each request, in order of position
    paged_kv_last_page_len  [B]   1..page_size
    """

    paged_kv_indptr: Ints
    paged_kv_indices: Ints
    paged_kv_last_page_len: Ints

    def lengths(self, page_size: int) -> Ints:
        """[B] keys of each request."""
        return (np.diff(self.paged_kv_indptr) - 1) * np.int32(page_size) + self.paged_kv_last_page_len


@dataclass(frozen=True, slots=True, eq=False)
class RaggedKv:
    """Keys of B requests one after the other, without pages.

    kv_indptr  [B+1]
    kv_tokens  [kv_indptr[B]]  token of the layout behind each key
    """

    kv_indptr: Ints
    kv_tokens: Ints

    def lengths(self, page_size: int) -> Ints:
        """[B] keys of each request, whatever the page size."""
        return np.diff(self.kv_indptr)


@dataclass(frozen=True, slots=True, eq=False)
class MultiItem:
    """The multi-item mask of a launch of B requests.

    prefix_len_ptr          [B] uint32           tokens before the first item
    token_pos_in_items_ptr  [B * stride] uint16  place of each later token in its item, counted from 1; 0 is padding
    token_pos_in_items_len  stride, the same for every request
    max_item_len_ptr        [B] uint16           longest item: the kernel looks no further back than that
    """

    prefix_len_ptr: NDArray[np.uint32]
    token_pos_in_items_ptr: NDArray[np.uint16]
    token_pos_in_items_len: int
    max_item_len_ptr: NDArray[np.uint16]


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel call over B requests.

    q_rows       [qo_indptr[B]]  rows of the pass that query, request after request
    qo_indptr    [B+1]
    window_left  keys further back than this many positions are masked; -1: none are
    custom_mask  bool, the requests' [q_len, kv_len] matrices flattened one after the other
    """

    mask: MaskKind
    q_rows: Ints
    qo_indptr: Ints
    kv: PagedKv | RaggedKv
    window_left: int = -1
    multi_item: MultiItem | None = None
    custom_mask: NDArray[np.bool_] | None = None

    @property
    def requests(self) -> int:
        return len(self.qo_indptr) - 1

    def packed_custom_mask(self, page_size: int) -> NDArray[np.uint8]:
        """The custom mask as FlashInfer packs it: each request's bits padded to whole bytes, lowest bit first."""
        assert self.custom_mask is not None, "only a custom launch has a mask to pack"
        sizes = np.diff(self.qo_indptr).astype(np.int64) * self.kv.lengths(page_size)
        parts = np.split(self.custom_mask, np.cumsum(sizes)[:-1])
        return np.concatenate([np.packbits(part, bitorder="little") for part in parts])


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Where a pass's K/V lives, in pages of `page_size` tokens.

    first_scratch  pages with this id and above are free for the plan to use during the pass
    kept           for each segment, the ids of the pages that keep its K/V beyond the pass, or None. They hold the
                   segment's positions and, before them, those of its ancestors that share its first page.
    """

    page_size: int
    first_scratch: int
    kept: tuple[Ints | None, ...]

    @classmethod
    def scratch(cls, layout: Layout, page_size: int) -> Pages:
        """Nothing kept: the whole pass in scratch pages."""
        return cls(page_size, 0, (None,) * layout.segments)


def slots_in(pages: Ints, page_size: int, offset: int, count: int) -> Ints:
    """`count` slots of consecutive tokens, from `offset` within the first of `pages` on."""
    first, last = offset // page_size, -(-(offset + count) // page_size)
    begins, within = pages[first:last] * np.int32(page_size), np.arange(page_size, dtype=np.int32)
    slots: Ints = np.add.outer(begins, within).ravel()
    return slots[offset - first * page_size :][:count]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A pass's attention, for one (window, soft cap).

    num_pages           one more than the highest page id in use
    append_rows/_slots  the K/V of row append_rows[i] is written to slot append_slots[i] before the launches
                        (slot = page * page_size + offset); a row may be written more than once
    copy_from/_to       cached K/V copied between slots before the launches
    merges              (a, b): launch b's rows are merged into launch a's results by their log-sum-exp
    logits_soft_cap     cap of the attention logits; 0: none
    """

    page_size: int
    num_pages: int
    append_rows: Ints
    append_slots: Ints
    copy_from: Ints
    copy_to: Ints
    launches: tuple[Launch, ...]
    merges: tuple[tuple[int, int], ...] = ()
    logits_soft_cap: float = 0.0
