"""Hypothesis strategies for layouts: one to four requests, shared, cached and partly cached prefixes, any page size."""

import os
from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from attention.layout import Layout, Segment
from attention.plans import Pages

# Mutation testing runs every test some hundred times: there a tenth of the examples does.
SHARE = 0.1 if "MUTANTS" in os.environ else 1.0
LENGTHS = st.one_of(st.integers(1, 5), st.sampled_from([15, 16, 17, 31, 32, 33]), st.integers(1, 40))


@st.composite
def segments(draw, max_requests=4, deep=True):
    """A forest: each request is a path of one to three inner segments with one to five items behind it."""
    forest: list[Segment] = []
    inner: list[int] = []
    for _ in range(draw(st.integers(1, max_requests))):
        branch = draw(st.sampled_from([-1, *inner])) if deep else -1
        for _depth in range(draw(st.integers(0 if branch < 0 else 1, 3 if deep else 1))):
            length = draw(LENGTHS)
            above_is_whole = branch < 0 or forest[branch].cached == forest[branch].length
            share = draw(st.sampled_from(["new", "cached", "partly"]))
            cached = {"new": 0, "cached": length, "partly": draw(st.integers(0, length))}[share]
            forest.append(Segment(branch, length, cached if above_is_whole else 0))
            branch = len(forest) - 1
            inner.append(branch)
        forest.extend(Segment(branch, draw(LENGTHS)) for _ in range(draw(st.integers(1, 5))))
    return with_reads(forest)


def with_reads(forest):
    """Reads at the last token of every leaf."""
    parents = {s.parent for s in forest}
    return [s if i in parents else replace(s, reads=(s.length - 1,)) for i, s in enumerate(forest)]


@st.composite
def cases(draw, **kwargs):
    """A layout and pages for it: cached segments in shuffled kept pages, some uncached ones kept too."""
    layout = Layout.of(draw(segments(**kwargs)))
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    keep = draw(st.booleans())
    needed = [
        -(-int(layout.start[s] + layout.length[s]) // page_size) - int(layout.start[s]) // page_size
        for s in range(layout.segments)
    ]
    kept = [bool(layout.cached[s]) or (keep and not layout.is_leaf[s]) for s in range(layout.segments)]
    total = sum(n for n, k in zip(needed, kept, strict=True) if k)
    ids = np.array(draw(st.permutations(range(total))), np.int32)
    pages, used = [], 0
    for n, k in zip(needed, kept, strict=True):
        pages.append(ids[used : used + n] if k else None)
        used += n if k else 0
    return layout, Pages(page_size, total, tuple(pages))


def examples(count):
    """Settings of a property that is tried on so many examples."""
    return settings(max_examples=max(1, round(count * SHARE)), deadline=None)
