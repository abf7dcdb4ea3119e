"""A bulk job over many machines: Ray Data hands out chunks, each worker is an engine with the model loaded once.

Input, output and parts lie where every worker can read and write them. A part is the unit that is done or not, as
without Ray, so a job may be stopped on a cluster and go on in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from scorer.bulk.parts import Job, begin, describe, finish, rows_of, tables, write_part
from scorer.bulk.progress import Bar, job_of, rows_left, stopped, told
from scorer.bulk.rows import Options, score_rows
from scorer.errors import ConfigError


class ChunkScorer:
    """A worker: scores chunks of one job, one after the other, on an event loop that it keeps."""

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        from scorer.bulk.scorers import local, remote
        from scorer.flags import config_of

        self._job = job
        self._options = Options(concurrency=args.concurrency, max_tokens_per_document=args.max_tokens_per_document)
        self._runner = asyncio.Runner()
        self._context = remote(args) if args.target else local(config_of(args))
        self._ask, name = self._runner.run(_enter(self._context))
        if name != job.scorer:
            raise ConfigError(f"this worker serves {name!r}, the job began with {job.scorer!r}")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """batch: {"chunk": numbers}; the rows of each, once its part is written, and which process wrote it."""
        chunks = [int(chunk) for chunk in batch["chunk"]]
        rows = []
        for chunk, table in tables(self._job, chunks):
            scored = self._runner.run(score_rows(rows_of(self._job, table), self._ask, self._options))
            write_part(self._job, chunk, table, scored)
            rows.append(table.num_rows)
        return {"rows": rows, "worker": [f"{os.uname().nodename} {os.getpid()}"] * len(rows)}


async def _enter(context: Any) -> Any:
    return await context.__aenter__()


def run(args: argparse.Namespace) -> int:
    """Scores the file on Ray. Raises ConfigError."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs the ray extra: pip install 'prefixrank[ray]'") from None
    rows, size = describe(args.input, args.query_column, args.document_column)
    job = job_of(args, rows, size, asyncio.run(_name(args)))
    begin(job, args.restart)
    pending = job.pending()
    workers: set[str] = set()
    logging.getLogger("ray.data").setLevel(logging.WARNING)  # the bar tells it in rows
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.init(address=args.ray_address, include_dashboard=False, log_to_driver=False)
    try:
        with Bar(job.rows, job.rows - rows_left(job.chunk_rows, job.rows, pending)) as bar:
            for row in _scored(args, job, pending):
                workers.add(row["worker"])
                bar.advance(row["rows"])
    except ray.exceptions.RayError as error:
        return stopped(error)
    finally:
        ray.shutdown()
    print(f"{len(workers)} workers scored {len(pending)} chunks", file=sys.stderr)
    return told(finish(job), args.output)


def _scored(args: argparse.Namespace, job: Job, pending: Sequence[int]) -> Any:
    """What each chunk's worker says, as it is done."""
    import ray

    if not pending:
        return
    sent = argparse.Namespace(**{key: value for key, value in vars(args).items() if key not in ("run", "parser")})
    chunks = ray.data.from_items([{"chunk": chunk} for chunk in pending], override_num_blocks=len(pending))
    scored = chunks.map_batches(
        ChunkScorer,
        fn_constructor_args=(sent, job),
        batch_size=1,
        # One chunk at a time: what waits in one worker's line would keep another one idle.
        compute=ray.data.ActorPoolStrategy(size=args.workers, max_tasks_in_flight_per_actor=1),
        num_gpus=args.worker_gpus or None,
    )
    yield from scored.iter_rows()


async def _name(args: argparse.Namespace) -> str:
    """What the workers will serve."""
    from scorer.bulk.scorers import local, remote
    from scorer.flags import config_of

    async with remote(args) if args.target else local(config_of(args)) as (_, name):
        return name
