"""How `prefixrank bench model` lays requests of one shape into passes, as the service does: small ones share a pass, a
large one runs as several over the same kept prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, pairwise

import numpy as np

from attention.plans import Strategy
from batching.packing import Group
from batching.types import Ints, TokenizedRequest
from loadtest.shapes import Shape


def most_items(shape: Shape, pass_tokens: int) -> tuple[int, int]:
    """Items of one request that the pass with its prefix has room for, and a pass that finds the prefix kept."""
    prefix, length, _ = shape
    return (pass_tokens - prefix) // length, pass_tokens // length


def fits(shape: Shape, pass_tokens: int) -> bool:
    """Whether the prefix and an item fit into a pass."""
    return most_items(shape, pass_tokens)[0] > 0


def prefix_pages(shape: Shape, page_size: int) -> int:
    """Pages that one request's prefix takes."""
    return -(-shape[0] // page_size)


def split(request: TokenizedRequest, shape: Shape, pass_tokens: int, pages: Ints) -> list[Group]:
    """One request alone: a group a pass. pages: of its prefix, needed where it is more than one pass."""
    first, later = most_items(shape, pass_tokens)
    items = tuple(range(len(request.items)))
    if len(items) <= first:
        return [_group(request, items)]
    cuts = [0, *range(first, len(items), later), len(items)]
    return [_group(request, items[begin:end], shape[0] if begin else 0, pages) for begin, end in pairwise(cuts)]


def saturating(
    requests: Sequence[TokenizedRequest], shape: Shape, pass_tokens: int, page_size: int
) -> Iterator[list[Group]]:
    """Passes as full as whole requests make them, for ever. The pages of two requests in turn are never the same."""
    whole, pages = shape[0] + shape[1] * shape[2], prefix_pages(shape, page_size)
    each = max(1, pass_tokens // whole)
    for turn in count():
        chosen = [requests[(turn * each + i) % len(requests)] for i in range(each)]
        if whole <= pass_tokens:
            yield [_group(request, tuple(range(len(request.items)))) for request in chosen]
            continue
        own = np.arange(pages, dtype=np.int32) + (turn % 2) * pages
        for group in split(chosen[0], shape, pass_tokens, own):
            yield [group]


def _group(request: TokenizedRequest, items: tuple[int, ...], cached: int = 0, pages: Ints | None = None) -> Group:
    return Group(request, items, (Strategy.FUSED,) * len(items), cached, pages)
