"""How requests go through the batcher: in the given order and shares, as the device is free, as the window is open."""

import asyncio
import math

import pytest

from batching.batcher import Scheduling
from batching.errors import CannotFinish, OverShare
from batching.holding import hold
from batching.scheduler import Asked
from batching.select import Measured, Strategy
from batching.shares import FairShares
from batching.window import Window
from loadtest.virtual_time import run
from tests.batching.fake import FakeDevice, PerToken, blocks_in_use, request, submitted, timed


async def ends(tasks):
    """When each of them ends."""
    loop, times = asyncio.get_running_loop(), {}
    for task in tasks:
        task.add_done_callback(lambda done: times.setdefault(done, loop.time()))
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    return [round(times[task], 6) for task in tasks]


# --- order and shares


def test_a_given_order_decides_whose_turn_it_is():
    async def scenario():
        latest_first = Scheduling(pass_time=PerToken(), order=lambda ticket, now: (-ticket.submitted,))
        made = timed(1.0, scheduling=latest_first, pass_tokens=16)
        tasks = []
        for n in range(4):
            tasks.append(submitted(made, request([n], [9] * 12)))
            await asyncio.sleep(0.1)
        assert await ends(tasks) == [1.0, 4.0, 3.0, 2.0]
        await made.drain()

    run(scenario())


@pytest.mark.parametrize(("weight", "admitted"), [(3.0, True), (1.0, False)])
def test_given_shares_decide_how_much_a_tenant_may_have_waiting(weight, admitted):
    """The others want all of it, and 70 of 100 tokens are between a half and three quarters."""

    async def scenario():
        shares = FairShares({"a": weight})
        made = timed(0.001, scheduling=Scheduling(pass_time=PerToken(), shares=shares), queue_tokens=100)
        await made.submit(request([1], [2] * 4000, tenant="b"))
        made.passes.execute.seconds = 1.0
        tasks = [submitted(made, request([n], [2] * 24, tenant="a")) for n in (1, 2)]
        await asyncio.sleep(0)
        if admitted:
            await made.submit(request([3], [2] * 19, tenant="a"))
        else:
            with pytest.raises(OverShare):
                await made.submit(request([3], [2] * 19, tenant="a"))
            assert made.observer.counts == {"tenant_share": 1}
        await asyncio.gather(*tasks)
        await made.drain()

    run(scenario())


def test_a_held_prefix_has_its_class():
    async def scenario():
        made = timed(1.0, pass_tokens=16)
        prefix = request([7, 7, 7], [1]).prefix
        waiting = [submitted(made, request([n], [9] * 12)) for n in range(4)]
        await asyncio.sleep(0.1)
        held = await hold(made, prefix, Asked(priority=1))
        assert made._clock() == pytest.approx(2.0), "after the pass that runs"
        made.cache.release(held.lease)
        await asyncio.gather(*waiting)
        await made.drain()

    run(scenario())


def test_what_is_cached_is_part_of_the_choice_and_of_what_is_to_be_done():
    async def scenario():
        asked = []

        class Model:
            machine = type("Machine", (), {"name": "here"})

            def ranked(self, prefix, cached, lengths, possible):
                asked.append((prefix, cached, lengths.tolist()))
                best = type("Best", (), {"strategy": Strategy.DIRECT_RAGGED, "milliseconds": 1.0, "packed_rows": 1})
                return [best]

        made = timed(1.0, pass_tokens=100)
        made.policy = Measured(Model())
        await made.submit(request(range(8), [1]))
        await made.submit(request(range(8), [2, 3]))
        assert asked == [(8, 0, [1]), (8, 8, [2])]
        await made.drain()

    run(scenario())


def test_a_naive_request_is_reckoned_with_its_prefix_for_each_item():
    """Behind the 2 ms of another, 0.205 s of work is not done in 0.2 s."""

    async def scenario():
        made = timed(1.0, pass_tokens=1000)
        running = submitted(made, request([1], [2]))
        await asyncio.sleep(0)
        items = [[n] for n in range(5)]
        with pytest.raises(CannotFinish, match=r"^it would be done in 0.207 s,"):
            await made.submit(request(range(40), *items, strategy=Strategy.NAIVE), 0.2)
        assert (await made.submit(request(range(40), *items), 2.0)).computed_tokens == 45
        await running
        await made.drain()

    run(scenario())


# --- when the device is free


def test_a_deadline_is_held_against_the_pass_that_runs():
    """The running pass is predicted to take 0.2 s, and a quarter of a patience is not promised to anyone."""

    async def scenario():
        made = timed(0.2)
        running = submitted(made, request([1], [2] * 199))
        await asyncio.sleep(0.1)
        with pytest.raises(CannotFinish, match=r"^it would be done in 0.120 s, its deadline is in 0.150 s$"):
            await made.submit(request([3], [4] * 19), 0.25)
        await made.submit(request([3], [4] * 19), 0.2 + 0.3)
        await running
        await made.submit(request([5], [6] * 900))
        # A device is free once its pass has ended, however long that was to take.
        last = submitted(made, request([5], [7] * 100), made._clock() + 0.3)
        await asyncio.sleep(0.05)
        with pytest.raises(CannotFinish, match=r"^it would be done in 0.069 s, its deadline is in 0.060 s$"):
            await made.submit(request([3], [4] * 19), made._clock() + 0.06)
        await last
        await made.drain()

    run(scenario())


class Both(FakeDevice):
    """Runs passes one after the other, by the loop's clock, however many it is given; a millisecond a token."""

    def __init__(self):
        super().__init__()
        self.free, self.most, self.given = 0.0, 0, 0

    async def __call__(self, batch):
        self.batches.append(batch)
        self.given += 1
        self.most = max(self.most, self.given)
        loop = asyncio.get_running_loop()
        self.free = max(self.free, loop.time()) + batch.tokens / 1000
        await asyncio.sleep(self.free - loop.time())
        self.given -= 1
        return self.compute(batch)


def test_of_two_passes_in_flight_the_second_is_behind_the_first():
    async def scenario():
        times = PerToken()
        made = timed(0, Both(), Scheduling(pass_time=times, passes_in_flight=2), pass_tokens=100)
        tasks = [submitted(made, request([n], [5] * 79)) for n in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(CannotFinish, match=r"^it would be done in 0.160 s,"):
            await made.submit(request([7], [8] * 9), 0.2)
        await asyncio.sleep(0.09)  # the first has ended, the second runs for 0.06 s more
        with pytest.raises(CannotFinish, match=r"^it would be done in 0.070 s,"):
            await made.submit(request([7], [8] * 9), 0.17)
        last = submitted(made, request([9], [5] * 39))
        assert tasks[0].done()
        assert await ends([tasks[1], last]) == [0.16, 0.2]
        assert made.passes.execute.most == 2
        assert times.learned == [(80, pytest.approx(0.08)), (80, pytest.approx(0.08)), (40, pytest.approx(0.04))]
        await made.drain()

    run(scenario())


@pytest.mark.parametrize("in_flight", [2, 3])
@pytest.mark.parametrize(
    ("strategy", "prefix", "lengths", "at", "rest"),
    [(None, 1, [48] * 5, 0.097, 0.096 + 0.048), (Strategy.NAIVE, 40, [9] * 3, 0.0, 0.098 + 0.049)],
)
def test_what_several_passes_compute_of_one_request_is_waited_for_once(in_flight, strategy, prefix, lengths, at, rest):
    """Two of its passes are with the device, and nothing else waits: a newcomer is next. The second pass of the naive
    one waits for no prefix that its first pass writes."""

    async def scenario():
        made = timed(0, Both(), Scheduling(pass_time=PerToken(), passes_in_flight=in_flight), pass_tokens=100)
        items = [[number] * length for number, length in enumerate(lengths)]
        large = submitted(made, request([1] * prefix, *items, strategy=strategy))
        await asyncio.sleep(at + 0.001)
        assert made.passes.execute.given == 2
        with pytest.raises(CannotFinish, match=f"^it would be done in {rest - 0.001 + 0.005:.3f} s,"):
            await made.submit(request([7], [8] * 4), made._clock() + 0.01)
        await large
        await made.drain()

    run(scenario())


def test_whoever_waits_while_another_is_composed_keeps_the_pages_of_both():
    """The first leaves while its pass runs and a second one began: its pages stay until its pass has ended."""

    async def scenario():
        made = timed(0, Both(), Scheduling(pass_time=PerToken(), passes_in_flight=2), pages=8)
        first = submitted(made, request(range(8), [5] * 50))
        await asyncio.sleep(0)
        second = submitted(made, request(range(20, 28), [6] * 50))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0)
        assert blocks_in_use(made.cache) == 4
        await second
        await made.drain()
        assert not blocks_in_use(made.cache)

    run(scenario())


# --- the window


def test_a_busy_device_waits_a_moment_for_others_and_not_for_one_in_a_hurry():
    """Two gaps of 0.4 ms are waited for: who comes 0.3 ms later joins. Slack is what is left beside twice its work."""
    for deadline, together in ((math.inf, True), (0.0215, True), (0.0202, False)):

        async def scenario(deadline=deadline, together=together):
            await asyncio.sleep(5.0)
            made = timed(0.01, scheduling=Scheduling(pass_time=PerToken(), window=busy(5.0)), pass_tokens=64)
            first = submitted(made, request([1], [2] * 9), None if math.isinf(deadline) else 5.0 + deadline)
            await asyncio.sleep(0.0003)
            second = submitted(made, request([3], [4]))
            await asyncio.gather(first, second)
            assert len(made.passes.execute.batches) == (1 if together else 2), deadline
            await made.drain()

        run(scenario())


def busy(now):
    window = Window()
    for n in range(10, 0, -1):
        window.arrived(now - n * 0.0004)
    for n in range(10, 0, -1):
        window.ran(now - n, now - n + 1)
    return window


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_a_tenant_is_charged_once_for_what_is_computed_once(gone):
    """Equal requests while another tenant asks for more than the device. gone: of those that pay, how many leave."""

    async def charged(count):
        made = timed(1e-3, pass_tokens=16)  # faster than predicted, so that nothing that was promised is past
        now = asyncio.get_running_loop().time()
        made.shares.asked("other", 100.0, now)
        running = submitted(made, request([9], [9], tenant="other"))
        await asyncio.sleep(1e-4)
        same = [submitted(made, request([1, 2], *[[7, 7, n] for n in range(9)])) for _ in range(count)]
        await asyncio.sleep(1e-4)
        for task in same[: min(gone, count - 1)]:
            task.cancel()
        await asyncio.gather(running, *same, return_exceptions=True)
        await made.drain()
        return made._scheduler._promised.until[""] - now

    async def scenario():
        assert await charged(5) == pytest.approx(await charged(1), rel=0.1)

    run(scenario())
