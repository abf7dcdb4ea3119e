"""Verifying a tree of drafted tokens in one pass: under an explicit mask every node's logits are those of its branch
alone through transformers, and the branch that is accepted is what transformers itself would have generated."""

import numpy as np
import pytest
import torch

from attention.layout import Layout, Segment
from attention.mask import visible
from attention.planner import plan, plan_visibility
from attention.plans import WINDOWLESS, Pages, Strategy
from tests.models import engine, tiny

TOLERANCE = 1e-4
# A tree by the parent of each node, -1 is the end of the prefix: branches of different depths, siblings, a chain.
TREES = {
    "chain": (-1, 0, 1, 2, 3),
    "star": (-1, -1, -1, -1),
    "binary": (-1, -1, 0, 0, 1, 1, 2, 2, 5),
    "comb": (-1, 0, 0, 1, 1, 3, 3, 5, 5, 7, 7),
    "forest of chains": (-1, 0, 1, -1, 3, 4, 5, -1),
}
FAMILIES = ("qwen3", "llama", "gemma2", "mistral-window", "gpt_neox")
PREFIX = 37  # longer than the windows of the windowed families


def branch(parents, node):
    """The nodes from the root to this one."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def layout_of(parents, cached=0):
    """A segment for the prefix and one for each node, read where it ends: its logits say what may follow."""
    return Layout.of([Segment(-1, PREFIX, cached), *(Segment(parent + 1, 1, reads=(0,)) for parent in parents)])


def logits(model, layout, ids, pages, plans, made=None):
    """[nodes, vocabulary] of one pass over the tree."""
    attend = (made or engine(model)).attention.begin(layout, pages, plans)
    hidden = model.forward(ids, layout.position_ids, layout.read_rows, attend)
    every = np.tile(np.arange(model.vocabulary, dtype=np.int32), len(layout.read_rows))
    indptr = np.arange(len(layout.read_rows) + 1) * model.vocabulary
    return model.logits(hidden, indptr, every).reshape(len(layout.read_rows), -1)


def truth(model, ids, parents):
    """[nodes, vocabulary]: [prefix, branch] alone, its last position."""
    rows = [np.concatenate([ids[:PREFIX], ids[PREFIX:][branch(parents, node)]]) for node in range(len(parents))]
    return torch.stack([model.alone(row, 1)[0] for row in rows]).numpy()


def drawn(parents, seed=0):
    return np.random.default_rng(seed).integers(3, 200, PREFIX + len(parents)).astype(np.int32)


def plans_of(model, layout, pages, strategy):
    leaves = [strategy] * len(layout.leaves)
    return {key: plan(layout, leaves, pages, key.window, key.soft_cap) for key in model.mask_keys}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_is_as_its_branch_alone(family, tree):
    model, parents = tiny(family), TREES[tree]
    layout, ids = layout_of(parents), drawn(parents)
    pages = Pages.scratch(layout, 16)
    found = logits(model, layout, ids, pages, plans_of(model, layout, pages, Strategy.CUSTOM_MASK))
    expected = truth(model, ids, parents)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert np.abs(np.diff(expected, axis=0)).max() > 0.1, "nodes differ"


SHARING = [s for s in Strategy if s is not Strategy.NAIVE]
OTHERS = [("qwen3", s) for s in SHARING] + [("mistral-window", s) for s in SHARING if s not in WINDOWLESS]


@pytest.mark.parametrize(("family", "strategy"), OTHERS)
def test_other_strategies_take_a_tree_of_segments_too(family, strategy):
    model, parents = tiny(family), TREES["comb"]
    layout, ids = layout_of(parents), drawn(parents)
    pages = Pages.scratch(layout, 16)
    found = logits(model, layout, ids, pages, plans_of(model, layout, pages, strategy))
    np.testing.assert_allclose(found, truth(model, ids, parents), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_behind_a_prefix_that_is_in_the_pages_already(family):
    """As a decoder would verify: the prefix was computed by an earlier pass, only the draft is new."""
    model, parents = tiny(family), TREES["binary"]
    ids, made = drawn(parents, 1), engine(model)
    kept = (np.array([4, 9, 2], np.int32), *[None] * len(parents))
    for cached in (0, PREFIX):
        layout = layout_of(parents, cached)
        pages = Pages(16, 256, kept)
        plans = plans_of(model, layout, pages, Strategy.CUSTOM_MASK)
        found = logits(model, layout, ids[cached:], pages, plans, made)
        np.testing.assert_allclose(found, truth(model, ids, parents), rtol=0, atol=TOLERANCE)
    assert layout.rows == len(parents)


def test_a_visibility_given_as_a_matrix_is_the_same_tree():
    model, parents = tiny("qwen3"), TREES["comb"]
    layout, ids = layout_of(parents), drawn(parents)
    (key,) = model.mask_keys
    made = {key: plan_visibility(layout, visible(layout), 16)}
    found = logits(model, layout, ids, Pages.scratch(layout, 16), made)
    np.testing.assert_allclose(found, truth(model, ids, parents), rtol=0, atol=TOLERANCE)


def test_a_mask_that_shows_a_sibling_is_noticed():
    model, parents = tiny("qwen3"), TREES["star"]
    layout, ids = layout_of(parents), drawn(parents)
    seen = visible(layout)
    seen[-1, -2] = True
    (key,) = model.mask_keys
    made = {key: plan_visibility(layout, seen, 16)}
    found = logits(model, layout, ids, Pages.scratch(layout, 16), made)
    expected = truth(model, ids, parents)
    np.testing.assert_allclose(found[:-1], expected[:-1], rtol=0, atol=TOLERANCE)
    assert np.abs(found[-1] - expected[-1]).max() > 100 * TOLERANCE


# --- what verification is for


def greedy(model, prefix, count):
    """What transformers generates, one token after the other."""
    ids = list(prefix)
    for _ in range(count):
        ids.append(int(model.alone(np.array(ids, np.int32), 1)[0].argmax()))
    return ids[len(prefix) :]


def accepted(tokens, parents, chosen):
    """The longest branch of which each token is what the model chose behind the one before; chosen[-1]: the prefix."""
    path, node = [], -1
    while (children := [n for n, p in enumerate(parents) if p == node and tokens[n] == chosen[node]]) != []:
        node = children[0]
        path.append(int(tokens[node]))
    return [*path, int(chosen[node])]


@pytest.mark.parametrize("right", [0, 1, 2, 4])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_the_accepted_branch_is_what_transformers_generates(family, right):
    """A draft with so many right tokens among wrong ones yields these and one more, in one pass."""
    model, rng = tiny(family), np.random.default_rng(right)
    prefix = rng.integers(3, 200, PREFIX).astype(np.int32)
    wanted = greedy(model, prefix, right + 1)
    parents, tokens, tip = [], [], -1
    for depth in range(5):  # three guesses at each depth, of which one is right as long as the draft is
        guesses = [int(g) for g in rng.integers(3, 200, 3) if depth >= len(wanted) or g != wanted[depth]]
        if depth < right:
            guesses[-1] = wanted[depth]
        parents += [tip] * len(guesses)
        tokens += guesses
        tip = len(tokens) - 1
    layout = Layout.of(
        [Segment(-1, PREFIX, reads=(PREFIX - 1,)), *(Segment(parent + 1, 1, reads=(0,)) for parent in parents)]
    )
    pages = Pages.scratch(layout, 16)
    ids = np.concatenate([prefix, np.array(tokens, np.int32)])
    found = logits(model, layout, ids, pages, plans_of(model, layout, pages, Strategy.CUSTOM_MASK)).argmax(axis=1)
    chosen = dict(zip(range(-1, len(tokens)), found, strict=True))
    assert accepted(tokens, parents, chosen) == wanted
