"""What the runs of `prefixrank score-file`, here and on Ray, have in common: the job, the bar and the last words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scorer.bulk.parts import Job
    from scorer.bulk.rows import Options
    from scorer.bulk.source import Source


def source_of(args: argparse.Namespace) -> Source:
    """The input, before a model is loaded. Raises ConfigError where it, or the output, is none that will do."""
    from scorer.bulk.parts import check_output
    from scorer.bulk.source import describe

    check_output(args.output, args.restart, args.overwrite)
    return describe(args.input, args.query_column, args.document_column)


def job_of(args: argparse.Namespace, source: Source, scorer: str) -> Job:
    """The job that the arguments ask for."""
    from scorer.bulk.parts import Job

    return Job(source, args.output, args.chunk_rows, scorer, args.max_tokens_per_document)


def options_of(args: argparse.Namespace) -> Options:
    """Of each request."""
    from scorer.bulk.rows import Options

    return Options(concurrency=args.concurrency, max_tokens_per_document=args.max_tokens_per_document)


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
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from scorer.console import plain_console

        console = plain_console(stderr=True)
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
