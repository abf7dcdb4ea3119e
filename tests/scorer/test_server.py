"""The server's life: in this process over a fake runtime, and as a process with a tiny model."""

import asyncio
import logging
import os
import random
import signal
import socket
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from scorer import wakeful
from scorer.client import AsyncScorerClient, ScorerError
from scorer.config import Config
from scorer.demo import LOOPBACK_OPTIONS, Server
from scorer.errors import ModelError
from scorer.server import GPU_AWAKE_SECONDS, HEALTH, SERVICE, serve
from scorer.wakeful import WakefulLoop
from tests.scorer.test_service import FakeRuntime, until
from tests.tiny import tiny_model_dir

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Life:
    """A server as a task of this loop; `load` blocks until `loaded` is set."""

    def __init__(self, runtime=None, error=None, loaded=True, **settings):
        self.runtime = FakeRuntime() if runtime is None else runtime
        self.error = error
        self.loaded = threading.Event()
        if loaded:
            self.loaded.set()
        self.config = Config.read({"port": 0, "metrics_port": 0, "drain_seconds": 5, **settings}, environ={})
        self.addresses = None

    def _load(self, config):
        assert self.loaded.wait(10), "a test lets the model load"
        if self.error is not None:
            raise self.error
        return self.runtime

    def _ready(self, addresses):
        self.addresses = addresses

    async def __aenter__(self):
        self.task = asyncio.create_task(serve(self.config, self._load, self._ready))
        return self

    async def __aexit__(self, *exception):
        if not self.task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            await self.task

    async def exit_code(self):
        async with asyncio.timeout(10):
            return await self.task

    async def listening(self):
        await until(lambda: self.addresses is not None or self.task.done())
        return self.addresses.grpc


def run(scenario):
    return asyncio.run(scenario())


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


async def health(target, service="", timeout=5):
    async with grpc.aio.insecure_channel(target) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout, wait_for_ready=True)
        return reply.status


def test_it_serves_until_told_to_stop_and_exits_with_zero():
    async def scenario():
        async with Life() as life:
            target = await life.listening()
            assert await health(target) == await health(target, SERVICE) == SERVING
            async with AsyncScorerClient(target) as client:
                assert len((await client.score("q", ["a", "b"])).results) == 2
            url = f"http://{life.addresses.metrics}/metrics"
            page = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
            assert 'prefixrank_requests_total{code="OK"} 1.0' in page
            os.kill(os.getpid(), signal.SIGTERM)
            assert await life.exit_code() == 0
            assert life.runtime.closed
            assert life.runtime.batcher.drained

    run(scenario)


@pytest.mark.parametrize(
    ("device", "settings", "seconds"),
    [
        ("cpu", {}, 0.0),
        ("cuda:1", {}, GPU_AWAKE_SECONDS),
        ("cuda", {"awake_seconds": 0}, 0.0),
        ("cpu", {"awake_seconds": 2}, 2.0),
    ],
)
def test_it_stays_awake_between_calls_where_a_gpu_computes_and_as_it_is_told(device, settings, seconds, monkeypatch):
    told = []
    monkeypatch.setattr(WakefulLoop, "stay_awake", lambda self, seconds: told.append(seconds))

    async def scenario():
        runtime = FakeRuntime()
        runtime.info.device = device
        async with Life(runtime, **settings) as life:
            await life.listening()

    wakeful.run(scenario())
    assert told == [seconds]


def test_while_loading_it_listens_is_not_serving_and_scores_nothing(caplog):
    async def scenario():
        async with Life(loaded=False, port=free_port()) as life:
            target = f"127.0.0.1:{life.config.port}"
            assert await health(target) == await health(target, SERVICE) == NOT_SERVING
            async with AsyncScorerClient(target) as client:
                with pytest.raises(ScorerError, match="UNAVAILABLE: the service is starting"):
                    await client.score("q", ["a"])
                waiting = asyncio.create_task(client.wait_until_serving(10))
                await asyncio.sleep(0.05)
                assert not waiting.done()
                life.loaded.set()
                await waiting
                await client.score("q", ["a"])

    run(scenario)


def test_a_stop_while_loading_does_not_wait_for_the_model():
    async def scenario():
        async with Life(loaded=False) as life:
            await asyncio.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await life.exit_code() == 0
            life.loaded.set()

    run(scenario)


def test_a_failed_proof_never_serves_and_exits_with_one(caplog):
    async def scenario():
        async with Life(error=ModelError("golden scores do not hold: 0.5 apart")) as life:
            assert await life.exit_code() == 1
            assert life.addresses is None

    run(scenario)
    assert "cannot start: golden scores do not hold: 0.5 apart" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("connection closed by peer"), ModelError("no answer of rank 1")])
def test_a_start_that_fails_for_want_of_a_process_tells_which(error, caplog):
    """What fails here is heard before the process is seen to be gone."""

    async def lost():
        await asyncio.sleep(0 if isinstance(error, ModelError) else 0.3)
        return "rank 1 of 2 ended with exit code 1"

    async def scenario():
        def load(config):
            time.sleep(0.1)
            raise error

        settings = Config.read({"port": 0, "metrics_port": -1}, environ={})
        assert await serve(settings, load, lost=lost) == 1

    run(scenario)
    assert "cannot start: rank 1 of 2 ended with exit code 1" in caplog.text


def test_a_start_that_fails_with_every_process_there_raises():
    async def scenario():
        def load(config):
            raise RuntimeError("a fault of ours")

        with pytest.raises(RuntimeError, match="a fault of ours"):
            await serve(Config.read({"port": 0, "metrics_port": -1}, environ={}), load)

    run(scenario)


@pytest.mark.parametrize("which", ["port", "metrics_port"])
def test_a_taken_port_is_a_clear_error(which, caplog):
    async def scenario():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            async with Life(**{which: port}) as life:
                assert await life.exit_code() == 1
            return port

    port = run(scenario)
    assert f"cannot start: cannot listen on 127.0.0.1:{port} for" in caplog.text


def test_two_servers_never_share_a_port():
    async def scenario():
        willing_to_share = grpc.aio.server(options=[("grpc.so_reuseport", 1)])
        port = willing_to_share.add_insecure_port("127.0.0.1:0")
        await willing_to_share.start()
        async with Life(port=port) as life:
            assert await life.exit_code() == 1
        await willing_to_share.stop(0)

    run(scenario)


def test_no_metrics_where_none_are_wanted():
    async def scenario():
        async with Life(metrics_port=-1) as life:
            await life.listening()
            assert life.addresses.metrics is None

    run(scenario)


def test_a_stop_under_load_answers_what_was_accepted_and_refuses_the_rest():
    async def scenario():
        life = Life()
        gate = life.runtime.batcher.gate
        gate.clear()
        async with life, AsyncScorerClient(await life.listening()) as client:
            accepted = [asyncio.create_task(client.score("q", ["a"])) for _ in range(20)]
            await until(lambda: life.runtime.batcher.submitted == 20)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            assert await health(life.addresses.grpc) == NOT_SERVING
            with pytest.raises(ScorerError, match="UNAVAILABLE: the service is draining"):
                await client.score("q", ["a"])
            assert not life.task.done()
            gate.set()
            assert [len(response.results) for response in await asyncio.gather(*accepted)] == [1] * 20
            assert await life.exit_code() == 0

    run(scenario)


def test_a_stop_under_constant_load_says_unavailable_and_nothing_else():
    async def scenario():
        codes, stop = Counter(), asyncio.Event()

        async def work(client):
            while not stop.is_set():
                try:
                    await client.score("q", ["a"], timeout=10)
                    codes["OK"] += 1
                except ScorerError as error:
                    codes[error.code.name] += 1

        async with Life() as life, AsyncScorerClient(await life.listening()) as client:
            workers = [asyncio.create_task(work(client)) for _ in range(16)]
            await until(lambda: codes["OK"] > 100)
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: codes["UNAVAILABLE"] > 100)  # and then they find another replica
            stop.set()
            await asyncio.gather(*workers)
            assert await life.exit_code() == 0
        assert codes.keys() == {"OK", "UNAVAILABLE"}

    run(scenario)


def test_the_grace_is_bounded():
    async def scenario():
        life = Life(drain_seconds=0.2)
        life.runtime.batcher.gate.clear()
        async with life, AsyncScorerClient(await life.listening()) as client:
            stuck = asyncio.create_task(client.score("q", ["a"]))
            await until(lambda: life.runtime.batcher.submitted == 1)
            started = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await life.exit_code() == 1
            assert time.monotonic() - started < 3
            with pytest.raises(ScorerError):
                await stuck
            assert life.runtime.batcher.cancelled == 1

    run(scenario)


def test_a_grace_that_sufficed_for_every_call_exits_with_zero_whatever_runs_on():
    async def scenario():
        life = Life(drain_seconds=0.2)
        closing = threading.Event()
        life.runtime.close = lambda: closing.wait(5)
        async with life, AsyncScorerClient(await life.listening()) as client:
            await client.score("q", ["a"])
            os.kill(os.getpid(), signal.SIGTERM)
            assert await life.exit_code() == 0
            closing.set()

    run(scenario)


def test_a_fingerprint_is_read_once_for_all_who_ask_and_no_stop_waits_for_it():
    read, readings = threading.Event(), []

    class Slow(FakeRuntime):
        def fingerprint(self):
            readings.append(1)
            read.wait(30)
            return "f"

    async def scenario():
        async with Life(Slow(), drain_seconds=0.5) as life, AsyncScorerClient(await life.listening()) as client:
            asking = [asyncio.create_task(client.model_info(fingerprint=True)) for _ in range(20)]
            with pytest.raises(ScorerError, match="Deadline"):
                await client.model_info(0.1, fingerprint=True)  # the others' reading goes on
            assert len(readings) == 1
            os.kill(os.getpid(), signal.SIGTERM)
            assert await life.exit_code() == 0
            for call in asking:
                with pytest.raises(ScorerError):
                    await call

    try:
        run(scenario)
        assert "fingerprint" in [thread.name for thread in threading.enumerate()], "nobody waited for its end"
    finally:
        read.set()


def test_a_health_watch_does_not_hold_up_the_stop():
    async def scenario():
        async with Life() as life, grpc.aio.insecure_channel(await life.listening()) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == SERVING
            started = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
            assert (await watch.read()).status == NOT_SERVING
            assert await life.exit_code() == 0
            assert time.monotonic() - started < 3

    run(scenario)


def test_a_device_that_is_gone_ends_the_server(caplog):
    async def scenario():
        async with Life() as life:
            target = await life.listening()
            assert await health(target) == SERVING
            life.runtime.batcher.gone.set()
            assert await life.exit_code() == 1

    run(scenario)
    assert "the device failed for good: three passes in a row failed" in caplog.text


def test_reflection_lists_the_services():
    async def scenario():
        async with Life() as life, grpc.aio.insecure_channel(await life.listening()) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            reply = await call.read()
            return {service.name for service in reply.list_services_response.service}

    assert {SERVICE, HEALTH} <= run(scenario)


def test_a_thousand_documents_of_four_kilobytes_are_legal_and_long_ids_come_back():
    ids = [f"{i:05000}" for i in range(1000)]

    async def scenario():
        async with Life() as life, AsyncScorerClient(await life.listening()) as client:
            return await client.score("q", ["word " * 800] * 1000, ids=ids)

    response = run(scenario)
    assert [r.id for r in response.results] == ids
    assert {r.document_tokens for r in response.results} == {800}
    assert response.ByteSize() > 4 << 20


def test_a_message_over_the_limit_is_refused():
    async def scenario():
        async with Life(max_message_bytes=1 << 20) as life, AsyncScorerClient(await life.listening()) as client:
            with pytest.raises(ScorerError, match="RESOURCE_EXHAUSTED"):
                await client.score("q", ["x" * (2 << 20)])

    run(scenario)


def test_the_log_tells_where_it_listens(caplog):
    caplog.set_level(logging.INFO)

    async def scenario():
        async with Life() as life:
            await life.listening()
            return life.addresses

    addresses = run(scenario)
    assert f"listening grpc={addresses.grpc} metrics={addresses.metrics}" in caplog.messages


# --- a real process, a tiny model


LENGTHS = (1, 3, 8, 20, 60, 150)
WORDS = ("the", "rivers", "mountains", "and", "weather", "of a coast", "Paris", "bananas", "grow", "warm", "7", "🙂")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tiny_model_dir(tmp_path_factory.mktemp("model"))
    return [f"--model={directory}", "--profile=instruct", "--max-pass-tokens=2048", "--threads=1"]


@contextmanager
def process(settings):
    server = Server(settings)
    try:
        server.target = server.wait_until_listening()
        yield server
    finally:
        server.stop()


def document(number):
    """A text of its own for every number, of mixed lengths."""
    length = LENGTHS[number % len(LENGTHS)]
    return f"{number} " + " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(length))


async def pulse(target, waits, stop):
    """Asks for the health again and again; `waits` gets the seconds of each answer."""
    async with grpc.aio.insecure_channel(target) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        while not stop.is_set():
            started = time.perf_counter()
            reply = await check(health_pb2.HealthCheckRequest(service=SERVICE))
            waits.append(time.perf_counter() - started)
            assert reply.status == SERVING
            await asyncio.sleep(0.01)


def test_sixteen_clients_for_half_a_minute_then_a_stop_under_load(tiny):
    seconds = 30
    scores, codes = defaultdict(list), Counter()

    async def client_loop(client, number, stop):
        rng = random.Random(number)
        while not stop.is_set():
            picked = rng.sample(range(60), rng.choice((1, 2, 7, 30)))
            try:
                response = await client.score("which fruit grows where", [document(n) for n in picked])
            except ScorerError as error:
                codes[error.code.name] += 1
                stop.set()
                continue
            codes["OK"] += 1
            for n, result in zip(picked, response.results, strict=True):
                scores[n].append(result.score)

    async def scenario(server):
        waits, stop, quiet = [], asyncio.Event(), asyncio.Event()
        async with AsyncScorerClient(server.target, channel_options=LOOPBACK_OPTIONS) as client:
            alone = {
                n: (await client.score("which fruit grows where", [document(n)])).results[0].score for n in range(60)
            }
            health_task = asyncio.create_task(pulse(server.target, waits, quiet))
            loops = [asyncio.create_task(client_loop(client, i, stop)) for i in range(16)]
            await asyncio.sleep(seconds)
            quiet.set()
            await health_task
            before = codes["OK"]
            server.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*loops)
        return alone, waits, before

    with process(tiny) as server:
        alone, waits, before = asyncio.run(scenario(server))
        assert server.process.wait(30) == 0
        log_text = "".join(server.tail)
    assert before > 100
    assert set(codes) <= {"OK", "UNAVAILABLE"}, codes
    assert codes["UNAVAILABLE"] <= 16
    assert "Traceback" not in log_text
    assert set(scores) == set(alone)
    assert max(abs(score - alone[n]) for n, got in scores.items() for score in got) <= 1e-4
    assert len({round(score, 4) for score in alone.values()}) > 50
    assert told_waits(waits) < 0.25


def told_waits(waits):
    """The median of the health's answers. The slowest ones are printed: a busy machine makes them what they are."""
    waits = sorted(waits)
    median, slow = waits[len(waits) // 2], waits[int(0.99 * len(waits))]
    print(f"health: {len(waits)} answers, median {median:.4f} s, p99 {slow:.4f} s, slowest {waits[-1]:.4f} s")
    return median


def test_tokenising_64_calls_of_500_documents_leaves_health_quick(tiny):
    async def scenario(server):
        waits, quiet = [], asyncio.Event()
        async with AsyncScorerClient(server.target, channel_options=LOOPBACK_OPTIONS) as client:
            documents = [document(n) for n in range(500)]
            # The last one may wait for its turn: its tokenising ends when all is tokenised.
            timeouts = [8] * 63 + [120]
            calls = [
                asyncio.create_task(client.score(f"query {i}", documents, timeout=timeout))
                for i, timeout in enumerate(timeouts)
            ]
            health_task = asyncio.create_task(pulse(server.target, waits, quiet))
            ended = await asyncio.gather(*calls, return_exceptions=True)
            quiet.set()
            await health_task
        return ended, waits

    with process(tiny) as server:
        ended, waits = asyncio.run(scenario(server))
    codes = {error.code.name for error in ended if isinstance(error, ScorerError)}
    # Two cores do not score 32,000 documents in eight seconds: what can be told to be late is refused at once.
    assert codes <= {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
    assert told_waits(waits) < 0.05
    assert max(waits) < ended[-1].timings.tokenize_seconds  # none waited until all was tokenised
