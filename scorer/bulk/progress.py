"""What the runs of `prefixrank score-file`, here and on Ray, have in common: the job, the bar and the last words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scorer.bulk.parts import Job


def job_of(args: argparse.Namespace, rows: int, size: int, scorer: str) -> Job:
    """The job that the arguments ask for."""
    from scorer.bulk.parts import Job

    return Job(
        input=args.input,
        output=args.output,
        query=args.query_column,
        document=args.document_column,
        chunk_rows=args.chunk_rows,
        rows=rows,
        input_bytes=size,
        scorer=scorer,
        max_tokens_per_document=args.max_tokens_per_document,
    )


def rows_left(chunk_rows: int, rows: int, pending: Sequence[int]) -> int:
    """Rows of the chunks that are not done; the last chunk may be shorter."""
    return sum(min(chunk_rows, rows - chunk * chunk_rows) for chunk in pending)


def stopped(error: BaseException) -> int:
    """Says why the job stopped and that it can go on."""
    print(f"prefixrank: {error}; what is done is kept, run it again to go on", file=sys.stderr)
    return 1


def told(counts: dict[str, int], output: str) -> int:
    """Says what is in the output."""
    found = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "no rows"
    print(f"{output}: {found}")
    return 0


class Bar:
    """A progress bar on standard error; without a terminal there is none."""

    def __init__(self, rows: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("rows", total=rows, completed=done)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def advance(self, rows: int) -> None:
        """So many more rows are done."""
        self._progress.advance(self._task, rows)
