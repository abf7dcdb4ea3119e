"""The gRPC server's life: starting, serving, draining.

It listens at once and answers health with NOT_SERVING; the model is loaded and proved on a thread beside it. SERVING
means that every proof held.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from grpc_health.v1 import health_pb2

from scorer.config import Config
from scorer.errors import StartError
from scorer.garbage import keep_loaded
from scorer.listen import HEALTH, SERVICE, Addresses, Listening, listen
from scorer.threads import on_daemon
from scorer.wakeful import stay_awake

if TYPE_CHECKING:
    from scorer.place import Place
    from scorer.runtime import Runtime

__all__ = ["HEALTH", "SERVICE", "Addresses", "load_runtime", "serve"]

log = logging.getLogger(__name__)
T = TypeVar("T")

SERVING = health_pb2.HealthCheckResponse.SERVING

# The port stays open until no call has come for so long, but not longer than the health checks of a proxy take.
QUIET_SECONDS = 0.2
LINGER_SECONDS = 5.0
FAILED_SECONDS = 5.0
BLAME_SECONDS = 1.0  # in which a process that is gone is noticed
# After so long a thread that tokenizes or packs lets the loop have its turn; Python's own choice is ten times that.
SWITCH_SECONDS = 0.0005
# Beside an H200, by turns, a call alone took 1 to 11 % less (shapes of 512 to 8,192 tokens before 32 to 128 items).
GPU_AWAKE_SECONDS = 0.05


def load_runtime(config: Config, place: Place | None = None) -> Runtime:
    """Loads the model and proves it. Takes seconds and blocks. place: of rank 0, where others follow. Raises
    StartError."""
    from scorer.runtime import load_checked  # torch and transformers take seconds to import; the server listens before

    return load_checked(config, place)


async def _never() -> str:
    """Returns nothing, ever."""
    never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    return await never


async def serve(
    config: Config,
    load: Callable[[Config], Runtime] = load_runtime,
    ready: Callable[[Addresses], None] = lambda addresses: None,
    lost: Callable[[], Coroutine[Any, Any, str]] = _never,
) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit code.

    0: stopped as told, everything that was accepted is answered. 1: the start or the device failed, or the grace ran
    out before accepted calls were answered; the log says why.
    `load` runs on a thread of its own; `ready` is called once the service is SERVING; `lost` returns, with the reason,
    once a process is gone without which nothing can be computed.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    with _stop_signals() as stop:
        try:
            async with listen(config) as listening:
                return await _Server(listening, lost).run(config, load, ready, stop)
        except StartError as error:
            log.error("cannot start: %s", error)
            return 1


@dataclass(frozen=True, slots=True)
class _Server:
    """What becomes of what listens."""

    at: Listening
    lost: Callable[[], Coroutine[Any, Any, str]]

    async def run(
        self,
        config: Config,
        load: Callable[[Config], Runtime],
        ready: Callable[[Addresses], None],
        stop: asyncio.Event,
    ) -> int:
        log.info("starting %s model=%s", self.at.addresses, config.model)
        runtime = await _first(self._unless_lost(on_daemon("load", lambda: load(config))), stop)
        if runtime is None:
            return 0
        self.at.service.serve(runtime)
        keep_loaded()
        stay_awake(_awake_seconds(config, runtime))
        await self.at.set_health(SERVING)
        log.info("listening %s", self.at.addresses)
        ready(self.at.addresses)
        checking = self._self_check(config.self_check_seconds)
        failure = await _first(self._failed(runtime), stop)
        checking.cancel()
        if failure is not None:
            log.error("the device failed for good: %s", failure)
        # A device that failed may hold its thread for ever, and nobody waits for an answer of it.
        seconds = config.drain_seconds if failure is None else min(config.drain_seconds, FAILED_SECONDS)
        answered = await self._drain(seconds, runtime)
        return int(failure is not None or not answered)

    async def _failed(self, runtime: Runtime) -> str:
        """Returns once nothing can be computed any more; whoever waits is told."""
        try:
            return await self._unless_lost(runtime.batcher.failed())
        except StartError as error:
            runtime.batcher.give_up(str(error))
            return str(error)

    async def _unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises StartError where a process is lost first."""
        task, losing = asyncio.ensure_future(work), asyncio.ensure_future(self.lost())
        try:
            await asyncio.wait((task, losing), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and task.exception() is not None and not isinstance(task.exception(), StartError):
                await asyncio.wait((losing,), timeout=BLAME_SECONDS)  # what failed may be for want of a process
            if losing.done():
                raise StartError(losing.result()) from (task.exception() if task.done() else None)
            return task.result()
        finally:
            await _cancelled(task, losing)

    def _self_check(self, seconds: float) -> asyncio.Future[None]:
        """Runs beside the service until it is cancelled."""
        return asyncio.ensure_future(self.at.service.check_forever(seconds) if seconds else asyncio.sleep(0))

    async def _drain(self, seconds: float, runtime: Runtime) -> bool:
        """No new calls; answers the accepted ones, for as long as the grace lasts. False where that was too short."""
        await self.at.health.enter_graceful_shutdown()
        self.at.service.refuse("the service is draining")
        log.info("draining seconds=%g", seconds)
        try:
            async with asyncio.timeout(seconds):
                await self.at.service.calls.idle()
                await runtime.batcher.drain()
                await on_daemon("close", runtime.close)  # may wait for a pass whose callers have gone
        except TimeoutError:
            left = self.at.service.calls.in_flight
            log.warning("the grace of %g s is over; what is left is cancelled: %d calls", seconds, left)
        # Callers hear UNAVAILABLE and go elsewhere; of a call that comes as gRPC closes they would hear CANCELLED.
        await self.at.service.calls.quiet(QUIET_SECONDS, LINGER_SECONDS)
        return self.at.service.calls.in_flight == 0


def _awake_seconds(config: Config, runtime: Runtime) -> float:
    """On a CPU the model itself needs the processors."""
    if config.awake_seconds is not None:
        return config.awake_seconds
    return GPU_AWAKE_SECONDS if runtime.info.device.startswith("cuda") else 0.0


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
        await _cancelled(task, stopped)


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):  # raised to whoever asked for its result
            await task
