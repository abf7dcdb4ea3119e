"""FP8 keeps the order of documents. The products are FP8's own numbers, multiplied in fp32 where there is no GPU."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from attention.kv_pages import KvPages
from attention.planner import plan
from attention.plans import MaskKey, Pages, Strategy
from attention.torch_backend import TorchAttention
from batching.packing import Group, pack, unpack
from batching.types import Reads
from scorer.client import build_request
from scorer.config import Limits
from scorer.embedded import embedded_model
from scorer.fused_model import PROJECTIONS, FusedModel
from scorer.heads import verdict
from scorer.loading import load_model
from scorer.profile import load_profile
from scorer.quantized import EXCLUDED_LAYERS, in_fp8
from scorer.tokenization import Tokenization, load_tokenizer
from tests.models import tiny
from tests.scorer.test_fused_model import LAYOUT, PLAIN, attends

DATA = Path(__file__).parents[1] / "data" / "length_matched.json"
DOCUMENTS = 30
LEAST_CORRELATION, LEAST_DISTINCT = 0.93, 20


def ranks(values):
    return np.argsort(np.argsort(values))


def spearman(a, b):
    return np.corrcoef(ranks(a), ranks(b))[0, 1]


def request_of(model, source, profile):
    """One query before documents that belong to it and to others."""
    limits = Limits(100, 1 << 20, 8192, 8192, 512, 512, 4096, 64 << 20, model.vocabulary)
    tokenization = Tokenization(load_tokenizer(source, False), profile, limits, model.classes)
    queries = json.loads(DATA.read_text())
    texts = [document["text"] for query in queries for document in query["documents"]][:DOCUMENTS]
    return tokenization.tokenize(build_request(queries[0]["query"], texts)).request


def scores(model, fused, request, kind):
    chosen = tuple(range(len(request.items)))
    batch = pack([Group(request, chosen, (Strategy.FUSED,) * len(chosen))])
    pages = Pages(16, 0, batch.pages)
    plans = {MaskKey(None, 0.0): plan(batch.layout, batch.leaf_strategies, pages)}
    attend = TorchAttention(KvPages(1, 16)).begin(batch.layout, pages, plans)
    ids, positions, reads = map(torch.from_numpy, (batch.input_ids, batch.position_ids, batch.read_rows))
    hidden = fused.forward(
        ids, positions, reads.long(), lambda layer, q, k, v: attend(layer, q, k, v, fused.scale, MaskKey(None, 0.0))
    )
    logits = model.logits(hidden, batch.read_indptr, batch.read_ids)
    found = unpack(batch, Reads(logits, model.log_sum_exp(hidden, batch.normalize), 0.0, 0.0))
    return np.array([verdict(found[0][item], kind).score for item in chosen])


def test_the_embedded_models_query_likelihood_ranks_in_fp8_as_without():
    """In float32, of which bf16 would be a rounding: on a CPU it takes several times as long."""
    source = str(embedded_model())
    model, profile = load_model(source, "float32", "cpu", False), load_profile("smollm2-query-likelihood")
    request = request_of(model, source, profile)
    plain = scores(model, FusedModel(model, positions=512), request, profile.kind)
    quantized = scores(model, FusedModel(model, positions=512, fp8=True), request, profile.kind)
    assert np.isfinite(quantized).all()
    assert np.abs(quantized - plain).max() > 1e-3, "something was quantised"
    assert spearman(plain, quantized) >= LEAST_CORRELATION
    assert len(set(quantized.tolist())) >= LEAST_DISTINCT


def test_the_first_layers_are_left_out():
    assert [layer for layer in range(5) if not in_fp8(layer, "qkv")] == list(range(EXCLUDED_LAYERS))


@pytest.mark.parametrize("name", PROJECTIONS)
def test_each_projection_can_be_quantised_alone(name):
    """Every place where rows change hands knows what the next product takes."""
    model = tiny("qwen3", seed=6)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 200, LAYOUT.rows).astype(np.int32))
    positions, reads = torch.from_numpy(LAYOUT.position_ids), torch.from_numpy(LAYOUT.read_rows).long()

    def hidden(fp8):
        attend, fused = attends(), FusedModel(model, positions=64, fp8=fp8)
        return fused.forward(ids, positions, reads, lambda i, q, k, v: attend(i, q, k, v, fused.scale, PLAIN))

    plain, one = hidden(False), hidden(lambda layer, projection: layer == 1 and projection == name)
    error = (one - plain).norm() / plain.norm()
    assert 1e-4 < error < 0.2
    assert torch.equal(hidden(lambda *_: False), plain)
