"""The one truth about who sees whom, as a dense matrix: for tests and for the `reference` strategy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attention.layout import Layout


def visible(layout: Layout, window: int | None = None) -> NDArray[np.bool_]:
    """[rows, tokens] True where the row attends to the token.

    window: a row sees only the `window` nearest positions, its own included (transformers' `sliding_window`).
    """
    seen = np.zeros((layout.rows, layout.tokens), np.bool_)
    for segment in range(layout.segments):
        rows = slice(layout.row_start[segment], layout.row_start[segment + 1])
        positions = layout.position_ids[rows]
        for ancestor in layout.path(segment):
            keys = slice(layout.token_start[ancestor], layout.token_start[ancestor + 1])
            key_positions = layout.start[ancestor] + np.arange(layout.length[ancestor])
            distance = positions[:, None] - key_positions[None, :]
            near = distance >= 0
            if window is not None:
                near &= distance < window
            seen[rows, keys] = near
    return seen
