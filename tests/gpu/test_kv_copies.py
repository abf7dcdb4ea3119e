"""Kept pages between a GPU and pinned host memory, beside passes that run. Run: pytest -m gpu tests/gpu"""

import asyncio

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="comes with torch on a GPU machine")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

from attention.factory import make  # noqa: E402
from attention.kv_pages import KvPages  # noqa: E402
from batching.batcher import Batcher, BatcherLimits, Scheduling  # noqa: E402
from batching.page_pool import PagePool  # noqa: E402
from batching.prefix_cache import PrefixCache  # noqa: E402
from batching.select import Replayed  # noqa: E402
from loadtest.shapes import SIZES, random_model, request  # noqa: E402
from scorer.engine import Engine  # noqa: E402
from scorer.fast_path import FastPath, Mode  # noqa: E402
from scorer.kv_codec import CODECS  # noqa: E402
from scorer.kv_copies import PORTION, PageCopies  # noqa: E402
from scorer.kv_stores import HostStore  # noqa: E402
from scorer.kv_tiers import KvTiers  # noqa: E402
from tests.batching.fake import blocks_in_use  # noqa: E402

PAGE, LAYERS, KEPT = 16, 4, 256
SHAPE = torch.Size((PAGE, 8, 128))


def pages_of(count):
    made = KvPages(count, PAGE)
    for layer in range(LAYERS):
        like = torch.empty(0, 8, 128, dtype=torch.bfloat16, device="cuda")
        for tensor in made.layer(layer, like, like):
            tensor.copy_(torch.randn(tensor.shape))
    return made


def copies_of(pages, codec="exact"):
    return PageCopies(pages, CODECS[codec], [(SHAPE, SHAPE)] * LAYERS, torch.bfloat16)


@pytest.mark.parametrize("pinned", [True, False])
def test_what_was_copied_out_comes_back_bit_for_bit_while_the_gpu_works(pinned):
    count = 2 * PORTION + 5
    ours, theirs = pages_of(2 * count), pages_of(2 * count)
    rng = np.random.default_rng(0)
    out, into = (rng.permutation(2 * count)[:count].astype(np.int32) for _ in range(2))
    torch.cuda.synchronize()
    busy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        busy = torch.tanh(busy @ busy)
    copies = copies_of(ours)
    store = HostStore(count * copies.row_bytes, copies.row_bytes, pin=True)
    for n, row in enumerate(copies.out(out)):
        store.put(n.to_bytes(16, "big"), row)
    rows = [store.get(n.to_bytes(16, "big")) for n in range(count)]
    assert all(row.is_pinned() for row in rows)
    copies_of(theirs).into(into, rows if pinned else [row.clone() for row in rows])
    for source, target in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert torch.equal(target[into], source[out])
    del rows
    store.close()


def test_fp8_decodes_to_the_same_as_on_a_cpu():
    """A GPU divides by a constant through its reciprocal: scales differ in the last bit, and a value on the edge
    between two codes may get the other one, an eighth away."""
    pages, codec = pages_of(8), CODECS["fp8"]
    rows = torch.stack(copies_of(pages, "fp8").out(np.arange(8, dtype=np.int32)))
    size = codec.size(SHAPE, torch.bfloat16)
    for number, tensor in enumerate(pages.tensors()):
        gpu = codec.decode(rows[:, number * size : (number + 1) * size], SHAPE, torch.float32)
        cpu = codec.decode(codec.encode(tensor.cpu()), SHAPE, torch.float32)
        torch.testing.assert_close(gpu, cpu, rtol=1 / 8, atol=1e-2)
        assert ((gpu - cpu).abs() <= 1e-6 * cpu.abs()).float().mean() > 0.99


def test_prefixes_that_come_back_beside_running_passes_score_as_before():
    """Eight prefixes of 512 tokens, four at a time, where the pages hold four: each is pushed out before it returns."""
    model = random_model(SIZES["0.6B"], LAYERS)
    pages = KvPages(KEPT + 1, PAGE)
    fast = FastPath(model, pages, KEPT, 4096, 4096, Mode())
    fast.capture(paged=True)
    engine = Engine(model, make("torch", pages), PAGE, KEPT, fast=fast)
    copies = copies_of(pages)
    tiers = KvTiers(copies, [HostStore(1 << 28, copies.row_bytes, pin=True)])

    def batcher(pool, tiers):
        limits = BatcherLimits(4096, 1024, 1 << 22)
        cache, scheduling = PrefixCache(PagePool(pool), PAGE), Scheduling(passes_in_flight=2)
        return Batcher(engine.execute, limits, Replayed(False), cache, scheduling=scheduling, tiers=tiers)

    async def scored(batcher, requests):
        answers = await asyncio.gather(*(batcher.submit(each) for each in requests))
        return np.array([[s.logits for s in answer.scored] for answer in answers]).squeeze()

    async def run():
        requests = [request((512, 16, 8), seed % 8) for seed in range(64)]
        truth = await scored(batcher(0, None), requests)
        tested = batcher(KEPT // 2, (tiers, tiers.rates()))
        tested.ahead._rates.seconds = lambda *_: 1e-9
        tested.ahead._recompute = lambda *_: 1.0  # of a large model: fetched whenever it is there
        rng = np.random.default_rng(0)
        for _ in range(10):
            for half in (0, 1):
                order = rng.permutation([i for i in range(64) if i % 8 // 4 == half])
                np.testing.assert_allclose(await scored(tested, [requests[i] for i in order]), truth[order], atol=0.12)
        await tested.drain()
        assert tested.ahead.counts.chosen["fetch"] > 8
        assert not blocks_in_use(tested.cache)

    try:
        asyncio.run(run())
    finally:
        engine.close()
        tiers.close()
