"""Gate, up and their product as one kernel, against the steps one by one.

Run: pytest -m gpu tests/gpu/test_swiglu.py

Without a GPU the kernel runs in Triton's interpreter: TRITON_INTERPRET=1 pytest -m gpu tests/gpu/test_swiglu.py
(in fp16 alone, as its dot product knows no bf16)
"""

import os

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="comes with torch on a GPU machine")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and (not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)),
        reason="needs an NVIDIA GPU of compute capability 9.0",
    ),
]

from scorer.fused_ops import SWIGLU_ROWS, swiglu_rows  # noqa: E402
from scorer.fused_triton import ProductTile, swiglu  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
# hidden, ffn: neither need be whole tiles
WIDTHS = [(64, 96), (80, 72), (576, 200), (1024, 128)]
USUAL = ProductTile()
SMALL = ProductTile(rows=64, columns=32, depth=32, warps=4, stages=3, group=3, flatten=False, per_sm=2)
CASES = [(n, *widths, USUAL) for n in (1, 127, 130, 1000) for widths in WIDTHS]
CASES += [(n, 80, 72, SMALL) for n in (1, 127, 130, 1000)]
if not INTERPRETED:
    CASES += [(n, *widths, USUAL) for n in (1000, 16_384) for widths in ((1024, 3072), (2560, 9728), (4096, 12_288))]


def drawn(n, hidden, ffn, dtype):
    generator = torch.Generator(DEVICE).manual_seed(n + hidden)
    x, weight = (torch.randn(rows, hidden, generator=generator, device=DEVICE) for rows in (n, 2 * ffn))
    return x.to(dtype), (weight / hidden**0.5).to(dtype)


def one_by_one(x, weight):
    """The products in fp32, rounded where the modules round."""
    gate, up = functional.linear(x.float(), weight.float()).to(x.dtype).chunk(2, dim=1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "hidden", "ffn", "tile"), CASES)
def test_equals_the_steps(n, hidden, ffn, tile, dtype):
    x, weight = drawn(n, hidden, ffn, dtype)
    found, expected = swiglu(x, weight, tile), one_by_one(x, weight)
    assert (found == expected).float().mean() > 0.97, "sums in another order seldom round otherwise"
    step = torch.finfo(dtype).eps
    # one step in each of gate, silu, up and product; where silu is almost nothing, a step of gate is more than one
    torch.testing.assert_close(found, expected, rtol=4 * step, atol=step)


@pytest.mark.skipif(INTERPRETED, reason="numpy's product, which the interpreter takes, sums by a row's place in it")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_among_any_others(dtype):
    x, weight = drawn(700, 576, 200, dtype)
    whole = swiglu(x, weight)
    for begin, end in ((0, 1), (0, 128), (3, 131), (129, 700), (699, 700), (0, 699)):
        assert torch.equal(swiglu(x[begin:end], weight), whole[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(dtype):
    x, weight = drawn(200, 80, 72, dtype)
    clean = swiglu(x, weight)
    x[150, 3] = torch.nan
    spoilt = swiglu(x, weight)
    assert spoilt[150].isnan().all()
    others = torch.arange(200) != 150
    assert torch.equal(spoilt[others], clean[others])


def test_widths_that_the_memory_accelerator_does_not_take_are_refused():
    x, weight = drawn(130, 60, 72, torch.float16)
    with pytest.raises(AssertionError, match="multiples of 8"):
        swiglu(x, weight)


@pytest.mark.skipif(INTERPRETED, reason="asks the GPU")
@pytest.mark.parametrize(
    ("rows", "hidden", "dtype", "expected"),
    [
        (6144, 1024, torch.bfloat16, SWIGLU_ROWS),
        (6144, 1024, torch.float16, SWIGLU_ROWS),
        (6144, 1024, torch.float32, None),
        (6144, 1020, torch.bfloat16, None),
        (6136, 1024, torch.bfloat16, None),
    ],
)
def test_only_weights_that_the_kernel_takes(rows, hidden, dtype, expected):
    assert swiglu_rows(torch.zeros(rows, hidden, dtype=dtype, device="cuda")) == expected
