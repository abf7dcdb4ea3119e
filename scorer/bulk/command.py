"""`prefixrank score-file`: a parquet file in, the same rows with scores out."""

from __future__ import annotations

import argparse
import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from scorer.bulk.progress import Bar, job_of, rows_left, stopped, told
from scorer.errors import ConfigError
from scorer.flags import MODEL_SETTINGS, add_settings, config_of, given_flags
from scorer.remote import add_remote

if TYPE_CHECKING:
    from scorer.bulk.parts import Job
    from scorer.bulk.rows import Ask, Options

EXAMPLE = """example:
  prefixrank score-file pairs.parquet -o scores.parquet
  prefixrank score-file pairs.parquet -o scores.parquet --target localhost:50051
  prefixrank score-file pairs.parquet -o scores.parquet --ray --workers 2

Rows are (query, document); the output has them in the same order with score, probability, status, message,
document_tokens (lengths are in tokens) and truncated beside. Rows of one query that lie in the same chunk share its
prefix: sort by query. Stopped, it goes on where it was; bad rows stay, with their status. Needs the bulk extra.
Exit codes: 0 every row has its status; 1 the scorer failed, run it again to go on; 2 could not begin."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments and the settings of the model."""
    parser.add_argument("input", metavar="PARQUET", help="with a column of queries and one of documents")
    parser.add_argument("-o", "--output", required=True, metavar="PARQUET", help="what to write")
    parser.add_argument("--query-column", default="query", metavar="NAME", help="default: query")
    parser.add_argument("--document-column", default="document", metavar="NAME", help="default: document")
    parser.add_argument("--target", metavar="HOST:PORT", help="a running server (default: the model in this process)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of a request (default: 600)")
    told = "done at once, and lost where it is stopped (default: 20000)"
    parser.add_argument("--chunk-rows", type=_positive, default=20_000, metavar="N", help=told)
    parser.add_argument("--concurrency", type=_positive, default=8, metavar="N", help="requests under way (default: 8)")
    parser.add_argument("--max-tokens-per-document", type=int, default=0, metavar="N", help="cuts longer ones")
    parser.add_argument("--restart", action="store_true", help="forget what an earlier run has done")
    told = "spread the chunks over a Ray cluster, or over processes of this machine where there is none"
    parser.add_argument("--ray", action="store_true", help=told)
    parser.add_argument("--ray-address", metavar="ADDRESS", help="of the cluster (default: what Ray finds, or local)")
    parser.add_argument("--workers", type=_positive, default=1, metavar="N", help="engines on Ray (default: 1)")
    parser.add_argument("--worker-gpus", type=float, default=0.0, metavar="X", help="GPUs of each (default: 0)")
    add_remote(parser)
    add_settings(parser, MODEL_SETTINGS)


def run(args: argparse.Namespace) -> int:
    """Scores the file."""
    _refuse_combinations(args)
    try:
        import pyarrow  # noqa: F401  one clear error for all modules that need it
    except ImportError:
        raise ConfigError("score-file needs the bulk extra: pip install 'prefixrank[bulk]'") from None
    logging.getLogger("scorer.access").setLevel(logging.WARNING)
    if args.ray:
        from scorer.bulk.on_ray import run as on_ray

        return on_ray(args)
    return asyncio.run(_run(args))


def _positive(given: str) -> int:
    if int(given) < 1:
        raise ValueError("at least 1")
    return int(given)


def _refuse_combinations(args: argparse.Namespace) -> None:
    if args.target and (given_flags(args) or args.config):
        args.parser.error("settings are for a model in this process; with --target the server has its own")
    if not args.ray and (args.ray_address or args.workers != 1 or args.worker_gpus):
        args.parser.error("--ray-address, --workers and --worker-gpus go with --ray")
    if Path(args.output).resolve() == Path(args.input).resolve():
        args.parser.error("the output would replace the input")


async def _run(args: argparse.Namespace) -> int:
    from scorer.bulk.parts import begin, describe, finish
    from scorer.bulk.rows import Options

    rows, size = describe(args.input, args.query_column, args.document_column)
    async with _scorer(args) as (ask, name):
        job = job_of(args, rows, size, name)
        begin(job, args.restart)
        options = Options(concurrency=args.concurrency, max_tokens_per_document=args.max_tokens_per_document)
        failed = await _score_pending(job, ask, options)
    return told(finish(job), args.output) if failed is None else stopped(failed)


async def _score_pending(job: Job, ask: Ask, options: Options) -> BaseException | None:
    """Chunk after chunk; what stopped it, if anything did."""
    from scorer.bulk.parts import rows_of, tables, write_part
    from scorer.bulk.rows import score_rows
    from scorer.client_errors import ScorerError

    pending, failed = job.pending(), None
    with Bar(job.rows, job.rows - rows_left(job.chunk_rows, job.rows, pending)) as bar:
        for chunk, table in tables(job, pending):
            try:
                scored = await score_rows(rows_of(job, table), ask, options)
            except* ScorerError as group:
                failed = group.exceptions[0]
            if failed is not None:
                break
            write_part(job, chunk, table, scored)
            bar.advance(table.num_rows)
    return failed


def _scorer(args: argparse.Namespace) -> AbstractAsyncContextManager[tuple[Ask, str]]:
    from scorer.bulk.scorers import local, remote

    return remote(args) if args.target else local(config_of(args))
