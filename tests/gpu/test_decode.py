"""The decode kernels against float32, beam by beam. Run: pytest -m gpu tests/gpu

Without a GPU they run in Triton's interpreter: TRITON_INTERPRET=1 pytest -m gpu tests/gpu/test_decode.py
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

from attention.decode import Decode, DecodeStrategy  # noqa: E402
from attention.decode_kernel import DecodeArrays, DecodeBlocks, DecodeParts, decode  # noqa: E402
from attention.decode_rig import FLASHINFER, OURS, DecodeRig  # noqa: E402
from attention.decode_timing import DecodePoint  # noqa: E402
from attention.plans import HeadShape  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RELATIVE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}
PAGE = 16
# prompt tokens, beams, history of each
STEPS = {
    "no prompt": (0, 3, 1),
    "one beam": (300, 1, 1),
    "less than a block": (5, 7, 3),
    "a block": (64, 32, 2),
    "one more": (65, 33, 40),
    "split": (600, 5, 9) if INTERPRETED else (2000, 20, 33),
}
if not INTERPRETED:
    STEPS |= {"many beams": (1024, 512, 3), "long history": (100, 64, 256), "long prompt": (8191, 256, 64)}
WAYS = {
    "batch": (DecodeStrategy.BATCH_DECODE, DecodeBlocks()),
    "cascade": (DecodeStrategy.CASCADE_DECODE, DecodeBlocks()),
    "cascade, as of many beams": (DecodeStrategy.CASCADE_DECODE, DecodeBlocks(few_programs=0)),
    # 600 tokens or more are longer than as many parts as there is room for, and these more than are merged in one go
    "cascade, short parts": (DecodeStrategy.CASCADE_DECODE, DecodeBlocks(keys=16, part_keys=16, few_programs=0)),
}
# heads, KV heads, head_dim: groups of 2, 1, 4, 7, 8, 16 and 32, the last two always on tensor cores
SHAPES = [(heads, kv_heads, 128) for heads, kv_heads in ((16, 8), (8, 8), (32, 8), (14, 2), (16, 2), (32, 2), (32, 1))]
SHAPES.append((16, 8, 64))
# Triton's interpreter takes seconds for what takes a GPU microseconds: every step by one shape, one step by the others.
CASES = [
    (name, shape) for shape in SHAPES for name in STEPS if not INTERPRETED or shape == SHAPES[0] or name == "split"
]


def arrays(step, consecutive, padding=0):
    """The step as the kernels read it. padding: beams that a graph has room for and the step does not use."""
    slots = step.prompt_slots()
    meta = [step.beams, step.prompt_tokens, step.history.shape[1], int(slots[0]) if len(slots) else 0]
    given = [np.array(meta, np.int32), np.append(slots, 0), step.history.ravel()]
    on_device = [torch.from_numpy(a.astype(np.int32)).to(DEVICE) for a in given]
    return DecodeArrays(on_device[0], None if consecutive else on_device[1], on_device[2])


def expected(q, k, v, held, step, scale):
    """[beams, heads, head_dim] in fp32 by the definition; few beams at a time, or long prompts take all of a GPU."""
    few = 8
    return torch.cat([_expected(q, k, v, held, step, scale, slice(i, i + few)) for i in range(0, step.beams, few)])


def _expected(q, k, v, held, step, scale, beams):
    history = step.history[beams]
    slots = [np.concatenate([step.prompt_slots(), row[:-1]]) for row in history]
    at = torch.from_numpy(np.stack(slots).astype(np.int64)).to(DEVICE)
    keys, values = (
        torch.cat([pool.flatten(0, 1)[at], new[: step.beams][beams, None]], 1).float()
        for pool, new in zip(held, (k, v), strict=True)
    )
    asked = q[: step.beams][beams].float().unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bhgd,bkhd->bhgk", asked, keys) * scale
    return torch.einsum("bhgk,bkhd->bhgd", scores.softmax(-1), values).flatten(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_against_float32_on_every_beam(name, way, shape, consecutive, dtype):
    (prompt, beams, own), (heads, kv_heads, head_dim), (strategy, blocks) = STEPS[name], shape, WAYS[way]
    rng = np.random.default_rng(0)
    pages = -(-prompt // PAGE)
    first = (pages + 7) * PAGE
    table = np.arange(3, 3 + pages) if consecutive else rng.permutation(pages + 5)[:pages]
    history = first + rng.permutation(beams * own).reshape(beams, own)
    step = Decode(PAGE, table.astype(np.int32), prompt, history.astype(np.int32))
    torch.manual_seed(0)
    make = {"dtype": dtype, "device": DEVICE}
    padded = beams + 3
    qkv = torch.randn(padded, heads + 2 * kv_heads, head_dim, **make)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    held = [
        torch.full((-(-(first + beams * own) // PAGE), PAGE, kv_heads, head_dim), torch.nan, **make) for _ in range(2)
    ]
    used = torch.from_numpy(np.concatenate([step.prompt_slots(), history[:, :-1].ravel()]).astype(np.int64)).to(DEVICE)
    for pool in held:
        pool.flatten(0, 1)[used] = torch.randn(len(used), kv_heads, head_dim, **make)
    scale = head_dim**-0.5
    wanted = expected(q, k, v, held, step, scale)
    out = torch.full((padded, heads, head_dim), torch.nan, **make)
    parts = None
    if strategy is DecodeStrategy.CASCADE_DECODE:
        parts = DecodeParts.make(padded, (heads, kv_heads, head_dim), blocks, torch.device(DEVICE))
    decode(q, k, v, (held[0], held[1]), arrays(step, consecutive), parts, out, scale, blocks, tma=not INTERPRETED)
    error = (out[:beams].float() - wanted).norm() / wanted.norm()
    assert error < RELATIVE[dtype]
    new = torch.from_numpy(step.write_slots.astype(np.int64)).to(DEVICE)
    for pool, rows in zip(held, (k, v), strict=True):
        assert torch.equal(pool.flatten(0, 1)[new], rows[:beams]), "the new K/V is kept"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashInfer needs an NVIDIA GPU")
@pytest.mark.parametrize("variant", [*OURS, *FLASHINFER])
def test_every_way_of_the_bench_computes_the_same(variant):
    if variant in FLASHINFER:
        pytest.importorskip("flashinfer", reason="needs the gpu extra: pip install 'prefixrank[gpu]'")
    heads = HeadShape(16, 8, 128, 128**-0.5, torch.bfloat16)
    rig = DecodeRig(heads, 2048, 64 * 64)
    point = DecodePoint(2048, 33, 40)
    expected = rig.call("triton_cascade", point)().float()  # it keeps the new K/V, which the others find there
    try:
        found = rig.call(variant, point)
    except Exception as error:
        if variant in ("flashinfer_batch", "flashinfer_cascade"):
            pytest.skip(f"the decode module is not built: {type(error).__name__}: {str(error)[:200]}")
        raise
    error = (found().float() - expected).norm() / expected.norm()
    assert error < RELATIVE[torch.bfloat16]
