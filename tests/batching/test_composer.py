"""What is still to be computed for whom, and what shares a pass: over jobs and a cache, without a batcher."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.plans import Strategy
from batching.composer import Composer
from batching.job import InFlight, Job
from batching.page_pool import PagePool
from batching.pass_time import Work
from batching.prefix_cache import PrefixCache
from batching.scheduler import Ticket
from batching.select import Choice
from tests.attention.draw import examples
from tests.batching.fake import PAGE, evicted, request

AUTO = Strategy.DIRECT_RAGGED


class PerToken:
    margin, known = 1.5, True

    def share(self, work, pass_tokens):
        return work.tokens / 1000


def composer(pass_tokens=100, pass_items=99, pages=50):
    return Composer(PrefixCache(PagePool(pages), PAGE), pass_tokens, pass_items, PerToken())


def job(made, asked, deadline=None, strategy=AUTO):
    count = len(asked.items)
    chain = made.cache.chain(asked.tenant.encode(), asked.prefix)
    return Job(
        asked,
        tuple(len(item.ids) for item in asked.items),
        np.arange(count),
        Choice((strategy,) * count, "why"),
        chain,
        Ticket(asked.tenant, 0, 0.0, deadline),
        None,
    )


def joined(made, asked, flight=None, **kwargs):
    one = job(made, asked, **kwargs)
    (InFlight() if flight is None else flight).join(one)
    one.ticket.work = one.work(0)
    one.ticket.seconds = PerToken().share(one.ticket.work, 100)
    return one


# --- who pays for what


def test_equal_items_are_paid_for_once_and_by_whoever_is_left():
    made, flight = composer(), InFlight()
    first = joined(made, request([1, 2], [3] * 4, [5] * 7), flight)
    second = joined(made, request([1, 2], [5] * 7, [6] * 2), flight)
    assert first.work(0) == Work.of(2, 0, (4, 7))
    assert first.work(1) == Work.of(2, 1, (4, 7))
    assert second.work(0) == Work.of(2, 0, (2,))
    assert len(flight) == 3
    assert flight.leave(first) == {second}
    assert second.work(0) == Work.of(2, 0, (2, 7))
    assert first.work(0) == Work()
    assert len(flight) == 2
    assert flight.leave(second) == set()
    assert len(flight) == 0


def test_a_score_is_handed_to_all_and_paid_for_no_more():
    made, flight = composer(), InFlight()
    first = joined(made, request([1, 2], [3] * 4, [5] * 7), flight)
    second = joined(made, request([1, 2], [5] * 7), flight)
    assert flight.scored(first, [1], ["score"]) == [second]
    assert second.scored == ["score"]
    assert first.work(0) == Work.of(2, 0, (4,))
    assert second.work(0) == Work()
    assert flight.scored(first, [0], ["other"]) == [first]
    assert first.scored == ["other", "score"]
    assert first.work(0) == Work()
    assert len(flight) == 0


def test_a_late_score_of_one_that_left_takes_nothing_from_those_who_came_since():
    """The pass that computed it for the first was still running."""
    made, flight = composer(), InFlight()
    first = joined(made, request([1], [2, 2]), flight)
    first.take([0])
    flight.leave(first)
    second = joined(made, request([1], [2, 2]), flight)
    first.put_back([0])
    assert flight.scored(first, [0], ["late"]) == []
    third = joined(made, request([1], [2, 2]), flight)
    assert (len(flight), second.count, third.count) == (1, 1, 0)
    assert flight.scored(second, [0], ["score"]) == [second, third]


def test_who_pays_nothing_leaves_nothing_to_pay():
    made, flight = composer(), InFlight()
    first = joined(made, request([1, 2], [5] * 7), flight)
    second = joined(made, request([1, 2], [5] * 7), flight)
    assert flight.leave(second) == set()
    assert first.work(0) == Work.of(2, 0, (7,))


def test_where_every_item_computes_the_prefix_it_is_paid_for_each_time():
    made = composer()
    one = joined(made, request([1, 2, 3], [5] * 7, [6]), strategy=Strategy.NAIVE)
    assert one.work(0) == Work.of(3, 0, (7, 1), True)


class Books:
    """Jobs in flight, and passes that compute items of theirs."""

    def __init__(self, *others):
        self.made, self.flight, self.jobs, self.passes = composer(), InFlight(), [], []
        for other in others:
            joined(self.made, other, self.flight)

    def join(self, asked, _):
        self.jobs.append(joined(self.made, asked, self.flight))

    def leave(self, asked, place):
        return self._numbers(self.flight.leave(self.jobs[place % len(self.jobs)])) if self.jobs else None

    def take(self, asked, place):
        if self.jobs:
            job = self.jobs[place % len(self.jobs)]
            items = job.open_items()[: 1 + place % 3]
            job.take(items)
            self.passes.append((job, items))

    def end(self, asked, place, sound=True):
        if not self.passes:
            return None
        job, items = self.passes.pop(place % len(self.passes))
        job.put_back(items)
        return (
            self._numbers(self.flight.scored(job, items, [f"score {place} {item}" for item in items]))
            if sound
            else None
        )

    def fail(self, asked, place):
        self.end(asked, place, sound=False)

    def _numbers(self, jobs):
        return sorted(map(self.jobs.index, jobs))

    def told(self):
        return [(one.work(0), one.open_items(), one.scored, list(one.left)) for one in self.jobs]


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["join", "join", "leave", "take", "take", "end", "fail"]),
            st.sets(st.integers(1, 5), min_size=1),
            st.integers(0, 11),
        ),
        max_size=14,
    )
)
@examples(300)
def test_books_that_a_job_keeps_alone_say_what_shared_ones_do(steps):
    """Beside a job that wants something else, they are kept item by item from the beginning."""
    alone, shared = Books(), Books(request([1], [99]))
    for step, lengths, place in steps:
        asked = request([1], *[[n] * n for n in sorted(lengths)])
        assert getattr(alone, step)(asked, place) == getattr(shared, step)(asked, place)
        assert alone.told() == shared.told()
        assert len(alone.flight) == len(shared.flight) - 1
    for one in alone.jobs:
        alone.flight.leave(one)
    assert len(alone.flight) == 0
    assert alone.flight._behind == {}


@pytest.mark.parametrize("pass_items", [1, 2, 3])
def test_a_part_is_the_work_of_its_items_whoever_pays_for_them(pass_items):
    """The first, who pays for one of the second's items, waits."""
    made, flight = composer(pass_items=pass_items), InFlight()
    first = joined(made, request([1, 2], [3] * 4, [5] * 7), flight)
    second = joined(made, request([1, 2], [5] * 7, [6] * 2), flight)
    lengths = {first: (4, 7), second: (7, 2)}
    for one in (first, second):
        (part,) = made.compose([one], 0.0)
        assert part.work == Work.of(2, 0, lengths[one][:pass_items])
        assert part.beside(1) == Work.of(2, 1, lengths[one][:pass_items])
        assert part.group.strategies == one.choice.strategies[:pass_items]
        made.finish([part])
        made.drop(one)
        made.cache.clear()


# --- who waits


def test_a_job_waits_for_what_is_fetched_or_filled():
    made = composer()
    one = job(made, request(range(6), [7]))
    root, second = one.chain.keys
    assert not one.waits([])
    assert one.waits([(0, root)])
    assert one.waits([(2, root), (1, second)])
    assert not one.waits([(1, b"another"), (2, b"longer"), (3, second)]), "it begins alike and goes on otherwise"
    one.fetching = SimpleNamespace(done=lambda: False)
    assert one.waits([])
    one.fetching = SimpleNamespace(done=lambda: True)
    assert not one.waits([])
    one.lease = SimpleNamespace(tokens=6, withdrawn=False)
    assert not one.waits([(0, root)]), "it has all of it"
    one.lease = SimpleNamespace(tokens=4, withdrawn=False)
    assert one.waits([(0, root)])


# --- a pass


def items_of(parts):
    return [(part.job, part.group.items) for part in parts]


def test_who_would_be_late_through_a_job_does_not_meet_it():
    """A token takes 1.5 ms to be reckoned with: 20 tokens are done after 30 ms, 20 more after 60."""
    for deadline, together in ((0.059, False), (0.0631, True), (None, True), (0.01, True)):
        made = composer()
        first = joined(made, request([1] * 10, [2] * 10), deadline=None if deadline is None else 7.0 + deadline)
        other, small = joined(made, request([3] * 10, [4] * 10)), joined(made, request([5], [6]))
        parts = made.compose([first, other, small], 7.0)
        wanted = [first, other, small] if together else [first, small]
        assert [part.job for part in parts] == wanted, deadline


def test_only_who_would_be_done_with_the_pass_can_become_late_by_more_of_it():
    made = composer(pass_tokens=30)
    first = joined(made, request([1] * 10, [2] * 10, [3] * 40), deadline=0.1)
    other = joined(made, request([4] * 2, [5] * 2), deadline=9.0)
    parts = made.compose([first, other], 0.0)
    assert items_of(parts) == [(first, (0,)), (other, (0,))]


def test_a_job_that_does_not_fit_as_a_whole_is_reckoned_with_its_part():
    made = composer(pass_tokens=40)
    first = joined(made, request([1] * 10, [2] * 10), deadline=0.065)
    large = joined(made, request([], *[[n] * 10 for n in range(8)]))
    assert large.ticket.work.tokens == 80
    parts = made.compose([first, large], 0.0)
    assert items_of(parts) == [(first, (0,)), (large, (0, 1))], "20 of its 80 tokens: 30 ms, and not 120"


def test_what_waits_is_passed_over_and_not_waited_for():
    made = composer()
    one, other = joined(made, request([1], [2])), joined(made, request([3], [4]))
    made.cache.filling.append((0, one.chain.keys[0]))
    assert [part.job for part in made.compose([one, other], 0.0)] == [other]


@pytest.mark.parametrize("dense", [Strategy.CUSTOM_MASK, Strategy.REFERENCE])
def test_a_dense_mask_shares_a_tree_with_its_like_only(dense):
    made = composer()
    asked = [
        request([1], [2], strategy=dense),
        request([1], [3]),
        request([4], [5]),
        request([1], [6], strategy=dense),
        request([4], [7], strategy=dense),
        request([], [8], strategy=dense),
    ]
    jobs = [joined(made, each, strategy=each.strategy or AUTO) for each in asked]
    first = [part.job for part in made.compose(jobs, 0.0)]
    assert first == [jobs[0], jobs[2], jobs[3], jobs[5]]


def test_what_was_asked_for_by_name_shares_a_tree_with_what_was_not():
    made = composer()
    asked = [request([1], [2], strategy=Strategy.CASCADE), request([1], [3]), request([1], [4], strategy=AUTO)]
    jobs = [joined(made, each) for each in asked]
    assert [part.job for part in made.compose(jobs, 0.0)] == jobs


def test_naive_jobs_share_no_tree_and_hold_no_page():
    made = composer()
    naive = joined(made, request([1], [2], strategy=Strategy.NAIVE), strategy=Strategy.NAIVE)
    dense = joined(made, request([1], [3], strategy=Strategy.CUSTOM_MASK), strategy=Strategy.CUSTOM_MASK)
    parts = made.compose([naive, dense], 0.0)
    assert [part.job for part in parts] == [naive, dense]
    assert (naive.lease, parts[0].group.pages, made.cached(naive)) == (None, None, 0)
    assert parts[0].work == Work.of(1, 0, (1,), True)


def test_a_naive_job_takes_the_prefix_for_each_item_from_the_budget():
    made = composer(pass_tokens=26)
    lease = made.cache.acquire(made.cache.chain(b"", np.arange(8, dtype=np.int32)), 0.0)
    made.cache.commit(lease)
    one = joined(made, request(range(8), [1] * 5, [2] * 5, [3] * 5), strategy=Strategy.NAIVE)
    assert items_of(made.compose([one], 0.0)) == [(one, (0, 1))]


def test_items_of_a_pass_are_bounded():
    made = composer(pass_items=3)
    one = joined(made, request([1], *[[n] for n in range(2, 7)]))
    other = joined(made, request([8], [9]))
    parts = made.compose([one, other], 0.0)
    assert items_of(parts) == [(one, (0, 1, 2))]
    assert one.open_items() == [3, 4]
    made.finish(parts)
    assert one.open_items() == [0, 1, 2, 3, 4]
    assert one.lease.written == 1


def test_what_is_cached_and_packed_reaches_the_pass():
    made = composer()
    first = joined(made, request(range(10), [50]))
    parts = made.compose([first], 0.0)
    assert (parts[0].group.cached, parts[0].work) == (0, Work.of(10, 0, (1,)))
    made.finish(parts)
    second = joined(made, request(range(8), [51]))
    second.choice = Choice((AUTO,), "why", 64)
    parts = made.compose([second], 0.0)
    assert (parts[0].group.cached, parts[0].group.packed_rows, second.cached) == (8, 64, 8)
    assert parts[0].work == Work.of(8, 8, (1,))
    assert made.cached(second) == 8
    bare = joined(made, request([], [52]))
    (part,) = made.compose([bare], 0.0)
    assert (part.group.pages, part.group.cached, bare.lease) == (None, 0, None)
    assert part.work == Work.of(0, 0, (1,))


def test_a_job_that_has_all_its_pages_keeps_them_from_pass_to_pass():
    made = composer(pass_items=1)
    one = joined(made, request(range(6), [50], [51]))
    made.finish(made.compose([one], 0.0))
    lease = one.lease
    one.left.pop(0)
    made.finish(made.compose([one], 0.0))
    assert one.lease is lease
    assert (made.cache.counts.hit_tokens, made.cache.counts.missed_tokens) == (0, 6)


def test_what_an_unsound_pass_wrote_is_found_by_nobody_though_someone_else_holds_it():
    made = composer()
    one = joined(made, request(range(6), [50]))
    parts = made.compose([one], 0.0)
    held = made.cache.held(one.chain)
    made.finish(parts, sound=False)
    assert made.cache.hit(one.chain) == 0
    made.cache.release(held)
    made.drop(one)
    assert made.cache.pool.free == made.cache.pool.pages


def test_an_unsound_pass_keeps_nothing_and_a_lease_that_was_written_before():
    made = composer()
    first = joined(made, request(range(4), [50], [51]))
    made.finish(made.compose([first], 0.0))
    lease = first.lease
    later = joined(made, request(range(20, 24), [52]))
    parts = made.compose([joined(made, request(range(4), [53])), later], 0.0)
    made.finish(parts, sound=False)
    assert lease.written == 4
    assert parts[0].job.lease is not None
    assert later.lease.withdrawn
    assert made.cache.hit(later.chain) == 0
    assert made.cache.counts.withdrawn_blocks == 1
    assert made.compose([later], 1.0)[0].group.cached == 0
    assert not later.lease.withdrawn, "it has others"


# --- what the cache counts, and what it keeps


def test_evicted_and_withdrawn_blocks_are_counted():
    made = composer(pages=4).cache
    for n in range(3):
        lease = made.acquire(made.chain(b"", np.arange(n * 100, n * 100 + 8, dtype=np.int32)), 0.0)
        made.commit(lease)
        made.release(lease)
    assert made.counts.evicted_blocks == 2
    made.clear()
    assert made.counts.evicted_blocks == 6
    lease = made.acquire(made.chain(b"", np.arange(12, dtype=np.int32)), 0.0)
    made.withdraw([(lease, 0)])
    made.release(lease)
    assert made.counts.withdrawn_blocks == 3
    other = made.acquire(made.chain(b"", np.arange(8, dtype=np.int32)), 0.0)
    made.release(other)
    assert made.counts.withdrawn_blocks == 5, "what nobody wrote is withdrawn as it is let go"
    assert (made.counts.hit_tokens, made.counts.missed_tokens) == (0, 24 + 12 + 8)


def test_what_costs_more_to_compute_again_is_kept_where_both_were_wanted_alike():
    for dear in (0, 1):
        made = PrefixCache(PagePool(2), PAGE)
        chains = [made.chain(b"", np.full(4 if n == dear else 1, n, np.int32)) for n in range(2)]
        for chain in chains:
            lease = made.acquire(chain, 0.0)
            made.commit(lease)
            made.release(lease)
        lease = made.acquire(made.chain(b"", np.full(4, 9, np.int32)), 0.0)
        assert made.hit(chains[dear]) == 4
        assert made.hit(chains[1 - dear]) == 0
        made.release(lease)


def test_the_cost_of_a_block_is_told_what_stands_before_it():
    asked = []
    made = PrefixCache(PagePool(4), PAGE, cost=lambda before, tokens: asked.append((before, tokens)) or tokens)
    lease = made.acquire(made.chain(b"", np.arange(10, dtype=np.int32)), 0.0)
    made.commit(lease)
    made.release(lease)
    made.clear()
    assert asked == [(8, 2), (4, 4)], "the first is worth less than what continues it"


def test_how_often_evicted_blocks_were_wanted_is_forgotten_the_oldest_first():
    made = PrefixCache(PagePool(2), PAGE)
    chains = [made.chain(b"", np.full(4, n, np.int32)) for n in range(12)]
    for chain in chains:
        lease = made.acquire(chain, 0.0)
        made.commit(lease)
        made.release(lease)
    made.clear()
    assert [made._ghosts.take(chain.salt, chain.ids) is not None for chain in chains] == [False] * 4 + [True] * 8


def test_pins_end_when_their_time_comes():
    made = PrefixCache(PagePool(4), PAGE)
    lease = made.acquire(made.chain(b"", np.arange(8, dtype=np.int32)), 0.0)
    made.commit(lease)
    assert made.pin(lease, 10.0, 0.0) == 8
    other = made.acquire(made.chain(b"", np.arange(50, 58, dtype=np.int32)), 0.0)
    made.commit(other)
    assert made.pin(other, 20.0, 9.0) == 0, "half of the pool is pinned"
    assert made.pin(other, 20.0, 10.0) == 8, "and no more"
    for each in (lease, other):
        made.release(each)
    assert not made.pin(made.held(made.chain(b"", np.arange(70, 74, dtype=np.int32))), 30.0, 11.0)
    assert evicted(made, 1, 10.0) == 1
    assert evicted(made, 1, 10.0) == 1
    assert evicted(made, 1, 19.0) == 0
    assert evicted(made, 1, 20.0) == 1
