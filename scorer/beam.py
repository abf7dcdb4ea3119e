"""Beam searches beside scoring: the prompt through the batcher and its cache, then step after step between passes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from attention.decode import Decode
from attention.layout import Ints
from batching.batcher import Batcher, Held
from batching.beams import Ancestry, BeamOptions, BeamState, Hypothesis
from batching.errors import DeviceFailed, DeviceGone, Expired, QueueFull
from batching.prefix_cache import Lease
from batching.scheduler import Asked
from batching.trie import Trie
from scorer.beam_pages import BeamPages
from scorer.beam_prompt import Prompt
from scorer.beam_steps import Ahead, BeamStep, Following, Stepped, Steps
from scorer.beam_turn import Turn
from scorer.errors import InvalidRequest

T = TypeVar("T")

MAX_BEAMS = 512
MAX_SEARCHES = 64  # running or waiting; more are refused
TURN_SECONDS = 0.004  # that a search's steps take between two passes: about as long as a small pass, or a step or two
IDLE_TURN_SECONDS = 0.1  # that they take where nothing else waits, at most


@dataclass(frozen=True, slots=True, eq=False)
class BeamRequest:
    """prompt: [P] token ids, at least one."""

    prompt: Ints
    options: BeamOptions
    trie: Trie | None = None
    asked: Asked = field(default_factory=Asked)


@dataclass(frozen=True, slots=True, eq=False)
class BeamResult:
    """hypotheses: best first, fewer than num_beams where no more are possible. steps: of the search, prompt's last
    token included. computed_tokens: of prompt and beams. Seconds as in RequestScores."""

    hypotheses: tuple[Hypothesis, ...]
    steps: int
    computed_tokens: int
    cached_prefix_tokens: int
    passes: int
    queue_seconds: float
    plan_seconds: float
    forward_seconds: float


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
        self._turn = asyncio.Lock()  # searches alternate, and scoring has its turn after each of theirs
        self._at_turn = 0  # searches that have the turn or wait for it
        self.under_way = 0

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

        Raises InvalidRequest where it does not fit, QueueFull, Expired, and as Batcher.submit does.
        """
        self._check(request)
        if self.under_way >= MAX_SEARCHES:
            raise QueueFull(f"{self.under_way} beam searches are under way: the limit is {MAX_SEARCHES}")
        self.under_way += 1
        try:
            async with asyncio.timeout(None if deadline is None else deadline - self._clock()) as patience:
                return await self._search(request, deadline)
        except TimeoutError:
            if not patience.expired():
                raise
            raise Expired("the deadline came before the end of this beam search") from None
        finally:
            self.under_way -= 1

    def _check(self, request: BeamRequest) -> None:
        slots = request.options.slots
        if slots > self.max_tokens:
            told = f"num_beams * (max_new_tokens - 1) of at most {self.max_tokens} (max_beam_tokens)"
            raise InvalidRequest.of("max_new_tokens", told, slots)
        if len(request.prompt) > self.max_prompt:
            told = f"at most {self.max_prompt} tokens, as the prefix cache (cache_tokens) holds no more"
            raise InvalidRequest.of("prompt", told, len(request.prompt))

    async def _search(self, request: BeamRequest, deadline: float | None) -> BeamResult:
        began = self._clock()
        pages = await self._pages.take(1 + request.options.slots)
        prompt = None
        try:
            if len(request.prompt) > 1:
                prompt = Prompt(self._batcher, request.prompt[:-1], request.asked, deadline)
            search, held = await self._begun(request, prompt, pages)
            while not search.state.done:
                await self._take_turn(search)
            return search.result(held, self._clock() - began)
        finally:
            if prompt is not None:
                prompt.leave()
            self._pages.give_back(pages)

    async def _begun(self, request: BeamRequest, prompt: Prompt | None, pages: Ints) -> tuple[_Search, Held | None]:
        """A search over a prompt that is held. Its first turn is enqueued behind the prompt's pass where that is on its
        way, and counts where the pass ends well."""
        if prompt is None:
            return self._made(request, Lease([], 0), pages), None
        early = await self._first_turn(request, prompt, pages)
        held, same = await prompt.held()
        return early if early is not None and same else self._made(request, held.lease, pages), held

    async def _first_turn(self, request: BeamRequest, prompt: Prompt, pages: Ints) -> _Search | None:
        """None where there is no pass to begin behind, or what there is is NaN: others' in that pass may have spread,
        which the engine heals."""
        lease = await prompt.coming()
        if lease is None:
            return None
        search = self._made(request, lease, pages)
        try:
            await self._take_turn(search, prompt)
        except NotANumber:
            return None
        return search

    def _made(self, request: BeamRequest, lease: Lease, pages: Ints) -> _Search:
        return _Search(request, lease.pages, pages, self._pages, self._batcher.cache.page_size)

    async def _take_turn(self, search: _Search, prompt: Prompt | None = None) -> None:
        """prompt: of the search, where it is on its way."""
        self._at_turn += 1
        try:
            async with self._turn:
                await self._run(search, prompt)
        except BaseException:
            search.left = True
            raise
        finally:
            self._at_turn -= 1

    def _wanted(self, prompt: Prompt | None) -> bool:
        """Whether anyone else waits for the device than a search with this prompt. The device thread asks."""
        own = int(prompt is not None and prompt.under_way)
        return self._at_turn > 1 or self._batcher.unanswered > own

    async def _run(self, search: _Search, prompt: Prompt | None) -> None:
        seconds = self._turn_seconds, max(self._turn_seconds, self._idle_turn_seconds)

        def work() -> None:
            search.run(self._steps, Turn(*seconds, partial(self._wanted, prompt), self._timer))

        try:
            await self._engine.between(work)
        except DeviceGone as error:
            self._batcher.give_up(str(error))
            raise DeviceFailed(str(error)) from error
        except NotANumber:
            raise
        except Exception as error:
            raise DeviceFailed(f"{type(error).__name__} in a beam step") from error


class NotANumber(DeviceFailed):
    """A step gave NaN."""


class _Search:
    """One search under way, and what it cost so far."""

    def __init__(self, request: BeamRequest, prompt_pages: Ints, pages: Ints, of: BeamPages, page_size: int) -> None:
        self.state = BeamState(request.options, request.trie)
        self._request = request
        self._prompt_pages = prompt_pages
        self._pages, self._of, self._page_size = pages, of, page_size
        self._ahead = None if request.trie is not None else _ahead(request.options, pages)
        self.left = False  # nobody waits for it any more
        self._ancestry = Ancestry(request.options.num_beams)
        self._steps = self._computed = 0
        self._plan_seconds = self._forward_seconds = 0.0

    def run(self, steps: Steps, turn: Turn) -> None:
        """Steps until the search is done or its turn is over, at least one. Raises NotANumber.

        Where steps can follow on the device, the next one is enqueued before the results of the last are read: at the
        search's end there may be one that was not needed.
        """
        under_way = deque([steps.submit(self._step())])
        while under_way:
            over = self.left or turn.over()
            if not over and isinstance(steps, Following) and self._goes_on_behind(len(under_way)):
                following = steps.follow()
                under_way.extend(() if following is None else (following,))
            self._take(under_way.popleft()())
            if self.state.done:
                return
            if not under_way and not (self.left or turn.over()):
                under_way.append(steps.submit(self._step()))

    def _goes_on_behind(self, steps: int) -> bool:
        """Whether there may be another step behind so many."""
        return self._ahead is not None and self.state.length + steps < self._request.options.max_new_tokens

    def _step(self) -> BeamStep:
        prompt, state = self._request.prompt, self.state
        return BeamStep(
            tokens=state.tokens[:, -1] if state.length else prompt[-1:],
            scores=state.scores,
            decode=Decode(
                self._page_size, self._prompt_pages, len(prompt) - 1, self._of.slots(self._pages, self._ancestry.slots)
            ),
            count=self._request.options.candidates,
            pairs=state.wanted(),
            ahead=self._ahead,
        )

    def _take(self, stepped: Stepped) -> None:
        if np.isnan(stepped.candidates.log_probs).any():
            raise NotANumber("the model gave NaN in a beam step")
        self._steps += 1
        self._computed += self.state.tokens.shape[0]
        self._plan_seconds += stepped.plan_seconds
        self._forward_seconds += stepped.forward_seconds
        parents = self.state.advance(stepped.candidates)
        if not self.state.done:
            self._ancestry.fork(parents)

    def result(self, held: Held | None, elapsed: float) -> BeamResult:
        scores = None if held is None else held.scores
        plan = self._plan_seconds + (0.0 if scores is None else scores.plan_seconds)
        forward = self._forward_seconds + (0.0 if scores is None else scores.forward_seconds)
        forward = min(forward, max(0.0, elapsed - plan))  # a step that waited for the prompt's pass was counted with it
        return BeamResult(
            hypotheses=tuple(self.state.finished),
            steps=self._steps,
            computed_tokens=self._computed + (0 if scores is None else scores.computed_tokens),
            cached_prefix_tokens=0 if held is None else held.cached,
            passes=0 if scores is None else scores.passes,
            queue_seconds=max(0.0, elapsed - plan - forward),
            plan_seconds=plan,
            forward_seconds=forward,
        )


def _ahead(options: BeamOptions, pages: Ints) -> Ahead:
    return Ahead(options.num_beams, options.candidates, options.eos_ids, pages)
