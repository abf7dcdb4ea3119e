"""Where commands print."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console


def plain_console(stderr: bool = False, file: TextIO | None = None, width: int | None = None) -> Console:
    """One that prints what users gave as it is: no markup, no emoji codes (`:abc:`), no colours of its own."""
    return Console(stderr=stderr, file=file, width=width, markup=False, emoji=False, highlight=False)
