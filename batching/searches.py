"""Which beam search has the device next, who gets pages, and who is let in: policy over numbers. Pure; time is given.

Passes are shared when they are accepted, by what is predicted. A search may run for minutes and its end is not known
before, so searches are shared turn by turn, by what they got: a flow (a tenant's searches of one priority) goes first
that got least, and as far before a flow of the class below as passes do. Within a flow passes' own order counts.

The level is what a flow got that had no more and no less than its share of every turn. Who comes anew begins there, and
so does who had no use for the turn before: nobody saves up. Where all of its class are further, as a lower one waits,
it begins beside the nearest. As every turn raises the level, by its part of those who wanted that turn, whoever waits
is in front of all that come once it rose by what the classes are apart. Of what has left nothing is kept: a name that
returns is as a new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from batching.errors import CannotFinish, OverShare, QueueFull
from batching.pass_time import FittedPassTime, PassTime, Work
from batching.scheduler import CLASS_RESERVE, OPTIMISM, PRIORITY_SECONDS, STRETCH, Ticket, by_due, due_at
from batching.shares import FairShares

FORGETTING = 0.1  # of how many of their steps searches took, by each that ended

Flow = tuple[str, int]


@dataclass(slots=True, eq=False)
class SearchTicket:
    """One search as the policy sees it.

    ticket  its `seconds` are those left
    steps   at most; certain: it takes them all
    pages   that it holds from its beginning to its end
    taken   steps; measured, in spent: those of them, and the seconds, that tell how long steps take
    """

    ticket: Ticket
    beams: int
    steps: int
    prompt: int
    pages: int
    certain: bool = False
    taken: int = 0
    measured: int = 0
    spent: float = 0.0

    @property
    def flow(self) -> Flow:
        return self.ticket.tenant, self.ticket.priority

    @property
    def step(self) -> Work:
        """Of a step in the middle."""
        return Work(self.beams, self.beams * (self.prompt + self.steps / 2))


class Searches:
    """The searches under way. Whoever is admitted must `leave`."""

    def __init__(
        self, places: int, pages: int, shares: FairShares | None = None, step_time: PassTime | None = None
    ) -> None:
        """places: searches that may be under way. shares: for the tenants' weights."""
        self._places, self._pages = places, pages
        self._shares = shares or FairShares()
        self._step_time = step_time or FittedPassTime()
        self._part = 1.0  # of their steps that searches take which may end before
        self._under_way: dict[SearchTicket, None] = {}
        self._holding: dict[SearchTicket, None] = {}
        self._level = 0.0  # seconds of the device over weight,
        self._got: dict[Flow, float] = {}  # as what each flow under way got
        self._wanted: set[Flow] = set()  # the turn that was given last

    def __len__(self) -> int:
        return len(self._under_way)

    def admit(self, new: SearchTicket, now: float) -> None:
        """Gives the search a place, or refuses. Raises NotAdmitted."""
        ticket = new.ticket
        self._estimate(new)
        ticket.due = due_at(now + ticket.seconds * STRETCH, ticket.deadline)
        self._check_places(ticket)
        self._check_deadline(new, now)
        self._under_way[new] = None
        self._got.setdefault(new.flow, self._level)

    def leave(self, search: SearchTicket, whole: bool) -> None:
        """Its place and pages are free. whole: it ran to its end."""
        self._under_way.pop(search, None)
        self._holding.pop(search, None)
        if all(other.flow != search.flow for other in self._under_way):
            self._got.pop(search.flow, None)
            self._wanted.discard(search.flow)
        if search.measured:
            self._step_time.learn(search.step, search.spent / search.measured)
        if whole and not search.certain:
            self._part += FORGETTING * (search.taken / search.steps - self._part)

    def next_turn(self, waiting: Iterable[SearchTicket], now: float) -> SearchTicket:
        """Whose turn is next, of those that wait for it: all that could use it."""
        waiting = list(waiting)
        wanted = {search.flow for search in waiting}
        stayed = wanted & self._wanted
        for tenant, priority in wanted - stayed:
            least = min((self._got[flow] for flow in stayed if flow[1] == priority), default=self._level)
            self._got[tenant, priority] = max(self._got[tenant, priority], self._level, least)
        self._wanted = wanted
        return min(waiting, key=lambda search: self._rank(search, now))

    def next_pages(self, waiting: Iterable[SearchTicket], now: float) -> SearchTicket | None:
        """Who gets pages now. A search for which there are not enough yet is passed by others until it is due. A flow
        that has none yet stays at the level at which it came, so that those who come later are behind it."""
        held = self._held()
        kept_back: set[str] = set()
        for search in sorted(waiting, key=lambda search: self._rank(search, now)):
            if search.ticket.tenant in kept_back:
                continue
            if self._room(search.ticket, search.pages, held, self._pages, left=0.5):
                return search
            if now >= search.ticket.due:
                if search.pages > self._pages - held.total():
                    return None
                kept_back.add(search.ticket.tenant)
        return None

    def hold(self, search: SearchTicket) -> None:
        """It has its pages."""
        self._holding[search] = None

    def ran(self, search: SearchTicket, steps: int, seconds: float, measured: bool = True) -> None:
        """A search had a turn. measured: of nothing but its steps."""
        search.taken += steps
        if measured:
            search.measured, search.spent = search.measured + steps, search.spent + seconds
        self._estimate(search)
        tenants = Counter(tenant for tenant, _ in self._wanted | {search.flow})
        tenant = search.ticket.tenant
        classes = tenants[tenant]  # so that a tenant gets no more by asking in several
        self._got[search.flow] = self._so_far(search.flow) + seconds * classes / self._shares.weight(tenant)
        self._level += seconds / sum(map(self._shares.weight, tenants))

    def _so_far(self, flow: Flow) -> float:
        return self._got.get(flow, self._level)

    def _rank(self, search: SearchTicket, now: float) -> tuple[float, ...]:
        lead = PRIORITY_SECONDS * search.ticket.priority
        return (self._so_far(search.flow) - lead, *by_due(search.ticket, now))

    def _estimate(self, search: SearchTicket) -> None:
        steps = search.steps * (1.0 if search.certain else self._part)
        search.ticket.seconds = max(1.0, steps - search.taken) * self._step_time.share(search.step, search.beams)

    def _room(self, ticket: Ticket, count: int, held: Counter[str], total: int, left: float = 1.0) -> bool:
        """Whether so many more of something are there for it. A tenant that has some already leaves to others what its
        class leaves them at admission (or this part of what is left now), or has no more than its share of the rest."""
        mine, free = held[ticket.tenant], total - held.total()
        if count > free:
            return False
        kept_free = min(int(CLASS_RESERVE[ticket.priority] * total), int(left * free))
        share = self._share(ticket.tenant, held)
        return not mine or free - count >= kept_free or mine + count <= share * (total - kept_free)

    def _share(self, tenant: str, others: Iterable[str]) -> float:
        return self._shares.weight(tenant) / sum(map(self._shares.weight, {tenant, *others}))

    def _held(self) -> Counter[str]:
        held: Counter[str] = Counter()
        for search in self._holding:
            held[search.ticket.tenant] += search.pages
        return held

    def _check_places(self, new: Ticket) -> None:
        held = Counter(search.ticket.tenant for search in self._under_way)
        again = min((search.ticket.seconds for search in self._under_way), default=0.0)
        if held.total() >= self._places:
            raise QueueFull(f"{held.total()} beam searches are under way: the limit is {self._places}", again)
        if not self._room(new, 1, held, self._places):
            told = f"{held[new.tenant]} beam searches of this tenant are under way, of at most {self._places} of all"
            raise OverShare(f"{told}: its priority leaves the rest to others", again)

    def _check_deadline(self, new: SearchTicket, now: float) -> None:
        """An idle service takes whatever a search may ask, and so does one that cannot tell yet."""
        deadline = new.ticket.deadline
        if deadline is None or not self._under_way or not self._step_time.known:
            return
        least = OPTIMISM * max(self._turns(new, now), self._until_pages(new) + new.ticket.seconds)
        if now + least > deadline:
            told = (
                f"behind those under way it hardly ends within {least:.3f} s, its deadline is in {deadline - now:.3f} s"
            )
            raise CannotFinish(told, now + least - deadline)

    def _turns(self, new: SearchTicket, now: float) -> float:
        """Seconds until it had all its turns: behind its tenant's that come first, while others have their shares."""
        tenant, rank = new.ticket.tenant, self._rank(new, now)
        mine = others = 0.0
        for search in self._under_way:
            if search.ticket.tenant != tenant:
                others += search.ticket.seconds
            elif self._rank(search, now) <= rank:
                mine += search.ticket.seconds
        mine += new.ticket.seconds
        share = self._share(tenant, {search.ticket.tenant for search in self._under_way})
        return min(mine / share, mine + others)

    def _until_pages(self, new: SearchTicket) -> float:
        """Seconds until enough of those that hold pages have ended, the nearest to their ends first."""
        free, seconds = self._pages - self._held().total(), 0.0
        for search in sorted(self._holding, key=lambda search: search.ticket.seconds):
            if new.pages <= free:
                break
            free, seconds = free + search.pages, seconds + search.ticket.seconds
        return seconds
