"""The counts are the article's, and the lengths alone tell what a plan will be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.cost import cost, shapes, shapes_of
from attention.layout import Layout, Segment, unshared
from attention.planner import plan
from attention.plans import HeadShape, Pages, Strategy
from attention.timing import Fit
from tests.attention.draw import examples

HEADS = HeadShape(16, 8, 128, 128**-0.5, None)

ARTICLE_5_1 = {
    Strategy.NAIVE: (26, 1448),
    Strategy.DIRECT_RAGGED: (14, 824),
    Strategy.CASCADE: (15, 728),
    Strategy.MULTI_ITEM: (13, 728),
    Strategy.CUSTOM_MASK: (13, 1352),
}


@pytest.mark.parametrize("strategy", ARTICLE_5_1)
def test_article_5_1(strategy):
    counted = cost(shapes(strategy, 96, 0, np.array([4, 4])), 0, 8, HEADS)
    assert (counted.ctas, counted.kv_tokens_scanned) == ARTICLE_5_1[strategy]


@pytest.mark.parametrize("strategy", Strategy)
@given(
    prefix=st.integers(1, 300),
    cached=st.booleans(),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=30),
    rows=st.sampled_from([64, 128]),
)
@examples(60)
def test_lengths_alone_tell_the_launches(strategy, prefix, cached, lengths, rows):
    have = prefix if cached and strategy is not Strategy.NAIVE else 0
    layout = Layout.of([Segment(-1, prefix, have), *[Segment(0, n) for n in lengths]])
    if strategy is Strategy.NAIVE:
        layout, _ = unshared(layout)
    pages = Pages.scratch(layout, 16)
    if have:
        kept = np.arange(-(-prefix // 16), dtype=np.int32)
        pages = Pages(16, len(kept), (kept, *[None] * len(lengths)))
    real = shapes_of(plan(layout, [strategy] * len(lengths), pages, packed_rows=rows))
    told = shapes(strategy, prefix, have, np.array(lengths), rows)
    assert len(real) == len(told)
    for a, b in zip(real, told, strict=True):
        assert (a.mask, a.paged) == (b.mask, b.paged)
        for name in ("q_lens", "kv_lens", "prefix_lens", "max_items", "items"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_a_fit_finds_a_law_again():
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 5, (400, 3))
    law = np.exp(0.3 + x @ [0.5, -0.2, 0.1] + 0.05 * x[:, 0] * x[:, 1])
    fit = Fit.of(x[:300], law[:300], ridge=1e-6)
    np.testing.assert_allclose(fit.milliseconds(x[300:]), law[300:], rtol=0.01)
