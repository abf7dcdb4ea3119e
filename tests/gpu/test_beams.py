"""Beam steps by the hand-fused layers and CUDA graphs. Run: pytest -m gpu tests/gpu

Without a GPU the kernels run in Triton's interpreter, without graphs: TRITON_INTERPRET=1 pytest -m gpu
tests/gpu/test_beams.py
"""

import asyncio
import os
from functools import cache, partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="comes with torch on a GPU machine")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs an NVIDIA GPU"),
]

from attention.decode import Decode, DecodeStrategy  # noqa: E402
from attention.decode_kernel import DecodeBlocks  # noqa: E402
from attention.factory import make  # noqa: E402
from attention.kv_pages import KvPages  # noqa: E402
from batching.batcher import Batcher, BatcherLimits  # noqa: E402
from batching.beams import BeamOptions  # noqa: E402
from batching.page_pool import PagePool  # noqa: E402
from batching.prefix_cache import PrefixCache  # noqa: E402
from batching.select import Replayed  # noqa: E402
from batching.trie import Trie  # noqa: E402
from loadtest.shapes import SIZES, random_model  # noqa: E402
from scorer.beam import BeamSearcher  # noqa: E402
from scorer.beam_pages import BeamPages  # noqa: E402
from scorer.beam_run import BeamRequest  # noqa: E402
from scorer.beam_steps import BeamStep, ModelSteps  # noqa: E402
from scorer.engine import Engine  # noqa: E402
from scorer.fast_beams import FastBeams  # noqa: E402
from scorer.fast_path import FastPath  # noqa: E402
from scorer.fused_model import FusedModel  # noqa: E402
from tests.models import tiny  # noqa: E402
from tests.scorer.test_beam import agree, by_transformers, prompt_of, searcher  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BLOCKS = DecodeBlocks() if GPU else DecodeBlocks(rows=16, keys=16, dot_keys=16, whole_keys=16)
PAGE = 16
# bf16 keeps 8 bits, and random weights leave all tokens about as probable: log-probabilities differ by hundredths.
TOLERANCE = 0.05 if GPU else 1e-4


@cache
def model():
    return random_model(SIZES["0.6B"], layers=4) if GPU else tiny("qwen3")


@cache
def fused():
    return FusedModel(model(), 4096)


def made(pages, strategy=DecodeStrategy.CASCADE_DECODE, kind=FastBeams):
    steps = kind(model(), fused(), pages, 2048, 8192, lambda _: strategy, BLOCKS, tma=GPU)
    if GPU:
        steps.capture()
    return steps


def step_of(beams, own, prompt, consecutive, rng, **wanted):
    pages = -(-prompt // PAGE)
    table = np.arange(pages) if consecutive else rng.permutation(pages)
    history = (pages + 1) * PAGE + rng.permutation(beams * own).reshape(beams, own)
    decode = Decode(PAGE, table.astype(np.int32), prompt, history.astype(np.int32))
    tokens = rng.integers(12, 200, beams).astype(np.int32)
    return BeamStep(tokens, -rng.random(beams).astype(np.float32), decode, **({"count": 2 * beams} | wanted))


def filled(pages, step):
    """K/V of everything that the step reads, as some earlier pass might have left it."""
    shape = (1, fused().kv_heads, fused().head_dim)
    for layer in range(fused().layers):
        k, v = pages.layer(layer, *torch.zeros(2, *shape, dtype=fused().dtype, device=DEVICE))
        k.normal_()
        v.normal_()


CASES = [(1, 1, 0, True), (1, 1, 50, True), (5, 3, 33, False), (20, 2, 64, True)]
if GPU:
    CASES += [(33, 9, 1000, False), (128, 16, 1024, True), (512, 3, 1024, True), (300, 20, 100, False)]


@pytest.mark.parametrize("strategy", DecodeStrategy)
@pytest.mark.parametrize(("beams", "own", "prompt", "consecutive"), CASES)
def test_a_step_is_that_of_the_models_modules(beams, own, prompt, consecutive, strategy):
    rng = np.random.default_rng(beams)
    step = step_of(beams, own, prompt, consecutive, rng)
    pages = KvPages(2 + -(-prompt // PAGE) + -(-beams * own // PAGE), PAGE)
    filled(pages, step)
    everything = np.arange(model().vocabulary, dtype=np.int32)
    pairs = (np.repeat(np.arange(beams, dtype=np.int32), len(everything)), np.tile(everything, beams))
    plain = ModelSteps(model(), pages).submit(BeamStep(step.tokens, step.scores, step.decode, 0, pairs))()
    expected = plain.candidates.log_probs.reshape(beams, -1)
    steps = made(pages, strategy)
    found = steps.submit(step)().candidates
    assert len(found.tokens) == min(step.count, beams * len(everything))
    np.testing.assert_allclose(found.log_probs, expected[found.beams, found.tokens], atol=TOLERANCE)
    totals = np.sort((expected + step.scores[:, None]).ravel())[::-1][: len(found.tokens)]
    np.testing.assert_allclose(np.sort(step.scores[found.beams] + found.log_probs)[::-1], totals, atol=TOLERANCE)
    some = rng.integers(0, len(pairs[0]), 50)
    asked = BeamStep(step.tokens, step.scores, step.decode, 0, (pairs[0][some], pairs[1][some]))
    np.testing.assert_allclose(steps.submit(asked)().candidates.log_probs, expected.ravel()[some], atol=TOLERANCE)


def search(request, steps, beam_pages=40):
    """In one turn."""

    async def run():
        async with searcher(model(), steps=lambda _, pages: steps(pages), beam_pages=beam_pages) as (s, _):
            s._idle_turn_seconds = 1000.0
            return await s.search(request)

    return asyncio.run(run())


class Submitting:
    """Every step is submitted: none follows on the device."""

    def __init__(self, pages, strategy=DecodeStrategy.CASCADE_DECODE):
        self.submit = made(pages, strategy).submit


class Counting(FastBeams):
    followed = 0

    def follow(self):
        self.followed += 1
        return super().follow()


def plain(pages):
    return ModelSteps(model(), pages)


@pytest.mark.parametrize("constrained", [False, True])
def test_a_whole_search(constrained):
    """On a CPU it finds what transformers finds; on a GPU, in bf16 and over random weights, as good sequences as the
    model's own modules do."""
    prompt = prompt_of(40)
    asked = BeamOptions(6, 5, eos_ids=(7, 11))
    sequences = {tuple(row) for row in np.random.default_rng(1).integers(20, 60, (300, 3)).tolist()}
    trie = Trie.of(sorted(sequences)) if constrained else None
    found = search(BeamRequest(prompt, asked, trie), made).hypotheses
    if not GPU:
        agree(found, by_transformers(model(), prompt, asked, sequences if constrained else None))
        return
    others = search(BeamRequest(prompt, asked, trie), plain).hypotheses
    assert len(found) == len(others)
    np.testing.assert_allclose([h.score for h in found], [h.score for h in others], atol=TOLERANCE)


# beams, new tokens, eos ids: those of one graph, of more than a graph looks for, of other graphs
FOLLOWED = [(5, 6, (7, 11)), (4, 4, tuple(range(20, 30))), (1, 5, ())]
if GPU:
    FOLLOWED += [(128, 16, (7,)), (100, 8, (7, 8, 9)), (300, 3, ())]


@pytest.mark.parametrize("strategy", DecodeStrategy)
@pytest.mark.parametrize(("beams", "new", "eos"), FOLLOWED)
def test_steps_that_follow_on_the_device_are_those_that_the_host_submits(beams, new, eos, strategy):
    request = BeamRequest(prompt_of(40), BeamOptions(beams, new, eos_ids=eos))
    kept = []

    def counting(pages):
        kept.append(made(pages, strategy, Counting))
        return kept[0]

    room = 2 + beams * new // PAGE
    followed, submitted = search(request, counting, room), search(request, partial(Submitting, strategy=strategy), room)
    assert kept[0].followed >= followed.steps - 1
    assert [h.tokens for h in followed.hypotheses] == [h.tokens for h in submitted.hypotheses]
    assert [h.score for h in followed.hypotheses] == [h.score for h in submitted.hypotheses]


@pytest.mark.skipif(not GPU, reason="a pass that runs beside the host needs an NVIDIA GPU")
@pytest.mark.parametrize("beams", [4, 128])
def test_steps_behind_a_prompts_pass_find_its_keys(beams):
    """As those find that begin when it has ended. The cache holds one prompt, so pages hold others' keys before."""
    kept, room = 70, 2 + beams * 4 // PAGE
    pages = KvPages(kept + room, PAGE)
    fast = FastPath(model(), pages, kept + room, 4096, 1024, fused=fused())
    fast.capture(paged=True)
    engine = Engine(model(), make("torch", pages), PAGE, kept + room, fast=fast)
    steps = made(pages)

    async def run():
        batcher = Batcher(
            engine.execute, BatcherLimits(1024, 64, 1 << 20), Replayed(), PrefixCache(PagePool(kept), PAGE)
        )
        searching = BeamSearcher(batcher, engine, steps, BeamPages(kept, room, PAGE))
        for seed, length in enumerate((1000, 300, 1024, 900, 17, 1024)):
            request = BeamRequest(prompt_of(length, seed), BeamOptions(beams, 4, eos_ids=(7,)))
            new, cached = await searching.search(request), await searching.search(request)
            assert (new.cached_prefix_tokens, cached.cached_prefix_tokens) == (0, length - 1)
            assert [h.tokens for h in new.hypotheses] == [h.tokens for h in cached.hypotheses]
            assert [h.score for h in new.hypotheses] == [h.score for h in cached.hypotheses]
        await batcher.drain()

    asyncio.run(run())
    engine.close()
