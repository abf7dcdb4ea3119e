"""The parts of one call do not refuse one another, whatever the reason would be, and leave others their room."""

import asyncio

import pytest

from batching.batcher import Scheduling
from batching.errors import CannotFinish, QueueFull
from batching.shares import FairShares
from loadtest.virtual_time import run
from prefixrank.v1 import scorer_pb2 as pb
from scorer.together import Entrance, Part
from tests.batching.fake import PerToken, assert_right, request, submitted, timed
from tests.cases.live import PROFILE, live
from tests.tiny import tiny_model_dir

PARTS = [request([n], [9] * 9) for n in range(40)]  # of 10 tokens each


def entering(made, parts=PARTS, deadline=None):
    entrance = Entrance(made.submit, made.max_queue_tokens)
    return [asyncio.create_task(entrance.submit(part, deadline)) for part in parts]


async def all_right(tasks, parts=PARTS):
    for part, answer in zip(parts, await asyncio.gather(*tasks), strict=True):
        assert_right(part, answer)


def test_a_call_of_more_than_the_queue_holds_is_answered_and_leaves_half_of_it_to_others():
    async def scenario():
        made = timed(1.0, pass_tokens=20, queue_tokens=100)
        tasks = entering(made)
        await asyncio.sleep(0.5)
        assert made.queued_tokens == 50
        other = request([1], [2] * 40)
        assert_right(other, await made.submit(other))
        await all_right(tasks)
        assert not made.observer.counts
        await made.drain()

    run(scenario())


def test_a_part_that_is_larger_than_the_half_goes_in_alone():
    async def scenario():
        made = timed(1.0, pass_tokens=20, queue_tokens=100)
        parts = [request([n], [9] * 79) for n in range(3)]
        await all_right(entering(made, parts), parts)
        assert not made.observer.counts
        await made.drain()

    run(scenario())


def test_a_share_beside_another_tenant_only_slows_the_call():
    """A quarter of 400 tokens is ten parts; the entrance alone would let in twenty."""

    async def scenario():
        shares = FairShares({"b": 3.0})
        made = timed(0.01, pass_tokens=20, queue_tokens=400, scheduling=Scheduling(pass_time=PerToken(), shares=shares))
        other = submitted(made, request([1], [2] * 8000, tenant="b"))
        await asyncio.sleep(3.9)
        parts = [request([n], [9] * 9, tenant="a") for n in range(40)]
        await all_right(entering(made, parts), parts)
        assert made.observer.counts["tenant_share"] > 0
        await other
        await made.drain()

    run(scenario())


def test_a_deadline_that_can_be_met_is_met():
    """Nobody else waits; a quarter of the patience is kept for others as each part comes."""

    async def scenario():
        made = timed(0.02, pass_tokens=20)
        await all_right(entering(made, deadline=made.now() + 0.44))  # 0.4 s of work
        assert made.observer.counts["deadline"] > 0
        await made.drain()

    run(scenario())


def test_what_others_have_there_refuses_the_call():
    async def scenario():
        made = timed(1.0, pass_tokens=20, queue_tokens=100)
        others = [submitted(made, request([n], [9] * 23)) for n in range(4)]
        await asyncio.sleep(0.5)
        tasks = entering(made)
        with pytest.raises(QueueFull):
            await tasks[0]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*others)
        assert made.queued_tokens == 0
        await made.drain()

    run(scenario())


def test_a_deadline_that_the_first_part_cannot_meet_refuses_it_at_once():
    async def scenario():
        made = timed(1.0, pass_tokens=20)
        other = submitted(made, request([1], [2] * 500))
        await asyncio.sleep(0.1)
        with pytest.raises(CannotFinish):
            await entering(made, PARTS[:1], made.now() + 0.05)[0]
        await other
        await made.drain()

    run(scenario())


def test_cancelled_it_leaves_nothing_behind():
    async def scenario():
        made = timed(1.0, pass_tokens=20, queue_tokens=100)
        tasks = entering(made)
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert made.unanswered == 0
        await made.drain()

    run(scenario())


def test_two_hundred_pairs_on_an_idle_server(tmp_path):
    count = 200
    documents = [pb.Document(text=f"the capital of France is Paris {n}") for n in range(count)]
    parts = [Part(f"query {n}", [n]) for n in range(count)]
    with live(
        tiny_model_dir(tmp_path / "m"), PROFILE, tmp_path, check=False, max_queue_tokens=4000, max_pass_tokens=512
    ) as server:
        answer = server.runner.run(server.at.service.answer(pb.ScoreRequest(documents=documents), parts=parts))
        assert [result.index for result in answer.results] == list(range(count))
        assert all(result.HasField("score") for result in answer.results)
        assert server.metric("admission_refusals_total", reason="queue_full") == 0
