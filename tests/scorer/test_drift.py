import asyncio
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest

from attention.plans import Strategy
from batching.errors import QueueFull
from batching.items import Item
from batching.types import RequestScores, Scored, TokenizedRequest
from scorer.client import build_request
from scorer.config import Config
from scorer.drift import Sampler, check_forever, drift
from scorer.runtime import Runtime
from scorer.tokenization import Tokenization
from tests.scorer.test_service import FakeRuntime, count, served
from tests.tiny import tiny_model_dir

PREFIX = np.arange(5, dtype=np.int32)


def item(number):
    return Item(np.array([number], np.int32), np.array([0], np.int32), np.array([[1, 2]], np.int32))


def request_of(*numbers):
    return TokenizedRequest(PREFIX, tuple(map(item, numbers)))


def answer(*logits, nan=False):
    scored = tuple(Scored(np.array([[x, 0.0]], np.float32), None, Strategy.MULTI_ITEM) for x in logits)
    return RequestScores(scored, "", 0, 0, 1, 0.0, 0.0, 0.0)


class Alone:
    """Scores an item with its number, moved by `off`."""

    def __init__(self, off=0.0, error=None):
        self.off, self.error, self.asked = off, error, []

    async def __call__(self, request, deadline):
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        return answer(request.items[0].ids[0] + self.off)


def test_each_request_has_the_same_chance_and_is_taken_once():
    found = Counter()
    for seed in range(600):
        sampler = Sampler(seed)
        for number in (1, 2, 3):
            sampler.offer(request_of(number), answer(number))
        found[int(sampler.take().request.items[0].ids[0])] += 1
        assert sampler.take() is None
    assert all(150 < n < 250 for n in found.values()), found


def test_a_sample_keeps_the_scores_of_its_own_items():
    sampler = Sampler(0)
    sampler.offer(request_of(*range(10)), answer(*range(10)))
    sample = sampler.take()
    assert [s.logits[0, 0] for s in sample.scored] == list(sample.items)
    assert len(set(sample.items)) == 2


@pytest.mark.parametrize(("off", "expected"), [(0.0, 0.0), (0.25, 0.25), (float("nan"), float("inf"))])
def test_drift_is_the_difference_to_the_item_alone(off, expected):
    sampler, alone = Sampler(0), Alone(off)
    sampler.offer(request_of(3, 4, 5), answer(3, 4, 5))
    assert asyncio.run(drift(sampler.take(), alone, "label_logits")) == expected
    assert len(alone.asked) == 2
    for asked in alone.asked:
        assert len(asked.items) == 1
        assert (asked.strategy, asked.priority) == (Strategy.NAIVE, -1)
        assert asked.prefix is PREFIX


@pytest.mark.parametrize(
    ("alone", "expected"),
    [
        (Alone(), ("ok", 0.0)),
        (Alone(1.0), ("drifted", 1.0)),
        (Alone(error=QueueFull("full")), ("skipped", None)),
    ],
)
def test_what_is_found_is_told(alone, expected, caplog):
    async def scenario():
        sampler, told = Sampler(0), []
        sampler.offer(request_of(1), answer(1))
        checking = asyncio.create_task(
            check_forever(sampler, alone, "label_logits", 1e-3, 0.001, lambda *result: told.append(result))
        )
        while not told:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)  # nothing was served since: nothing to check
        checking.cancel()
        with suppress(asyncio.CancelledError):
            await checking
        return told

    assert asyncio.run(scenario()) == [expected]
    assert ("differs from the same document's alone" in caplog.text) == (expected[0] == "drifted")


def test_the_service_offers_what_it_answers_and_exports_the_drift():
    runtime = FakeRuntime()
    honest = runtime.batcher._scored

    async def scenario():
        async with served(runtime) as at:
            checking = asyncio.create_task(at.service.check_forever(0.01))
            await at.client.score("q", ["a b", "a b c"])
            while not count(at.metrics, "self_checks_total", result="ok"):
                await asyncio.sleep(0.01)
            assert count(at.metrics, "self_check_drift") == 0
            await at.client.score("q", ["a b", "a b c"])
            runtime.batcher._scored = lambda item, normalize: moved(honest(item, normalize))
            while not count(at.metrics, "self_checks_total", result="drifted"):
                await asyncio.sleep(0.01)
            assert count(at.metrics, "self_check_drift") == pytest.approx(0.5)
            assert count(at.metrics, "requests_total", code="OK") == 2
            checking.cancel()

    asyncio.run(scenario())


def moved(scored):
    return scored._replace(logits=scored.logits + np.array([[0.5, 0.0]], np.float32))


def test_a_real_model_does_not_drift_and_damaged_weights_do(tmp_path):
    settings = {"model": str(tiny_model_dir(tmp_path)), "profile": "instruct", "threads": 1}
    runtime = Runtime.load(Config.read(settings, environ={}))
    assert isinstance(runtime.tokenization, Tokenization)
    made = runtime.tokenization.tokenize(build_request("capital of France", ["Paris", "bananas grow", "rice"])).request

    async def scenario():
        sampler = Sampler(0)
        sampler.offer(made, await runtime.batcher.submit(made))
        sample = sampler.take()
        assert await drift(sample, runtime.batcher.submit, "label_logits") <= runtime.tolerance
        runtime.engine.model._weight.data.mul_(1.01)
        assert await drift(sample, runtime.batcher.submit, "label_logits") > runtime.tolerance
        await runtime.batcher.drain()

    try:
        asyncio.run(scenario())
    finally:
        runtime.close()
