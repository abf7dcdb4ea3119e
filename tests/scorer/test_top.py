import asyncio
import io
import math

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest, start_http_server
from rich.console import Console

from prefixrank.v1 import scorer_pb2 as pb
from scorer.__main__ import main
from scorer.client import AsyncScorerClient
from scorer.errors import ConfigError
from scorer.metrics import Metrics
from scorer.top import INTERACTIVE, OTHERS, Reading, parse, quantile, view, views
from tests.scorer.test_metrics import answer
from tests.scorer.test_server import Life, run


def page(metrics):
    return parse(generate_latest(metrics.registry).decode())


def shown(reading):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(view(reading))
    return console.export_text()


@pytest.mark.parametrize(("q", "expected"), [(0.5, 0.1), (0.25, 0.05), (0.75, 0.15), (0.99, 0.2), (0.9999, 0.2)])
def test_quantiles_are_prometheus_own(q, expected):
    counts = [(0.1, 50.0), (0.2, 99.0 if q > 0.9 else 100.0), (math.inf, 100.0)]
    assert quantile(q, counts) == pytest.approx(expected, abs=0.003)


def test_no_answers_no_quantile():
    assert quantile(0.5, []) is None
    assert quantile(0.5, [(0.1, 0.0), (math.inf, 0.0)]) is None


def test_rates_are_of_the_time_between_two_readings():
    metrics = Metrics("1")
    metrics.answered(*answer(total_seconds=0.05))
    before = page(metrics)
    for _ in range(10):
        metrics.answered(*answer(total_seconds=0.05))
        metrics.requests.labels("OK").inc()
    metrics.serving.set(1)
    reading = Reading(before, page(metrics), 2.0)
    assert reading.rate("computed_tokens_total") == 60
    assert reading.by("requests_total", "code") == {"OK": 5}
    assert reading.by("documents_total", "status") == {"ok": 5, "numeric_error": 5}
    assert 0.02 < reading.quantile(0.99, "total", INTERACTIVE) <= 0.05
    assert reading.quantile(0.99, "forward", INTERACTIVE) <= 0.001
    told = shown(reading)
    assert told.startswith("serving   in flight 0")
    assert "computed 60 tokens/s   saved 20%" in told


def test_bulk_jobs_and_searches_have_rows_of_their_own():
    metrics = Metrics("1")
    before = page(metrics)
    metrics.answered(*answer(total_seconds=0.05), pb.PRIORITY_HIGH)
    metrics.answered(*answer(total_seconds=0.05))
    metrics.answered(*answer(total_seconds=5), pb.PRIORITY_LOW)
    metrics.searched(pb.BeamSearchResponse(timings=pb.Timings(total_seconds=1.5)), pb.PRIORITY_HIGH)
    reading = Reading(before, page(metrics), 1.0)
    assert 0.02 < reading.quantile(0.99, "total", INTERACTIVE) <= 0.05
    assert 2 < reading.quantile(0.5, "total", OTHERS["low class"]) <= 5
    assert 1 < reading.quantile(0.5, "total", OTHERS["beam search"]) <= 2
    assert "total, beam search" in shown(reading)


def test_a_server_of_an_earlier_release_tells_of_score_alone():
    metrics = Metrics("1")
    before = page(metrics)
    metrics.answered(*answer(total_seconds=0.05))
    kept = frozenset({"stage", "le"})

    def earlier(samples):
        return {
            (name, frozenset(pair for pair in labels if pair[0] in kept)): value
            for (name, labels), value in samples.items()
            if "stage_seconds" not in name or {("method", "score"), ("priority", "normal")} <= labels
        }

    reading = Reading(earlier(before), earlier(page(metrics)), 1.0)
    assert 0.02 < reading.quantile(0.99, "total", INTERACTIVE) <= 0.05
    assert reading.quantile(0.99, "total", OTHERS["beam search"]) is None


def test_a_server_that_started_anew_counts_from_zero():
    old, new = Metrics("1"), Metrics("1")
    for _ in range(5):
        old.requests.labels("OK").inc()
    new.requests.labels("OK").inc()
    assert Reading(page(old), page(new), 1.0).rate("requests_total", code="OK") == 1
    assert "NOT SERVING" in shown(Reading(page(old), page(new), 1.0))


def test_it_looks_at_a_listening_server(capsys):
    async def scenario():
        async with Life() as life, AsyncScorerClient(await life.listening()) as client:
            looking = asyncio.to_thread(
                main, ["top", f"--target={life.addresses.metrics}", "--interval=0.3", "--count=2"]
            )
            looking = asyncio.create_task(looking)
            while not looking.done():
                await client.score("q", ["a", "b"])
                await asyncio.sleep(0.01)
            assert await looking == 0

    run(scenario)
    told = capsys.readouterr().out
    assert told.count("time of answered calls") == 2
    assert "OK" in told


def test_a_server_that_starts_anew_is_waited_for():
    serving = Metrics("1")
    serving.serving.set(1)
    gone = ConfigError("no metrics at http://h:1/metrics: refused")
    answers = iter([page(serving), page(serving), gone, gone, page(serving)])

    def read():
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    console = Console(width=160, record=True, file=io.StringIO())
    for each in views(read, 0.001, 4):
        console.print(each)
    lines = [line for line in console.export_text().splitlines() if "serving" in line or "looking again" in line]
    assert ["looking again" in line for line in lines] == [False, True, True, False]
    with pytest.raises(ConfigError):
        next(views(fails, 0.001, 1))


def fails():
    raise ConfigError("no metrics")


def test_what_is_no_metrics_page_of_ours_is_a_clear_error(capsys):
    async def scenario():
        registry = CollectorRegistry()
        Counter("others", "of another program", registry=registry).inc()
        other, thread = start_http_server(0, "127.0.0.1", registry)
        async with Life() as life:
            for target in (await life.listening(), f"127.0.0.1:{other.server_port}"):
                assert await asyncio.to_thread(main, ["top", f"--target={target}", "--count=1"]) == 2
        await asyncio.to_thread(other.shutdown)
        other.server_close()
        thread.join()

    run(scenario)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("prefixrank: no metrics at http://127.0.0.1:")
    assert told[1].startswith("prefixrank: no metrics of prefixrank at http://127.0.0.1:")


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--target=http://host:1", "--target: HOST:PORT, got 'http://host:1'"),
        ("--target=host", "--target: HOST:PORT, got 'host'"),
        ("--target=host:99999", "--target: HOST:PORT, got 'host:99999'"),
        ("--interval=-1", "--interval: a number between 0.1 and 3600, got '-1'"),
        ("--interval=nan", "--interval: a number between 0.1 and 3600, got 'nan'"),
        ("--count=-1", "--count: a whole number between 0 and 2147483647, got '-1'"),
    ],
)
def test_a_wrong_argument_is_told(flag, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["top", flag])
    assert told in capsys.readouterr().err


def test_no_metrics_are_a_clear_error(capsys):
    assert main(["top", "--target=127.0.0.1:9", "--count=1"]) == 2
    assert "no metrics at http://127.0.0.1:9/metrics" in capsys.readouterr().err
