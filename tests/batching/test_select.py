"""The choice of strategy: what a request may ask for, and what AUTO takes."""

from types import SimpleNamespace

import numpy as np
import pytest

from attention.plans import ITEM_LIMITED, MAX_ITEM_TOKENS, WINDOWLESS, Strategy
from attention.timing import CANDIDATES, Ranked, built_in
from batching.items import Item
from batching.select import DENSE_TOKENS, Budget, Choice, Measured, Replayed, StrategyError, Threshold, choose
from batching.types import TokenizedRequest

AUTO = Threshold(64)


def item(length):
    return Item(np.zeros(length, np.int32), np.array([length - 1], np.int32), np.array([[1, 2]], np.int32))


def request(prefix, lengths, strategy=None):
    return TokenizedRequest(np.zeros(prefix, np.int32), tuple(map(item, lengths)), strategy=strategy)


def chosen(prefix, lengths, policy=AUTO, strategy=None):
    made = request(prefix, lengths, strategy)
    return choose(made, made.items, policy)


# --- dense masks


@pytest.mark.parametrize("strategy", [Strategy.REFERENCE, Strategy.CUSTOM_MASK])
def test_a_dense_mask_takes_requests_up_to_its_limit(strategy):
    assert chosen(96, [1000] * 4, strategy=strategy).strategies == (strategy,) * 4
    with pytest.raises(StrategyError, match=f"{strategy} takes requests of up to {DENSE_TOKENS} tokens, got 4097"):
        chosen(97, [1000] * 4, strategy=strategy)


@pytest.mark.parametrize("strategy", sorted(set(Strategy) - {Strategy.REFERENCE, Strategy.CUSTOM_MASK}))
def test_others_take_more(strategy):
    assert set(chosen(97, [1000] * 4, strategy=strategy).strategies) == {strategy}


# --- what is asked for


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("policy", [AUTO, Measured(built_in())], ids=["threshold", "measured"])
def test_what_is_asked_for_is_taken(strategy, policy):
    choice = chosen(20, [5, 500], policy, strategy)
    assert choice.strategies == (strategy, strategy)
    assert choice.reason == f"asked for: {strategy}"


@pytest.mark.parametrize("strategy", [Strategy.MULTI_ITEM, Strategy.PACKED_MULTI_ITEM])
def test_an_item_whose_positions_need_more_than_16_bits(strategy):
    assert chosen(4, [MAX_ITEM_TOKENS], strategy=strategy).strategies == (strategy,)
    with pytest.raises(StrategyError, match=f"items of up to {MAX_ITEM_TOKENS} tokens, got 65536: direct_ragged"):
        chosen(4, [MAX_ITEM_TOKENS + 1], strategy=strategy)


@pytest.mark.parametrize("strategy", sorted(WINDOWLESS))
@pytest.mark.parametrize("policy", [Threshold(64, 100), Measured(built_in(), 100)], ids=["threshold", "measured"])
def test_past_a_sliding_window_they_are_refused(strategy, policy):
    assert chosen(60, [40, 7], policy, strategy).strategies == (strategy, strategy)
    with pytest.raises(StrategyError, match="sliding window of 100 tokens, prefix and item have 101: direct_ragged"):
        chosen(60, [41, 7], policy, strategy)


@pytest.mark.parametrize("strategy", sorted(set(Strategy) - WINDOWLESS))
def test_others_compute_past_the_window(strategy):
    assert set(chosen(60, [41, 7], Threshold(64, 100), strategy).strategies) == {strategy}


# --- AUTO by length


def test_by_length():
    choice = chosen(10, [64, 65, 3])
    assert choice.strategies == (Strategy.MULTI_ITEM, Strategy.DIRECT_RAGGED, Strategy.MULTI_ITEM)
    assert "2 of 3 of at most 64 tokens: multi_item" in choice.reason
    assert "1 of 3 longer than 64 tokens: direct_ragged" in choice.reason


def test_by_length_past_the_window():
    choice = chosen(60, [40, 41], Threshold(64, 100))
    assert choice.strategies == (Strategy.MULTI_ITEM, Strategy.DIRECT_RAGGED)
    assert "1 of 2 past the model's sliding window of 100 tokens: direct_ragged" in choice.reason


# --- AUTO by measured time


@pytest.mark.parametrize(("prefix", "lengths"), [(64, [8] * 4), (2048, [32] * 100), (512, [1500] * 8), (0, [20, 900])])
def test_by_time_names_the_machine_and_takes_the_fastest(prefix, lengths):
    model = built_in()
    choice = chosen(prefix, lengths, Measured(model))
    best = model.ranked(prefix, 0, np.array(lengths, np.int32))[0]
    assert choice.strategies == (best.strategy,) * len(lengths)
    assert choice.packed_rows == best.packed_rows
    assert choice.reason.startswith(f"measured on {model.machine.name}: {best.strategy} {best.milliseconds:.3f} ms")


@pytest.mark.parametrize(("prefix", "lengths"), [(64, [8] * 4), (2048, [32] * 100), (512, [1500] * 8)])
def test_by_time_a_window_leaves_the_others(prefix, lengths):
    choice = chosen(prefix, lengths, Measured(built_in(), 16))
    assert set(choice.strategies) <= set(CANDIDATES) - WINDOWLESS
    named = {strategy for strategy in Strategy if f" {strategy} " in f"{choice.reason} "}
    assert named
    assert not named & WINDOWLESS


def test_by_time_a_window_that_everything_fits_excludes_nothing():
    lengths = [32] * 100
    assert chosen(2048, lengths, Measured(built_in(), 2080)) == chosen(2048, lengths, Measured(built_in()))


def test_by_time_too_long_items_leave_the_others():
    choice = chosen(4, [MAX_ITEM_TOKENS + 1], Measured(built_in()))
    assert not set(choice.strategies) & {Strategy.MULTI_ITEM, Strategy.PACKED_MULTI_ITEM}


# --- what is said


def test_by_time_it_says_the_best_and_the_next_and_how_it_packs():
    policy = Measured(built_in())
    for lengths in ([4] * 64, [40] * 64, [64] * 64, [200] * 8):
        ranked = policy.model.ranked(2048, 0, np.array(lengths, np.int32))
        choice = chosen(2048, lengths, policy)
        best, following = ranked[:2]
        assert choice.strategies == (best.strategy,) * len(lengths)
        assert choice.packed_rows == best.packed_rows
        assert choice.reason == (
            f"measured on {policy.model.machine.name}: {best.strategy} {best.milliseconds:.3f} ms a layer, "
            f"next {following.strategy} {following.milliseconds:.3f}"
        )


def test_by_time_only_what_can_be_is_ranked():
    """Behind a window some strategies are left, and the one asked of 16-bit masks is none of them."""
    choice = chosen(2000, [100] * 4, Measured(built_in(), window=1000))
    assert choice.strategies[0] not in WINDOWLESS
    named = {Strategy.DIRECT_RAGGED, Strategy.SPLIT_CACHE, Strategy.DIRECT_RAGGED_GROUPED}
    assert sum(f" {strategy} " in choice.reason + " " for strategy in named) >= 2


def test_packings_of_a_measured_choice_reach_the_plan():
    policy = Measured(built_in())
    rows = {chosen(2048, [length] * 64, only_packed(policy)).packed_rows for length in (4, 16, 40, 64, 90, 200)}
    assert rows == {64, 128}


def only_packed(policy):
    """A model that ranks packed_multi_item alone."""

    class Only:
        machine = policy.model.machine

        def ranked(self, prefix, cached, lengths, among):
            return policy.model.ranked(prefix, cached, lengths, (Strategy.PACKED_MULTI_ITEM,))

    return Measured(Only(), policy.window)


# --- graphs


def test_what_graphs_replay_is_fused_up_to_its_limit():
    choice = chosen(20, [5, MAX_ITEM_TOKENS], Replayed(False))
    assert choice == Choice((Strategy.FUSED,) * 2, "replayed from a CUDA graph")
    choice = chosen(20, [5, MAX_ITEM_TOKENS + 1], Replayed(False))
    assert choice == Choice((Strategy.DIRECT_RAGGED,) * 2, "an item of 65536 tokens")
    assert chosen(20, [5], Replayed(False), Strategy.MULTI_ITEM).strategies == (Strategy.MULTI_ITEM,)


def test_an_invariant_service_computes_one_way():
    assert chosen(20, [5], Replayed(True), Strategy.FUSED).strategies == (Strategy.FUSED,)
    with pytest.raises(StrategyError, match=r"^the service is invariant, and multi_item would give other bits: fused$"):
        chosen(20, [5], Replayed(True), Strategy.MULTI_ITEM)
    with pytest.raises(StrategyError, match=r"^the service is invariant up to items of 65535 tokens, got 65536$"):
        chosen(20, [MAX_ITEM_TOKENS + 1], Replayed(True))


# --- the budget of a pass, to its edges


def taken(budget, *asked):
    return [budget.take(*each) for each in asked]


def test_a_budget_is_spent_to_the_last_token_and_item():
    assert taken(Budget(30, 9), (10, [10, 10]), (0, [1])) == [2, 0]
    assert taken(Budget(31, 9), (10, [10, 10]), (0, [1])) == [2, 1]
    budget = Budget(100, 3)
    assert taken(budget, (0, [5, 5]), (0, [5, 5])) == [2, 0], "a request that fits stays together"
    assert (budget.tokens, budget.items) == (90, 1)
    assert budget.take(0, [5]) == 1
    assert budget.full
    assert Budget(0, 5).full
    assert Budget(5, 0).full
    assert not Budget(1, 1).full


def test_a_request_of_just_a_pass_stays_together_and_a_larger_one_fills_what_is_left():
    assert taken(Budget(30, 99), (0, [1]), (10, [10, 10])) == [1, 0]
    assert taken(Budget(30, 99), (0, [1]), (10, [10, 11])) == [1, 1]
    assert taken(Budget(30, 99), (40, [10, 10])) == [1], "the first gets one item, however long"
    assert taken(Budget(30, 99), (0, [1]), (40, [10, 10])) == [1, 0]


def test_where_every_item_computes_the_prefix_it_counts_each_time():
    budget = Budget(30, 99)
    assert budget.take(10, [5, 5, 5], True) == 2
    assert budget.tokens == 0
    budget = Budget(31, 99)
    assert budget.take(0, [5, 5], True) == 2
    assert budget.tokens == 21
    budget = Budget(31, 99)
    assert budget.take(7, [5, 5], False) == 2
    assert budget.tokens == 14


def test_items_are_bounded_too():
    budget = Budget(1000, 3)
    assert budget.take(0, [1] * 5) == 3
    assert (budget.tokens, budget.items) == (997, 0)


# --- items


@pytest.mark.parametrize(
    ("ids", "offsets", "read_ids", "told"),
    [
        (np.zeros((1, 2)), [0], [[1]], "ids is one row of token ids"),
        (np.zeros(0), [], np.zeros((0, 1)), "an item has at least one token"),
        (np.zeros(2), [0, 1], [[1]], "one row of read_ids a read offset"),
        (np.zeros(2), [2], [[1]], "reads lie inside the item"),
        (np.zeros(2), [-1], [[1]], "reads lie inside the item"),
    ],
)
def test_an_item_is_checked(ids, offsets, read_ids, told):
    with pytest.raises(AssertionError, match=f"^{told}"):
        Item(np.asarray(ids, np.int32), np.array(offsets, np.int32), np.asarray(read_ids, np.int32))
    Item(np.zeros(2, np.int32), np.array([0, 1], np.int32), np.array([[1], [2]], np.int32))


class Ranks:
    """A model of times that ranks what it is asked for in the given order."""

    machine = SimpleNamespace(name="here")

    def __init__(self, most=99):
        self.asked, self.most = None, most

    def ranked(self, prefix, cached, lengths, among):
        self.asked = prefix, cached, lengths.tolist(), list(among)
        return [Ranked(1.0 + place / 8, strategy, 64) for place, strategy in enumerate(among)][: self.most]


def test_the_reason_of_a_measured_choice_names_the_next_best():
    model = Ranks(2)
    choice = chosen(100, [MAX_ITEM_TOKENS + 1, 5], Measured(model, window=50))
    possible = [s for s in CANDIDATES if s not in WINDOWLESS]
    assert model.asked == (100, 0, [MAX_ITEM_TOKENS + 1, 5], possible)
    told = f"measured on here: {possible[0]} 1.000 ms a layer, next {possible[1]} 1.125"
    assert choice == Choice((possible[0],) * 2, told, 64)
    choice = chosen(100, [5], Measured(Ranks(1), window=50))
    assert choice.reason == f"measured on here: {possible[0]} 1.000 ms a layer"


def test_what_comes_behind_an_impossible_strategy_is_possible():
    model = Ranks()
    chosen(100, [MAX_ITEM_TOKENS + 1], Measured(model))
    assert model.asked[3] == [s for s in CANDIDATES if s not in ITEM_LIMITED]
