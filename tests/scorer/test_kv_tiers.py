"""Evicted prefixes in host memory, in a file and on a real Redis: found again, and whatever is wrong never used."""

import asyncio
import errno
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

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
from scorer.kv_copies import PORTION, PageCopies
from scorer.kv_entry import BadEntry, content_of, entry, namespace_of, view_of
from scorer.kv_file import ALIGNMENT, FileStore
from scorer.kv_remote import RemoteStore
from scorer.kv_stores import HostStore
from scorer.kv_tiers import FAULTS, KvTiers
from tests.batching.fake import blocks_in_use
from tests.models import tiny
from tests.redis_server import needs_redis, redis_server
from tests.scorer.test_cache_neutral import asked, assert_alone, ids, log_odds
from tests.tiny import tiny_model_dir

NAMESPACE = namespace_of("model", "revision")
PAGE = 16
PAGES = 8
CONTENT = (
    2 * 3 * PAGE * 2 * 16 * 4
)  # bytes of a page of the tiny model: K and V, layers, tokens, heads, head_dim, float32


def key(n):
    return n.to_bytes(16, "big")


# --- entries


def test_an_entry_is_read_back_by_its_own_name_only():
    data = entry(NAMESPACE, key(1), b"content")
    assert content_of(data, NAMESPACE, key(1)) == (b"content", 0)
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


def block(n, size=5000):
    return torch.full((size,), n, dtype=torch.uint8)


def has(store, n, size=5000):
    """Whether the store gives block n back as it was."""
    content = store.get(key(n))
    return content is not None and torch.equal(content, block(n, size))


def test_host_memory_keeps_its_limit_and_what_was_used_last():
    store = HostStore(399, 100)
    for n in range(3):
        store.put(key(n), block(n, 100))
    assert has(store, 0, 100)
    store.put(key(3), block(3, 100))
    assert [store.has(key(n)) for n in range(4)] == [True, False, True, True]
    assert all(has(store, n, 100) for n in (0, 2, 3))


def test_what_is_being_read_in_host_memory_stays_as_it_is():
    store = HostStore(200, 100)
    store.put(key(0), block(0, 100))
    store.put(key(1), block(1, 100))
    reading = store.get(key(0)), store.get(key(1))
    for n in range(2, 6):
        store.put(key(n), block(n, 100))
    assert torch.equal(torch.stack(reading), torch.stack([block(0, 100), block(1, 100)]))
    assert not any(store.has(key(n)) for n in range(6)), "nobody has room while all of it is read"
    del reading
    store.put(key(6), block(6, 100))
    store.put(key(7), block(7, 100))
    assert has(store, 6, 100)
    assert has(store, 7, 100)


def test_a_block_of_another_size_is_an_error(tmp_path):
    file = file_store(tmp_path / "kv")
    for store, size in ((HostStore(200, 100), 101), (HostStore(200, 100), 99), (file, 2 * ALIGNMENT)):
        with pytest.raises(OSError, match=f"a block of {size} bytes"):
            store.put(key(1), block(1, size))
        assert not store.has(key(1))
    file.close()


def test_limits_that_hold_not_one_block_stop_the_start(tmp_path):
    with pytest.raises(ConfigError, match="kv_host_bytes 99: one block takes 100"):
        HostStore(99, 100)
    with pytest.raises(ConfigError, match="kv_file_bytes 8191: one block takes 4096, and the beginning 4096"):
        FileStore(tmp_path / "kv", 8191, NAMESPACE, 100)


def file_store(path, slots=4, namespace=NAMESPACE, content=5000):
    return FileStore(path, (1 + slots * 2) * ALIGNMENT, namespace, content)


def test_the_file_keeps_blocks_across_restarts_within_its_size(tmp_path):
    path = tmp_path / "deep" / "kv"
    store = file_store(path)
    assert store.slots == 4
    for n in range(6):
        store.put(key(n), block(n))
    store.close()
    assert path.stat().st_size <= (1 + 4 * 2) * ALIGNMENT
    again = file_store(path)
    assert [has(again, n) for n in range(6)] == [False, False, True, True, True, True]
    again.put(key(9), block(9))
    assert has(again, 9)
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
        os.truncate(path, 3 * ALIGNMENT + 3000)
    else:
        with path.open("r+b") as opened:
            opened.seek(3 * ALIGNMENT + (3000 if damage == "flipped" else 20))
            opened.write(b"\xff\xfe")
    again = file_store(path)
    held = [n for n in (1, 2) if again.has(key(n))]
    bad = 0
    for n in held:
        try:
            assert has(again, n)
        except BadEntry:
            bad += 1
            assert not again.has(key(n))
    assert bad + (2 - len(held)) == 1, "one of the two is damaged, and only one"
    again.put(key(2), block(2))
    assert has(again, 2)
    again.close()


def test_fewer_slots_than_before_cut_the_file_and_keep_what_fits(tmp_path):
    store = file_store(tmp_path / "kv")
    for n in range(4):
        store.put(key(n), block(n))
    store.close()
    fewer = file_store(tmp_path / "kv", slots=2)
    assert sum(has(fewer, n) for n in range(4)) == 2
    assert (tmp_path / "kv").stat().st_size == 5 * ALIGNMENT
    fewer.close()


@pytest.mark.parametrize(
    "content",
    [b"x", b"notes of a day\n" * 2000, bytes(ALIGNMENT) + b"x", bytes(1 << 20), entry(NAMESPACE, key(1), bytes(5000))],
    ids=["a byte", "text", "zeros first", "zeros", "entries without the mark"],
)
def test_a_file_that_is_not_ours_stops_the_start_and_stays_as_it_is(tmp_path, content):
    path = tmp_path / "thesis"
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"thesis: it exists and holds something other .* name another file, or"):
            file_store(path)
        assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"", bytes(100), bytes(ALIGNMENT)])
def test_what_a_crash_leaves_before_the_file_is_marked_is_taken(tmp_path, content):
    (tmp_path / "kv").write_bytes(content)
    store = file_store(tmp_path / "kv")
    store.put(key(1), block(1))
    store.close()
    again = file_store(tmp_path / "kv")
    assert has(again, 1)
    again.close()


def test_a_place_where_no_file_can_be_stops_the_start(tmp_path):
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    places = {
        tmp_path: "Is a directory",
        tmp_path / "file" / "kv": "exists|Not a directory",
        tmp_path / "pipe": "regular",
    }
    places |= {"/proc/kv": "No such file|denied", "/dev/full": "not a regular file", tmp_path / ("k" * 300): "too long"}
    for place, why in places.items():
        with pytest.raises(ConfigError, match=rf"kv_file {place}: .*({why})"):
            file_store(Path(place))


def test_the_command_says_what_is_wrong_with_the_file(tmp_path):
    """As a user meets it: a line with the path, and no traceback."""
    tiny_model_dir(tmp_path / "model")
    (tmp_path / "thesis").write_text("chapter one")
    settings = ["--model", tmp_path / "model", "--profile", "instruct", "--port", "0", "--metrics-port", "-1"]
    for place in (tmp_path / "thesis", tmp_path):
        told = subprocess.run(
            [sys.executable, "-m", "scorer", "serve", *map(str, settings), "--kv-file", str(place)],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert told.returncode == 1, told.stderr
        assert f"cannot start: kv_file {place}: " in told.stderr
        assert "Traceback" not in told.stderr
    assert (tmp_path / "thesis").read_text() == "chapter one"


def test_another_models_file_has_nothing_to_say(tmp_path):
    store = file_store(tmp_path / "kv")
    store.put(key(1), block(1))
    store.close()
    other = file_store(tmp_path / "kv", namespace=namespace_of("other model"))
    assert not other.has(key(1))
    other.put(key(1), block(7))
    assert torch.equal(other.get(key(1)), block(7))
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
    assert all(has(store, n) for n in range(4))
    store.close()


def remote(url, namespace=NAMESPACE, compress=False):
    return RemoteStore(url, namespace, 5000, compress)


@needs_redis
def test_a_real_redis_keeps_blocks_for_other_replicas_and_may_die(tmp_path):
    with redis_server(tmp_path) as server:
        one, other = remote(server.url), remote(server.url)
        one.put(key(1), block(1))
        assert has(other, 1)
        assert other.get(key(2)) is None
        assert remote(server.url, namespace_of("other")).get(key(1)) is None
        one._client.set(one._name(key(3)), entry(NAMESPACE, key(3), view_of(block(3)))[:-7])
        with pytest.raises(BadEntry, match="truncated"):
            other.get(key(3))
        server.kill()
        for call in (lambda: other.get(key(1)), lambda: other.put(key(4), block(4))):
            with pytest.raises(OSError, match="remote store"):
                call()
        server.start()
        assert other.get(key(1)) is None, "it came back empty"
        one.put(key(1), block(1))
        assert has(other, 1)
        one.close()
        other.close()


@needs_redis
def test_compressed_blocks_are_smaller_and_read_by_whoever_compresses_or_not(tmp_path):
    with redis_server(tmp_path) as server:
        plain, small = remote(server.url), remote(server.url, compress=True)
        small.put(key(1), block(1))
        assert small._client.strlen(small._name(key(1))) < 300
        assert has(plain, 1)
        plain.put(key(2), block(2))
        assert has(small, 2)
        plain.close()
        small.close()


@needs_redis
@pytest.mark.parametrize("content", ["no zstd", "more than a block"])
def test_what_unpacks_to_no_block_is_damaged(content, tmp_path):
    import zstandard

    packed = (
        b"nonsense"
        if content == "no zstd"
        else zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    )
    with redis_server(tmp_path) as server:
        store = remote(server.url)
        store._client.set(store._name(key(1)), entry(NAMESPACE, key(1), packed, 1))
        with pytest.raises(BadEntry, match="damaged"):
            store.get(key(1))
        store.close()


def test_an_address_that_is_none_stops_the_start():
    with pytest.raises(ConfigError, match="kv_remote"):
        remote("nonsense")


# --- codecs and copies


def values(dtype, heads=2, pages=3):
    torch.manual_seed(0)
    return (torch.randn(pages, PAGE, heads, 16) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CODECS)
def test_a_codec_gives_back_what_it_was_given(name, dtype):
    codec, before = CODECS[name], values(dtype)
    rows = codec.encode(before)
    assert rows.shape == (3, codec.size(before.shape[1:], dtype))
    after = codec.decode(rows, before.shape[1:], dtype)
    assert after.dtype == dtype
    if name == "exact":
        assert torch.equal(before, after)
    else:
        largest = before.float().abs().amax(dim=(1, 3), keepdim=True)
        assert ((before.float() - after.float()).abs() <= largest / 16).all()


def test_fp8_takes_half_of_bf16():
    shape = torch.Size((PAGE, 2, 16))
    assert CODECS["fp8"].size(shape, torch.bfloat16) < 0.51 * CODECS["exact"].size(shape, torch.bfloat16)


def pages_of(layers, count, dtype=torch.float32):
    """Kept pages of layers that differ in heads, with random content."""
    made = KvPages(count, PAGE)
    for number, heads in enumerate(layers):
        k, v = made.layer(number, torch.empty(0, heads, 16, dtype=dtype), torch.empty(0, heads, 8, dtype=dtype))
        k.copy_(torch.randn(k.shape))
        v.copy_(torch.randn(v.shape))
    return made


def copies_of(pages, layers, dtype=torch.float32, codec="exact"):
    shapes = [(torch.Size((PAGE, heads, 16)), torch.Size((PAGE, heads, 8))) for heads in layers]
    return PageCopies(pages, CODECS[codec], shapes, dtype)


@pytest.mark.parametrize("count", [1, PORTION, PORTION + 3])
def test_pages_are_copied_out_and_into_others_and_no_other_page_changes(count):
    layers = (2, 1, 4)
    ours, theirs = pages_of(layers, 2 * count + 2), pages_of(layers, 2 * count + 2)
    rng = np.random.default_rng(0)
    out, into = (rng.permutation(2 * count + 2)[:count].astype(np.int32) for _ in range(2))
    rows = copies_of(ours, layers).out(out)
    assert [len(row) for row in rows] == [copies_of(ours, layers).row_bytes] * count
    before = [tensor.clone() for tensor in theirs.tensors()]
    copies_of(theirs, layers).into(into, rows)
    for source, target, old in zip(ours.tensors(), theirs.tensors(), before, strict=True):
        assert torch.equal(target[into], source[out])
        others = np.setdiff1d(np.arange(2 * count + 2), into)
        assert torch.equal(target[others], old[others])


def test_what_a_tier_has_can_be_filled_in_before_any_pass_has_run():
    """Layers that differ in their heads, each with the pages that passes will write to."""
    written, fresh = pages_of((2, 1), 2), KvPages(2, PAGE)
    rows = copies_of(written, (2, 1)).out(np.array([1, 0], np.int32))
    copies_of(fresh, (2, 1)).into(np.array([0, 1], np.int32), rows)
    for ours, theirs in zip(fresh.tensors(), written.tensors(), strict=True):
        assert torch.equal(ours, theirs.flip(0))


# --- through the batcher, over a tiny real model


def made_of(stores, codec="exact", model=None):
    """(batcher, tiers, engine) whose pages hold two prefixes."""
    model = model or tiny("qwen3")
    pages = KvPages(PAGES, PAGE)
    engine = Engine(model, make("torch", pages), PAGE, PAGES)
    shape = torch.Size((PAGE, 2, 16))
    tiers = KvTiers(PageCopies(pages, CODECS[codec], [(shape, shape)] * 3, torch.float32), stores)
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
    batcher.cache.clear()
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
            assert not blocks_in_use(cache)
            assert cache.pool.free + len(cache) == cache.pool.pages
        finally:
            engine.close()
            tiers.close()

    asyncio.run(run())


@pytest.fixture(params=["host", "file", "remote"])
def store(request, tmp_path):
    if request.param == "host":
        yield HostStore(1 << 24, CONTENT)
    elif request.param == "file":
        yield FileStore(tmp_path / "kv", 1 << 24, NAMESPACE, CONTENT)
    elif request.getfixturevalue("redis_binary"):
        with redis_server(tmp_path) as server:
            yield RemoteStore(server.url, NAMESPACE, CONTENT)


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
        assert batcher.cache.hit(batcher.chain(request)) == 0
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

    scenario([HostStore(1 << 24, CONTENT)], check)


def test_what_was_wanted_once_is_not_copied_down():
    async def check(batcher, tiers, request, rng):
        await batcher.submit(request)
        await batcher.ahead.settle()
        tiers.flush()
        assert tiers.totals.moved == {}

    scenario([HostStore(1 << 24, CONTENT)], check)


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

    scenario([HostStore(1 << 24, CONTENT)], check)


class Broken(HostStore):
    """Fails, lies or takes for ever on demand."""

    mode = "well"

    def get(self, name):
        if self.mode == "raises":
            raise OSError("gone")
        if self.mode == "damaged":
            raise BadEntry("damaged")
        content = super().get(name)
        return content if content is None or self.mode != "short" else content[:-4]

    def put(self, name, content):
        if self.mode == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        super().put(name, content)


@pytest.mark.parametrize(("mode", "kind"), [("raises", "io"), ("damaged", "damaged"), ("short", "foreign")])
def test_whatever_is_wrong_in_a_tier_the_prefix_is_computed(mode, kind):
    store = Broken(1 << 24, CONTENT)

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
    store = Broken(1 << 24, CONTENT)
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


def test_what_a_slow_store_cannot_take_is_left_out_and_tried_again_later(monkeypatch):
    monkeypatch.setattr("scorer.kv_tiers.MOST_BEHIND", 3 * CONTENT)
    store = Broken(1 << 24, CONTENT)
    gate = threading.Event()
    store.put = lambda *_: gate.wait(10) or None

    async def check(batcher, tiers, request, rng):
        await twice(batcher, request)  # five blocks, whatever the limit: nothing else waits
        other = asked(rng, ids(rng, 40), [9])
        await twice(batcher, other)
        assert tiers._behind == 5 * CONTENT, "the other one's three blocks do not wait behind them"
        gate.set()
        tiers.flush()
        assert tiers._behind == 0
        del store.put
        await batcher.submit(other)
        await batcher.ahead.settle()
        tiers.flush()
        assert tiers.totals.moved["host", "down"] == 8 * CONTENT

    scenario([store], check)


def test_another_model_or_revision_gets_no_hit_from_the_file(tmp_path):
    async def once(namespace, salt, model):
        batcher, tiers, engine = made_of([FileStore(tmp_path / "kv", 1 << 24, namespace, CONTENT)], model=model)
        patient(batcher)._salt = salt
        rng = np.random.default_rng(0)
        request = asked(rng, ids(rng, 70), [9])
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

    scenario([HostStore(1 << 24, CONTENT // 4 + 6 * 2 * 4)], check, codec="fp8")  # and six times two scales
    assert 1e-4 < drift[0] < apart[0]


def test_tiers_without_a_cache_stop_the_start(tmp_path):
    from scorer.kv_setup import make_tiers

    config = Config.read({"kv_host_bytes": 1000, "cache_tokens": 0}, {})
    with pytest.raises(ConfigError, match="cache_tokens is 0"):
        make_tiers(config, tiny("qwen3"), KvPages(0, 16), "", "")
