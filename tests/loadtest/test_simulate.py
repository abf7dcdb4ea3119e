"""What the policies are worth: the real batcher in virtual time. Every figure here follows from the seeds."""

import asyncio

import pytest

from loadtest.sim_device import device_time
from loadtest.sim_mixed import TURNS, WHOLE, mixed
from loadtest.simulate import MIX, Setting, capacity, flood, overload, policies, simulate
from loadtest.simulate_report import plot, report
from loadtest.traces import PROFILES, calls
from loadtest.virtual_time import run

DEVICE = device_time()


@pytest.fixture(scope="module")
def by_policy():
    return policies(12.0, DEVICE)


@pytest.fixture(scope="module")
def by_load():
    return overload(8.0, DEVICE)


def test_short_calls_gain_twofold_and_long_ones_lose_little(by_policy):
    ours, first_come = by_policy["ours"], by_policy["first come"]
    assert len(ours.of("short")) > 180
    assert len(ours.of("bulk")) > 180
    assert 2 * ours.latency("short", 0.99) <= first_come.latency("short", 0.99)
    assert ours.latency("bulk", 0.99) <= 1.5 * first_come.latency("bulk", 0.99)
    done = [sum(o.end is not None for o in result.outcomes) for result in (ours, first_come)]
    assert done[0] == done[1] == len(ours.outcomes), "equal throughput: all of them are answered"


def test_ours_keeps_the_long_calls_from_what_shortest_first_does_to_them(by_policy):
    assert by_policy["ours"].latency("bulk", 0.99) < by_policy["shortest first"].latency("bulk", 0.99)


def test_overload_costs_those_who_are_refused_and_no_one_else(by_load):
    capacity_, twice = by_load[1.0], by_load[2.0]
    assert twice.met >= 0.99
    assert twice.goodput >= 0.9 * capacity_.goodput
    assert twice.busy / twice.seconds > 0.98


def test_under_overload_neither_kind_of_call_is_starved(by_load):
    for name in ("short", "bulk"):
        made = by_load[2.0].of(name)
        assert sum(outcome.met for outcome in made) >= 0.4 * len(made)


def test_at_half_load_nobody_is_refused():
    result = simulate(calls(MIX, 0.5 * capacity(MIX, DEVICE), 8.0, seed=5), Setting(), DEVICE)
    assert [outcome.refused for outcome in result.outcomes if outcome.refused] == []
    assert result.met == 1.0


def test_a_tenant_that_floods_does_not_crowd_out_another():
    """The quiet one asks for a third of the device; its share is half."""
    result = flood(5.0, DEVICE)
    asked = sum(o.call.tokens for o in result.outcomes if o.call.profile.tenant == "quiet")
    assert result.tokens_of("quiet") >= 0.8 * asked
    assert result.tokens_of("loud") >= 0.5 * result.tokens, "and what it leaves is used"


def test_equal_seeds_give_equal_results(by_load):
    again = overload(8.0, DEVICE, (2.0,))[2.0]
    assert [(o.end, o.refused) for o in again.outcomes] == [(o.end, o.refused) for o in by_load[2.0].outcomes]


def test_a_trace_follows_its_rate_its_mix_and_its_bursts():
    trace = calls(MIX, 50.0, 100.0, seed=6, burst=4.0)
    assert 4500 < len(trace) < 5500
    assert 0.45 < sum(call.profile.name == "short" for call in trace) / len(trace) < 0.55
    within = sum(int(call.at) % 10 == 0 for call in trace) / len(trace)
    assert 0.35 < within < 0.45
    zipf = calls(((PROFILES["titles"], 1.0),), 50.0, 20.0, seed=6)
    assert sum(call.prefix_id < 20 for call in zipf) > 0.5 * len(zipf)


@pytest.fixture(scope="module")
def beams():
    return mixed(6.0, DEVICE, MIX, 0.6 * capacity(MIX, DEVICE), (0.0, 0.2))


def test_beam_searches_in_turns_cost_scoring_less_than_half_more(beams):
    """At 60 % load of scoring, with searches that ask for a fifth of the device."""
    alone, turns, whole = beams[0.0, TURNS], beams[0.2, TURNS], beams[0.2, WHOLE]
    assert len(turns.searches) == len(whole.searches) > 30, "all are answered"
    for kind in ("short", "bulk"):
        assert turns.p99[kind] <= 1.5 * alone.p99[kind]
        assert turns.p99[kind] < whole.p99[kind]
    assert turns.latency(0.99) < 1.0, "and searches do not starve"


def test_the_report_and_the_plot_show_every_row(by_policy, by_load, beams, tmp_path):
    told = report(by_policy, by_load, by_load[1.0], {0.5: _titles()}, beams)
    for row in ("| ours |", "| first come |", "| 1 x |", "| 2 x |", "| 50% |", "| 20% | in turns |"):
        assert row in told
    plot(tmp_path / "plot.png", by_policy, by_load)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def _titles():
    return simulate(calls(((PROFILES["titles"], 1.0),), 10.0, 1.0, seed=7), Setting(), DEVICE)


def test_virtual_time_jumps_and_what_would_wait_for_ever_is_an_error():
    async def hours():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3600)
        return loop.time()

    assert run(hours()) == pytest.approx(3600)
    with pytest.raises(RuntimeError, match="no timer"):
        run(asyncio.Event().wait())
