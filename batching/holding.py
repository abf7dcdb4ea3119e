"""Prefixes without documents: computed ahead of the requests that will use them, and held while they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from batching.batcher import Batcher
from batching.errors import QueueFull
from batching.items import Item, Items
from batching.runs import Lease
from batching.scheduler import Asked
from batching.types import Ints, RequestScores, TokenizedRequest

HOLD_TRIES = 3  # others may take the pages of a prefix in the moment between its pass and its use

# A pass has items: behind a prefix that is computed for later stands this one.
PROBE = Items.of([Item(np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32))])


@dataclass(frozen=True, slots=True)
class Warmed:
    """Tokens of a prefix: cached before, and kept from eviction now."""

    cached: int
    kept: int


@dataclass(frozen=True, slots=True)
class Held:
    """A prefix whose K/V is in pages. cached: tokens that were there before; scores: what computing the others cost.

    Whoever holds must release the lease, by `Batcher.cache`.
    """

    lease: Lease
    cached: int
    scores: RequestScores | None


async def warm(batcher: Batcher, prefix: Ints, tenant: str, keep: float, deadline: float | None = None) -> Warmed:
    """Computes a prefix, unless it is cached, and keeps it from eviction for `keep` seconds.

    Raises as Batcher.submit does.
    """
    request = TokenizedRequest(prefix, PROBE, tenant=tenant)
    cache, chain = batcher.cache, batcher.chain(request)
    cached = cache.hit(chain)
    if cached < len(prefix):
        await batcher.submit(request, deadline, chain)
    now = batcher.now()
    lease = cache.held(chain)
    kept = cache.pin(lease, now + keep, now)
    cache.release(lease)
    return Warmed(cached, kept)


async def hold(
    batcher: Batcher,
    prefix: Ints,
    asked: Asked,
    deadline: float | None = None,
    coming: Callable[[Lease], None] | None = None,
) -> Held:
    """Computes a prefix, unless it is cached, and holds its pages. coming: as of Batcher.submit; when this returns, its
    lease is of the same blocks, and sound.

    Raises as Batcher.submit does, and QueueFull where the pages are in use by others.
    """
    request = TokenizedRequest(prefix, PROBE, tenant=asked.tenant, priority=asked.priority)
    cache, chain = batcher.cache, batcher.chain(request)
    cached, scores = cache.hit(chain), None
    for _ in range(HOLD_TRIES):
        there = scores is None and cached == len(prefix)  # its use counts as one, where no pass counts it
        lease = cache.acquire(chain, batcher.now()) if there else cache.held(chain)
        if lease.written == len(prefix):
            return Held(lease, cached, scores)
        cache.release(lease)
        scores = await batcher.submit(request, deadline, chain, coming)
        coming = None
    raise QueueFull(f"the pages for a prefix of {len(prefix)} tokens are in use")
