"""`prefixrank score-file`: a parquet file in, the same rows with scores out."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from scorer.bulk.progress import Bar, job_of, options_of, rows_left, source_of, stopped, told
from scorer.errors import ConfigError
from scorer.flags import MODEL_SETTINGS, POSITIVE, add_settings, given_flags, number, whole
from scorer.remote import add_target

if TYPE_CHECKING:
    from scorer.bulk.parts import Job
    from scorer.bulk.rows import Options
    from scorer.bulk.scorers import Scorer

EXAMPLE = """example:
  prefixrank score-file pairs.parquet -o scores.parquet
  prefixrank score-file pairs.parquet -o scores.parquet --target localhost:50051
  prefixrank score-file pairs.parquet -o scores.parquet --ray --workers 2

Rows are (query, document); the output has them in the same order with score, probability, status, message,
document_tokens (lengths are in tokens) and truncated beside. Rows of one query that lie in the same chunk share its
prefix: sort by query. Stopped, it goes on where it was, from PARQUET.parts, as long as input, model and settings are
the same to the byte; bad rows stay, with their status. Needs the bulk extra.
Exit codes: 0 every row has its status; 1 the scorer failed, run it again to go on; 2 could not begin, or input or model
were changed on the way."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments and the settings of the model."""
    parser.add_argument("input", metavar="PARQUET", help="with a column of queries and one of documents")
    parser.add_argument("-o", "--output", required=True, metavar="PARQUET", help="what to write")
    parser.add_argument("--query-column", default="query", metavar="NAME", help="default: query")
    parser.add_argument("--document-column", default="document", metavar="NAME", help="default: document")
    parser.add_argument("--timeout", type=POSITIVE, default=600.0, metavar="SECONDS", help="a request (default: 600)")
    told = "done at once, and lost where it is stopped (default: 20000)"
    parser.add_argument("--chunk-rows", type=whole(1), default=20_000, metavar="N", help=told)
    parser.add_argument("--concurrency", type=whole(1), default=8, metavar="N", help="requests under way (default: 8)")
    told = "cuts longer ones (default, and at most: the profile's)"
    parser.add_argument("--max-tokens-per-document", type=whole(0), default=0, metavar="N", help=told)
    parser.add_argument("--restart", action="store_true", help="forget what an earlier run has done")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that is there (default: refuse)")
    told = "spread the chunks over a Ray cluster, or over processes of this machine where there is none"
    parser.add_argument("--ray", action="store_true", help=told)
    parser.add_argument("--ray-address", metavar="ADDRESS", help="of the cluster (default: what Ray finds, or local)")
    parser.add_argument("--workers", type=whole(1), default=1, metavar="N", help="engines on Ray (default: 1)")
    parser.add_argument("--worker-gpus", type=number(0), default=0.0, metavar="X", help="GPUs of each (default: 0)")
    add_target(parser)
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


def _refuse_combinations(args: argparse.Namespace) -> None:
    if args.target and (given_flags(args) or args.config):
        args.parser.error("settings are for a model in this process; with --target the server has its own")
    if not args.ray and (args.ray_address or args.workers != 1 or args.worker_gpus):
        args.parser.error("--ray-address, --workers and --worker-gpus go with --ray")
    if Path(args.output).resolve() == Path(args.input).resolve():
        args.parser.error("the output would replace the input")


async def _run(args: argparse.Namespace) -> int:
    from scorer.bulk.parts import begun, finish
    from scorer.bulk.scorers import scorer_of

    source = source_of(args)
    async with scorer_of(args) as scorer:
        job = job_of(args, source, await scorer.begin(args.max_tokens_per_document))
        with begun(job, args.restart, args.overwrite):
            failed = await _score_pending(job, scorer, options_of(args))
            return told(finish(job), args.output) if failed is None else stopped(failed)


async def _score_pending(job: Job, scorer: Scorer, options: Options) -> BaseException | None:
    """Chunk after chunk; what stopped it, if anything did."""
    from scorer.bulk.parts import write_part
    from scorer.client_errors import ScorerError

    source, pending, failed = job.source, job.pending(), None
    with Bar(source.rows, source.rows - rows_left(job.chunk_rows, source.rows, pending)) as bar:
        for chunk, table in source.tables(job.chunk_rows, pending):
            try:
                scored = await scorer.score(source.rows_of(table), options, job.scorer)
            except* ScorerError as group:
                failed = group.exceptions[0]
            if failed is not None:
                break
            write_part(job, chunk, table, scored)
            bar.advance(table.num_rows)
    return failed
