"""Scores with cached, partly cached and not yet written prefixes equal those of one document alone."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from attention.plans import Strategy
from batching.batcher import Batcher, BatcherLimits
from batching.items import Item
from batching.page_pool import PagePool
from batching.prefix_cache import PrefixCache
from batching.select import Threshold
from batching.types import TokenizedRequest
from scorer.selfcheck import alone
from tests.batching.fake import evicted
from tests.models import engine, tiny

TOLERANCE = 1e-4
LABELS = np.array([[7, 11]], np.int32)
SHARING = [strategy for strategy in Strategy if strategy is not Strategy.NAIVE]


def ids(rng, n):
    return rng.integers(1, 211, n).astype(np.int32)


def asked(rng, prefix, lengths, strategy=None, tenant=""):
    items = tuple(Item(ids(rng, n), np.array([n - 1], np.int32), LABELS) for n in lengths)
    return TokenizedRequest(prefix, items, strategy=strategy, tenant=tenant)


def batcher(model, pages=64, page_size=16, pass_tokens=4096):
    made = engine(model, page_size, pages)
    return Batcher(
        made.execute,
        BatcherLimits(pass_tokens, 1024, 1 << 20),
        Threshold(8),
        PrefixCache(PagePool(pages), page_size),
    )


def log_odds(answer):
    return np.array([scored.logits[0, 0] - scored.logits[0, 1] for scored in answer.scored])


def assert_alone(model, request, answer):
    wanted = [alone(model, request, item) for item in request.items]
    expected = np.array([scored.logits[0, 0] - scored.logits[0, 1] for scored in wanted])
    np.testing.assert_allclose(log_odds(answer), expected, atol=TOLERANCE)


async def in_one_pass(made, requests):
    """The first of another caller keeps the device busy while they come."""
    rng = np.random.default_rng(99)
    first = asyncio.create_task(made.submit(asked(rng, ids(rng, 5), [3], tenant="busy")))
    await asyncio.sleep(0)
    answers = await asyncio.gather(*[made.submit(request) for request in requests])
    await first
    return answers


def together(made, requests):
    return asyncio.run(in_one_pass(made, requests))


@pytest.mark.parametrize("strategy", SHARING)
@pytest.mark.parametrize("shared", [15, 16, 17, 40])
@pytest.mark.parametrize("owner_first", [True, False], ids=["owner-first", "sharer-first"])
def test_two_requests_share_an_unwritten_prefix_in_one_pass(strategy, shared, owner_first):
    """The owner's prefix is long, the sharer's ends soon behind what they share."""
    model, rng = tiny("qwen3"), np.random.default_rng(shared)
    common = ids(rng, shared)
    owner = asked(rng, np.concatenate([common, ids(rng, 37)]), [9, 3, 20], strategy)
    sharer = asked(rng, np.concatenate([common, ids(rng, 3)]), [4, 18], strategy)
    requests = [owner, sharer] if owner_first else [sharer, owner]
    made = batcher(model)
    answers = together(made, requests)
    for request, answer in zip(requests, answers, strict=True):
        assert_alone(model, request, answer)
    blocks = shared // 16 * 16
    assert sorted(answer.cached_prefix_tokens for answer in answers) == [0, blocks]
    everything = sum(request.tokens for request in requests)
    assert sum(answer.computed_tokens for answer in answers) == everything - blocks


@pytest.mark.parametrize("strategy", SHARING)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_cached_is_not_computed_and_changes_nothing(strategy, family, page_size):
    """A prefix again, its beginning alone, and one that goes on where it ended; then once more, half of it evicted."""
    model, rng = tiny(family), np.random.default_rng(3)
    prefix = ids(rng, 10 if family == "gemma2" else 53)  # gemma2's window here is shorter than more
    lengths = [1, 9, 4] if family == "gemma2" else [9, 30, 1]
    made = batcher(model, page_size=page_size, pages=256)
    full = asked(rng, prefix, lengths, strategy)
    grown = replace(asked(rng, np.concatenate([prefix, ids(rng, 2)]), lengths), strategy=strategy)
    begun = replace(asked(rng, prefix[: len(prefix) - 5], lengths), strategy=strategy)

    async def scenario():
        for request in (full, full, grown, begun, full):
            answer = await made.submit(request)
            assert_alone(model, request, answer)
            yield_cached.append(answer.cached_prefix_tokens)
        while made.cache.pool.free < made.cache.pool.pages - len(prefix) // page_size // 2:
            assert evicted(made.cache, 1, 0.0)
        answer = await made.submit(full)
        assert_alone(model, full, answer)
        assert 0 <= answer.cached_prefix_tokens < len(prefix) or page_size == 16

    yield_cached: list[int] = []
    asyncio.run(scenario())
    whole = len(prefix) // page_size * page_size
    assert yield_cached == [0, len(prefix), whole, (len(prefix) - 5) // page_size * page_size, len(prefix)]


def test_requests_of_all_strategies_share_one_prefix_in_one_pass():
    model, rng = tiny("llama"), np.random.default_rng(5)
    common = ids(rng, 33)
    requests = [asked(rng, np.concatenate([common, ids(rng, n)]), [6, 19], s) for n, s in enumerate(Strategy)]
    made = batcher(model)

    async def twice():
        return await in_one_pass(made, requests), await in_one_pass(made, requests)

    first, again = asyncio.run(twice())
    for request, answer in zip(requests, first, strict=True):
        assert_alone(model, request, answer)
        assert {scored.strategy for scored in answer.scored} == {request.strategy}
    for request, answer in zip(requests, again, strict=True):
        assert_alone(model, request, answer)
        cached = 0 if request.strategy is Strategy.NAIVE else len(request.prefix)
        assert answer.cached_prefix_tokens == cached, "naive computes a prefix for every document: that is its point"


@pytest.mark.parametrize("pages", [0, 1, 3, 7])
def test_where_pages_are_short_scores_are_the_same(pages):
    model, rng = tiny("qwen3"), np.random.default_rng(6)
    common = ids(rng, 40)
    requests = [asked(rng, np.concatenate([common, ids(rng, 3 * n)]), [5] * 30) for n in range(6)]
    made = batcher(model, pages=pages, pass_tokens=256)
    for request, answer in zip(requests, together(made, requests), strict=True):
        assert_alone(model, request, answer)
