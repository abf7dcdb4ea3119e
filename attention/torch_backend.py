"""Runs any plan with plain torch: on a CPU, in tests, and where there is no FlashInfer.

Each request of a launch is cut into pieces that a dense kernel computes without a mask of its own size: rows on
themselves, causally (`Square`), rows on keys that all of them see (`Cross`), and whatever is neither (`Masked`, in
blocks of rows). A row's pieces are merged by their log-sum-exp. The cut follows from the launch's arrays alone, so a
wrong plan computes wrong numbers here as it would on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.expand import Request, contents, kernel_mask, requests
from attention.kv_pages import KvPages
from attention.layout import Ints, Layout, ranges
from attention.plans import MaskKey, MaskKind, Pages, Plan
from attention.residency import Residency
from attention.strategy import Attend, Attention

MASKED_ROWS = 256  # rows of one block of a masked piece: bounds its score matrix
PADDING = 1.25  # squares share a batch while padding them to the longest costs no more than this


class Square(NamedTuple):
    """Rows that attend to themselves, causally: [n] rows."""

    rows: Ints


class Cross(NamedTuple):
    """Rows that see all of the keys: [q] rows, [k] keys (indices into cached tokens followed by rows)."""

    rows: Ints
    keys: Ints


class Masked(NamedTuple):
    """Rows, keys, and which see which: [q], [k], [q, k]."""

    rows: Ints
    keys: Ints
    mask: NDArray[np.bool_]


Piece = Square | Cross | Masked


class State(NamedTuple):
    """Attention of some rows over some keys: out [n, heads, head_dim], lse [n, heads] in fp32."""

    out: Tensor
    lse: Tensor


class TorchAttention(Attention):
    """Exact attention over a plan's pages with torch operators only."""

    name = "torch"
    isolates_nan = True

    def __init__(self, kv_pages: KvPages) -> None:
        self._kv_pages = kv_pages

    def begin(self, layout: Layout, pages: Pages, plans: Mapping[MaskKey, Plan]) -> Attend:
        found = Residency.of(layout, pages, next(iter(plans.values())))
        kept = _Kept.of(found)
        schedules = {key: _schedule(plan, layout, pages, found.place) for key, plan in plans.items()}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, key: MaskKey) -> Tensor:
            all_k, all_v = kept.join(self._kv_pages, layer, k, v)
            return schedules[key].run(q, k, v, all_k, all_v, scale, key.soft_cap)

        return attend

    def scrub(self, first_page: int) -> None:
        """Nothing to do: no pass reads a page that it did not write or that is not kept."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A Residency as torch indices."""

    read_slots: Tensor
    copy_from: Tensor
    copy_to: Tensor
    store_rows: Tensor
    store_slots: Tensor

    @classmethod
    def of(cls, found: Residency) -> _Kept:
        arrays = (found.cached_slots, found.copy_from, found.copy_to, found.store_rows, found.store_slots)
        return cls(*(_index(array) for array in arrays))

    def join(self, kv_pages: KvPages, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps what is to be kept; returns K and V of the cached tokens and the rows, in the Residency's order."""
        device = k.device
        if len(self.store_rows):
            rows = self.store_rows.to(device)
            kv_pages.write(layer, self.store_slots.to(device), k[rows], v[rows])
        if len(self.copy_from):
            kv_pages.write(layer, self.copy_to.to(device), *kv_pages.read(layer, self.copy_from.to(device)))
        if not len(self.read_slots):
            return k, v
        cached_k, cached_v = kv_pages.read(layer, self.read_slots.to(device))
        return torch.cat([cached_k, k]), torch.cat([cached_v, v])


@dataclass(frozen=True, slots=True, eq=False)
class _Schedule:
    """A plan as batches of equal work. Squares come first and write; the others merge into what is there."""

    squares: tuple[tuple[Tensor, Tensor, Tensor], ...]  # ([b, n] padded rows, [m] flat places, [m] rows)
    others: tuple[tuple[Tensor, Tensor, Tensor | None], ...]  # (rows, keys, mask)

    def run(self, q: Tensor, k: Tensor, v: Tensor, all_k: Tensor, all_v: Tensor, scale: float, cap: float) -> Tensor:
        out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        for padded, places, rows in self.squares:
            state = _square(q, k, v, padded.to(q.device), scale, cap)
            out[rows] = state.out.flatten(0, 1)[places].float()
            lse[rows] = state.lse.flatten(0, 1)[places]
        for rows, keys, mask in self.others:
            state = _cross(q[rows], all_k[keys], all_v[keys], mask, scale, cap)
            merged = _merge(State(out[rows], lse[rows]), state)
            out[rows], lse[rows] = merged
        return out.to(q.dtype)


def _schedule(plan: Plan, layout: Layout, pages: Pages, index: Ints) -> _Schedule:
    held = contents(plan, layout, pages)
    pieces = [piece for request in requests(plan, held) for piece in _cut(request, layout, index)]
    return _Schedule(
        squares=tuple(_batches([piece.rows for piece in pieces if isinstance(piece, Square)])),
        others=tuple(
            (_index(p.rows), _index(p.keys), torch.from_numpy(p.mask) if isinstance(p, Masked) else None)
            for p in pieces
            if not isinstance(p, Square)
        ),
    )


def _cut(request: Request, layout: Layout, index: Ints) -> Iterator[Piece]:
    """A request in pieces, by its mask."""
    if request.mask is not None or request.launch.window_left >= 0:
        yield from _masked(request, index)
    elif request.launch.mask is MaskKind.NONE:
        yield Cross(request.rows, index[request.keys])
    elif request.launch.mask is MaskKind.CAUSAL:
        yield from _causal(request.rows, request.keys, layout, index)
    else:
        yield from _multi_item(request, layout, index)


def _causal(rows: Ints, keys: Ints, layout: Layout, index: Ints) -> Iterator[Piece]:
    """Rows aligned with the last keys: the earlier keys are seen by all of them."""
    history = len(keys) - len(rows)
    if history:
        yield Cross(rows, index[keys[:history]])
    if np.array_equal(keys[history:], layout.row_tokens[rows]):
        yield Square(rows)
    else:
        yield Masked(rows, index[keys[history:]], np.tri(len(rows), dtype=np.bool_))


def _multi_item(request: Request, layout: Layout, index: Ints) -> Iterator[Piece]:
    """The prefix's rows causally, then every item on the prefix (in one piece) and on itself."""
    arrays = request.launch.multi_item
    assert arrays is not None, "a multi-item launch carries its arrays"
    prefix, stride = int(arrays.prefix_len_ptr[request.index]), arrays.token_pos_in_items_len
    rows, keys = request.rows, request.keys
    first = len(keys) - len(rows)
    places = arrays.token_pos_in_items_ptr[request.index * stride :][: len(keys) - prefix]
    if not len(places):
        yield from _causal(rows, keys, layout, index)
        return
    begins = np.flatnonzero(places == 1)
    lengths = np.diff(begins, append=len(places))
    counted = np.array_equal(places, ranges(np.ones_like(lengths), lengths))
    if first > prefix or not counted or lengths.max() > arrays.max_item_len_ptr[request.index]:
        yield from _masked(request, index)
        return
    if first < prefix:
        yield from _causal(rows[: prefix - first], keys[:prefix], layout, index)
    if prefix:
        yield Cross(rows[prefix - first :], index[keys[:prefix]])
    for begin, length in zip(begins + prefix, lengths, strict=True):
        own = slice(begin, begin + length)
        yield from _causal(rows[own.start - first : own.stop - first], keys[own], layout, index)


def _masked(request: Request, index: Ints) -> Iterator[Masked]:
    """Blocks of rows against the keys that any of them can see."""
    if request.mask is not None:
        yield Masked(request.rows, index[np.maximum(request.keys, 0)], request.mask)
        return
    offset, window_left = len(request.keys) - len(request.rows), request.launch.window_left
    whole = kernel_mask(request) if request.launch.mask is MaskKind.MULTI_ITEM else None
    for begin in range(0, len(request.rows), MASKED_ROWS):
        end = min(begin + MASKED_ROWS, len(request.rows))
        low = max(0, offset + begin - window_left) if window_left >= 0 else 0
        keys = request.keys[low : offset + end]
        if whole is not None:
            mask = whole[begin:end, low : offset + end]
        else:
            mask = kernel_mask(replace(request, rows=request.rows[begin:end], keys=keys))
        yield Masked(request.rows[begin:end], index[keys], mask)


def _batches(squares: Iterable[Ints]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Squares of like length side by side, padded with the last row of each: causality keeps padding unseen, and a
    square's own row keeps another's NaN out."""
    ordered = sorted(squares, key=len)
    batch: list[Ints] = []
    held = 0
    for rows in ordered:
        if batch and len(rows) * (len(batch) + 1) > PADDING * (held + len(rows)):
            yield _padded(batch)
            batch, held = [], 0
        batch.append(rows)
        held += len(rows)
    if batch:
        yield _padded(batch)


def _padded(batch: list[Ints]) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(len(rows) for rows in batch)
    padded = np.stack([np.pad(rows, (0, longest - len(rows)), mode="edge") for rows in batch])
    lengths = np.array([len(rows) for rows in batch], np.int32)
    places = ranges(np.arange(len(batch), dtype=np.int32) * np.int32(longest), lengths)
    return _index(padded), _index(places), _index(np.concatenate(batch))


def _square(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, cap: float) -> State:
    """rows: [b, n]. Returns out [b, n, heads, head_dim] and lse [b, n, heads]."""
    group = q.shape[1] // k.shape[1]
    query = q[rows].transpose(1, 2)
    key, value = (x[rows].transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    if cap:
        mask = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool, device=q.device).tril()
        out, lse = _plain(query, key, value, mask, scale, cap)
    else:
        out, lse = _dense(query, key, value, True, scale)
    return State(out.transpose(1, 2), lse.transpose(1, 2))


def _cross(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float) -> State:
    """q [n, heads, d] on k, v [m, kv_heads, d]; the query heads of a group are rows of one product."""
    n, heads, kv_heads = len(q), q.shape[1], k.shape[1]
    query = q.view(n, kv_heads, heads // kv_heads, -1).transpose(0, 1).flatten(1, 2).unsqueeze(0)
    key, value = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
    if mask is not None:
        mask = mask.to(q.device).repeat_interleave(heads // kv_heads, dim=0)
    if mask is None and not cap:
        out, lse = _dense(query, key, value, False, scale)
    else:
        out, lse = _plain(query, key, value, mask, scale, cap)
    return State(
        out[0].view(kv_heads, n, heads // kv_heads, -1).transpose(0, 1).flatten(1, 2),
        lse[0].view(kv_heads, n, heads // kv_heads).transpose(0, 1).flatten(1, 2),
    )


def _dense(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """[b, h, n, d] attention and its log-sum-exp [b, h, n]: torch's fused kernel where it tells the log-sum-exp."""
    fused = q.device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    if fused and q.shape[-1] == v.shape[-1]:  # latent attention has shorter values than keys
        # Private, but the only fused CPU kernel that returns the log-sum-exp; `_plain` below is its equal.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril() if causal else None
    return _plain(q, k, v, mask, scale, 0.0)


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float) -> tuple[Tensor, Tensor]:
    """The same in fp32 by the definition, in blocks of rows. mask: [n, m] True where seen.

    A masked key has no effect even where it holds NaN: a bad document must not cost its neighbours theirs.
    """
    key, value = k.float(), v.float()
    bad = ~(key.isfinite().all(-1) & value.isfinite().all(-1))  # [b, h, m]
    if mask is not None and bool(bad.any()):
        value = value.masked_fill(bad.unsqueeze(-1), 0.0)
    outs, lses = [], []
    for begin in range(0, q.shape[2], MASKED_ROWS):
        scores = q[:, :, begin : begin + MASKED_ROWS].float() @ key.transpose(-1, -2) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        if mask is not None:
            scores = scores.masked_fill(~mask[begin : begin + MASKED_ROWS], -torch.inf)
        lse = scores.logsumexp(dim=-1)
        out = torch.exp(scores - lse.unsqueeze(-1)) @ value
        if mask is not None and bool(bad.any()):
            touched = (bad.unsqueeze(2) & mask[begin : begin + MASKED_ROWS]).any(-1)
            out = out.masked_fill(touched.unsqueeze(-1), torch.nan)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _merge(a: State, b: State) -> State:
    """The attention over both key sets. A row that `a` has not seen yet carries lse = -inf there."""
    lse = torch.logaddexp(a.lse, b.lse)
    weight_a, weight_b = (torch.exp(part - lse).unsqueeze(-1) for part in (a.lse, b.lse))
    return State(a.out * weight_a + b.out.float() * weight_b, lse)


def _index(array: Ints) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
