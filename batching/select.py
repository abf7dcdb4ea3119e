"""What to do next: which strategy computes an item, and which requests go into the next pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from attention.plans import ITEM_LIMITED, MAX_ITEM_TOKENS, WINDOWLESS, Strategy
from batching.types import Item, TokenizedRequest


class StrategyError(ValueError):
    """The caller asked for a strategy that cannot compute the request; the message says which can."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The choice under AUTO.

    multi_item_max_tokens  items up to this length run as multi_item, longer ones as direct_ragged
    window                 the shortest sliding window of the model's layers, None: every layer sees all
    """

    multi_item_max_tokens: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One strategy an item, and the reason in words."""

    strategies: tuple[Strategy, ...]
    reason: str


def choose(request: TokenizedRequest, items: Sequence[Item], policy: Policy) -> Choice:
    """The strategy of each item. Raises StrategyError where the request asks for one that cannot be."""
    prefix, window = len(request.prefix), policy.window
    if request.strategy is not None:
        refuse(request.strategy, prefix, max(len(item.ids) for item in items), window)
        return Choice((request.strategy,) * len(items), f"asked for: {request.strategy}")
    chosen, why = zip(*(_by_length(prefix, item, policy) for item in items), strict=True)
    counts = Counter(zip(chosen, why, strict=True))
    return Choice(tuple(chosen), "; ".join(f"{n} of {len(items)} {told}: {s}" for (s, told), n in counts.items()))


def _by_length(prefix: int, item: Item, policy: Policy) -> tuple[Strategy, str]:
    limit = min(policy.multi_item_max_tokens, MAX_ITEM_TOKENS)
    if len(item.ids) > limit:
        return Strategy.DIRECT_RAGGED, f"longer than {limit} tokens"
    if policy.window is not None and prefix + len(item.ids) > policy.window:
        return Strategy.DIRECT_RAGGED, f"past the model's sliding window of {policy.window} tokens"
    return Strategy.MULTI_ITEM, f"of at most {limit} tokens"


def refuse(strategy: Strategy, prefix: int, longest: int, window: int | None) -> None:
    """Raises StrategyError where `strategy` cannot compute items of up to `longest` tokens behind such a prefix."""
    if strategy in ITEM_LIMITED and longest > MAX_ITEM_TOKENS:
        raise StrategyError(f"{strategy} takes items of up to {MAX_ITEM_TOKENS} tokens, got {longest}: direct_ragged")
    if strategy in WINDOWLESS and window is not None and prefix + longest > window:
        raise StrategyError(
            f"{strategy} is exact up to the model's sliding window of {window} tokens, "
            f"prefix and item have {prefix + longest}: direct_ragged"
        )


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the scheduling choice sees of a request: tokens of its prefix and of each item still to be scored.

    prefix_each  every item computes the prefix for itself (naive)
    """

    prefix: int
    items: tuple[int, ...]
    prefix_each: bool = False


def take(queue: Sequence[Waiting], budget: int) -> tuple[int, ...]:
    """How many items of each request go into the next pass, first come first served, within a budget of tokens.

    The first request always gets one item, however long, so that everything accepted is scored.
    """
    taken: list[int] = []
    left = budget
    for waiting in queue:
        count, cost = 0, 0 if waiting.prefix_each else waiting.prefix
        for item in waiting.items:
            more = item + (waiting.prefix if waiting.prefix_each else 0)
            if cost + more > left and (any(taken) or count):
                break
            cost += more
            count += 1
        taken.append(count)
        left -= cost if count else 0
        if left <= 0:
            break
    return tuple(taken) + (0,) * (len(queue) - len(taken))
