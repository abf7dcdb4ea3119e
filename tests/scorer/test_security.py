"""Tokens and certificates on a listening server, called by real clients."""

import asyncio
import json
import re
import socket
import ssl
import urllib.request
from contextlib import suppress

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from prefixrank.v1 import scorer_pb2 as pb
from prefixrank.v1 import scorer_pb2_grpc as pb_grpc
from scorer.__main__ import main
from scorer.access import CHECK_SECONDS
from scorer.client import AsyncScorerClient, ScorerError, build_request
from scorer.demo import Server
from tests.certificates import Pki
from tests.scorer.test_server import SERVING, Life, health, run
from tests.scorer.test_service import until
from tests.tiny import tiny_model_dir

TOKEN, SHOP_TOKEN = "a-token-of-sixteen-or-more", "the-shops-token-0123456789"


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"{TOKEN}\n{SHOP_TOKEN} shop\n")
    return str(path)


@pytest.fixture
def pki(tmp_path):
    return Pki.made(tmp_path)


async def code_of(awaitable):
    try:
        await awaitable
    except ScorerError as error:
        return error.code.name
    return "OK"


def test_only_health_is_open_without_a_token(tokens):
    async def scenario():
        async with Life(auth_tokens_file=tokens) as life:
            target = await life.listening()
            assert await health(target) == SERVING
            async with AsyncScorerClient(target) as client:
                assert await code_of(client.score("q", ["a"])) == "UNAUTHENTICATED"
                assert await code_of(client.model_info()) == "UNAUTHENTICATED"
            async with AsyncScorerClient(target, token=TOKEN + "x") as client:
                assert await code_of(client.score("q", ["a"])) == "UNAUTHENTICATED"
            async with grpc.aio.insecure_channel(target) as channel:
                call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                    iter([reflection_pb2.ServerReflectionRequest(list_services="")])
                )
                with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                    await call.read()
            async with AsyncScorerClient(target, token=TOKEN) as client:
                await client.wait_until_serving(5)
                assert (await client.model_info()).model == "fake-model"
                assert len((await client.score("q", ["a", "b"])).results) == 2
            assert life.runtime.batcher.submitted == 1
            page = (await asyncio.to_thread(urllib.request.urlopen, f"http://{life.addresses.metrics}/metrics")).read()
            assert b'prefixrank_requests_total{code="UNAUTHENTICATED"} 2.0' in page

    run(scenario)


def test_a_token_is_one_tenants(tokens, caplog):
    caplog.set_level("INFO", "scorer.access")

    async def scenario():
        async with (
            Life(auth_tokens_file=tokens) as life,
            AsyncScorerClient(await life.listening(), token=SHOP_TOKEN) as client,
        ):
            assert await code_of(client.score("q", ["a"])) == "OK"
            assert await code_of(client.score("q", ["a"], tenant="bank")) == "PERMISSION_DENIED"

    run(scenario)
    records = [r for r in caplog.records if r.name == "scorer.access"]
    assert [(r.tenant, r.code) for r in records] == [("shop", "OK"), ("bank", "PERMISSION_DENIED")]


def test_a_token_that_is_taken_away_ends_an_open_stream(tmp_path, caplog):
    """What was asked before is answered; a stream whose token stays goes on."""
    path = tmp_path / "tokens"
    path.write_text(f"{TOKEN}\n{SHOP_TOKEN}\n")

    async def ask(call, name):
        await call.write(pb.ScoreStreamRequest(request=build_request("q", ["a"], request_id=name)))

    async def scenario():
        async with (
            Life(auth_tokens_file=str(path)) as life,
            grpc.aio.insecure_channel(await life.listening()) as channel,
        ):
            stub = pb_grpc.ScorerServiceStub(channel)
            gone, kept = (
                stub.ScoreStream(metadata=[("authorization", f"Bearer {token}")]) for token in (TOKEN, SHOP_TOKEN)
            )
            life.runtime.batcher.gate.clear()
            await ask(gone, "before")
            await until(lambda: life.runtime.batcher.submitted == 1)
            path.write_text(f"{SHOP_TOKEN}\n")
            await asyncio.sleep(CHECK_SECONDS)
            await ask(gone, "after")
            await ask(kept, "after")
            await until(lambda: life.runtime.batcher.submitted == 2)
            life.runtime.batcher.gate.set()
            assert (await gone.read()).request_id == "before"
            assert await gone.code() is grpc.StatusCode.UNAUTHENTICATED
            assert (await kept.read()).response.request_id == "after"
            await kept.done_writing()
            assert await kept.code() is grpc.StatusCode.OK
            assert life.runtime.batcher.submitted == 2
            page = (await asyncio.to_thread(urllib.request.urlopen, f"http://{life.addresses.metrics}/metrics")).read()
            assert b'prefixrank_requests_total{code="UNAUTHENTICATED"} 1.0' in page

    caplog.set_level("INFO", "scorer.access")
    run(scenario)
    (refused,) = [r for r in caplog.records if r.message == "refused"]
    assert refused.request_id == "after"


def test_a_caller_over_its_rate_is_told_when_to_come_again(tokens):
    async def scenario():
        async with (
            Life(auth_tokens_file=tokens, max_requests_per_second=0.001) as life,
            AsyncScorerClient(await life.listening(), token=TOKEN) as client,
        ):
            assert await code_of(client.score("q", ["a"])) == "OK"
            with pytest.raises(ScorerError, match="RESOURCE_EXHAUSTED: more than max_requests_per_second") as caught:
                await client.score("q", ["a"])
            assert caught.value.retry_after_seconds == 1
            assert life.runtime.batcher.submitted == 1

    run(scenario)


def test_with_mutual_tls_only_a_known_client_gets_in_and_probes_have_a_port_of_their_own(pki):
    async def scenario():
        async with Life(**pki.settings(), health_port=0) as life:
            target = await life.listening()
            async with AsyncScorerClient(target, pki.credentials()) as client:
                await client.wait_until_serving(5)
                assert len((await client.score("q", ["a"])).results) == 1
            async with AsyncScorerClient(target, pki.credentials(certificate=False)) as client:
                assert await code_of(client.score("q", ["a"], timeout=5)) == "UNAVAILABLE"
            async with AsyncScorerClient(target) as client:
                assert await code_of(client.score("q", ["a"], timeout=5)) == "UNAVAILABLE"
            assert await health(life.addresses.health) == SERVING
            async with AsyncScorerClient(life.addresses.health) as client:
                assert await code_of(client.score("q", ["a"])) == "UNIMPLEMENTED"
            assert life.runtime.batcher.submitted == 1

    run(scenario)


def test_a_renewed_certificate_needs_no_restart(pki):
    other = Pki.made(pki.path("other").mkdir() or pki.path("other"))

    async def scenario():
        async with Life(**pki.settings(mutual=False)) as life:
            target = await life.listening()
            async with AsyncScorerClient(target, pki.credentials(certificate=False)) as client:
                assert await code_of(client.score("q", ["a"])) == "OK"
            for name in ("server.key", "server.crt"):
                pki.path(name).write_bytes(other.path(name).read_bytes())
            async with AsyncScorerClient(target, other.credentials(certificate=False)) as client:
                assert await code_of(client.score("q", ["a"], timeout=5)) == "OK"
            pki.path("server.crt").write_text("half a renewal")
            async with AsyncScorerClient(target, other.credentials(certificate=False)) as client:
                assert await code_of(client.score("q", ["a"], timeout=5)) == "OK"

    run(scenario)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tls_certificate": "server.crt"}, "tls_certificate and tls_key go together"),
        ({"tls_client_ca": "ca.crt"}, "tls_client_ca needs both"),
        ({"tls_certificate": "server.crt", "tls_key": "client.key"}, "mismatch|MISMATCH"),
        ({"tls_certificate": "server.crt", "tls_key": "nowhere"}, "No such file"),
    ],
)
def test_half_a_configuration_stops_the_start(pki, settings, told, caplog):
    async def scenario():
        async with Life(**{name: str(pki.path(file)) for name, file in settings.items()}) as life:
            assert await life.exit_code() == 1

    run(scenario)
    assert re.search(told, caplog.text)


def test_the_command_line_gets_in_with_a_token_and_certificates(pki, tokens, capsys):
    own = [f"--server-ca={pki.path('ca.crt')}", f"--client-key={pki.path('client.key')}"]
    own += [f"--client-certificate={pki.path('client.crt')}"]
    token_file = pki.path("token")
    token_file.write_text(f"{TOKEN}\n")

    async def scenario():
        async with Life(**pki.settings(), auth_tokens_file=tokens, drain_seconds=1) as life:
            target = f"--target={await life.listening()}"

            async def cli(*arguments):
                return await asyncio.to_thread(main, list(arguments))

            assert await cli("health", target, *own) == 0
            assert await cli("health", target, "--timeout=0.3") == 1
            assert await cli("score", target, *own, "q", "a", "b") == 1
            assert await cli("score", target, *own, f"--token-file={token_file}", "q", "a", "b") == 0
            assert await cli("score", target, own[1], "q", "a") == 2
            assert await cli("score", target, f"--token-file={pki.path('nowhere')}", "q", "a") == 2

    run(scenario)
    told = capsys.readouterr()
    assert told.out.startswith("serving\nnot serving: UNAVAILABLE: ")
    assert "UNAUTHENTICATED" in told.err
    assert "need --server-ca" in told.err
    assert "cannot read" in told.err


def test_a_handshake_that_fails_leaves_the_log_json(pki, tmp_path):
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in pki.settings().items()]
    model = tiny_model_dir(tmp_path / "model")
    server = Server([f"--model={model}", "--profile=instruct", "--threads=1", *settings])
    try:
        host, _, port = server.wait_until_listening().rpartition(":")
        context = ssl.create_default_context(cafile=pki.path("ca.crt"))
        context.set_alpn_protocols(["h2"])
        with (
            suppress(OSError),  # it is let down at once or when it reads
            socket.create_connection((host, int(port)), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as stranger,
        ):
            while stranger.recv(1024):
                pass
    finally:
        assert server.stop() == 0
    assert [json.loads(line)["event"] for line in server.tail][-1].startswith("draining")
