"""What the tiers' bench reports of a choice follows from what was measured, and from nothing else."""

import pytest

from loadtest.bench_tiers import Taken, _told


def row(computed, fetched, chosen, fetches=0, prefix=64):
    taken = Taken(list(computed), list(fetched), list(chosen), [0.01] * len(fetched), fetches)
    return taken.row("model", "host", prefix, 1000)


@pytest.mark.parametrize("fetches", [0, 3])
def test_what_was_chosen_is_held_against_the_better_way_whatever_the_choice_was(fetches):
    found = row([0.2] * 3, [0.1] * 3, [0.15] * 3, fetches)
    assert found.behind == pytest.approx(0.5)
    assert (found.computed_ms, found.fetched_ms, found.chosen_ms) == pytest.approx((200, 100, 150))
    assert (found.turns, found.fetches, found.noise) == (3, fetches, 0)


def test_a_machine_that_turns_slow_between_turns_is_no_fault_of_the_choice():
    slower = [1.0, 1.4, 2.0, 3.0, 3.1]
    found = row([0.2 * s for s in slower], [0.3 * s for s in slower], [0.21 * s for s in slower])
    assert found.behind == pytest.approx(0.05)
    assert found.noise == pytest.approx(0.0, abs=1e-9)


def test_noise_is_told_and_one_wild_turn_is_not_the_figure():
    steady, wild = (
        [0.2 * (1 + e) for e in errors] for errors in ([-0.02, -0.01, 0, 0.01, 5.0], [-0.4, -0.2, 0, 0.2, 5])
    )
    small, large = (row([0.2] * 5, [0.3] * 5, chosen) for chosen in (steady, wild))
    assert small.behind == large.behind == pytest.approx(0.0)
    assert 0 < small.noise < large.noise


def test_the_summary_counts_points_beyond_the_bar_and_names_the_worst():
    told = _told(
        [row([0.2] * 3, [0.1] * 3, [0.1 * (1 + behind)] * 3, prefix=n) for n, behind in enumerate((0.0, 0.05, 0.3))]
    )
    assert "at 2;" in told
    assert "30.0% longer (host, P 2)" in told
