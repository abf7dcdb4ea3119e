"""`prefixrank bench serve`: the service through gRPC, requests as token ids from this process to another.

Closed loops at several concurrencies with prefixes of their own or from a few, and Poisson arrivals for the shapes of
interactive traffic. Without --target it starts a server with random weights of a true shape.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import numpy as np

from loadtest.shapes import SHAPES, SIZES, Shape
from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import AsyncScorerClient, ScorerError
from scorer.config import cache_dir
from scorer.demo import LOOPBACK_OPTIONS, Server
from scorer.errors import ConfigError
from scorer.metrics import STAGES

CONCURRENCIES = (1, 8, 32)
CHANNELS = 4
WARM = 4  # prefixes of a repeated run
DISTINCT = 256
IDS = 1_000
OPEN_LOOP: dict[Shape, tuple[float, ...]] = {(120, 180, 10): (1600, 2400, 2800), (70, 90, 100): (3000, 4000, 5000)}
SLO = 0.1  # seconds, p99 of an open loop


@dataclass(frozen=True, slots=True)
class Row:
    """One run. concurrency: calls at once, 0 in an open loop; offered: items/s that arrive there, else 0; times in ms.

    medians of what the service says: of its own whole, tokenize_ms, queue_ms, plan_ms, forward_ms and total_ms
    floor_ms: of one request on an H200
    """

    size: str
    shape: Shape
    prefixes: str
    concurrency: int
    offered: float
    calls: int
    refused: int
    p50_ms: float
    p99_ms: float
    tokenize_ms: float
    queue_ms: float
    plan_ms: float
    forward_ms: float
    total_ms: float
    items_per_s: float
    floor_ms: float
    ratio: float


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    with _target(args) as target:
        for row in asyncio.run(_measure(args, target)):
            if args.output is not None:
                args.output.parent.mkdir(parents=True, exist_ok=True)
                with args.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row) | {"date": date.today().isoformat()}) + "\n")
    return 0


@contextmanager
def _target(args: argparse.Namespace) -> Iterator[str]:
    if args.target is not None:
        yield args.target
        return
    from loadtest.random_checkpoint import write_checkpoint

    directory = cache_dir() / f"random-{args.size}"
    profile = write_checkpoint(SIZES[args.size], directory)
    started = time.perf_counter()
    server = Server([f"--model={directory}", f"--profile={profile}", *args.server_args.split()])
    try:
        target = server.wait_until_listening()
        print(f"serving after {time.perf_counter() - started:.1f} s", flush=True)
        yield target
    finally:
        server.stop()


async def _measure(args: argparse.Namespace, target: str) -> list[Row]:
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(_line(row), flush=True)

    async with _clients(target) as clients:
        shapes = [tuple(shape) for shape in args.shape] or SHAPES
        for shape in shapes:
            for prefixes in ("distinct", "repeated"):
                asked = _requests(shape, DISTINCT if prefixes == "distinct" else WARM)
                if prefixes == "distinct":
                    asked = Fresh(asked)
                await _closed(clients, asked, 1, 0.2)
                for concurrency in CONCURRENCIES if prefixes == "distinct" else CONCURRENCIES[-1:]:
                    calls, seconds = await _closed(clients, asked, concurrency, args.seconds)
                    add(_row(args.size, shape, prefixes, concurrency, 0.0, calls, seconds))
        for shape, rates in OPEN_LOOP.items():
            if shape not in shapes:
                continue
            asked = Fresh(_requests(shape, DISTINCT))
            for offered in rates:
                calls, seconds = await _open(clients, asked, offered / shape[2], 2 * args.seconds)
                add(_row(args.size, shape, "distinct", 0, offered, calls, seconds))
    return rows


@asynccontextmanager
async def _clients(target: str) -> AsyncIterator[list[AsyncScorerClient]]:
    options = (*LOOPBACK_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    clients = [AsyncScorerClient(target, channel_options=options) for _ in range(CHANNELS)]
    try:
        for client in clients:
            try:
                await client.wait_until_serving(300.0)
            except (TimeoutError, ScorerError) as error:
                raise ConfigError(f"{target}: {error}") from None
        yield clients
    finally:
        for client in clients:
            await client.close()


def _requests(shape: Shape, count: int) -> list[pb.ScoreRequest]:
    """Seeded random ids; every call has documents of its own. Repeated prefixes come back with other documents."""
    prefix, length, items = shape
    rng = np.random.default_rng(prefix * 7 + length)
    prefixes = rng.integers(1, IDS, (count, prefix))
    made = []
    for number in range(max(count, DISTINCT)):
        request = pb.ScoreRequest(token_ids=pb.TokenIds(ids=prefixes[number % count].tolist()))
        for document in rng.integers(1, IDS, (items, length)).tolist():
            request.documents.add(token_ids=pb.TokenIds(ids=document))
        made.append(request)
    return made


class Fresh(list[pb.ScoreRequest]):
    """Requests whose prefix is new whenever one is taken: a large cache would know those of the run before."""

    _taken = itertools.count()

    def __getitem__(self, i: Any) -> Any:
        request = super().__getitem__(i)
        number = next(self._taken)
        for place in (0, 1):
            number, request.token_ids.ids[place] = divmod(number, IDS)
        return request


@dataclass(frozen=True, slots=True)
class Call:
    """seconds of the whole call, and what the service says of its parts; None where it was refused."""

    seconds: float
    timings: pb.Timings | None


async def _closed(
    clients: Sequence[AsyncScorerClient], asked: Sequence[pb.ScoreRequest], concurrency: int, seconds: float
) -> tuple[list[Call], float]:
    """So many calls at once, each followed by the next."""
    calls: list[Call] = []
    number = iter(range(10**9))
    started = time.perf_counter()

    async def one() -> None:
        while time.perf_counter() - started < seconds:
            i = next(number)
            calls.append(await _call(clients[i % len(clients)], asked[i % len(asked)]))

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return calls, time.perf_counter() - started


async def _open(
    clients: Sequence[AsyncScorerClient], asked: Sequence[pb.ScoreRequest], rate: float, seconds: float
) -> tuple[list[Call], float]:
    """Poisson arrivals at `rate` calls a second."""
    gaps = np.random.default_rng(0).exponential(1 / rate, int(rate * seconds))
    started = time.perf_counter()
    tasks = []
    for i, at in enumerate(np.cumsum(gaps).tolist()):
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        tasks.append(asyncio.create_task(_call(clients[i % len(clients)], asked[i % len(asked)])))
    calls = await asyncio.gather(*tasks)
    return calls, time.perf_counter() - started


async def _call(client: AsyncScorerClient, request: pb.ScoreRequest) -> Call:
    sent = time.perf_counter()
    try:
        answer = await client.score_request(request, 30.0)
    except ScorerError:
        return Call(time.perf_counter() - sent, None)
    return Call(time.perf_counter() - sent, answer.timings)


def _row(
    size: str, shape: Shape, prefixes: str, concurrency: int, offered: float, calls: Sequence[Call], seconds: float
) -> Row:
    answered = [call for call in calls if call.timings is not None]
    times = np.array([call.seconds for call in answered] or [np.nan])
    floor = SIZES[size].floor(shape, shape[0] if prefixes == "repeated" else 0)
    items = len(answered) * shape[2] / seconds
    stage = {name: _median([getattr(call.timings, f"{name}_seconds") for call in answered]) for name in STAGES}
    return Row(
        size=size,
        shape=shape,
        prefixes=prefixes,
        concurrency=concurrency,
        offered=offered,
        calls=len(calls),
        refused=len(calls) - len(answered),
        p50_ms=1e3 * float(np.median(times)),
        p99_ms=1e3 * float(np.percentile(times, 99)),
        tokenize_ms=stage["tokenize"],
        queue_ms=stage["queue"],
        plan_ms=stage["plan"],
        forward_ms=stage["forward"],
        total_ms=stage["total"],
        items_per_s=items,
        floor_ms=1e3 * floor,
        ratio=items * floor / shape[2],
    )


def _median(seconds: Sequence[float]) -> float:
    """In milliseconds."""
    return 1e3 * float(np.median(seconds)) if seconds else math.nan


def _line(row: Row) -> str:
    how = f"c {row.concurrency:<4}" if row.concurrency else f"open {row.offered:.0f}/s"
    met = "" if row.concurrency else f" p99 {'within' if row.p99_ms <= 1e3 * SLO else 'beyond'} {1e3 * SLO:.0f} ms"
    return (
        f"P{row.shape[0]:<5} S{row.shape[1]:<4} M{row.shape[2]:<4} {row.prefixes:<9} {how:<11} p50 {row.p50_ms:7.2f} "
        f"p99 {row.p99_ms:7.2f} ms, of it tokenize {row.tokenize_ms:.2f}, queue "
        f"{row.queue_ms:.2f}, plan {row.plan_ms:.2f}, forward {row.forward_ms:.2f} (floor {row.floor_ms:.2f}); "
        f"{row.items_per_s:8.0f} items/s ({row.ratio:4.0%}), {row.refused} of {row.calls} refused{met}"
    )
