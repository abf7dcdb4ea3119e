"""The fused kernel and the hand-fused path on a GPU. Run: pytest -m gpu tests/gpu"""

from functools import cache

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="comes with torch on a GPU machine")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

from attention.factory import make  # noqa: E402
from attention.fused_launch import FusedLaunch  # noqa: E402
from attention.kv_pages import KvPages  # noqa: E402
from attention.layout import Layout, Segment  # noqa: E402
from attention.mask import visible  # noqa: E402
from attention.planner import plan  # noqa: E402
from attention.plans import HeadShape, Pages, Strategy  # noqa: E402
from attention.residency import Residency  # noqa: E402
from batching.items import Item  # noqa: E402
from batching.packing import Group, pack, unpack  # noqa: E402
from batching.types import TokenizedRequest  # noqa: E402
from loadtest.shapes import LABELS, SIZES, random_model  # noqa: E402
from scorer.engine import Engine  # noqa: E402
from scorer.fast_path import FastPath, Mode  # noqa: E402

RELATIVE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
LAYOUTS = {
    "one item": [Segment(-1, 100), Segment(0, 20)],
    "one-token items": [Segment(-1, 33), *[Segment(0, 1)] * 50],
    "no prefix": [Segment(-1, n) for n in (5, 70, 1, 64)],
    "several groups": [Segment(-1, 40), *[Segment(0, 9)] * 5, Segment(-1, 130), *[Segment(6, n) for n in (300, 2, 64)]],
    "cached": [Segment(-1, 200, 200), *[Segment(0, n) for n in (7, 65, 31)]],
    "partly cached": [Segment(-1, 200, 100), *[Segment(0, n) for n in (7, 65, 31)]],
    "split": [Segment(-1, 3000, 3000), *[Segment(0, 4)] * 8],
    "deep": [Segment(-1, 50), Segment(0, 30), *[Segment(1, 12)] * 4, *[Segment(0, 9)] * 3],
}
# (dtype, heads, kv_heads, head_dim): each compiles kernels of its own
SHAPES = [
    *((torch.bfloat16, *heads, 128) for heads in ((8, 8), (16, 8), (32, 8), (32, 4), (14, 2))),
    *((torch.bfloat16, 16, 8, head_dim) for head_dim in (64, 256)),
    (torch.float16, 16, 8, 128),
]


def upload(array):
    return torch.from_numpy(np.ascontiguousarray(array)).cuda().ravel()


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_against_float32_on_every_token(name, dtype, heads, kv_heads, head_dim):
    layout = Layout.of(LAYOUTS[name])
    rng = np.random.default_rng(0)
    needed = [-(-int(n) // 16) if c else 0 for n, c in zip(layout.length, layout.cached, strict=True)]
    ids, used, kept = rng.permutation(sum(needed)).astype(np.int32), 0, []
    for count in needed:
        kept.append(ids[used : used + count] if count else None)
        used += count
    pages = Pages(16, max(1, len(ids)), tuple(kept))
    planned = plan(layout, [Strategy.FUSED] * len(layout.leaves), pages)
    found = Residency.of(layout, pages, planned)
    shape = HeadShape(heads, kv_heads, head_dim, head_dim**-0.5, dtype)
    launch = FusedLaunch.of(planned.launches[0], layout.rows, found.place, found.cached_slots, shape, upload)
    assert name != "split" or launch.parts > 0
    torch.manual_seed(0)
    make = {"dtype": dtype, "device": "cuda"}
    qkv = torch.randn(layout.rows, heads + 2 * kv_heads, head_dim, **make)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    held = [torch.full((pages.first_scratch * 16, kv_heads, head_dim), torch.nan, **make) for _ in range(2)]
    slots = torch.from_numpy(found.cached_slots).long().cuda()
    for cache_ in held:
        cache_[slots] = torch.randn(len(slots), kv_heads, head_dim, **make)
    out = torch.full((layout.rows, heads, head_dim), torch.nan, **make)
    launch.run(q, k, v, (held[0], held[1]), out)
    place = torch.from_numpy(found.place).long().cuda()
    keys, values = (torch.cat([old[slots], new])[place].float() for old, new in zip(held, (k, v), strict=True))
    seen = torch.from_numpy(visible(layout)).cuda()
    group = heads // kv_heads
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys.repeat_interleave(group, 1)) * shape.scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))
    error = (out.float() - expected).norm() / expected.norm()
    assert error < RELATIVE[dtype]


@cache
def path(mode=Mode(), pass_tokens=2048):  # noqa: B008 - frozen
    made = FastPath(model(), KvPages(1024, 64 if mode.invariant else 16), 512, 8192, pass_tokens, mode)
    made.capture(paged=True)
    return made


@cache
def model():
    return random_model(SIZES["0.6B"], layers=6)


def request(prefix, lengths, seed=0, **kwargs):
    rng = np.random.default_rng(seed)

    def ids(n):
        return rng.integers(0, 150_000, n).astype(np.int32)

    items = tuple(Item(ids(n), np.array([n - 1], np.int32), LABELS) for n in lengths)
    return TokenizedRequest(ids(prefix), items, **kwargs)


def group(asked, cached=0, pages=None, items=None):
    chosen = tuple(range(len(asked.items))) if items is None else items
    return Group(asked, chosen, (Strategy.FUSED,) * len(chosen), cached, pages)


def scores(made, *groups, page_size=16):
    scored = unpack(batch := pack(list(groups), page_size), made.submit(batch, page_size)())
    return [np.array([one.logits[0] for one in scored[n]]) for n in range(len(groups))]


def log_odds(logits):
    return logits[:, 0] - logits[:, 1]


def alone(asked):
    odds = []
    for item in asked.items:
        logits = model().alone(np.concatenate([asked.prefix, item.ids]), 1)[0].float()
        odds.append(float(logits[LABELS[0, 0]] - logits[LABELS[0, 1]]))
    return np.array(odds)


# bf16 keeps 8 bits: six layers move a log-odds by a hundredth or two.
TOLERANCE = 0.05


def test_packed_equals_transformers_alone():
    asked = [request(100, [5, 33, 64, 1, 128], 1), request(512, [64] * 8, 2), request(17, [9] * 3, 3)]
    for found, one in zip(scores(path(), *map(group, asked)), asked, strict=True):
        np.testing.assert_allclose(log_odds(found), alone(one), atol=TOLERANCE)


def test_a_pass_beyond_every_graph_runs_without_one():
    asked = request(1500, [64] * 20, 5)
    np.testing.assert_allclose(log_odds(scores(path(), group(asked))[0]), alone(asked), atol=TOLERANCE)


@pytest.mark.parametrize("cached", [16, 112, 500, 512])
def test_a_kept_prefix_is_read_again(cached):
    asked, other = request(512, [64] * 6, 7), request(90, [30] * 4, 8)
    pages = np.random.default_rng(1).permutation(512)[:32].astype(np.int32)
    whole, _ = scores(path(), group(asked, 0, pages), group(other))
    again, _ = scores(path(), group(asked, cached, pages), group(other))
    np.testing.assert_allclose(log_odds(again), log_odds(whole), atol=TOLERANCE)


def test_query_likelihood_and_the_whole_vocabulary():
    rng = np.random.default_rng(2)
    items = []
    for n in (20, 33):
        ids = rng.integers(0, 150_000, n).astype(np.int32)
        reads = np.arange(n - 9, n - 1, dtype=np.int32)
        items.append(Item(ids, reads, ids[reads + 1][:, None]))
    asked = TokenizedRequest(rng.integers(0, 150_000, 64).astype(np.int32), tuple(items), normalize=True)
    scored = unpack(batch := pack([group(asked)], 16), path().submit(batch, 16)())
    for number, item in enumerate(items):
        logits = model().alone(np.concatenate([asked.prefix, item.ids]), len(item.ids))[item.read_offsets].float()
        target = torch.from_numpy(item.read_ids).long().cuda()
        np.testing.assert_allclose(scored[0][number].logits, logits.gather(1, target).cpu().numpy(), atol=TOLERANCE)
        np.testing.assert_allclose(scored[0][number].lse, logits.logsumexp(-1).cpu().numpy(), atol=TOLERANCE)


def test_the_same_document_has_the_same_bits_in_a_thousand_mixes():
    made = path(Mode(invariant=True), 1024)
    mine = request(150, [40, 70, 3], 11)
    pages = np.arange(3, dtype=np.int32)
    reference = scores(made, group(mine, 0, pages), page_size=64)[0]
    rng = np.random.default_rng(3)
    for n in range(1000):
        others = [
            group(request(int(rng.integers(1, 120)), rng.integers(1, 60, rng.integers(1, 5)).tolist(), 100 + n + i))
            for i in range(int(rng.integers(0, 3)))
        ]
        cached = int(rng.choice([0, 64, 128, 150]))
        order = rng.permutation(3).tolist()
        own = group(mine, cached, pages, tuple(order))
        place = int(rng.integers(0, len(others) + 1))
        found = scores(made, *others[:place], own, *others[place:], page_size=64)[place]
        np.testing.assert_array_equal(found, reference[order], err_msg=f"mix {n}, cached {cached}")


def spearman(a, b):
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def test_fp8_keeps_the_order():
    asked = request(256, [48] * 30, 13)
    plain = log_odds(scores(path(), group(asked))[0])
    rough = log_odds(scores(path(Mode(fp8=True)), group(asked))[0])
    assert spearman(plain, rough) >= 0.95
    assert len(set(rough.tolist())) >= 20


@pytest.mark.parametrize("size", ["0.6B", "4B"])
def test_fp8_keeps_the_order_of_whole_models(size):
    whole, asked = random_model(SIZES[size]), [request(256, [48] * 30, seed) for seed in (13, 14, 15)]
    found = []
    for fp8 in (False, True):  # plain first: both are made of the model's own weights
        made = FastPath(whole, KvPages(1, 16), 0, 8192, 2048, Mode(fp8=fp8))
        found.append([log_odds(scores(made, group(one))[0]) for one in asked])
    told = [(spearman(plain, rough), len(set(rough.tolist()))) for plain, rough in zip(*found, strict=True)]
    print(f"{size}: rank correlation of FP8 and bf16, distinct values of 30: {told}")
    assert min(correlation for correlation, _ in told) >= 0.95
    assert min(distinct for _, distinct in told) >= 20


def test_nan_of_one_item_spoils_neither_its_neighbours_nor_later_passes():
    made, bad = path(), 149_999
    engine = Engine(model(), make("torch", KvPages(1024, 16)), 16, 512, fast=made)
    pages = np.arange(8, dtype=np.int32)
    asked, poisoned = request(128, [40] * 6, 17), request(128, [40] * 6, 17)
    poisoned.items[2].ids[5] = bad
    clean = log_odds(engine.run(pack([group(asked, 0, pages)], 16)).logits.reshape(-1, 2))
    row = made._fused._embed.weight.data[bad].clone()
    try:
        made._fused._embed.weight.data[bad] = torch.nan
        spoilt = log_odds(engine.run(pack([group(poisoned, 0, pages)], 16)).logits.reshape(-1, 2))
    finally:
        made._fused._embed.weight.data[bad] = row
    assert np.isnan(spoilt).tolist() == [False, False, True, False, False, False]
    others = [0, 1, 3, 4, 5]
    np.testing.assert_allclose(spoilt[others], clean[others], atol=TOLERANCE)
    for copies in made._cached:  # the last block of a tile reads past its own keys: what lies there must be finite
        assert torch.isfinite(copies).all()
    after = log_odds(engine.run(pack([group(asked, 128, pages)], 16)).logits.reshape(-1, 2))
    np.testing.assert_allclose(after, clean, atol=TOLERANCE)
