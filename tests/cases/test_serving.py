"""The cases of serving.jsonl, each a test of its own: mostly in virtual time, where nothing depends on this machine.

A test is named after its case and is given the case's input. What a case says of seconds is in
tests/targets/test_timed_cases.py, which `make bench-cases` runs.
"""

import asyncio
import json
import os
import signal
import tracemalloc
from inspect import signature
from pathlib import Path

import grpc
import numpy as np
import pytest

from attention.plans import Strategy
from batching.errors import CannotFinish, Expired
from batching.pass_time import Work
from batching.select import Threshold
from loadtest.sim_device import SimDevice, device_time
from loadtest.simulate import Setting, capacity, simulate
from loadtest.traces import Profile, calls
from loadtest.virtual_time import run as virtual
from scorer.client import AsyncScorerClient, ScorerError, build_request
from scorer.metrics import Metrics
from tests.batching.fake import Counting, FakeDevice, TimedDevice, assert_right, batcher, evicted, request
from tests.batching.test_batcher import pages_held
from tests.cases.live import PROFILE, live
from tests.models import tiny
from tests.scorer.test_cache_neutral import asked, assert_alone, ids, in_one_pass, log_odds
from tests.scorer.test_cache_neutral import batcher as real_batcher
from tests.scorer.test_kv_tiers import Slow
from tests.scorer.test_metrics import answer as an_answer
from tests.scorer.test_metrics import samples
from tests.scorer.test_server import NOT_SERVING, Life, health, until
from tests.scorer.test_service import FakeRuntime
from tests.tiny import tiny_model_dir

CASES = {c["id"]: c for c in map(json.loads, Path(__file__).with_name("serving.jsonl").open(encoding="utf-8"))}
PREFIX = list(range(50, 62))


def pytest_generate_tests(metafunc):
    if "given" in metafunc.fixturenames:
        id_ = metafunc.function.__name__.removeprefix("test_").replace("_", "-")
        metafunc.parametrize("given", [CASES[id_]["input"]], ids=[id_])


def test_every_case_is_a_test_that_reads_its_input_here():
    reading = {n for n, test in globals().items() if n[:5] == "test_" and "given" in signature(test).parameters}
    assert len(CASES) == 19
    assert reading == {f"test_{id_.replace('-', '_')}" for id_ in CASES}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"))


def clock():
    return asyncio.get_running_loop().time


# --- deadlines and cancelling


@pytest.mark.parametrize("measured", [False, True])
def test_expired_in_queue(given, measured):
    """Before the device's speed is known it expires in the queue; afterwards it is not let in."""

    async def scenario():
        device = TimedDevice(given["ahead_ms"] / 1000)
        made = batcher(device, clock=clock(), pass_tokens=100)
        made.observer = counted = Counting()
        if measured:
            for n in range(8):
                made._scheduler.pass_time.learn(Work(20 + n, 200.0), 0.5)
        ahead = asyncio.create_task(made.submit(request([1], [1] * 20)))
        await asyncio.sleep(0.001)
        with pytest.raises(CannotFinish if measured else Expired):
            await made.submit(request([2], [2]), deadline=clock()() + given["deadline_ms"] / 1000)
        await ahead
        await made.drain()
        assert len(device.batches) == 1, "no device work is done for it"
        assert counted.counts == ({"deadline": 1} if measured else {"missed": 1})

    virtual(scenario())


def test_cancel_large(given):
    async def scenario():
        device = TimedDevice(0.02)
        made = batcher(device, clock=clock(), pass_tokens=200, pages=16)
        made.observer = counted = Counting()
        documents = [[i % 90 + 1, i // 90 + 1, 3] for i in range(given["documents"])]
        task = asyncio.create_task(made.submit(request(PREFIX, *documents)))
        await asyncio.sleep(given["cancel_after_ms"] / 1000)
        before = len(device.batches)
        task.cancel()
        await asyncio.sleep(10)
        assert before == len(device.batches) == 3, "the pass that ran was the last"
        assert counted.counts == {"cancelled": 1}
        assert made.queued_tokens == pages_held(made) == len(made._in_flight) == 0
        await made.drain()

    virtual(scenario())


# --- admission


def test_biggest_legal_when_idle(given, directory, tmp_path):
    assert given["documents"] == "request limit"
    with live(directory, PROFILE, tmp_path, check=False, max_documents=300, max_queue_tokens=100) as server:
        assert len(server.scores("q", [f"passage {i}" for i in range(300)])) == 300


def test_overload_refuses_alike(given):
    """Calls of one document and calls of twenty, of equal patience, as many documents a second of each."""
    assert given["load"] == "2x"
    single, large = Profile("jobs", 120, 2000, (1, 1), 0.4), Profile("bulk", 120, 2000, (15, 25), 0.4)
    mix, device = ((single, 0.95), (large, 0.05)), device_time()
    result = simulate(calls(mix, 2 * capacity(mix, device), 8.0, seed=8), Setting(), device)
    for name in ("jobs", "bulk"):
        made = result.of(name)
        refused = sum(bool(outcome.refused) for outcome in made) / len(made)
        assert len(made) > 30
        assert 0 < refused < 0.9, "both are refused, and neither is starved"
    assert result.met > 0.97


def test_split_list(given, directory, tmp_path):
    tokens = 256
    with live(directory, PROFILE, tmp_path, check=False, max_pass_tokens=tokens, max_documents=1000) as probe:
        item, prefix = (len(x) for x in reversed(probe.ids("q", "passage 000")))
    limit = (tokens - prefix) // item
    counts = [eval(text, {}, {}) for text in (str(limit), str(limit + 1), str(5 * limit))]
    assert given["documents"] == ["pass limit", "pass limit+1", "5*pass limit", "request limit+1"]
    settings = {"max_pass_tokens": tokens, "max_documents": 5 * limit}
    documents = [f"passage {i:03}" for i in range(5 * limit + 1)]
    with live(directory, PROFILE, tmp_path, check=False, **settings) as server:
        alone = np.array([server.scores("q", [document])[0] for document in documents[:-1]])
        for count in counts:
            response = server.score("q", documents[:count])
            assert response.passes == -(-count // limit) or response.usage.cached_prefix_tokens
            assert [result.index for result in response.results] == list(range(count))
            np.testing.assert_allclose([r.score for r in response.results], alone[:count], atol=1e-4)
        told = server.refused(build_request("q", documents))
        assert f"between 1 and {5 * limit} documents" in told["documents"]


# --- the cache


def test_same_request_twice(given, directory, tmp_path):
    documents = ["the capital of France", "seven ways to cook rice", "x"]
    with live(directory, PROFILE, tmp_path, check=False, page_size=4) as server:
        first, *again = [server.score("what is the capital", documents) for _ in range(given["times"])]
        assert first.usage.cached_prefix_tokens == 0
        cache, prefix = server.runtime.batcher.cache, first.usage.prefix_tokens
        for response in again:
            assert response.usage.cached_prefix_tokens == prefix
        for _ in range(len(cache) // 2):
            assert evicted(cache, 1, 0.0)
        again.append(server.score("what is the capital", documents))
        assert 0 < again[-1].usage.cached_prefix_tokens < prefix
        for response in again:
            np.testing.assert_allclose([r.score for r in response.results], [r.score for r in first.results], atol=1e-4)


@pytest.mark.parametrize("order", ["as asked", "reversed", "shuffled"])
def test_interleaved_prefixes(given, order):
    rng = np.random.default_rng(5)
    model = tiny("qwen3")
    common = ids(rng, max(given["shared_prefix_tokens"]))
    lengths = given["shared_prefix_tokens"] * (given["queries"] // len(given["shared_prefix_tokens"]))
    requests = [asked(rng, np.concatenate([common[:n], ids(rng, 5)]), [3, 8]) for n in lengths]
    if order != "as asked":
        requests = requests[::-1] if order == "reversed" else [requests[i] for i in rng.permutation(len(requests))]
    with_cache, without = real_batcher(model, pages=128), real_batcher(model, pages=0)

    async def scenario():
        on = await asyncio.gather(*[with_cache.submit(one) for one in requests])
        off = await asyncio.gather(*[without.submit(one) for one in requests])
        return on, off

    on, off = asyncio.run(scenario())
    for one, other in zip(on, off, strict=True):
        np.testing.assert_allclose(log_odds(one), log_odds(other), atol=1e-4)
        assert other.cached_prefix_tokens == 0
    assert sum(one.cached_prefix_tokens for one in on) >= 9 * 496


def test_tenant_salt(given):
    async def scenario():
        made = batcher(FakeDevice(), pages=64)
        for n in range(given["tenants"]):
            for hit in (0, len(PREFIX)):
                answer = await made.submit(request(PREFIX, [1], tenant=f"tenant {n}"))
                assert answer.cached_prefix_tokens == hit

    asyncio.run(scenario())


def test_sharer_before_owner(given):
    assert given["batch"] == ["short request sharing a prefix", "its owner"]
    rng, model = np.random.default_rng(6), tiny("llama")
    common = ids(rng, 48)
    sharer = asked(rng, np.concatenate([common, ids(rng, 2)]), [4])
    owner = asked(rng, np.concatenate([common, ids(rng, 40)]), [9, 30, 7])
    made = real_batcher(model)
    answers = asyncio.run(in_one_pass(made, [sharer, owner]))
    for one, answer in zip((sharer, owner), answers, strict=True):
        assert_alone(model, one, answer)
    assert [answer.cached_prefix_tokens for answer in answers] == [0, 48], "the sharer is listed first"
    assert sum(answer.computed_tokens for answer in answers) == sharer.tokens + owner.tokens - 48


def test_hundred_same_prefix(given):
    async def scenario():
        made = batcher(TimedDevice(0.01), clock=clock(), pages=64, pass_tokens=64)
        requests = [request(PREFIX, [n + 1, 7]) for n in range(given["concurrent"])]
        answers = await asyncio.gather(*[made.submit(one) for one in requests])
        for one, answer in zip(requests, answers, strict=True):
            assert_right(one, answer)
        assert sum(answer.computed_tokens for answer in answers) == len(PREFIX) + 2 * given["concurrent"]
        await made.drain()

    virtual(scenario())


def disk(directory, profile, tmp_path, kv_file):
    """A server whose evicted prefixes go to a file, on a device that is taken to be so slow that fetching pays."""
    return live(directory, profile, tmp_path, check=False, kv_file=str(kv_file), kv_file_bytes=1 << 24, page_size=4)


def wanted_twice(server, query, documents=("a b", "c")):
    """Cached tokens of the first of two requests, and the scores."""
    batching = server.runtime.batcher
    batching._scheduler.pass_time = batching.ahead._pass_time = Slow()
    server.scores("something else", ["x"])  # the pages take their shapes from the first pass
    first = server.score(query, documents)
    server.score(query, documents)
    server.runner.run(batching.ahead.settle())
    server.runtime.tiers.flush()
    return first.usage.cached_prefix_tokens, [result.score for result in first.results]


def test_changed_model_same_text(given, directory, tmp_path):
    """The template, which all queries share, is found in the pages; the rest of the query only on the disk."""
    assert given == {"restart_with": "another model or profile revision", "tier": "disk"}
    other = tiny_model_dir(tmp_path / "other", seed=1)
    revised = PROFILE.model_copy(update={"item": PROFILE.item.replace("Relevant?", "Fitting?")})
    assert revised.revision != PROFILE.revision
    query, found = "what is the capital of France", {}
    for name, model, profile in (
        ("first", directory, PROFILE),
        ("again", directory, PROFILE),
        ("revised", directory, revised),
        ("other", other, PROFILE),
    ):
        with disk(model, profile, tmp_path, tmp_path / "kv") as server:
            found[name], scores = wanted_twice(server, query)
            np.testing.assert_allclose(scores, server.truth(query, ["a b", "c"]), atol=1e-4)
            prefix = len(server.ids(query, "x")[0])
    assert found["again"] == prefix
    assert found["first"] == found["revised"] == found["other"] < prefix // 2


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_torn_disk_entry(given, directory, tmp_path, damage):
    assert given["fault"] == "file truncated, a byte flipped"
    kv, query = tmp_path / "kv", "what is the capital of France"
    with disk(directory, PROFILE, tmp_path, kv) as server:
        wanted_twice(server, query)
    if damage == "truncated":
        os.truncate(kv, kv.stat().st_size - 6000)
    else:
        whole = bytearray(kv.read_bytes())
        whole[300::700] = bytes(b ^ 1 for b in whole[300::700])
        kv.write_bytes(whole)
    with disk(directory, PROFILE, tmp_path, kv) as server:
        cached, scores = wanted_twice(server, query)
        np.testing.assert_allclose(scores, server.truth(query, ["a b", "c"]), atol=1e-4)
        assert cached < len(server.ids(query, "x")[0])
        kinds = ("damaged", "truncated", "foreign")
        faults = sum(server.metric("tier_faults_total", tier="file", kind=kind) for kind in kinds)
        assert faults >= 1 or damage == "truncated", "a slot beyond the end is not even indexed"


# --- load


def test_tokenising_does_not_block(given):
    """While every thread of the tokenizer is busy, the loop goes on: health and the rest are answered."""
    calls_, documents = (int(n) for n in given["load"].replace(" documents", "").split(" x "))

    async def scenario():
        async with Life(FakeRuntime(seconds=0.02)) as life, AsyncScorerClient(await life.listening()) as client:
            texts = [f"passage {i}" for i in range(documents)]
            working = [asyncio.create_task(client.score("q", texts, timeout=60)) for _ in range(calls_)]
            answered = 0
            while not all(task.done() for task in working):
                assert await health(life.addresses.grpc) != NOT_SERVING
                answered += 1
            for task in working:
                assert len((await task).results) == documents
            assert answered > 5

    asyncio.run(scenario())


def test_sixteen_clients(given):
    """Passes take the same time however full: served one by one, sixteen clients would get a sixteenth each."""

    async def scenario():
        device = TimedDevice(0.05)
        made = batcher(device, clock=clock(), pass_tokens=2000, pages=64)

        async def client(n):
            for turn in range(20):
                one = request([n + 1, turn], [n, turn, 5])
                assert_right(one, await made.submit(one))

        await asyncio.gather(*[client(n) for n in range(given["clients"])])
        assert clock()() <= 20 * 0.05 * 2 + 0.2
        await made.drain()

    virtual(scenario())


def test_mixed_minute(given):
    assert given["strategies"] == "all at once"

    async def scenario():
        rng = np.random.default_rng(9)
        made = batcher(TimedDevice(0.02), clock=clock(), pass_tokens=256, pages=64)

        async def client(n):
            while clock()() < given["seconds"]:
                items = [rng.integers(1, 99, rng.integers(1, 20)).tolist() for _ in range(rng.integers(1, 10))]
                prefix = [7, 7, 7, 7, 7, *rng.integers(1, 4, rng.integers(0, 9)).tolist()]
                one = request(prefix, *items, strategy=rng.choice([None, *Strategy]))
                assert_right(one, await made.submit(one), (one.strategy,) if one.strategy else tuple(Strategy))
                await asyncio.sleep(rng.exponential(0.5))

        await asyncio.gather(*[client(n) for n in range(8)])
        await made.drain()
        assert pages_held(made) == made.queued_tokens == len(made._in_flight) == 0

    virtual(scenario())


def test_ten_thousand_mixed(given):
    shortest, longest = (int(n) for n in given["tokens"].split("-"))
    rng = np.random.default_rng(10)
    lengths = np.exp(rng.uniform(np.log(shortest), np.log(longest), given["documents"])).astype(int)

    async def scenario():
        made = batcher(SimDevice(device_time()), clock=clock(), pass_tokens=16_384, pages=64)
        made.policy = Threshold(128)
        peaks, after = [], []
        for turn in range(3):
            tracemalloc.reset_peak()
            one = request(PREFIX, *[[i % 97 + 1, turn + 1] + [3] * (n - 1) for i, n in enumerate(lengths)])
            scores = await made.submit(one)
            assert len(scores.scored) == given["documents"]
            del one, scores
            peaks.append(tracemalloc.get_traced_memory()[1])
            after.append(tracemalloc.get_traced_memory()[0])
        await made.drain()
        return peaks, after

    tracemalloc.start()
    try:
        peaks, after = virtual(scenario())
    finally:
        tracemalloc.stop()
    assert max(peaks) < 400 << 20, "some ten times the ids themselves"
    assert after[2] - after[1] < 2 << 20, "flat afterwards"


# --- operations


def test_term_under_load(given):
    assert given["signal"] == "TERM"

    async def scenario():
        runtime = FakeRuntime()
        device = FakeDevice()
        device.gate.clear()
        runtime.batcher = batcher(device, pass_tokens=1000, pages=64)
        life = Life(runtime)
        async with life, AsyncScorerClient(await life.listening()) as client:
            accepted = [asyncio.create_task(client.score(f"q{n}", ["a b", "c"])) for n in range(20)]
            await until(lambda: len(runtime.batcher._jobs) == 20)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            assert await health(life.addresses.grpc) == NOT_SERVING
            with pytest.raises(ScorerError, match="UNAVAILABLE"):
                await client.score("q", ["a"])
            device.gate.set()
            assert [len(response.results) for response in await asyncio.gather(*accepted)] == [2] * 20
            assert await life.exit_code() == 0

    asyncio.run(scenario())


def test_device_thread_dies(given):
    assert given["fault"] == "exception in forward, then in every forward"

    async def scenario():
        runtime, device = FakeRuntime(), FakeDevice()
        runtime.batcher = batcher(device, pass_tokens=1000, pages=64)
        async with Life(runtime) as life, AsyncScorerClient(await life.listening()) as client:
            await client.score("q", ["a"])
            device.failures = [RuntimeError("once")]
            with pytest.raises(ScorerError) as caught:
                await client.score("q", ["a b"])
            assert caught.value.code is grpc.StatusCode.INTERNAL
            assert len((await client.score("q", ["a b"])).results) == 1
            device.failures = [RuntimeError("always")] * 100
            codes = set()
            for _ in range(5):
                try:
                    await client.score("q", ["a b"], timeout=5)
                except ScorerError as error:
                    codes.add(error.code)
            # CANCELLED: a call that came as the listener closed.
            assert codes <= {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
            async with asyncio.timeout(5):
                assert await life.task == 1, "NOT_SERVING, and gone for its supervisor"

    asyncio.run(scenario())


def test_metrics_before_traffic(given):
    assert given == {}
    metrics = Metrics("1")
    before = samples(metrics)
    for name in ("requests_total", "documents_total", "admission_refusals_total", "fetch_decisions_total"):
        assert any(key[0] == f"prefixrank_{name}" for key in before)
    for name in ("queue_tokens", "deadline_misses_total", "cancelled_total", "batch_fill_count", "cache_blocks"):
        assert before[f"prefixrank_{name}",] == 0
    metrics.answered(*an_answer(total_seconds=0.005))
    after = samples(metrics)
    kind = ("method", "score"), ("priority", "normal"), ("stage", "total")
    assert after["prefixrank_stage_seconds_bucket", ("le", "0.01"), *kind] == 1
    assert set(before) == set(after), "no series appears with traffic"
