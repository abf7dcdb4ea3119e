"""The fitted time of passes, and the window that a batch stays open."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.pass_time import KNOWN_PASSES, MOST_MARGIN, PRIOR_WEIGHT, REMEMBERED, FittedPassTime, Work, solved
from batching.window import MAX_SECONDS, Window


@given(st.integers(0, 50), st.integers(0, 50), st.lists(st.integers(1, 30), min_size=1, max_size=6), st.booleans())
def test_work_counts_rows_and_what_they_see(prefix, cached, items, each):
    """Pairs by the triangle's area, without the half cell on the diagonal."""
    cached = min(prefix, cached)
    if each:
        rows = sum(prefix + n for n in items)
        pairs = sum((prefix + n) ** 2 / 2 for n in items)
    else:
        rows = prefix - cached + sum(items)
        pairs = (prefix**2 - cached**2) / 2 + sum(((prefix + n) ** 2 - prefix**2) / 2 for n in items)
    work = Work.of(prefix, cached, items, each)
    assert work.tokens == rows
    assert work.pairs == pytest.approx(pairs)


def passes(rng, n):
    for _ in range(n):
        tokens = int(rng.integers(50, 16_000))
        yield Work(tokens, float(tokens * rng.integers(100, 8000)))


@pytest.mark.parametrize("truth", [(0.004, 1e-5, 2e-10), (0.0, 5e-4, 0.0), (0.02, 1e-6, 1e-9)])
def test_it_learns_the_device_from_a_few_passes(truth):
    rng, made = np.random.default_rng(1), FittedPassTime()

    def real(work):
        return (truth[0] + truth[1] * work.tokens + truth[2] * work.pairs) * rng.uniform(0.97, 1.03)

    for work in passes(rng, 48):
        made.learn(work, real(work))
    errors = [abs(made.seconds(work) / real(work) - 1) for work in passes(rng, 50)]
    assert np.quantile(errors, 0.9) < 0.1
    assert 1.0 <= made.margin < 1.2
    half = Work(8000, 8000 * 1000.0)
    assert made.share(half, 16_000) <= made.seconds(half), "a part of a pass pays a part of what is fixed"


def test_it_follows_a_device_that_gets_slower_and_is_careful_meanwhile():
    rng, made = np.random.default_rng(2), FittedPassTime()
    for work in passes(rng, 40):
        made.learn(work, 1e-5 * work.tokens)
    for work in passes(rng, 10):
        made.learn(work, 3e-5 * work.tokens)
    assert made.margin > 1.2
    for work in passes(rng, 80):
        made.learn(work, 3e-5 * work.tokens)
    assert made.seconds(Work(10_000)) == pytest.approx(0.3, rel=0.1)


def test_a_few_passes_that_compile_something_make_it_careful_and_not_useless():
    rng, made = np.random.default_rng(3), FittedPassTime()
    for n, work in enumerate(passes(rng, 40)):
        made.learn(work, 1e-5 * work.tokens * (200 if n % 5 == 4 else 1))
    assert made.margin <= MOST_MARGIN
    assert made.seconds(Work(10_000)) < 1.0


def test_it_is_not_trusted_before_it_has_seen_some_passes():
    made = FittedPassTime()
    for n in range(KNOWN_PASSES):
        assert not made.known
        made.learn(Work(100 + n, 1000.0), 0.01)
    assert made.known
    made.learn(Work(), 0.0)  # tells nothing, breaks nothing
    assert made.seconds(Work(100, 1000.0)) == pytest.approx(0.01, rel=0.1)


# --- the window


def busy_window(gap=0.0004):
    window, now = Window(), 0.0  # two seconds of work
    for _ in range(250):
        for _ in range(20):
            window.arrived(now)
            now += gap
        window.ran(now - 19 * gap, now)
    return window, now


def test_an_idle_device_waits_for_no_one():
    window = Window()
    assert window.seconds(10, 1000, 1.0, 0.0) == 0.0
    for now in range(1, 40):
        window.arrived(float(now))
        window.ran(now, now + 0.01)
    assert window.seconds(10, 1000, 1.0, 40.0) == 0.0


def test_a_busy_one_stays_open_for_a_moment_unless_the_batch_is_full_or_someone_is_in_a_hurry():
    window, now = busy_window()
    assert 0 < window.seconds(10, 1000, 1.0, now) <= MAX_SECONDS
    assert window.seconds(1000, 1000, 1.0, now) == 0.0
    assert window.seconds(10, 1000, -0.1, now) == 0.0
    assert window.seconds(10, 1000, 0.0003, now) == pytest.approx(0.0003)
    assert window.seconds(10, 1000, 1.0, now + 1.0) == 0.0, "nobody came for a second: nobody is waited for"


@pytest.mark.parametrize("slack", [1.0, 0.0005, 0.0, -1.0])
@pytest.mark.parametrize(("gap", "wait"), [(0.0004, 0.0008), (0.000999, 0.001998), (0.0011, 0.0), (0.0009, 0.0018)])
def test_it_waits_for_two_gaps_at_most_two_milliseconds_and_not_where_the_next_is_further_off(gap, wait, slack):
    window, now = busy_window(gap)
    assert window.seconds(10, 1000, slack, now - gap) == pytest.approx(max(0.0, min(wait, slack)), abs=1e-9)
    assert Window(most=1.0).seconds(10, 1000, 1.0, 0.0) == 0.0


def test_the_gap_is_a_mean_of_late_ones_and_grows_while_nobody_comes():
    window, _ = busy_window(0.0004)
    now = window._last
    window.arrived(now + 0.0009)
    assert window._gap == pytest.approx(0.0004 + 0.2 * 0.0005)
    assert window.seconds(10, 1000, 1.0, now + 0.0009) == pytest.approx(0.001)
    assert window.seconds(10, 1000, 1.0, now + 0.0009 + 0.0008) == pytest.approx(0.0016)


def test_how_busy_it_is_is_remembered_for_half_a_second():
    window = Window()
    window.ran(1.0, 1.2)
    busy = 1 - np.exp(-0.2 / 0.5)
    assert window._busy == pytest.approx(busy)
    window.ran(1.5, 1.6)  # a quarter of the time since
    kept = np.exp(-0.4 / 0.5)
    busy = busy * kept + 0.25 * (1 - kept)
    assert window._busy == pytest.approx(busy)
    window.ran(1.4, 1.8)  # two at a time count as one
    kept = np.exp(-0.2 / 0.5)
    busy = busy * kept + (1 - kept)
    assert window._busy == pytest.approx(busy)
    window.ran(1.8, 1.8)
    assert window._busy == pytest.approx(busy), "no time went by"


# --- sums of work


def test_work_adds_up_and_never_falls_below_nothing():
    one, other = Work(10, 70.0), Work(4, 90.0)
    assert one + other == Work(14, 160.0)
    assert one - other == Work(6, 0.0)
    assert other - one == Work(0, 20.0)
    assert Work(3, 8.0) - Work(1, 2.0) == Work(2, 6.0)


def test_before_anything_was_measured_the_first_belief_holds():
    made = FittedPassTime(rate=500.0)
    assert made.margin == 1.0
    assert made.share(Work(100, 3000.0), 1000) == pytest.approx(1e-4 + 0.2 + 3000 * 2e-8)
    assert made.seconds(Work(100, 3000.0)) == pytest.approx(1e-3 + 0.2 + 3000 * 2e-8)


def test_a_share_pays_its_part_of_what_is_fixed_and_all_of_the_rest():
    rng, made = np.random.default_rng(4), FittedPassTime()
    for work in passes(rng, 60):
        made.learn(work, 0.004 + 1e-5 * work.tokens + 2e-10 * work.pairs)
    fixed, a, b = made._fit
    assert made.share(Work(500, 10_000.0), 2000) == pytest.approx(fixed / 4 + 500 * a + 10_000 * b)
    assert fixed == pytest.approx(0.004, rel=0.2)


def test_the_margin_is_that_of_nine_passes_in_ten():
    made = FittedPassTime()
    for n in range(KNOWN_PASSES):
        made.learn(Work(1000 + n, 0.0), 0.01)
    made._fitted = lambda prior: made._fit  # what it predicts stays as it is
    predicted = made.seconds(Work(1000, 0.0))
    for n in range(10):
        made.learn(Work(1000, 0.0), predicted * (1.0 + n / 10))
    assert made.margin == pytest.approx(1.8)
    made.learn(Work(1, 0.0), 1.0)
    assert len(made._columns[0]) == KNOWN_PASSES + 11, "one token is a pass, too"


def test_one_pass_scales_the_first_belief():
    """The belief's shape stays where nothing speaks against it: what it measured is exact, all else in proportion."""
    belief, made = FittedPassTime(rate=500.0), FittedPassTime(rate=500.0)
    made.learn(Work(100, 3000.0), 4 * belief.seconds(Work(100, 3000.0)))
    for work in (Work(100, 3000.0), Work(7, 90_000.0), Work(5000, 10.0)):
        assert made.seconds(work) == pytest.approx(4 * belief.seconds(work))


def test_a_few_passes_weigh_against_the_belief_by_relative_errors():
    """Least squares written out: a row for each pass, and one for each coefficient of the belief."""
    passes, rate = [(100, 9e4, 1.2), (900, 4e5, 5.0), (50, 2e6, 3.0)], 1000.0
    made = FittedPassTime(rate)
    for tokens, pairs, seconds in passes:
        made.learn(Work(tokens, pairs), seconds)
    rows = np.array([[1 / s, t / s, p / s] for t, p, s in passes])
    belief = np.array([1e-3, 1 / rate, 1e-5 / rate])
    belief *= 3.0 / (belief @ [1, 50, 2e6])
    weight = np.sqrt(PRIOR_WEIGHT) * np.diag(rows.max(axis=0))
    expected = np.linalg.lstsq(np.vstack([rows, weight]), np.concatenate([np.ones(3), weight @ belief]), rcond=None)[0]
    assert (expected > 0).all()
    for work in (Work(1, 0.0), Work(300, 5e4), Work(10, 1e7)):
        assert made.seconds(work) == pytest.approx(float(expected @ [1, work.tokens, work.pairs]))


def test_what_computed_nothing_tells_nothing():
    made = FittedPassTime()
    made.learn(Work(100, 1000.0), 0.01)
    before = made.seconds(Work(100, 1000.0))
    made.learn(Work(0, 0.0), 5.0)
    made.learn(Work(100, 1000.0), 0.0)
    assert made.seconds(Work(100, 1000.0)) == before


def test_old_surprises_are_forgotten():
    made = FittedPassTime()
    for n in range(REMEMBERED):
        made.learn(Work(1000, 0.0), 0.018 if n % 2 else 0.01)
    assert made.margin > 1.2
    for _ in range(2 * REMEMBERED):
        made.learn(Work(1000, 0.0), 0.01)
    assert made.margin < 1.05


@given(st.integers(1, 3), st.lists(st.floats(-1, 1), min_size=12, max_size=12), st.floats(0.01, 10))
def test_small_systems_are_solved(size, numbers, ridge):
    """Those of the fit: products of columns, with something added on the diagonal."""
    columns = np.array(numbers[: 3 * size]).reshape(3, size)
    products, target = columns.T @ columns + ridge * np.eye(size), np.array(numbers[9 : 9 + size])
    found = solved([[*row, wanted] for row, wanted in zip(products.tolist(), target.tolist(), strict=True)])
    assert found == pytest.approx(np.linalg.solve(products, target), rel=1e-9, abs=1e-9)
