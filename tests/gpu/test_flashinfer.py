"""Every strategy on FlashInfer's kernels against float32, token by token. Run on a GPU: pytest -m gpu tests/gpu"""

from functools import cache

import numpy as np
import pytest
import torch

pytest.importorskip("flashinfer", reason="needs the gpu extra: pip install 'prefixrank[gpu]'")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

from attention.flashinfer_backend import FlashInferAttention, Kernel  # noqa: E402
from attention.kv_pages import KvPages  # noqa: E402
from attention.layout import Layout, Segment, unshared  # noqa: E402
from attention.planner import plan  # noqa: E402
from attention.plans import ITEM_LIMITED, HeadShape, MaskKey, MaskKind, Pages, Strategy  # noqa: E402
from attention.torch_backend import TorchAttention  # noqa: E402

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
PAGE, SCRATCH = 16, 4096
KEY = MaskKey()

SHAPES = {
    "one item": [Segment(-1, 100), Segment(0, 40)],
    "one-token items": [Segment(-1, 96), *[Segment(0, 1)] * 30],
    "many short": [Segment(-1, 515), *[Segment(0, 4 + i % 9) for i in range(70)]],
    "mixed": [Segment(-1, 33), *[Segment(0, n) for n in (1, 16, 17, 130, 300, 5)]],
    "long items": [Segment(-1, 70), *[Segment(0, 256 + i) for i in range(5)]],
    "cached": [Segment(-1, 200, cached=200), *[Segment(0, 7 + i) for i in range(20)]],
    "partly cached": [Segment(-1, 200, cached=77), *[Segment(0, 20)] * 9],
    "several": [
        Segment(-1, 70), Segment(0, 9), Segment(0, 33), Segment(-1, 5), Segment(3, 64), Segment(-1, 3),
        Segment(-1, 129, cached=129), Segment(6, 8), Segment(6, 2),
    ],
    "deep": [Segment(-1, 37, cached=37), Segment(0, 21), Segment(0, 50), Segment(1, 9), Segment(1, 3), Segment(2, 17)],
}  # fmt: skip


def pages_for(layout, rng):
    """Shuffled kept pages for every inner segment."""
    size = [
        -(-int(layout.start[s] + layout.length[s]) // PAGE) - int(layout.start[s]) // PAGE
        for s in range(layout.segments)
    ]
    ids = rng.permutation(512).astype(np.int32)
    kept, used = [], 0
    for s in range(layout.segments):
        kept.append(None if layout.is_leaf[s] else ids[used : used + size[s]])
        used += 0 if layout.is_leaf[s] else size[s]
    return Pages(PAGE, 512, tuple(kept))


def fill(held, layout, pages, rng, dtype, poison):
    """Cached tokens in their kept pages, everything else poisoned."""
    heads = held["shape"][1]
    k = torch.full((512 + SCRATCH, PAGE, heads, held["shape"][2]), poison, dtype=dtype, device="cuda")
    v = k.clone()
    for s in np.flatnonzero(layout.cached):
        offset = int(layout.start[s]) % PAGE
        assert offset == 0 or layout.parent[s] < 0, "only roots are cached here"
        slots = (pages.kept[s][:, None] * PAGE + np.arange(PAGE)).ravel()[: layout.cached[s]]
        for pages_of in (k, v):
            rows = torch.from_numpy(rng.standard_normal((len(slots), heads, held["shape"][2]))).to("cuda", dtype)
            pages_of.view(-1, heads, held["shape"][2])[torch.from_numpy(slots).cuda()] = rows
    return k, v


@cache
def attentions(made, kernel):
    """One for each shape and kernel: workspaces and pinned memory take longer to make than a test."""
    pool = KvPages(512 + SCRATCH, PAGE)
    return pool, FlashInferAttention(
        pool, made, choose=lambda launch, _: Kernel.FA2 if launch.mask is MaskKind.CUSTOM else kernel
    )


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", Kernel)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("strategy", Strategy)
def test_every_token_is_close_to_float32(strategy, dtype, kernel, shape, group):
    check_every_token(strategy, dtype, kernel, shape, group, 128)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", Kernel)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("strategy", Strategy)
def test_every_token_is_close_to_float32_with_heads_of_64(strategy, dtype, kernel, shape):
    """As in the embedded model, which has three query heads a KV head."""
    check_every_token(strategy, dtype, kernel, shape, 3, 64)


def check_every_token(strategy, dtype, kernel, shape, group, dim):
    rng = np.random.default_rng(0)
    layout = Layout.of(SHAPES[shape])
    if strategy is Strategy.NAIVE:
        if layout.cached.any():
            pytest.skip("naive caches nothing")
        layout, _ = unshared(layout)
    kv_heads = 2
    heads = kv_heads * group
    made = HeadShape(heads, kv_heads, dim, dim**-0.5, dtype)
    pages = Pages(PAGE, 512, (None,) * layout.segments) if strategy is Strategy.NAIVE else pages_for(layout, rng)
    # fa2's multi-item kernel prefetches past the last key. What it finds there is masked, but 0 x NaN is NaN: so the
    # poison is finite for it, and the engine keeps NaN out of scratch pages.
    poison = 3e4 if kernel is Kernel.FA2 and strategy in ITEM_LIMITED else torch.nan
    k_cache, v_cache = fill({"shape": (0, kv_heads, dim)}, layout, pages, rng, dtype, poison)
    q, k, v = (
        torch.from_numpy(rng.standard_normal((layout.rows, n, dim))).to("cuda", dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    pool, attention = attentions(made, kernel)
    oracle_pool = KvPages(512 + SCRATCH, PAGE)
    pool._layers[0] = (k_cache, v_cache)
    oracle_pool._layers[0] = (k_cache.float(), v_cache.float())
    strategies = [strategy] * len(layout.leaves)
    planned = plan(layout, strategies, pages)
    got = attention.begin(layout, pages, {KEY: planned})(0, q, k, v, made.scale, KEY)
    reference = plan(layout, [Strategy.DIRECT_RAGGED] * len(layout.leaves), pages)
    want = TorchAttention(oracle_pool).begin(layout, pages, {KEY: reference})(
        0, q.float(), k.float(), v.float(), made.scale, KEY
    )
    error = (got.float() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    assert float(error.max()) <= TOLERANCE[dtype], f"worst token {int(error.argmax())}: {float(error.max()):.2e}"


@pytest.mark.parametrize("strategy", [s for s in Strategy if s is not Strategy.NAIVE])
def test_what_is_kept_serves_the_next_pass(strategy):
    rng = np.random.default_rng(1)
    dtype, dim = torch.bfloat16, 128
    made = HeadShape(4, 2, dim, dim**-0.5, dtype)
    attention = FlashInferAttention(KvPages(512 + SCRATCH, PAGE), made)
    whole = Layout.of([Segment(-1, 77), Segment(0, 9), Segment(0, 30)])
    tensors = [torch.from_numpy(rng.standard_normal((whole.rows, n, dim))).to("cuda", dtype) for n in (4, 2, 2)]
    kept = np.array([7, 3, 11, 400, 25], np.int32)
    want = run(attention, whole, (None, None, None), strategy, tensors, 0)
    first = Layout.of([Segment(-1, 77), Segment(0, 9)])
    a = run(attention, first, (kept, None), strategy, [t[:86] for t in tensors], 512)
    second = Layout.of([Segment(-1, 77, cached=77), Segment(0, 30)])
    b = run(attention, second, (kept, None), strategy, [t[86:] for t in tensors], 512)
    assert float((torch.cat([a, b]).float() - want.float()).abs().max()) < 3e-2


def run(attention, layout, kept, strategy, tensors, first_scratch):
    pages = Pages(PAGE, first_scratch, kept)
    planned = plan(layout, [strategy] * len(layout.leaves), pages)
    return attention.begin(layout, pages, {KEY: planned})(0, *tensors, 128**-0.5, KEY)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dtype": torch.float32}, "torch backend"), ({"head_dim": 80}, "head_dim")],
)
def test_what_has_no_kernel_is_refused(change, message):
    shape = HeadShape(4, 2, 128, 128**-0.5, torch.bfloat16)._replace(**change)
    with pytest.raises(ValueError, match=message):
        FlashInferAttention(KvPages(8, PAGE), shape)
