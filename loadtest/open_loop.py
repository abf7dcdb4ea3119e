"""`prefixrank bench load`: calls arrive when they arrive, whether or not earlier ones are answered.

A closed loop waits for answers and so never sees an overload; this client does, and finds a service's capacity.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from loadtest.asked import request_of
from loadtest.load_report import HEADER, Call, Figures, figures, line
from loadtest.workload import PROFILES, Arrival, Profile, arrivals
from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import AsyncScorerClient, ScorerError
from scorer.demo import LOOPBACK_OPTIONS, Server
from scorer.errors import ConfigError
from scorer.remote import credentials, token, wait_for

CHANNELS = 4  # connections, so that no one stream limit or socket holds calls back


@dataclass(frozen=True, slots=True)
class Plan:
    """rate: calls a second; timeout: each call's deadline in seconds."""

    profile: Profile
    rate: float
    seconds: float
    seed: int
    burst: float
    scale: float
    timeout: float
    parameters: float


def run(args: argparse.Namespace) -> int:
    """Measures each rate; 1 where a call was late, failed for another reason than load, or there was none."""
    with _target(args) as target:
        found = asyncio.run(_measure(args, target))
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text("".join(json.dumps(f.as_json()) + "\n" for f in found), encoding="utf-8")
    failed = [f for f in found if not f.calls or f.timed_out or f.codes.keys() - {"OK", "RESOURCE_EXHAUSTED"}]
    for f in failed:
        print(f"FAILED at {f.rate:g} calls/s: {f.codes or f'no call in {args.seconds:g} s'}")
    return int(bool(failed))


@contextmanager
def _target(args: argparse.Namespace) -> Iterator[str]:
    """The server asked for, or one with the embedded model."""
    if args.target is not None:
        yield args.target
        return
    server = Server()
    try:
        yield server.wait_until_listening()
    finally:
        server.stop()


async def _measure(args: argparse.Namespace, target: str) -> list[Figures]:
    profile = PROFILES[args.profile]
    print(f"{profile.name}: {profile.told}; SLO p99 {profile.slo * 1000:g} ms, {args.seconds:g} s a rate")
    print(HEADER)
    found = []
    async with _clients(args, target) as clients:
        await _warm(clients, profile, args, target)
        for rate in args.rates:
            plan = Plan(profile, rate, args.seconds, args.seed, args.burst, args.scale, args.timeout, args.parameters)
            found.append(await measure(plan, clients))
            print(line(found[-1]), flush=True)
    return found


@asynccontextmanager
async def _clients(args: argparse.Namespace, target: str) -> AsyncIterator[list[AsyncScorerClient]]:
    secure, bearer = credentials(args), token(args.token_file)
    # A channel of its own for each: equal ones would share a connection.
    options = [(*LOOPBACK_OPTIONS, ("grpc.use_local_subchannel_pool", 1)) for _ in range(CHANNELS)]
    clients = [AsyncScorerClient(target, secure, each, bearer) for each in options]
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()


async def _warm(clients: list[AsyncScorerClient], profile: Profile, args: argparse.Namespace, target: str) -> None:
    """A few calls of another seed first: connections, kernels and graphs are made once."""
    for client in clients:
        await wait_for(client, args, target)
    warm = arrivals(profile, 1.0, 3600.0, args.seed + 1, scale=args.scale)
    for client, arrival in zip(clients, warm, strict=False):
        try:
            await client.score_request(request_of(profile, arrival), max(args.timeout, 120.0))
        except ScorerError as error:
            raise ConfigError(f"{target}: the first call: {error}") from None


async def measure(plan: Plan, clients: list[AsyncScorerClient]) -> Figures:
    """One rate, from its first arrival to its last answer."""
    # Built beforehand: making text takes longer than sending it.
    planned = list(arrivals(plan.profile, plan.rate, plan.seconds, plan.seed, plan.burst, plan.scale))
    requests = [request_of(plan.profile, arrival) for arrival in planned]
    started, late = time.perf_counter(), 0.0
    tasks = []
    for number, (arrival, request) in enumerate(zip(planned, requests, strict=True)):
        await asyncio.sleep(max(0.0, started + arrival.at - time.perf_counter()))
        late = max(late, time.perf_counter() - started - arrival.at)
        tasks.append(asyncio.create_task(_call(clients[number % len(clients)], arrival, request, plan.timeout)))
    calls = await asyncio.gather(*tasks)
    seconds = max(plan.seconds, time.perf_counter() - started)
    return figures(calls, plan.rate, seconds, plan.profile.slo, late, plan.parameters)


async def _call(client: AsyncScorerClient, arrival: Arrival, request: pb.ScoreRequest, timeout: float) -> Call:
    sent = time.perf_counter()
    try:
        answer = await client.score_request(request, timeout)
    except ScorerError as error:
        return Call(arrival.at, error.code.name, time.perf_counter() - sent, len(request.documents))
    seconds = time.perf_counter() - sent
    usage, timings = answer.usage, answer.timings
    return Call(
        at=arrival.at,
        code="OK",
        seconds=seconds,
        documents=len(request.documents),
        queue_seconds=timings.queue_seconds,
        compute_seconds=timings.plan_seconds + timings.forward_seconds,
        prefix_tokens=usage.prefix_tokens,
        cached_prefix_tokens=usage.cached_prefix_tokens,
        computed_tokens=usage.computed_tokens,
        saved_tokens=usage.saved_tokens,
    )
