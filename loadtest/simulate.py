"""Compares policies without a device: the real batcher, scheduler and cache, in virtual time, on a fitted device.

    python -m loadtest.simulate [--seconds S] [--plot FILE.png]

Nothing here is measured but the seconds that a refusal takes; the rest follows from the seeds, and is the same on every
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batching.batcher import Batcher, BatcherLimits, Scheduling
from batching.errors import Expired, NotAdmitted
from batching.page_pool import PagePool
from batching.prefix_cache import PrefixCache
from batching.scheduler import Order, by_due, earliest_deadline, first_come, shortest_first
from batching.select import Threshold
from batching.shares import FairShares
from loadtest.sim_device import DeviceTime, SimDevice, device_time
from loadtest.sim_result import Outcome, Result
from loadtest.traces import PROFILES, Call, Profile, calls, request_of
from loadtest.virtual_time import run

PAGE = 16
PASS_TOKENS, PASS_ITEMS = 16_384, 1024
POLICIES: dict[str, Order] = {
    "ours": by_due,
    "first come": first_come,
    "earliest deadline": earliest_deadline,
    "shortest first": shortest_first,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """deadlines: whether callers say how long they wait; without, nobody is refused but by the queue's length."""

    order: Order = by_due
    deadlines: bool = True
    cache_tokens: int = 1 << 18
    weights: tuple[tuple[str, float], ...] = ()


def simulate(trace: Sequence[Call], setting: Setting, device: DeviceTime, seed: int = 0) -> Result:
    """Runs a trace to its end."""
    return run(_simulate(trace, setting, SimDevice(device, seed)))


async def _simulate(trace: Sequence[Call], setting: Setting, device: SimDevice) -> Result:
    loop = asyncio.get_running_loop()
    batcher = Batcher(
        device,
        BatcherLimits(PASS_TOKENS, PASS_ITEMS, 1 << 30),
        Threshold(128),
        PrefixCache(PagePool(setting.cache_tokens // PAGE), PAGE),
        loop.time,
        Scheduling(shares=FairShares(dict(setting.weights)), order=setting.order),
    )
    asked = []
    for number, call in enumerate(trace):
        await asyncio.sleep(call.at - loop.time())
        asked.append(asyncio.create_task(_one(batcher, call, number, setting.deadlines)))
    outcomes = await asyncio.gather(*asked)
    end = loop.time()
    await batcher.drain()
    return Result(list(outcomes), end, device.busy, device.tokens)


async def _one(batcher: Batcher, call: Call, number: int, deadlines: bool) -> Outcome:
    clock = asyncio.get_running_loop().time
    request = request_of(call, number)
    began = time.perf_counter()
    try:
        answer = await batcher.submit(request, call.at + call.profile.seconds if deadlines else None)
    except NotAdmitted as refused:
        return Outcome(call, refused.reason, handler_seconds=time.perf_counter() - began)
    except Expired:
        return Outcome(call)
    return Outcome(call, end=clock(), cached=answer.cached_prefix_tokens)


def capacity(mix: Sequence[tuple[Profile, float]], device: DeviceTime) -> float:
    """Calls/s of this mix that keep the device busy all the time: from a trace that comes all at once."""
    trace = [Call(0.0, c.profile, c.prefix_id, c.documents) for c in calls(mix, 100, 3, seed=99)]
    result = simulate(trace, Setting(deadlines=False), device)
    return len(trace) / result.busy


MIX = ((PROFILES["short"], 0.5), (PROFILES["bulk"], 0.5))


def policies(seconds: float, device: DeviceTime, load: float = 0.8) -> dict[str, Result]:
    """Half short, half long calls without deadlines, under each policy."""
    trace = calls(MIX, load * capacity(MIX, device), seconds, seed=1)
    return {name: simulate(trace, Setting(order, deadlines=False), device) for name, order in POLICIES.items()}


def overload(seconds: float, device: DeviceTime, loads: Sequence[float] = (1.0, 2.0)) -> dict[float, Result]:
    """The same mix with its deadlines, under more and more load."""
    most = capacity(MIX, device)
    return {load: simulate(calls(MIX, load * most, seconds, seed=2), Setting(), device) for load in loads}


def flood(seconds: float, device: DeviceTime) -> Result:
    """One tenant sends three times what the device can do, another, of the same weight, what would be a third of it."""
    quiet, loud = (_tenant(PROFILES["jobs"], name) for name in ("quiet", "loud"))
    most = capacity(((PROFILES["jobs"], 1.0),), device)
    return simulate(calls(((quiet, 0.1), (loud, 0.9)), 10 / 3 * most, seconds, seed=3), Setting(), device)


def _tenant(profile: Profile, tenant: str) -> Profile:
    values = {name: getattr(profile, name) for name in Profile.__dataclass_fields__}
    return Profile(**(values | {"tenant": tenant}))


def reuse(seconds: float, device: DeviceTime, cached: Sequence[float] = (0.0, 0.25, 1.0)) -> dict[float, Result]:
    """Prefixes by Zipf, with a pool that holds this part of the distinct ones; without deadlines."""
    profile = PROFILES["titles"]
    mix = ((profile, 1.0),)
    trace = calls(mix, 0.8 * capacity(mix, device), seconds, seed=4)
    tokens = len({call.prefix_id for call in trace}) * profile.prefix
    return {part: simulate(trace, Setting(deadlines=False, cache_tokens=int(part * tokens)), device) for part in cached}


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of virtual time for each trace (default: 60)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them; needs the extra [plots]")
    args = parser.parse_args()
    from loadtest.sim_mixed import mixed
    from loadtest.simulate_report import plot, report

    device = device_time()
    made = (policies(args.seconds, device), overload(args.seconds, device, (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)))
    beams = mixed(args.seconds, device, MIX, 0.6 * capacity(MIX, device))
    print(report(*made, flood(args.seconds / 4, device), reuse(args.seconds, device), beams))
    if args.plot:
        plot(args.plot, *made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
