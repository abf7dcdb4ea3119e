"""Whose beam search has its turn, gets pages and is let in, over numbers and a clock that the test holds."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.errors import CannotFinish, NotAdmitted, OverShare, QueueFull
from batching.pass_time import Work
from batching.scheduler import CLASS_RESERVE, OPTIMISM, PRIORITY_SECONDS, Ticket
from batching.searches import Searches, SearchTicket
from batching.shares import FairShares

LOW, NORMAL, HIGH = -1, 0, 1
TURN = 0.01
TURNS = 6.0  # a turn of a tenant that uses three classes counts as three: its own and the one before it


class PerStep:
    """A step takes ten milliseconds, whatever it computes."""

    margin = 1.0

    def __init__(self, known=True):
        self.known, self.learned = known, []

    def share(self, work, pass_tokens):
        return work.tokens / pass_tokens / 100

    def learn(self, work, seconds):
        self.learned.append((work, seconds))


def searches(places=64, pages=100, weights=None, known=True):
    return Searches(places, pages, FairShares(weights), PerStep(known))


def search(steps, tenant="", priority=NORMAL, at=0.0, deadline=None, pages=1, beams=4, certain=True):
    return SearchTicket(Ticket(tenant, priority, at, deadline), beams, steps, 20, pages, certain)


def let_in(made, *asked, now=0.0):
    """Those that were."""
    admitted = []
    for one in asked:
        try:
            made.admit(one, now)
        except NotAdmitted:
            continue
        admitted.append(one)
    return admitted


class World:
    """A device that gives turns of one step, one after the other, to whoever has pages and steps left."""

    def __init__(self, made):
        self.made, self.now = made, 0.0
        self.coming, self.waiting, self.running = [], [], []
        self.got, self.ended = {}, {}

    def run(self, *coming, until=1e9):
        """Searches that come when they were submitted, until all are done."""
        self.coming += sorted(coming, key=lambda one: one.ticket.submitted)
        while self.coming or self.waiting or self.running:
            self._arrive()
            while (one := self.made.next_pages(self.waiting, self.now)) is not None:
                self.made.hold(one)
                self.waiting.remove(one)
                self.running.append(one)
            if self.now >= until:
                break
            if self.running:
                self._turn(self.made.next_turn(self.running, self.now))
            self.now += TURN
        return self.ended

    def _arrive(self):
        while self.coming and self.coming[0].ticket.submitted <= self.now:
            self.made.admit(self.coming[0], self.now)
            self.waiting.append(self.coming.pop(0))

    def _turn(self, one):
        self.made.ran(one, 1, TURN)
        self.got[one.ticket.tenant] = self.got.get(one.ticket.tenant, 0) + 1
        if one.taken == one.steps:
            self.running.remove(one)
            self.made.leave(one, whole=True)
            self.ended[one] = self.now


@pytest.mark.parametrize("tenant", ["flood", "other"])
@pytest.mark.parametrize("at", [0.0, 3.0, 60.0])
def test_a_small_search_of_a_higher_class_does_not_wait_for_long_ones(tenant, at):
    """Its own tenant's nor another's, also once these have waited for long."""
    flood = [search(1000, "flood", LOW, pages=45) for _ in range(20)]
    small = search(5, tenant, HIGH, at)
    ended = World(searches()).run(*flood, small, until=at + 2)
    assert ended[small] - at < 10 * TURN


@pytest.mark.parametrize("priority", [LOW, NORMAL, HIGH])
def test_another_tenant_of_the_same_class_has_its_half(priority):
    flood = [search(1000, "flood", priority, pages=45) for _ in range(20)]
    other = search(50, "other", priority, at=20.0)
    ended = World(searches()).run(*flood, other, until=30.0)
    assert ended[other] - 20.0 == pytest.approx(100 * TURN, abs=3 * TURN)


@pytest.mark.parametrize(("weights", "part"), [({}, 0.5), ({"a": 3.0}, 0.75)])
@pytest.mark.parametrize("classes", [(NORMAL,), (LOW, NORMAL, HIGH)])
def test_tenants_get_their_shares_however_many_searches_and_classes_they_use(weights, part, classes):
    mine = [search(100_000, "a", NORMAL)]
    others = [search(100_000, "b", priority) for priority in classes for _ in range(4)]
    world = World(searches(weights=weights))
    world.run(*mine, *others, until=400.0)
    leads = 2 * PRIORITY_SECONDS / TURN  # that a higher class had before
    assert abs(world.got["a"] - part * 400 / TURN) <= leads


@pytest.mark.parametrize(("high", "low"), [("a", "b"), ("a", "a")])
def test_a_class_has_its_lead_once(high, low):
    first, second = search(100_000, high, HIGH), search(100_000, low, LOW)
    world = World(searches())
    world.run(first, second, until=9.0)
    assert second.taken == 0 < first.taken
    world.run(until=80.0)
    ahead = 2 * PRIORITY_SECONDS / TURN  # of one tenant's own classes each counts for both
    assert first.taken - second.taken == pytest.approx(ahead if high != low else ahead / 2, abs=2)


def test_a_long_search_of_the_lowest_class_is_not_starved():
    """Two tenants ask for all of the device, in short searches of the highest class."""
    short = [search(10, f"t{n % 2}", HIGH, at=0.1 * n) for n in range(1500)]
    long = search(1000, "t0", LOW)
    ended = World(searches(places=2000, pages=3000)).run(*short, long)
    assert ended[long] < 100.0


def test_a_search_that_needs_nearly_all_pages_is_not_starved():
    short = [search(10, "a", NORMAL, at=0.05 * n, pages=10) for n in range(300)]
    big = search(10, "b", NORMAL, at=1.0, pages=95)
    ended = World(searches(places=4000)).run(*short, big, until=15.0)
    assert ended[big] < 5.0


def test_within_a_flow_what_is_due_first_goes_first():
    long, short = search(1000), search(10, at=1.0)
    urgent = search(300, at=1.0, deadline=6.0)
    ended = World(searches()).run(long, short, urgent)
    assert ended[short] < ended[urgent] <= 6.0 < ended[long]


def test_nobody_saves_turns_up():
    """A tenant that was away has half from now on, and no more."""
    world = World(searches())
    one, other = search(100_000, "one"), search(100_000, "other", at=100.0)
    world.run(one, other, until=120.0)
    assert world.got["other"] == pytest.approx(10 / TURN, abs=2)


def turns(made, waiting, count):
    """How many each of those that wait gets."""
    got = Counter()
    for _ in range(count):
        one = made.next_turn(waiting, 0.0)
        made.ran(one, 1, TURN)
        got[one] += 1
    return [got[one] for one in waiting]


def test_of_who_has_left_nothing_is_kept():
    made = searches()
    stays = search(10_000, "stays", LOW)
    made.admit(stays, 0.0)
    for n in range(500):
        one = search(1, f"t{n}")
        made.admit(one, 0.0)
        turns(made, [stays, one], 1)
        made.leave(one, whole=True)
        assert set(made._got) == {stays.flow} >= made._wanted
    made.leave(stays, whole=False)
    assert (len(made), made._got, made._wanted) == (0, {}, set())


def test_what_was_got_before_all_was_idle_counts_no_more():
    made = searches()
    old, other = search(10_000, "a"), search(10_000, "waits for pages", pages=100)
    let_in(made, old, other)
    turns(made, [old], 6000)
    for one in (old, other):
        made.leave(one, whole=True)
    again = search(100, "a"), search(100, "b")
    let_in(made, *again)
    assert turns(made, again, 100) == [50, 50]


@pytest.mark.parametrize("name", ["same", "fresh {}"])
@pytest.mark.parametrize("steps", [10, 500, 1500])
@pytest.mark.parametrize("priority", [NORMAL, HIGH])
def test_searches_of_higher_classes_one_after_the_other_take_no_more_than_their_half(priority, steps, name):
    """And what their class is before it, whoever's they are."""
    made, low = searches(), search(100_000, "low", LOW)
    made.admit(low, 0.0)
    count = 20_000
    while count:
        one = search(steps, name.format(count), priority)
        made.admit(one, 0.0)
        while one.taken < one.steps and count:
            turns(made, [low, one], 1)
            count -= 1
        made.leave(one, whole=True)
    lead = (priority - LOW) * PRIORITY_SECONDS / TURN
    assert 10_000 - lead - 2 <= low.taken <= 10_000 + 2


@pytest.mark.parametrize("beside", [[], [search(10_000, "low", LOW)], [search(10_000, "high", HIGH)]])
@pytest.mark.parametrize("waits", [False, True])
def test_one_that_comes_has_turns_with_those_of_its_class(beside, waits):
    """Whoever of another class is under way, or waits for pages. Only what waited for a higher one goes before it."""
    made = searches()
    old, new, third = search(10_000, "old"), search(10_000, "new"), search(1, "third", LOW, pages=100)
    let_in(made, old, *beside, *([third] if waits else []))
    turns(made, [old, *beside], 900)
    made.admit(new, 0.0)
    got = turns(made, [old, new, *beside], 900)
    assert got[1] <= got[0] + 1
    assert got[0] <= got[1] + 1 or HIGH in (one.ticket.priority for one in beside)


def test_who_had_no_use_for_turns_has_saved_none():
    """It held its pages, and waited for its prompt."""
    made = searches()
    one, other = search(10_000, "one"), search(10_000, "other")
    let_in(made, one, other)
    turns(made, [one, other], 2)
    turns(made, [one], 1000)
    assert turns(made, [one, other], 100) == [50, 50]


def test_what_lacks_pages_is_not_passed_for_ever_by_others_that_come():
    """Normal ones of ever new tenants, which always find the pages that they want."""
    short = [search(26, f"t{n}", at=0.25 * n, pages=30) for n in range(400)]
    big = search(10, "big", LOW, at=1.0, pages=80)
    ended = World(searches(places=1000)).run(*short, big, until=100.0)
    assert ended[big] < 1.0 + 4 * PRIORITY_SECONDS


EVENTS = st.tuples(
    st.sampled_from(["come", "come", "away", "back", "leave"]),
    st.integers(0, 100),
    st.sampled_from(["fresh", "a", "b", "c"]),
    st.sampled_from([LOW, NORMAL, HIGH]),
    st.integers(1, 80),
)


@given(st.lists(EVENTS, max_size=40), st.sampled_from([{}, {"a": 3.0}]))
def test_nobody_gets_much_less_or_more_than_its_share_whoever_comes(events, weights):
    """Since it began to wait: less by what the classes are apart, and some turns of a second; more likewise. Who comes
    beside others of its class begins where they are, which may be as far ahead as one class is before the next."""
    made, names = searches(places=1000, weights=weights), iter(range(1000))
    waiting, away, ahead = [], [], {}
    for do, which, tenant, priority, count in events:
        if do == "come":
            waiting.append(search(10**6, f"t{next(names)}" if tenant == "fresh" else tenant, priority))
            made.admit(waiting[-1], 0.0)
        elif do == "back" and away:
            waiting.append(away.pop(which % len(away)))
        elif waiting and do in ("away", "leave"):
            one = waiting.pop(which % len(waiting))
            away.append(one) if do == "away" else made.leave(one, whole=False)
        for _ in range(count if waiting else 0):
            one = made.next_turn(waiting, 0.0)
            made.ran(one, 1, 1.0)
            flows = {each.flow for each in waiting}
            classes = Counter(tenant for tenant, _ in flows)
            part = 1.0 / sum(weights.get(tenant, 1.0) for tenant in classes)
            ahead = {flow: ahead.get(flow, 0.0) - part for flow in flows}  # seconds over weight
            ahead[one.flow] += classes[one.ticket.tenant] / weights.get(one.ticket.tenant, 1.0)
            for (_, priority), lead in ahead.items():
                assert -3 * PRIORITY_SECONDS - TURNS <= lead <= (2 + priority) * PRIORITY_SECONDS + TURNS


def held(made, *asked, now=0.0):
    for one in let_in(made, *asked, now=now):
        made.hold(one)


def test_a_tenant_that_has_pages_leaves_some_to_others():
    made = searches()
    held(made, search(100, "a", pages=50))
    mine, other = search(100, "a", pages=40), search(100, "b", pages=40)
    small = search(100, "a", pages=20)
    let_in(made, mine, other, small)
    assert made.next_pages([mine], 0.0) is None, "ten would be left to others"
    assert made.next_pages([mine, small], 0.0) is small, "half of what was left is left"
    assert made.next_pages([mine, other], 0.0) is other


def test_half_of_what_is_left_is_enough_to_leave():
    made = searches()
    held(made, search(100, "a", pages=80))
    asked = [search(100, "a", pages=11), search(100, "a", pages=10)]
    let_in(made, *asked)
    assert made.next_pages(asked, 0.0) is asked[1]


def test_once_it_is_due_its_own_tenant_does_not_pass_a_search_that_leaves_others_too_little():
    made = searches()
    held(made, search(1000, "a", pages=50))
    big, small, other = search(100, "a", pages=40), search(100, "a", at=1.0), search(100, "b", at=1.0)
    let_in(made, big, small, other)
    assert made.next_pages([big, small], big.ticket.due - 1e-3) is small
    assert made.next_pages([big, small], big.ticket.due) is None
    assert made.next_pages([big, small, other], big.ticket.due) is other


def test_the_first_search_of_a_tenant_may_take_all_that_is_free():
    made = searches()
    one = search(100, "a", LOW, pages=100)
    let_in(made, one)
    assert made.next_pages([one], 0.0) is one


def test_once_it_is_due_nobody_passes_a_search_that_lacks_pages():
    made = searches()
    held(made, search(1000, "a", pages=30))
    big, small = search(100, "b", pages=80), search(100, "c", pages=5, at=1.0)
    let_in(made, big, small)
    assert made.next_pages([big, small], big.ticket.due - 1e-3) is small
    assert made.next_pages([big, small], big.ticket.due) is None
    urgent = search(100, "c", HIGH, pages=5)
    let_in(made, urgent)
    assert made.next_pages([big, small, urgent], big.ticket.due) is urgent, "what comes first anyway still may"


@pytest.mark.parametrize("priority", [LOW, NORMAL, HIGH])
def test_a_tenant_may_not_take_all_places(priority):
    made = searches(places=64)
    flood = let_in(made, *(search(100, "flood", priority) for _ in range(100)))
    assert len(flood) == 64 - int(64 * CLASS_RESERVE[priority])
    with pytest.raises(OverShare, match=rf"{len(flood)} beam searches of this tenant .* at most 64 of all"):
        made.admit(search(1, "flood", priority), 0.0)
    assert len(let_in(made, *(search(1, f"t{n}", LOW) for n in range(100)))) == 64 - len(flood)
    with pytest.raises(QueueFull, match="64 beam searches are under way: the limit is 64"):
        made.admit(search(1, "new", HIGH), 0.0)


def test_higher_classes_find_places_where_lower_ones_are_refused():
    made = searches(places=20)
    counts = [len(let_in(made, *(search(100, "", priority) for _ in range(30)))) for priority in (LOW, NORMAL, HIGH)]
    assert np.cumsum(counts).tolist() == [20 - int(20 * CLASS_RESERVE[priority]) for priority in (LOW, NORMAL, HIGH)]


def test_a_tenant_below_its_share_is_let_in_where_little_is_left():
    made = searches(places=20)
    let_in(made, *(search(100, "flood", HIGH) for _ in range(30)))
    assert len(let_in(made, *(search(1, "other", HIGH) for _ in range(30)))) == 2


def test_a_deadline_that_cannot_be_met_behind_others_is_refused():
    """Each takes a second; what is predicted may be twice what is."""
    made = searches()
    assert len(let_in(made, *(search(100, deadline=5.0) for _ in range(30)))) == 5 / OPTIMISM
    with pytest.raises(CannotFinish, match=r"hardly ends within 5\.500 s, its deadline is in 5\.000 s") as caught:
        made.admit(search(100, deadline=5.0), 0.0)
    assert caught.value.retry_after == pytest.approx(0.5)
    made.admit(search(100, "other", deadline=5.0), 0.0)
    made.admit(search(100, priority=HIGH, deadline=5.0), 0.0)
    with pytest.raises(CannotFinish):
        made.admit(search(1000, "other", HIGH, deadline=4.9), 0.0)


def test_others_who_end_soon_are_not_counted_for_longer():
    made = searches()
    let_in(made, search(10, "a"))
    made.admit(search(100, "b", deadline=0.6), 0.0)  # 0.1 s of theirs and its own second, at twice the speed


def test_a_deadline_before_pages_can_be_free_is_refused():
    made = searches()
    held(made, search(1000, "a", pages=60), search(2000, "a", pages=20))
    for pages, deadline in ((30, 4.0), (90, 14.0)):
        with pytest.raises(CannotFinish):
            made.admit(search(100, "b", pages=pages, deadline=deadline), 0.0)
        assert let_in(made, search(100, "b", pages=pages, deadline=deadline + 2.0))


def test_an_idle_service_and_one_that_cannot_tell_take_everything():
    searches().admit(search(1000, deadline=0.1), 0.0)
    made = searches(known=False)
    let_in(made, search(1000))
    made.admit(search(1000, deadline=0.1), 0.0)


def test_how_long_searches_are_is_learned_from_those_that_ended():
    made = searches()
    for _ in range(60):
        one = search(100, certain=False)
        made.admit(one, 0.0)
        made.ran(one, 5, 0.5, measured=False)
        made.ran(one, 5, 0.2)
        made.leave(one, whole=True)
    assert made._step_time.learned[-1] == (Work(4, 4 * 70.0), pytest.approx(0.04))
    short, whole = search(100, certain=False), search(100)
    let_in(made, short, whole)
    assert short.ticket.seconds == pytest.approx(0.1, rel=0.05)
    assert whole.ticket.seconds == pytest.approx(1.0)
    made.ran(whole, 40, 0.4)
    assert whole.ticket.seconds == pytest.approx(0.6)


def test_a_search_that_was_given_up_says_how_long_steps_take_and_nothing_of_their_number():
    made = searches()
    one = search(100, certain=False)
    made.admit(one, 0.0)
    made.ran(one, 1, 0.02)
    made.leave(one, whole=False)
    assert len(made._step_time.learned) == 1
    assert made._part == 1.0
    untouched = search(100)
    made.admit(untouched, 0.0)
    made.leave(untouched, whole=False)
    assert len(made._step_time.learned) == 1
