"""What the cases of serving.jsonl say of seconds and of memory, on this machine. Run by `make bench-cases`.

The cases themselves are tests of the suite (tests/cases/test_serving.py), where no clock decides.
"""

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from attention.plans import Strategy
from loadtest.sim_device import device_time
from loadtest.simulate import overload
from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import AsyncScorerClient, ScorerError, build_request
from scorer.demo import LOOPBACK_OPTIONS
from tests.cases import test_serving
from tests.cases.live import wire
from tests.scorer.test_server import document, process, pulse
from tests.targets.test_soak import resident_mib
from tests.tiny import tiny_model_dir

CASES = {c["id"]: c["input"] for c in map(json.loads, Path(test_serving.__file__).with_name("serving.jsonl").open())}
pytestmark = [pytest.mark.target, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    directory = tiny_model_dir(tmp_path_factory.mktemp("model"))
    return [f"--model={directory}", "--profile=instruct", "--max-pass-tokens=2048", "--threads=1"]


def client(server):
    return AsyncScorerClient(server.target, channel_options=LOOPBACK_OPTIONS)


def test_tokenising_does_not_block(settings):
    """Health answers while 64 calls of 500 documents are tokenised: p99 under 50 ms."""
    calls, documents = (
        int(n) for n in CASES["tokenising-does-not-block"]["load"].replace(" documents", "").split(" x ")
    )

    async def scenario(server):
        waits, stop = [], asyncio.Event()
        async with client(server) as at:
            texts = [document(n) for n in range(documents)]
            watching = asyncio.create_task(pulse(server.target, waits, stop))
            made = [asyncio.create_task(at.score(f"query {i}", texts, timeout=10)) for i in range(calls)]
            codes = Counter(
                getattr(getattr(e, "code", None), "name", "OK")
                for e in await asyncio.gather(*made, return_exceptions=True)
            )
            stop.set()
            await watching
        return waits, codes

    with process(settings) as server:
        waits, codes = asyncio.run(scenario(server))
    p99 = float(np.quantile(waits, 0.99))
    print(f"health while tokenising: {len(waits)} answers, p99 {1e3 * p99:.1f} ms; calls: {dict(codes)}")
    assert p99 < 0.05


def test_sixteen_clients(settings):
    """Sixteen callers get at least what one gets who always has sixteen calls' documents in one: not serial."""

    async def throughput(server, clients, documents, seconds=8.0):
        end, done = time.monotonic() + seconds, 0

        async def loop(at, number):
            nonlocal done
            turn = 0
            while time.monotonic() < end:
                turn += 1
                first = 1000 * number + turn * documents
                await at.score("which fruit grows where", [document(first + i) for i in range(documents)])
                done += documents

        async with client(server) as at:
            await asyncio.gather(*(loop(at, n) for n in range(clients)))
        return done / seconds

    with process(settings) as server:
        one = asyncio.run(throughput(server, 1, 4))
        whole = asyncio.run(throughput(server, 1, 64))
        sixteen = asyncio.run(throughput(server, CASES["sixteen-clients"]["clients"], 4))
    print(f"documents/s: one caller of 4 {one:.0f}, one of 64 {whole:.0f}, sixteen of 4 {sixteen:.0f}")
    assert sixteen > 0.7 * whole
    assert sixteen > one


def test_mixed_minute(settings):
    """A minute of all strategies at once: no error, and every score that of the document alone."""
    seconds = CASES["mixed-minute"]["seconds"]

    async def scenario(server):
        rng, scores = random.Random(3), {}
        async with client(server) as at:
            alone = {
                n: (await at.score("which", [document(n)], strategy=wire(Strategy.NAIVE))).results[0].score
                for n in range(40)
            }
            end = time.monotonic() + seconds

            async def loop():
                while time.monotonic() < end:
                    picked = rng.sample(range(40), rng.randrange(1, 20))
                    strategy = rng.choice([None, *Strategy])
                    reply = await at.score("which", [document(n) for n in picked], strategy=wire(strategy))
                    for n, result in zip(picked, reply.results, strict=True):
                        assert result.status == pb.DOCUMENT_STATUS_OK
                        scores.setdefault(n, []).append(result.score)

            await asyncio.gather(*(loop() for _ in range(8)))
        return alone, scores

    with process(settings) as server:
        alone, scores = asyncio.run(scenario(server))
    worst = max(abs(score - alone[n]) for n, got in scores.items() for score in got)
    print(f"mixed minute: {sum(map(len, scores.values()))} scores, largest difference {worst:.1e}")
    assert worst < 1e-4


def test_ten_thousand_mixed(settings):
    """Ten thousand documents of 1 to 4,000 tokens in one call, twice: the peak is bounded, and flat afterwards."""
    rng = np.random.default_rng(4)
    count = CASES["ten-thousand-mixed"]["documents"]
    lengths = np.exp(rng.uniform(0, np.log(4000), count)).astype(int)
    request = pb.ScoreRequest(
        token_ids=pb.TokenIds(ids=list(range(20, 60))),
        documents=[pb.Document(token_ids=pb.TokenIds(ids=rng.integers(20, 200, n).tolist())) for n in lengths],
    )
    options = ["--max-documents=20000", "--max-request-tokens=100000000"]

    async def scenario(server):
        memory = []
        async with client(server) as at:
            for _ in range(2):
                task = asyncio.create_task(at.score_request(request, 900))
                peak = 0.0
                while not task.done():
                    peak = max(peak, resident_mib(server.process))
                    await asyncio.sleep(0.05)
                assert len((await task).results) == count
                memory.append((peak, resident_mib(server.process)))
        return memory

    with process([*settings, *options]) as server:
        before = resident_mib(server.process)
        memory = asyncio.run(scenario(server))
    print(
        f"{count} documents, {lengths.sum()} tokens: {before:.0f} MiB before, "
        f"(peak, after) {[tuple(map(round, each)) for each in memory]}"
    )
    assert max(peak for peak, _ in memory) < before + 1500
    assert memory[1][0] < memory[0][0] * 1.05 + 50


def test_refusals_leave_the_handler_at_once():
    """At twice the load the 99th of a hundred refusals takes under 5 ms of the handler's time."""
    result = overload(10.0, device_time(), (2.0,))[2.0]
    print(f"refusals: {sum(bool(o.refused) for o in result.outcomes)}, p99 {1e3 * result.refusal_p99:.2f} ms")
    assert result.refusal_p99 < 0.005


def test_a_short_call_is_measured_as_one(settings):
    """Stages are told to the millisecond: what the caller sees is what the reply says, within the transport."""

    async def scenario(server):
        async with client(server) as at:
            await at.score("q", ["a"])
            told, seen = [], []
            for n in range(30):
                began = time.perf_counter()
                reply = await at.score_request(build_request("q", [f"a {n}"]), 10)
                seen.append(time.perf_counter() - began)
                told.append(reply.timings.total_seconds)
            return float(np.median(told)), float(np.median(seen))

    with process(settings) as server:
        told, seen = asyncio.run(scenario(server))
    print(f"a call of one document: {1e3 * told:.1f} ms told, {1e3 * seen:.1f} ms seen")
    assert told < seen < told + 0.02


def test_errors_are_told_apart(settings):
    """What the soak counts as refused is refused: the code is RESOURCE_EXHAUSTED and says when to come again."""

    async def scenario(server):
        async with client(server) as at:
            texts = [document(n) for n in range(60)]
            for _ in range(6):  # the device's speed becomes known
                await at.score("which", texts)
            made = [asyncio.create_task(at.score(f"which {i}", texts, timeout=0.3)) for i in range(60)]
            ended = await asyncio.gather(*made, return_exceptions=True)
        errors = [error for error in ended if isinstance(error, ScorerError)]
        return [error.retry_after_seconds for error in errors if error.code.name == "RESOURCE_EXHAUSTED"]

    with process(settings) as server:
        refused = asyncio.run(scenario(server))
    assert refused
    assert all(seconds is not None and 0 < seconds <= 60 for seconds in refused)
