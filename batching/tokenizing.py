"""Texts that wait for a thread that tokenizes them: whose turn it is, and how long one that comes would wait.

Pure; time is given. The order is that of the passes (`batching.scheduler.by_due`): what can still be in time first,
then by class and when each is due. A tenant's texts are due one after the other while others wait too. Large texts
never have all threads, so that a small one always finds one soon.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from batching.promises import Promises
from batching.scheduler import DISTANT, PATIENCE, PRIORITY_SECONDS, STRETCH, TextsAhead, Ticket, by_due

LARGE_BYTES = 1 << 20
MEMORY = 32.0  # texts over which what a byte takes is remembered
BESIDE_BYTES = 1024  # what a text takes beside its bytes, as bytes: of many short ones nothing follows for long ones


@dataclass(slots=True, eq=False)
class Text:
    """A request of `size` bytes, and of so many tokens at most.

    ticket.seconds: what tokenizing it takes, predicted; ticket.owed: by which it moved what comes after it of its
    tenant; began: when a thread took it.
    """

    size: int
    most_tokens: int
    ticket: Ticket
    began: float | None = None

    @property
    def large(self) -> bool:
        return self.size > LARGE_BYTES

    @property
    def turn(self) -> float:
        """Smaller is earlier, of those that can be in time."""
        return self.ticket.due - PRIORITY_SECONDS * self.ticket.priority


class TextQueue:
    """bytes: of the texts that wait and of those that threads have."""

    def __init__(self, threads: int) -> None:
        self.bytes = 0
        self._threads = threads
        self._large_threads = max(1, threads - 1)
        self._waiting: dict[Text, None] = {}
        self._running: dict[Text, None] = {}
        self._tenants: Counter[str] = Counter()  # texts of each, waiting and running
        self._promised = Promises()
        self._learned_bytes = self._learned_seconds = 0.0

    @property
    def seconds_per_byte(self) -> float:
        """On one thread; 0 until something is known."""
        return self._learned_seconds / self._learned_bytes if self._learned_bytes else 0.0

    def _learn(self, size: int, seconds: float) -> None:
        """What a text took on its thread. Each counts by its bytes, as it does in what is predicted."""
        kept = 1 - 1 / MEMORY
        self._learned_bytes = self._learned_bytes * kept + size + BESIDE_BYTES
        self._learned_seconds = self._learned_seconds * kept + seconds

    def look(self, ticket: Ticket, size: int, most_tokens: int, now: float) -> Text:
        """The text as it would stand in the queue."""
        ticket.seconds = (size + BESIDE_BYTES) * self.seconds_per_byte
        fair = self._promised.begin(ticket.tenant, now) + ticket.seconds * STRETCH * self._sharing(ticket.tenant)
        ticket.due = fair + PATIENCE if ticket.deadline is None else min(ticket.deadline, fair + DISTANT)
        return Text(size, most_tokens, ticket)

    def add(self, text: Text, now: float) -> None:
        """It waits from now on."""
        tenant = text.ticket.tenant
        begin = self._promised.begin(tenant, now)
        self._tenants[tenant] += 1
        text.ticket.owed = text.ticket.seconds * self._sharing(tenant)
        self._promised.until[tenant] = begin + text.ticket.owed
        self._waiting[text] = None
        self.bytes += text.size

    def take(self, now: float) -> Text | None:
        """The next one, for a thread that has nothing to do. One whose deadline has come is left for who waits for it,
        and never begun."""
        large = sum(text.large for text in self._running) < self._large_threads
        able = (text for text in self._waiting if (large or not text.large) and not _over(text.ticket, now))
        text = min(able, key=lambda text: by_due(text.ticket, now), default=None)
        if text is not None:
            del self._waiting[text]
            self._running[text] = None
            text.began = now
        return text

    def give_up(self, text: Text, now: float) -> None:
        """Nobody waits for it any more: it is not begun, nor is its tenant charged, unless a thread has it already."""
        if text in self._waiting:
            del self._waiting[text]
            tenant = text.ticket.tenant
            waiting = sum(other.ticket.owed for other in self._waiting if other.ticket.tenant == tenant)
            self._promised.give_back(tenant, text.ticket.owed, waiting, now)
            self._left(text)

    def ended(self, text: Text, now: float | None) -> None:
        """Its thread is done with it. now: None where what it took says nothing about others."""
        del self._running[text]
        if now is not None and text.began is not None:
            self._learn(text.size, now - text.began)
        self._left(text)

    def ahead(self, text: Text, now: float) -> TextsAhead:
        """What stands before it. Of a small one no large one does: on another thread it is there sooner. As time only
        its own kind counts."""
        before = [other for other in (*self._running, *self._waiting) if self._is_before(other, text)]
        seconds = sum(self._left_of(other, now) for other in before if other.large is text.large)
        threads = self._large_threads if text.large else self._threads
        sizes = tuple((other.size, other.most_tokens) for other in before)
        return TextsAhead(text.most_tokens, sizes, seconds / threads + text.ticket.seconds)

    def _is_before(self, other: Text, text: Text) -> bool:
        return other.large <= text.large and (other.began is not None or other.turn <= text.turn)

    def _left_of(self, text: Text, now: float) -> float:
        done = 0.0 if text.began is None else now - text.began
        return max(0.0, text.ticket.seconds - done)

    def _sharing(self, tenant: str) -> int:
        """How many tenants share the threads with it, itself included."""
        return len(self._tenants) + (tenant not in self._tenants)

    def _left(self, text: Text) -> None:
        self.bytes -= text.size
        tenant = text.ticket.tenant
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:  # names come from callers: none is remembered that asks for nothing
            del self._tenants[tenant], self._promised.until[tenant]


def _over(ticket: Ticket, now: float) -> bool:
    return ticket.deadline is not None and now >= ticket.deadline
