"""The HTTP port: uvicorn on the service's own event loop."""

from __future__ import annotations

import asyncio
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
from scorer.tls import Certificates

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75  # longer than proxies keep theirs: else they send a request as we close
RELOAD_SECONDS = 1.0
CLOSE_SECONDS = 1


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the service has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
    context = None if certificates is None else certificates.context()
    settings.ssl = context
    server = _Server(settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reloading = asyncio.create_task(_reload(certificates, context))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        yield int(listener.getsockname()[1])
    finally:
        reloading.cancel()
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


async def _reload(certificates: Certificates | None, context: ssl.SSLContext | None) -> None:
    """Loads a renewed certificate into the context of the listening socket, for the connections to come."""
    if certificates is None or context is None:
        return
    seen = certificates.state()
    while True:
        await asyncio.sleep(RELOAD_SECONDS)
        with suppress(OSError, ssl.SSLError):
            state = certificates.state()
            if state != seen:
                certificates.context()
                context.load_cert_chain(certificates.certificate, certificates.key)
                seen = state
