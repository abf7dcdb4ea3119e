"""The search for continuations and the step that follows, against torch and `batching.beams`.

Run: pytest -m gpu tests/gpu

Without a GPU the kernels run in Triton's interpreter: TRITON_INTERPRET=1 pytest -m gpu tests/gpu/test_beam_triton.py
"""

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="comes with torch on a GPU machine")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs an NVIDIA GPU"),
]

from attention.decode import Decode  # noqa: E402
from batching.beams import Ancestry, BeamOptions, BeamState, Candidates  # noqa: E402
from scorer.beam_head import BeamHead  # noqa: E402
from scorer.beam_steps import Ahead, BeamStep  # noqa: E402
from scorer.beam_triton import advance  # noqa: E402
from scorer.step_ints import StepInts  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDEST, PAGE = 16, 4
# beams, rows of padding behind them, vocabulary, continuations
SHAPES = [(1, 0, 128, 10), (1, 0, 211, 300), (5, 3, 1000, 40), (3, 0, 2048, 64), (7, 9, 2049, 14), (4, 1, 5, 16)]
if not INTERPRETED:
    SHAPES += [(1, 0, 151_936, 2048), (100, 28, 151_936, 512), (512, 0, 151_936, 2048), (33, 31, 50_257, 256)]


class Given:
    """A model whose hidden states are the logits themselves."""

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary
        self.device = torch.device(DEVICE)

    def every_logit(self, hidden, out):
        return out.copy_(hidden)


def best(logits, scores, count):
    head = BeamHead(Given(logits.shape[1]), len(logits))
    logits, scores = (torch.from_numpy(x).to(DEVICE) for x in (logits, scores))
    head.read(logits, scores)
    found = head.best(scores, count).cpu().numpy()
    return Candidates(found[0].view(np.float32), found[1], found[2]), head


def drawn(beams, padding, vocabulary, seed=0):
    """Rows of padding hold NaN, as memory that nothing wrote may."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((beams + padding, vocabulary)) * 4).astype(np.float32)
    scores = (-5 * rng.random(beams + padding)).astype(np.float32)
    logits[beams:], scores[beams:] = np.nan, -np.inf
    return logits, scores


@pytest.mark.parametrize(("beams", "padding", "vocabulary", "count"), SHAPES)
def test_the_best_continuations_are_those_of_a_sort(beams, padding, vocabulary, count):
    logits, scores = drawn(beams, padding, vocabulary)
    found, head = best(logits, scores, count)
    exact = torch.log_softmax(torch.from_numpy(logits[:beams]).double(), -1).numpy()
    there = found.log_probs > -np.inf
    assert there.sum() == min(count, beams * vocabulary)
    assert there[: there.sum()].all(), "padding comes last"
    rows, tokens = found.beams[there], found.tokens[there]
    np.testing.assert_allclose(found.log_probs[there], exact[rows, tokens], atol=2e-5)
    totals = scores[rows] + found.log_probs[there]
    assert (np.diff(totals) <= 0).all(), "best first, to the last bit"
    expected = np.sort((exact + scores[:beams, None]).ravel())[::-1][: len(totals)]
    np.testing.assert_allclose(totals, expected, atol=2e-5)
    assert len({*zip(rows.tolist(), tokens.tolist(), strict=True)}) == len(rows), "each once"
    asked = (torch.from_numpy(part.astype(np.int64)).to(DEVICE) for part in (rows, tokens))
    assert (head.log_probs(*asked).cpu().numpy() == found.log_probs[there]).all()


def test_impossible_tokens_are_not_chosen():
    logits, scores = drawn(3, 0, 700)
    logits[:, 130:] = -np.inf
    logits[1, 5:] = -np.inf
    found, _ = best(logits, scores, 300)
    there = found.log_probs > -np.inf
    assert there.sum() == 130 + 5 + 130
    exact = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
    np.testing.assert_allclose(found.log_probs[there], exact[found.beams[there], found.tokens[there]], atol=2e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", [slice(200, 201), slice(None)])
def test_what_is_not_a_number_is_seen(bad, where):
    logits, scores = drawn(4, 2, 300)
    logits[2, where] = bad
    found, _ = best(logits, scores, 8)
    assert np.isnan(found.log_probs).any()


def test_a_row_without_any_possible_token_is_not_a_number():
    logits, scores = drawn(4, 2, 300)
    logits[2] = -np.inf
    found, _ = best(logits, scores, 8)
    assert np.isnan(found.log_probs).any()


@pytest.mark.parametrize("seed", range(6))
def test_the_next_step_is_the_one_that_the_host_would_submit(seed):
    """Steps of random continuations, some impossible, so that now and then fewer beams go on than may."""
    rng = np.random.default_rng(seed)
    width, prompt = int(rng.integers(2, 12)), int(rng.integers(0, 30))
    eos = tuple(range(int(rng.integers(0, 4))))
    state, ancestry = BeamState(BeamOptions(width, 8, eos_ids=eos)), Ancestry(width)
    places = StepInts(WIDEST, 200, PAGE)
    pages = rng.permutation(60)[: 1 + width * 8 // PAGE].astype(np.int32)
    ahead = Ahead(width, state.options.candidates, eos, pages)
    slots = np.arange(prompt, dtype=np.int32)
    on_device, following = torch.zeros(2, places.size, dtype=torch.int32, device=DEVICE)

    def submitted():
        history = (pages[ancestry.slots // PAGE] * PAGE + ancestry.slots % PAGE).astype(np.int32)
        decode = Decode(PAGE, np.arange(8, dtype=np.int32), prompt, history)
        tokens = state.tokens[:, -1] if state.length else np.array([3], np.int32)
        ints = np.zeros(places.size, np.int32)
        used = places.fill(BeamStep(tokens, state.scores, decode, ahead.count, ahead=ahead), slots, ints)
        return ints, used

    ints, _ = submitted()
    on_device.copy_(torch.from_numpy(ints))
    for _ in range(5):
        n = len(state.scores)
        total = 4 * WIDEST
        found = Candidates(
            np.sort(-rng.random(total).astype(np.float32))[::-1].copy(),
            rng.integers(0, n, total).astype(np.int32),
            rng.integers(0, 12, total).astype(np.int32),
        )
        found.log_probs[rng.random(total) < 0.5] = -np.inf
        found = found.take(np.argsort(-(state.scores[found.beams] + found.log_probs), kind="stable"))
        packed = torch.from_numpy(np.stack([found.log_probs.view(np.int32), found.beams, found.tokens])).to(DEVICE)
        own = ancestry.steps
        step, then = on_device[places.begin :], following[places.begin :]
        advance(packed, on_device, step, then, own, WIDEST, PAGE)
        step.copy_(then)
        parents = state.advance(found)
        if state.done:
            break
        ancestry.fork(parents)
        expected, used = submitted()
        got = on_device.cpu().numpy()
        n = len(state.scores)
        for name in ("ids", "positions"):
            at = slice(places.row(name), places.row(name) + n)
            assert (got[at] == expected[at]).all(), name
        rest = slice(places.row("scores"), used)
        assert (got[rest] == expected[rest]).all(), "scores to the last bit, padding, and history"
        assert (got[places.begin : places.begin + 4] == expected[places.begin : places.begin + 4]).all()
