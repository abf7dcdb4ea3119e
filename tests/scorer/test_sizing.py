"""What passes take is measured on a few rows; held against what real ones take."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from attention.plans import WINDOWLESS, HeadShape, MaskKey, Strategy
from batching.items import Item
from batching.packing import Group, pack
from batching.select import Threshold
from batching.types import TokenizedRequest
from loadtest.shapes import SIZES
from scorer.chunks import Chunks
from scorer.config import Config
from scorer.errors import ConfigError
from scorer.fused_model import FusedModel
from scorer.live_bytes import LiveBytes, growth, peak_of
from scorer.model import ATTENTION_NAME
from scorer.runtime import Runtime
from scorer.sizing import container_free, fused_growth, needs_of, plain_growth
from scorer.worst_pass import strategies, worst_passes
from tests.models import FAMILIES, engine, tiny
from tests.scorer.test_runtime import config

LABELS = np.array([[7, 11]], np.int32)
LONG, GB = 65_536, 10**9


def test_live_bytes_are_those_of_storages_made_inside_and_still_held():
    before = torch.zeros(1000)
    with LiveBytes() as live:
        made = before + 1
        view = made.view(10, 100)[:2]
        before.add_(1)
        del made
        assert live.now == live.peak == 4000
        joined = torch.cat([view, view])
        assert live.now == live.peak == 5600
        del view
        assert (live.now, live.peak) == (1600, 5600)
        del joined
    assert (live.now, live.peak) == (0, 5600)


def passes(model, prefix, lengths, strategy, normalize=False):
    rng = np.random.default_rng(0)

    def ids(n):
        return rng.integers(1, 200, n).astype(np.int32)

    items = tuple(Item(ids(n), np.array([n - 1], np.int32), LABELS) for n in lengths)
    asked = TokenizedRequest(ids(prefix), items, normalize=normalize)
    batch = pack([Group(asked, tuple(range(len(items))), (strategy,) * len(items))])
    made = engine(model, pages=1)
    return batch, lambda: made.run(batch)


SHAPES = {
    "one long item": (40, [1200]),
    "many": (300, [16] * 60),
    "mixed": (700, [5, 400, 33, 80]),
    "no prefix": (0, [64] * 8),
}


@pytest.mark.parametrize(
    ("family", "shape"), [*((family, "mixed") for family in FAMILIES), *(("gemma2", shape) for shape in SHAPES)]
)
def test_no_pass_takes_more_than_was_foreseen(family, shape):
    model = tiny(family)
    foreseen = plain_growth(model)
    windowed = any(key.window is not None for key in model.mask_keys)
    for strategy in set(Strategy) - (WINDOWLESS if windowed else set()):
        batch, run = passes(model, *SHAPES[shape], strategy, normalize=shape == "many")
        taken, room = peak_of(run), foreseen.bytes(batch.tokens, batch.tokens)
        assert taken <= room, f"{strategy}: {taken:,} of {room:,}"
        assert room < 20 * taken, "a bound that is far off would leave memory unused"


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe", "gpt_neox"])
@pytest.mark.parametrize("chunk", [7, 64, 4096])
def test_growth_bounds_the_modules_at_any_size(family, chunk):
    model = tiny(family)

    def run(rows, chunk_rows):
        ids = np.arange(rows, dtype=np.int32)
        model.chunks.rows = chunk_rows
        model.forward(ids % 200, ids, ids, lambda _, q, k, v, scale, key: q.new_zeros(*q.shape[:2], v.shape[-1]))

    usual = model.chunks.rows
    try:
        found = growth(run, chunk)
        taken = peak_of(lambda: run(500, chunk))
    finally:
        model.chunks.rows = usual
    assert taken <= found.bytes(500, 0) <= 1.3 * taken


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_change_no_hidden_state(family):
    model = tiny(family)
    ids = np.random.default_rng(0).integers(0, 200, 101).astype(np.int32)
    places, reads = np.arange(101, dtype=np.int32), np.arange(101, dtype=np.int32)

    def attend(layer, q, k, v, scale, key):
        return q[..., : v.shape[-1]] * scale

    whole = model.forward(ids, places, reads, attend)
    usual, model.chunks.rows = model.chunks.rows, 10
    try:
        torch.testing.assert_close(model.forward(ids, places, reads, attend), whole, rtol=1e-5, atol=1e-5)
    finally:
        model.chunks.rows = usual


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_hand_fused_path_is_foreseen_too(family):
    model = tiny(family, seed=5)
    fused = FusedModel(model, positions=2000)
    found = fused_growth(model, fused)
    for rows, chunk in ((300, 16_384), (1500, 100)):
        fused.chunk_rows = chunk
        ids = torch.zeros(rows, dtype=torch.int32)
        places = torch.arange(rows, dtype=torch.int32)
        taken = peak_of(lambda: fused.forward(ids, places, places, lambda _, q, k, v: q.new_zeros(q.shape)))  # noqa: B023
        assert taken <= found.bytes(rows, 0)


@pytest.fixture(scope="module")
def eight_billion():
    """Two layers of the 8B shape: tensors without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            SIZES["8B"].config(1024, layers=2), attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16
        )


def test_a_pass_of_64k_tokens_at_8b_takes_less_than_4_gb(eight_billion, monkeypatch):
    """By the hand-fused path, which serves it on a GPU. Its bodies in torch take at least what the kernels do."""
    monkeypatch.setattr("scorer.fused_model._rotary_table", lambda _, p, device: torch.empty(p, 128, device=device))
    shape = HeadShape(32, 8, 128, 128**-0.5, torch.bfloat16)
    decoder = eight_billion.get_decoder()
    fused = FusedModel(
        SimpleNamespace(
            architecture="Qwen3ForCausalLM", mask_keys=(MaskKey(None, 0.0),), head_shape=shape, context_note="",
            hf=eight_billion, decoder=decoder, device=torch.device("meta"),
        ),
        LONG,
    )  # fmt: skip
    ids = torch.zeros(LONG, dtype=torch.int64, device="meta")
    reads = ids[:2048]
    assert peak_of(lambda: fused.forward(ids, ids, reads, lambda _, q, k, v: q.new_empty(q.shape))) <= 4 * GB


def test_chunks_halve_what_the_modules_of_such_a_pass_take(eight_billion):
    decoder = eight_billion.get_decoder()
    ids = torch.zeros(1, LONG, dtype=torch.int64, device="meta")

    def attend(layer, q, k, v, scale, key):
        return q.new_empty(q.shape)

    def run():
        return decoder(input_ids=ids, position_ids=ids, use_cache=False, attend=attend)

    whole = peak_of(run)
    Chunks([layer.self_attn for layer in decoder.layers], decoder)
    assert peak_of(run) <= 4.1 * GB < 0.6 * whole


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_the_worst_passes_are_as_large_as_the_limits_allow(family):
    model = tiny(family)
    policy = Threshold(128, min((key.window for key in model.mask_keys if key.window), default=None))
    batches = worst_passes(640, 1000, strategies(policy))
    assert [batch.tokens for batch in batches] == [1000, 640] * (1 if policy.window else 2)
    for batch in batches:
        reads = engine(model, pages=1).run(batch)
        assert np.isfinite(reads.logits).all()
        assert np.isfinite(reads.lse).all()


def test_needs_count_weights_once_and_kv_of_every_layer():
    model = tiny("qwen3")  # its head is its embedding
    needs = needs_of(Config(), model)
    assert needs.weights == sum(p.nbytes for p in model.hf.parameters())
    assert needs.kv_token == 3 * 2 * 2 * 16 * 4
    assert needs.scratch == (0.0, 0), "the torch attention keeps a pass's own rows where they are"


def test_limits_that_do_not_fit_are_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"--cache-tokens 100000000000 need .* of .* GiB: .*; lower --cache-tokens"):
        Runtime.load(config(tmp_path, cache_tokens=10**11))
    with pytest.raises(ConfigError, match=r"smallest limits need .* take a smaller model"):
        Runtime.load(config(tmp_path, memory_fraction=1e-6))


def test_the_limits_follow_from_what_is_free(tmp_path):
    plenty = Runtime.load(config(tmp_path))
    try:
        memory = plenty.memory
        assert (memory.pass_tokens, memory.context_tokens, memory.cache_tokens) == (1024, 4096, 16_384)
        assert memory.parts["weights"] < memory.total <= memory.budget
        assert plenty.limits.cache_tokens == 16_384
        assert plenty.batcher.cache.pool.pages == 1024
    finally:
        plenty.close()


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 400\ninactive_file 250\n"}, 550),
        ({"memory.max": "max\n", "memory.current": "700\n", "memory.stat": "anon 400\n"}, None),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "1200\n",
                "memory/memory.stat": "total_inactive_file 100\n",
            },
            0,
        ),
        ({}, None),
        ({"memory.max": "1000\n"}, None),
    ],
)
def test_a_container_has_what_its_limit_leaves(tmp_path, files, free):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_free(tmp_path) == free
