"""How many bytes of tensors live while something runs, on any device: what a pass takes is measured on a small one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scorer.memory import Growth

ROWS = 64  # of the measured pass
FINE = 16  # parts into which the measured pass is chunked


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages made while it is active. Scratch memory inside a kernel is not seen.

    now, peak  bytes
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self._made(x.untyped_storage())
        return out

    def _made(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes()).atexit = False

    def _gone(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.now -= size


def peak_of(run: Callable[[], object]) -> int:
    """Bytes that lived at once, at most, beside what was there before."""
    live = LiveBytes()
    with torch.inference_mode(), live:
        run()
    return live.peak


def growth(run: Callable[[int, int], object], chunk: int) -> Growth:
    """What a pass takes, from two small ones.

    run: computes (rows, rows that the position-wise layers take at a time). chunk: of those, in a real pass.

    Whichever moment of a pass takes most, it is linear in both numbers, so the peak is convex in the second: between
    whole and finely chunked it lies below their chord.
    """
    run(ROWS, ROWS)  # what is made once and stays is not counted
    whole = peak_of(lambda: run(ROWS, ROWS))
    fine = min(whole, peak_of(lambda: run(ROWS, ROWS // FINE)))
    chunk_row = -(-(whole - fine) * FINE // ((FINE - 1) * ROWS))
    return Growth(row=-(-fine // ROWS), chunk_row=chunk_row, chunk=chunk)
