"""Evicted prefixes in host memory, in a file and on a real Redis: found again, and whatever is wrong never used."""

import asyncio
import errno
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from attention.factory import make
from attention.kv_pages import KvPages
from attention.plans import Strategy
from batching.batcher import Batcher, BatcherLimits
from batching.page_pool import PagePool
from batching.prefix_cache import PrefixCache
from batching.select import Threshold
from scorer.config import Config
from scorer.engine import Engine
from scorer.errors import ConfigError
from scorer.kv_codec import CODECS
from scorer.kv_entry import BadEntry, content_of, entry, namespace_of
from scorer.kv_setup import fingerprint
from scorer.kv_stores import ALIGNMENT, FileStore, HostStore, RemoteStore
from scorer.kv_tiers import FAULTS, KvTiers
from tests.models import tiny
from tests.redis_server import needs_redis, redis_server
from tests.scorer.test_cache_neutral import asked, assert_alone, ids, log_odds

NAMESPACE = namespace_of("model", "revision")
PAGE = 16
PAGES = 8


def key(n):
    return n.to_bytes(16, "big")


# --- entries


def test_an_entry_is_read_back_by_its_own_name_only():
    data = entry(NAMESPACE, key(1), b"content")
    assert content_of(data, NAMESPACE, key(1)) == b"content"
    for namespace, name in ((namespace_of("other"), key(1)), (NAMESPACE, key(2))):
        with pytest.raises(BadEntry, match="foreign"):
            content_of(data, namespace, name)


@pytest.mark.parametrize("at", range(0, 120, 3))
def test_any_flipped_bit_is_detected(at):
    data = bytearray(entry(NAMESPACE, key(1), b"c" * 60))
    data[at % len(data)] ^= 4
    with pytest.raises(BadEntry):
        content_of(bytes(data), NAMESPACE, key(1))


@pytest.mark.parametrize("length", [0, 10, 70, 90, 110])
def test_any_cut_is_detected(length):
    data = entry(NAMESPACE, key(1), b"c" * 60)
    assert length < len(data)
    with pytest.raises(BadEntry):
        content_of(data[:length], NAMESPACE, key(1))


# --- stores


def test_host_memory_keeps_its_limit_and_what_was_used_last():
    store = HostStore(300)
    for n in range(3):
        store.put(key(n), b"x" * 100)
    assert store.get(key(0)) == b"x" * 100
    store.put(key(3), b"y" * 100)
    assert [store.has(key(n)) for n in range(4)] == [True, False, True, True]
    store.put(key(4), b"z" * 301)
    assert not store.has(key(4)), "larger than all of it"


def file_store(path, slots=4, namespace=NAMESPACE, content=5000):
    return FileStore(path, slots * 2 * ALIGNMENT, namespace, content)


def block(n, size=5000):
    return bytes([n]) * size


def test_the_file_keeps_blocks_across_restarts_within_its_size(tmp_path):
    path = tmp_path / "deep" / "kv"
    store = file_store(path)
    assert store.slots == 4
    for n in range(6):
        store.put(key(n), block(n))
    store.close()
    assert path.stat().st_size <= 4 * 2 * ALIGNMENT
    again = file_store(path)
    assert [again.get(key(n)) for n in range(6)] == [None, None, *[block(n) for n in range(2, 6)]]
    again.put(key(9), block(9))
    assert again.get(key(9)) == block(9)
    again.close()


def test_another_process_may_not_have_the_file_at_once(tmp_path):
    store = file_store(tmp_path / "kv")
    with pytest.raises(ConfigError, match="another process"):
        file_store(tmp_path / "kv")
    store.close()
    file_store(tmp_path / "kv").close()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "header"])
def test_a_torn_entry_is_detected_once_and_then_gone(tmp_path, damage):
    path = tmp_path / "kv"
    store = file_store(path)
    store.put(key(1), block(1))
    store.put(key(2), block(2))
    store.close()
    if damage == "truncated":
        os.truncate(path, 2 * ALIGNMENT + 3000)
    else:
        with path.open("r+b") as opened:
            opened.seek(2 * ALIGNMENT + (3000 if damage == "flipped" else 20))
            opened.write(b"\xff\xfe")
    again = file_store(path)
    held = [n for n in (1, 2) if again.has(key(n))]
    bad = 0
    for n in held:
        try:
            assert again.get(key(n)) == block(n)
        except BadEntry:
            bad += 1
            assert not again.has(key(n))
    assert bad + (2 - len(held)) == 1, "one of the two is damaged, and only one"
    again.put(key(2), block(2))
    assert again.get(key(2)) == block(2)
    again.close()


def test_another_models_file_has_nothing_to_say(tmp_path):
    store = file_store(tmp_path / "kv")
    store.put(key(1), block(1))
    store.close()
    other = file_store(tmp_path / "kv", namespace=namespace_of("other model"))
    assert not other.has(key(1))
    other.put(key(1), block(7))
    assert other.get(key(1)) == block(7)
    other.close()


def test_a_full_disk_is_an_error_and_loses_no_slot(tmp_path, monkeypatch):
    store = file_store(tmp_path / "kv")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        for n in range(10):
            with pytest.raises(OSError, match="No space"):
                store.put(key(n), block(n))
    for n in range(4):
        store.put(key(n), block(n))
    assert all(store.get(key(n)) == block(n) for n in range(4))
    store.close()


@needs_redis
def test_a_real_redis_keeps_blocks_for_other_replicas_and_may_die(tmp_path):
    with redis_server(tmp_path) as server:
        one, other = RemoteStore(server.url, NAMESPACE), RemoteStore(server.url, NAMESPACE)
        one.put(key(1), block(1))
        assert other.get(key(1)) == block(1)
        assert other.get(key(2)) is None
        assert RemoteStore(server.url, namespace_of("other")).get(key(1)) is None
        one._client.set(one._name(key(3)), entry(NAMESPACE, key(3), block(3))[:-7])
        with pytest.raises(BadEntry, match="truncated"):
            other.get(key(3))
        server.kill()
        for call in (lambda: other.get(key(1)), lambda: other.put(key(4), block(4))):
            with pytest.raises(OSError, match="remote store"):
                call()
        server.start()
        assert other.get(key(1)) is None, "it came back empty"
        one.put(key(1), block(1))
        assert other.get(key(1)) == block(1)
        one.close()
        other.close()


def test_an_address_that_is_none_stops_the_start():
    with pytest.raises(ConfigError, match="kv_remote"):
        RemoteStore("nonsense", NAMESPACE)


# --- codecs


def layers(dtype, pages=3):
    torch.manual_seed(0)
    return [tuple((torch.randn(pages, PAGE, heads, 16) * 3).to(dtype) for _ in "kv") for heads in (2, 2, 4)]


def shapes(of):
    return [(k.shape[1:], v.shape[1:], k.dtype) for k, v in of]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CODECS)
def test_a_codec_gives_back_what_it_was_given(name, dtype):
    codec, given = CODECS[name], layers(dtype)
    contents = codec.encode(given)
    assert [len(content) for content in contents] == [codec.size(shapes(given))] * 3
    for (k, v), (k2, v2) in zip(given, codec.decode(contents, shapes(given)), strict=True):
        for before, after in ((k, k2), (v, v2)):
            assert after.dtype == dtype
            if name == "exact":
                assert torch.equal(before, after)
            else:
                largest = before.float().abs().amax(dim=(1, 3), keepdim=True)
                assert ((before.float() - after.float()).abs() <= largest / 16).all()


def test_fp8_takes_half_of_bf16():
    given = layers(torch.bfloat16)
    assert CODECS["fp8"].size(shapes(given)) < 0.51 * CODECS["exact"].size(shapes(given))


# --- through the batcher, over a tiny real model


def made_of(stores, codec="exact", model=None):
    """(batcher, tiers, engine) whose pages hold two prefixes."""
    model = model or tiny("qwen3")
    pages = KvPages(PAGES, PAGE)
    engine = Engine(model, make("torch", pages), PAGE, PAGES)
    tiers = KvTiers(pages, CODECS[codec], stores, engine.on_thread)
    batcher = Batcher(
        engine.execute,
        BatcherLimits(4096, 1024, 1 << 20),
        Threshold(8),
        PrefixCache(PagePool(PAGES), PAGE),
        tiers=(tiers, tiers.rates()),
        salt=b"salt",
    )
    return batcher, tiers, engine


class Slow:
    """A device so slow that fetching is always worth it."""

    margin, known = 1.0, False

    def share(self, work, pass_tokens):
        return float(work.tokens)

    def learn(self, work, seconds):
        pass


def patient(batcher):
    batcher._scheduler.pass_time = batcher.ahead._pass_time = Slow()
    return batcher


async def twice(batcher, request):
    """Wanted twice, so that it is copied down."""
    for _ in range(2):
        await batcher.submit(request)
    await batcher.ahead.settle()


async def crowd(batcher, rng):
    """Everything leaves the pages, and someone else's prefix takes their place."""
    while batcher.cache._evict(0.0):
        pass
    await batcher.submit(asked(rng, ids(rng, 90), [3]))


def scenario(stores, check, codec="exact"):
    """Runs `check(batcher, tiers, request, rng)` and closes everything."""

    async def run():
        batcher, tiers, engine = made_of(stores, codec)
        patient(batcher)
        rng = np.random.default_rng(0)
        request = asked(rng, ids(rng, 70), [9, 3, 20])
        try:
            await check(batcher, tiers, request, rng)
            await batcher.drain()
            cache = batcher.cache
            assert sum(block.users for block in cache._blocks.values()) == 0
            assert cache.pool.free + len(cache) == cache.pool.pages
        finally:
            engine.close()
            tiers.close()

    asyncio.run(run())


@pytest.fixture(params=["host", "file", "remote"])
def store(request, tmp_path):
    content = CODECS["exact"].size([(torch.Size((PAGE, 2, 16)),) * 2 + (torch.float32,)] * 3)
    if request.param == "host":
        yield HostStore(1 << 24)
    elif request.param == "file":
        yield FileStore(tmp_path / "kv", 1 << 24, NAMESPACE, content)
    elif request.getfixturevalue("redis_binary"):
        with redis_server(tmp_path) as server:
            yield RemoteStore(server.url, NAMESPACE)


@pytest.fixture
def redis_binary():
    from tests.redis_server import BINARY

    if BINARY is None:
        pytest.skip("no redis-server or valkey-server")
    return BINARY


def test_what_left_the_pages_comes_back_from_a_tier_and_scores_the_same(store):
    async def check(batcher, tiers, request, rng):
        first = await batcher.submit(request)
        await twice(batcher, request)
        tiers.flush()
        await crowd(batcher, rng)
        assert batcher.cache.hit(batcher._chain(request)) == 0
        answer = await batcher.submit(request)
        assert answer.cached_prefix_tokens == 70
        assert answer.computed_tokens == 32
        assert_alone(tiny("qwen3"), request, answer)
        np.testing.assert_allclose(log_odds(answer), log_odds(first), atol=1e-4)
        assert batcher.ahead.counts.fetched_tokens == {store.name: 70}
        assert batcher.ahead.counts.chosen["fetch"] >= 1
        assert tiers.totals.moved[store.name, "up"] == tiers.totals.moved[store.name, "down"] > 0

    scenario([store], check)


@pytest.mark.parametrize("strategy", [s for s in Strategy if s is not Strategy.NAIVE])
def test_a_beginning_that_a_tier_has_serves_a_longer_prefix_under_every_strategy(strategy):
    async def check(batcher, tiers, request, rng):
        await twice(batcher, request)
        tiers.flush()
        await crowd(batcher, rng)
        longer = replace(request, prefix=np.concatenate([request.prefix, ids(rng, 10)]), strategy=strategy)
        answer = await batcher.submit(longer)
        assert_alone(tiny("qwen3"), longer, answer)
        assert answer.cached_prefix_tokens == 64

    scenario([HostStore(1 << 24)], check)


def test_what_was_wanted_once_is_not_copied_down():
    async def check(batcher, tiers, request, rng):
        await batcher.submit(request)
        await batcher.ahead.settle()
        tiers.flush()
        assert tiers.totals.moved == {}

    scenario([HostStore(1 << 24)], check)


def test_many_who_wait_for_one_prefix_fetch_it_once():
    async def check(batcher, tiers, request, rng):
        await twice(batcher, request)
        tiers.flush()
        await crowd(batcher, rng)
        requests = [replace(request, items=asked(rng, request.prefix, [n]).items) for n in range(1, 31)]
        answers = await asyncio.gather(*[batcher.submit(one) for one in requests])
        for one, answer in zip(requests, answers, strict=True):
            assert_alone(tiny("qwen3"), one, answer)
            assert answer.cached_prefix_tokens == 70
        assert batcher.ahead.counts.chosen["fetch"] == 1

    scenario([HostStore(1 << 24)], check)


class Broken(HostStore):
    """Fails, lies or takes for ever on demand."""

    mode = "well"

    def get(self, name):
        if self.mode == "raises":
            raise OSError("gone")
        if self.mode == "damaged":
            raise BadEntry("damaged")
        content = super().get(name)
        return content[:-4] if self.mode == "short" and content else content

    def put(self, name, content):
        if self.mode == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        super().put(name, content)


@pytest.mark.parametrize(("mode", "kind"), [("raises", "io"), ("damaged", "damaged"), ("short", "foreign")])
def test_whatever_is_wrong_in_a_tier_the_prefix_is_computed(mode, kind):
    store = Broken(1 << 24)

    async def check(batcher, tiers, request, rng):
        await twice(batcher, request)
        tiers.flush()
        await crowd(batcher, rng)
        store.mode = mode
        answer = await batcher.submit(request)
        assert_alone(tiny("qwen3"), request, answer)
        assert answer.cached_prefix_tokens == 0
        assert tiers.totals.faults["host", kind] >= 1

    scenario([store], check)


def test_a_store_that_fails_again_and_again_rests():
    store = Broken(1 << 24)
    store.mode = "full"

    async def check(batcher, tiers, request, rng):
        for _ in range(FAULTS):
            await twice(batcher, asked(rng, ids(rng, 70), [3]))
            tiers.flush()
        assert tiers.totals.faults["host", "io"] == FAULTS
        await twice(batcher, request)
        tiers.flush()
        assert tiers.totals.faults["host", "io"] == FAULTS, "it is left alone"

    scenario([store], check)


def test_another_model_or_revision_gets_no_hit_from_the_file(tmp_path):
    content = CODECS["exact"].size([(torch.Size((PAGE, 2, 16)),) * 2 + (torch.float32,)] * 3)

    async def once(namespace, salt, model):
        batcher, tiers, engine = made_of([FileStore(tmp_path / "kv", 1 << 24, namespace, content)], model=model)
        patient(batcher)._salt = salt
        rng = np.random.default_rng(0)
        request = asked(rng, ids(rng, 70), [9])
        await batcher.submit(asked(rng, ids(rng, 20), [3]))  # the pages take their shapes from the first pass
        try:
            answer = await batcher.submit(request)
            await twice(batcher, request)
            assert_alone(model, request, answer)
            await batcher.drain()
            return answer.cached_prefix_tokens
        finally:
            engine.close()
            tiers.close()

    same, other = tiny("qwen3"), tiny("qwen3", seed=1)
    runs = [(b"model|1", same), (b"model|1", same), (b"model|2", same), (b"other|1", other), (b"other|1", other)]
    found = [asyncio.run(once(namespace_of(salt), salt, model)) for salt, model in runs]
    assert found == [0, 70, 0, 0, 70]


def test_a_checkpoint_is_told_by_its_content_and_not_by_its_place(tmp_path):
    for name, content in (("a", b"1" * 100_000), ("b", b"1" * 100_000), ("c", b"1" * 50_000 + b"2" + b"1" * 49_999)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    a, b, c = (fingerprint(str(tmp_path / name)) for name in "abc")
    assert a == b
    assert a != c


def test_fp8_drifts_and_says_so():
    """Random weights exaggerate: README has the drift of a trained model. Less than documents differ by, and not 0."""
    drift, apart = [], []

    async def check(batcher, tiers, request, rng):
        before = log_odds(await batcher.submit(request))
        await twice(batcher, request)
        tiers.flush()
        await crowd(batcher, rng)
        answer = await batcher.submit(request)
        assert answer.cached_prefix_tokens == 70
        drift.append(np.abs(log_odds(answer) - before).max())
        apart.append(np.ptp(before))

    scenario([HostStore(1 << 24)], check, codec="fp8")
    assert 1e-4 < drift[0] < apart[0]


def test_tiers_without_a_cache_stop_the_start(tmp_path):
    from scorer.kv_setup import make_tiers

    config = Config.read({"kv_host_bytes": 1000, "cache_tokens": 0}, {})
    with pytest.raises(ConfigError, match="cache_tokens is 0"):
        make_tiers(config, tiny("qwen3"), KvPages(0, 16), None, b"")
    assert make_tiers(Config.read({}, {}), tiny("qwen3"), KvPages(0, 16), None, b"") is None
