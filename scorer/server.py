"""The gRPC server's life: starting, serving, draining.

It listens at once and answers health with NOT_SERVING; the model is loaded and proved on a thread beside it. SERVING
means that every proof held.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from prefixrank.v1 import scorer_pb2 as pb
from scorer.config import Config
from scorer.errors import StartError
from scorer.metrics import Endpoint, Metrics
from scorer.service import ScorerService, register

if TYPE_CHECKING:
    from scorer.runtime import Runtime

log = logging.getLogger(__name__)
T = TypeVar("T")

SERVICE = pb.DESCRIPTOR.services_by_name["ScorerService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

# For replies already handed over to be written out; also ends health watches, which would never end by themselves.
CLOSE_SECONDS = 1.0


# After so long a thread that tokenizes or packs lets the loop have its turn; Python's own choice is five times that.
SWITCH_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the service listens, as host:port; `metrics` is None where there are none."""

    grpc: str
    metrics: str | None

    def __str__(self) -> str:
        return f"grpc={self.grpc} metrics={self.metrics or 'none'}"


def load_runtime(config: Config) -> Runtime:
    """Loads the model and proves it. Takes seconds and blocks. Raises StartError."""
    from scorer.runtime import Runtime  # torch and transformers take seconds to import; the server listens before

    runtime = Runtime.load(config)
    try:
        runtime.check()
    except BaseException:
        runtime.close()
        raise
    return runtime


async def serve(
    config: Config,
    load: Callable[[Config], Runtime] = load_runtime,
    ready: Callable[[Addresses], None] = lambda addresses: None,
) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit code.

    0: stopped as told, everything that was accepted is answered. 1: the start or the device failed, or the grace ran
    out before accepted calls were answered; the log says why.
    `load` runs on a thread of its own; `ready` is called once the service is SERVING.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    with _stop_signals() as stop:
        try:
            async with _listening(config) as server:
                return await server.run(config, load, ready, stop)
        except StartError as error:
            log.error("cannot start: %s", error)
            return 1


@dataclass(frozen=True, slots=True)
class _Server:
    """What listens, from before the model is loaded until after the last reply."""

    addresses: Addresses
    service: ScorerService
    health: health.aio.HealthServicer

    async def run(
        self,
        config: Config,
        load: Callable[[Config], Runtime],
        ready: Callable[[Addresses], None],
        stop: asyncio.Event,
    ) -> int:
        log.info("starting %s model=%s", self.addresses, config.model)
        runtime = await _first(_on_thread(lambda: load(config)), stop)
        if runtime is None:
            return 0
        self.service.serve(runtime)
        await self._set(SERVING)
        log.info("listening %s", self.addresses)
        ready(self.addresses)
        failure = await _first(runtime.batcher.failed(), stop)
        if failure is not None:
            log.error("the device failed for good: %s", failure)
        answered = await self._drain(config.drain_seconds, runtime)
        return int(failure is not None or not answered)

    async def _set(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", SERVICE):
            await self.health.set(name, status)

    async def _drain(self, seconds: float, runtime: Runtime) -> bool:
        """No new calls; answers the accepted ones, for as long as the grace lasts. False where that was too short."""
        await self.health.enter_graceful_shutdown()
        self.service.refuse("the service is draining")
        log.info("draining seconds=%g", seconds)
        try:
            async with asyncio.timeout(seconds):
                await self.service.idle()
                await runtime.batcher.drain()
                await _on_thread(runtime.close)  # may wait for a pass whose callers have gone
        except TimeoutError:
            left = self.service.in_flight
            log.warning("the grace of %g s is over; what is left is cancelled: %d calls", seconds, left)
        return self.service.in_flight == 0


@asynccontextmanager
async def _listening(config: Config) -> AsyncIterator[_Server]:
    """Listens on both ports, NOT_SERVING; closes them afterwards. Raises StartError where one cannot be bound."""
    metrics = Metrics(_version())
    service = ScorerService(metrics, _version(), config.max_tokenizing_bytes)
    checks = health.aio.HealthServicer()
    server = _grpc_server(config, service, checks)
    endpoint: Endpoint | None = None
    try:
        grpc_port = _bind(server, config)
        if config.metrics_port >= 0:
            endpoint = _bind_metrics(metrics, config)
        addresses = Addresses(
            _join(config.host, grpc_port), None if endpoint is None else _join(config.host, endpoint.port)
        )
        listening = _Server(addresses, service, checks)
        await listening._set(NOT_SERVING)
        await server.start()
        yield listening
    finally:
        await server.stop(CLOSE_SECONDS)
        service.close()
        if endpoint is not None:
            endpoint.close()


def _grpc_server(config: Config, service: ScorerService, checks: health.aio.HealthServicer) -> grpc.aio.Server:
    options = [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.so_reuseport", 0),  # or a second server would quietly share the port
    ]
    server = grpc.aio.server(options=options)
    register(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), server)
    return server


def _bind(server: grpc.aio.Server, config: Config) -> int:
    address = _join(config.host, config.port)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise StartError(f"cannot listen on {address} for gRPC: {error}") from None
    if port == 0:
        raise StartError(f"cannot listen on {address} for gRPC")
    return port


def _bind_metrics(metrics: Metrics, config: Config) -> Endpoint:
    try:
        return metrics.listen(config.host, config.metrics_port)
    except OSError as error:
        address = _join(config.host, config.metrics_port)
        raise StartError(f"cannot listen on {address} for metrics: {error}") from None


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _version() -> str:
    try:
        return version("prefixrank")
    except PackageNotFoundError:
        return "not installed"


class _stop_signals:  # noqa: N801  used as a context manager, by its verb
    """An event that SIGTERM and SIGINT set."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __enter__(self) -> asyncio.Event:
        self._loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in self.SIGNALS:
            self._loop.add_signal_handler(number, stop.set)
        return stop

    def __exit__(self, *exception: object) -> None:
        for number in self.SIGNALS:
            self._loop.remove_signal_handler(number)


async def _first(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of `work`, or None where the stop came first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, stopped):
            each.cancel()
            with suppress(asyncio.CancelledError):
                await each


async def _on_thread(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, on a daemon thread: a stop in the middle of loading need not wait for its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001  raised again by the one who waits
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await done
