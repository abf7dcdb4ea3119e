"""The HTTP port: uvicorn on the service's own event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn

from scorer.build import build_version
from scorer.config import Config
from scorer.errors import StartError
from scorer.http.app import make_app
from scorer.service import ScorerService
from scorer.tls import Certificates, Renewal

log = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75  # longer than proxies keep theirs: else they send a request as we close
RELOAD_SECONDS = 1.0
CLOSE_SECONDS = 1


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the service has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def renew(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        """Handshakes from now on are this context's. Where it fails they are the old one's.

        A context never forgets an authority, nor who was let in by it and may resume; asyncio keeps to the context that
        it began with. So another server listens on the same socket, and the old one, not its connections, is closed.
        """
        before, self.config.ssl = self.servers, context
        try:
            await self.startup(sockets=[listener.dup()])
        except BaseException:  # cancelled too: whoever closes must find what listens
            self.servers = before
            raise
        for each in before:
            each.close()


@asynccontextmanager
async def listen_http(config: Config, service: ScorerService, certificates: Certificates | None) -> AsyncIterator[int]:
    """Serves HTTP and gives its port. Raises StartError where it cannot be bound."""
    listener = _bound(config.host, config.http_port)
    app = make_app(service, build_version(), config.max_message_bytes, config.http_timeout_seconds)
    settings = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,  # the service logs each call itself
        lifespan="off",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    settings.load()
    renewal = None if certificates is None else Renewal(certificates, certificates.context)
    settings.ssl = None if certificates is None else certificates.context()
    server = _Server(settings)
    serving = asyncio.create_task(server.serve(sockets=[listener.dup()]))
    stopping = asyncio.Event()
    renewing = asyncio.create_task(_renew(server, listener, renewal, stopping))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        yield int(listener.getsockname()[1])
    finally:
        stopping.set()
        await renewing  # one in the middle would leave a socket that nobody closes
        server.should_exit = True
        await serving
        listener.close()


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {host}:{port} for HTTP: {error}") from None
    return listener


async def _renew(
    server: _Server, listener: socket.socket, renewal: Renewal[ssl.SSLContext] | None, stopping: asyncio.Event
) -> None:
    """Gives the server a context of the new files whenever they change."""
    context = None
    while renewal is not None and not await _within(RELOAD_SECONDS, stopping):
        try:
            context = renewal() or context
            if context is not None and server.started:
                await server.renew(listener, context)
                context = None
        except Exception as error:  # noqa: BLE001  whatever it is, the next look may find better
            log.error("the HTTP port cannot take the new certificates yet: %r", error)


async def _within(seconds: float, event: asyncio.Event) -> bool:
    """Whether it is set before they are over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
