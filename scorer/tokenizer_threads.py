"""The threads that tokenize, and how many bytes may wait for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from google.protobuf.message import Message

from batching.errors import Expired, refuse_expired
from batching.observer import Observer, Unobserved
from batching.scheduler import Asked, TextsAhead, Ticket
from batching.tokenizing import Text, TextQueue
from scorer.errors import Overloaded
from scorer.threads import guarded

M = TypeVar("M", bound=Message)
T = TypeVar("T")

THREADS = 2


class TokenizerThreads:
    """Takes texts in the queue's order. Deadlines are in the clock's seconds; the observer hears of texts that end
    before they are tokenized."""

    def __init__(
        self,
        most_bytes: int,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer = observer or Unobserved()
        self._most = most_bytes
        self._clock = clock
        self._lock = threading.Lock()  # of the queue and of what each text is for
        self._queue = TextQueue(THREADS)
        self._work: dict[Text, tuple[Callable[[], Any], Future[Any]]] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")

    @property
    def bytes(self) -> int:
        """Of the requests that wait for a thread or have one."""
        return self._queue.bytes

    def ahead(self, size: int, most_tokens: int, asked: Asked, deadline: float | None) -> TextsAhead:
        """What stands before a request of so many bytes and so many tokens at most."""
        now = self._clock()
        with self._lock:
            return self._queue.ahead(self._queue.look(_ticket(asked, deadline, now), size, most_tokens, now), now)

    async def run(
        self,
        tokenize: Callable[[M], T],
        request: M,
        size: int | None = None,
        most_tokens: int = 0,
        asked: Asked | None = None,
        deadline: float | None = None,
    ) -> T:
        """Tokenizes on a thread. size: of the request in bytes, where it was counted already.

        Raises Overloaded where too many bytes wait, and Expired at the deadline, whether or not a thread has it.
        """
        refuse_expired(deadline, self._clock())
        size = request.ByteSize() if size is None else size
        text, work = self._enter(lambda: tokenize(request), size, most_tokens, _ticket(asked, deadline, self._clock()))
        try:
            return await self._ended(work, deadline)
        except asyncio.CancelledError:
            self._left_alone(text.ticket)
            raise
        finally:
            self._leave(text)

    async def _ended(self, work: Future[T], deadline: float | None) -> T:
        if deadline is None:
            return await asyncio.wrap_future(work)
        try:
            async with asyncio.timeout(deadline - self._clock()) as patience:
                return await asyncio.wrap_future(work)
        except TimeoutError:
            if not patience.expired():
                raise
            self._observer.missed()
            raise Expired("the deadline came before this request was tokenized") from None

    def _left_alone(self, ticket: Ticket) -> None:
        if ticket.went_late(self._clock()):
            self._observer.missed()
        else:
            self._observer.cancelled()

    def _enter(self, run: Callable[[], T], size: int, most_tokens: int, ticket: Ticket) -> tuple[Text, Future[T]]:
        work = Future[T]()
        with self._lock:
            waiting = self._queue.bytes
            if waiting and waiting + size > self._most:  # an idle service takes whatever a request may be
                told = f"{waiting} bytes wait to be tokenized and this request has {size}: the limit is {self._most}"
                raise Overloaded(told)
            self._threads.submit(self._turns)  # it meets the lock
            text = self._queue.look(ticket, size, most_tokens, ticket.submitted)
            self._queue.add(text, ticket.submitted)
            self._work[text] = run, work
        return text, work

    def _leave(self, text: Text) -> None:
        now = self._clock()
        with self._lock:
            self._queue.give_up(text, now)
            self._work.pop(text, None)

    def _turns(self) -> None:
        """On a thread: one text after the other, until none may be begun. Each text that comes brings such a turn, and
        a large one that had to wait is taken by the thread of the large one before it."""
        while (taken := self._taken()) is not None:
            self._tokenize(*taken)

    def _taken(self) -> tuple[Text, Callable[[], Any], Future[Any]] | None:
        with self._lock:
            text = self._queue.take(self._clock())
            return None if text is None else (text, *self._work.pop(text))

    def _tokenize(self, text: Text, run: Callable[[], T], work: Future[T]) -> None:
        """Counts it as done before whoever waits for it hears."""
        if not work.set_running_or_notify_cancel():
            self._done(text, None)  # its caller went at this very moment
            return
        try:
            result = guarded(run)
        except BaseException as error:  # noqa: BLE001  whatever it is, it is for the one who waits
            self._done(text, None)
            work.set_exception(error)
        else:
            self._done(text, self._clock())
            work.set_result(result)

    def _done(self, text: Text, now: float | None) -> None:
        with self._lock:
            self._queue.ended(text, now)

    def close(self) -> None:
        """What waits for a thread is not begun any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting, self._work = self._work, {}
            for text in waiting:
                self._queue.give_up(text, self._clock())
        for _, work in waiting.values():
            work.cancel()


def _ticket(asked: Asked | None, deadline: float | None, now: float) -> Ticket:
    asked = asked or Asked()
    return Ticket(asked.tenant, asked.priority, now, deadline, asked.partial)
