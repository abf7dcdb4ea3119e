"""What a plan really computes, by the kernels' own rules: the proof that no GPU is needed for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attention.layout import Ints, Layout, ranges
from attention.plans import Launch, MaskKind, Pages, Plan, RaggedKv

NOTHING = -1


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a launch, resolved.

    rows  [q]  rows of the pass that query
    keys  [k]  token index that each key slot holds; NOTHING where no one wrote
    mask  [q, k] of a custom launch
    """

    launch: Launch
    index: int
    rows: Ints
    keys: Ints
    mask: NDArray[np.bool_] | None


def contents(plan: Plan, layout: Layout, pages: Pages) -> Ints:
    """[num_pages * page_size] the token that each slot holds when the launches run, NOTHING where none was written."""
    held = np.full(plan.num_pages * plan.page_size, NOTHING, np.int32)
    for segment in np.flatnonzero(layout.cached):
        kept = pages.kept[segment]
        assert kept is not None, f"segment {segment} has cached tokens but no kept pages"
        path = layout.path(int(segment))
        start, cached = int(layout.start[segment]), int(layout.cached[segment])
        offset = start % plan.page_size
        before = np.concatenate([_tokens(layout, s) for s in path])[start - offset : start + cached]
        slots = ranges(kept * np.int32(plan.page_size), np.full(len(kept), plan.page_size, np.int32))
        held[slots[: offset + cached]] = before
    held[plan.copy_to] = held[plan.copy_from]
    held[plan.append_slots] = layout.row_tokens[plan.append_rows]
    return held


def requests(plan: Plan, held: Ints) -> Iterator[Request]:
    """Every request of every launch, in order, with its keys looked up in `held` (see `contents`)."""
    for launch in plan.launches:
        kv_lens = launch.kv.lengths(plan.page_size)
        mask_start = 0
        for b in range(launch.requests):
            rows = launch.q_rows[launch.qo_indptr[b] : launch.qo_indptr[b + 1]]
            mask = None
            if launch.custom_mask is not None:
                mask = launch.custom_mask[mask_start : mask_start + len(rows) * kv_lens[b]].reshape(len(rows), -1)
                mask_start += mask.size
            yield Request(launch, b, rows, _keys(launch, b, held, plan.page_size)[: kv_lens[b]], mask)


def _keys(launch: Launch, request: int, held: Ints, page_size: int) -> Ints:
    """What the request's pages hold, the last one to its end; or its ragged tokens."""
    kv = launch.kv
    if isinstance(kv, RaggedKv):
        return kv.kv_tokens[kv.kv_indptr[request] : kv.kv_indptr[request + 1]]
    table = kv.paged_kv_indices[kv.paged_kv_indptr[request] : kv.paged_kv_indptr[request + 1]]
    return held[ranges(table * np.int32(page_size), np.full(len(table), page_size, np.int32))]


def expand(plan: Plan, layout: Layout, pages: Pages) -> NDArray[np.int32]:
    """[rows, tokens] how many times each row attends to each token. Reading a slot that holds nothing is an error."""
    counts = np.zeros((layout.rows, layout.tokens), np.int32)
    for request in requests(plan, contents(plan, layout, pages)):
        mask = kernel_mask(request)
        assert (request.keys[mask.any(axis=0)] != NOTHING).all(), "a visible key lies in a slot that no one wrote"
        q, k = np.nonzero(mask)
        np.add.at(counts, (request.rows[q], request.keys[k]), 1)
    return counts


def kernel_mask(request: Request) -> NDArray[np.bool_]:
    """[q, k] what the kernel lets through: rows are aligned with the last keys of their request."""
    launch, q_len, kv_len = request.launch, len(request.rows), len(request.keys)
    t = kv_len - q_len + np.arange(q_len)[:, None]
    k = np.arange(kv_len)[None, :]
    if request.mask is not None:
        return request.mask
    mask: NDArray[np.bool_] = np.ones((q_len, kv_len), np.bool_) if launch.mask is MaskKind.NONE else k <= t
    if launch.mask is MaskKind.MULTI_ITEM:
        mask &= _multi_item_mask(request, t, k)
    if launch.window_left >= 0:
        mask &= k >= t - launch.window_left
    return mask


def _multi_item_mask(request: Request, t: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.bool_]:
    """FlashInfer's rule; max_item_len bounds how far back the kernel starts reading."""
    arrays = request.launch.multi_item
    assert arrays is not None, "a multi-item launch carries its arrays"
    prefix = int(arrays.prefix_len_ptr[request.index])
    stride = arrays.token_pos_in_items_len
    places = arrays.token_pos_in_items_ptr[request.index * stride : (request.index + 1) * stride].astype(np.int64)
    place = places[np.clip(t - prefix, 0, stride - 1)]
    own_item = (k > t - place) & (t - k < int(arrays.max_item_len_ptr[request.index]))
    return (t < prefix) | (k < prefix) | own_item


def _tokens(layout: Layout, segment: int) -> Ints:
    return np.arange(layout.token_start[segment], layout.token_start[segment + 1], dtype=np.int32)
