"""A whole model on FlashInfer in bf16 against transformers one document at a time. Run: pytest -m gpu tests/gpu"""

from functools import cache

import numpy as np
import pytest
import torch

pytest.importorskip("flashinfer", reason="needs the gpu extra: pip install 'prefixrank[gpu]'")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

from transformers import AutoModelForCausalLM, Qwen3Config  # noqa: E402

from attention.factory import make  # noqa: E402
from attention.kv_pages import KvPages  # noqa: E402
from attention.plans import Strategy  # noqa: E402
from batching.items import Item  # noqa: E402
from batching.packing import Group, pack, unpack  # noqa: E402
from batching.types import TokenizedRequest  # noqa: E402
from scorer.engine import Engine  # noqa: E402
from scorer.model import ATTENTION_NAME, ScoringModel  # noqa: E402
from scorer.selfcheck import alone, packed  # noqa: E402

KEPT = 256
# bf16 keeps 8 bits: over 28 layers the order of sums moves a log-odds by a few hundredths (0.02-0.03 is typical).
TOLERANCE = 0.12
LABELS = np.array([[9693, 2152]], np.int32)


@cache
def engine():
    """Qwen3-0.6B's shape with seeded random weights."""
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16)
    scoring = ScoringModel(model, "random")
    return Engine(scoring, make("flashinfer", KvPages(8192, 16), scoring.head_shape), 16, KEPT)


def request(prefix, lengths):
    rng = np.random.default_rng(0)

    def ids(n):
        return rng.integers(0, 150_000, n).astype(np.int32)

    return TokenizedRequest(ids(prefix), tuple(Item(ids(n), np.array([n - 1], np.int32), LABELS) for n in lengths))


@cache
def case(name):
    lengths = {"short": [8 + i % 30 for i in range(40)], "mixed": [5 + 13 * i for i in range(24)]}[name]
    asked = request(517, lengths)
    return asked, log_odds([alone(engine().model, asked, item) for item in asked.items])


def log_odds(scored):
    return np.array([float(s.logits[0, 0] - s.logits[0, 1]) for s in scored])


@pytest.mark.parametrize("name", ["short", "mixed"])
@pytest.mark.parametrize("strategy", Strategy)
def test_packed_equals_alone_in_bf16(strategy, name):
    asked, expected = case(name)
    got = log_odds(packed(engine(), asked, strategy))
    print(f"{strategy} {name}: largest difference {np.abs(got - expected).max():.4f}, spread {expected.std():.3f}")
    assert np.abs(got - expected).max() <= TOLERANCE
    assert len(set(np.argsort(-got)[:10]) & set(np.argsort(-expected)[:10])) >= 8


@pytest.mark.parametrize("strategy", [s for s in Strategy if s is not Strategy.NAIVE])
def test_a_second_pass_over_kept_pages(strategy):
    asked, expected = case("mixed")
    pages = np.random.default_rng(1).permutation(KEPT)[: -(-517 // 16)].astype(np.int32)
    halves = [tuple(range(12)), tuple(range(12, 24))]
    got = []
    for cached, items in zip((0, 517), halves, strict=True):
        batch = pack([Group(asked, items, (strategy,) * 12, cached, pages)])
        got += unpack(batch, engine().run(batch))[0]
    assert np.abs(log_odds(got) - expected).max() <= TOLERANCE


def test_several_requests_in_one_pass():
    asked, expected = case("mixed")
    other = request(64, [30, 4])
    groups = [
        Group(other, (0, 1), (Strategy.MULTI_ITEM,) * 2),
        Group(asked, tuple(range(24)), (Strategy.CASCADE_CONTIGUOUS,) * 24),
        Group(asked, (0, 1), (Strategy.NAIVE,) * 2),
    ]
    batch = pack(groups)
    scored = unpack(batch, engine().run(batch))
    assert np.abs(log_odds([scored[1][i] for i in range(24)]) - expected).max() <= TOLERANCE
    assert np.abs(log_odds([scored[2][i] for i in range(2)]) - expected[:2]).max() <= TOLERANCE


def test_nan_in_one_document_costs_no_other_its_score():
    asked, expected = case("short")
    bad = Item(np.array([3, 151_000, 4], np.int32), np.array([2], np.int32), LABELS)
    poisoned = TokenizedRequest(asked.prefix, (bad, *asked.items))
    weight = engine().model.hf.get_input_embeddings().weight
    kept = weight[151_000].clone()
    weight[151_000] = float("nan")
    try:
        got = log_odds(packed(engine(), poisoned, Strategy.MULTI_ITEM))
    finally:
        weight[151_000] = kept
    assert np.isnan(got[0])
    assert np.abs(got[1:] - expected).max() <= TOLERANCE
    assert np.abs(log_odds(packed(engine(), asked, Strategy.MULTI_ITEM)) - expected).max() <= TOLERANCE
