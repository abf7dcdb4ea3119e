"""Calls that wait for turns of the event loop share a pass; one who is alone waits for none."""

import asyncio

import pytest

from batching.window import TRY_AGAIN, Turns
from tests.batching.fake import FakeDevice, assert_right, batcher, request


def test_alone_it_is_tried_now_and_then():
    turns = Turns()
    tried = [turns.worth_trying() and (turns.brought(0) or True) for _ in range(10 * TRY_AGAIN)]
    assert sum(tried) == 10


@pytest.mark.parametrize("brought", [1, 5])
def test_as_long_as_it_brings_others_it_is_done_every_time(brought):
    turns = Turns()
    while not turns.worth_trying():
        pass
    for _ in range(50):
        turns.brought(brought)
        assert turns.worth_trying()
    for _ in range(20):
        turns.brought(0)
    assert sum(turns.worth_trying() for _ in range(4 * TRY_AGAIN)) == 4


async def callers(made, count, each, turns):
    """So many at once, each asking again and again; one accepts their calls, one after `turns` turns of the loop."""
    pending = asyncio.Queue()

    async def accepting():
        while True:
            asked, answer = await pending.get()
            for _ in range(turns):
                await asyncio.sleep(0)
            task = asyncio.create_task(made.submit(asked))
            task.add_done_callback(lambda t, answer=answer: answer.set_result(t.result()))

    async def caller(number):
        for i in range(each):
            answer = asyncio.get_running_loop().create_future()
            asked = request([number, i], [i], [number])
            await pending.put((asked, answer))
            assert_right(asked, await answer)

    server = asyncio.create_task(accepting())
    await asyncio.gather(*(caller(n) for n in range(count)))
    server.cancel()


@pytest.mark.parametrize("turns", [1, 3])
def test_calls_that_come_one_a_turn_share_passes(turns):
    async def scenario():
        device = FakeDevice()
        made = batcher(device, pass_tokens=1000)
        await callers(made, count=16, each=40, turns=turns)
        assert len(device.batches) < 16 * 40 / 4
        await made.drain()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_request_is_not_kept_beyond_its_slack():
    async def scenario():
        device = FakeDevice()
        made = batcher(device, pass_tokens=1000)
        made._turns.brought(100)
        loop = asyncio.get_running_loop()
        endless = asyncio.create_task(_endless(made))
        asked = request([1, 2], [3])
        assert_right(asked, await made.submit(asked, loop.time() + 0.5))
        endless.cancel()
        await asyncio.gather(endless, return_exceptions=True)
        await made.drain()

    asyncio.run(asyncio.wait_for(scenario(), 60))


async def _endless(made):
    """Another request with every turn."""
    tasks = []
    for n in range(10_000):
        tasks.append(asyncio.create_task(made.submit(request([5, n], [n]))))
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
