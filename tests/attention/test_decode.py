"""Decode plans, by counting: each beam attends once to every token that the mask shows it, and to nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.decode import Decode, DecodeStrategy, expand, plan_decode, scanned, shared_levels
from attention.layout import Layout, Segment
from attention.mask import visible

BATCH, CASCADE = DecodeStrategy.BATCH_DECODE, DecodeStrategy.CASCADE_DECODE


def grown(rng, prompt, width, steps, page_size=4):
    """A random search: the geometry of its last step, the layout of all that it ever computed, and which segment each
    slot holds. The prompt's pages stand anywhere."""
    pages = -(-prompt // page_size)
    order = rng.permutation(pages + 5).astype(np.int32)
    table, first = order[:pages], (pages + 5) * page_size
    segments = [Segment(-1, prompt)] if prompt else []
    root = len(segments) - 1
    history, leaves = np.zeros((1, 0), np.int32), [root]
    segment_of = {}
    for step in range(steps):
        count = 1 if step == 0 else int(rng.integers(1, width + 1))
        parents = rng.integers(0, len(leaves), count)
        slots = first + step * width + rng.permutation(width)[:count].astype(np.int32)
        history = np.column_stack([history[parents], slots]).astype(np.int32)
        leaves = [leaves[parent] for parent in parents]
        for i, slot in enumerate(slots.tolist()):
            segments.append(Segment(leaves[i], 1))
            leaves[i] = segment_of[slot] = len(segments) - 1
    return Decode(page_size, table, prompt, history), Layout.of(segments), segment_of, leaves


def wanted(step, layout, segment_of, leaves, window, slots):
    """[beams, slots] by the mask of the layout."""
    rows = visible(layout, window)[layout.row_start[leaves]]
    counts = np.zeros((step.beams, slots), np.int32)
    if step.prompt_tokens:
        counts[:, step.prompt_slots()] = rows[:, : step.prompt_tokens]
    for slot, segment in segment_of.items():
        counts[:, slot] = rows[:, layout.token_start[segment]]
    return counts


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**31), st.integers(0, 23), st.integers(1, 7), st.integers(1, 6),
    st.sampled_from([None, 1, 2, 5, 9, 100]), st.sampled_from(list(DecodeStrategy)), st.booleans(),
)  # fmt: skip
def test_every_plan_is_the_mask(seed, prompt, width, steps, window, strategy, deep):
    step, layout, segment_of, leaves = grown(np.random.default_rng(seed), prompt, width, steps)
    slots = max(segment_of) + 1
    made = plan_decode(step, strategy, window, deep)
    assert np.array_equal(
        expand(made.launches, step.beams, slots), wanted(step, layout, segment_of, leaves, window, slots)
    )
    for launch in made.launches:
        assert sorted(launch.q_rows.tolist()) == list(range(step.beams)), "each beam is once in every launch"


def test_the_cascade_scans_the_prompt_once():
    rng = np.random.default_rng(0)
    step, *_ = grown(rng, 1000, 16, 4)
    beams, own = step.history.shape
    assert scanned(plan_decode(step, CASCADE)) == 1000 + beams * own
    assert scanned(plan_decode(step, BATCH)) == beams * (1000 + own)


def common(beams, shared, own):
    """[beams, shared + own] slots of beams that have their first `shared` tokens in common."""
    return np.concatenate(
        [np.tile(np.arange(shared), (beams, 1)), shared + np.arange(beams * own).reshape(beams, own)], 1
    )


def test_history_that_many_share_is_a_level_of_its_own():
    history = common(64, 100, 10).astype(np.int32)
    assert shared_levels(history) == [100]
    step = Decode(16, np.arange(2, dtype=np.int32), 20, history + 100)
    made = plan_decode(step, CASCADE)
    assert [launch.requests for launch in made.launches] == [1, 1, 64]
    assert scanned(made) == 20 + 100 + 64 * 10
    assert scanned(plan_decode(step, CASCADE, deep=False)) == 20 + 64 * 110


def test_levels_nest():
    """Sixteen families of eight beams each, with a history of their own below what all share."""
    families = np.concatenate([common(8, 50, 4) + 1000 * (n + 1) for n in range(16)])
    history = np.concatenate([np.tile(np.arange(200), (128, 1)), families], axis=1).astype(np.int32)
    shuffled = history[np.random.default_rng(1).permutation(128)]
    assert shared_levels(shuffled) == [200, 250]
    made = plan_decode(Decode(16, np.zeros(0, np.int32), 0, shuffled), CASCADE)
    assert [launch.requests for launch in made.launches] == [1, 16, 128]


def test_little_that_is_shared_is_not_worth_a_launch():
    assert shared_levels(common(8, 5, 10).astype(np.int32)) == []


def test_a_launch_of_uneven_requests_is_our_mistake():
    step, *_ = grown(np.random.default_rng(2), 9, 4, 2)
    (launch,) = plan_decode(step, BATCH).launches
    launch.kv.paged_kv_indptr[1] += 1
    with pytest.raises(AssertionError, match="as many keys"):
        launch.slots()
