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
from scorer.fused_ops import quantize, swiglu, swiglu_rows
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


def last_hidden(fused, rows):
    ids, places = torch.arange(rows, dtype=torch.int32), torch.arange(rows, dtype=torch.int32)
    return fused.forward(ids, places, None, lambda layer, q, k, v: q)


@pytest.mark.parametrize("fp8", [False, lambda layer, name: name == "down", lambda layer, name: name == "gate_up"])
def test_one_kernel_for_gate_and_up_changes_no_hidden_state(fp8):
    fused = FusedModel(tiny("qwen3", seed=6), positions=64, fp8=fp8)
    assert fused.swiglu_rows is None, "a CPU has no such kernel"
    expected = last_hidden(fused, 50)
    fused.swiglu_rows = 1
    assert torch.equal(last_hidden(fused, 50), expected)


@pytest.mark.parametrize(("rows", "calls"), [(39, 0), (40, 3), (53, 4)])
def test_the_rows_of_a_pass_and_not_of_a_part_choose_the_kernel(rows, calls, monkeypatch):
    """So that a row is computed alike in every part of a pass."""
    taken = []

    def counted(x, weight):
        taken.append(len(x))
        return swiglu(x, weight)

    monkeypatch.setattr("scorer.fused_model.swiglu", counted)
    model = tiny("qwen3", seed=6)
    fused = FusedModel(model, positions=64)
    fused.swiglu_rows, fused.chunk_rows = 40, 15
    last_hidden(fused, rows)
    assert len(taken) == calls * fused.layers
    assert sum(taken) == (rows if calls else 0) * fused.layers


def test_only_a_gpu_has_the_kernel():
    assert swiglu_rows(torch.zeros(64, 32, dtype=torch.bfloat16)) is None


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
