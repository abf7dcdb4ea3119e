"""Where the tiles of the `fused` strategy's kernel begin and end, by lengths alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attention.cost import LaunchShape
from attention.layout import Ints, indptr, ranges


class Cut(NamedTuple):
    """How a kernel cuts: rows of a tile, KV heads, each of which has a CTA for every tile, and keys of a block.

    aligned: every item begins a tile of its own, so that its rows meet their keys in the same blocks wherever it stands
    """

    tokens: int
    columns: int
    keys: int = 64
    aligned: bool = False


class Ranges(NamedTuple):
    """Tiles as rows [begin, end) of requests. own: where the masked part of each begins."""

    request: Ints
    begin: Ints
    end: Ints
    own: Ints


def cut_rows(first: Ints, rows: Ints, shared: Ints, item_start: Ints, cut: Cut) -> Ranges:
    """Requests of consecutive rows behind `shared` keys, cut into tiles, request after request.

    A tile may begin inside an item and reach into the next ones. It then scans that item's beginning under the mask,
    for rows that mostly do not see it, which is cheaper than a half-empty tile unless the item is longer than the
    shared part.
    """
    if cut.aligned:
        of, first, rows = _items(first, rows, item_start)
        item, begin, end = _evenly(first, rows, cut.tokens)
        request = of[item]
    else:
        request, begin, end = _evenly(first, rows, cut.tokens)
        start = item_start[begin]
        long = (item_start[end - 1] != start) & (begin - start > shared[request])
        if long.any():
            request, begin, end = _around(request[long], first, rows, shared, item_start, cut.tokens)
    return Ranges(request, begin, end, _own_begin(item_start[begin], item_start[end - 1], begin, cut.keys))


def _evenly(first: Ints, rows: Ints, tokens: int) -> tuple[Ints, Ints, Ints]:
    """(which of them, begin, end) of each tile of stretches of rows."""
    number = -(-rows // tokens)
    of = np.repeat(np.arange(len(first), dtype=np.int32), number)
    before = np.cumsum(number, dtype=np.int32) - number
    begin: Ints = np.arange(len(of), dtype=np.int32) * np.int32(tokens) + (first - before * np.int32(tokens))[of]
    return of, begin, np.minimum(begin + np.int32(tokens), (first + rows)[of])


def _items(first: Ints, rows: Ints, item_start: Ints) -> tuple[Ints, Ints, Ints]:
    """(request, first row, rows) of every item."""
    own = ranges(first, rows)
    begins = np.flatnonzero(item_start[own] == own)
    request = np.repeat(np.arange(len(first), dtype=np.int32), rows)[begins]
    return request, own[begins], np.diff(begins, append=len(own)).astype(np.int32)


def _around(
    requests: Ints, first: Ints, rows: Ints, shared: Ints, item_start: Ints, tokens: int
) -> tuple[Ints, Ints, Ints]:
    """The same where tiles of these requests end with a long item."""
    begins, ends, chosen = [], [], set(requests.tolist())
    for b, (begin, end, keys) in enumerate(zip(first.tolist(), (first + rows).tolist(), shared.tolist(), strict=True)):
        cuts = range(begin, end, tokens) if b not in chosen else _long_cuts(item_start[begin:end], begin, tokens, keys)
        begins.append(np.array(cuts, np.int32))
        ends.append(np.append(begins[-1][1:], np.int32(end)))
    request = np.repeat(np.arange(len(first), dtype=np.int32), [len(cuts) for cuts in begins])
    return request, np.concatenate(begins), np.concatenate(ends)


def _long_cuts(start: Ints, first: int, tokens: int, shared: int) -> list[int]:
    """First row of each tile of one request. start: [rows] of it."""
    changes = np.append(np.flatnonzero(np.diff(start)) + 1, len(start)) + first  # first row of each later item
    cuts, at, begin = [], first, first
    for end in changes.tolist():  # of one item after the other; a few ints at a time are faster than arrays
        while at < end:
            cuts.append(at)
            at = end if end < at + tokens and at - begin > shared else at + tokens
        begin = end
    return cuts


def _own_begin(start: Ints, last: Ints, begin: Ints, keys: int) -> Ints:
    """Where the masked part of each tile begins. start, last: first row that its first and its last row see.

    In a tile of one item, what came before is seen by all of its rows: whole blocks of keys, so that only one block of
    the tile is partial.
    """
    whole: Ints = start + (begin - start) // keys * np.int32(keys)
    return np.where(start == last, whole, start)


def count_blocks(shape: LaunchShape, cut: Cut) -> tuple[Ints, Ints, Ints]:
    """[n] blocks of keys without a mask, blocks with one, and keys of each tile of a fused launch, by its lengths."""
    starts, item, first = [], 0, indptr(shape.q_lens)[:-1]
    for b, rows in enumerate(shape.q_lens.tolist()):
        lengths: Ints = shape.q_lens[b : b + 1]
        if shape.kv_lens[b] > shape.prefix_lens[b]:
            last = item + int(np.searchsorted(np.cumsum(shape.items[item:]), rows)) + 1
            lengths, item = shape.items[item:last], last
        starts.append(np.repeat(first[b] + indptr(lengths)[:-1], lengths))
    item_start, shared = np.concatenate(starts), shape.kv_lens - shape.q_lens
    made = cut_rows(first, shape.q_lens, shared, item_start, cut)
    start, before = item_start[made.begin], shared[made.request]
    full = before // cut.keys + (made.own - start) // cut.keys
    masked = (before % cut.keys > 0) + -(-(made.end - made.own) // cut.keys)
    keys: Ints = (before + made.end - start).astype(np.int32)
    return full.astype(np.int32), masked.astype(np.int32), keys
