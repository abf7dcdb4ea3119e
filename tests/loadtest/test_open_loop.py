import asyncio
import json
import math

import pytest

from batching.errors import Expired, QueueFull
from loadtest.load_report import HEADER, Call, figures, line, quantile
from scorer.__main__ import main
from tests.scorer.test_server import Life
from tests.scorer.test_service import FakeRuntime


def ok(seconds, **kwargs):
    return Call(0.0, "OK", seconds, 10, **kwargs)


def test_goodput_counts_what_came_within_the_objective():
    calls = [ok(0.1)] * 8 + [ok(0.5)] * 2 + [Call(0.0, "RESOURCE_EXHAUSTED", 0.01, 10)]
    found = figures(calls, 1.0, 10.0, 0.2, 0.0)
    assert (found.documents_per_second, found.goodput, found.in_slo) == (10.0, 8.0, False)
    assert found.codes == {"OK": 10, "RESOURCE_EXHAUSTED": 1}
    assert figures([ok(0.1)] * 9, 1.0, 10.0, 0.2, 0.0).in_slo


def test_an_accepted_call_that_timed_out_is_out_of_the_objective_whatever_the_rest():
    found = figures([ok(0.1)] * 1000 + [Call(0.0, "DEADLINE_EXCEEDED", 60.0, 10)], 1.0, 10.0, 0.2, 0.0)
    assert (found.timed_out, found.in_slo) == (1, False)


def test_shares_and_flops():
    calls = [ok(0.1, prefix_tokens=100, cached_prefix_tokens=80, computed_tokens=60, saved_tokens=140)] * 2
    found = figures(calls, 1.0, 2.0, 1.0, 0.0, parameters=1e9)
    assert (found.cached_prefix_share, found.saved_share, found.asked_tokens) == (0.8, 0.7, 400)
    assert found.flops == 2 * 1e9 * 120 / 2


def test_nothing_answered_is_no_success():
    found = figures([], 1.0, 1.0, 1.0, 0.0)
    assert not found.in_slo
    assert math.isnan(found.latency["p99"])
    assert len(line(found).split()) > 10


@pytest.mark.parametrize(("q", "expected"), [(0.5, 50), (0.99, 99), (0.999, 100), (0.01, 1)])
def test_quantiles_are_of_the_sample(q, expected):
    assert quantile(range(1, 101), q) == expected


def bench(tmp_path, capsys, runtime, *arguments):
    async def scenario():
        async with Life(runtime) as life:
            command = ["bench", "load", f"--target={await life.listening()}", f"--output={tmp_path / 'out.jsonl'}"]
            return await asyncio.to_thread(main, [*command, *arguments])

    code = asyncio.run(scenario())
    written = tmp_path / "out.jsonl"
    rows = [json.loads(row) for row in written.read_text().splitlines()] if written.exists() else []
    return code, rows, capsys.readouterr().out


def test_a_run_measures_each_rate(tmp_path, capsys):
    code, rows, out = bench(tmp_path, capsys, FakeRuntime(), "--rates=20,40", "--seconds=1", "--timeout=5")
    assert code == 0
    assert [row["rate"] for row in rows] == [20, 40]
    assert rows[1]["codes"].keys() == {"OK"}
    assert rows[1]["calls"] > rows[0]["calls"] > 5
    assert out.splitlines()[1] == HEADER


def test_calls_do_not_wait_for_earlier_ones(tmp_path, capsys):
    """A service that takes half a second a call: a closed loop would send two, the open loop all of its plan."""
    runtime = FakeRuntime()
    submit = runtime.batcher.submit
    under_way = []

    async def slow(request, deadline=None):
        under_way.append(1)
        await asyncio.sleep(0.5)
        return await submit(request, deadline)

    runtime.batcher.submit = slow
    code, (row,), _ = bench(tmp_path, capsys, runtime, "--rates=40", "--seconds=1")
    assert code == 0
    assert row["calls"] > 20
    assert row["latency"]["p50"] >= 0.5


@pytest.mark.parametrize(("error", "expected"), [(QueueFull("full"), 0), (Expired("late"), 1), (ValueError("bug"), 1)])
def test_only_load_may_refuse(tmp_path, capsys, error, expected):
    runtime = FakeRuntime()
    submit, seen = runtime.batcher.submit, []

    async def warm_then_error(request, deadline=None):
        seen.append(1)
        if len(seen) > 4:
            raise error
        return await submit(request, deadline)

    runtime.batcher.submit = warm_then_error
    code, (row,), out = bench(tmp_path, capsys, runtime, "--rates=20", "--seconds=0.5")
    assert code == expected
    assert ("FAILED" in out) == bool(expected)
    assert row["calls"] == sum(row["codes"].values())


@pytest.mark.parametrize("flag", ["--rates=0", "--rates=x", "--burst=11", "--profile=none"])
def test_wrong_usage(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "load", "--target=127.0.0.1:1", flag])
    assert caught.value.code == 2


def test_no_server_is_a_clear_error(capsys):
    assert main(["bench", "load", "--target=127.0.0.1:9", "--timeout=0.3"]) == 2
    assert "127.0.0.1:9: not serving after 0.3 s" in capsys.readouterr().err
