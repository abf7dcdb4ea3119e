"""Two passes in flight that write the same pages, and one of them is not sound."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from batching.batcher import Scheduling
from batching.errors import DeviceFailed
from tests.batching.fake import PAGE, FakeDevice, assert_right, batcher, blocks_in_use, request, submitted

PREFIX = range(1, 9)
SPOILED = -(10**6)


class Steered(FakeDevice):
    """Each pass ends when it is told to: well, with NaN, or not at all. Where not well, what it wrote is spoiled."""

    def __init__(self):
        super().__init__()
        self.ends = []

    async def __call__(self, batch):
        self.batches.append(batch)
        self.ends.append(asyncio.get_running_loop().create_future())
        how = await self.ends[-1]
        reads = self.compute(batch)
        if how == "well":
            return reads
        for pages, cached in zip(batch.pages, batch.layout.cached.tolist(), strict=True):
            for page in () if pages is None else pages[cached // PAGE :].tolist():
                self.slots |= dict.fromkeys(range(page * PAGE, (page + 1) * PAGE), SPOILED)
        if how == "raises":
            raise RuntimeError("once")
        return replace(reads, logits=np.full_like(reads.logits, np.nan))

    async def end(self, which, how="well"):
        self.ends[which].set_result(how)
        await settled()


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


async def begun(made, *asked):
    """Of each request a pass, one begun behind the other."""
    tasks = []
    for one in asked:
        tasks.append(submitted(made, one))
        await settled()
    return tasks


def steered(**kwargs):
    device = Steered()
    return device, batcher(device, scheduling=Scheduling(passes_in_flight=kwargs.pop("in_flight", 2)), **kwargs)


async def assert_all_is_well(device, made):
    """A request behind the prefix gets its scores, and no page is held."""
    device.ends, device.batches = [], []
    for n in range(2):
        last = request(PREFIX, [77, n])
        task = submitted(made, last)
        await settled()
        await device.end(-1)
        assert_right(last, await task)
    assert task.result().cached_prefix_tokens == len(PREFIX)
    await made.drain()
    assert not blocks_in_use(made.cache)


@pytest.mark.parametrize("how", ["nan", "raises"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("bad", [0, 1])
def test_what_an_unsound_pass_may_have_written_is_found_by_nobody(how, order, bad):
    """Whichever ends first, and whether or not the other, which wrote the same, ends well before or after it."""

    async def scenario():
        device, made = steered()
        tasks = await begun(made, request(PREFIX, [1]), request(PREFIX, [2]))
        assert [batch.layout.cached.tolist() for batch in device.batches] == [[0, 0]] * 2, "both write it"
        for which in order:
            await device.end(which, how if which == bad else "well")
        await asyncio.gather(*tasks, return_exceptions=True)
        assert made.cache.hit(made.chain(request(PREFIX, [3]))) == 0
        assert made.cache.counts.withdrawn_blocks == 2
        await assert_all_is_well(device, made)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["nan", "raises"])
def test_what_continues_spoiled_blocks_is_withdrawn_with_them(how):
    """A third pass began between the end of the sound one and that of the other, and found what both wrote."""

    async def scenario():
        device, made = steered()
        tasks = await begun(made, request(PREFIX, [1]), request(PREFIX, [2]))
        await device.end(0)
        longer = request([*PREFIX, *range(50, 60)], [3])
        tasks += await begun(made, longer)
        assert device.batches[2].layout.cached.tolist() == [8, 0]
        await device.end(1, how)
        assert len(made.cache) == 0
        await device.end(2)
        assert len(made.cache) == 0
        await asyncio.gather(*tasks, return_exceptions=True)
        await assert_all_is_well(device, made)

    asyncio.run(scenario())


def test_a_request_of_several_passes_reads_spoiled_pages_in_none_of_the_later_ones():
    async def scenario():
        device, made = steered(pass_tokens=18)
        large = request(PREFIX, *[[n, n, n] for n in range(1, 7)])
        tasks = await begun(made, large, request(PREFIX, [2]))
        await device.end(0)
        await device.end(1, "nan")
        assert len(device.batches) == 3, "the next part of the large one began before the spoiled pages were known"
        await device.end(2, "nan")
        for which in range(3, 20):
            if tasks[0].done():
                break
            await device.end(which)
        scored = (await tasks[0]).scored
        assert [bool(np.isnan(one.logits).any()) for one in scored] == [False] * 3 + [True] * 3
        assert device.batches[2].layout.cached[0] == 8
        await assert_all_is_well(device, made)

    asyncio.run(scenario())


def test_pages_stay_held_while_another_pass_of_their_request_runs():
    """The first of two fails, and the request with it."""

    async def scenario():
        device, made = steered(pass_tokens=18)
        large = request(PREFIX, *[[n, n, n] for n in range(1, 14)])
        (task,) = await begun(made, large)
        await device.end(0)
        assert len(device.batches) == 3
        await device.end(1, "raises")
        with pytest.raises(DeviceFailed):
            await task
        assert blocks_in_use(made.cache) == 2
        await device.end(2)
        assert not blocks_in_use(made.cache)
        await assert_all_is_well(device, made)

    asyncio.run(scenario())
