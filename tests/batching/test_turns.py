"""Calls that wait for turns of the event loop share a pass; one who is alone waits for none."""

import asyncio

import pytest

from batching.batcher import Scheduling
from batching.window import TRY_AGAIN, Turns
from loadtest.virtual_time import run
from tests.batching.fake import FakeDevice, PerToken, assert_right, batcher, request, submitted, timed


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


async def one_a_turn(made, count, tokens):
    """Requests, each with another turn of the loop: how many were there when the first pass began."""
    device, tasks, begun = made.passes.execute, [], 0
    for n in range(1, count + 1):
        if not device.batches:
            begun = n - 1
        tasks.append(submitted(made, request([100 + n], [n] * tokens)))
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return begun


@pytest.mark.parametrize(("deadline", "shared"), [(None, True), (0.5, True), (0.15, False)])
def test_others_are_let_in_as_long_as_nobody_who_waits_is_late(deadline, shared):
    """The first takes a tenth of a second, and twice that is kept free for it."""

    async def scenario():
        made = timed(0.1, scheduling=Scheduling(pass_time=PerToken()), pass_tokens=1000)
        made._turns.brought(100)
        first = submitted(made, request([1], [2] * 99), deadline)
        await asyncio.sleep(0)
        await one_a_turn(made, 20, 5)
        await first
        requests = len({share.request for share in made.passes.execute.batches[0].shares})
        assert requests > 5 if shared else requests == 1
        await made.drain()

    run(scenario())


def test_nobody_is_let_in_beyond_a_full_pass():
    async def scenario():
        made = timed(0.1, scheduling=Scheduling(pass_time=PerToken()), pass_tokens=64)
        made._turns.brought(100)
        assert await one_a_turn(made, 40, 9) in range(6, 10), "six of ten tokens and one more fill it"
        await made.drain()

    run(scenario())


def test_what_turns_brought_decides_whether_there_are_more():
    async def scenario():
        made = timed(0.001, scheduling=Scheduling(pass_time=PerToken()), pass_tokens=1000)
        for n in range(4 * TRY_AGAIN):
            await made.submit(request([n], [n]))
        alone = made._turns._mean
        made._turns.brought(100)
        await one_a_turn(made, 20, 5)
        assert alone == 0 < made._turns._mean < 25 + 20
        await made.drain()

    run(scenario())
