"""When Python's collector may not run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def keep_loaded() -> None:
    """What was loaded stays: the collector need not walk it again."""
    gc.collect()
    gc.freeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """No collection meanwhile. A CUDA graph that is freed while another is captured, whoever left it, spoils that."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
