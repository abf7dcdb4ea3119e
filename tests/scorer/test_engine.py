"""Packed equals alone: every strategy against transformers' own forward of [prefix, document], one at a time."""

from dataclasses import replace

import numpy as np
import pytest

from attention import planner as planning
from attention.kv_pages import KvPages
from attention.layout import LayoutError
from attention.plans import WINDOWLESS, Strategy
from attention.torch_backend import TorchAttention
from batching.items import Item
from batching.packing import Group, pack, unpack
from batching.types import TokenizedRequest
from scorer.engine import Engine
from scorer.selfcheck import alone
from tests.models import FAMILIES, engine, last_prefix_token_hidden, tiny

TOLERANCE = 1e-4
LABELS = np.array([[7, 11]], np.int32)


def request(rng, prefix, lengths, vocabulary=211, normalize=False):
    def ids(n):
        return rng.integers(1, vocabulary, n).astype(np.int32)

    items = tuple(Item(ids(n), np.array([n - 1], np.int32), LABELS) for n in lengths)
    return TokenizedRequest(ids(prefix), items, normalize=normalize)


def run(made: Engine, groups):
    batch = pack(groups)
    return batch, unpack(batch, made.run(batch))


def whole(made, asked, strategy):
    count = len(asked.items)
    _, scored = run(made, [Group(asked, tuple(range(count)), (strategy,) * count)])
    return [scored[0][i] for i in range(count)]


def log_odds(scored):
    return np.array([s.logits[0, 0] - s.logits[0, 1] for s in scored])


def truth(model, asked):
    return log_odds([alone(model, asked, item) for item in asked.items])


def usable(family):
    windowed = any(key.window is not None and key.window < 100 for key in tiny(family).mask_keys)
    return [s for s in Strategy if not (windowed and s in WINDOWLESS)]


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone(family, strategy):
    model = tiny(family)
    asked = request(np.random.default_rng(1), 37, [1, 5, 17, 40, 16, 2])
    if strategy not in usable(family):
        with pytest.raises(LayoutError, match="direct_ragged"):
            whole(engine(model), asked, strategy)
        return
    expected = truth(model, asked)
    assert np.ptp(expected) > 0.5, "the documents must differ for this to mean something"
    np.testing.assert_allclose(log_odds(whole(engine(model), asked, strategy)), expected, atol=TOLERANCE)


@pytest.mark.parametrize("strategy", [s for s in Strategy if s is not Strategy.NAIVE])
@pytest.mark.parametrize("prefix", [1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257])
@pytest.mark.parametrize("page_size", [1, 16])
def test_any_prefix_against_any_page_size(strategy, prefix, page_size):
    model = tiny("qwen3")
    asked = request(np.random.default_rng(prefix), prefix, [1, 2, 15, 16, 17])
    made = engine(model, page_size, pages=1024)
    np.testing.assert_allclose(log_odds(whole(made, asked, strategy)), truth(model, asked), atol=TOLERANCE)


@pytest.mark.parametrize("strategy", [s for s in Strategy if s is not Strategy.NAIVE])
@pytest.mark.parametrize("prefix", [3, 16, 37])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_second_pass_over_kept_pages(family, prefix, strategy):
    if strategy not in usable(family):
        strategy = Strategy.DIRECT_RAGGED
    model, made = tiny(family), engine(tiny(family))
    asked = request(np.random.default_rng(prefix), prefix, [9, 3, 20, 1])
    pages = np.array([5, 2, 9][: -(-prefix // 16)], np.int32)
    _, first = run(made, [Group(asked, (0, 1), (strategy,) * 2, 0, pages)])
    batch, second = run(made, [Group(asked, (2, 3), (strategy,) * 2, prefix, pages)])
    assert batch.tokens == 21, "the prefix is not computed again"
    scored = [*first[0], *second[0]]
    np.testing.assert_allclose(log_odds(scored), truth(model, asked), atol=TOLERANCE)


def test_several_requests_and_strategies_in_one_pass():
    model, made = tiny("llama"), engine(tiny("llama"))
    rng = np.random.default_rng(5)
    asked = [request(rng, prefix, lengths) for prefix, lengths in [(20, [4, 50]), (33, [7, 7, 90]), (5, [3]), (8, [6])]]
    mixed = (Strategy.MULTI_ITEM, Strategy.MULTI_ITEM, Strategy.DIRECT_RAGGED)
    chosen = [(Strategy.NAIVE,) * 2, mixed, (Strategy.REFERENCE,), (Strategy.DIRECT_RAGGED,)]
    groups = [Group(r, tuple(range(len(r.items))), s) for r, s in zip(asked, chosen, strict=True)]
    _, scored = run(made, groups)
    for i, r in enumerate(asked):
        got = log_odds([scored[i][k] for k in range(len(r.items))])
        np.testing.assert_allclose(got, truth(model, r), atol=TOLERANCE)


@pytest.mark.parametrize("strategy", Strategy)
def test_order_and_neighbours_do_not_matter(strategy):
    made, rng = engine(tiny("qwen3")), np.random.default_rng(2)
    asked = request(rng, 21, [5, 30, 12, 1, 8])
    scores = log_odds(whole(made, asked, strategy))
    order = [4, 2, 0, 3, 1]
    permuted = replace(asked, items=tuple(asked.items[i] for i in order))
    np.testing.assert_allclose(log_odds(whole(made, permuted, strategy)), scores[order], atol=TOLERANCE)
    crowded = replace(asked, items=(request(rng, 1, [77]).items[0], *asked.items))
    np.testing.assert_allclose(log_odds(whole(made, crowded, strategy))[1:], scores, atol=TOLERANCE)


def test_query_likelihood_reads_equal_transformers():
    model, rng = tiny("llama"), np.random.default_rng(3)
    items = []
    for n in (9, 30):
        ids = rng.integers(1, 211, n).astype(np.int32)
        reads = np.arange(n - 5, n - 1, dtype=np.int32)
        items.append(Item(ids, reads, ids[reads + 1][:, None]))
    asked = TokenizedRequest(rng.integers(1, 211, 12).astype(np.int32), tuple(items), normalize=True)
    for strategy in Strategy:
        for got, item in zip(whole(engine(model), asked, strategy), items, strict=True):
            want = alone(model, asked, item)
            np.testing.assert_allclose(got.logits[:, 0] - got.lse, want.logits[:, 0] - want.lse, atol=TOLERANCE)


def test_without_a_prefix():
    model = tiny("qwen3")
    asked = request(np.random.default_rng(4), 0, [6, 20])
    for strategy in Strategy:
        got = log_odds(whole(engine(model), asked, strategy))
        np.testing.assert_allclose(got, truth(model, asked), atol=TOLERANCE)


BROKEN_POSITIONS = {
    "positions one too high": lambda batch: batch.position_ids + 1 * (batch.position_ids >= 37),
    "positions running on": lambda batch: np.arange(batch.tokens, dtype=np.int32),
}


@pytest.mark.parametrize("broken", BROKEN_POSITIONS)
def test_broken_positions_are_noticed(broken):
    model, made = tiny("qwen3"), engine(tiny("qwen3"))
    asked = request(np.random.default_rng(1), 37, [5, 17, 40])
    batch = pack([Group(asked, (0, 1, 2), (Strategy.MULTI_ITEM,) * 3)])
    bad = replace(batch, position_ids=BROKEN_POSITIONS[broken](batch))
    scored = unpack(bad, made.run(bad))
    assert np.abs(log_odds([scored[0][i] for i in range(3)]) - truth(model, asked)).max() > 100 * TOLERANCE


def neighbour_visible(launch):
    arrays = launch.multi_item
    places = np.arange(1, len(arrays.token_pos_in_items_ptr) + 1, dtype=np.uint16)
    longest = np.array([places[-1]], np.uint16)
    return replace(launch, multi_item=replace(arrays, token_pos_in_items_ptr=places, max_item_len_ptr=longest))


@pytest.mark.parametrize("breakage", [neighbour_visible, last_prefix_token_hidden])
def test_broken_masks_are_noticed(breakage):
    def planner(*args):
        made = planning.plan(*args)
        return replace(made, launches=tuple(breakage(launch) for launch in made.launches))

    model = tiny("qwen3")
    asked = request(np.random.default_rng(1), 37, [5, 17, 40])
    got = log_odds(whole(engine(model, planner=planner), asked, Strategy.MULTI_ITEM))
    assert np.abs(got - truth(model, asked)).max() > 100 * TOLERANCE


@pytest.mark.parametrize("strategy", Strategy)
def test_one_document_with_nan_costs_no_other_its_score(strategy):
    clean = tiny("llama", seed=3)
    asked = request(np.random.default_rng(6), 20, [5, 17, 9], vocabulary=200)
    poisoned = replace(asked, items=(*asked.items, Item(np.array([3, 205, 4], np.int32), np.array([2]), LABELS)))
    expected = truth(clean, asked)
    weights = clean.hf.get_input_embeddings().weight
    kept = weights[205].clone()
    weights[205] = float("nan")
    try:
        scores = log_odds(whole(engine(clean), poisoned, strategy))
    finally:
        weights[205] = kept
    assert np.isnan(scores[-1])
    np.testing.assert_allclose(scores[:-1], expected, atol=TOLERANCE)


class Spreading(TorchAttention):
    """NaN anywhere in a pass reaches all of it, as masked products with NaN do on a GPU; and it stays in the pages."""

    isolates_nan = False
    scrubbed = 0

    def begin(self, *args):
        attend = super().begin(*args)

        def spread(*call):
            out = attend(*call)
            return out * float("nan") if out.isnan().any() else out

        return spread

    def scrub(self, first_page):
        self.scrubbed += 1


def test_where_nan_spreads_the_items_run_alone_and_only_the_bad_one_stays_bad():
    model = tiny("llama", seed=3)
    asked = request(np.random.default_rng(6), 20, [5, 17, 9], vocabulary=200)
    poisoned = replace(asked, items=(*asked.items, Item(np.array([3, 205, 4], np.int32), np.array([2]), LABELS)))
    expected = truth(model, asked)
    made = Engine(model, Spreading(KvPages(64, 16)), 16, 64)
    weights = model.hf.get_input_embeddings().weight
    kept = weights[205].clone()
    weights[205] = float("nan")
    try:
        scores = log_odds(whole(made, poisoned, Strategy.MULTI_ITEM))
        later = log_odds(whole(made, asked, Strategy.MULTI_ITEM))
    finally:
        weights[205] = kept
    assert np.isnan(scores[-1])
    np.testing.assert_allclose(scores[:-1], expected, atol=TOLERANCE)
    np.testing.assert_allclose(later, expected, atol=TOLERANCE)


class SpreadingFast:
    """A fast path in which NaN anywhere reaches every item."""

    def __init__(self, inner):
        self._inner = inner
        self.scrubbed = 0

    def takes(self, batch):
        return all(strategy is Strategy.FUSED for strategy in batch.leaf_strategies)

    def submit(self, batch, page_size):
        reads = self._inner.run(batch)
        spoiled = np.nan if np.isnan(reads.logits).any() else 0.0
        return lambda: replace(reads, logits=reads.logits + np.float32(spoiled))

    def scrub(self):
        self.scrubbed += 1


def test_a_fast_path_spreads_nan_whatever_the_attention_beside_it_does():
    """Without FlashInfer the attention is torch's, which isolates: that says nothing of the fast path's passes."""
    model = tiny("llama", seed=3)
    asked = request(np.random.default_rng(6), 20, [5, 17, 9], vocabulary=200)
    poisoned = replace(asked, items=(*asked.items, Item(np.array([3, 205, 4], np.int32), np.array([2]), LABELS)))
    expected = truth(model, asked)
    fast = SpreadingFast(engine(model))
    made = engine(model, fast=fast)
    weights = model.hf.get_input_embeddings().weight
    kept = weights[205].clone()
    weights[205] = float("nan")
    try:
        scores = log_odds(whole(made, poisoned, Strategy.FUSED))
    finally:
        weights[205] = kept
    assert np.isnan(scores[-1])
    np.testing.assert_allclose(scores[:-1], expected, atol=TOLERANCE)
    assert fast.scrubbed == 1
