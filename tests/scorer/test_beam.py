"""Beam search on the engine: the sequences and scores of transformers' own generate, with and without a constraint."""

import asyncio
import itertools
import threading
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from attention.decode import DecodeStrategy
from attention.factory import make
from attention.kv_pages import KvPages
from attention.plans import Strategy
from batching.batcher import Batcher, BatcherLimits
from batching.beams import BeamOptions, EarlyStopping, Ended
from batching.errors import DeviceFailed, Expired, QueueFull
from batching.items import Item
from batching.page_pool import PagePool
from batching.prefix_cache import PrefixCache
from batching.scheduler import Asked
from batching.select import Threshold
from batching.trie import Trie
from batching.types import TokenizedRequest
from scorer.beam import BeamSearcher
from scorer.beam_pages import BeamPages
from scorer.beam_run import BeamRequest
from scorer.beam_steps import ModelSteps
from scorer.beam_top import CHUNK, top_candidates
from scorer.engine import Engine
from scorer.errors import InvalidRequest
from scorer.model import ATTENTION_NAME
from tests.models import FAMILIES, tiny

PAGE, KEPT, BEAM_PAGES = 16, 64, 40
TOLERANCE = 1e-4  # of a score; sequences whose scores are nearer than that may change places
TRANSFORMERS = {EarlyStopping.HEURISTIC: False, EarlyStopping.FULL: True, EarlyStopping.NEVER: "never"}
EOS = (7, 11)


@asynccontextmanager
async def searcher(
    model, strategy=DecodeStrategy.CASCADE_DECODE, kept=KEPT, beam_pages=BEAM_PAGES, steps=None, around=lambda run: run
):
    """A searcher with a batcher, an engine and a cache of its own. around: what the batcher calls for the engine."""
    pages = KvPages(kept + beam_pages, PAGE)
    engine = Engine(model, make("torch", pages), PAGE, kept + beam_pages)
    cache = PrefixCache(PagePool(kept), PAGE)
    window = min((key.window for key in model.mask_keys if key.window is not None), default=None)
    batcher = Batcher(around(engine.execute), BatcherLimits(1024, 64, 1 << 20), Threshold(128, window), cache)
    made = ModelSteps(model, pages, strategy) if steps is None else steps(model, pages)
    try:
        yield BeamSearcher(batcher, engine, made, BeamPages(kept, beam_pages, PAGE)), batcher
    finally:
        await batcher.drain()
        engine.close()


def search(model, request, **given):
    """One search on a fresh searcher."""

    async def run():
        async with searcher(model, **given) as (made, _):
            return await made.search(request)

    return asyncio.run(run())


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(12, 200, length).astype(np.int32)


def by_transformers(model, prompt, options, sequences=None):
    """[(tokens, score)] as generate finds them, without the stand-ins for beams that cannot be."""
    hf, eos = model.hf, list(options.eos_ids)
    allowed = None
    if sequences is not None:

        def allowed(_, ids):
            done = tuple(ids[len(prompt) :].tolist())
            found = {s[len(done)] for s in sequences if s[: len(done)] == done and len(s) > len(done)}
            return sorted(found | (set(eos) if done in sequences else set())) or eos

    soft_capped = any(key.soft_cap for key in model.mask_keys)
    hf.set_attn_implementation("eager" if soft_capped else "sdpa")
    own = hf.generation_config.eos_token_id  # takes the place of an eos_token_id of None
    hf.generation_config.eos_token_id = None
    try:
        out = hf.generate(
            input_ids=torch.from_numpy(prompt.astype(np.int64))[None],
            generation_config=GenerationConfig(
                num_beams=options.num_beams,
                num_return_sequences=options.num_beams,
                max_new_tokens=options.max_new_tokens,
                length_penalty=options.length_penalty,
                early_stopping=TRANSFORMERS[options.early_stopping],
                eos_token_id=eos or None,
                pad_token_id=0,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            ),
            prefix_allowed_tokens_fn=allowed,
        )
    finally:
        hf.generation_config.eos_token_id = own
        hf.set_attn_implementation(ATTENTION_NAME)
    found = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        if score > -1e8:
            found.append((cut(row[len(prompt) :], eos), score))
    return found


def cut(tokens, eos):
    """Up to the first eos: what follows is padding."""
    ends = [i for i, token in enumerate(tokens) if token in eos]
    return tuple(tokens[: ends[0] + 1]) if ends else tuple(tokens)


def agree(found, expected, tolerance=TOLERANCE):
    """Scores within the tolerance, and the same sequences wherever scores are further apart than that."""
    assert len(found) == len(expected)
    scores = np.array([score for _, score in expected])
    assert np.array([h.score for h in found]) == pytest.approx(scores, abs=tolerance)
    for i, h in enumerate(found):
        near = [tokens for tokens, score in expected if abs(score - scores[i]) <= 2 * tolerance]
        assert h.tokens in near, f"rank {i}: {h.tokens} is none of {near}"


def options(**given):
    return BeamOptions(**({"num_beams": 5, "max_new_tokens": 8, "eos_ids": EOS} | given))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_finds_what_transformers_finds(family):
    model, prompt, asked = tiny(family), prompt_of(37), options()
    found = search(model, BeamRequest(prompt, asked))
    agree(found.hypotheses, by_transformers(model, prompt, asked))


@pytest.mark.parametrize("rule", EarlyStopping)
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.7, 1.0, 2.0])
def test_every_rule_and_penalty(rule, penalty):
    model = tiny("qwen3")
    for seed in range(4):
        prompt = prompt_of(20 + seed, seed)
        asked = options(
            length_penalty=penalty, early_stopping=rule, num_beams=4, max_new_tokens=10, eos_ids=tuple(range(12))
        )
        agree(search(model, BeamRequest(prompt, asked)).hypotheses, by_transformers(model, prompt, asked))


@pytest.mark.parametrize(
    ("length", "beams", "new", "eos"),
    [(1, 3, 5, EOS), (2, 2, 6, EOS), (16, 7, 1, EOS), (17, 20, 3, ()), (33, 60, 4, (5,)), (64, 5, 20, EOS)],
)
def test_shapes(length, beams, new, eos):
    """A prompt of one token, two beams, one token to generate, no eos, pages that end with the prompt."""
    model, prompt = tiny("llama"), prompt_of(length)
    asked = options(num_beams=beams, max_new_tokens=new, eos_ids=eos)
    agree(search(model, BeamRequest(prompt, asked)).hypotheses, by_transformers(model, prompt, asked))


def test_one_beam_without_eos_is_greedy():
    model, prompt = tiny("llama"), prompt_of(20)
    (found,) = search(model, BeamRequest(prompt, options(num_beams=1, eos_ids=()))).hypotheses
    ids = prompt
    for token in found.tokens:
        assert token == int(model.alone(ids, 1)[0].argmax())
        ids = np.append(ids, np.int32(token))


@pytest.mark.parametrize("strategy", DecodeStrategy)
@pytest.mark.parametrize("family", ["qwen3", "mistral-window", "gemma2"])
def test_every_strategy_finds_the_same(strategy, family):
    model, prompt, asked = tiny(family), prompt_of(50), options(num_beams=6, max_new_tokens=12)
    found = search(model, BeamRequest(prompt, asked), strategy=strategy)
    agree(found.hypotheses, by_transformers(model, prompt, asked))


def catalogue(count, seed=0, depth=5):
    rng = np.random.default_rng(seed)
    return sorted({tuple(rng.integers(20, 60, rng.integers(1, depth)).tolist()) for _ in range(count)})


@pytest.mark.parametrize("rule", EarlyStopping)
def test_a_catalogue_of_ids_of_one_length(rule):
    """As semantic ids are: three tokens from twelve each."""
    model, prompt = tiny("qwen3"), prompt_of(25)
    sequences = list(itertools.product(range(20, 32), range(40, 52), range(60, 72)))
    asked = options(num_beams=6, early_stopping=rule, eos_ids=(7,))
    found = search(model, BeamRequest(prompt, asked, Trie.of(sequences)))
    agree(found.hypotheses, by_transformers(model, prompt, asked, set(sequences)))


@pytest.mark.parametrize("count", [3, 40, 400])
@pytest.mark.parametrize("rule", [EarlyStopping.HEURISTIC, EarlyStopping.NEVER])
def test_a_constraint_as_prefix_allowed_tokens_fn(count, rule):
    """Not under FULL: where fewer than num_beams sequences are possible, transformers counts stand-ins for the missing
    beams as finished, and ends before it has found all that are."""
    model, prompt, sequences = tiny("qwen3"), prompt_of(25), catalogue(count)
    asked = options(num_beams=6, early_stopping=rule, eos_ids=(7,))
    found = search(model, BeamRequest(prompt, asked, Trie.of(sequences)))
    agree(found.hypotheses, by_transformers(model, prompt, asked, set(sequences)))
    assert {h.tokens[:-1] for h in found.hypotheses} <= set(sequences)


def test_log_probs_are_the_models_own():
    model, prompt, asked = tiny("llama"), prompt_of(30), options(length_penalty=0.5)
    for h in search(model, BeamRequest(prompt, asked)).hypotheses:
        ids = np.concatenate([prompt, h.tokens]).astype(np.int32)
        logits = model.alone(ids, len(h.tokens) + 1)[:-1]
        alone = torch.log_softmax(logits.float(), -1)[torch.arange(len(h.tokens)), list(h.tokens)].numpy()
        assert np.array(h.log_probs) == pytest.approx(alone, abs=TOLERANCE)
        assert h.score == pytest.approx(sum(h.log_probs) / len(h.tokens) ** 0.5, abs=1e-5)
        assert h.ended is (Ended.EOS if h.tokens[-1] in EOS else Ended.LENGTH)


def test_the_prompt_is_found_in_the_cache_and_put_there():
    model, prompt = tiny("llama"), prompt_of(100)

    async def run():
        async with searcher(model) as (made, batcher):
            first = await made.search(BeamRequest(prompt, options()))
            again = await made.search(BeamRequest(prompt, options()))
            item = Item(np.array([1], np.int32), np.zeros(1, np.int32), np.array([[1, 2]], np.int32))
            scored = await batcher.submit(TokenizedRequest(prompt[:-1], (item,)))
            assert batcher.cache.pool.free == KEPT - -(-99 // PAGE), "nothing but the prompt is kept"
            return first, again, scored

    first, again, scored = asyncio.run(run())
    assert (first.cached_prefix_tokens, again.cached_prefix_tokens, scored.cached_prefix_tokens) == (0, 99, 99)
    assert first.computed_tokens - again.computed_tokens == 100  # 99 of the prompt, and the probe behind them
    assert again.passes == 0
    assert [h.tokens for h in first.hypotheses] == [h.tokens for h in again.hypotheses]
    assert [h.score for h in first.hypotheses] == [h.score for h in again.hypotheses]


def test_searches_and_scoring_beside_each_other_change_nothing():
    """Eight searches over two prompts and scoring over others, all at once, in pages that are used again."""
    model = tiny("qwen3")
    prompts = [prompt_of(40, 1), prompt_of(55, 2)]
    asked = [options(num_beams=n) for n in (3, 5, 9, 16)]
    alone = {(p, n): search(model, BeamRequest(prompts[p], asked[n])) for p in range(2) for n in range(4)}
    item = Item(prompt_of(9, 3), np.array([8], np.int32), np.array([[1, 2]], np.int32))

    async def run():
        async with searcher(model, beam_pages=12) as (made, batcher):
            scored = [batcher.submit(TokenizedRequest(prompt_of(30 + i, 4), (item,))) for i in range(12)]
            searches = [made.search(BeamRequest(prompts[p], asked[n])) for p, n in alone]
            return (await asyncio.gather(*searches, *scored))[: len(searches)]

    for found, expected in zip(asyncio.run(run()), alone.values(), strict=True):
        assert [h.tokens for h in found.hypotheses] == [h.tokens for h in expected.hypotheses]
        assert [h.score for h in found.hypotheses] == pytest.approx([h.score for h in expected.hypotheses], abs=1e-5)


def test_what_does_not_fit_is_refused_with_the_limit():
    model = tiny("llama")
    with pytest.raises(InvalidRequest, match=r"max_new_tokens: num_beams \* \(max_new_tokens - 1\) of at most 639"):
        search(model, BeamRequest(prompt_of(5), options(num_beams=100, max_new_tokens=8)))
    with pytest.raises(InvalidRequest, match=r"prompt: at most 33 tokens.* holds no more, got 40"):
        search(model, BeamRequest(prompt_of(40), options()), kept=2)


def test_a_deadline_and_a_caller_who_leaves_free_everything():
    model, prompt = tiny("llama"), prompt_of(40)

    async def run():
        async with searcher(model, beam_pages=8) as (made, _):
            loop_time = made._clock()
            with pytest.raises(Expired):
                await made.search(BeamRequest(prompt, options(max_new_tokens=20)), loop_time + 1e-4)
            task = asyncio.create_task(made.search(BeamRequest(prompt, options(max_new_tokens=20))))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert made.under_way == 0
            assert made._pages._pool.free == 8
            return await made.search(BeamRequest(prompt, options()))

    agree(asyncio.run(run()).hypotheses, by_transformers(model, prompt, options()))


def test_a_small_search_of_a_higher_class_waits_for_no_long_one():
    """Ten long ones, each with half of the pages, of another tenant and of its own."""
    model = tiny("llama")
    long, small = options(num_beams=2, max_new_tokens=160, eos_ids=()), options(num_beams=2, max_new_tokens=3)

    async def run():
        async with searcher(model) as (made, _):
            for tenant in ("flood", "other"):
                low = BeamRequest(prompt_of(20), long, asked=Asked("flood", -1))
                flood = [asyncio.create_task(made.search(low)) for _ in range(10)]
                while not made._held:
                    await asyncio.sleep(0)
                found = await made.search(BeamRequest(prompt_of(40), small, asked=Asked(tenant, 1)))
                assert not any(task.done() for task in flood)
                for task in flood:
                    task.cancel()
                await asyncio.gather(*flood, return_exceptions=True)
            return found

    agree(asyncio.run(run()).hypotheses, by_transformers(model, prompt_of(40), small))


def test_callers_who_leave_anywhere_free_everything_and_hold_up_nobody():
    """While they wait for pages, for a turn, in it, or just as they were given either."""
    model, rng = tiny("llama"), np.random.default_rng(0)

    async def run():
        async with searcher(model, beam_pages=8) as (made, _):
            made._turn_seconds = 0.0
            for _ in range(30):
                asked = [Asked(f"t{i % 2}", i % 3 - 1) for i in range(6)]
                tasks = [
                    asyncio.create_task(made.search(BeamRequest(prompt_of(1 + i * 9, i), options(), asked=who)))
                    for i, who in enumerate(asked)
                ]
                for task in rng.permutation(tasks)[:4]:
                    for _ in range(int(rng.integers(0, 40))):
                        await asyncio.sleep(0)
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
                assert sum(isinstance(end, asyncio.CancelledError) for end in ended) <= 4
                assert not [end for end in ended if isinstance(end, Exception)]
                assert (made.under_way, made._at_turn, made._held) == (0, 0, {})
                assert made._pages._pool.free == 8
            assert made._running is None

    asyncio.run(asyncio.wait_for(run(), 60))


class Slow:
    """Steps of which each holds until it may go on."""

    def __init__(self, inner):
        self._inner, self.began, self.go_on = inner, threading.Event(), threading.Event()

    def submit(self, step):
        self.began.set()
        assert self.go_on.wait(30)
        return self._inner.submit(step)


def charged(made):
    """[(steps, seconds, measured)] of every turn, as the policy hears of it."""
    turns, ran = [], made._searches.ran

    def hear(ticket, steps, seconds, measured):
        turns.append((steps, seconds, measured))
        ran(ticket, steps, seconds, measured)

    made._searches.ran = hear
    return turns


def test_a_turn_is_charged_also_where_its_caller_leaves_in_it():
    model, slow = tiny("llama"), []

    async def run():
        def steps(*given):
            slow.append(Slow(ModelSteps(*given)))
            return slow[0]

        async with searcher(model, steps=steps) as (made, _):
            turns = charged(made)
            task = asyncio.create_task(made.search(BeamRequest(prompt_of(1), options())))
            while not slow[0].began.is_set():
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            slow[0].go_on.set()
            return turns

    [(steps, seconds, measured)] = asyncio.run(run())
    assert (steps, measured) == (0, False)
    assert seconds > 0.0


@pytest.mark.parametrize("nan", [False, True])
def test_a_turn_that_fails_is_charged(nan):
    model = tiny("llama")

    async def run():
        async with searcher(model, steps=lambda *given: Broken(ModelSteps(*given), nan)) as (made, _):
            turns = charged(made)
            with pytest.raises(DeviceFailed):
                await made.search(BeamRequest(prompt_of(1), options()))
            return turns

    [(steps, seconds, measured)] = asyncio.run(run())
    assert (steps, measured) == (0, False)
    assert seconds > 0.0


def test_who_waits_behind_one_that_waits_for_pages_is_let_in_when_that_one_leaves():
    """What is due keeps back all behind it until there are pages for it."""
    model, slow = tiny("llama"), []
    long, big = options(num_beams=2, max_new_tokens=160, eos_ids=()), options(num_beams=8, max_new_tokens=80)

    async def run():
        def steps(*given):
            slow.append(Slow(ModelSteps(*given)))
            return slow[0]

        async with searcher(model, steps=steps) as (made, _):
            holds = asyncio.create_task(made.search(BeamRequest(prompt_of(1), long, asked=Asked("a"))))
            while not slow[0].began.is_set():
                await asyncio.sleep(0.001)
            waits = asyncio.create_task(made.search(BeamRequest(prompt_of(1), big, asked=Asked("b"))))
            await asyncio.sleep(0)
            [front] = made._room._waiting
            front.ticket.due = made._clock()
            behind = asyncio.create_task(made.search(BeamRequest(prompt_of(1), options(), asked=Asked("c"))))
            await asyncio.sleep(0)
            assert len(made._room._waiting) == 2
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
            assert len(made._held) == 2, "nothing else moved"
            for task in (holds, behind):
                task.cancel()
            slow[0].go_on.set()
            await asyncio.gather(holds, behind, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 60))


class Broken:
    """Steps that fail, or give NaN."""

    def __init__(self, inner, nan):
        self._inner, self._nan = inner, nan

    def submit(self, step):
        if not self._nan:
            raise RuntimeError("boom")
        stepped = self._inner.submit(step)()
        stepped.candidates.log_probs[0] = np.nan
        return lambda: stepped


@pytest.mark.parametrize("nan", [False, True])
def test_a_step_that_fails_fails_its_search_alone(nan):
    model, prompt = tiny("llama"), prompt_of(40)

    async def run():
        async with searcher(model, steps=lambda *given: Broken(ModelSteps(*given), nan)) as (made, batcher):
            with pytest.raises(DeviceFailed, match="NaN" if nan else "RuntimeError"):
                await made.search(BeamRequest(prompt, options()))
            item = Item(np.array([1], np.int32), np.zeros(1, np.int32), np.array([[1, 2]], np.int32))
            scored = await batcher.submit(TokenizedRequest(prompt, (item,)))
            assert scored.scored[0].strategy in Strategy
            assert made._pages._pool.free == BEAM_PAGES

    asyncio.run(run())


def test_more_searches_than_the_limit_are_refused(monkeypatch):
    monkeypatch.setattr("scorer.beam.MAX_SEARCHES", 2)
    model, prompt = tiny("llama"), prompt_of(40)

    async def run():
        async with searcher(model) as (made, _):
            asked = [made.search(BeamRequest(prompt, options())) for _ in range(4)]
            return await asyncio.gather(*asked, return_exceptions=True)

    ended = asyncio.run(run())
    assert [isinstance(end, QueueFull) for end in ended] == [False, False, True, True]


@pytest.mark.parametrize(("beams", "vocabulary", "count"), [(1, 211, 10), (7, 256, 14), (3, 1000, 600), (2, 5, 40)])
def test_top_candidates_are_those_of_a_sort(beams, vocabulary, count):
    rng = np.random.default_rng(vocabulary)
    logits = torch.from_numpy(rng.standard_normal((beams, vocabulary)).astype(np.float32) * 3)
    scores = torch.from_numpy(-rng.random(beams).astype(np.float32) * 5)
    expected = (torch.log_softmax(logits, -1) + scores[:, None]).flatten()
    log_probs, rows, tokens = top_candidates(logits, scores, count)
    found = rows * vocabulary + tokens
    assert len(found) == min(count, beams * vocabulary)
    assert sorted(found.tolist()) == sorted(expected.topk(len(found)).indices.tolist())
    assert torch.allclose(log_probs + scores[rows], expected[found], atol=1e-5)
    assert CHUNK == 128
