"""How requests of the batcher end: over tiers, with heirs, at deadlines, by faults, in a drain."""

import asyncio

import pytest

from batching.errors import CannotFinish, Closed, DeviceFailed, Expired, QueueFull
from batching.passes import FAILURES_IN_A_ROW
from batching.select import Strategy
from batching.tiering import WISHES, Found, Rates
from loadtest.virtual_time import run
from tests.batching.fake import (
    PAGE,
    Counting,
    FakeDevice,
    TimedDevice,
    assert_right,
    batcher,
    request,
    submitted,
    timed,
)

# --- over tiers


class Shelf:
    """A tier of what the device has in its pages; a millisecond for each look."""

    names = ("shelf",)

    def __init__(self, device):
        self.device, self.kept, self.reads = device, {}, 0

    def found(self, keys):
        count = next((n for n, key in enumerate(keys) if key not in self.kept), len(keys))
        return [Found("shelf", count, count * 100)] if count else []

    async def read(self, found, keys):
        self.reads += 1
        await asyncio.sleep(0.001)
        return [self.kept[key] for key in keys]

    async def fill(self, pages, contents):
        for page, content in zip(pages.tolist(), contents, strict=True):
            self.device.slots.update({page * PAGE + i: token for i, token in enumerate(content)})
        return 0.0

    async def store(self, keys, pages):
        for key, page in zip(keys, pages.tolist(), strict=True):
            self.kept[key] = [self.device.slots.get(page * PAGE + i, 0) for i in range(PAGE)]

    def close(self):
        pass


def test_what_was_wanted_again_is_copied_down_and_brought_back_before_its_pass():
    async def scenario():
        device = TimedDevice(0.1)
        shelf = Shelf(device)
        made = timed(0, device, tiers=(shelf, Rates({"shelf": (1e-4, 1e9)})), pages=8)
        for n in range(WISHES):
            assert not shelf.kept
            await made.submit(request(range(1, 9), [20 + n]))
        await made.ahead.settle()
        assert len(shelf.kept) == 2
        made.cache.clear()
        device.slots.clear()
        asked = [request(range(1, 9), [30], [31, 32]), request(range(1, 9), [40])]
        began = made._clock()
        waiting = [submitted(made, one) for one in asked]
        naive = request(range(1, 9), [50], strategy=Strategy.NAIVE)
        waiting.append(submitted(made, naive))
        answers = await asyncio.gather(*waiting)
        for one, answer in zip([*asked, naive], answers, strict=True):
            assert_right(one, answer)
        assert [answer.computed_tokens for answer in answers] == [3, 1, 9]
        assert [answer.cached_prefix_tokens for answer in answers] == [8, 8, 0]
        assert shelf.reads == 1, "once for both, and never for one that keeps no page"
        assert made._clock() - began == pytest.approx(0.2), "the naive one first, and then those that were fetched"
        await made.drain()

    run(scenario())


def test_whose_tiers_cannot_be_asked_leaves_nothing_behind():
    async def scenario():
        device = FakeDevice()
        shelf = Shelf(device)
        made = batcher(device, tiers=(shelf, Rates({"shelf": (1e-4, 1e9)})))
        made.observer = Counting()

        def found(keys):
            raise OSError("an index")

        shelf.found = found
        with pytest.raises(OSError, match="an index"):
            await made.submit(request(range(8), [1]))
        assert (made.queued_tokens, made.unanswered) == (0, 0)
        await made.submit(request([], [1]))
        await made.drain()

    run(scenario())


def test_whoever_waits_for_a_fetch_alone_is_woken_by_it():
    async def scenario():
        device = TimedDevice(0.1)
        shelf = Shelf(device)
        made = timed(0, device, tiers=(shelf, Rates({"shelf": (1e-4, 1e9)})), pages=8)
        for n in range(WISHES):
            await made.submit(request(range(1, 9), [20 + n]))
        await made.ahead.settle()
        made.cache.clear()
        began = made._clock()
        answer = await made.submit(request(range(1, 9), [30]))
        assert (answer.computed_tokens, made._clock() - began) == (1, pytest.approx(0.101))
        await made.drain()

    run(scenario())


# --- ends


def test_heirs_are_counted_with_what_they_inherit():
    async def scenario():
        made = timed(1.0, pass_tokens=16)
        running = submitted(made, request([1], [2] * 12))
        await asyncio.sleep(0.1)
        first = submitted(made, request([5], [6] * 9))
        await asyncio.sleep(0)
        second = submitted(made, request([5], [6] * 9, [7] * 3))
        await asyncio.sleep(0)
        assert made.queued_tokens == 13 + 10 + 4
        first.cancel()
        await asyncio.sleep(0)
        assert made.queued_tokens == 13 + 13
        await asyncio.gather(running, second)
        await made.drain()

    run(scenario())


def test_an_heir_that_runs_waits_for_no_more_than_what_does_not():
    """The heir computes one item while another pays for its second: once that one has gone, the second is its own."""

    async def scenario():
        made = timed(0.015, pass_tokens=16)
        running = submitted(made, request([1], [2] * 12))
        await asyncio.sleep(0)
        first = submitted(made, request([5], [6] * 9))
        heir = submitted(made, request([5], [7] * 14, [6] * 9, priority=1))
        await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.sleep(0)
        with pytest.raises(CannotFinish, match=r"^it would be done in 0.024 s,"):  # 10 of the pass, 9, and 5 of its own
            await made.submit(request([7], [8] * 4), 0.03)
        await asyncio.gather(running, heir)
        await made.drain()

    run(scenario())


def test_what_expired_by_the_clock_is_ended_before_the_next_pass():
    """The clock says so before the loop's timer does: a part for who takes one, an error for who does not."""

    async def scenario():
        now, device = [0.0], FakeDevice()
        made = batcher(device, pass_tokens=8, clock=lambda: now[0])
        made.observer = Counting()
        device.gate.clear()
        running = submitted(made, request([1], [2] * 7))
        await asyncio.sleep(0)
        part = submitted(made, request([3], [4], [5], partial_ok=True), 5.0)
        whole = submitted(made, request([6], [7]), 5.0)
        other = submitted(made, request([8], [9]), 5.001)
        await asyncio.sleep(0)
        now[0] = 5.0
        device.gate.set()
        assert (await part).scored == (None, None)
        with pytest.raises(Expired, match=r"^the deadline came before this request's scores$"):
            await whole
        assert (await other).passes == 1
        await running
        assert made.observer.counts == {"missed": 2}
        assert made.queued_tokens == 0
        await made.drain()

    run(scenario())


def test_an_heir_of_what_failed_is_counted_at_once():
    async def scenario():
        device = FakeDevice()
        device.failures = [RuntimeError("no")]
        device.gate.clear()
        made = batcher(device, pass_tokens=64)
        payer = submitted(made, request(range(8), [1], [2]))
        await asyncio.sleep(0.01)
        heir = submitted(made, request(range(8), [1], [2]))
        await asyncio.sleep(0.01)
        device.gate.set()
        with pytest.raises(DeviceFailed):
            await payer
        assert made.queued_tokens == 10, "before the next pass is thought of"
        assert_right(request(range(8), [1], [2]), await heir)
        await made.drain()

    run(scenario())


def test_a_pass_that_is_cancelled_by_the_device_is_one_that_failed():
    async def scenario():
        device = FakeDevice()
        device.failures = [asyncio.CancelledError()]
        made = batcher(device)
        with pytest.raises(DeviceFailed, match=r"^CancelledError in the forward pass$"):
            await made.submit(request([1], [2]), made._clock() + 60.0)
        await made.submit(request([1], [2]))
        await made.drain()

    run(scenario())


def test_a_pass_that_the_drain_ends_has_not_failed():
    async def scenario():
        device = FakeDevice()
        device.failures = [RuntimeError("no")] * (FAILURES_IN_A_ROW - 1)
        made = batcher(device)
        for _ in range(FAILURES_IN_A_ROW - 1):
            with pytest.raises(DeviceFailed):
                await made.submit(request([1], [2]))
        device.gate.clear()
        hanging = submitted(made, request([1], [2]))
        await asyncio.sleep(0.01)
        made.give_up("it hangs")
        with pytest.raises(Closed):
            await hanging
        await made.drain()
        assert await made.failed() == "it hangs"

    run(scenario())


def test_who_cancelled_many_is_served_like_one_who_did_not():
    """Two tenants; one always has three requests waiting, the other sent two hundred and took them back."""

    async def waited(sent):
        made = timed(0.06, pages=0, queue_tokens=100_000)
        made.observer = Counting()
        busy = [asyncio.create_task(endless(made, n)) for n in range(3)]
        await asyncio.sleep(1.0)
        given_up = [submitted(made, request([100 + n], [6] * 63, tenant="a")) for n in range(sent)]
        await asyncio.sleep(0.01)
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        await asyncio.sleep(1.0)
        began = made._clock()
        await made.submit(request([7], [8], tenant="a"))
        for task in busy:
            task.cancel()
        return made._clock() - began

    async def endless(made, n):
        while True:
            await made.submit(request([n], [5] * 63, tenant="b"))

    assert run(waited(200)) <= run(waited(0)) + 0.12, "two passes at most"


def test_what_begins_alike_does_not_wait_for_what_others_fetch():
    """Each fill takes longer than until the next begins, so that one is always under way."""

    async def scenario():
        device = TimedDevice(0.001)
        shelf = Shelf(device)
        made = timed(0, device, tiers=(shelf, Rates({"shelf": (1e-4, 1e9)})), pages=400, pass_tokens=400)
        root, users = list(range(PAGE)), [[100 + n] * 8 for n in range(50)]
        for n in range(WISHES):
            for user in users:
                await made.submit(request(root + user, [n]))
        await made.ahead.settle()
        made.cache.clear()
        warm = request([*root, 7, 7, 7, 7], [1])
        await made.submit(warm)
        filled = shelf.fill

        async def fill(pages, contents):
            await asyncio.sleep(0.005)
            return await filled(pages, contents)

        shelf.fill = fill
        fetched, waited = [], []

        async def late():
            began = made._clock()
            await made.submit(request(warm.prefix, [2]))
            waited.append(made._clock() - began)

        for n, user in enumerate(users):
            fetched.append(submitted(made, request(root + user, [9])))
            await asyncio.sleep(0.002)
            if n == 10:
                assert made.cache.filling
                answered = asyncio.create_task(late())
        await answered
        assert waited[0] < 0.01, "and not until nobody fetches any more"
        for user, answer in zip(users, await asyncio.gather(*fetched), strict=True):
            assert_right(request(root + user, [9]), answer)
        assert made.ahead.counts.chosen["fetch"] == 1 + len(users), "the first block for the warm one"
        await made.drain()

    run(scenario())


def test_only_failures_in_a_row_end_the_service():
    async def scenario():
        device = FakeDevice()
        made = batcher(device)
        for _ in range(3):
            device.failures = [RuntimeError("no")] * (FAILURES_IN_A_ROW - 1)
            for _ in range(FAILURES_IN_A_ROW - 1):
                with pytest.raises(DeviceFailed):
                    await made.submit(request([1], [2]))
            await made.submit(request([1], [2]))
        device.failures = [RuntimeError("no")] * FAILURES_IN_A_ROW
        for _ in range(FAILURES_IN_A_ROW):
            with pytest.raises(DeviceFailed):
                await made.submit(request([1], [2]))
        assert await made.failed() == f"{FAILURES_IN_A_ROW} passes in a row failed"

    run(scenario())


def test_a_fault_behind_a_pass_is_the_batchers_own():
    async def scenario():
        made = batcher(FakeDevice())

        class Broken(Counting):
            def ran(self, tokens, fill, requests):
                raise KeyError("a metric")

        made.observer = Broken()
        with pytest.raises(Closed, match=r"^the device is gone$"):
            await made.submit(request([1], [2]))
        assert await made.failed() == "the batcher itself failed: KeyError('a metric')"

    run(scenario())


def test_a_drained_batcher_leaves_nothing_running():
    async def scenario():
        made = timed(1.0, pass_tokens=8)
        waiting = [submitted(made, request([n], [5] * 6)) for n in range(2)]
        await asyncio.sleep(0.1)
        await made.drain()
        assert made._clock() == pytest.approx(2.0, abs=0.02)
        assert all(task.done() for task in waiting)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert [len(answer.scored) for answer in await asyncio.gather(*waiting)] == [1, 1]

    run(scenario())


def test_refusals_are_counted_by_their_reason():
    async def scenario():
        made = timed(1.0, queue_tokens=10)
        running = submitted(made, request([1], [2] * 5))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await made.submit(request([1], [3] * 9))
        assert made.observer.counts == {"queue_full": 1}
        await running
        await made.drain()

    run(scenario())
