"""Turns, and steps that follow before the last one's results are read: the same search, however it is cut up."""

import asyncio
from collections import deque

import numpy as np
import pytest

from attention.decode import Decode
from attention.plans import Strategy
from batching.beams import BeamOptions, Candidates, EarlyStopping
from batching.errors import DeviceFailed
from batching.items import Item
from batching.trie import Trie
from batching.types import TokenizedRequest
from scorer.beam_run import BeamRequest
from scorer.beam_steps import BeamStep, Following, ModelSteps, Stepped
from scorer.beam_turn import Turn
from tests.models import tiny
from tests.scorer.test_beam import BEAM_PAGES, PAGE, prompt_of, searcher

NOTHING = Stepped(Candidates(np.zeros(0, np.float32), *np.zeros((2, 0), np.int32)), 0.0, 0.0)  # of no beams


class Ahead(ModelSteps):
    """Follows as a device does: from the candidates alone, by rules of its own, before anyone has read them."""

    def __init__(self, *given):
        super().__init__(*given)
        self.submitted = self.followed = 0
        self.spoil_after = None

    def submit(self, step):
        self.submitted += 1
        return self._keep(step)

    def follow(self):
        if self._step.ahead is None:
            return None
        self.followed += 1
        return self._keep(self._next())

    def _keep(self, step):
        self._step, self._stepped = step, super().submit(step)() if len(step.tokens) else NOTHING
        if self.spoil_after is not None and self.submitted + self.followed > self.spoil_after:
            self._stepped.candidates.log_probs[:] = np.nan
        stepped = self._stepped
        return lambda: stepped

    def _next(self):
        step, found, ahead = self._step, self._stepped.candidates, self._step.ahead
        totals = step.scores[found.beams] + found.log_probs
        best = [int(i) for i in np.argsort(-totals, kind="stable")][: ahead.count]
        on = [i for i in best if totals[i] > -np.inf and int(found.tokens[i]) not in ahead.eos_ids][: ahead.width]
        own = step.decode.history.shape[1]
        numbers = [1 + (own - 1) * ahead.width + rank for rank in range(len(on))]
        slots = [[int(ahead.pages[n // PAGE]) * PAGE + n % PAGE] for n in numbers]
        history = np.concatenate([step.decode.history[found.beams[on]], np.array(slots, np.int32).reshape(-1, 1)], 1)
        decode = Decode(PAGE, step.decode.prompt_pages, step.decode.prompt_tokens, history.astype(np.int32))
        return BeamStep(found.tokens[on], totals[on], decode, step.count, ahead=ahead)


def found(model, request, made=Ahead, **turns):
    steps = []

    def make(*given):
        steps.append(made(*given))
        return steps[0]

    async def run():
        async with searcher(model, steps=make) as (s, _):
            s._turn_seconds = turns.get("seconds", s._turn_seconds)
            s._idle_turn_seconds = turns.get("idle", 1000.0)
            return await s.search(request)

    return asyncio.run(run()), steps[0]


def same(one, other):
    assert one.hypotheses == other.hypotheses
    assert (one.steps, one.computed_tokens) == (other.steps, other.computed_tokens), (
        "what was not needed counts nothing"
    )


@pytest.mark.parametrize("rule", EarlyStopping)
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_following_finds_the_same(rule, penalty):
    model = tiny("qwen3")
    wasted = 0
    for seed in range(6):
        rng = np.random.default_rng([seed, int(penalty + 1)])
        beams, new, eos = int(rng.integers(1, 9)), int(rng.integers(1, 12)), int(rng.integers(0, 25))
        asked = BeamOptions(beams, new, penalty, rule, tuple(range(eos)))
        request = BeamRequest(prompt_of(int(rng.integers(1, 40)), seed), asked)
        plain, _ = found(model, request, ModelSteps)
        followed, steps = found(model, request)
        same(followed, plain)
        assert steps.submitted == 1, "one turn begins with a step that is submitted, and all others follow"
        assert 0 <= steps.submitted + steps.followed - followed.steps <= 1
        wasted += steps.submitted + steps.followed - followed.steps
    assert wasted < 6, "where a search ends with its last token, nothing is computed beyond"


def test_a_vocabulary_with_few_ways_to_go_on():
    """More eos ids than other tokens: fewer beams go on than may."""
    model = tiny("llama")
    for beams in (3, 6):
        asked = BeamOptions(beams, 5, eos_ids=tuple(range(2, model.vocabulary)))
        request = BeamRequest(prompt_of(20), asked)
        plain, _ = found(model, request, ModelSteps)
        same(found(model, request)[0], plain)


def test_a_search_may_be_cut_into_turns_anywhere():
    model, request = tiny("llama"), BeamRequest(prompt_of(33), BeamOptions(5, 12, eos_ids=(7, 11)))
    whole, steps = found(model, request)
    cut, parts = found(model, request, seconds=0.0, idle=0.0)
    same(cut, whole)
    assert steps.submitted == 1
    assert parts.submitted == cut.steps, "a turn of no length is one step"
    assert parts.followed == 0, "and nothing is enqueued that the turn is too short for"


def test_constrained_searches_do_not_follow():
    model = tiny("llama")
    trie = Trie.of([(20, 30, 40), (20, 31, 41), (21, 32, 42)])
    request = BeamRequest(prompt_of(20), BeamOptions(2, 4, eos_ids=(7,)), trie)
    plain, _ = found(model, request, ModelSteps)
    followed, steps = found(model, request)
    same(followed, plain)
    assert steps.followed == 0


@pytest.mark.parametrize("after", [0, 1, 3])
def test_nan_fails_the_search_and_frees_everything(after):
    model = tiny("llama")

    async def run():
        async with searcher(model, steps=Ahead) as (made, batcher):
            made._steps.spoil_after = after
            with pytest.raises(DeviceFailed, match="NaN"):
                await made.search(BeamRequest(prompt_of(30), BeamOptions(4, 8)))
            item = Item(np.array([1], np.int32), np.zeros(1, np.int32), np.array([[1, 2]], np.int32))
            scored = await batcher.submit(TokenizedRequest(prompt_of(40), (item,)))
            assert scored.scored[0].strategy in Strategy
            assert made._pages._pool.free == BEAM_PAGES

    asyncio.run(run())


def test_a_caller_who_leaves_ends_the_turn():
    """The device thread goes on for no more than the steps that were under way."""
    model = tiny("llama")

    async def run():
        async with searcher(model, steps=Ahead, beam_pages=BEAM_PAGES) as (made, _):
            made._idle_turn_seconds = 1000.0
            task = asyncio.create_task(made.search(BeamRequest(prompt_of(30), BeamOptions(2, 300))))
            while not made._steps.submitted:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await made._engine.between(lambda: None)  # what the thread had to do before is done
            assert made._steps.submitted == 1
            assert made._steps.followed < 290

    asyncio.run(run())


def test_a_search_that_waits_gets_its_turn_and_scoring_too():
    """A search with all the time in the world gives the device away as soon as someone else wants it."""
    model = tiny("llama")

    async def run():
        async with searcher(model, steps=Ahead) as (made, batcher):
            made._turn_seconds, made._idle_turn_seconds = 0.0, 1000.0
            long = asyncio.create_task(made.search(BeamRequest(prompt_of(30), BeamOptions(2, 250))))
            while not made._steps.submitted:
                await asyncio.sleep(0.001)
            await made.search(BeamRequest(prompt_of(20), BeamOptions(2, 3)))
            item = Item(np.array([1], np.int32), np.zeros(1, np.int32), np.array([[1, 2]], np.int32))
            await batcher.submit(TokenizedRequest(prompt_of(40), (item,)))
            assert not long.done()
            long.cancel()
            await asyncio.gather(long, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("seconds", "most", "times", "wanted", "over"),
    [
        (4, 100, [0, 3], True, False),
        (4, 100, [0, 4], True, True),
        (4, 100, [0, 4], False, False),
        (4, 100, [0, 99], False, False),
        (4, 100, [0, 100], False, True),
    ],
)
def test_a_turn(seconds, most, times, wanted, over):
    clock = deque(times)
    assert Turn(seconds, most, lambda: wanted, clock.popleft).over() is over


def test_the_models_own_steps_do_not_follow():
    assert issubclass(Ahead, Following)
    assert not issubclass(ModelSteps, Following)
