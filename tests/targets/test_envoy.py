"""`make test-envoy`: the real Envoy before three real servers, and before stubs that answer as they are told."""

import asyncio
import collections
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from prefixrank.v1 import scorer_pb2 as pb
from prefixrank.v1 import scorer_pb2_grpc
from scorer.client import CHANNEL_OPTIONS, AsyncScorerClient, ScorerError, build_request
from scorer.demo import LOOPBACK_OPTIONS, Server
from scorer.server import SERVICE
from tests.certificates import Pki
from tests.scorer.test_server import free_port
from tests.scorer.test_service import until
from tests.targets.envoy import ROOT, Load, homes, running, upstream_of
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.target

KEYS = [f"key-{n}" for n in range(120)]
# Maglev fills its table anew when a host goes: of three hosts with 65,537 places, 0.03 % of the others' move along. Of
# 80 keys that is one in some forty times, and hardly ever three.
MAGLEV_MOVES = 2
REQUEST = build_request("capital of France", ["Paris is the capital.", "Bananas are yellow."])
OPTIONS = (*LOOPBACK_OPTIONS, *CHANNEL_OPTIONS)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def settings(model_dir):
    return [f"--model={model_dir}", "--profile=instruct", "--threads=1", "--drain-seconds=20"]


@contextmanager
def three(model_dir, *more):
    ports = [free_port() for _ in range(3)]
    servers = [_start(model_dir, port, *more) for port in ports]
    try:
        for server in servers:
            server.wait_until_listening()
        yield servers
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.stop()


def _start(model_dir, port, *more):
    return Server([*settings(model_dir), *more], port)


@asynccontextmanager
async def calling(target, credentials=None):
    make = (
        grpc.aio.insecure_channel(target, OPTIONS)
        if credentials is None
        else grpc.aio.secure_channel(target, credentials, OPTIONS)
    )
    async with make as channel:
        yield scorer_pb2_grpc.ScorerServiceStub(channel)


async def ended(stub, key, timeout=30):
    try:
        await upstream_of(stub, REQUEST, key, timeout)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {error.details()}"
    return "OK"


# --- three real servers


def test_keys_stick_one_host_dies_under_load_another_drains_and_they_come_back(model_dir, tmp_path):
    async def scenario(servers, envoy):
        await envoy.until_healthy(3)
        async with calling(envoy.target) as stub:
            before = await homes(stub, REQUEST, KEYS)
            assert await homes(stub, REQUEST, KEYS) == before
            assert min(collections.Counter(before.values()).values()) > len(KEYS) / 6

            for how, place in ((signal.SIGKILL, 0), (signal.SIGTERM, 1)):
                victim = servers[place]
                address = victim.target
                load = Load(lambda n: ended(stub, KEYS[n % len(KEYS)]))
                await asyncio.sleep(2)
                os.kill(victim.process.pid, how)
                await asyncio.sleep(4)
                ends = await load.stop()
                assert ends.keys() == {"OK"}, ends
                assert ends["OK"] > 50
                if how is signal.SIGTERM:
                    assert await asyncio.to_thread(victim.process.wait, 20) == 0
                await envoy.until_healthy(2)
                after = await homes(stub, REQUEST, KEYS)
                moved = {key for key in KEYS if after[key] != before[key]}
                lost = {key for key in KEYS if before[key] == address}
                assert lost <= moved
                assert len(moved - lost) <= MAGLEV_MOVES, "only the dead host's keys move"
                servers[place] = _start(model_dir, int(address.split(":")[1]))
                await asyncio.to_thread(servers[place].wait_until_listening)
                await envoy.until_healthy(3)
                await asyncio.sleep(6)  # an ejection may have to end
                assert await homes(stub, REQUEST, KEYS) == before

    with three(model_dir) as servers, running(tmp_path, [s.target for s in servers]) as envoy:
        asyncio.run(scenario(servers, envoy))


def test_an_overload_is_refused_by_the_servers_and_not_sent_again(model_dir, tmp_path):
    async def one(stub, number):
        documents = [f"Paris {number} {n} is the capital. " * 8 for n in range(50)]  # equal ones are computed once
        large = build_request("capital of France", documents)
        try:
            return await upstream_of(stub, large, f"k{number % 3}") and "OK"
        except grpc.aio.AioRpcError as error:
            return error.code().name

    async def scenario(envoy):
        await envoy.until_healthy(3)
        async with calling(envoy.target) as stub:
            ends = collections.Counter(await asyncio.gather(*(one(stub, n) for n in range(90))))
            await asyncio.sleep(1)
            assert ends.keys() == {"OK", "RESOURCE_EXHAUSTED"}, ends
            assert envoy.stat("upstream_rq_retry") == 0
            assert envoy.stat("outlier_detection.ejections_enforced_total") == 0
            assert envoy.healthy() == 3
            assert await ended(stub, "afterwards") == "OK"

    with (
        three(model_dir, "--max-queue-tokens=20000") as servers,
        running(tmp_path, [s.target for s in servers]) as envoy,
    ):
        asyncio.run(scenario(envoy))


def test_http_json_with_curl_and_through_mutual_tls(model_dir, tmp_path):
    pki = Pki.made(tmp_path)
    for name in ("crt", "key"):
        pki.path(f"tls.{name}").write_bytes(pki.path(f"server.{name}").read_bytes())
    tls = [f"--{name.replace('_', '-')}={value}" for name, value in pki.settings().items()]
    server = Server([f"--model={model_dir}", "--profile=instruct", "--threads=1", *tls])

    async def scenario(envoy):
        await envoy.until_healthy(1)
        async with calling(envoy.target, pki.credentials()) as stub:
            assert len((await stub.Score(REQUEST, timeout=30)).results) == 2
        async with calling(envoy.target, pki.credentials(certificate=False)) as stub:
            assert (await ended(stub, "k", 5)).startswith("UNAVAILABLE")

    try:
        target = server.wait_until_listening()
        with running(tmp_path, [target], file="envoy-mtls.yaml", secrets=tmp_path) as envoy:
            asyncio.run(scenario(envoy))
    finally:
        server.stop()

    plain = Server([f"--model={model_dir}", "--profile=instruct", "--threads=1"])
    try:
        with running(tmp_path, [plain.wait_until_listening()]) as envoy:
            asyncio.run(envoy.until_healthy(1))
            url = f"http://{envoy.target}/prefixrank.v1.ScorerService/Score"
            code, told = post(url, {"query": {"text": "q"}, "documents": [{"text": "a b"}, {"id": "x", "text": "c"}]})
            assert code == 200
            assert [r["id"] for r in told["results"]] == ["0", "x"]
            assert {r["status"] for r in told["results"]} == {"DOCUMENT_STATUS_OK"}
            code, told = post(url, {"query": {"text": "q"}})
            assert code == 400
            assert told["details"][0]["field_violations"][0]["field"] == "documents"
            assert post(url, {"nonsense": 1})[0] == 400
            assert asyncio.run(streamed(envoy.target)) == {f"r{n}" for n in range(30)}
    finally:
        plain.stop()


async def streamed(target):
    """The ids of the requests that were answered on one stream."""

    async def requests():
        for n in range(30):
            yield build_request(f"query {n}", ["a", "b"], request_id=f"r{n}")

    async with AsyncScorerClient(target, channel_options=LOOPBACK_OPTIONS) as client:
        return {id async for id, answer in client.score_stream(requests()) if len(answer.results) == 2}


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


# --- stubs


class Stub(scorer_pb2_grpc.ScorerServiceServicer):
    """Answers, or ends every call with `code`, or the first `fail` calls with it; counts what it gets."""

    def __init__(self, code=None, fail=None, seconds=0.0):
        self.code, self.fail, self.seconds = code, fail, seconds
        self.calls, self.bytes, self.most, self.now = 0, [], 0, 0

    async def Score(self, request, context):  # noqa: N802
        self.calls += 1
        self.bytes.append(request.ByteSize())
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.now -= 1
        if self.code is not None and (self.fail is None or self.calls <= self.fail):
            await context.abort(self.code, "as told")
        return pb.ScoreResponse(request_id=request.request_id)


@asynccontextmanager
async def stubs(*servicers):
    servers, targets = [], []
    for servicer in servicers:
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        scorer_pb2_grpc.add_ScorerServiceServicer_to_server(servicer, server)
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        await checks.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        targets.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    try:
        yield targets
    finally:
        for server in servers:
            await server.stop(0)


def before(tmp_path, servicers, scenario, **kwargs):
    """Runs `scenario(stub, envoy)` with Envoy before these stubs."""

    async def all_of_it():
        async with stubs(*servicers) as targets:
            with running(tmp_path, targets, **kwargs) as envoy:
                await envoy.until_healthy(len(servicers))
                async with calling(envoy.target) as stub:
                    return await scenario(stub, envoy)

    return asyncio.run(all_of_it())


@pytest.mark.parametrize("code", ["DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL", "INVALID_ARGUMENT"])
def test_what_a_server_says_is_neither_retried_nor_ejects_it(tmp_path, code):
    servicers = [Stub(grpc.StatusCode[code]) for _ in range(3)]

    async def scenario(stub, envoy):
        ends = collections.Counter([await ended(stub, f"k{n}") for n in range(60)])
        await asyncio.sleep(1.5)
        assert ends == {f"{code} as told": 60}
        assert sum(s.calls for s in servicers) == 60
        assert envoy.stat("upstream_rq_retry") == 0
        assert envoy.stat("outlier_detection.ejections_enforced_total") == 0
        assert envoy.healthy() == 3

    before(tmp_path, servicers, scenario)


def test_a_callers_deadline_that_expires_ejects_nobody(tmp_path):
    servicers = [Stub(seconds=1.0) for _ in range(3)]

    async def scenario(stub, envoy):
        ends = await asyncio.gather(*(ended(stub, f"k{n}", timeout=0.2) for n in range(60)))
        await asyncio.sleep(2)
        assert {end.split()[0] for end in ends} == {"DEADLINE_EXCEEDED"}
        assert envoy.stat("outlier_detection.ejections_enforced_total") == 0
        assert envoy.healthy() == 3

    before(tmp_path, servicers, scenario)


def test_unavailable_is_sent_again_to_another_host_whatever_its_size(tmp_path):
    servicers = [Stub(grpc.StatusCode.UNAVAILABLE), Stub(), Stub()]
    large = build_request("q", ["x" * 4_000_000])

    async def scenario(stub, envoy):
        of_first = []  # a third of the keys, by addresses that differ from run to run
        for n in range(60):
            calls = servicers[0].calls
            assert await ended(stub, f"k{n}") == "OK"
            if servicers[0].calls > calls:
                of_first.append(f"k{n}")
        await upstream_of(stub, large, of_first[0])
        assert max(servicers[0].bytes) > 4_000_000
        assert envoy.stat("upstream_rq_retry_success") == servicers[0].calls

    before(tmp_path, servicers, scenario)


def test_where_a_host_stops_no_key_is_sent_to_it_until_its_call_fails(tmp_path):
    """Maglev draws the next host from the key: of two of them, each draw may be the one that was tried."""
    servicers = [Stub(grpc.StatusCode.UNAVAILABLE), Stub()]

    async def scenario(stub, envoy):
        ends = collections.Counter([await ended(stub, f"k{n}") for n in range(600)])
        assert ends == {"OK": 600}
        assert servicers[0].calls > 200
        assert envoy.healthy() == 2

    before(tmp_path, servicers, scenario)


def test_a_hot_key_spills_over_and_no_host_gets_more_than_its_bound(tmp_path):
    servicers = [Stub(seconds=0.2) for _ in range(3)]

    async def scenario(stub, envoy):
        load = Load(lambda n: ended(stub, "hot"), workers=30)
        await asyncio.sleep(1.5)  # Envoy counts calls that have a connection: while it connects nothing is bounded
        for servicer in servicers:
            servicer.calls = servicer.most = 0
        await asyncio.sleep(3)
        calls, most = sorted(s.calls for s in servicers), sorted(s.most for s in servicers)
        assert (await load.stop()).keys() == {"OK"}
        print(f"one key, 30 calls at a time: {calls} calls, at most {most} at once")
        assert most[-1] <= 30 * 0.5 + 3, "1.5 times the mean of 10, and what was being counted"
        assert calls[1] > 0, "what is above the bound goes to the next host; two have room for 30"
        for servicer in servicers:
            servicer.calls = 0
        for _ in range(10):
            await ended(stub, "hot")
        assert sorted(s.calls for s in servicers) == [0, 0, 10], "alone, a key has one home"

    before(tmp_path, servicers, scenario)


def test_without_a_key_calls_are_spread(tmp_path):
    servicers = [Stub() for _ in range(3)]

    async def scenario(stub, envoy):
        for _ in range(60):
            await upstream_of(stub, REQUEST)
        assert min(s.calls for s in servicers) > 5

    before(tmp_path, servicers, scenario)


def test_above_the_circuit_breaker_calls_are_refused_at_once(tmp_path):
    servicers = [Stub(seconds=1.0)]

    def few(config):
        config["static_resources"]["clusters"][0]["circuit_breakers"]["thresholds"][0]["max_requests"] = 10

    async def scenario(stub, envoy):
        ends = collections.Counter(await asyncio.gather(*(ended(stub, f"k{n}") for n in range(30))))
        assert ends["OK"] == 10
        assert sum(n for end, n in ends.items() if "overflow" in end) == 20

    before(tmp_path, servicers, scenario, change=few)


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def pre_stop(admin):
    """The manifest's command, for this Envoy's admin port, without its long sleep."""
    manifest, *_ = yaml.safe_load_all((ROOT / "deploy/envoy/deployment.yaml").read_text())
    (proxy,) = manifest["spec"]["template"]["spec"]["containers"]
    *shell, script = proxy["lifecycle"]["preStop"]["exec"]["command"]
    assert "/9901;" in script
    assert "sleep 30" in script
    return [*shell, script.replace("/9901;", f"/{admin};").replace("sleep 30", "sleep 0.2")]


def test_envoys_pre_stop_drains_it_and_its_log_has_no_key(tmp_path):
    servicers = [Stub(seconds=1.0)]

    async def scenario(stub, envoy):
        call = asyncio.create_task(ended(stub, "a-key-that-must-not-be-logged"))
        await asyncio.sleep(0.3)
        ran = await asyncio.to_thread(subprocess.run, pre_stop(envoy.admin))
        assert ran.returncode == 0
        assert await call == "OK"
        await until(lambda: not listens(envoy.port), 10)
        assert envoy.process.poll() is None, "it goes on until it is told to end"
        await asyncio.sleep(11)  # Envoy flushes its log every ten seconds
        (line,) = [a for a in envoy.accesses() if a["path"].endswith("/Score")]
        assert (line["code"], line["attempts"]) == (200, 1)
        assert "must-not-be-logged" not in envoy.log.read_text()

    before(tmp_path, servicers, scenario)


def test_our_clients_keys_reach_the_servers_through_envoy(tmp_path):
    servicers = [Stub() for _ in range(3)]

    async def scenario(stub, envoy):
        async with AsyncScorerClient(envoy.target, channel_options=LOOPBACK_OPTIONS) as client:
            for query in range(20):
                for servicer in servicers:
                    servicer.calls = 0
                for _ in range(4):
                    await client.score(f"query {query}", ["a"])
                assert sorted(s.calls for s in servicers) == [0, 0, 4]

    before(tmp_path, servicers, scenario)


def test_no_server_at_all_is_unavailable(tmp_path):
    async def scenario():
        with running(tmp_path, [f"127.0.0.1:{free_port()}"]) as envoy:
            await asyncio.sleep(2)
            async with AsyncScorerClient(envoy.target, channel_options=LOOPBACK_OPTIONS) as client:
                with pytest.raises(ScorerError, match="UNAVAILABLE"):
                    await client.score("q", ["a"], timeout=5)

    asyncio.run(scenario())
