"""Seeded traces of calls. Pure: lengths and times, no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batching.items import Item, Items
from batching.types import TokenizedRequest

READ, LABELS = np.zeros(1, np.int32), np.array([[1, 2]], np.int32)


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of caller.

    prefix     tokens of the prefix, of which the first `template` are the same for everyone
    document   median tokens of a document, template included; spread: sigma of their logarithm
    documents  of one call: between these
    seconds    what the caller waits at most
    prefixes   distinct ones; 0: each call has its own
    zipf       exponent of how often each is asked for; 0: all alike
    """

    name: str
    prefix: int
    document: int
    documents: tuple[int, int]
    seconds: float
    template: int = 61
    spread: float = 0.0
    prefixes: int = 0
    zipf: float = 0.0
    tenant: str = ""
    priority: int = 0


# Lengths as search teams publish them; see README.
PROFILES = {
    profile.name: profile
    for profile in (
        Profile("web-rerank", 68, 89, (100, 100), 0.1, spread=0.385),
        Profile("jobs", 120, 180, (10, 10), 0.5),
        Profile("feed", 2048, 64, (32, 200), 0.2, prefixes=400),
        Profile("titles", 512, 16, (500, 1000), 0.1, prefixes=200, zipf=1.0),
        Profile("long", 70, 400, (20, 50), 0.3, spread=0.15),
        Profile("short", 70, 90, (5, 15), 0.1),
        Profile("bulk", 70, 90, (150, 250), 0.5),
    )
}


@dataclass(frozen=True, slots=True)
class Call:
    """at: seconds since the trace began; prefix_id: equal for equal prefixes of one profile; documents: tokens each."""

    at: float
    profile: Profile
    prefix_id: int
    documents: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.profile.prefix + sum(self.documents)


def calls(
    mix: Sequence[tuple[Profile, float]], per_second: float, seconds: float, seed: int, burst: float = 1.0
) -> list[Call]:
    """Open-loop Poisson arrivals of a mix of profiles by weight.

    burst: in one second of ten as many times more come, and fewer in the other nine, so that the mean stays.
    """
    rng = np.random.default_rng(seed)
    weights = np.array([weight for _, weight in mix])
    made: list[Call] = []
    now = 0.0
    while True:
        calm = (10 - burst) / 9
        rate = per_second * (burst if int(now) % 10 == 0 else calm)
        now += float(rng.exponential(1 / rate))
        if now >= seconds:
            return made
        profile = mix[int(rng.choice(len(mix), p=weights / weights.sum()))][0]
        made.append(_call(now, profile, len(made), rng))


def _call(at: float, profile: Profile, number: int, rng: np.random.Generator) -> Call:
    count = int(rng.integers(profile.documents[0], profile.documents[1] + 1))
    lengths = profile.document * np.exp(profile.spread * rng.standard_normal(count))
    prefix = number if not profile.prefixes else int(rng.choice(profile.prefixes, p=_popularity(profile)))
    return Call(at, profile, prefix, tuple(int(n) for n in np.clip(lengths, 1, 8192)))


def _popularity(profile: Profile) -> NDArray[np.float64]:
    weights = 1.0 / np.arange(1, profile.prefixes + 1) ** profile.zipf
    return np.asarray(weights / weights.sum())


def request_of(call: Call, number: int) -> TokenizedRequest:
    """Ids that differ where the trace's prefixes and documents do."""
    profile = call.profile
    own = 1000 + call.prefix_id * 50 + list(PROFILES).index(profile.name)
    shared = min(profile.template, profile.prefix)
    prefix = np.concatenate([np.arange(shared), np.full(profile.prefix - shared, own)]).astype(np.int32)
    items = Items.of(
        Item(np.full(n, number * 2048 + i, np.int32), READ + np.int32(n - 1), LABELS)
        for i, n in enumerate(call.documents)
    )
    return TokenizedRequest(prefix, items, tenant=profile.tenant, priority=profile.priority)
