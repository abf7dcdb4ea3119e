"""What is kept from eviction: shared among owners, each prefix as long as it was last asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching.pins import Pins
from tests.attention.draw import examples


def keys(name, count, common=0):
    """Of a prefix whose first `common` blocks are those of the owner's other prefixes."""
    owner = name[:1]
    return [f"{owner if n < common else name}{n}".encode() for n in range(count)]


def kept(pins, names, now=0.0):
    return [pins.has(name, now) for name in names]


def test_who_is_alone_may_have_all_and_gives_up_what_exceeds_a_part_when_another_comes():
    pins = Pins(8)
    assert pins.pin(b"greedy", keys("g", 10), 3600.0, 0.0) == 8
    assert pins.pin(b"other", keys("o", 3), 30.0, 1.0) == 3
    assert kept(pins, keys("g", 8)) == [True] * 5 + [False] * 3, "the end goes before the beginning"
    assert pins.pin(b"other", keys("p", 3), 30.0, 1.0) == 1, "and has its part, not more"
    assert kept(pins, keys("g", 8)) == [True] * 4 + [False] * 4
    assert pins.pin(b"greedy", keys("h", 1), 3600.0, 2.0) == 0
    assert pins.pin(b"third", keys("t", 4), 30.0, 2.0) == 2
    assert sum(kept(pins, keys("g", 8))) + sum(kept(pins, keys("o", 3) + keys("p", 1))) == 6


def test_what_would_end_first_is_given_up_first():
    pins = Pins(6)
    pins.pin(b"a", keys("a1", 3), 100.0, 0.0)
    pins.pin(b"a", keys("a2", 3), 50.0, 0.0)
    pins.pin(b"b", keys("b1", 2), 10.0, 0.0)
    assert kept(pins, keys("a1", 3) + keys("a2", 3)) == [True] * 4 + [False] * 2


def pinned(most, **blocks):
    """Owners, each with so many blocks, in this order."""
    pins = Pins(most)
    for owner, count in blocks.items():
        assert pins.pin(owner.encode(), keys(owner, count), 100.0, 0.0) == count
    return pins


def shares(pins, **blocks):
    return [sum(kept(pins, keys(owner, count))) for owner, count in blocks.items()]


def test_nobody_gives_up_what_there_is_room_for():
    pins = pinned(8, a=5, b=3)
    assert shares(pins, a=5, b=3) == [5, 3]


def test_who_has_its_part_takes_nothing_from_who_has_more():
    pins = pinned(8, a=8, b=2, c=1)
    assert pins.pin(b"b", keys("bb", 2), 100.0, 0.0) == 0
    assert shares(pins, a=8, b=2, c=1) == [5, 2, 1]


@pytest.mark.parametrize("blocks", [{"a": 4, "z": 5}, {"a": 5, "z": 4}])
def test_who_has_most_gives_first(blocks):
    pins = pinned(9, **blocks)
    assert pins.pin(b"m", keys("m", 1), 100.0, 0.0) == 1
    assert shares(pins, **blocks) == [4, 4]


def test_nobody_gives_of_its_part():
    pins = pinned(9, a=4, z=5)
    assert pins.pin(b"m", keys("m", 9), 100.0, 0.0) == 3
    assert shares(pins, a=4, z=5) == [3, 3]


@pytest.mark.parametrize(("again", "until"), [(1.0, 1.0), (20.0, 20.0)])
def test_a_prefix_is_kept_for_as_long_as_was_said_last(again, until):
    pins = Pins(8)
    pins.pin(b"a", keys("a", 3), 10.0, 0.0)
    assert pins.pin(b"a", keys("a", 3), again, 0.0) == 3
    assert kept(pins, keys("a", 3), until - 0.5) == [True] * 3
    assert kept(pins, keys("a", 3), until) == [False] * 3


def test_what_prefixes_have_in_common_stays_until_the_last_promise_ends():
    pins = Pins(8)
    long, short = keys("a1", 4, common=2), keys("a2", 3, common=2)
    pins.pin(b"a", long, 10.0, 0.0)
    pins.pin(b"a", short, 1.0, 0.0)
    assert kept(pins, [*long, short[2]], 2.0) == [True] * 4 + [False]
    pins.pin(b"a", long, 3.0, 2.0)
    assert kept(pins, long, 3.0) == [False] * 4


def test_where_there_is_no_room_nothing_is_kept():
    assert Pins(0).pin(b"a", keys("a", 3), 10.0, 0.0) == 0
    assert Pins(4).pin(b"a", [], 10.0, 0.0) == 0


def test_what_left_the_index_is_no_longer_counted():
    pins = Pins(4)
    pins.pin(b"a", keys("a", 4), 10.0, 0.0)
    for key in reversed(keys("a", 4)[1:]):
        pins.drop(key)
    assert kept(pins, keys("a", 4)) == [True, False, False, False]
    assert pins.pin(b"a", keys("b", 4), 10.0, 0.0) == 3
    pins.clear()
    assert pins.pin(b"a", keys("b", 4), 10.0, 0.0) == 4


def test_what_is_remembered_stays_small_however_often_a_prefix_is_renewed():
    pins = Pins(4)
    for n in range(5000):
        pins.pin(b"a", keys("a", 4), 3600.0 + n, float(n) / 10)
        pins.pin(b"b", keys(f"b{n}", 0), 3600.0, float(n) / 10)
        pins.pin(b"a", keys(f"a{n}", 3), 3600.0, float(n) / 10)
    assert len(pins._ends) <= 64 + 4 * len(pins._promises)
    assert len(pins._promises) == 1


def test_what_was_taken_for_others_is_forgotten():
    pins = Pins(6)
    for n in range(3):
        pins.pin(b"a", keys(f"a{n}", 2), 3600.0 + n, 0.0)
    pins.pin(b"b", keys("b", 3), 3600.0, 0.0)
    assert len(pins._promises) == 3, "one of a's has nothing left"
    for key in reversed(keys("b", 3)):
        pins.drop(key)
    assert len(pins._promises) == 2


wishes = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 9), st.integers(1, 9), st.integers(0, 2)),
    max_size=40,
)


@settings(examples(150))
@given(wishes, st.integers(0, 12))
def test_an_owner_keeps_its_part_whoever_else_comes(asked, most):
    """Random owners, prefixes, times: no more than `most` is kept, and each has its part if it asks for so much."""
    pins, now = Pins(most), 0.0
    for owner, prefix, count, seconds, later in asked:
        now += later
        names = keys(f"{owner}{prefix}", count, common=2)
        got = pins.pin(owner.encode(), names, now + seconds, now)
        owners = {name for name, blocks in pins._kept.items() if blocks} | {owner.encode()}
        part = most // len(owners)
        assert kept(pins, names[:got], now) == [True] * got
        assert got == count or pins._kept[owner.encode()] >= part
        assert len(pins._names) == sum(pins._kept.values()) <= most
        assert all(blocks >= 0 for blocks in pins._kept.values())
