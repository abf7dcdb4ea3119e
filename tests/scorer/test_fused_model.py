"""The hand-fused path computes what transformers' own modules compute, over the same attention."""

import numpy as np
import pytest
import torch

from attention.kv_pages import KvPages
from attention.layout import Layout, Segment
from attention.planner import plan
from attention.plans import MaskKey, Pages, Strategy
from attention.torch_backend import TorchAttention
from scorer.fused_model import FusedModel, refusal
from scorer.fused_ops import quantize
from tests.models import FAMILIES, tiny

PLAIN = MaskKey(None, 0.0)
LAYOUT = Layout.of([Segment(-1, 23), *[Segment(0, n, reads=(n - 1,)) for n in (5, 9, 1, 17)]])
FUSED = ("llama", "qwen2", "qwen3", "mistral")


def attends():
    pages = Pages.scratch(LAYOUT, 16)
    planned = plan(LAYOUT, [Strategy.FUSED] * 4, pages)
    return TorchAttention(KvPages(16, 16)).begin(LAYOUT, pages, {PLAIN: planned})


@pytest.mark.parametrize("family", FUSED)
def test_hidden_states_equal_the_modules(family):
    model = tiny(family, seed=3)
    ids = np.random.default_rng(0).integers(0, 200, LAYOUT.rows).astype(np.int32)
    expected = model.forward(ids, LAYOUT.position_ids, LAYOUT.read_rows, attends())
    attend = attends()
    fused = FusedModel(model, positions=64)

    def one(layer, q, k, v):
        return attend(layer, q, k, v, fused.scale, PLAIN)

    given = (torch.from_numpy(ids), torch.from_numpy(LAYOUT.position_ids))
    reads = torch.from_numpy(LAYOUT.read_rows).long()
    found = fused.forward(*given, reads, one)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.forward(*given, None, one)[reads], expected, rtol=1e-5, atol=1e-5)
    again = model.forward(ids, LAYOUT.position_ids, LAYOUT.read_rows, attends())
    torch.testing.assert_close(again, expected)  # the modules still work on the fused weights


def test_fusing_holds_no_weight_twice():
    model = tiny("qwen3", seed=4)
    FusedModel(model, positions=8)
    for layer in model.decoder.layers:
        attention = layer.self_attn
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_others_are_refused_with_their_reason(family):
    reason = refusal(tiny(family))
    assert (reason == "") == (family in FUSED), reason


def test_rows_in_fp8_come_back_within_their_steps():
    """e4m3 has three bits of mantissa: a value is off by a sixteenth of itself at most, small ones by a fixed step."""
    x = torch.randn(33, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 33)[:, None]
    values, scales = quantize(x)
    back = values.float() * scales
    step = x.abs().amax(1, keepdim=True) / 448 * 2.0**-9
    assert ((back - x).abs() <= x.abs() / 16 + step).all()
    zeros = quantize(torch.zeros(2, 96))
    assert (zeros.values.float() * zeros.scales == 0).all()
