"""The ports: gRPC, metrics, and where they are asked for HTTP and plaintext health."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from prefixrank.v1 import scorer_pb2 as pb
from scorer.access import Access, TokenFile
from scorer.build import build_version
from scorer.config import Config
from scorer.errors import StartError
from scorer.guard import Guard
from scorer.metrics import Endpoint, Metrics
from scorer.register import register
from scorer.service import ScorerService
from scorer.tls import Certificates
from scorer.tracing import make_tracer

SERVICE = pb.DESCRIPTOR.services_by_name["ScorerService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

# For replies already handed over to be written out; also ends health watches, which would never end by themselves.
CLOSE_SECONDS = 1.0
# A client that shall connect anew has this long to end the calls that it has on the old connection.
AGE_GRACE_MS = 60_000


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the service listens, as host:port; None where there is none."""

    grpc: str
    metrics: str | None
    http: str | None = None
    health: str | None = None

    def __str__(self) -> str:
        told = f"grpc={self.grpc} metrics={self.metrics or 'none'}"
        for name, address in (("http", self.http), ("health", self.health)):
            told += f" {name}={address}" if address else ""
        return told


@dataclass(frozen=True, slots=True)
class Listening:
    """What listens, from before the model is loaded until after the last reply."""

    addresses: Addresses
    service: ScorerService
    health: health.aio.HealthServicer

    async def set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """What health answers from now on, for the server and for the service."""
        for name in ("", SERVICE):
            await self.health.set(name, status)


@asynccontextmanager
async def listen(config: Config) -> AsyncIterator[Listening]:
    """Listens on all ports; closes them afterwards. Raises StartError where one cannot be bound."""
    certificates = Certificates.of(config)
    tokens = None if config.auth_tokens_file is None else TokenFile(Path(config.auth_tokens_file))
    access = Access(tokens, config.max_requests_per_second)
    metrics = Metrics(build_version())
    tracer = make_tracer(config.otlp_endpoint, build_version())
    service = ScorerService(metrics, build_version(), config.max_tokenizing_bytes, access, tracer)
    checks = health.aio.HealthServicer()
    async with AsyncExitStack() as stack:
        stack.callback(service.close)
        server = _grpc_server(config, service, checks)
        stack.push_async_callback(server.stop, CLOSE_SECONDS)
        grpc_address = _bind(server, config, config.port, certificates)
        probes, health_address = None, None
        if config.health_port >= 0:
            probes = _health_server(checks)
            stack.push_async_callback(probes.stop, CLOSE_SECONDS)
            health_address = _bind(probes, config, config.health_port, None)
        metrics_address = None
        if config.metrics_port >= 0:
            endpoint = _bind_metrics(metrics, config)
            stack.callback(endpoint.close)
            metrics_address = join(config.host, endpoint.port)
        http_address = await _listen_http(stack, config, service, certificates)
        listening = Listening(Addresses(grpc_address, metrics_address, http_address, health_address), service, checks)
        await listening.set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        for each in (server, probes):
            if each is not None:
                await each.start()
        yield listening


def _grpc_server(config: Config, service: ScorerService, checks: health.aio.HealthServicer) -> grpc.aio.Server:
    options = [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.so_reuseport", 0),  # or a second server would quietly share the port
    ]
    if config.max_connection_age_seconds:
        options += [
            ("grpc.max_connection_age_ms", round(config.max_connection_age_seconds * 1000)),
            ("grpc.max_connection_age_grace_ms", AGE_GRACE_MS),
        ]
    guards = [] if service.access.open else [Guard(service.access, service)]
    server = grpc.aio.server(options=options, interceptors=guards)
    register(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), server)
    return server


def _health_server(checks: health.aio.HealthServicer) -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    return server


def _bind(server: grpc.aio.Server, config: Config, port: int, certificates: Certificates | None) -> str:
    address = join(config.host, port)
    try:
        if certificates is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, certificates.credentials())
    except RuntimeError as error:
        raise StartError(f"cannot listen on {address} for gRPC: {error}") from None
    if bound == 0:
        raise StartError(f"cannot listen on {address} for gRPC")
    return join(config.host, bound)


def _bind_metrics(metrics: Metrics, config: Config) -> Endpoint:
    try:
        return metrics.listen(config.host, config.metrics_port)
    except OSError as error:
        address = join(config.host, config.metrics_port)
        raise StartError(f"cannot listen on {address} for metrics: {error}") from None


async def _listen_http(
    stack: AsyncExitStack, config: Config, service: ScorerService, certificates: Certificates | None
) -> str | None:
    if config.http_port < 0:
        return None
    try:
        from scorer.http.listener import listen_http
    except ImportError as error:
        raise StartError(f"http_port needs the http extra, pip install 'prefixrank[http]': {error}") from None
    port = await stack.enter_async_context(listen_http(config, service, certificates))
    return join(config.host, port)


def join(host: str, port: int) -> str:
    """An address, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
