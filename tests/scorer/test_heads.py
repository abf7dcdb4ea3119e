import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.plans import Strategy
from batching.types import Scored
from scorer.heads import NOT_FINITE, all_log_odds, sigmoid, verdict
from tests.attention.draw import examples


def scored(logits, lse=None):
    return Scored(
        np.array(logits, np.float32), None if lse is None else np.array(lse, np.float32), Strategy.DIRECT_RAGGED
    )


def test_two_labels_give_log_odds_and_probability():
    given = verdict(scored([[2.0, -1.0]]), "label_logits")
    assert given.score == given.log_odds == 3.0
    assert given.probability == pytest.approx(1 / (1 + math.exp(-3)), abs=1e-15)
    assert given.label_logits == (2.0, -1.0)
    assert given.vocabulary_probabilities == ()


def test_one_label_gives_its_logit_and_no_probability():
    given = verdict(scored([[-4.5]]), "label_logits")
    assert given.score == -4.5
    assert given.log_odds is None
    assert given.probability is None


def test_swapped_labels_swap_columns_and_mirror_the_probability():
    a, b = verdict(scored([[1.5, 0.25]]), "label_logits"), verdict(scored([[0.25, 1.5]]), "label_logits")
    assert a.label_logits == b.label_logits[::-1]
    assert a.probability + b.probability == pytest.approx(1.0, abs=1e-15)


def test_log_odds_stay_apart_where_probabilities_round_to_one():
    odds = [verdict(scored([[x, 0.0]]), "label_logits").score for x in (20.0, 20.1, 25.0, 30.0)]
    assert odds == sorted(set(odds))


def test_very_negative_logits_are_finite():
    given = verdict(scored([[-100.0, 50.0]]), "label_logits")
    assert 0 <= given.probability < 1e-60
    assert given.finite


@pytest.mark.parametrize("pair", [(0.0, 0.0), (3.0, 1.0), (-20.0, 20.0), (30.0, -30.0), (1e30, -1e30)])
def test_sigmoid_equals_softmax(pair):
    top = max(pair)
    softmax = math.exp(pair[0] - top) / sum(math.exp(x - top) for x in pair)
    assert verdict(scored([pair]), "label_logits").probability == pytest.approx(softmax, abs=1e-6)


def test_sigmoid_overflows_nowhere():
    assert (sigmoid(-1e308), sigmoid(0.0), sigmoid(1e308)) == (0.0, 0.5, 1.0)


def test_vocabulary_probabilities_need_the_log_sum_exp():
    vocabulary = np.array([1.0, 2.0, 3.0])
    lse = float(np.log(np.exp(vocabulary).sum()))
    given = verdict(scored([[3.0, 1.0]], [lse]), "label_logits")
    expected = np.exp(vocabulary - lse)
    assert given.vocabulary_probabilities == pytest.approx((expected[2], expected[0]), rel=1e-6)


def test_a_logit_above_its_log_sum_exp_is_rounding():
    assert verdict(scored([[5.0, -50.0]], [4.9999995]), "label_logits").vocabulary_probabilities[0] == 1.0


def test_query_likelihood_is_the_mean_over_the_reads():
    given = verdict(scored([[1.0], [2.0], [4.0]], [3.0, 3.0, 5.0]), "query_likelihood")
    assert given.score == pytest.approx((-2 - 1 - 1) / 3)
    assert given.label_logits == ()
    assert given.log_odds is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_leaves(bad):
    assert verdict(scored([[bad, 0.0]]), "label_logits") == NOT_FINITE
    assert verdict(scored([[0.0, 0.0]], [bad]), "label_logits") == NOT_FINITE
    assert verdict(scored([[0.0], [bad]], [1.0, 1.0]), "query_likelihood") == NOT_FINITE
    assert NOT_FINITE.score is None


@given(
    rows=st.lists(st.tuples(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 2), min_size=1, max_size=9)
)
@examples(300)
def test_log_odds_of_many_are_those_of_each_bit_for_bit(rows):
    items = [scored([row]) for row in rows]
    assert all_log_odds(items, "label_logits") == [verdict(item, "label_logits").log_odds for item in items]
    classes = [scored([row[:1]]) for row in rows]
    assert all_log_odds(classes, "classification") == [verdict(one, "classification").log_odds for one in classes]


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (None, "label_logits"),
        (scored([[1.0, math.nan]]), "label_logits"),
        (scored([[math.inf, 1.0]]), "label_logits"),
        (scored([[1.0]]), "label_logits"),
        (scored([[1.0, 2.0]], [3.0]), "label_logits"),
        (scored([[1.0, 2.0]]), "query_likelihood"),
    ],
)
def test_there_are_log_odds_of_all_only_where_each_has_its_own_and_nothing_else(other, kind):
    assert all_log_odds([scored([[1.0, 2.0]]), other], kind) is None


def test_one_label_has_no_log_odds_and_one_class_has():
    assert all_log_odds([scored([[1.5]])], "label_logits") is None
    assert all_log_odds([scored([[1.5]])], "classification") == [1.5]
