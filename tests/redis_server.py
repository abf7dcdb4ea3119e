"""A real Redis or Valkey server of a test's own, on a free loopback port."""

import shutil
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest

BINARY = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(
    BINARY is None, reason="no redis-server or valkey-server: apt-get install redis-server"
)


class RedisServer:
    def __init__(self, directory):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._directory = directory
        self.process = None
        self.start()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self):
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [BINARY, *options, "--dir", str(self._directory)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=0.5).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("redis-server did not come up")

    def kill(self):
        self.process.kill()
        self.process.wait()


@contextmanager
def redis_server(directory):
    server = RedisServer(directory)
    try:
        yield server
    finally:
        server.kill()
