"""Several servers without a proxy: our client's round robin, and connections that are made anew in time."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from scorer.client import CHANNEL_OPTIONS, ROUND_ROBIN, AsyncScorerClient, ScorerClient
from scorer.demo import LOOPBACK_OPTIONS
from scorer.metrics import Metrics
from scorer.register import register
from scorer.server import SERVICE
from scorer.service import ScorerService
from tests.scorer.test_server import Life, run
from tests.scorer.test_service import FakeRuntime

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def replica():
    service, checks, server = ScorerService(Metrics("1"), "1"), health.aio.HealthServicer(), grpc.aio.server()
    service.serve(FakeRuntime())
    register(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await checks.set(SERVICE, SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield SimpleNamespace(address=f"127.0.0.1:{port}", service=service, health=checks, server=server)
    finally:
        await server.stop(0)
        service.close()


def answered(replicas):
    return [r.service._runtime.batcher.submitted for r in replicas]


def test_calls_go_round_the_replicas_that_serve_and_none_is_lost_when_one_stops():
    async def scenario():
        async with AsyncExitStack() as stack:
            replicas = [await stack.enter_async_context(replica()) for _ in range(3)]
            target = "ipv4:" + ",".join(r.address for r in replicas)
            client = AsyncScorerClient(target, channel_options=(*LOOPBACK_OPTIONS, *ROUND_ROBIN))
            await stack.enter_async_context(client)
            await client.wait_until_serving(10)
            await asyncio.sleep(0.3)  # the first one that serves is taken before the others are asked
            for _ in range(30):
                await client.score("q", ["a"])
            assert min(answered(replicas)) >= 8

            replicas[0].service.refuse("the service is draining")
            before = answered(replicas)[0]
            for _ in range(20):
                await client.score("q", ["a"])
            assert answered(replicas)[0] == before

            await replicas[1].health.set(SERVICE, NOT_SERVING)
            await asyncio.sleep(0.3)
            before = answered(replicas)[1]
            for _ in range(20):
                await client.score("q", ["a"])
            assert answered(replicas)[1] == before

    run(scenario)


def test_a_connection_is_made_anew_when_it_is_old_and_no_call_is_lost():
    async def scenario():
        async with Life(max_connection_age_seconds=0.3) as life:
            target, seen = await life.listening(), []

            def work():
                with ScorerClient(target, channel_options=(*CHANNEL_OPTIONS, *LOOPBACK_OPTIONS)) as client:
                    client._channel.subscribe(seen.append)
                    for _ in range(150):
                        assert len(client.score("q", ["a"], timeout=10).results) == 1
                        if seen.count(grpc.ChannelConnectivity.READY) > 2:
                            return

            await asyncio.to_thread(work)
            while seen.count(grpc.ChannelConnectivity.READY) < 2:
                await asyncio.to_thread(work)

    run(scenario)
