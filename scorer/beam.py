"""Beam searches beside scoring: the prompt through the batcher and its cache, then step after step between passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from attention.layout import Ints
from batching.batcher import Batcher
from batching.errors import DeviceFailed, DeviceGone, Expired, NotAdmitted
from batching.holding import Held
from batching.scheduler import Ticket
from batching.searches import Searches, SearchTicket
from scorer.beam_line import Line
from scorer.beam_pages import BeamPages
from scorer.beam_prompt import Prompt
from scorer.beam_run import BeamRequest, BeamResult, BeamRun, NotANumber
from scorer.beam_steps import Steps
from scorer.beam_turn import Turn
from scorer.errors import InvalidRequest

T = TypeVar("T")

MAX_BEAMS = 512
MAX_SEARCHES = 64  # running or waiting; more are refused, and of one tenant before, as its class leaves some to others
TURN_SECONDS = 0.004  # that a search's steps take between two passes: about as long as a small pass, or a step or two
IDLE_TURN_SECONDS = 0.1  # that they take where nothing else waits, at most


class Device(Protocol):
    """What searches need of the engine."""

    async def between(self, work: Callable[[], T]) -> T:
        """Calls `work` where the device is used, between passes."""


class BeamSearcher:
    """Runs searches to their end, a few steps between two passes. Lives on the batcher's event loop."""

    def __init__(
        self,
        batcher: Batcher,
        engine: Device,
        steps: Steps,
        pages: BeamPages,
        clock: Callable[[], float] = time.monotonic,
        turn_seconds: float = TURN_SECONDS,
        timer: Callable[[], float] = time.perf_counter,
        idle_turn_seconds: float = IDLE_TURN_SECONDS,
    ) -> None:
        """turn_seconds: of steps between two passes, by the timer; idle_turn_seconds: where no pass and no other search
        waits."""
        self._batcher = batcher
        self._engine = engine
        self._steps = steps
        self._pages = pages
        self._clock = clock
        self._turn_seconds = turn_seconds
        self._idle_turn_seconds = idle_turn_seconds
        self._timer = timer
        self._searches = Searches(MAX_SEARCHES, pages.pages, batcher.shares)
        self._turns = Line(self._next_turn, self._give_turn)  # scoring has its turn after each of the searches'
        self._running: SearchTicket | None = None
        self._at_turn = 0  # searches that have the turn or wait for it
        self._room = Line(lambda waiting: self._searches.next_pages(waiting, self._clock()), self._give_pages)
        self._held: dict[SearchTicket, Ints] = {}

    @property
    def under_way(self) -> int:
        """Searches that run or wait."""
        return len(self._searches)

    @property
    def max_tokens(self) -> int:
        """Generated tokens of one search whose K/V there is room for."""
        return self._pages.tokens - 1

    @property
    def max_prompt(self) -> int:
        """Tokens of a prompt: all but its last one lie in the prefix cache."""
        cache = self._batcher.cache
        return cache.pool.pages * cache.page_size + 1

    async def search(self, request: BeamRequest, deadline: float | None = None) -> BeamResult:
        """deadline: in the clock's seconds. Cancelling the caller's task ends the search after the step that runs.

        Raises InvalidRequest where it does not fit, NotAdmitted, Expired, and as Batcher.submit does.
        """
        self._check(request)
        ticket = self._admitted(request, deadline)
        whole = False
        try:
            async with asyncio.timeout(None if deadline is None else deadline - self._clock()) as patience:
                result = await self._search(request, ticket)
                whole = True
                return result
        except TimeoutError:
            if not patience.expired():
                raise
            raise Expired("the deadline came before the end of this beam search") from None
        finally:
            self._leave(ticket, whole)

    def _admitted(self, request: BeamRequest, deadline: float | None) -> SearchTicket:
        now, asked, options = self._clock(), request.asked, request.options
        ticket = SearchTicket(
            Ticket(asked.tenant, asked.priority, now, deadline),
            options.num_beams,
            options.max_new_tokens,
            len(request.prompt),
            self._pages.count(1 + options.slots),
            certain=request.trie is None and not options.eos_ids,
        )
        try:
            self._searches.admit(ticket, now)
        except NotAdmitted as error:
            self._batcher.observer.refused(error.reason)
            raise
        return ticket

    def _leave(self, ticket: SearchTicket, whole: bool) -> None:
        self._searches.leave(ticket, whole)
        if (pages := self._held.pop(ticket, None)) is not None:
            self._pages.give_back(pages)
        self._room.move()  # also who had none yet may have stood before others

    def _give_pages(self, ticket: SearchTicket) -> None:
        self._searches.hold(ticket)
        self._held[ticket] = self._pages.take(ticket.pages)

    def _check(self, request: BeamRequest) -> None:
        slots = request.options.slots
        if slots > self.max_tokens:
            told = f"num_beams * (max_new_tokens - 1) of at most {self.max_tokens} (max_beam_tokens)"
            raise InvalidRequest.of("max_new_tokens", told, slots)
        if len(request.prompt) > self.max_prompt:
            told = f"at most {self.max_prompt} tokens, as the prefix cache (cache_tokens) holds no more"
            raise InvalidRequest.of("prompt", told, len(request.prompt))

    async def _search(self, request: BeamRequest, ticket: SearchTicket) -> BeamResult:
        began, prompt = self._clock(), None
        await self._room.wait(ticket)
        try:
            if len(request.prompt) > 1:
                prompt = Prompt(self._batcher, request.prompt[:-1], request.asked, ticket.ticket.deadline)
            search, held = await self._begun(request, prompt, ticket)
            while not search.state.done:
                await self._take_turn(search)
            return search.result(held, self._clock() - began)
        finally:
            if prompt is not None:
                prompt.leave()

    async def _begun(
        self, request: BeamRequest, prompt: Prompt | None, ticket: SearchTicket
    ) -> tuple[BeamRun, Held | None]:
        """A search over a prompt that is held. Its first turn is enqueued behind the prompt's pass where that is on its
        way, and counts where the pass ends well."""
        if prompt is None:
            return self._made(request, np.zeros(0, np.int32), ticket), None
        early = await self._first_turn(request, prompt, ticket)
        held, same = await prompt.held()
        return early if early is not None and same else self._made(request, held.lease.pages, ticket), held

    async def _first_turn(self, request: BeamRequest, prompt: Prompt, ticket: SearchTicket) -> BeamRun | None:
        """None where there is no pass to begin behind, or what there is is NaN: others' in that pass may have spread,
        which the engine heals."""
        lease = await prompt.coming()
        if lease is None:
            return None
        search = self._made(request, lease.pages, ticket)
        try:
            await self._take_turn(search, prompt)
        except NotANumber:
            return None
        return search

    def _made(self, request: BeamRequest, pages: Ints, ticket: SearchTicket) -> BeamRun:
        page_size = self._batcher.cache.page_size
        return BeamRun(request, ticket, pages, self._held[ticket], self._pages, page_size)

    async def _take_turn(self, search: BeamRun, prompt: Prompt | None = None) -> None:
        """prompt: of the search, where it is on its way."""
        self._at_turn += 1
        try:
            await self._turns.wait(search.ticket)
            await self._run(search, prompt)
        except BaseException:
            search.left = True
            raise
        finally:
            self._at_turn -= 1
            if self._running is search.ticket:
                self._running = None
                asyncio.get_running_loop().call_soon(self._move)  # when this one waits again, if it goes on

    def _move(self) -> None:
        self._turns.move()
        self._room.move()  # who is first changes with what each got

    def _next_turn(self, waiting: Collection[SearchTicket]) -> SearchTicket | None:
        return self._searches.next_turn(waiting, self._clock()) if self._running is None else None

    def _give_turn(self, ticket: SearchTicket) -> None:
        self._running = ticket

    def _wanted(self, prompt: Prompt | None) -> bool:
        """Whether anyone else waits for the device than a search with this prompt. The device thread asks."""
        own = int(prompt is not None and prompt.under_way)
        return self._at_turn > 1 or self._batcher.unanswered > own

    async def _run(self, search: BeamRun, prompt: Prompt | None) -> None:
        seconds = self._turn_seconds, max(self._turn_seconds, self._idle_turn_seconds)
        steps, whole = search.steps, False
        times: list[float] = []

        def work() -> None:
            times.append(self._timer())
            try:
                search.run(self._steps, Turn(*seconds, partial(self._wanted, prompt), self._timer))
            finally:
                times.append(self._timer())

        try:
            await self._engine.between(work)
            whole = prompt is None  # or the prompt's pass is in it
        except DeviceGone as error:
            self._batcher.give_up(str(error))
            raise DeviceFailed(str(error)) from error
        except NotANumber:
            raise
        except Exception as error:
            raise DeviceFailed(f"{type(error).__name__} in a beam step") from error
        finally:  # also what was cancelled, or came to nothing, had the device
            now = self._timer()
            began, ended, *_ = *times, now, now
            self._searches.ran(search.ticket, search.steps - steps, ended - began, measured=whole)
