"""Where each token's K/V is while a pass runs, against a plain walk over what the pages hold."""

import numpy as np
import pytest
from hypothesis import given

from attention.expand import contents
from attention.planner import plan
from attention.plans import Strategy
from attention.residency import Residency
from tests.attention.draw import cases, examples


@pytest.mark.parametrize("strategy", [Strategy.FUSED, Strategy.CASCADE_CONTIGUOUS, Strategy.DIRECT_RAGGED])
@given(case=cases(deep=False))
@examples(60)
def test_every_token_has_its_place_and_what_outlives_the_pass_its_slot(strategy, case):
    layout, pages = case
    made = plan(layout, [strategy] * len(layout.leaves), pages)
    found = Residency.of(layout, pages, made)
    computed = set(layout.row_tokens.tolist())
    cached = [token for token in range(layout.tokens) if token not in computed]
    order = [*cached, *layout.row_tokens.tolist()]
    assert [order[place] for place in found.place] == list(range(layout.tokens))
    held = contents(made, layout, pages)
    assert held[found.cached_slots].tolist() == cached
    kept = pages.first_scratch * pages.page_size
    stored = [(r, s) for r, s in zip(made.append_rows.tolist(), made.append_slots.tolist(), strict=True) if s < kept]
    assert list(zip(found.store_rows.tolist(), found.store_slots.tolist(), strict=True)) == stored
    copied = [(a, b) for a, b in zip(made.copy_from.tolist(), made.copy_to.tolist(), strict=True) if b < kept]
    assert list(zip(found.copy_from.tolist(), found.copy_to.tolist(), strict=True)) == copied
    for name in ("place", "cached_slots", "store_rows", "store_slots", "copy_from", "copy_to"):
        assert getattr(found, name).dtype == np.int32, name
