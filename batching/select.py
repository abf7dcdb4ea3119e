"""What to do next: which strategy computes an item, and which requests go into the next pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attention.cost import PACKED_ROWS
from attention.plans import DENSE, ITEM_LIMITED, MAX_ITEM_TOKENS, WINDOWLESS, Strategy
from attention.timing import CANDIDATES, TimeModel
from batching.items import Items
from batching.types import Ints, TokenizedRequest

DENSE_TOKENS = 4096  # of a request under a dense mask, whose memory grows with their square


class StrategyError(ValueError):
    """The caller asked for a strategy that cannot compute the request; the message says which can."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """The choice under AUTO by document length alone.

    multi_item_max_tokens  items up to this length run as multi_item, longer ones as direct_ragged
    window                 the shortest sliding window of the model's layers, None: every layer sees all
    """

    multi_item_max_tokens: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The choice under AUTO by what this machine was measured to take.

    model   milliseconds of a layer's attention, by the lengths
    window  the shortest sliding window of the model's layers, None: every layer sees all
    """

    model: TimeModel
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """The choice under AUTO where whole passes of the fused strategy are replayed from CUDA graphs.

    A replay saves the launches of every operator, tens of milliseconds a pass: more than strategies differ by.

    only  no other strategy may be asked for: its bits would differ
    """

    only: bool = False
    window: None = None


Policy = Threshold | Measured | Replayed


def may_take(policy: Policy) -> tuple[Strategy, ...]:
    """The strategies that AUTO may choose."""
    if isinstance(policy, Replayed):
        return (Strategy.FUSED,)
    if isinstance(policy, Threshold):
        return (Strategy.DIRECT_RAGGED, Strategy.MULTI_ITEM)
    return CANDIDATES


@dataclass(frozen=True, slots=True)
class Choice:
    """One strategy an item, the reason in words, and the rows of a packed_multi_item request."""

    strategies: tuple[Strategy, ...]
    reason: str
    packed_rows: int = PACKED_ROWS


def choose(request: TokenizedRequest, items: Items, policy: Policy, cached: int = 0) -> Choice:
    """The strategy of each item. cached: prefix tokens whose K/V exists already.

    Raises StrategyError where the request asks for one that cannot be.
    """
    prefix, window, longest = len(request.prefix), policy.window, int(items.lengths.max())
    if request.strategy is not None:
        if isinstance(policy, Replayed) and policy.only and request.strategy is not Strategy.FUSED:
            raise StrategyError(f"the service is invariant, and {request.strategy} would give other bits: fused")
        if request.strategy in DENSE and (tokens := prefix + len(items.ids)) > DENSE_TOKENS:
            raise StrategyError(f"{request.strategy} takes requests of up to {DENSE_TOKENS} tokens, got {tokens}")
        refuse(request.strategy, prefix, longest, window)
        return Choice((request.strategy,) * len(items), f"asked for: {request.strategy}")
    if isinstance(policy, Replayed):
        if longest <= MAX_ITEM_TOKENS:
            return Choice((Strategy.FUSED,) * len(items), "replayed from a CUDA graph")
        if policy.only:
            raise StrategyError(f"the service is invariant up to items of {MAX_ITEM_TOKENS} tokens, got {longest}")
        return Choice((Strategy.DIRECT_RAGGED,) * len(items), f"an item of {longest} tokens")
    if isinstance(policy, Measured):
        return _by_time(prefix, cached, items.lengths, policy)
    chosen, why = zip(*(_by_length(prefix, length, policy) for length in items.lengths.tolist()), strict=True)
    counts = Counter(zip(chosen, why, strict=True))
    return Choice(tuple(chosen), "; ".join(f"{n} of {len(items)} {told}: {s}" for (s, told), n in counts.items()))


def _by_length(prefix: int, length: int, policy: Threshold) -> tuple[Strategy, str]:
    limit = min(policy.multi_item_max_tokens, MAX_ITEM_TOKENS)
    if length > limit:
        return Strategy.DIRECT_RAGGED, f"longer than {limit} tokens"
    if policy.window is not None and prefix + length > policy.window:
        return Strategy.DIRECT_RAGGED, f"past the model's sliding window of {policy.window} tokens"
    return Strategy.MULTI_ITEM, f"of at most {limit} tokens"


def _by_time(prefix: int, cached: int, lengths: Ints, policy: Measured) -> Choice:
    ranked = policy.model.ranked(prefix, cached, lengths, _possible(prefix, int(lengths.max()), policy.window))
    best = ranked[0]
    reason = f"measured on {policy.model.machine.name}: {best.strategy} {best.milliseconds:.3f} ms a layer"
    if len(ranked) > 1:
        reason += f", next {ranked[1].strategy} {ranked[1].milliseconds:.3f}"
    return Choice((best.strategy,) * len(lengths), reason, best.packed_rows)


def _possible(prefix: int, longest: int, window: int | None) -> list[Strategy]:
    possible = []
    for strategy in CANDIDATES:
        try:
            refuse(strategy, prefix, longest, window)
        except StrategyError:
            continue
        possible.append(strategy)
    return possible


def refuse(strategy: Strategy, prefix: int, longest: int, window: int | None) -> None:
    """Raises StrategyError where `strategy` cannot compute items of up to `longest` tokens behind such a prefix."""
    if strategy in ITEM_LIMITED and longest > MAX_ITEM_TOKENS:
        raise StrategyError(f"{strategy} takes items of up to {MAX_ITEM_TOKENS} tokens, got {longest}: direct_ragged")
    if strategy in WINDOWLESS and window is not None and prefix + longest > window:
        raise StrategyError(
            f"{strategy} is exact up to the model's sliding window of {window} tokens, "
            f"prefix and item have {prefix + longest}: direct_ragged"
        )


class Budget:
    """Tokens and items of one pass, while it is being filled.

    The first request always gets one item, however long, so that everything accepted is scored. The items of a request
    that fits into a pass stay together.
    """

    def __init__(self, tokens: int, items: int) -> None:
        self.tokens = tokens
        self.items = items
        self._whole = tokens
        self._any = False

    @property
    def full(self) -> bool:
        return self.tokens <= 0 or self.items <= 0

    def take(self, prefix: int, items: Sequence[int], prefix_each: bool = False) -> int:
        """How many of these items, by their tokens, go into the pass behind `prefix` tokens still to be computed.

        prefix_each: every item computes the prefix for itself (naive).
        """
        tokens = sum(items) + prefix * (len(items) if prefix_each else 1)
        if items and tokens <= self.tokens and len(items) <= self.items:  # as most requests do
            return self._taken(len(items), tokens)
        each = prefix if prefix_each else 0
        ends = np.cumsum(np.array(items, np.int64) + each) + (0 if prefix_each else prefix)
        count = int(np.searchsorted(ends, self.tokens, side="right"))
        count = min(max(count, 0 if self._any else 1), self.items, len(items))
        together = len(items) and ends[-1] <= self._whole and count < len(items)
        if not count or (together and self._any):
            return 0
        return self._taken(count, int(ends[count - 1]))

    def _taken(self, count: int, tokens: int) -> int:
        self.tokens -= tokens
        self.items -= count
        self._any = True
        return count
