"""What admission says and where its edges lie, on a device that is less exact than its predictions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.errors import CannotFinish, OverShare
from batching.pass_time import Work
from batching.scheduler import (
    CLASS_RESERVE,
    MEMORY_BYTES,
    OPTIMISM,
    PATIENCE,
    PROMISE_RESERVE,
    SHARE_FILL,
    STRETCH,
    Scheduler,
    SchedulerLimits,
    TextsAhead,
    Ticket,
    first_come,
)
from batching.shares import FORGOTTEN, MAX_TENANTS, MEMORY_SECONDS, FairShares
from tests.attention.draw import examples

PASS = 100  # tokens
MARGIN = 1.25


class Late:
    """A millisecond a token is predicted, and a quarter more is to be reckoned with."""

    margin, known = MARGIN, True

    def share(self, work, pass_tokens):
        return work.tokens / 1000


def scheduler(queue_tokens=1_000_000):
    return Scheduler(SchedulerLimits(PASS, queue_tokens), Late())


def ticket(tokens, deadline=None, tenant="", priority=0, partial=False, submitted=0.0):
    return Ticket(tenant, priority, submitted, deadline, partial, Work(tokens))


def waiting(made, *tickets):
    queue = []
    for one in tickets:
        made.admit(one, queue, 0.0, one.submitted)
        queue.append(one)
    return queue


# --- when a request is done: that of the pass which has its last tokens


def walked(lengths):
    """Tokens computed when each is done: pass after pass, token after token, as the composer fills them."""
    passes, left = [[]], PASS
    for number, tokens in enumerate(lengths):
        if left < tokens <= PASS:
            passes.append([])  # what fits a pass whole is not split
            left = PASS
        while tokens:
            if not left:
                passes.append([])
                left = PASS
            part = min(tokens, left)
            passes[-1].append((number, part))
            tokens, left = tokens - part, left - part
    done, end = {}, 0
    for one in passes:
        end += sum(part for _, part in one)
        done |= {number: end for number, _ in one}
    return [done[number] for number in range(len(lengths))]


@given(st.lists(st.integers(1, 350), min_size=1, max_size=12))
@examples(150)
def test_a_request_is_done_when_the_pass_is_that_has_the_last_of_it(lengths):
    made = scheduler()
    tickets = [ticket(tokens) for tokens in lengths]
    for one in tickets:
        made.estimate(one)
    ends = made._ends(tickets, 7.0)
    assert ends == pytest.approx([7.0 + MARGIN * tokens / 1000 for tokens in walked(lengths)])


# --- the caller's own deadline


@pytest.mark.parametrize("priority", [-1, 0, 1])
def test_the_edge_of_a_deadline(priority):
    """Behind 100 tokens, 40 are done in 175 ms as it is to be reckoned."""
    patience = MARGIN * 0.14 / (1 - CLASS_RESERVE[priority])
    for more, let_in in ((1e-6, True), (-1e-3, False)):
        made = scheduler()
        queue = waiting(made, ticket(100, 5.15, priority=1, submitted=5.0))
        asked = ticket(40, 5.0 + patience + more, priority=priority, submitted=5.0)
        if let_in:
            made.admit(asked, queue, 5.0, 5.0)
            continue
        with pytest.raises(CannotFinish) as caught:
            made.admit(asked, queue, 5.0, 5.0)
        assert str(caught.value) == f"it would be done in 0.175 s, its deadline is in {patience + more:.3f} s"
        assert caught.value.retry_after == pytest.approx(max(0.01, 1e-3 * (1 - CLASS_RESERVE[priority])))


def test_who_takes_a_part_must_be_able_to_begin():
    for deadline, let_in in ((0.125 + 1e-6, True), (0.124, False)):
        made = scheduler()
        queue = waiting(made, ticket(100, 0.2, priority=1))
        asked = ticket(400, deadline, partial=True, priority=-1)
        if let_in:
            made.admit(asked, queue, 0.0, 0.0)
        else:
            with pytest.raises(CannotFinish, match=r"done in 0.125 s, its deadline is in 0.124 s"):
                made.admit(asked, queue, 0.0, 0.0)


# --- promises to others


@pytest.mark.parametrize(("tokens", "broken"), [(40, False), (42, True)])
def test_the_edge_of_a_promise(tokens, broken):
    """The first one came at 1.0 with 300 ms of patience, of which 5 % stay free: 285 ms for 125 and 160 of others."""
    made = scheduler()
    promised = ticket(100, 1.3, submitted=1.0)
    queue = waiting(made, promised)
    latest = promised.deadline - PROMISE_RESERVE * 0.3 - 1.0
    ahead = latest - MARGIN * 0.1  # what may come before it
    urgent = ticket(int(1000 * ahead / MARGIN) + (tokens - 40), 1.29, priority=1, submitted=1.0)
    assert (urgent.work.tokens + 100) * MARGIN / 1000 > latest or not broken
    if not broken:
        made.admit(urgent, queue, 1.0, 1.0)
        return
    with pytest.raises(CannotFinish, match=r"^a request that was accepted before would miss its deadline$") as caught:
        made.admit(urgent, queue, 1.0, 1.0)
    assert caught.value.retry_after == pytest.approx(urgent.seconds)


@pytest.mark.parametrize("kind", ["hopeless", "partial", "no deadline"])
def test_nobody_is_refused_for_one_who_has_nothing_to_lose(kind):
    made = scheduler()
    made.pass_time.margin = 1.0
    deadline = {"hopeless": 0.05, "partial": 0.12, "no deadline": None}[kind]
    queue = waiting(made, ticket(100, deadline, partial=kind == "partial"))
    made.admit(ticket(60, 0.1, priority=1), queue, 0.0, 0.0)


def test_who_stands_before_the_new_one_loses_nothing_through_it():
    made = scheduler()
    first = ticket(100, 0.14, priority=1)
    queue = waiting(made, first)
    made.admit(ticket(100, 5.0), queue, 0.0, 0.0)
    assert made.order(queue, 0.0) == [first]


# --- shares


def shared(queue_tokens=1_000_000, now=0.0):
    """A scheduler of which tenant b asks for at least its share."""
    made = scheduler(queue_tokens)
    for _ in range(200):
        made.shares.asked("b", 0.1, now)
    return made


def test_the_edge_of_a_share_of_the_time():
    room = 0.5 * SHARE_FILL * (1 - CLASS_RESERVE[0])  # of one second
    made = shared(now=10.0)
    queue = waiting(made, ticket(100, 11.0, "a", submitted=10.0))
    most = int(1000 * room) - 100
    with pytest.raises(OverShare) as caught:
        made.admit(ticket(most + 1, 11.0, "a", submitted=10.0), queue, 10.0, 10.0)
    need = 0.1 + (most + 1) / 1000
    told = f"this tenant's requests need {need:.3f} s, its 50% before the deadline are {room:.3f} s"
    assert str(caught.value) == told
    assert caught.value.retry_after == pytest.approx(max(0.01, need - room))
    with pytest.raises(OverShare) as caught:
        made.admit(ticket(most + 400, 11.0, "a", submitted=10.0), queue, 10.0, 10.0)
    assert caught.value.retry_after == pytest.approx(0.1 + (most + 400) / 1000 - room)
    made.admit(ticket(most, 11.0, "a", submitted=10.0), queue, 10.0, 10.0)


def test_the_edge_of_a_share_of_the_queue():
    made = shared(queue_tokens=1000)
    queue = waiting(made, ticket(300, tenant="a"), ticket(150, tenant="b"))
    with pytest.raises(OverShare) as caught:
        made.admit(ticket(201, tenant="a"), queue, 0.0, 0.0)
    assert str(caught.value) == "300 tokens of this tenant wait: its share of 1000 is 50% while others ask too"
    assert caught.value.retry_after == pytest.approx((0.3 + 0.15) / 2 * 0.5)
    made.admit(ticket(200, tenant="a"), queue, 0.0, 0.0)


def test_a_first_request_of_a_tenant_may_be_more_than_its_share():
    made = shared(queue_tokens=1000)
    queue = waiting(made, ticket(150, tenant="b"))
    made.admit(ticket(800, tenant="a"), queue, 0.0, 0.0)


def test_one_tenant_alone_may_fill_the_queue():
    made = scheduler(queue_tokens=1000)
    queue = waiting(made, ticket(600, tenant="a"))
    made.admit(ticket(400, tenant="a"), queue, 0.0, 0.0)


# --- bytes


@pytest.mark.parametrize("parts", [1, 64])
def test_what_bytes_are_in_tokens_is_the_first_seen_and_then_learned_byte_by_byte(parts):
    made = scheduler()
    made.learn_size(0, 9)
    assert made._tokens_per_byte is None
    made.learn_size(1, 3)
    assert made._tokens_per_byte == 3.0
    for _ in range(parts):  # the same bytes are the same lesson, in one request or in many
        made.learn_size(MEMORY_BYTES // parts, MEMORY_BYTES // parts)
    made.learn_size(0, 9)
    assert made._tokens_per_byte == pytest.approx(1 + 2 / math.e)


def test_a_request_without_a_token_is_a_lesson_too():
    made = scheduler()
    made.learn_size(100, 0)
    assert made._tokens_per_byte == 0.0
    made.learn_size(1, 1)
    assert made._tokens_per_byte == pytest.approx(1 / MEMORY_BYTES, rel=1e-3)


def test_many_short_requests_do_not_have_a_long_one_refused_that_could_be_in_time():
    """A short one is nearly all template: ninety tokens of a hundred bytes. A long one has a token in four bytes."""
    made = scheduler()
    made.learn_size(100_000, 25_000)
    for _ in range(100):
        made.learn_size(100, 90)
    queue = waiting(made, ticket(10))
    made.admit_bytes(ticket(0, 15.0), 100_000, queue, 0.0, 0.0)
    with pytest.raises(CannotFinish):
        made.admit_bytes(ticket(0, 12.0), 100_000, queue, 0.0, 0.0)


def test_the_edge_of_bytes():
    """A token a byte, half of what is predicted: behind 1,000 tokens 400 bytes want 700 ms."""
    for order in (None, first_come):
        made = scheduler()
        if order is not None:
            made._order = order
        made.learn_size(10, 10)
        ahead = ticket(1000, 6.5, submitted=5.0)
        made.estimate(ahead)
        ahead.due = 5.05
        need = OPTIMISM * 1.4
        with pytest.raises(CannotFinish) as caught:
            made.admit_bytes(ticket(0, 5.0 + need - 0.1, submitted=5.0), 400, [ahead], 0.0, 5.0)
        assert str(caught.value) == f"400 bytes could not be scored in the {need - 0.1:.3f} s that are left"
        assert caught.value.retry_after == pytest.approx(0.1)
        made.admit_bytes(ticket(0, 5.0 + need + 1e-6, submitted=5.0), 400, [ahead], 0.0, 5.0)
        with pytest.raises(CannotFinish):
            made.admit_bytes(ticket(0, 5.0 + need + 1e-6, submitted=5.0), 400, [ahead], 5.001, 5.0)


def test_equals_in_the_queue_stand_before_the_new_one():
    made = scheduler()
    made._order = lambda ticket, now: ()
    made.learn_size(1, 1)
    ahead = ticket(1000)
    made.estimate(ahead)
    with pytest.raises(CannotFinish):
        made.admit_bytes(ticket(0, 0.4), 1, [ahead], 0.0, 0.0)


@pytest.mark.parametrize("kind", ["partial", "no deadline", "unknown device", "unknown bytes", "idle", "later ones"])
def test_bytes_refuse_nobody_where_nothing_can_be_said(kind):
    made = scheduler()
    made.pass_time.known = kind != "unknown device"
    if kind != "unknown bytes":
        made.learn_size(1, 1)
    queue = [] if kind == "idle" else [ticket(10_000, submitted=0.0)]
    for one in queue:
        made.estimate(one)
        one.due = 1e6 if kind == "later ones" else 0.0
    deadline = None if kind == "no deadline" else 0.4
    size = 100 if kind == "later ones" else 100_000
    made.admit_bytes(ticket(0, deadline, partial=kind == "partial"), size, queue, 0.0, 0.0)


def test_texts_that_are_tokenised_before_it_count_as_tokens_and_as_time():
    """A token a byte, a millisecond a token, half of what is predicted."""
    made = scheduler()
    made.learn_size(10, 10)
    texts = TextsAhead(1000, ((300, 1000), (5000, 400)), 0.2)
    need = OPTIMISM * (0.3 + 0.4 + 0.1)
    with pytest.raises(CannotFinish) as caught:
        made.admit_bytes(ticket(0, 5.0 + need - 0.1, submitted=5.0), 100, [], 0.0, 5.0, texts)
    assert caught.value.retry_after == pytest.approx(0.1)
    made.admit_bytes(ticket(0, 5.0 + need + 1e-6, submitted=5.0), 100, [], 0.0, 5.0, texts)
    slow = texts._replace(seconds=2.0)
    need = OPTIMISM * (2.0 + 0.1)
    with pytest.raises(CannotFinish):
        made.admit_bytes(ticket(0, 5.0 + need - 0.1, submitted=5.0), 100, [], 0.0, 5.0, slow)
    made.admit_bytes(ticket(0, 5.0 + need + 1e-6, submitted=5.0), 100, [], 0.0, 5.0, slow)


def test_a_request_has_no_more_tokens_than_its_documents_may_have():
    made = scheduler()
    made.learn_size(1, 1)
    queue = waiting(made, ticket(10))
    made.admit_bytes(ticket(0, 1.0), 50_000_000, queue, 0.0, 0.0, TextsAhead(most_tokens=500))
    with pytest.raises(CannotFinish):
        made.admit_bytes(ticket(0, 1.0), 50_000_000, queue, 0.0, 0.0, TextsAhead(most_tokens=5000))


def test_the_tokenizers_alone_may_be_too_slow_and_an_idle_service_takes_anything():
    made = scheduler()
    made.pass_time.known = False
    with pytest.raises(CannotFinish):
        made.admit_bytes(ticket(0, 0.4), 10, [], 0.0, 0.0, TextsAhead(9, ((5, 5),), 1.0))
    made.admit_bytes(ticket(0, 0.4), 10, [], 0.0, 0.0, TextsAhead(9, (), 1.0))


# --- what is not computed after all


def crowded(*tenants):
    """Two tenants ask for more than the device."""
    made = scheduler()
    for tenant in tenants:
        made.shares.asked(tenant, 100.0, 0.0)
    return made


@pytest.mark.parametrize("done", [0.0, 0.25, 1.0])
def test_a_tenant_is_not_charged_for_what_was_left_undone(done):
    made, fresh = crowded("a", "b"), crowded("a", "b")
    waiting(made, ticket(100, tenant="a"))
    gone = waiting(made, ticket(1000, tenant="a"))[0]
    made.begun(gone, Work(int(1000 * done)))
    made.left(gone, [], 0.0)
    made.left(gone, [], 0.0)  # once
    waiting(fresh, ticket(100 + int(1000 * done), tenant="a"))
    dues = [waiting(each, ticket(100, tenant="a"))[0].due for each in (made, fresh)]
    assert dues[0] == pytest.approx(dues[1], rel=1e-3)


def test_no_more_comes_back_than_was_set_aside():
    made, fresh = crowded("a", "b"), crowded("a", "b")
    for each in (made, fresh):
        waiting(each, ticket(1000, tenant="a"))
    gone = waiting(made, ticket(100, tenant="a"))[0]
    gone.work = Work(5000)  # its prefix left the cache while it waited
    made.estimate(gone)
    made.left(gone, [], 0.0)
    made.left(ticket(10, tenant="who never came"), [], 0.0)
    dues = [waiting(each, ticket(100, tenant="a"))[0].due for each in (made, fresh)]
    assert dues[0] == pytest.approx(dues[1], rel=1e-3)


def test_what_was_computed_beyond_what_was_set_aside_is_charged():
    """It paid for items of others who went."""
    made, fresh = crowded("a", "b"), crowded("a", "b")
    one = waiting(made, ticket(100, tenant="a"))[0]
    made.begun(one, Work(300))
    made.left(one, [], 0.0)
    waiting(fresh, ticket(300, tenant="a"))
    dues = [waiting(each, ticket(100, tenant="a"))[0].due for each in (made, fresh)]
    assert dues[0] == pytest.approx(dues[1], rel=1e-3)


def test_what_came_while_nobody_else_asked_gives_nothing_back_of_later_ones():
    """Each of those was promised the whole device, and moved its tenant's time no further than the one before."""
    made = scheduler()
    old = waiting(made, *(ticket(1000, tenant="a") for _ in range(20)))
    waiting(made, ticket(1000, tenant="b"))
    new = waiting(made, *(ticket(1000, tenant="a") for _ in range(5)))
    while old:
        made.left(old.pop(), [*old, *new], 0.0)
    assert made._promised.until["a"] == pytest.approx(sum(one.owed for one in new))
    assert waiting(made, ticket(1000, tenant="a"))[0].due > max(one.due for one in new)


def test_what_is_past_comes_back_to_nobody():
    made = crowded("a", "b")
    old = waiting(made, *(ticket(1000, tenant="a") for _ in range(5)))
    made.shares.asked("b", 1000.0, 60.0)
    new = waiting(made, *(ticket(1000, tenant="a", submitted=60.0) for _ in range(3)))
    while old:
        made.left(old.pop(), [*old, *new], 60.0)
    assert made._promised.until["a"] == pytest.approx(60.0 + sum(one.owed for one in new))


# --- what tenants asked for


def test_what_was_asked_fades_and_is_forgotten():
    shares = FairShares()
    shares.asked("a", 0.3 * MEMORY_SECONDS, 10.0)
    assert shares.share("b", 10.0) == pytest.approx(0.7)
    assert shares.share("b", 9.0) == pytest.approx(0.7), "time does not run backwards"
    later = 10.0 + MEMORY_SECONDS / 2
    assert shares.share("b", later) == pytest.approx(1 - 0.3 * math.exp(-0.5))
    shares.asked("a", 0.2 * MEMORY_SECONDS, later)
    assert shares.share("b", later) == pytest.approx(1 - 0.3 * math.exp(-0.5) - 0.2)
    assert shares.share("b", later + 30 * MEMORY_SECONDS) == 1.0
    assert not shares._demand


def test_too_little_to_count_is_remembered_a_while():
    shares = FairShares()
    shares.asked("a", 0.5 * FORGOTTEN * MEMORY_SECONDS, 0.0)
    assert shares.share("b", 0.0) == 1.0
    shares.share("b", 1e-9)
    shares.asked("a", 0.7 * FORGOTTEN * MEMORY_SECONDS, 1e-9)
    assert shares.share("b", 1e-9) == pytest.approx(1 - 1.2 * FORGOTTEN)


def test_of_too_many_tenants_the_one_that_asked_least_is_forgotten():
    shares = FairShares()
    for number in range(MAX_TENANTS):
        shares.asked(str(number), 1.0 + (number != 7), 0.0)
    assert len(shares._demand) == MAX_TENANTS
    shares.asked("one more", 2.0, 0.0)
    assert len(shares._demand) == MAX_TENANTS
    assert "7" not in shares._demand


def test_who_asks_for_less_than_its_share_gets_it_first_whatever_it_weighs():
    """Weights 4, 1, 1: the first asks for 0.4 of 4/6, the second for 0.05, the third for all: it gets the rest."""
    shares = FairShares({"heavy": 4.0, "light": 0.5})
    shares.asked("heavy", 0.4 * MEMORY_SECONDS, 0.0)
    shares.asked("modest", 0.05 * MEMORY_SECONDS, 0.0)
    shares.asked("greedy", 5 * MEMORY_SECONDS, 0.0)
    assert shares.share("greedy", 0.0) == pytest.approx(0.55)
    assert shares.share("light", 0.0) == pytest.approx(0.55 * 0.5 / 1.5)
    assert shares.share("heavy", 0.0) == pytest.approx(0.95 * 4 / 5)


def test_who_asks_for_least_of_its_weight_gets_it_first():
    """Weights 4, 1, 1 and half of the device for the first: the second wants more than half of the rest."""
    shares = FairShares({"heavy": 4.0})
    shares.asked("heavy", 0.5 * MEMORY_SECONDS, 0.0)
    shares.asked("greedy", 0.3 * MEMORY_SECONDS, 0.0)
    assert shares.share("mine", 0.0) == pytest.approx(0.25)


# --- when a request is due


def test_who_has_half_of_the_device_is_due_in_twice_the_time_and_one_after_the_other():
    made = shared(now=10.0)
    for place in range(3):
        asked = ticket(100, tenant="a", submitted=10.0)
        made.admit(asked, [], 10.0, 10.0)
        assert asked.due == pytest.approx(10.0 + place * 0.1 / 0.5 + STRETCH * 0.1 / 0.5 + PATIENCE)


def test_with_its_deadline_just_in_reach_it_is_not_beyond_hope():
    one = ticket(1, deadline=7.0)
    one.seconds = 2.0
    assert not one.hopeless(5.0)
    assert one.hopeless(5.0 + 1e-9)


def test_the_longer_the_deadline_the_more_of_a_share_there_is():
    room = 0.5 * SHARE_FILL * (1 - CLASS_RESERVE[0]) * 4.0
    made = shared()
    queue = waiting(made, ticket(100, 9.0, "a"))
    with pytest.raises(OverShare):
        made.admit(ticket(int(1000 * room) - 99, 4.0, "a"), queue, 0.0, 0.0)
    made.admit(ticket(int(1000 * room) - 101, 4.0, "a"), queue, 0.0, 0.0)


def test_one_that_is_late_anyway_and_stands_before_the_new_one_refuses_nobody():
    """It would have been in time a while ago, and ends after its deadline whether the new one comes or not."""
    made = scheduler()
    late = ticket(400, 0.45, partial=True, priority=1)
    made.admit(late, [], 0.0, 0.0)
    late.partial = False
    made.admit(ticket(10, 9.0), [late], 0.0, 0.0)


def test_who_would_be_in_time_without_the_new_one_is_not_made_late_by_it():
    """It ends after 125 ms, its deadline is at 150 ms: what stands before it may take 25 ms, and would take 125."""
    made = scheduler()
    queue = waiting(made, ticket(100, 0.15, priority=1))
    with pytest.raises(CannotFinish, match=r"^a request that was accepted before would miss its deadline$"):
        made.admit(ticket(100, 0.14, priority=1), queue, 0.0, 0.0)


def test_what_tenants_were_promised_is_forgotten_once_it_is_over_where_they_are_many():
    made = shared(now=6.0)
    made._promised.until = {str(tenant): 5.0 + 2.0 * (tenant == 3) for tenant in range(MAX_TENANTS + 1)}
    made.admit(ticket(100, tenant="a", submitted=6.0), [], 6.0, 6.0)
    assert made._promised.until == {"3": 7.0, "a": pytest.approx(6.0 + 0.1 / 0.5)}
