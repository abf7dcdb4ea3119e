"""Whose turn it is, who is let in, and how long a batch stays open: policy over numbers. Pure; time is given.

A ticket stands for one accepted request. When it is due is fixed as it is accepted, so that what comes later is due
later, and passes it no more: that is the ageing. A promise made to a caller (its deadline) is tested whenever
another one wants in, by walking through the queue in its own order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batching.errors import CannotFinish, OverShare, QueueFull
from batching.pass_time import PassTime, Work
from batching.promises import Promises
from batching.shares import MAX_TENANTS, FairShares

PRIORITY_SECONDS = 10.0  # how much earlier a class has its turn than the class below it
STRETCH = 4.0  # a request without a deadline is due after so many times what it takes alone,
PATIENCE = 0.05  # and so many seconds;
DISTANT = 1.0  # one with a distant deadline after so many
FAR = 1e9  # seconds: turns that are further away than this are equal
TIE_SECONDS = 0.002  # deadlines that are nearer than this are equal: the shorter job goes first
PROMISE_RESERVE = 0.05  # part of an accepted request's patience that stays free, as predictions are never exact
SHARE_FILL = 0.85  # part of its share that a tenant may fill while others ask too: arrivals are never even
MEMORY_BYTES = 1 << 18  # over which tokens of a byte are remembered: short requests, mostly template, say little
OPTIMISM = 0.5  # an estimate from bytes may be wrong: only what twice as fast a device could not do is refused by it
# gRPC sends a timeout rounded up by as much as a hundredth: the caller gives up that much before our deadline comes.
# The hundredth is of the whole, of which a part is over already: so much of what is left, and so many seconds at least.
CALLERS_CLOCK, CALLERS_CLOCK_SECONDS = 0.02, 0.01
CLASS_RESERVE = {-1: 0.4, 0: 0.25, 1: 0.1}  # part of its patience that a class leaves to others at admission


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks, before it is known what for. priority: class; partial: at the deadline it takes what is scored."""

    tenant: str = ""
    priority: int = 0
    partial: bool = False


class TextsAhead(NamedTuple):
    """What a request waits for until it is tokenized.

    most_tokens  that it may have itself, whatever its bytes
    sizes        (bytes, most tokens) of each text that comes to the device before it
    seconds      until it is tokenized itself
    """

    most_tokens: float = math.inf
    sizes: tuple[tuple[int, float], ...] = ()
    seconds: float = 0.0


NOTHING_AHEAD = TextsAhead()


@dataclass(slots=True, eq=False)
class Ticket:
    """One request as the scheduler sees it.

    deadline   in the clock's seconds; None: whenever it is done
    partial    at its deadline it takes what is scored, so it is never beyond hope
    work       what is still to be computed, made again each tick
    seconds    what that takes, predicted, but for the part that is running
    owed       seconds of its tenant's share that were set aside for it; share: the part of the device that this was
    spent      seconds of the device, predicted, of the passes that had a part of it
    due        by when it should be done: its deadline, or earlier; with `seconds` it gives the order
    """

    tenant: str
    priority: int
    submitted: float
    deadline: float | None = None
    partial: bool = False
    work: Work = field(default_factory=Work)
    seconds: float = 0.0
    due: float = math.inf
    owed: float = 0.0
    share: float = 1.0
    spent: float = 0.0

    def went_late(self, now: float) -> bool:
        """Whether a caller who goes now goes because of the deadline."""
        if self.deadline is None:
            return False
        return now >= self.deadline - max(CALLERS_CLOCK * (self.deadline - self.submitted), CALLERS_CLOCK_SECONDS)

    def hopeless(self, now: float) -> bool:
        """Whether it would miss its deadline even if it began now."""
        return self.deadline is not None and not self.partial and now + self.seconds > self.deadline


Order = Callable[[Ticket, float], tuple[float, ...]]


def first_come(ticket: Ticket, now: float) -> tuple[float, ...]:
    """The baseline: in order of arrival."""
    return (ticket.submitted,)


def shortest_first(ticket: Ticket, now: float) -> tuple[float, ...]:
    """Shortest job first: the best mean, and long jobs may starve."""
    return (ticket.seconds, ticket.submitted)


def earliest_deadline(ticket: Ticket, now: float) -> tuple[float, ...]:
    """Earliest deadline first, by the caller's deadline alone."""
    return (math.inf if ticket.deadline is None else ticket.deadline, ticket.submitted)


def by_due(ticket: Ticket, now: float) -> tuple[float, ...]:
    """Ours: what can still be in time before what cannot, then the earliest due, then the shortest."""
    turn = max(-FAR, min(ticket.due - PRIORITY_SECONDS * ticket.priority, FAR))
    return (float(ticket.hopeless(now)), math.floor(turn / TIE_SECONDS), ticket.seconds, ticket.submitted)


def due_at(fair: float, deadline: float | None) -> float:
    """By when a request should be done that would fairly be done then."""
    return fair + PATIENCE if deadline is None else min(deadline, fair + DISTANT)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """pass_tokens: of one pass; queue_tokens: waiting, beyond which callers are refused."""

    pass_tokens: int
    queue_tokens: int


class Scheduler:
    """Decides over tickets; owns the tenants' shares and the learned sizes, and no request."""

    def __init__(
        self, limits: SchedulerLimits, pass_time: PassTime, shares: FairShares | None = None, order: Order = by_due
    ) -> None:
        self.limits = limits
        self.pass_time = pass_time
        self.shares = shares or FairShares()
        self._order = order
        self._promised = Promises()
        self._tokens_per_byte: float | None = None

    def estimate(self, ticket: Ticket, running: Work | None = None) -> None:
        """Predicts what the ticket's work takes beyond the part that is running. Called again each tick, as the cache
        changes the work."""
        work = ticket.work if running is None else ticket.work - running
        ticket.seconds = self.pass_time.share(work, self.limits.pass_tokens)

    def order(self, tickets: Iterable[Ticket], now: float) -> list[Ticket]:
        """Whose turn is first."""
        return sorted(tickets, key=lambda ticket: self._order(ticket, now))

    def admit(self, new: Ticket, queue: Sequence[Ticket], free_at: float, now: float) -> None:
        """Gives the ticket its place, or refuses. queue: who waits; free_at: when the running pass is expected to end.

        Raises NotAdmitted. An idle service takes whatever a request may ask.
        """
        self.estimate(new)
        share = self.shares.share(new.tenant, now)
        self.shares.asked(new.tenant, new.seconds, now)
        self._promised.keep(MAX_TENANTS, now)
        begin = now if share >= 1 else self._promised.begin(new.tenant, now)
        fair = begin + new.seconds * STRETCH / share
        new.due = due_at(fair, new.deadline)
        if queue or free_at > now:
            self._check_tokens(new, queue, share)
            if self.pass_time.known:
                self._check_share(new, queue, share, now)
                self._check_deadlines(new, queue, free_at, now)
        new.share, new.owed = share, new.seconds / share
        self._promised.until[new.tenant] = begin + new.owed

    def begun(self, ticket: Ticket, part: Work) -> None:
        """This part of it is in a pass."""
        ticket.spent += self.pass_time.share(part, self.limits.pass_tokens)

    def left(self, ticket: Ticket, queue: Iterable[Ticket], now: float) -> None:
        """Nobody waits for it any more: its tenant is charged what was computed for it, whatever was set aside. queue:
        who waits still."""
        back, ticket.owed, ticket.spent = ticket.owed - ticket.spent / ticket.share, 0.0, 0.0
        if back and (back < 0 or self._promised.begin(ticket.tenant, now) > now):
            waiting = sum(other.seconds / other.share for other in queue if other.tenant == ticket.tenant)
            self._promised.give_back(ticket.tenant, back, waiting, now)

    def _check_tokens(self, new: Ticket, queue: Sequence[Ticket], share: float) -> None:
        waiting, limit = sum(ticket.work.tokens for ticket in queue), self.limits.queue_tokens
        if waiting + new.work.tokens > limit:
            told = f"{waiting} tokens wait and this request has {new.work.tokens}: the limit is {limit}"
            raise QueueFull(told, self._drain(queue))
        mine = sum(ticket.work.tokens for ticket in queue if ticket.tenant == new.tenant)
        if mine and mine + new.work.tokens > share * limit:
            told = f"{mine} tokens of this tenant wait: its share of {limit} is {share:.0%} while others ask too"
            raise OverShare(told, self._drain(queue) * share)

    def _drain(self, queue: Sequence[Ticket]) -> float:
        return sum(ticket.seconds for ticket in queue) / 2

    def _check_share(self, new: Ticket, queue: Sequence[Ticket], share: float, now: float) -> None:
        if share >= 1 or new.deadline is None:
            return
        mine = sum(ticket.seconds for ticket in queue if ticket.tenant == new.tenant)
        room = share * SHARE_FILL * (1 - CLASS_RESERVE[new.priority]) * (new.deadline - now)
        if mine and mine + new.seconds > room:
            need = mine + new.seconds
            told = f"this tenant's requests need {need:.3f} s, its {share:.0%} before the deadline are {room:.3f} s"
            raise OverShare(told, need - room)

    def _check_deadlines(self, new: Ticket, queue: Sequence[Ticket], free_at: float, now: float) -> None:
        """Walks through the queue in its order, with the new one and without: nobody may become late through it."""
        order = self.order([*(ticket for ticket in queue if ticket.seconds), new], now)
        begin, place = max(free_at, now), order.index(new)
        self._check_own(new, self._ends(order, begin)[place], now)
        end, delay = begin, 0.0
        for ticket in order:
            end += ticket.seconds * self.pass_time.margin
            if ticket is new:
                delay = ticket.seconds * self.pass_time.margin
            elif delay and _broken(ticket, end - delay, end):
                raise CannotFinish("a request that was accepted before would miss its deadline", new.seconds)

    def _ends(self, order: Sequence[Ticket], begin: float) -> list[float]:
        """When each is done, run in this order. Whoever shares a pass is done when all of it is; the composer sees to
        it that nobody becomes late by that."""
        ends: list[float] = []
        whole, margin = self.limits.pass_tokens, self.pass_time.margin
        end, open_, left = begin, 0, whole  # ends[open_:] share the pass that has room for `left` tokens
        for ticket in order:
            tokens, seconds = ticket.work.tokens, ticket.seconds * margin
            if left < tokens <= whole:
                open_, left = len(ends), whole
            if tokens > left:  # its first part fills the open pass, its last part opens another
                ends[open_:] = [end + seconds * left / tokens] * (len(ends) - open_)
                open_ = len(ends)
            end += seconds
            ends[open_:] = [end] * (len(ends) - open_ + 1)
            left = (left - tokens) % whole
        return ends

    def _check_own(self, new: Ticket, end: float, now: float) -> None:
        """A part of its patience is kept free, so that those who have less of it find room when they come."""
        if new.deadline is None:
            return
        patience = new.deadline - now
        latest = new.deadline - CLASS_RESERVE[new.priority] * patience
        if new.partial:
            end, latest = end - new.seconds * self.pass_time.margin, new.deadline
        if end > latest:
            told = f"it would be done in {end - now:.3f} s, its deadline is in {patience:.3f} s"
            raise CannotFinish(told, end - latest)

    def learn_size(self, size: int, tokens: int) -> None:
        """What a request's bytes turned out to be in tokens."""
        if size > 0:
            old = self._tokens_per_byte
            part = 1.0 if old is None else -math.expm1(-size / MEMORY_BYTES)
            self._tokens_per_byte = (old or 0.0) * (1 - part) + tokens / size * part

    def admit_bytes(
        self,
        new: Ticket,
        size: int,
        queue: Sequence[Ticket],
        free_at: float,
        now: float,
        texts: TextsAhead = NOTHING_AHEAD,
    ) -> None:
        """The first look, before anything is tokenised: refuses only what hardly could be. Raises CannotFinish."""
        if new.deadline is None or new.partial or not (queue or texts.sizes):
            return
        done = now + texts.seconds * OPTIMISM
        if self._tokens_per_byte is not None and self.pass_time.known:
            new.work = Work(self._tokens(size, texts.most_tokens))
            self.estimate(new)
            new.due = new.deadline
            ahead = sum(t.seconds for t in queue if self._order(t, now) <= self._order(new, now))
            done = max(done, max(free_at, now) + (ahead + self._texts_seconds(texts)) * OPTIMISM)
            done += new.seconds * OPTIMISM
        if done > new.deadline:
            told = f"{size} bytes could not be scored in the {new.deadline - now:.3f} s that are left"
            raise CannotFinish(told, done - new.deadline)

    def _texts_seconds(self, texts: TextsAhead) -> float:
        work = Work(sum(self._tokens(size, most) for size, most in texts.sizes))
        return self.pass_time.share(work, self.limits.pass_tokens) if work.tokens else 0.0

    def _tokens(self, size: int, most: float) -> int:
        return int(min(most, size * (self._tokens_per_byte or 0.0)))


def _broken(ticket: Ticket, before: float, after: float) -> bool:
    """Whether it is late, or nearly, by ending at `after`, where it is not beyond hope already."""
    if ticket.deadline is None or ticket.partial:
        return False
    latest = ticket.deadline - PROMISE_RESERVE * (ticket.deadline - ticket.submitted)
    return after > latest and before <= ticket.deadline
