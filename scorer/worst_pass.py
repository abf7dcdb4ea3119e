"""The largest legal passes, run before the service is SERVING: what they need is there then, or the start fails."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np
import torch

from attention.plans import MAX_ITEM_TOKENS, WINDOWLESS, Strategy
from batching.items import Item, Items
from batching.packing import Group, pack
from batching.select import Policy, may_take
from batching.types import PackedBatch, TokenizedRequest
from scorer.engine import Engine
from scorer.memory import MemoryPlan
from scorer.sizing import MAX_PASS_ITEMS

log = logging.getLogger(__name__)

ITEM = 64


def warm_up(engine: Engine, policy: Policy, memory: MemoryPlan) -> None:
    """Runs them on a GPU, and tells what they took beside what was foreseen. Elsewhere nothing is compiled or kept for
    later, and the time would be theirs."""
    device = engine.model.device
    if device.type != "cuda":
        return
    for batch in worst_passes(memory.pass_tokens, memory.context_tokens, strategies(policy)):
        engine.run(batch)
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_reserved(device) / 2**30
    log.info("worst passes run: %.2f GiB taken from the device, %.2f foreseen", taken, memory.total / 2**30)


def strategies(policy: Policy) -> list[Strategy]:
    """Those that AUTO may take for them."""
    return [strategy for strategy in may_take(policy) if policy.window is None or strategy not in WINDOWLESS]


def worst_passes(pass_tokens: int, context: int, strategies: Iterable[Strategy]) -> list[PackedBatch]:
    """As many tokens as a pass may have: a prefix and an item of the longest context, and short items behind one."""
    made = []
    for strategy in strategies:
        item = min(context - context // 2, MAX_ITEM_TOKENS)
        long = _request(context - item, [item])
        short = _request(pass_tokens // 2, [ITEM] * min((pass_tokens - pass_tokens // 2) // ITEM, MAX_PASS_ITEMS))
        for request in (long, short):
            if request.items:
                chosen = tuple(range(len(request.items)))
                made.append(pack([Group(request, chosen, (strategy,) * len(chosen))]))
    return made


def _request(prefix: int, lengths: list[int]) -> TokenizedRequest:
    """Every token small enough for any vocabulary; the head is read at each item's end, with its normalisation."""
    label = np.zeros((1, 1), np.int32)
    items = [Item(np.arange(n, dtype=np.int32) % 16, np.array([n - 1], np.int32), label) for n in lengths if n]
    return TokenizedRequest(np.arange(prefix, dtype=np.int32) % 16, Items.of(items), normalize=True)
