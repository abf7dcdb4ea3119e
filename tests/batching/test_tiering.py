"""Fetch or recompute: by what was measured, in virtual time."""

import asyncio

import numpy as np
import pytest

from batching.page_pool import PagePool
from batching.prefix_cache import PrefixCache
from batching.tiering import Found, Rates, ReadAhead
from loadtest.virtual_time import run

PAGE = 16
SIZE = 1 << 20  # bytes of a block


class Device:
    """seconds a token"""

    margin, known = 1.0, True

    def __init__(self, seconds):
        self.seconds = seconds

    def share(self, work, pass_tokens):
        return work.tokens * self.seconds

    def learn(self, work, seconds):
        pass


class FakeTiers:
    """Has everything, and takes latency + bytes / rate for it, give or take."""

    def __init__(self, latency, rate, noise=0.0):
        self.latency, self.rate, self.noise = latency, rate, noise
        self.rng = np.random.default_rng(0)
        self.filled = []

    def found(self, keys):
        return Found("tier", len(keys), len(keys) * SIZE) if keys else None

    async def read(self, found, keys):
        await asyncio.sleep(self.takes(len(keys)) * (1 + self.noise * self.rng.uniform(-1, 1)))
        return [b"content"] * len(keys)

    def takes(self, blocks):
        return self.latency + blocks * SIZE / self.rate

    async def fill(self, pages, contents):
        self.filled += pages.tolist()
        return 0.0

    async def store(self, keys, pages):
        raise AssertionError("nothing is stored here")

    def close(self):
        pass


def made(tiers, seconds, first=(1e-3, 1e9), pages=4096):
    cache = PrefixCache(PagePool(pages), PAGE)
    clock = asyncio.get_running_loop().time
    return cache, ReadAhead(cache, tiers, Rates({"tier": first}), Device(seconds), 16_384, clock)


def prefix(cache, n, tokens):
    return cache.chain(b"", np.arange(n * 100_000, n * 100_000 + tokens, dtype=np.int32))


@pytest.mark.parametrize("latency", [1e-5, 1e-3, 5e-2])
@pytest.mark.parametrize("rate", [1e8, 1e9, 1e10])
@pytest.mark.parametrize("seconds", [1e-6, 1e-5, 1e-4, 1e-3])
def test_once_measured_the_choice_costs_at_most_a_tenth_more_than_the_better(latency, rate, seconds):
    """Over prefixes of all lengths, on tiers and devices of all speeds, nearly none of which is as first believed."""

    async def scenario():
        tiers = FakeTiers(latency, rate, noise=0.1)
        cache, ahead = made(tiers, seconds)
        for tokens in (64, 512, 4096, 256, 2048, 128, 1024) * 3:
            blocks = tokens // PAGE
            ahead._rates.learn("tier", blocks * SIZE, tiers.takes(blocks) * (1 + 0.1 * tiers.rng.uniform(-1, 1)))
        spent = best = 0.0
        for n, tokens in enumerate((32, 64, 100, 512, 900, 2048, 5000)):
            asked = prefix(cache, n, tokens)
            blocks, again = len(asked.keys), tokens * seconds
            spent += tiers.takes(blocks) if ahead.choose(asked) is not None else again
            best += min(tiers.takes(blocks), again)
        assert spent <= 1.1 * best

    run(scenario())


def test_a_tier_that_turns_slow_is_given_up_in_time_and_left_alone():
    async def scenario():
        loop = asyncio.get_running_loop()
        tiers = FakeTiers(1e-3, 1e10)
        cache, ahead = made(tiers, 1e-4)
        asked = prefix(cache, 0, 1600)
        await ahead.bring(asked)
        assert cache.hit(asked) == 1600
        assert ahead.counts.chosen == {"fetch": 1, "recompute": 0, "given_up": 0}
        tiers.latency = 60.0
        began = loop.time()
        tried = 0
        for n in range(1, 12):
            if (task := ahead.bring(prefix(cache, n, 1600))) is not None:
                await task
                tried += 1
        again = 0.16
        assert loop.time() - began <= tried * 1.05 * again, "no longer than computing it again, each time"
        assert tried <= 8, "and soon nobody asks it any more"
        assert ahead.counts.chosen["given_up"] == tried
        assert ahead.counts.regret_seconds == pytest.approx(loop.time() - began)

    run(scenario())


def test_what_is_fetched_is_in_the_index_and_held_only_while_it_is_filled():
    async def scenario():
        tiers = FakeTiers(1e-3, 1e10)
        cache, ahead = made(tiers, 1e-3, pages=10)
        begun = prefix(cache, 0, 40)
        task = ahead.bring(begun)
        assert ahead.bring(begun) is task, "once for all who wait"
        await task
        lease = cache.acquire(begun, 0.0)
        assert lease.hit == lease.written == 40
        assert sorted(tiers.filled) == sorted(lease.pages.tolist())
        cache.release(lease)
        long = prefix(cache, 1, 400)
        await ahead.bring(long)
        assert 0 < cache.hit(long) <= 160, "as much as there are pages"
        assert not cache.filling
        assert all(block.users == 0 for block in cache._blocks.values())

    run(scenario())


def test_an_error_in_a_tier_is_nobodys_error():
    async def scenario():
        tiers = FakeTiers(1e-3, 1e10)

        async def broken(found, keys):
            raise RuntimeError("bug")

        tiers.read = broken
        cache, ahead = made(tiers, 1e-3)
        asked = prefix(cache, 0, 100)
        await ahead.bring(asked)
        assert cache.hit(asked) == 0
        assert ahead.counts.chosen["given_up"] == 1

    run(scenario())
