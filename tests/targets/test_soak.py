"""Thirty minutes at twice what the service can do, with callers that go away, deadlines, and tiers that fail.

Run by `make soak`; SOAK_SECONDS says how long. Every call must end, and be in the metrics; memory must stay flat. What
happened is written to SOAK_OUTPUT.
"""

import asyncio
import json
import os
import random
import resource
import time
import urllib.request
from collections import Counter
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import AsyncScorerClient, ScorerError, build_request
from scorer.demo import LOOPBACK_OPTIONS, Server
from tests.redis_server import needs_redis, redis_server
from tests.scorer.test_server import document
from tests.tiny import tiny_model_dir

SECONDS = float(os.environ.get("SOAK_SECONDS", "1800"))
OUTPUT = Path(os.environ.get("SOAK_OUTPUT", "build/soak.json"))
GRACE = 60.0  # after the last call was sent, and beyond its deadline
FULL = 3 << 19  # bytes at which the disk is full: less than the tier would like to have
QUERIES = 300

pytestmark = [pytest.mark.target, pytest.mark.timeout(SECONDS + 600), needs_redis]


@contextmanager
def disk_of(size):
    """Processes that start here can write no file beyond this size: a disk that is full."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def scraped(server):
    """Sample -> value, labels summed over."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    found = Counter()
    for family in families:
        for sample in family.samples:
            found[sample.name] += sample.value
            for value in sample.labels.values():
                found[sample.name, value] += sample.value
    return found


def resident_mib(process):
    with open(f"/proc/{process.pid}/status", encoding="utf-8") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def asked_by(user):
    """Long enough that a tier has it sooner than it could be computed."""
    return f"user {user} asks " + f"which fruit {user} grows where, and when, and why, " * 12


class Load:
    """Open-loop callers: however slow the answers, the calls come."""

    def __init__(self, client, seed):
        self.client = client
        self.rng = random.Random(seed)
        self.ended = Counter()
        self.sent = 0
        self.tasks = set()

    def _request(self):
        query = asked_by(int(QUERIES * self.rng.random() ** 3))
        picked = self.rng.sample(range(60), self.rng.choice((1, 1, 2, 7, 30)))
        tenant = self.rng.choice(("a", "a", "a", "b"))
        return build_request(
            query,
            [document(n) for n in picked],
            tenant=tenant,
            partial_ok=self.rng.random() < 0.2,
            priority=self.rng.choice((pb.PRIORITY_LOW, pb.PRIORITY_NORMAL, pb.PRIORITY_NORMAL, pb.PRIORITY_HIGH)),
        )

    async def one(self):
        timeout = self.rng.choice((0.05, 0.2, 1.0, 5.0))
        call = asyncio.create_task(self.client.score_request(self._request(), timeout))
        if self.rng.random() < 0.1:
            await asyncio.sleep(self.rng.random() * timeout)
            call.cancel()
        try:
            await call
            self.ended["OK"] += 1
        except ScorerError as error:
            self.ended[error.code.name] += 1
        except asyncio.CancelledError:
            self.ended["CANCELLED"] += 1

    async def warm(self):
        text = asked_by(self.rng.randrange(QUERIES))
        try:
            await self.client.warm_prefix(pb.WarmPrefixRequest(query=pb.QueryPrefix(text=text), tenant="a"), timeout=5)
            self.ended["OK"] += 1
        except ScorerError as error:
            self.ended[error.code.name] += 1

    async def run(self, per_second, seconds):
        """Sends for so long, then waits until everything has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            work = self.warm() if self.rng.random() < 0.02 else self.one()
            task = asyncio.create_task(work)
            self.sent += 1
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            await asyncio.sleep(self.rng.expovariate(per_second))
        if self.tasks:
            _, stuck = await asyncio.wait(self.tasks, timeout=GRACE)
            assert not stuck, f"{len(stuck)} calls never ended"


async def faults(redis, kv_file, seconds):
    """Kills the remote store and brings it back; damages the file under the server's feet."""
    rng, end = random.Random(2), time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(seconds / 12)
        redis.kill()
        if kv_file.exists() and (size := kv_file.stat().st_size):
            with kv_file.open("r+b") as opened:
                for _ in range(50):
                    opened.seek(rng.randrange(size))
                    opened.write(b"\xa5")
        await asyncio.sleep(seconds / 24)
        redis.start()


async def capacity(client, load):
    """Calls/s of sixteen callers who wait for their answers."""
    end, done = time.monotonic() + 5, 0

    async def caller():
        nonlocal done
        while time.monotonic() < end:
            await client.score_request(load._request(), 60)
            load.sent += 1
            load.ended["OK"] += 1
            done += 1

    await asyncio.gather(*(caller() for _ in range(16)))
    return done / 5


def write_result(load, memory, after, exit_code):
    """What the run was and what came of it."""
    told = ("tier", "fetch", "cache", "refus", "miss", "cancel", "requests_total", "internal", "computed", "queue")
    metrics = {
        "".join(f"{part} " for part in ((name,) if isinstance(name, str) else name)).strip(): value
        for name, value in sorted(after.items(), key=str)
        if value
        and any(word in str(name) for word in told)
        and "_bucket" not in str(name)
        and "created" not in str(name)
    }
    result = {
        "date": date.today().isoformat(),
        "seconds": SECONDS,
        "calls_per_second": round(load.sent / SECONDS, 1),
        "sent": load.sent,
        "ended": dict(sorted(load.ended.items())),
        "exit_code": exit_code,
        "resident_mib": [round(m) for m in memory],
        "metrics": metrics,
    }
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def test_soak(tmp_path):
    model = tiny_model_dir(tmp_path / "model")
    kv_file = tmp_path / "kv"
    settings = [
        f"--model={model}", "--profile=instruct", "--threads=1", "--max-pass-tokens=1024", "--cache-tokens=2048",
        "--kv-host-bytes=1000000", f"--kv-file={kv_file}", f"--kv-file-bytes={4 * FULL}", "--tenant-weights=a=2,b=1",
    ]  # fmt: skip
    with redis_server(tmp_path) as redis:
        with disk_of(FULL):
            server = Server([*settings, f"--kv-remote={redis.url}"])
        try:
            target = server.wait_until_listening()
            load, memory = asyncio.run(_soaked(server, target, redis, kv_file))
            after = scraped(server)
        finally:
            exit_code = server.stop()
    write_result(load, memory, after, exit_code)
    assert exit_code == 0
    assert sum(load.ended.values()) == load.sent
    # Who went away, or whose deadline came, may have done so before the call reached the server.
    unsure = load.ended["CANCELLED"] + load.ended["DEADLINE_EXCEEDED"]
    assert load.sent - unsure <= after["prefixrank_requests_total"] <= load.sent, "every call is in the metrics"
    for code in ("OK", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"):
        counted = after["prefixrank_requests_total", code]
        assert load.ended[code] <= counted <= load.ended[code] + unsure, code
    assert after["prefixrank_in_flight_requests"] == after["prefixrank_queue_tokens"] == 0
    assert after["prefixrank_internal_errors_total"] == 0
    assert load.ended["OK"] > 0.2 * load.sent
    assert load.ended["RESOURCE_EXHAUSTED"] > 0, "it was more than the service can do"
    assert load.ended["UNAVAILABLE"] == load.ended["INTERNAL"] == load.ended["UNKNOWN"] == 0
    third = len(memory) // 3
    early, late = max(memory[third : 2 * third]), max(memory[2 * third :])
    assert late < 1.05 * early + 20, "memory is flat"


async def _soaked(server, target, redis, kv_file):
    memory = []

    async def watch():
        while True:
            memory.append(resident_mib(server.process))
            await asyncio.sleep(SECONDS / 60)

    async with AsyncScorerClient(target, channel_options=LOOPBACK_OPTIONS) as client:
        load = Load(client, seed=1)
        per_second = 2 * await capacity(client, load)
        print(f"twice the capacity: {per_second:.0f} calls/s")
        watching = asyncio.create_task(watch())
        failing = asyncio.create_task(faults(redis, kv_file, SECONDS))
        await load.run(per_second, SECONDS)
        await failing
        watching.cancel()
        await asyncio.sleep(1.0)  # for the last cancelled ones to be counted
    return load, memory
