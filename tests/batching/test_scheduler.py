"""Whose turn it is and who is let in, over numbers and a clock that the test holds."""

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.errors import CannotFinish, NotAdmitted, OverShare, QueueFull
from batching.pass_time import Work
from batching.scheduler import (
    CLASS_RESERVE,
    DISTANT,
    PATIENCE,
    PRIORITY_SECONDS,
    SHARE_FILL,
    STRETCH,
    TIE_SECONDS,
    Scheduler,
    SchedulerLimits,
    Ticket,
    earliest_deadline,
    first_come,
    shortest_first,
)
from batching.shares import MAX_WEIGHT, MIN_WEIGHT, FairShares
from tests.attention.draw import examples


class Exact:
    """A device that takes a millisecond a token."""

    margin, known = 1.0, True

    def share(self, work, pass_tokens):
        return work.tokens / 1000

    def learn(self, work, seconds):
        raise AssertionError("nothing is to be learned here")


def scheduler(queue_tokens=1_000_000, weights=None, **kwargs):
    return Scheduler(SchedulerLimits(100, queue_tokens), Exact(), FairShares(weights), **kwargs)


def ticket(tokens, submitted=0.0, deadline=None, tenant="", priority=0, partial=False):
    return Ticket(tenant, priority, submitted, deadline, partial, Work(tokens))


def admitted(made, *tickets, now=0.0, free_at=0.0):
    """Those that were let in, in this order."""
    queue = []
    for one in tickets:
        try:
            made.admit(one, queue, free_at, now)
        except NotAdmitted:
            continue
        queue.append(one)
    return queue


# --- order


def test_the_earliest_deadline_goes_first_and_of_equal_ones_the_shorter():
    made = scheduler()
    late, long, short = ticket(50, deadline=2.0), ticket(40, deadline=0.2), ticket(10, deadline=0.2 + TIE_SECONDS / 4)
    queue = admitted(made, late, long, short)
    assert made.order(queue, 0.0) == [short, long, late]


def test_what_cannot_be_in_time_any_more_goes_last():
    made = scheduler()
    hopeless, feasible = ticket(100, deadline=0.15), ticket(100, deadline=0.5)
    queue = admitted(made, hopeless, feasible)
    assert made.order(queue, 0.0) == [hopeless, feasible]
    assert made.order(queue, 0.1) == [feasible, hopeless]
    hopeless.partial = True
    assert made.order(queue, 0.1) == [hopeless, feasible], "a part of it can still be in time"


def test_a_distant_deadline_is_no_reason_to_wait_for_it():
    made = scheduler()
    minute, none = ticket(10, deadline=60.0), ticket(10)
    queue = admitted(made, minute, none)
    assert none.due == pytest.approx(0.01 * STRETCH + PATIENCE)
    assert minute.due == pytest.approx(0.01 * STRETCH + DISTANT)
    later = ticket(10, submitted=1.0, deadline=1.1)
    made.admit(later, queue, 1.0, 1.0)
    assert made.order([*queue, later], 1.0)[-1] is later, "those have waited: they are due before it"


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 0.2)), min_size=1, max_size=60))
@examples(50)
def test_nothing_starves(arrivals):
    """However many shorter ones keep coming, a long request is passed only by those that came while it was not due."""
    made, now = scheduler(), 0.0
    long = ticket(3000)
    queue = admitted(made, long)
    for tokens, gap in arrivals:
        now += gap
        one = ticket(min(tokens, 100), submitted=now)
        made.admit(one, queue, now, now)
        queue.append(one)
    ahead = made.order(queue, now)[: made.order(queue, now).index(long)]
    assert all(one.submitted <= long.due for one in ahead)


@pytest.mark.parametrize("priority", [-1, 0])
def test_a_class_is_worth_seconds_of_waiting(priority):
    made = scheduler()
    low = ticket(10, priority=priority)
    queue = admitted(made, low)
    soon, much_later = (ticket(10, submitted=t, priority=priority + 1) for t in (1.0, 1.01 * PRIORITY_SECONDS))
    for one in (soon, much_later):
        made.admit(one, queue, one.submitted, one.submitted)
    assert made.order([low, soon], 1.0) == [soon, low]
    assert made.order([low, much_later], much_later.submitted) == [low, much_later]


def test_the_baselines_order_by_what_they_are_named_after():
    first, short, urgent = ticket(50, 0.0), ticket(5, 0.01), ticket(50, 0.02, deadline=0.5)
    for order, head in ((first_come, first), (shortest_first, short), (earliest_deadline, urgent)):
        made = scheduler(order=order)
        queue = admitted(made, first, short, urgent)
        assert made.order(queue, 0.02)[0] is head


# --- admission


def test_what_cannot_be_finished_is_refused_at_once_and_told_when_to_come_again():
    made = scheduler()
    queue = admitted(made, ticket(400, deadline=0.5))
    with pytest.raises(CannotFinish, match=r"done in 0.600 s, its deadline is in 0.550 s"):
        made.admit(ticket(200, deadline=0.55), queue, 0.0, 0.0)
    with pytest.raises(CannotFinish) as caught:
        made.admit(ticket(200, deadline=0.55), queue, 0.0, 0.0)
    assert caught.value.retry_after == pytest.approx(0.6 - 0.55 * (1 - CLASS_RESERVE[0]))
    made.admit(ticket(200, deadline=0.85), queue, 0.0, 0.0)


def test_a_promise_to_another_is_not_broken_by_an_earlier_deadline():
    made = scheduler()
    promised = ticket(100, deadline=0.12)
    queue = admitted(made, promised)
    with pytest.raises(CannotFinish, match="accepted before"):
        made.admit(ticket(40, deadline=0.05, priority=1), queue, 0.0, 0.0)
    made.admit(ticket(10, deadline=0.05, priority=1), queue, 0.0, 0.0)


def test_the_pass_that_runs_counts_and_an_idle_service_takes_anything():
    made = scheduler()
    made.admit(ticket(100_000, deadline=0.01), [], 0.0, 0.0)
    with pytest.raises(CannotFinish):
        made.admit(ticket(10, deadline=0.05), [], 0.045, 0.0)
    made.admit(ticket(10, deadline=0.08), [], 0.045, 0.0)


def test_who_takes_a_part_is_let_in_while_it_can_begin_in_time():
    made = scheduler()
    queue = admitted(made, ticket(100, deadline=0.2))
    made.admit(ticket(500, deadline=0.3, partial=True), queue, 0.0, 0.0)
    with pytest.raises(CannotFinish):
        made.admit(ticket(500, deadline=0.01, partial=True), queue, 0.05, 0.0)


@pytest.mark.parametrize(("deadline", "classes"), [(0.21, ()), (0.23, (1,)), (0.28, (0, 1)), (0.35, (-1, 0, 1))])
def test_a_lower_class_must_leave_more_room(deadline, classes):
    for priority in (-1, 0, 1):
        made = scheduler()
        queue = admitted(made, ticket(100, deadline=0.15, priority=1))
        asked = ticket(100, deadline=deadline, priority=priority)
        assert (asked in admitted(made, *queue, asked)) is (priority in classes)


def test_tokens_bound_the_queue_whoever_asks():
    made = scheduler(queue_tokens=300)
    queue = admitted(made, ticket(250))
    for tokens in (51, 5000):
        with pytest.raises(QueueFull, match="limit is 300") as caught:
            made.admit(ticket(tokens), queue, 0.0, 0.0)
        assert caught.value.retry_after == pytest.approx(0.125)
    made.admit(ticket(50), queue, 0.0, 0.0)


def test_while_nothing_was_measured_no_deadline_refuses():
    made = scheduler()
    made.pass_time.known = False
    queue = admitted(made, ticket(400, deadline=0.5))
    made.admit(ticket(400, deadline=0.5), queue, 0.0, 0.0)


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.floats(0, 0.1), st.floats(0.01, 2.0), st.sampled_from([-1, 0, 1])),
        min_size=1,
        max_size=40,
    )
)
@examples(60)
def test_who_was_let_in_meets_its_deadline(arrivals):
    """Run the queue to its end, one request after the other, on the device that the predictions are of."""
    made, now, free_at, queue = scheduler(), 0.0, 0.0, []

    def run_until(until):
        nonlocal free_at
        while queue and free_at <= until:
            head = made.order(queue, free_at)[0]
            queue.remove(head)
            free_at += head.seconds
            met = head.deadline is None or free_at <= head.deadline + 1e-9
            assert met or alone.get(head), "only what came to an idle device may be late"

    alone: dict[Ticket, bool] = {}
    for tokens, gap, patience, priority in arrivals:
        now += gap
        run_until(now)
        free_at = max(free_at, now)
        one = ticket(tokens, now, now + patience, priority=priority)
        alone[one] = not queue and free_at <= now
        with suppress(NotAdmitted):
            made.admit(one, queue, free_at, now)
            queue.append(one)
    run_until(math.inf)


# --- tenants


def test_a_tenant_that_floods_gets_its_share_and_leaves_the_rest():
    made = scheduler()
    flood = [ticket(50, deadline=1.0, tenant="a") for _ in range(100)]
    for _ in flood:
        made.shares.asked("b", 0.05, 0.0)
    queue = admitted(made, *flood)
    room = 0.5 * SHARE_FILL * (1 - CLASS_RESERVE[0])
    assert len(queue) == int(room / 0.05), "half of the second until the deadline, less what is kept free"
    others = admitted(made, *queue, *[ticket(50, deadline=1.0, tenant="b") for _ in range(100)])
    assert sum(one.tenant == "b" for one in others) == len(queue)
    with pytest.raises(OverShare, match="50%"):
        made.admit(ticket(50, deadline=1.0, tenant="a"), queue, 0.0, 0.0)


def test_without_deadlines_a_newcomer_does_not_wait_behind_a_flood():
    made = scheduler()
    made.shares.asked("b", 0.01, 0.0)
    queue = admitted(made, *[ticket(50, tenant="a") for _ in range(100)])
    assert len(queue) == 100
    newcomer = ticket(50, tenant="b")
    made.admit(newcomer, queue, 0.0, 0.0)
    assert made.order([*queue, newcomer], 0.0).index(newcomer) <= 6


def test_one_tenant_alone_has_everything():
    made = scheduler()
    assert len(admitted(made, *[ticket(50, deadline=1.0, tenant="a") for _ in range(100)])) >= 14


def test_shares_follow_weights_and_what_is_not_asked_for_goes_to_the_others():
    shares = FairShares({"big": 3.0})
    assert shares.share("big", 0.0) == 1.0
    for _ in range(100):
        shares.asked("big", 0.1, 0.0)
        shares.asked("small", 0.1, 0.0)
    assert shares.share("big", 0.0) == pytest.approx(0.75)
    assert shares.share("small", 0.0) == pytest.approx(0.25)
    modest = FairShares()
    modest.asked("modest", 0.2, 0.0)  # a tenth of the device over the memory
    assert modest.share("other", 0.0) == pytest.approx(0.9)
    assert modest.share("other", 100.0) == 1.0, "and what was asked long ago is forgotten"


@pytest.mark.parametrize("weight", [0, -1, 1e-300, 9.9e-4, 1001, math.inf, math.nan])
def test_a_weight_beyond_the_limits_is_refused(weight):
    with pytest.raises(ValueError, match=r"'a' must be between 0\.001 and 1000, got"):
        FairShares({"a": weight})


@given(st.data())
def test_whatever_the_weights_every_tenant_has_a_share(data):
    limits = st.sampled_from([MIN_WEIGHT, 1.0, MAX_WEIGHT])
    weights = data.draw(st.lists(limits, min_size=1, max_size=300))
    shares = FairShares({str(tenant): weight for tenant, weight in enumerate(weights)})
    for tenant, seconds in enumerate(data.draw(st.lists(st.sampled_from([1e-3, 0.5, 1e6]), max_size=len(weights)))):
        shares.asked(str(tenant), seconds, 0.0)
    made = Scheduler(SchedulerLimits(100, 1000), Exact(), shares)
    for tenant in range(len(weights)):
        assert 0 < shares.share(str(tenant), 0.0) <= 1
        made.admit(one := ticket(5, tenant=str(tenant)), [], 0.0, 0.0)
        assert math.isfinite(one.due)


@given(st.lists(st.sampled_from([None, 1e-308, 1e6, 1e9, 1e308, math.inf]), min_size=2, max_size=6))
def test_no_deadline_is_too_distant_to_be_ordered(deadlines):
    made, queue = scheduler(), []
    made.learn_size(1, 1)
    for deadline in deadlines:
        with suppress(NotAdmitted):
            made.admit_bytes(ticket(0, deadline=deadline), 10, queue, 0.0, 0.0)
            made.admit(one := ticket(10, deadline=deadline), queue, 0.0, 0.0)
            queue.append(one)
    for one in queue:
        one.due = math.inf if one.deadline is None else one.deadline
    assert len(made.order(queue, 0.0)) == len(queue) > 0


# --- before tokenising


def test_bytes_refuse_only_what_hardly_could_be():
    made = scheduler()
    queue = [ticket(1000, deadline=1.5)]
    made.estimate(queue[0])
    queue[0].due = 0.5
    made.admit_bytes(ticket(0, deadline=0.01), 1 << 20, queue, 0.0, 0.0)  # nothing is known of bytes yet
    made.learn_size(4000, 1000)
    with pytest.raises(CannotFinish, match="1048576 bytes"):
        made.admit_bytes(ticket(0, deadline=1.0), 1 << 20, queue, 0.0, 0.0)
    made.admit_bytes(ticket(0, deadline=1.0), 800, queue, 0.0, 0.0)
    made.admit_bytes(ticket(0, deadline=1.0), 1 << 20, [], 0.0, 0.0)  # an idle service takes anything
    made.admit_bytes(ticket(0), 1 << 20, queue, 0.0, 0.0)
