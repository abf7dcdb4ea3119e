"""Everything accepted gets its own scores or an error, whatever shares its passes."""

import asyncio

import numpy as np
import pytest

from attention.plans import Strategy
from batching.batcher import FAILURES_IN_A_ROW, Closed, DeviceFailed, Expired, QueueFull
from batching.select import StrategyError
from tests.batching.fake import FakeDevice, assert_right, batcher, request


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
        assert made._pool.free == 16, "every page is returned"

    run(scenario())


def test_no_page_is_free_and_the_prefix_is_computed_again():
    async def scenario():
        made = batcher(FakeDevice(), pages=1)
        asked = request(range(1, 7), *[[i, i, i] for i in range(60)])
        answer = await made.submit(asked)
        assert_right(asked, answer)
        assert answer.computed_tokens == 6 * answer.passes + 60 * 3

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
        assert made._pool.free < 16, "the device still writes to them"
        device.gate.set()
        other = request([3], [4])
        assert_right(other, await made.submit(other))
        assert len(device.batches) == 2
        assert made._pool.free == 16
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
        assert made._pool.free == 16

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
        assert made._pool.free == 40
        assert made.queued_tokens == 0

    run(scenario())


def test_a_fault_of_the_batcher_itself_leaves_nobody_waiting():
    async def scenario():
        made = batcher(FakeDevice())
        made._pool.allocate = None  # composing a pass of several now raises
        with pytest.raises(Closed):
            await made.submit(request([1, 2, 3], *[[i] * 10 for i in range(1, 20)]))
        assert "itself failed" in await made.failed()
        await asyncio.gather(made._loop, return_exceptions=True)

    run(scenario())
