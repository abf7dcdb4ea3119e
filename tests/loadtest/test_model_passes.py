"""The passes of `prefixrank bench model`: every item once, none over the budget, prefixes kept between."""

from itertools import islice, pairwise

import numpy as np
import pytest

from batching.packing import pack
from loadtest.model_passes import fits, most_items, prefix_pages, saturating, split
from loadtest.shapes import SCALING, SHAPES, request

PASS = 4096


@pytest.mark.parametrize("shape", [s for s in (*SHAPES, *SCALING) if fits(s, PASS)])
def test_a_request_alone_is_scored_whole(shape):
    pages = np.arange(prefix_pages(shape, 16), dtype=np.int32)
    groups = split(request(shape, 0), shape, PASS, pages)
    assert [item for group in groups for item in group.items] == list(range(shape[2]))
    for number, group in enumerate(groups):
        batch = pack([group], 16)
        assert batch.tokens <= PASS
        assert batch.tokens == len(group.items) * shape[1] + (0 if number else shape[0])


@pytest.mark.parametrize("shape", [s for s in (*SHAPES, *SCALING) if fits(s, PASS)])
def test_saturating_passes_are_full_and_never_over(shape):
    whole = shape[0] + shape[1] * shape[2]
    requests = [request(shape, seed) for seed in range(3)]
    passes = list(islice(saturating(requests, shape, PASS, 16), 20))
    for groups in passes:
        assert pack(groups, 16).tokens <= PASS
        if whole <= PASS:
            assert len(groups) == PASS // whole
    if whole > PASS:
        begun = [groups[0].pages.tolist() for groups in passes if not groups[0].cached]
        assert len(begun) > 1
        assert all(not set(a) & set(b) for a, b in pairwise(begun))


def test_what_does_not_fit():
    assert not fits((8192, 64, 32), PASS)
    assert most_items((512, 64, 1000), 16_384) == (248, 256)
