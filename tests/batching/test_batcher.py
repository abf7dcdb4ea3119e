"""Everything accepted gets its own scores or an error, whatever shares its passes."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from attention.plans import Strategy
from batching.batcher import Scheduling
from batching.errors import Closed, DeviceFailed, Expired, QueueFull
from batching.holding import warm
from batching.passes import FAILURES_IN_A_ROW
from batching.select import StrategyError
from loadtest.virtual_time import run as virtual
from tests.batching.fake import (
    PAGE,
    Counting,
    FakeDevice,
    TimedDevice,
    assert_right,
    batcher,
    blocks_in_use,
    expected,
    ids,
    request,
)


def pages_held(made):
    """Pages that are neither free nor evictable; checks that none is lost."""
    assert made.cache.pool.free + len(made.cache) == made.cache.pool.pages
    return blocks_in_use(made.cache)


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 20))


def test_scores_come_back_in_order():
    async def scenario():
        device = FakeDevice()
        made = batcher(device)
        asked = request([9, 8, 7], [1, 2], [3], [4, 5, 6], [3])
        answer = await made.submit(asked)
        assert_right(asked, answer)
        assert answer.passes == 1
        assert answer.computed_tokens == 3 + 2 + 1 + 3, "the equal items are computed once"
        assert answer.scored[1] is answer.scored[3]

    run(scenario())


@pytest.mark.parametrize("documents", [1, 15, 16, 80])
@pytest.mark.parametrize("strategy", [None, *Strategy])
def test_a_large_request_runs_as_several_passes_over_one_prefix(documents, strategy):
    async def scenario():
        device = FakeDevice()
        made = batcher(device, pass_tokens=64)
        asked = request(range(1, 7), *[[i, i + 1, i + 2, i] for i in range(documents)], strategy=strategy)
        answer = await made.submit(asked)
        assert_right(asked, answer)
        assert answer.passes == len(device.batches)
        assert all(batch.tokens <= 64 for batch in device.batches)
        if strategy is Strategy.NAIVE:
            assert answer.computed_tokens == documents * 10
        else:
            assert answer.computed_tokens == 6 + documents * 4, "the prefix is computed once"
        await made.drain()
        assert pages_held(made) == 0, "every page is returned"

    run(scenario())


@pytest.mark.parametrize(("pages", "kept"), [(0, 0), (1, 4)])
def test_where_pages_are_short_the_rest_of_the_prefix_is_computed_again(pages, kept):
    async def scenario():
        made = batcher(FakeDevice(), pages=pages)
        asked = request(range(1, 7), *[[i, i, i] for i in range(60)])
        answer = await made.submit(asked)
        assert_right(asked, answer)
        assert answer.passes > 1
        assert answer.computed_tokens == 6 * answer.passes - kept * (answer.passes - 1) + 60 * 3

    run(scenario())


def test_several_requests_share_a_pass():
    async def scenario():
        device = FakeDevice()
        made = batcher(device, pass_tokens=200)
        asked = [request([n, n + 1], [n], [n, 5], strategy=s) for n, s in enumerate([None, *Strategy], 2)]
        device.gate.clear()
        first = asyncio.create_task(made.submit(request([1], [1])))
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(made.submit(r)) for r in asked]
        await asyncio.sleep(0.01)
        device.gate.set()
        for r, answer in zip(asked, await asyncio.gather(*tasks), strict=True):
            assert_right(r, answer, (r.strategy,) if r.strategy else tuple(Strategy))
        await first
        assert len(device.batches) == 2

    run(scenario())


def test_an_item_longer_than_a_pass_still_runs():
    async def scenario():
        asked = request([1, 2], list(range(1, 100)), [4])
        assert_right(asked, await batcher(FakeDevice(), pass_tokens=64).submit(asked))

    run(scenario())


def test_a_small_request_does_not_wait_for_all_of_a_large_one():
    async def scenario():
        device = FakeDevice()
        made = batcher(device, pass_tokens=64)
        large = asyncio.create_task(made.submit(request([1, 2], *[[i] * 20 for i in range(1, 40)])))
        await asyncio.sleep(0)
        small = request([5], [6])
        answer = await made.submit(small)
        assert_right(small, answer)
        assert len(device.batches) <= 4
        await large

    run(scenario())


@pytest.mark.parametrize(("classes", "order"), [((0, 1, -1), [1, 0, 2]), ((-1, 0, 1), [2, 1, 0])])
def test_a_higher_class_has_its_turn_first(classes, order):
    async def scenario():
        device = FakeDevice()
        made = batcher(device, pass_tokens=16)
        device.gate.clear()
        running = asyncio.create_task(made.submit(request([9], [9])))
        await asyncio.sleep(0)
        done: list[int] = []

        async def caller(name, priority):
            await made.submit(request([name + 1], [1] * 14, priority=priority))
            done.append(name)

        tasks = [asyncio.create_task(caller(name, priority)) for name, priority in enumerate(classes)]
        await asyncio.sleep(0.01)
        device.gate.set()
        await asyncio.gather(running, *tasks)
        assert done == order

    run(scenario())


def test_expired_work_is_dropped_before_it_reaches_the_device():
    async def scenario():
        now = [100.0]
        device = FakeDevice()
        made = batcher(device, clock=lambda: now[0])
        device.gate.clear()
        running = asyncio.create_task(made.submit(request([1], [1])))
        await asyncio.sleep(0)
        late = asyncio.create_task(made.submit(request([2], [2]), deadline=100.02))
        await asyncio.sleep(0.01)
        now[0] = 100.5
        device.gate.set()
        with pytest.raises(Expired):
            await late
        await running
        assert len(device.batches) == 1

    run(scenario())


def test_cancelling_stops_within_one_pass_and_returns_the_pages():
    async def scenario():
        device = FakeDevice()
        made = batcher(device, pass_tokens=64)
        device.gate.clear()
        task = asyncio.create_task(made.submit(request([1, 2, 3], *[[i] * 10 for i in range(1, 200)])))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.01)
        assert pages_held(made) > 0, "the device still writes to them"
        device.gate.set()
        other = request([3], [4])
        assert_right(other, await made.submit(other))
        assert len(device.batches) == 2
        assert pages_held(made) == 0
        assert made.queued_tokens == 0

    run(scenario())


def test_a_failing_pass_fails_only_its_own_requests():
    async def scenario():
        device = FakeDevice()
        made = batcher(device, pass_tokens=64)
        device.failures = [RuntimeError("out of memory")]
        with pytest.raises(DeviceFailed, match="RuntimeError"):
            await made.submit(request([1, 2, 3], *[[i] * 10 for i in range(1, 20)]))
        asked = request([3], [4])
        assert_right(asked, await made.submit(asked))
        assert pages_held(made) == 0

    run(scenario())


def test_a_device_that_fails_every_time_is_given_up():
    async def scenario():
        device = FakeDevice()
        made = batcher(device)
        device.failures = [RuntimeError("gone")] * FAILURES_IN_A_ROW
        for _ in range(FAILURES_IN_A_ROW):
            with pytest.raises(DeviceFailed):
                await made.submit(request([1], [1]))
        assert "in a row" in await made.failed()
        with pytest.raises(Closed):
            await made.submit(request([1], [1]))

    run(scenario())


def test_the_queue_is_bounded_in_tokens_but_an_idle_service_takes_anything():
    async def scenario():
        device = FakeDevice()
        made = batcher(device, queue_tokens=20)
        device.gate.clear()
        large = asyncio.create_task(made.submit(request([1], *[[i] * 10 for i in range(1, 6)])))
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull, match="20"):
            await made.submit(request([1], [1]))
        device.gate.set()
        await large

    run(scenario())


def test_draining_answers_what_was_accepted_and_refuses_the_rest():
    async def scenario():
        device = FakeDevice()
        made = batcher(device)
        device.gate.clear()
        asked = request([1], [1], [2])
        accepted = asyncio.create_task(made.submit(asked))
        await asyncio.sleep(0)
        draining = asyncio.create_task(made.drain())
        await asyncio.sleep(0)
        with pytest.raises(Closed):
            await made.submit(request([1], [1]))
        device.gate.set()
        assert_right(asked, await accepted)
        await draining

    run(scenario())


def test_a_strategy_that_cannot_be_is_refused_at_once():
    async def scenario():
        made = batcher(FakeDevice(), window=4)
        with pytest.raises(StrategyError, match="direct_ragged"):
            await made.submit(request([1, 2, 3], [1, 2], strategy=Strategy.MULTI_ITEM))
        asked = request([1, 2, 3], [1, 2], [1])
        answer = await made.submit(asked)
        assert [s.strategy for s in answer.scored] == [Strategy.DIRECT_RAGGED, Strategy.MULTI_ITEM]
        assert "sliding window of 4" in answer.reason

    run(scenario())


def test_many_callers_at_random():
    async def scenario():
        rng = np.random.default_rng(0)
        device = FakeDevice()
        made = batcher(device, pass_tokens=64, pages=40)

        async def caller():
            for _ in range(15):
                prefix = rng.integers(1, 99, rng.integers(0, 12)).tolist()
                items = [rng.integers(1, 99, rng.integers(1, 20)).tolist() for _ in range(rng.integers(1, 25))]
                asked = request(prefix, *items, strategy=rng.choice([None, *Strategy]))
                task = asyncio.create_task(made.submit(asked))
                if rng.random() < 0.2:
                    await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                else:
                    assert_right(asked, await task)

        await asyncio.gather(*[caller() for _ in range(16)])
        await made.drain()
        assert pages_held(made) == 0
        assert made.queued_tokens == 0

    run(scenario())


def test_a_fault_of_the_batcher_itself_leaves_nobody_waiting():
    async def scenario():
        made = batcher(FakeDevice())
        made.cache.pool.take = None  # composing a pass of several now raises
        with pytest.raises(Closed):
            await made.submit(request([1, 2, 3], *[[i] * 10 for i in range(1, 20)]))
        assert "itself failed" in await made.failed()
        await asyncio.gather(made._loop, return_exceptions=True)

    run(scenario())


# --- a part at the deadline


def test_at_the_deadline_what_is_scored_is_returned_and_the_rest_is_not():
    async def scenario():
        loop = asyncio.get_running_loop()
        device = TimedDevice(0.1)
        made = batcher(device, pass_tokens=16, clock=loop.time)
        asked = request([1, 2], *[[i] * 4 for i in range(1, 21)], partial_ok=True)
        answer = await made.submit(asked, deadline=loop.time() + 0.35)
        assert loop.time() == pytest.approx(0.35)
        done = [scored is not None for scored in answer.scored]
        assert answer.passes == 3
        assert 0 < sum(done) < 20
        assert done == sorted(done, reverse=True)
        for i, scored in enumerate(answer.scored[: sum(done)]):
            assert scored.logits[0].tolist() == expected(asked, i)
        await made.drain()
        assert pages_held(made) == 0
        assert len(device.batches) == 4, "the pass that ran was the last"

    virtual(scenario())


def test_without_leave_to_return_a_part_the_deadline_is_an_error_while_the_pass_runs_on():
    async def scenario():
        loop = asyncio.get_running_loop()
        made = batcher(TimedDevice(1.0), clock=loop.time)
        made.observer = counted = Counting()
        with pytest.raises(Expired):
            await made.submit(request([1, 2], [3]), deadline=0.2)
        assert loop.time() == pytest.approx(0.2)
        assert counted.counts == {"missed": 1}
        await made.drain()
        assert pages_held(made) == 0

    virtual(scenario())


# --- equal documents of several requests


def test_equal_documents_behind_equal_prefixes_are_computed_once_across_requests():
    async def scenario():
        device = TimedDevice(0.1)
        made = batcher(device, pass_tokens=1000, clock=asyncio.get_running_loop().time)
        first = asyncio.create_task(made.submit(request([9], [9])))
        await asyncio.sleep(0.01)
        same = [request([1, 2, 3], [7, 7], [n], [8, 8, 8]) for n in range(1, 6)]
        others = [request([1, 2, 4], [7, 7]), request([1, 2, 3], [7, 7], tenant="other")]
        answers = await asyncio.gather(*[made.submit(asked) for asked in (*same, *others)])
        for asked, answer in zip((*same, *others), answers, strict=True):
            assert_right(asked, answer)
        await first
        batch = device.batches[1]
        assert len(device.batches) == 2
        assert len(batch.shares) == 5 + 2 + 2, "the others are behind another prefix, or another tenant's"
        assert sum(answer.computed_tokens for answer in answers) == batch.tokens

    virtual(scenario())


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_goes_away_takes_no_score_from_those_who_wait_for_the_same(leaver):
    async def scenario():
        device = TimedDevice(0.1)
        made = batcher(device, pass_tokens=12, clock=asyncio.get_running_loop().time)
        running = asyncio.create_task(made.submit(request([9], [9])))
        await asyncio.sleep(0.01)
        asked = [request([1, 2, 3], *[[i, i] for i in range(1, 9)]) for _ in range(2)]
        tasks = [asyncio.create_task(made.submit(one)) for one in asked]
        await asyncio.sleep(0.15)  # the first pass of the two has begun
        tasks[leaver].cancel()
        assert_right(asked[1 - leaver], await tasks[1 - leaver])
        await running
        await made.drain()
        assert len(made._in_flight) == 0
        assert made.queued_tokens == 0
        assert pages_held(made) == 0

    virtual(scenario())


# --- prefixes shared by requests


@pytest.mark.parametrize("shared", [0, 3, 4, 5, 8, 13])
def test_requests_that_begin_alike_compute_the_beginning_once(shared):
    """By whole blocks of four; in one pass, and later from the cache."""

    async def scenario():
        device = TimedDevice(0.1)
        made = batcher(device, pass_tokens=10_000, pages=100, clock=asyncio.get_running_loop().time)
        running = asyncio.create_task(made.submit(request([9], [9])))
        await asyncio.sleep(0.01)
        common = list(range(50, 50 + shared))
        asked = [request([*common, *range(n, n + 14 - shared)], [n], [n, n]) for n in (1, 20, 30)]
        together = await asyncio.gather(*[made.submit(one) for one in asked])
        later = await made.submit(asked[0])
        for one, answer in zip([*asked, asked[0]], [*together, later], strict=True):
            assert_right(one, answer)
        blocks = shared // PAGE * PAGE
        assert [answer.cached_prefix_tokens for answer in together] == [0, blocks, blocks]
        assert device.batches[1].tokens == 3 * (14 + 3) - 2 * blocks == sum(a.computed_tokens for a in together)
        assert later.cached_prefix_tokens == 14
        assert later.computed_tokens == 3
        await running

    virtual(scenario())


def test_a_tenant_gets_no_hit_from_another():
    async def scenario():
        made = batcher(FakeDevice(), pages=100)
        for tenant, cached in (("a", 0), ("a", 12), ("b", 0), ("", 0), ("b", 12)):
            answer = await made.submit(request(range(12), [1], tenant=tenant))
            assert answer.cached_prefix_tokens == cached

    run(scenario())


def test_what_a_failed_pass_was_to_write_is_not_found_afterwards():
    async def scenario():
        device = FakeDevice()
        made = batcher(device, pages=100)
        device.failures = [RuntimeError("out of memory")]
        asked = request(range(1, 12), [1], [2])
        with pytest.raises(DeviceFailed):
            await made.submit(asked)
        assert len(made.cache) == 0
        assert made.cache.pool.free == 100
        answer = await made.submit(asked)
        assert_right(asked, answer)
        assert answer.cached_prefix_tokens == 0

    run(scenario())


def test_what_a_pass_with_nan_wrote_is_not_found_afterwards():
    async def scenario():
        device = FakeDevice()
        made = batcher(device, pages=100, pass_tokens=24)
        good = device.compute
        device.compute = lambda batch: replace(good(batch), logits=np.full(len(batch.read_ids), np.nan, np.float32))
        asked = request(range(1, 12), *[[i] * 4 for i in range(1, 9)])
        spoiled = await made.submit(asked)
        assert np.isnan(spoiled.scored[0].logits).all()
        assert len(made.cache) == 0
        device.compute = good
        answer = await made.submit(asked)
        assert_right(asked, answer)
        assert answer.cached_prefix_tokens == 0
        await made.drain()
        assert pages_held(made) == 0

    run(scenario())


@pytest.mark.parametrize("strategy", [s for s in Strategy if s is not Strategy.NAIVE])
def test_a_warmed_prefix_is_found_and_kept_while_others_come_and_go(strategy):
    async def scenario():
        now = [0.0]
        device = FakeDevice()
        made = batcher(device, pages=12, clock=lambda: now[0])
        prefix = ids(*range(60, 74))
        warmed = await warm(made, prefix, "t", keep=10.0)
        assert (warmed.cached, warmed.kept) == (0, 14)
        again = await warm(made, prefix, "t", keep=10.0)
        assert again.cached == 14
        passes = len(device.batches)
        assert passes == 1, "what is warm is not computed again"
        for n in range(12):
            await made.submit(request(range(n * 20, n * 20 + 20), [1], tenant="t"))
        asked = request(prefix, [5], [6, 6], tenant="t", strategy=strategy)
        answer = await made.submit(asked)
        assert_right(asked, answer)
        assert answer.cached_prefix_tokens == 14
        assert answer.computed_tokens == 3
        now[0] = 11.0
        for n in range(12):
            await made.submit(request(range(n * 20, n * 20 + 40), [1], tenant="t"))
        assert (await made.submit(asked)).cached_prefix_tokens < 14, "after its time it goes like others"

    run(scenario())


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_so_many_passes_are_with_the_device_and_no_more(in_flight):
    """And a prefix is not computed again by a pass that begins before it is written."""

    async def scenario():
        device = FakeDevice()
        made = batcher(device, pages=64, scheduling=Scheduling(passes_in_flight=in_flight))
        device.gate.clear()
        large = request(range(1, 7), *[[i, i + 1, i + 2, i] for i in range(40)])
        small = [request(range(10 * n, 10 * n + 20), *[[n, i] for i in range(20)]) for n in range(1, 5)]
        waiting = [asyncio.create_task(made.submit(asked)) for asked in (large, *small)]
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(device.batches) == in_flight
        device.gate.set()
        answers = await asyncio.gather(*waiting)
        for asked, answer in zip((large, *small), answers, strict=True):
            assert_right(asked, answer)
        assert answers[0].computed_tokens == 6 + 40 * 4
        await made.drain()
        assert pages_held(made) == 0

    run(scenario())


def test_a_pass_that_fails_fails_no_other_in_flight():
    async def scenario():
        device = FakeDevice()
        made = batcher(device, scheduling=Scheduling(passes_in_flight=2))
        device.gate.clear()
        asked = [request(range(n, n + 20), *[[n, i] for i in range(20)]) for n in (1, 50)]
        waiting = [asyncio.create_task(made.submit(one)) for one in asked]
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(device.batches) == 2
        device.failures.append(RuntimeError("once"))
        device.gate.set()
        failed, right = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(failed, DeviceFailed)
        assert_right(asked[1], right)
        await made.drain()
        assert pages_held(made) == 0

    run(scenario())


@pytest.mark.parametrize("longer_first", [False, True])
def test_a_pass_that_fails_takes_no_page_from_another_in_flight_that_begins_alike(longer_first):
    async def scenario():
        device = FakeDevice()
        made = batcher(device, pages=64, scheduling=Scheduling(passes_in_flight=2))
        device.gate.clear()
        asked = [request(range(1, 1 + n), *[[n, i] for i in range(20)]) for n in (13, 30)]
        if longer_first:
            asked.reverse()
        waiting = [asyncio.create_task(made.submit(one)) for one in asked]
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(device.batches) == 2
        device.failures.append(RuntimeError("once"))
        device.gate.set()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(isinstance(answer, DeviceFailed) for answer in ended) == 1
        for one, answer in zip(asked, ended, strict=True):
            if not isinstance(answer, DeviceFailed):
                assert_right(one, answer)
        for one in asked:
            assert_right(one, await made.submit(one))
        await made.drain()
        assert pages_held(made) == 0

    run(scenario())
