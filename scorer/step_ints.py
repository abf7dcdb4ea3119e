"""How a beam step's arrays lie in one piece of ints, which travels to the device in one upload.

ahead    width, count, number of eos ids, then from EOS_AT on these; from ROOM on the pages of the beams' K/V:
         what the steps that follow on the device need to know of the search
step     the step's numbers (attention.decode_kernel), then from ROOM on a row each of `widest` ids, positions and
         scores (the bits of fp32; -inf: padding), then the history, row after row without gaps
"""

from __future__ import annotations

import numpy as np

from attention.decode_kernel import BEAMS, FIRST, META, OWN, PROMPT
from attention.layout import Ints
from scorer.beam_steps import Ahead, BeamStep

ROOM = 16  # ints before the rows, and before the pages: aligned
EOS_AT = 4
MOST_EOS = ROOM - EOS_AT


class StepInts:
    """Where things lie. begin: of the step; size: of everything."""

    def __init__(self, widest: int, most_history: int, page_size: int) -> None:
        self.widest = widest
        self._page_size = page_size
        self._most_pages = most_history // page_size + 2
        self.begin = ROOM + -(-self._most_pages // ROOM) * ROOM
        self._rows = {name: ROOM + i * widest for i, name in enumerate(("ids", "positions", "scores", "history"))}
        self.size = self.begin + self._rows["history"] + most_history
        assert META <= ROOM, "the step's numbers come before its rows"

    def row(self, name: str) -> int:
        """Where ids, positions, scores or history begin."""
        return self.begin + self._rows[name]

    def fits(self, ahead: Ahead | None) -> bool:
        """Whether what follows can be written on the device."""
        return ahead is not None and len(ahead.eos_ids) <= MOST_EOS and len(ahead.pages) <= self._most_pages

    def fill(self, step: BeamStep, prompt: Ints, ints: Ints) -> int:
        """Writes a step over the prompt's slots; returns how much of `ints` is in use."""
        n, history = len(step.tokens), step.decode.history
        assert n <= self.widest, "checked when the search was accepted"
        meta = ints[self.begin : self.begin + META]
        meta[BEAMS], meta[PROMPT], meta[OWN] = n, step.decode.prompt_tokens, history.shape[1]
        meta[FIRST] = prompt[0] if len(prompt) else 0
        ints[self._at("ids", n)] = step.tokens
        ints[self._at("positions", n)] = step.decode.position
        scores = ints[self._at("scores", self.widest)].view(np.float32)
        scores[:n], scores[n:] = step.scores, -np.inf
        ints[self._at("history", history.size)] = history.ravel()
        if step.ahead is not None and self.fits(step.ahead):
            self._fill_ahead(step.ahead, ints)
        return self.row("history") + history.size

    def _fill_ahead(self, ahead: Ahead, ints: Ints) -> None:
        ints[:EOS_AT] = ahead.width, ahead.count, len(ahead.eos_ids), 0
        ints[EOS_AT : EOS_AT + len(ahead.eos_ids)] = ahead.eos_ids
        ints[ROOM : ROOM + len(ahead.pages)] = ahead.pages

    def _at(self, name: str, count: int) -> slice:
        return slice(self.row(name), self.row(name) + count)
