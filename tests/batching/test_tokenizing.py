"""Whose text is tokenized next and what stands before a newcomer, over numbers and a clock that the test holds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.scheduler import DISTANT, PATIENCE, PRIORITY_SECONDS, STRETCH, Ticket
from batching.tokenizing import BESIDE_BYTES, LARGE_BYTES, MEMORY, TextQueue

LARGE = LARGE_BYTES + 1


def queue(threads=2, seconds_per_byte=1e-6):
    """Of threads that are known to take a microsecond a byte."""
    made = TextQueue(threads)
    if seconds_per_byte:
        text = added(made, 1000)
        assert made.take(0.0) is text
        made.ended(text, (1000 + BESIDE_BYTES) * seconds_per_byte)
    return made


def ticket(submitted=0.0, deadline=None, tenant="", priority=0, partial=False):
    return Ticket(tenant, priority, submitted, deadline, partial)


def added(made, size, now=0.0, **who):
    text = made.look(ticket(now, **who), size, 1 << 20, now)
    made.add(text, now)
    return text


def taken(made, count, now=0.0):
    """The next ones, each ended before the next is taken."""
    order = []
    for _ in range(count):
        order.append(made.take(now))
        made.ended(order[-1], None)
    return order


def test_classes_then_deadlines_then_arrival():
    made = queue()
    late, soon = added(made, 10, deadline=0.9), added(made, 10, deadline=0.5)
    none, low, high = added(made, 10), added(made, 10, priority=-1), added(made, 10, priority=1)
    again = added(made, 10, 0.05)
    assert taken(made, 6) == [high, none, again, soon, late, low]


def test_what_cannot_be_in_time_any_more_goes_last():
    made = queue()
    hopeless, patient = added(made, 900_000, deadline=0.5), added(made, 10, deadline=0.8)
    part = added(made, 900_000, deadline=0.6, partial=True)
    assert taken(made, 3) == [part, patient, hopeless]


def test_what_waits_long_is_not_passed_for_ever():
    made = queue()
    old = added(made, 10, 0.0, priority=-1)
    now = 2 * PRIORITY_SECONDS + DISTANT
    added(made, 10, now, priority=1)
    assert made.take(now) is old


def test_a_deadline_that_has_come_is_never_begun():
    made = queue()
    late, other = added(made, 10, deadline=0.2), added(made, 10, deadline=5.0)
    assert made.take(0.2) is other
    assert made.take(0.2) is None
    assert made.bytes == 20, "it counts until the one who waits for it goes"
    made.give_up(late, 0.2)
    assert made.bytes == 10


def test_tenants_have_their_turns():
    made = queue()
    many = [added(made, 100_000, tenant="many") for _ in range(20)]
    one = added(made, 100_000, tenant="one")
    order = taken(made, 21)
    assert order.index(one) < 6
    assert [text for text in order if text is not one] == many
    turns = [added(made, 100_000, tenant=tenant) for tenant in "ab" * 10]
    assert taken(made, 20) == turns, "one of each"


SIZE = 100_000 - BESIDE_BYTES  # a tenth of a second


def test_a_tenants_next_text_is_due_behind_its_last_as_fast_as_its_share_is():
    made = queue()
    alone = [added(made, SIZE, 3.0, tenant="a").ticket.due - 3.0 for _ in range(3)]
    assert alone == pytest.approx([STRETCH * 0.1 + PATIENCE + n * 0.1 for n in range(3)])
    other = [added(made, SIZE, 3.0, tenant="b").ticket.due - 3.0 for _ in range(3)]
    assert other == pytest.approx([STRETCH * 0.2 + PATIENCE + n * 0.2 for n in range(3)])
    again = added(made, SIZE, 3.0, deadline=99.0, tenant="b")
    assert again.ticket.due == pytest.approx(3.0 + 0.6 + STRETCH * 0.2 + DISTANT)


def test_short_ones_that_come_a_little_later_pass_a_long_one():
    made = queue()
    long = added(made, 1_000_000)
    short, later = added(made, 1000, 3.0, tenant="b"), added(made, 1000, 5.0, tenant="b")
    assert taken(made, 3, 5.0) == [short, long, later]


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_large_ones_have_all_threads_but_one(threads):
    made = queue(threads)
    large = [added(made, LARGE) for _ in range(threads)]
    assert [made.take(0.0) for _ in range(threads)] == [*large[:-1], None]


def test_large_ones_leave_a_thread_to_small_ones():
    made = queue()
    large = [added(made, LARGE, deadline=9.0) for _ in range(3)]
    assert made.take(0.0) is large[0]
    assert made.take(0.0) is None
    small = added(made, LARGE_BYTES, deadline=99.0)
    assert made.take(0.0) is small
    made.ended(small, None)
    assert made.take(0.0) is None
    made.ended(large[0], None)
    assert made.take(0.0) is large[1]


def test_one_thread_takes_all_of_them():
    made = queue(threads=1)
    large = added(made, LARGE)
    assert made.take(0.0) is large


def test_what_a_byte_takes_is_learned_by_bytes():
    made = TextQueue(2)
    assert made.seconds_per_byte == 0.0
    for size, seconds in ((100, 0.001), (1_000_000, 0.5)):
        text = added(made, size)
        made.take(3.0)
        made.ended(text, 3.0 + seconds)
    assert made.seconds_per_byte == pytest.approx(0.5e-6, rel=0.01)
    ended_badly = added(made, 1_000_000)
    made.take(4.0)
    made.ended(ended_badly, None)
    assert made.seconds_per_byte == pytest.approx(0.5e-6, rel=0.01)


def test_what_a_byte_took_is_forgotten_text_by_text():
    made = TextQueue(2)
    for rate, texts in ((1e-6, 1000), (1e-5, int(MEMORY))):
        for _ in range(texts):
            text = added(made, SIZE)
            made.take(3.0)
            made.ended(text, 3.0 + 100_000 * rate)
    assert made.seconds_per_byte == pytest.approx(1e-6 + 9e-6 * (1 - (1 - 1 / MEMORY) ** MEMORY))


def test_many_short_ones_do_not_make_a_long_one_look_hopeless():
    """A tenth of a millisecond each, and a megabyte a second: what a text takes beside its bytes is no byte's."""
    made = queue()
    for _ in range(1000):
        text = added(made, 100)
        made.take(0.0)
        made.ended(text, 2e-4)
    assert made.look(ticket(), 1 << 20, 9, 0.0).ticket.seconds < 1.0
    long = added(made, 500_000)
    made.take(0.0)
    made.ended(long, 0.5)
    assert made.look(ticket(), 1 << 20, 9, 0.0).ticket.seconds == pytest.approx(1.0, rel=0.1)


def test_a_tenant_is_not_charged_for_what_it_gave_up():
    made = queue(threads=1)
    other, first = added(made, 10, tenant="b"), added(made, 10, tenant="a")
    for text in [added(made, 1_000_000, tenant="a") for _ in range(60)]:
        made.give_up(text, 0.0)
    second = added(made, 10, tenant="a")
    later = added(made, 10, 0.1, tenant="b")
    assert taken(made, 4) == [other, first, second, later]


@given(
    st.lists(st.tuples(st.integers(0, 1_000_000), st.sampled_from("ab"), st.booleans(), st.floats(0, 2)), max_size=20)
)
def test_what_is_given_up_brings_back_neither_the_past_nor_what_others_wait_for(texts):
    made, now, waiting = queue(), 0.0, []
    for size, tenant, goes, later in texts:
        waiting.append(added(made, size, now, tenant=tenant))
        now += later
        if goes:
            gone = waiting.pop(0)
            before = made._promised.until[gone.ticket.tenant]
            made.give_up(gone, now)
            mine = [text.ticket.owed for text in waiting if text.ticket.tenant == gone.ticket.tenant]
            after = made._promised.until[gone.ticket.tenant] if mine else math.inf
            assert after >= min(max(before, now), now + sum(mine)) - 1e-9
            assert not mine or after >= now


def test_what_a_thread_has_is_charged_though_nobody_waits_for_it():
    made = queue(threads=1)
    running = added(made, 1_000_000, tenant="a")
    made.take(0.0)
    added(made, 10, tenant="b")
    made.give_up(running, 0.0)
    assert added(made, 10, tenant="a").ticket.due > 1.0


def test_what_stands_before_a_small_one():
    made = queue()
    running = added(made, 400_000, deadline=5.0)
    made.take(0.0)
    before, behind = added(made, 300_000, deadline=0.5), added(made, 200_000, deadline=0.9)
    added(made, LARGE, deadline=0.1)
    new = made.look(ticket(0.1, 0.6), 50_000, 77, 0.1)
    ahead = made.ahead(new, 0.1)
    assert ahead.most_tokens == 77
    assert sorted(size for size, _ in ahead.sizes) == [before.size, running.size]
    beside = BESIDE_BYTES * 1e-6
    assert ahead.seconds == pytest.approx((0.3 + 0.3 + 2 * beside) / 2 + 0.05 + beside)
    assert behind.size not in dict(ahead.sizes)


def test_of_equals_the_first_stands_before_the_second():
    made = queue()
    first = added(made, 10, 2.0, deadline=2.5)
    assert made.ahead(made.look(ticket(2.0, 2.5), 20, 9, 2.0), 2.0).sizes == ((first.size, first.most_tokens),)


def test_what_a_thread_has_done_already_is_not_waited_for():
    made = queue()
    added(made, SIZE, 7.0)
    made.take(7.0)
    for now, left in ((7.0, 0.1), (7.06, 0.04), (9.0, 0.0)):
        new = made.look(ticket(now), SIZE, 9, now)
        assert made.ahead(new, now).seconds == pytest.approx(left / 2 + 0.1)


def test_what_stands_before_a_large_one():
    made = queue()
    running, small = added(made, 2 * LARGE, deadline=5.0), added(made, 1000, deadline=0.5)
    assert made.take(0.0) is small
    made.give_up(small, 0.1)  # a thread has it: it goes on
    assert made.take(0.0) is running
    ahead = made.ahead(made.look(ticket(0.1, 0.9), 3 * LARGE, 9, 0.1), 0.1)
    assert sorted(size for size, _ in ahead.sizes) == [small.size, running.size]
    assert ahead.seconds == pytest.approx((5 * LARGE + 2 * BESIDE_BYTES) * 1e-6 - 0.1), "one large one after the other"


STEPS = st.tuples(
    st.sampled_from(["add", "add", "take", "end", "give up", "wait"]),
    st.sampled_from([0, 10, 5000, LARGE_BYTES, LARGE, 50 << 20]),
    st.sampled_from([None, 0.001, 0.5, 3.0, 1e6]),
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from([-1, 0, 1]),
)


@given(st.integers(1, 4), st.lists(STEPS, max_size=60))
def test_nothing_is_lost_begun_twice_or_begun_late(threads, steps):
    made, now = TextQueue(threads), 0.0
    waiting, running = [], []
    for do, size, patience, tenant, priority in steps:
        if do == "add":
            deadline = None if patience is None else now + patience
            waiting.append(added(made, size, now, deadline=deadline, tenant=tenant, priority=priority))
        elif do == "take" and len(running) < threads:
            text = made.take(now)
            able = [t for t in waiting if t.ticket.deadline is None or now < t.ticket.deadline]
            if sum(t.large for t in running) >= max(1, threads - 1):
                able = [t for t in able if not t.large]
            assert (text is None) == (not able)
            if text is not None:
                assert text in able
                waiting.remove(text)
                running.append(text)
        elif do == "end" and running:
            made.ended(running.pop(0), now)
        elif do == "give up" and waiting:
            made.give_up(waiting.pop(), now)
        else:
            now += 0.3
        assert made.bytes == sum(t.size for t in (*waiting, *running))
        assert all(size >= 0 for size, _ in made.ahead(made.look(ticket(now, now + 1.0), 10, 9, now), now).sizes)
    for text in waiting:
        made.give_up(text, now)
    for text in running:
        made.ended(text, now)
    assert (made.bytes, made._waiting, made._running, dict(made._tenants), made._promised.until) == (0, {}, {}, {}, {})
