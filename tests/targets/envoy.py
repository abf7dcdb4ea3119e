"""The shipped Envoy configuration before backends on loopback: only addresses, files and intervals are changed."""

import asyncio
import collections
import contextlib
import json
import os
import subprocess
import urllib.request
from pathlib import Path

import yaml

from tests.scorer.test_server import free_port

ROOT = Path(__file__).parent.parent.parent
BINARY = os.environ.get("ENVOY", "envoy")
UPSTREAM = "x-upstream"


class Envoy:
    """A running Envoy. `port` takes calls, `admin` tells."""

    def __init__(self, directory, backends, file="envoy.yaml", secrets=None, change=lambda config: None):
        self.port, self.admin = free_port(), free_port()
        self.log = directory / "access.log"
        text = (ROOT / "deploy/envoy" / file).read_text()
        text = text.replace("/etc/envoy/scorer.pb", str(ROOT / "deploy/envoy/scorer.pb"))
        if secrets is not None:
            text = text.replace("/etc/envoy-tls", str(secrets))
        config = yaml.safe_load(text.replace("/dev/stdout", str(self.log)))
        self._point(config, backends)
        change(config)
        path = directory / "envoy.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [BINARY, "-c", path, "--concurrency", "1", "-l", "error", "--disable-hot-restart"]
        self.process = subprocess.Popen([*command, "--drain-time-s", "2"])

    def _point(self, config, backends):
        config["admin"]["address"]["socket_address"]["port_value"] = self.admin
        listener, cluster = config["static_resources"]["listeners"][0], config["static_resources"]["clusters"][0]
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": self.port}
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        told = {"key": UPSTREAM, "value": "%UPSTREAM_HOST%"}
        manager["route_config"]["virtual_hosts"][0]["response_headers_to_add"] = [{"header": told}]
        cluster["type"] = "STATIC"
        del cluster["dns_lookup_family"]
        cluster["health_checks"][0] |= {"interval": "0.5s", "no_traffic_interval": "0.5s", "timeout": "2s"}
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": int(b.split(":")[1])}}}}
            for b in backends
        ]

    @property
    def target(self):
        return f"127.0.0.1:{self.port}"

    def stat(self, name, scope="cluster.scorer"):
        """A counter or gauge; 0 where it is not there yet."""
        url = f"http://127.0.0.1:{self.admin}/stats?filter=^{scope}.{name}$"
        with urllib.request.urlopen(url, timeout=5) as answer:
            page = answer.read().decode()
        return int(page.split(": ")[1]) if page.strip() else 0

    def healthy(self):
        """How many hosts take calls."""
        return self.stat("membership_healthy")

    async def until_healthy(self, count):
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(OSError):
                    if await asyncio.to_thread(self.healthy) == count:
                        return
                assert self.process.poll() is None, "Envoy ended"
                await asyncio.sleep(0.1)

    def accesses(self):
        """The access log's lines; Envoy writes them every second or so."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def close(self):
        self.process.terminate()
        self.process.wait(15)


@contextlib.contextmanager
def running(*args, **kwargs):
    envoy = Envoy(*args, **kwargs)
    try:
        yield envoy
    finally:
        envoy.close()


async def upstream_of(stub, request, key=None, timeout=30):
    """Which backend answered."""
    metadata = () if key is None else (("x-prefixrank-affinity", key),)
    call = stub.Score(request, timeout=timeout, metadata=metadata)
    await call
    return next(value for name, value in await call.initial_metadata() if name == UPSTREAM)


async def homes(stub, request, keys):
    """The backend of each key."""
    return {key: await upstream_of(stub, request, key) for key in keys}


class Load:
    """Calls from so many workers until told to stop, each its end counted."""

    def __init__(self, call, workers=6):
        self.ends = collections.Counter()
        self._call, self._stop = call, asyncio.Event()
        self._tasks = [asyncio.create_task(self._work(n)) for n in range(workers)]

    async def _work(self, number):
        while not self._stop.is_set():
            number += 7
            self.ends[await self._call(number)] += 1

    async def stop(self):
        self._stop.set()
        await asyncio.gather(*self._tasks)
        return dict(self.ends)
