"""Blocks kept as runs: the same cache as block by block."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching.eviction import HALF_LIFE, EvictionOrder
from batching.ghosts import Ghost, Ghosts
from batching.page_pool import PagePool
from batching.prefix_cache import GHOSTS, PrefixCache
from batching.runs import TOKEN_BYTES, Run, Spot, chain, equal_blocks
from tests.attention.draw import examples
from tests.batching.plain_cache import PlainCache

PAGE = 4
SIZE = PAGE * TOKEN_BYTES


def ids(*values):
    return np.array(values, np.int32)


COSTS = {"tokens": lambda before, tokens: float(tokens), "attention": lambda before, tokens: tokens * (9.0 + before)}
TEXTS = np.random.default_rng(0).integers(0, 3, (4, 40)).tolist()
# A prefix is a beginning of one of a few long texts, perhaps with an end of its own.
PREFIX = st.tuples(st.integers(0, 3), st.integers(0, 40), st.lists(st.integers(0, 2), max_size=6)).map(
    lambda drawn: (*TEXTS[drawn[0]][: drawn[1]], *drawn[2])
)


class Both:
    """The same done to the cache and to the plain one. live: leases that nobody has released: (the cache's, the plain
    one's, leading tokens that were written as it was taken)."""

    def __init__(self, pages, cost, ghosts):
        self.made, self.plain = PrefixCache(PagePool(pages), PAGE, cost), PlainCache(pages, PAGE, cost, ghosts)
        self.made._ghosts._most = ghosts * pages
        self.live = []
        self.now = 0.0

    def take(self, how, salt, prefix):
        asked = self.made.chain(salt, ids(*prefix))
        hit = self.plain.hit(salt, prefix)
        assert (self.made.hit(asked), self.made.hit_blocks(asked)) == (hit, -(-hit // PAGE))
        given = (self.now,) if how != "held" else ()
        lease, plain = getattr(self.made, how)(asked, *given), getattr(self.plain, how)(salt, prefix, *given)
        assert lease.hit == hit
        self.live.append((lease, plain, lease.written))

    def fill(self, salt, prefix):
        """Somebody fills the pages of a prefix for another."""
        self.take("registered", salt, prefix)
        filled = self.live.pop()
        self.take("acquire", salt, prefix)
        self.made.commit(filled[0])
        self.plain.commit(filled[1])
        self.made.release(filled[0])
        self.plain.release(filled[1])

    def commit(self, which):
        for lease, plain, _ in self.some(which):
            self.made.commit(lease)
            self.plain.commit(plain)

    def fail(self, which, many):
        failed = [one for n in range(many) for one in self.some(which + n)]
        self.made.withdraw([(lease, read) for lease, _, read in failed])
        self.plain.withdraw([(plain, read) for _, plain, read in failed])

    def again(self, which):
        for lease, plain, read in self.some(which):
            self.live.append((self.made.held_again(lease), self.plain.again(plain), read))

    def release(self, which):
        for one in self.some(which):
            self.live.remove(one)
            self.made.release(one[0])
            self.plain.release(one[1])

    def pin(self, which, seconds):
        for lease, plain, _ in self.some(which):
            until = self.now + seconds
            assert self.made.pin(lease, until, self.now) == self.plain.pin(plain, until, self.now)

    def store(self, which, blocks):
        for lease, plain, _ in self.some(which):
            if not lease.withdrawn:
                self.made.mark_stored(lease, blocks)
                for block in plain[:blocks]:
                    block.stored = True

    def clear(self):
        self.made.clear()
        self.plain.clear()

    def some(self, which):
        """One of the leases, if there are any."""
        return [self.live[which % len(self.live)]] if self.live else []

    def assert_alike(self):
        made, plain, counts = self.made, self.plain, self.made.counts
        assert (len(made), made.pool.free, made._ghosts.blocks) == (len(plain.blocks), plain.free, len(plain.ghosts))
        assert (counts.evicted_blocks, counts.withdrawn_blocks) == (plain.evicted, plain.withdrawn)
        assert (counts.hit_tokens, counts.missed_tokens) == (plain.hits, plain.misses)
        assert kept(made._pins, self.now) == kept(plain.pins, self.now)
        for lease, blocks, _ in self.live:
            assert (lease.blocks, lease.tokens) == (len(lease.pages), blocks[-1].end if blocks else 0)
            assert lease.written == plain.written(blocks)
            ours = [(r.indexed, r.written, r.stored, r.wishes) for r in lease.runs for _ in range(r.begin, r.end)]
            assert ours == [(block.indexed, block.written, block.stored, block.wishes) for block in blocks]


def kept(pins, now):
    """Blocks, by owner."""
    pins._expire(now)
    return +pins._kept


WHICH, SALT = st.integers(0, 99), st.sampled_from([b"a", b"b"])
CALLS = st.one_of(
    *[st.tuples(st.just(Both.take), st.just("acquire"), SALT, PREFIX)] * 4,
    st.tuples(st.just(Both.take), st.just("held"), SALT, PREFIX),
    st.tuples(st.just(Both.fill), SALT, PREFIX),
    *[st.tuples(st.just(how), WHICH) for how in (Both.commit, Both.release) for _ in range(4)],
    st.tuples(st.just(Both.again), WHICH),
    st.tuples(st.just(Both.fail), WHICH, st.integers(1, 3)),
    st.tuples(st.just(Both.pin), WHICH, st.integers(1, 30)),
    st.tuples(st.just(Both.store), WHICH, st.integers(0, 11)),
    st.tuples(st.just(Both.clear)),
)


@settings(examples(300))
@given(pages=st.integers(1, 40), cost=st.sampled_from(sorted(COSTS)), calls=st.lists(CALLS, min_size=30, max_size=80))
def test_whatever_is_done_it_is_block_for_block_what_the_plain_one_is(pages, cost, calls):
    """Passes end well or not, in any order; what left is never forgotten, as that goes by pieces."""
    both = Both(pages, COSTS[cost], ghosts=1000)
    for how, *what in calls:
        both.now += 1.0
        how(both, *what)
        both.assert_alike()
    while both.live:
        both.release(0)
    both.clear()
    both.assert_alike()
    assert both.made.pool.free == pages


@settings(examples(150))
@given(
    pages=st.integers(1, 24),
    cost=st.sampled_from(sorted(COSTS)),
    calls=st.lists(st.tuples(PREFIX, st.integers(0, 3)), max_size=80),
)
def test_it_keeps_and_remembers_block_for_block_what_the_plain_one_does(pages, cost, calls):
    """Of one tenant, whose passes all end well, and which holds each prefix a while."""
    both, stays = Both(pages, COSTS[cost], GHOSTS), []
    for prefix, stay in calls:
        stays = [left - 1 for left in stays]
        while -1 in stays:
            both.release(stays.index(-1))
            stays.remove(-1)
        both.take("acquire", b"", prefix)
        both.commit(len(stays))
        stays.append(stay)
        both.assert_alike()


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


def test_what_is_left_of_a_prefix_keeps_the_ids_of_no_more_pages_than_it_has():
    made = PrefixCache(PagePool(8), PAGE)
    for prefix in (range(32), range(12), range(32, 48)):  # it is cut in two, and then half of it goes
        lease = made.acquire(made.chain(b"", ids(*prefix)), 0.0)
        made.commit(lease)
        made.release(lease)
    left = made.held(made.chain(b"", ids(*range(32))))
    assert [len(run.pages) for run in left.runs] == [3, 1]
    lease = made.acquire(made.chain(b"", ids(*range(32))), 0.0)
    assert [(len(run.pages), run.pages.base) for run in lease.runs] == [(3, None), (1, None), (4, None)]


def test_what_continues_withdrawn_blocks_is_still_remembered():
    made = PrefixCache(PagePool(8), PAGE)
    whole, begun = made.chain(b"", ids(*range(16))), made.chain(b"", ids(*range(4)))
    for asked, well in ((whole, True), (whole, True), (begun, False), (whole, True)):
        lease = made.acquire(asked, 0.0)
        wishes = [run.wishes for run in lease.runs for _ in run.pages]
        if well:
            made.commit(lease)
        else:
            made.withdraw([(lease, 0)])
        made.release(lease)
        made.clear()
    assert wishes == [4, 3, 3, 3]
    assert made._ghosts.blocks == 4


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


@pytest.mark.parametrize("cost", COSTS)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=5),
    wishes=st.lists(st.integers(0, 4), min_size=5, max_size=40),
)
@examples(60)
def test_the_least_worth_goes_first_by_wishes_that_count_half_a_half_life_later(cost, lengths, wishes):
    """Written out for the last block of each of a few prefixes of one run, in a pool of a page: late wishes weigh."""
    order, cache = EvictionOrder(1, PAGE, COSTS[cost]), PrefixCache(PagePool(100), PAGE)
    leases = [cache.registered(cache.chain(b"", ids(n, *[7] * (length - 1))), 0.0) for n, length in enumerate(lengths)]
    weights, counted = [0.0] * len(leases), 0
    for one in [*range(len(leases)), *(wish % len(leases) for wish in wishes)]:
        order.want(leases[one])
        counted += leases[one].blocks
        weights[one] += 2.0 ** (counted / HALF_LIFE)
    worth = {}
    for lease, weight in zip(leases, weights, strict=True):
        before = (lease.blocks - 1) * PAGE
        worth[lease.last] = weight * COSTS[cost](before, lease.tokens - before)
        lease.last.users, lease.last.written = 0, True
        order.push(lease.last)
    gone = [worth[run] for run in iter(order.pop, None)]
    assert len(gone) == len(leases)
    assert gone == pytest.approx(sorted(gone))
