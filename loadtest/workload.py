"""Seeded traces of ranking traffic: who asks when, with which prefix and how long documents. Pure: no clock, no wire.

Lengths are in tokens; the text made for them has about as many, since its words are one token each in most tokenizers.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

Draw = Callable[[random.Random], int]
Z95 = 1.6449  # standard deviations from the median to p95 of a normal distribution

_TEXT = """
the of and to in a is that for it was on are as with his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some so
these would other into has more her two like him see time could no make than first been its who now people my
made over did down only way find use may water long little very after words called just where most know get
through back much before go good new write our used me man too any day same right look think also around another
came come work three
"""
WORDS = tuple(_TEXT.split())


class Reuse(StrEnum):
    """Which requests share a prefix beyond the template."""

    NONE = "none"  # every prefix is new
    USER = "user"  # a user's prefix comes back 3 to 5 times
    ZIPF = "zipf"  # a few prefixes are asked for most of the time


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of traffic. prefix: the caller's part of it, without the profile's template; slo: p99 in seconds."""

    name: str
    prefix: Draw
    item: Draw
    documents: Draw
    reuse: Reuse
    slo: float
    told: str


@dataclass(frozen=True, slots=True)
class Arrival:
    """at: seconds after the start; prefix: equal numbers have equal text; items: tokens of each document."""

    at: float
    prefix: int
    prefix_tokens: int
    items: tuple[int, ...]
    seed: int


def fixed(*values: int) -> Draw:
    """One of these, each as likely."""
    return lambda r: r.choice(values)


def normal(mean: float, deviation: float) -> Draw:
    """At least 1."""
    return lambda r: max(1, round(r.gauss(mean, deviation)))


def lognormal(p50: float, p95: float) -> Draw:
    """At least 1, with this median and 95th percentile."""
    sigma = math.log(p95 / p50) / Z95
    return lambda r: max(1, round(r.lognormvariate(math.log(p50), sigma)))


def log_uniform(low: int, high: int) -> Draw:
    """As often between 1 and 10 as between 10 and 100."""
    return lambda r: round(math.exp(r.uniform(math.log(low), math.log(high))))


TEMPLATE_ITEM = 13  # tokens of a reranker's template in each document; the lengths below are without it
PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            "web-rerank", normal(7, 3), lognormal(76, 155), fixed(100), Reuse.NONE, 0.1, "passages for a short query"
        ),
        Profile("jobs", normal(60, 10), normal(167, 20), fixed(10, 10, 10, 250), Reuse.NONE, 0.5, "distinct prefixes"),
        Profile(
            "feed",
            lognormal(2048, 8192),
            fixed(64 - TEMPLATE_ITEM),
            log_uniform(32, 200),
            Reuse.USER,
            0.2,
            "a user's history, asked for again soon",
        ),
        Profile("titles", fixed(512), fixed(4), log_uniform(500, 1000), Reuse.ZIPF, 0.1, "many short titles"),
        Profile("long", normal(9, 3), log_uniform(287, 499), log_uniform(20, 50), Reuse.NONE, 0.3, "long documents"),
        Profile(
            "adversarial",
            fixed(8000),
            log_uniform(1, 1024),
            log_uniform(1, 1000),
            Reuse.NONE,
            math.inf,
            "unique long prefixes that fill any cache",
        ),
        Profile("laptop", normal(7, 3), normal(12, 3), fixed(2, 4), Reuse.ZIPF, 5.0, "small enough for a CPU"),
    )
}
ZIPF_PREFIXES = 1000
USERS_AT_ONCE = 50


def arrivals(
    profile: Profile, rate: float, seconds: float, seed: int = 0, burst: float = 1.0, scale: float = 1.0
) -> Iterator[Arrival]:
    """Poisson arrivals for so many seconds, `rate` of them a second in the mean.

    burst: of every ten seconds, one has this many times the mean rate and the others so much less.
    scale: of all lengths.
    """
    assert rate > 0, "something arrives"
    assert 1 <= burst <= 10, "a burst has at most all of the calls"
    r = random.Random(f"{profile.name} {seed}")
    prefixes = _prefixes(profile, r, scale)
    at = 0.0
    while (at := at + r.expovariate(rate * burst)) < seconds:
        if r.random() * burst >= _shape(at, burst):  # thinned: candidates come at the burst's rate
            continue
        number, tokens = next(prefixes)
        items = tuple(max(1, round(profile.item(r) * scale)) for _ in range(profile.documents(r)))
        yield Arrival(at, number, tokens, items, r.getrandbits(32))


def _shape(at: float, burst: float) -> float:
    return burst if at % 10 < 1 else (10 - burst) / 9


def _prefixes(profile: Profile, r: random.Random, scale: float) -> Iterator[tuple[int, int]]:
    """Number and tokens of each request's prefix."""

    def length() -> int:
        return max(1, round(profile.prefix(r) * scale))

    match profile.reuse:
        case Reuse.NONE:
            number = 0
            while True:
                yield number, length()
                number += 1
        case Reuse.USER:
            yield from _users(r, length)
        case Reuse.ZIPF:
            yield from _zipf(r, length)


def _users(r: random.Random, length: Callable[[], int]) -> Iterator[tuple[int, int]]:
    number = 0
    active: list[list[int]] = []
    while True:
        if len(active) < USERS_AT_ONCE:
            active.append([number, length(), r.randint(3, 5)])
            number += 1
        user = r.choice(active)
        user[2] -= 1
        if not user[2]:
            active.remove(user)
        yield user[0], user[1]


def _zipf(r: random.Random, length: Callable[[], int]) -> Iterator[tuple[int, int]]:
    lengths = [length() for _ in range(ZIPF_PREFIXES)]
    upto = list(accumulate(1 / rank for rank in range(1, ZIPF_PREFIXES + 1)))
    while True:
        number = bisect_left(upto, r.uniform(0, upto[-1]))
        yield number, lengths[number]


def text(seed: str, tokens: int) -> str:
    """Words, about as many as tokens; equal for equal seeds."""
    return " ".join(random.Random(seed).choices(WORDS, k=tokens))


def prefix_text(profile: Profile, arrival: Arrival) -> str:
    """The caller's prefix: equal for equal numbers."""
    return text(f"{profile.name} prefix {arrival.prefix}", arrival.prefix_tokens)


def document_texts(arrival: Arrival) -> list[str]:
    """The documents, each another one."""
    return [text(f"document {arrival.seed} {i}", tokens) for i, tokens in enumerate(arrival.items)]
