"""Every plan, expanded by the kernels' own rules, attends to each visible token exactly once and to nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.expand import expand
from attention.layout import Layout, LayoutError, Segment, unshared
from attention.mask import visible
from attention.planner import plan, plan_visibility
from attention.plans import ITEM_LIMITED, MAX_ITEM_TOKENS, WINDOWLESS, Launch, MaskKind, PagedKv, Pages, Strategy
from tests.attention.draw import cases, examples, segments

SHARING = [s for s in Strategy if s is not Strategy.NAIVE]


def exact(layout, pages, strategies, window=None):
    made = plan(layout, strategies, pages, window=window)
    counts = expand(made, layout, pages)
    np.testing.assert_array_equal(counts, visible(layout, window).astype(np.int32))
    return made


@pytest.mark.parametrize("strategy", SHARING)
@given(case=cases())
@examples(120)
def test_counts_are_the_mask(strategy, case):
    layout, pages = case
    exact(layout, pages, [strategy] * len(layout.leaves))


@given(case=cases(), choice=st.data())
@examples(120)
def test_a_request_may_be_split_between_strategies(case, choice):
    layout, pages = case
    whole_trees = (Strategy.CUSTOM_MASK, Strategy.REFERENCE)
    pick = st.sampled_from([s for s in SHARING if s not in whole_trees])
    exact(layout, pages, [choice.draw(pick) for _ in layout.leaves])


@given(forest=segments(), page_size=st.sampled_from([1, 4, 16]))
@examples(60)
def test_naive_computes_what_sharing_computes(forest, page_size):
    layout, source = unshared(Layout.of([replace(s, cached=0) for s in forest]))
    made = exact(layout, Pages.scratch(layout, page_size), [Strategy.NAIVE] * len(layout.leaves))
    assert made.launches[0].requests == len(layout.leaves)
    assert len(source) == layout.segments


@pytest.mark.parametrize("strategy", [s for s in SHARING if s not in WINDOWLESS])
@given(case=cases(), window=st.integers(1, 80))
@examples(60)
def test_a_sliding_window_is_exact_where_distances_are_kept(strategy, case, window):
    layout, pages = case
    exact(layout, pages, [strategy] * len(layout.leaves), window)


@pytest.mark.parametrize("strategy", sorted(WINDOWLESS))
@given(case=cases(), window=st.integers(1, 200))
@examples(40)
def test_the_others_take_a_window_as_long_as_the_path_and_refuse_a_shorter_one(strategy, case, window):
    layout, pages = case
    strategies = [strategy] * len(layout.leaves)
    if window >= (layout.start + layout.length).max():
        assert exact(layout, pages, strategies, window).launches[0].window_left == -1
    else:
        with pytest.raises(LayoutError, match="direct_ragged"):
            plan(layout, strategies, pages, window=window)


@given(case=cases())
@examples(60)
def test_every_row_queries_once_and_is_merged_where_it_queries_again(case):
    layout, pages = case
    for strategy in SHARING:
        made = plan(layout, [strategy] * len(layout.leaves), pages)
        merged = {b for _, b in made.merges}
        rows = [launch.q_rows for i, launch in enumerate(made.launches) if i not in merged]
        np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(layout.rows))
        for a, b in made.merges:
            assert np.isin(made.launches[b].q_rows, made.launches[a].q_rows).all()


def with_kv(launch, **change):
    return replace(launch, kv=replace(launch.kv, **change))


BREAKS = {
    "a page too many": lambda launch: with_kv(launch, paged_kv_last_page_len=launch.kv.paged_kv_last_page_len % 16 + 1),
    "pages swapped": lambda launch: with_kv(launch, paged_kv_indices=launch.kv.paged_kv_indices[::-1].copy()),
    "rows swapped": lambda launch: replace(launch, q_rows=launch.q_rows[::-1].copy()),
}


@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("strategy", [Strategy.DIRECT_RAGGED, Strategy.MULTI_ITEM])
def test_a_broken_launch_is_caught(strategy, broken):
    layout = Layout.of([Segment(-1, 40), Segment(0, 5), Segment(0, 9), Segment(0, 20)])
    pages = Pages.scratch(layout, 16)
    made = exact(layout, pages, [strategy] * 3)
    bad = replace(made, launches=(BREAKS[broken](made.launches[0]),))
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(expand(bad, layout, pages), visible(layout))


@pytest.mark.parametrize(
    "change",
    [
        {"token_pos_in_items_ptr": lambda a: np.arange(1, len(a) + 1, dtype=np.uint16)},  # a neighbour visible
        {"max_item_len_ptr": lambda a: (a - 1).astype(np.uint16)},  # too small: keys silently dropped
        {"prefix_len_ptr": lambda a: (a - 1).astype(np.uint32)},  # the last prefix token hidden
    ],
    ids=["neighbour", "max-item-len", "prefix-len"],
)
def test_broken_multi_item_arrays_are_caught(change):
    layout = Layout.of([Segment(-1, 40), Segment(0, 5), Segment(0, 9), Segment(0, 20)])
    pages = Pages.scratch(layout, 16)
    made = exact(layout, pages, [Strategy.MULTI_ITEM] * 3)
    launch = made.launches[0]
    arrays = replace(launch.multi_item, **{k: f(getattr(launch.multi_item, k)) for k, f in change.items()})
    bad = replace(made, launches=(replace(launch, multi_item=arrays),))
    assert (expand(bad, layout, pages) != visible(layout)).any()


def test_a_forgotten_tail_copy_is_caught():
    layout = Layout.of([Segment(-1, 20), Segment(0, 5), Segment(0, 9)])
    pages = Pages.scratch(layout, 16)
    made = exact(layout, pages, [Strategy.DIRECT_RAGGED] * 2)
    first_write = np.unique(made.append_rows, return_index=True)[1]
    bad = replace(made, append_rows=made.append_rows[first_write], append_slots=made.append_slots[first_write])
    with pytest.raises(AssertionError, match="no one wrote"):
        expand(bad, layout, pages)


def test_article_4_3_direct_ragged():
    layout = Layout.of([Segment(-1, 96), Segment(0, 4), Segment(0, 4)])
    launch = plan(layout, [Strategy.DIRECT_RAGGED] * 2, Pages.scratch(layout, 16)).launches[0]
    assert launch.qo_indptr.tolist() == [0, 100, 104]
    assert launch.kv.paged_kv_indptr.tolist() == [0, 7, 14]
    assert launch.kv.paged_kv_indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 7]
    assert launch.kv.paged_kv_last_page_len.tolist() == [4, 4]


def test_article_4_5_1_multi_item():
    layout = Layout.of([Segment(-1, 96), Segment(0, 4), Segment(0, 4)])
    launch = plan(layout, [Strategy.MULTI_ITEM] * 2, Pages.scratch(layout, 16)).launches[0]
    assert launch.qo_indptr.tolist() == [0, 104]
    assert launch.kv.lengths(16).tolist() == [104]
    assert launch.multi_item.prefix_len_ptr.tolist() == [96]
    assert launch.multi_item.token_pos_in_items_ptr.tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
    assert launch.multi_item.max_item_len_ptr.tolist() == [4]


@pytest.mark.parametrize("strategy", sorted(ITEM_LIMITED))
@pytest.mark.parametrize("length", [MAX_ITEM_TOKENS, MAX_ITEM_TOKENS + 1])
def test_an_item_past_uint16_is_refused_by_the_multi_item_mask_only(length, strategy):
    layout = Layout.of([Segment(-1, 3), Segment(0, length), Segment(0, 2)])
    pages = Pages.scratch(layout, 16)
    plan(layout, [Strategy.DIRECT_RAGGED] * 2, pages)
    if length <= MAX_ITEM_TOKENS:
        launch = plan(layout, [strategy] * 2, pages).launches[0]
        assert int(launch.multi_item.token_pos_in_items_ptr.max()) == length
    else:
        with pytest.raises(LayoutError, match="65535"):
            plan(layout, [strategy] * 2, pages)


def test_naive_refuses_a_shared_prefix():
    layout = Layout.of([Segment(-1, 3), Segment(0, 2), Segment(0, 2)])
    with pytest.raises(LayoutError, match="unshared"):
        plan(layout, [Strategy.NAIVE] * 2, Pages.scratch(layout, 16))


def test_one_strategy_for_each_leaf():
    layout = Layout.of([Segment(-1, 3), Segment(0, 2), Segment(0, 2)])
    with pytest.raises(LayoutError, match="2 leaves"):
        plan(layout, [Strategy.MULTI_ITEM], Pages.scratch(layout, 16))


@pytest.mark.parametrize("strategy", [Strategy.DIRECT_RAGGED, Strategy.MULTI_ITEM])
def test_memory_grows_with_tokens_not_with_their_square(strategy):
    def size(items):
        layout = Layout.of([Segment(-1, 512), *[Segment(0, 64)] * items])
        made = plan(layout, [strategy] * items, Pages.scratch(layout, 16))
        arrays = [made.append_rows, made.append_slots, *(getattr(made.launches[0], n) for n in ("q_rows", "qo_indptr"))]
        return sum(a.nbytes for a in arrays) + made.launches[0].kv.paged_kv_indices.nbytes

    assert size(400) < 4.5 * size(100)


def test_article_4_4_cascade():
    layout = Layout.of([Segment(-1, 96), Segment(0, 4), Segment(0, 4)])
    made = plan(layout, [Strategy.CASCADE] * 2, Pages.scratch(layout, 16))
    prefix, shared, unique = made.launches
    assert [launch.mask for launch in made.launches] == [MaskKind.CAUSAL, MaskKind.NONE, MaskKind.CAUSAL]
    assert [launch.qo_indptr.tolist() for launch in (shared, unique)] == [[0, 8], [0, 4, 8]]
    assert [launch.kv.paged_kv_indptr.tolist() for launch in (shared, unique)] == [[0, 6], [0, 1, 2]]
    assert [launch.kv.paged_kv_last_page_len.tolist() for launch in (shared, unique)] == [[16], [4, 4]]
    assert prefix.qo_indptr.tolist() == [0, 96]
    assert made.merges == ((2, 1),)


def test_article_4_5_3_a_custom_mask_is_packed_lowest_bit_first():
    layout = Layout.of([Segment(-1, 3), Segment(0, 2), Segment(0, 2)])
    launch = plan(layout, [Strategy.CUSTOM_MASK] * 2, Pages.scratch(layout, 16)).launches[0]
    assert launch.custom_mask.size == 7 * 7
    bits = np.unpackbits(launch.packed_custom_mask(16), bitorder="little")[:49]
    np.testing.assert_array_equal(bits.reshape(7, 7).astype(bool), visible(layout))


def test_packed_multi_item_keeps_requests_small_and_shares_their_pages():
    layout = Layout.of([Segment(-1, 256), *[Segment(0, 30)] * 10, Segment(0, 200)])
    launch = plan(layout, [Strategy.PACKED_MULTI_ITEM] * 11, Pages.scratch(layout, 16)).launches[0]
    assert np.diff(launch.qo_indptr).tolist() == [256, 120, 120, 60, 200]
    tables = np.split(launch.kv.paged_kv_indices, launch.kv.paged_kv_indptr[1:-1])
    for table in tables:
        np.testing.assert_array_equal(table[:16], tables[0])


def test_grouped_launches_keep_short_requests_from_long_ones():
    layout = Layout.of([Segment(-1, 256), Segment(0, 4), Segment(0, 100), Segment(0, 5)])
    made = plan(layout, [Strategy.DIRECT_RAGGED_GROUPED] * 3, Pages.scratch(layout, 16))
    assert [np.diff(launch.qo_indptr).tolist() for launch in made.launches] == [[4, 5], [256, 100]]


def test_a_draft_tree_by_its_visibility():
    """A tree whose branches are single tokens, the article's 4.5.4: each sees its ancestors and itself."""
    parents = [-1, 0, 0, 1, 1, 2]
    layout = Layout.of([Segment(-1, 10), *[Segment(p + 1, 1) for p in parents]])
    seen = visible(layout)
    made = plan_visibility(layout, seen, 16)
    np.testing.assert_array_equal(expand(made, layout, Pages.scratch(layout, 16)), seen)
    blind = seen.copy()
    blind[3] = False
    with pytest.raises(LayoutError, match="at least one token"):
        plan_visibility(layout, blind, 16)


# --- what a refusal says, and what travels through


TWO_TREES = [Segment(-1, 3), Segment(0, 2), Segment(0, 4), Segment(-1, 5), Segment(3, 1)]


def refusal(work):
    with pytest.raises(LayoutError) as refused:
        work()
    return str(refused.value)


@pytest.mark.parametrize("strategy", sorted(WINDOWLESS))
def test_a_window_too_short_is_told_with_the_strategy_and_what_to_use(strategy):
    layout = Layout.of(TWO_TREES)
    told = refusal(lambda: plan(layout, [strategy] * 3, Pages.scratch(layout, 16), window=6))
    assert told.startswith(f"{strategy} does not keep distances within a sliding window, and 6 tokens are fewer")
    assert told.endswith("use direct_ragged")


@pytest.mark.parametrize("strategy", sorted(ITEM_LIMITED))
def test_an_item_too_long_is_told_with_the_strategy_and_both_numbers(strategy):
    layout = Layout.of([Segment(-1, 3), Segment(0, MAX_ITEM_TOKENS + 1), Segment(0, 2)])
    told = refusal(lambda: plan(layout, [strategy] * 2, Pages.scratch(layout, 16)))
    assert told == f"{strategy} takes items of up to 65535 tokens, got 65536: use direct_ragged"


def test_other_refusals_word_by_word():
    layout = Layout.of(TWO_TREES)
    pages = Pages.scratch(layout, 16)
    assert refusal(lambda: plan(layout, [Strategy.CASCADE], pages)) == "3 leaves need as many strategies, got 1"
    told = refusal(lambda: plan(layout, [Strategy.NAIVE] * 3, pages))
    assert told == "naive computes a prefix for every item: give it layout.unshared(layout)"
    mixed = [Strategy.CUSTOM_MASK, Strategy.DIRECT_RAGGED, Strategy.CUSTOM_MASK]
    told = refusal(lambda: plan(layout, mixed, pages))
    assert told == "custom_mask and reference compute whole trees: give them every leaf of a request"
    seen = visible(layout)
    told = refusal(lambda: plan_visibility(layout, seen[1:], 16))
    assert told == "the visibility of this layout is 15 x 15, got (14, 15)"
    seen[2] = False
    told = refusal(lambda: plan_visibility(layout, seen, 16))
    assert told == "every row must see at least one token, itself if nothing else"


def test_a_leaf_that_is_cached_is_no_leaf():
    layout = Layout.of([Segment(-1, 4, cached=4), Segment(0, 3, cached=1)])
    pages = Pages(16, 1, (np.zeros(1, np.int32), np.zeros(1, np.int32)))
    told = refusal(lambda: plan(layout, [Strategy.DIRECT_RAGGED], pages))
    assert told == "a leaf with cached tokens is an inner segment whose continuation is missing"


def test_a_visibility_over_two_trees_keeps_them_apart():
    layout = Layout.of(TWO_TREES)
    seen = visible(layout)
    made = plan_visibility(layout, seen, 4)
    np.testing.assert_array_equal(expand(made, layout, Pages.scratch(layout, 4)), seen)
    assert made.launches[0].custom_mask.size == 9 * 9 + 6 * 6
    assert made.logits_soft_cap == 0.0
    assert made.merges == ()
    assert made.page_size == 4


@pytest.mark.parametrize("strategy", SHARING)
def test_the_soft_cap_travels_with_the_plan(strategy):
    layout = Layout.of(TWO_TREES)
    pages = Pages.scratch(layout, 16)
    assert plan(layout, [strategy] * 3, pages, soft_cap=30.0).logits_soft_cap == 30.0
    assert plan(layout, [strategy] * 3, pages).logits_soft_cap == 0.0


def test_a_path_may_end_in_a_leaf_without_a_parent():
    """Naive looks at the parents' children; the last segments of a layout have none."""
    layout = Layout.of([Segment(-1, 3), Segment(0, 2), Segment(-1, 4)])
    exact(layout, Pages.scratch(layout, 16), [Strategy.NAIVE] * 2)


def test_two_cascades_in_one_plan_are_merged_each_in_its_own():
    layout = Layout.of([Segment(-1, 20), *[Segment(0, 3)] * 4])
    mixed = [Strategy.CASCADE] * 2 + [Strategy.CASCADE_CONTIGUOUS] * 2
    made = exact(layout, Pages.scratch(layout, 16), mixed)
    assert made.merges == ((2, 1), (4, 3)), "the shared rows are the first one's"
    for a, b in made.merges:
        np.testing.assert_array_equal(made.launches[a].q_rows, made.launches[b].q_rows)


CAUSAL, NOTHING, ITEMS, MATRIX = MaskKind.CAUSAL, MaskKind.NONE, MaskKind.MULTI_ITEM, MaskKind.CUSTOM
MASKS = {
    Strategy.SPLIT_CACHE: [CAUSAL, CAUSAL],
    Strategy.DIRECT_RAGGED: [CAUSAL],
    Strategy.DIRECT_RAGGED_GROUPED: [CAUSAL, CAUSAL],
    Strategy.CASCADE: [CAUSAL, NOTHING, CAUSAL],
    Strategy.CASCADE_CONTIGUOUS: [CAUSAL, NOTHING, CAUSAL],
    Strategy.MULTI_ITEM: [ITEMS],
    Strategy.PACKED_MULTI_ITEM: [ITEMS],
    Strategy.CUSTOM_MASK: [MATRIX],
    Strategy.REFERENCE: [MATRIX],
}


@pytest.mark.parametrize("strategy", MASKS)
def test_each_launch_says_how_it_masks(strategy):
    layout = Layout.of([Segment(-1, 200), Segment(0, 4), Segment(0, 3)])
    made = exact(layout, Pages.scratch(layout, 16), [strategy] * 2)
    assert [launch.mask for launch in made.launches] == MASKS[strategy]


@pytest.mark.parametrize("strategy", sorted(ITEM_LIMITED))
def test_the_kernels_count_items_in_sixteen_bits_and_prefixes_in_thirty_two(strategy):
    layout = Layout.of([Segment(-1, 3), Segment(0, 1)])
    arrays = plan(layout, [strategy], Pages.scratch(layout, 16)).launches[0].multi_item
    assert arrays.token_pos_in_items_ptr.dtype == arrays.max_item_len_ptr.dtype == np.uint16
    assert arrays.prefix_len_ptr.dtype == np.uint32
    assert arrays.token_pos_in_items_len == 1


@pytest.mark.parametrize("kept", [[7], [2, 5], [9, 0, 3]])
def test_a_plan_says_how_many_pages_it_needs_kept_ones_included(kept):
    layout = Layout.of([Segment(-1, 16 * len(kept)), Segment(0, 16)])
    pages = Pages(16, 0, (np.array(kept, np.int32), None))
    made = plan(layout, [Strategy.CASCADE_CONTIGUOUS], pages)
    assert made.num_pages == max(kept) + 1


def test_the_masks_of_several_requests_are_padded_to_whole_bytes_each():
    rng = np.random.default_rng(0)
    q_lens, kv_lens = [3, 1, 5], [7, 20, 3]
    masks = [rng.random((q, kv)) < 0.5 for q, kv in zip(q_lens, kv_lens, strict=True)]
    launch = Launch(
        MaskKind.CUSTOM,
        np.arange(9, dtype=np.int32),
        np.array([0, 3, 4, 9], np.int32),
        PagedKv(np.array([0, 1, 3, 4], np.int32), np.arange(4, dtype=np.int32), np.array([7, 4, 3], np.int32)),
        custom_mask=np.concatenate([mask.ravel() for mask in masks]),
    )
    packed = launch.packed_custom_mask(16)
    assert packed.dtype == np.uint8
    sizes = [-(-mask.size // 8) for mask in masks]
    assert len(packed) == sum(sizes)
    for part, mask in zip(np.split(packed, np.cumsum(sizes)[:-1]), masks, strict=True):
        bits = np.unpackbits(part, bitorder="little")
        assert (bits[: mask.size].astype(bool) == mask.ravel()).all()
        assert not bits[mask.size :].any()
    with pytest.raises(AssertionError, match=r"^only a custom launch has a mask to pack$"):
        replace(launch, custom_mask=None).packed_custom_mask(16)
