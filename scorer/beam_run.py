"""One beam search: what is asked, its steps turn after turn, and what comes of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from attention.decode import Decode
from attention.layout import Ints
from batching.beams import Ancestry, BeamOptions, BeamState, Hypothesis
from batching.errors import DeviceFailed
from batching.holding import Held
from batching.scheduler import Asked
from batching.searches import SearchTicket
from batching.trie import Trie
from scorer.beam_pages import BeamPages
from scorer.beam_steps import Ahead, BeamStep, Following, Stepped, Steps
from scorer.beam_turn import Turn


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


class NotANumber(DeviceFailed):
    """A step gave NaN."""


class BeamRun:
    """One search under way, and what it cost so far."""

    def __init__(
        self,
        request: BeamRequest,
        ticket: SearchTicket,
        prompt_pages: Ints,
        pages: Ints,
        of: BeamPages,
        page_size: int,
    ) -> None:
        self.ticket = ticket
        self.state = BeamState(request.options, request.trie)
        self._request = request
        self._prompt_pages = prompt_pages
        self._pages, self._of, self._page_size = pages, of, page_size
        self._ahead = None if request.trie is not None else _ahead(request.options, pages)
        self.left = False  # nobody waits for it any more
        self._ancestry = Ancestry(request.options.num_beams)
        self.steps = self._computed = 0
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
        self.steps += 1
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
            steps=self.steps,
            computed_tokens=self._computed + (0 if scores is None else scores.computed_tokens),
            cached_prefix_tokens=0 if held is None else held.cached,
            passes=0 if scores is None else scores.passes,
            queue_seconds=max(0.0, elapsed - plan - forward),
            plan_seconds=plan,
            forward_seconds=forward,
        )


def _ahead(options: BeamOptions, pages: Ints) -> Ahead:
    return Ahead(options.num_beams, options.candidates, options.eos_ids, pages)
