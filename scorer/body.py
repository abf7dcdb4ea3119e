"""The document's place in an item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batching.types import Ints
from scorer.encoder import Encoder, Part, Run
from scorer.profile import DOCUMENT
from scorer.template import Slot, filled


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """Where the document goes in an item: ids before it, text encoded together with it, and what comes after.

    starts  the tokenizer puts a space of its own before the head, or where it is empty before the document
    """

    before: Ints
    head: str
    strip_start: bool
    strip_end: bool
    starts: bool
    after: tuple[Part, ...]

    def trimmed(self, document: str) -> str:
        """The document as the control tokens beside it leave it."""
        document = document.lstrip() if self.strip_start else document
        return document.rstrip() if self.strip_end else document


def body_of(encoder: Encoder, parts: Sequence[Part]) -> Body:
    """The place of the one document among the parts of an item."""
    at = next(i for i, part in enumerate(parts) if isinstance(part, Run) and Slot(DOCUMENT) in part.pieces)
    run = parts[at]
    assert isinstance(run, Run), "a slot lies in a run"
    place = run.pieces.index(Slot(DOCUMENT))
    before = encoder.fixed(parts[:at])
    head, rest = filled(run.pieces[:place], {}), run.pieces[place + 1 :]
    after = ([Run(rest, False, run.strip_end, False)] if rest else []) + list(parts[at + 1 :])
    return Body(before, head, run.strip_start and not head, run.strip_end and not rest, run.starts, tuple(after))
