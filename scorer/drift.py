"""The check that goes on after the start: a few served documents, scored again alone, must get the same score.

It runs in the same queue as everyone, in the low class, so it costs a pass now and then and shows what callers get: a
wrong kernel, damaged weights or a damaged cache would otherwise change scores and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from attention.plans import Strategy
from batching.errors import BatchingError
from batching.types import RequestScores, Scored, TokenizedRequest
from scorer.heads import Kind, reads_apart, verdict

log = logging.getLogger(__name__)

ITEMS = 2  # of one request that are scored again
LOW = -1

Submit = Callable[[TokenizedRequest, float | None], Awaitable[RequestScores]]
RESULTS = ("ok", "drifted", "skipped")


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A request as it was served, and some of its items with their scores."""

    request: TokenizedRequest
    items: tuple[int, ...]
    scored: tuple[Scored, ...]


class Sampler:
    """Keeps one of the requests offered since the last `take`, each with the same chance."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._seen = 0
        self._sample: Sample | None = None

    def offer(self, request: TokenizedRequest, scores: RequestScores) -> None:
        """One more request that was answered."""
        self._seen += 1
        if self._random.randrange(self._seen):
            return
        done = [(item, scored) for item, scored in enumerate(scores.scored) if scored is not None]
        chosen = sorted(self._random.sample(range(len(done)), min(ITEMS, len(done))))
        if chosen:
            self._sample = Sample(request, tuple(done[i][0] for i in chosen), tuple(done[i][1] for i in chosen))

    def take(self) -> Sample | None:
        """The sample, and a new beginning."""
        taken, self._sample, self._seen = self._sample, None, 0
        return taken


async def drift(sample: Sample, submit: Submit, kind: Kind) -> float:
    """The largest difference of a score to the same document's alone. Infinity where only one of the two is a number.

    Raises BatchingError where the service has no room for it.
    """
    worst = 0.0
    for item, before in zip(sample.items, sample.scored, strict=True):
        items = sample.request.items.take((item,))
        alone = replace(sample.request, items=items, strategy=Strategy.NAIVE, priority=LOW, partial_ok=False)
        (again,) = (await submit(alone, None)).scored
        assert again is not None, "without partial_ok every item is scored"
        for one, other in zip(_judged(before, kind), _judged(again, kind), strict=True):
            worst = max(worst, _difference(one, other))
    return worst


def _judged(scored: Scored, kind: Kind) -> list[float | None]:
    """The scores that an item holds: one, or one for each document of a listwise item."""
    parts = [scored] if kind == "query_likelihood" else reads_apart(scored)
    return [verdict(part, kind).score for part in parts]


def _difference(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return abs(a - b)


async def check_forever(
    sampler: Sampler,
    submit: Submit,
    kind: Kind,
    tolerance: float,
    seconds: float,
    told: Callable[[str, float | None], None],
) -> None:
    """Checks every so many seconds, until cancelled. told: gets one of RESULTS and the drift where there is one."""
    while True:
        await asyncio.sleep(seconds)
        sample = sampler.take()
        if sample is None:
            continue
        try:
            found = await drift(sample, submit, kind)
        except BatchingError as error:
            log.info("self-check skipped: %s", error)
            told("skipped", None)
            continue
        told("ok" if found <= tolerance else "drifted", found)
        if found > tolerance:
            strategies = sorted({scored.strategy.value for scored in sample.scored})
            log.error(
                "self-check: a served score differs from the same document's alone",
                extra={"drift": found, "tolerance": tolerance, "strategies": strategies},
            )
