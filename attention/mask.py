"""The one truth about who sees whom, as a dense matrix: for tests and for the `reference` strategy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attention.layout import Ints, Layout, indptr


def visible(layout: Layout, window: int | None = None, segments: Ints | None = None) -> NDArray[np.bool_]:
    """[rows, tokens] True where the row attends to the token.

    window: a row sees only the `window` nearest positions, its own included (transformers' `sliding_window`).
    segments: only the rows and tokens of these, with their ancestors among them; None: of all.
    """
    chosen = np.arange(layout.segments, dtype=np.int32) if segments is None else segments
    row_start, token_start = (indptr(lengths[chosen]) for lengths in (layout.length - layout.cached, layout.length))
    place = {int(segment): i for i, segment in enumerate(chosen)}
    seen = np.zeros((row_start[-1], token_start[-1]), np.bool_)
    for i, segment in enumerate(chosen):
        positions = layout.start[segment] + np.arange(layout.cached[segment], layout.length[segment])
        for ancestor in layout.path(int(segment)):
            j = place[ancestor]
            key_positions = layout.start[ancestor] + np.arange(layout.length[ancestor])
            distance = positions[:, None] - key_positions[None, :]
            near = distance >= 0
            if window is not None:
                near &= distance < window
            seen[row_start[i] : row_start[i + 1], token_start[j] : token_start[j + 1]] = near
    return seen
