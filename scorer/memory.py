"""How much one pass may compute and how much K/V may be kept in the memory that is free. Pure: bytes in, limits out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from scorer.errors import ConfigError

SMALLEST_PASS = 256  # tokens: below it a pass costs its overhead
PARTS = ("weights", "activations", "graphs", "workspace", "scratch", "cache")
GiB = 1 << 30


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes that a pass takes while it runs.

    fixed      whatever its size
    row        for each row that it computes
    chunk_row  for each row that the position-wise layers take at a time, `chunk` of them at most
    key        for each key that its attention may read: rows and cached tokens
    """

    fixed: int = 0
    row: int = 0
    chunk_row: int = 0
    chunk: int = 1
    key: int = 0

    def bytes(self, rows: int, keys: int) -> int:
        """Of a pass of so many rows, whose attention reads so many keys."""
        return self.fixed + self.row * rows + self.chunk_row * min(rows, self.chunk) + self.key * keys


@dataclass(frozen=True, slots=True)
class FusedNeeds:
    """What the hand-fused path takes: each pass; its graphs beside a pass's activations; its buffers."""

    growth: Growth
    graphs: int
    static: int


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model takes on its device.

    weights     that lie there already
    eager       of passes that run operator by operator, by each way to compute them
    graphs      of captured passes, in memory of their own
    workspace   whatever the limits are
    kv_token    K/V of one token in all layers
    page_size   tokens of a page
    scratch     pages for each token of a pass and its context, and beside them, in which a plan writes
    """

    weights: int
    eager: tuple[Growth, ...]
    kv_token: int
    page_size: int
    graphs: Growth = Growth()
    workspace: int = 0
    scratch: tuple[float, int] = (0.0, 0)

    def scratch_pages(self, pass_tokens: int, context_tokens: int) -> int:
        each, beside = self.scratch
        return int(each * (pass_tokens + context_tokens)) // self.page_size + beside


@dataclass(frozen=True, slots=True)
class Asked:
    """A limit: what was asked for, None where the service is to choose, and what it then takes at most and at least."""

    name: str
    asked: int | None
    most: int
    least: int = 0

    def choices(self) -> Iterator[int]:
        """What to try, best first."""
        if self.asked is not None:
            yield self.asked
            return
        value = self.most
        while value > self.least:
            yield value
            value //= 2
        yield min(self.least, self.most)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The limits that take memory. A context of None is that of a pass."""

    pass_tokens: Asked
    context_tokens: Asked | None
    cache_tokens: Asked
    model_context: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Limits that fit, and what they take.

    budget  bytes that the service may take, weights included
    parts   bytes of each of PARTS
    """

    budget: int
    pass_tokens: int
    context_tokens: int
    cache_tokens: int
    scratch_pages: int
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def told(self) -> str:
        """One line of figures."""
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in self.parts.items() if size)
        return f"{_gib(self.total)} of {_gib(self.budget)}: {parts}"


def fit(budget: int, needs: Needs, wanted: Wanted) -> MemoryPlan:
    """The largest limits whose worst pass fits beside everything else; what is left is for cached prefixes.

    The context gives way before the pass does, and the cache before both, down to what one context takes: so a request
    that is larger than a pass finds its prefix's K/V kept. Raises ConfigError with the figures where what was asked
    for does not fit, or is more than the model was made for.
    """
    tried, context = None, wanted.context_tokens
    if context and context.asked and context.asked > wanted.model_context:
        told = f"the model was made for {wanted.model_context} tokens"
        raise ConfigError(f"{context.name} {context.asked}: {told}; lower it, or leave it out")
    for pass_tokens in wanted.pass_tokens.choices():
        for context_tokens in _contexts(wanted, pass_tokens):
            tried = _plan(budget, needs, wanted, pass_tokens, context_tokens)
            if tried.total <= budget:
                return tried
    assert tried is not None, "there is always a smallest choice"
    raise ConfigError(_refusal(tried, needs, wanted))


def _contexts(wanted: Wanted, pass_tokens: int) -> Iterator[int]:
    asked = wanted.context_tokens
    if asked is None:
        yield min(pass_tokens, wanted.model_context)
        return
    yield from asked.choices()


def _plan(budget: int, needs: Needs, wanted: Wanted, pass_tokens: int, context: int) -> MemoryPlan:
    rows = max(pass_tokens, context)  # an item and what of its prefix is not cached run in one pass, however long
    keys = rows + context
    scratch = needs.scratch_pages(pass_tokens, context)
    parts = {
        "weights": needs.weights,
        "activations": max((growth.bytes(rows, keys) for growth in needs.eager), default=0),
        "graphs": needs.graphs.bytes(pass_tokens, keys),
        "workspace": needs.workspace,
        "scratch": scratch * needs.page_size * needs.kv_token,
    }
    pages = _cache_pages(budget - sum(parts.values()), needs, wanted.cache_tokens, context)
    parts["cache"] = pages * needs.page_size * needs.kv_token
    return MemoryPlan(budget, pass_tokens, context, pages * needs.page_size, scratch, parts)


def _cache_pages(left: int, needs: Needs, asked: Asked, context: int) -> int:
    """Pages of the cache: as asked, or what is left, but room for one context."""
    if asked.asked is not None:
        return asked.asked // needs.page_size
    room = max(0, left) // max(1, needs.page_size * needs.kv_token)
    return min(asked.most // needs.page_size, max(room, -(-min(context, asked.most) // needs.page_size)))


def _refusal(plan: MemoryPlan, needs: Needs, wanted: Wanted) -> str:
    fixed = [a for a in (wanted.pass_tokens, wanted.context_tokens, wanted.cache_tokens) if a and a.asked]
    asked = " and ".join(f"{a.name} {a.asked}" for a in fixed)
    what = f"{asked} need" if asked else "the smallest limits need"
    advice = f"lower {' or '.join(a.name for a in fixed)}" if fixed else "take a smaller model or a larger device"
    if needs.weights > plan.budget:
        what, advice = "the weights alone need more than there is:", "take a smaller model or a larger device"
    return f"{what} {plan.told()}; {advice}"


def _gib(size: int) -> str:
    return f"{size / GiB:.2f} GiB" if size >= GiB // 100 else f"{size / (1 << 20):.1f} MiB"
