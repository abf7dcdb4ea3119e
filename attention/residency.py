"""Which K/V a pass finds in kept pages, and where each token's K/V is while the pass runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention.layout import NONE, Ints, Layout
from attention.plans import Pages, Plan, slots_in


@dataclass(frozen=True, slots=True, eq=False)
class Residency:
    """A backend that keeps nothing in scratch pages works on (cached tokens, then rows), in token order each.

    place         [tokens]  place of each token in that order
    cached_slots  [cached]  kept slots of the cached tokens
    store_rows, store_slots  rows of the pass that are to outlive it, and their kept slots
    copy_from, copy_to       cached K/V that a kept page repeats, by slots
    """

    place: Ints
    cached_slots: Ints
    store_rows: Ints
    store_slots: Ints
    copy_from: Ints
    copy_to: Ints

    @classmethod
    def of(cls, layout: Layout, pages: Pages, plan: Plan) -> Residency:
        is_cached = np.ones(layout.tokens, np.bool_)
        is_cached[layout.row_tokens] = False
        cached = np.flatnonzero(is_cached)
        place = np.empty(layout.tokens, np.int32)
        place[cached] = np.arange(len(cached))
        place[layout.row_tokens] = len(cached) + np.arange(layout.rows)
        first_scratch_slot = pages.first_scratch * pages.page_size
        copied = plan.copy_to < first_scratch_slot
        stored = plan.append_slots < first_scratch_slot
        return cls(
            place=place,
            cached_slots=np.concatenate([NONE, *cached_slots(layout, pages).values()]),
            store_rows=plan.append_rows[stored],
            store_slots=plan.append_slots[stored],
            copy_from=plan.copy_from[copied],
            copy_to=plan.copy_to[copied],
        )


def cached_slots(layout: Layout, pages: Pages) -> dict[int, Ints]:
    """The kept slots of each segment that has cached tokens, in order of segments."""
    slots = {}
    for segment in np.flatnonzero(layout.cached).tolist():
        kept = pages.kept[segment]
        assert kept is not None, f"segment {segment} has cached tokens but no kept pages"
        offset = int(layout.start[segment]) % pages.page_size
        slots[segment] = slots_in(kept, pages.page_size, offset, int(layout.cached[segment]))
    return slots
