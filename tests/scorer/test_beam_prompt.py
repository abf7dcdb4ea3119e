"""A search begins behind the pass that computes its prompt, and counts where that pass ends well."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from batching.beams import BeamOptions
from batching.errors import DeviceFailed
from scorer.beam_run import BeamRequest
from scorer.beam_steps import ModelSteps
from tests.batching.fake import blocks_in_use
from tests.models import tiny
from tests.scorer.test_beam import BEAM_PAGES, KEPT, prompt_of, search, searcher

REQUEST = BeamRequest(prompt_of(40), BeamOptions(4, 6, eos_ids=(7, 11)))


class Passes:
    """Each pass is computed at once; its reads come when they are let, and become what `ends` makes of them."""

    def __init__(self, *ends):
        self.let = asyncio.Event()
        self._ends = list(ends)
        self.run = 0

    def around(self, run):
        async def execute(batch):
            reads = await run(batch)
            await self.let.wait()
            self.run += 1
            return self._ends.pop(0)(reads) if self._ends else reads

        return execute


class Counting(ModelSteps):
    """spoiled: the first steps that give NaN."""

    def __init__(self, *given, spoiled=0):
        super().__init__(*given)
        self.submitted, self._spoiled = 0, spoiled

    def submit(self, step):
        stepped = super().submit(step)()
        self.submitted += 1
        if self.submitted <= self._spoiled:
            stepped.candidates.log_probs[:] = np.nan
        return lambda: stepped


def not_sound(reads):
    return replace(reads, logits=np.full_like(reads.logits, np.nan))


def breaks(reads):
    raise RuntimeError("boom")


async def under_way(made):
    """Until a search's first turn is over, though no pass has ended."""
    async with asyncio.timeout(30):
        while not made._steps.submitted or made._running is not None:
            await asyncio.sleep(0.001)


def free(made, batcher, cached=0):
    """Whether nobody holds anything, and so many tokens are cached."""
    batcher_free = not blocks_in_use(batcher.cache)
    hit = batcher.cache.hit(batcher.cache.chain(b"\0", REQUEST.prompt[:-1]))
    return made._pages._pool.free == BEAM_PAGES and batcher_free and hit == cached


def test_steps_do_not_wait_for_the_pass_and_are_counted_once():
    model = tiny("llama")
    alone = search(model, REQUEST)

    async def run():
        passes = Passes()
        async with searcher(model, steps=Counting, around=passes.around) as (made, batcher):
            made._turn_seconds, made._idle_turn_seconds = 0.0, 1000.0
            task = asyncio.create_task(made.search(REQUEST))
            await under_way(made)
            assert made._steps.submitted == alone.steps, "its own pass is nobody else who waits"
            assert not passes.run
            assert not task.done(), "what the pass's end says of the K/V is not known yet"
            passes.let.set()
            found = await task
            assert made._steps.submitted == found.steps
            assert free(made, batcher, cached=39)
            return found

    found = asyncio.run(run())
    assert found.hypotheses == alone.hypotheses
    assert (found.steps, found.computed_tokens, found.passes) == (alone.steps, alone.computed_tokens, 1)


@pytest.mark.parametrize("spoiled", [0, 1])
def test_a_pass_that_is_not_sound_runs_again_and_so_do_the_steps_behind_it(spoiled):
    model = tiny("llama")
    alone = search(model, REQUEST)

    async def run():
        passes = Passes(not_sound)
        async with searcher(model, steps=lambda *given: Counting(*given, spoiled=spoiled), around=passes.around) as (
            made,
            batcher,
        ):
            task = asyncio.create_task(made.search(REQUEST))
            await under_way(made)
            passes.let.set()
            found = await task
            assert passes.run == 2
            assert made._steps.submitted > found.steps
            assert free(made, batcher, cached=39)
            return found

    assert asyncio.run(run()).hypotheses == alone.hypotheses


def test_nan_in_steps_behind_a_pass_that_was_healed_does_not_fail_the_search():
    model = tiny("llama")
    alone = search(model, REQUEST)

    async def run():
        passes = Passes()
        async with searcher(model, steps=lambda *given: Counting(*given, spoiled=1), around=passes.around) as (made, _):
            task = asyncio.create_task(made.search(REQUEST))
            await under_way(made)
            passes.let.set()
            return await task

    assert asyncio.run(run()).hypotheses == alone.hypotheses


def test_a_pass_that_fails_fails_the_search():
    model = tiny("llama")

    async def run():
        passes = Passes(breaks)
        async with searcher(model, steps=Counting, around=passes.around) as (made, batcher):
            task = asyncio.create_task(made.search(REQUEST))
            await under_way(made)
            passes.let.set()
            with pytest.raises(DeviceFailed, match="RuntimeError in the forward pass"):
                await task
            assert free(made, batcher)
            again = await made.search(REQUEST)
            assert free(made, batcher, cached=39)
            return again

    assert asyncio.run(run()).hypotheses == search(model, REQUEST).hypotheses


@pytest.mark.parametrize("when", ["at once", "before its pass is told", "while its steps wait for the pass"])
def test_a_caller_who_leaves_holds_nothing(when):
    model = tiny("llama")

    async def run():
        passes = Passes()
        async with searcher(model, steps=Counting, around=passes.around) as (made, batcher):
            task = asyncio.create_task(made.search(REQUEST))
            if when == "while its steps wait for the pass":
                await under_way(made)
            else:
                for _ in range(0 if when == "at once" else 3):
                    await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert made._pages._pool.free == BEAM_PAGES
            passes.let.set()
            while batcher.unanswered or batcher.passes.running:
                await asyncio.sleep(0.001)
            assert free(made, batcher, cached=39 if passes.run else 0)
            assert batcher.cache.pool.pages == KEPT

    asyncio.run(run())


def test_a_step_that_fails_behind_the_pass_fails_the_search_and_frees_everything():
    model = tiny("llama")

    class Broken(Counting):
        def submit(self, step):
            self.submitted += 1
            raise RuntimeError("boom")

    async def run():
        passes = Passes()
        async with searcher(model, steps=Broken, around=passes.around) as (made, batcher):
            with pytest.raises(DeviceFailed, match="RuntimeError in a beam step"):
                await made.search(REQUEST)
            passes.let.set()
            while batcher.passes.running:
                await asyncio.sleep(0.001)
            assert free(made, batcher, cached=39)

    asyncio.run(run())
