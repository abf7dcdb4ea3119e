"""A plan in the making: which page holds what, and which rows a launch has claimed.

Page j of a path holds its positions [j * page_size, (j + 1) * page_size), and only the last page of a request may be
partial. So a segment that begins inside a page gets a copy of its own of that page's earlier tokens (`tail`), and every
page before it is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from attention.layout import NONE, Ints, Layout, ranges
from attention.plans import Launch, Pages, Plan, slots_in


class Draft:
    """Hands out pages and rows to the strategies, and collects what has to be written where.

    packed_rows  rows of a packed_multi_item request
    pages_of  pages of each inner segment that has some
    copies    (from, to) slots of cached K/V
    """

    def __init__(self, layout: Layout, pages: Pages, window: int | None, packed_rows: int) -> None:
        self.layout = layout
        self.page_size = pages.page_size
        self.packed_rows = packed_rows
        self.pages_of: dict[int, Ints] = {}
        self.copies: list[tuple[Ints, Ints]] = []
        self._window = window
        self._kept = pages.kept
        self._next_page = pages.first_scratch
        self._claimed: set[int] = set()
        self._append: list[tuple[Ints, Ints]] = []

    def window(self, leaves: Ints) -> int | None:
        """The window as far as the paths of these leaves meet it: a longer one is exactly causal."""
        longest = int((self.layout.start[leaves] + self.layout.length[leaves]).max())
        return None if self._window is None or self._window >= longest else self._window

    def new_pages(self, count: int) -> Ints:
        first = self._next_page
        self._next_page += count
        return np.arange(first, first + count, dtype=np.int32)

    def claim(self, path: Sequence[int]) -> Ints:
        """The rows along `path` that no launch computes yet; afterwards they are taken. Always a suffix of the path."""
        fresh = np.array([s for s in path if s not in self._claimed], np.int32)
        self._claimed.update(path)
        return ranges(self.layout.row_start[fresh], np.diff(self.layout.row_start)[fresh])

    def home(self, path: Sequence[int]) -> Ints:
        """The pages of a path of inner segments, in order of position; writes what is not there yet."""
        for depth, segment in enumerate(path):
            if segment not in self.pages_of:
                self._settle(path[: depth + 1])
        table = [self.pages_of[segment] for segment in path]
        first = [int(self.layout.start[s]) // self.page_size for s in path]
        before_next = [after - before for before, after in pairwise(first)]
        shared = [pages[:count] for pages, count in zip(table, before_next, strict=False)]
        return np.concatenate([NONE, *shared, *table[-1:]])

    def keep(self, path: Sequence[int]) -> None:
        """Writes what is to outlive the pass, for a strategy that reads no pages itself."""
        for depth, segment in enumerate(path):
            if self._kept[segment] is not None and segment not in self.pages_of:
                self._settle(path[: depth + 1])

    def _settle(self, path: Sequence[int]) -> None:
        """Gives the last segment of `path` its pages and writes its rows there."""
        layout, size, segment = self.layout, self.page_size, path[-1]
        start, length, cached = (int(a[segment]) for a in (layout.start, layout.length, layout.cached))
        kept = self._kept[segment]
        needed = -(-(start + length) // size) - start // size
        assert kept is None or len(kept) == needed, f"segment {segment} needs {needed} pages, was given {len(kept)}"
        assert kept is not None or cached == 0, f"segment {segment} has cached tokens but no kept pages"
        pages = self.new_pages(needed) if kept is None else kept
        self.pages_of[segment] = pages
        if cached == 0:
            self.tail(path[:-1], pages[:1])
        slots = self.slots(pages, start % size + cached, length - cached)
        self.append(np.arange(layout.row_start[segment], layout.row_start[segment + 1], dtype=np.int32), slots)

    def tail(self, path: Sequence[int], first_pages: Ints) -> None:
        """Copies the path's tokens that lie in its last, partial page to the beginning of each of `first_pages`."""
        layout, size = self.layout, self.page_size
        page_start = int(layout.start[path[-1]] + layout.length[path[-1]]) // size * size if path else 0
        for segment in reversed(path):
            start, end = int(layout.start[segment]), int(layout.start[segment] + layout.length[segment])
            for position in range(max(start, page_start), end):
                self._copy_token(segment, position, first_pages * np.int32(size) + np.int32(position % size))

    def _copy_token(self, segment: int, position: int, to: Ints) -> None:
        layout, size = self.layout, self.page_size
        start, cached = int(layout.start[segment]), int(layout.cached[segment])
        if position - start < cached:
            page = self.pages_of[segment][position // size - start // size]
            self.copies.append((np.full_like(to, page * size + position % size), to))
        else:
            self.append(np.full_like(to, layout.row_start[segment] + position - start - cached), to)

    def append(self, rows: Ints, slots: Ints) -> None:
        """The K/V of `rows` goes to `slots`."""
        self._append.append((rows, slots))

    def slots(self, pages: Ints, offset: int, count: int) -> Ints:
        """`count` slots of consecutive tokens, from `offset` within the first of `pages` on."""
        return slots_in(pages, self.page_size, offset, count)

    def written(self) -> tuple[Ints, Ints]:
        """Rows whose K/V has been told to go into pages, and their slots."""
        return _joined(self._append)

    def finish(self, launches: Sequence[Launch], merges: Sequence[tuple[int, int]], soft_cap: float) -> Plan:
        append_rows, append_slots = self.written()
        copy_from, copy_to = _joined(self.copies)
        kept = [int(pages.max()) + 1 for pages in self._kept if pages is not None and len(pages)]
        return Plan(
            page_size=self.page_size,
            num_pages=max([self._next_page, *kept]),
            append_rows=append_rows,
            append_slots=append_slots,
            copy_from=copy_from,
            copy_to=copy_to,
            launches=tuple(launches),
            merges=tuple(merges),
            logits_soft_cap=soft_cap,
        )


def _joined(pairs: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    return np.concatenate([NONE, *(pair[0] for pair in pairs)]), np.concatenate([NONE, *(pair[1] for pair in pairs)])
