"""Blocks kept as runs: the same cache as block by block."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching.eviction import HALF_LIFE, EvictionOrder
from batching.ghosts import Ghost, Ghosts
from batching.page_pool import PagePool
from batching.prefix_cache import PrefixCache
from batching.runs import TOKEN_BYTES, Run, Spot, chain, equal_blocks
from tests.attention.draw import examples
from tests.batching.plain_cache import PlainCache

PAGE = 4
SIZE = PAGE * TOKEN_BYTES


def ids(*values):
    return np.array(values, np.int32)


# A prefix is a beginning of one of a few long texts, perhaps with an end of its own; and it is held a while.
CALL = st.tuples(st.integers(0, 3), st.integers(0, 40), st.lists(st.integers(0, 2), max_size=6), st.integers(0, 3))
COSTS = {"tokens": lambda before, tokens: float(tokens), "attention": lambda before, tokens: tokens * (9.0 + before)}


@settings(examples(200))
@given(pages=st.integers(1, 24), cost=st.sampled_from(sorted(COSTS)), calls=st.lists(CALL, max_size=80))
def test_it_keeps_and_remembers_block_for_block_what_the_plain_one_does(pages, cost, calls):
    made = PrefixCache(PagePool(pages), PAGE, COSTS[cost])
    plain = PlainCache(pages, PAGE, COSTS[cost])
    texts = np.random.default_rng(0).integers(0, 3, (4, 40)).tolist()
    live = []
    for text, length, end, stays in calls:
        live = [(lease, names, left - 1) for lease, names, left in live]
        for lease, names, _ in (each for each in live if each[2] < 0):
            made.release(lease)
            plain.release(names)
        live = [each for each in live if each[2] >= 0]
        prefix = (*texts[text][:length], *end)
        asked = made.chain(b"", ids(*prefix))
        assert made.hit(asked) == plain.hit(prefix)
        lease, names = made.acquire(asked, 0.0), plain.acquire(prefix)
        made.commit(lease)
        live.append((lease, names, stays))
        assert lease.tokens == (len(names[-1]) if names else 0)
        wishes = [run.wishes for run in lease.runs for _ in run.pages]
        assert wishes == [plain.blocks[name].wishes for name in names]
        assert (made.counts.evicted_blocks, len(made), made._ghosts.blocks) == (
            plain.evicted, len(plain.blocks), len(plain.ghosts),
        )  # fmt: skip


@settings(examples(200))
@given(
    ours=st.lists(st.integers(0, 1), min_size=1, max_size=14),
    before=st.integers(0, 2),
    theirs=st.lists(st.integers(0, 1), max_size=14),
    common=st.integers(0, 14),
)
def test_equal_leading_blocks_are_counted(ours, before, theirs, common):
    theirs = ours[:common] + theirs
    blocks = [[each[n : n + PAGE] for n in range(0, len(each), PAGE)] for each in (ours, theirs)]
    equal = [a == b for a, b in zip(*blocks, strict=False)]
    expected = equal.index(False) if False in equal else len(equal)
    if expected:  # who compares has found the first one
        asked = ids(*[7] * before * PAGE, *theirs).tobytes()
        assert equal_blocks(ids(*ours).tobytes(), asked, before * SIZE, SIZE) == expected


def test_names_stay_what_they_were_as_tiers_keep_k_v_under_them():
    """Of a version that finds nothing any more, the caches would have to be emptied."""
    asked = chain(b"profile\0tenant", np.arange(7, dtype=np.int32) * 1000, PAGE)
    assert [key.hex() for key in asked.keys] == ["60bf1ecc2d8803e8aa1f3dc6f396def8", "7a1a4bf63e25d023cac22259fb32b89e"]


def test_the_beginning_of_a_prefix_has_its_first_names():
    asked = chain(b"a", np.arange(11, dtype=np.int32), PAGE)
    begun = asked.beginning(2)
    assert (begun.tokens, begun.blocks, begun.keys, begun.root) == (8, 2, asked.keys[:2], asked.root)
    assert (asked.tokens, asked.blocks) == (11, 3)


def test_token_ids_of_another_width_are_refused():
    with pytest.raises(AssertionError, match="int32"):
        chain(b"a", np.arange(4), PAGE)


# --- one run becomes two


def test_a_lease_keeps_its_blocks_where_another_prefix_parts_from_it():
    made = PrefixCache(PagePool(8), PAGE)
    whole = made.acquire(made.chain(b"", ids(*range(14))), 0.0)
    pages = whole.pages.tolist()
    parted = made.acquire(made.chain(b"", ids(*range(8), 99)), 0.0)
    assert (parted.hit, parted.pages.tolist()[:2]) == (8, pages[:2])
    assert [len(run.pages) for run in whole.runs] == [2, 2]
    assert (whole.pages.tolist(), whole.tokens) == (pages, 14)
    made.commit(whole)
    assert (whole.written, parted.written) == (14, 8)
    for lease in (whole, parted):
        made.release(lease)
    assert (made.pool.free, len(made)) == (4, 4), "what nobody wrote is withdrawn"


def test_what_the_tiers_have_of_a_run_alone_counts_as_stored():
    made = PrefixCache(PagePool(8), PAGE)
    lease = made.acquire(made.chain(b"", ids(*range(16))), 0.0)
    made.commit(lease)
    made.mark_stored(lease, 3)
    assert [(run.begin, run.end, run.stored) for run in lease.runs] == [(0, 3, True), (3, 4, False)]
    made.mark_stored(lease, 4)
    assert all(run.stored for run in lease.runs)


def test_pages_that_lay_side_by_side_still_do_for_who_gets_them_next():
    made = PrefixCache(PagePool(4), PAGE)
    for n in range(5):
        lease = made.acquire(made.chain(b"", np.full(16, n, np.int32)), 0.0)
        assert lease.pages.tolist() == [0, 1, 2, 3]
        made.commit(lease)
        made.release(lease)


def test_a_run_is_worth_what_its_last_block_is():
    """A wish for a prefix is one for each of its blocks, one after the other: half-way through the long one's came the
    other's."""
    order = EvictionOrder(1, PAGE)
    long, short = (
        Run(b"", None, 0, np.zeros(n * PAGE, np.int32).tobytes(), np.zeros(n, np.int32), Spot(), level, users=0)
        for n, level in ((11, 0.0), (1, 5.5 / HALF_LIFE))
    )
    for run in (long, short):
        order.push(run)
    assert [order.pop(), order.pop(), order.pop()] == [short, long, None]


# --- what is remembered


def ghosts(most=100):
    return Ghosts(most, SIZE)


def test_pieces_that_were_wanted_alike_are_remembered_as_one_again():
    made, spots = ghosts(), [Spot() for _ in range(3)]
    made.remember(spots[0], Ghost(ids(*range(4, 10)).tobytes(), 2.0, 3, spots[2]))
    made.remember(b"salt", Ghost(ids(*range(4)).tobytes(), 2.0, 3, spots[0]))
    assert made.blocks == 3
    taken = made.take(b"salt", ids(*range(10)).tobytes())
    assert (taken.ids, taken.spot, made.blocks) == (ids(*range(10)).tobytes(), spots[2], 0)


@pytest.mark.parametrize("other", [(2.5, 3), (2.0, 4)])
def test_pieces_that_were_not_wanted_alike_stay_apart(other):
    made, spot = ghosts(), Spot()
    made.remember(spot, Ghost(ids(*range(4, 8)).tobytes(), *other, Spot()))
    made.remember(b"salt", Ghost(ids(*range(4)).tobytes(), 2.0, 3, spot))
    whole = ids(*range(8)).tobytes()
    first = made.take(b"salt", whole)
    assert (first.ids, made.blocks) == (whole[:SIZE], 1)
    rest = made.take(first.spot, whole[SIZE:])
    assert ((rest.level, rest.wishes), made.blocks) == (other, 0)


def test_what_goes_on_otherwise_leaves_the_rest_remembered():
    made = ghosts()
    made.remember(b"salt", Ghost(ids(*range(12)).tobytes(), 1.0, 2, end := Spot()))
    first = made.take(b"salt", ids(0, 1, 2, 3, 9, 9, 9, 9).tobytes())
    assert (first.ids, made.blocks) == (ids(*range(4)).tobytes(), 2)
    rest = made.take(first.spot, ids(*range(4, 12)).tobytes())
    assert (rest.ids, rest.spot, made.blocks) == (ids(*range(4, 12)).tobytes(), end, 0)
    assert made.take(b"other", ids(*range(4)).tobytes()) is None


def test_the_oldest_is_forgotten_first_and_its_end_before_its_beginning():
    made = ghosts(3)
    made.remember(b"old", Ghost(ids(*range(10)).tobytes(), 1.0, 1, Spot()))
    made.remember(b"new", Ghost(ids(*range(4)).tobytes(), 1.0, 1, Spot()))
    made.forget()
    assert made.blocks == 3
    assert made.take(b"old", ids(*range(10)).tobytes()).ids == ids(*range(8)).tobytes()
    made.remember(b"old", Ghost(ids(*range(4)).tobytes(), 1.0, 1, Spot()))
    made.remember(b"more", Ghost(ids(*range(12)).tobytes(), 1.0, 1, Spot()))
    made.forget()
    assert made.take(b"new", ids(*range(4)).tobytes()) is None
    assert made.take(b"old", ids(*range(4)).tobytes()) is None
    assert made.blocks == 3
