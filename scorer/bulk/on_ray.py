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

from scorer.bulk.parts import Job, begun, finish, write_part
from scorer.bulk.progress import Bar, job_of, options_of, rows_left, source_of, stopped, told
from scorer.bulk.scorers import scorer_of
from scorer.errors import ConfigError, StartError


class ChunkScorer:
    """A worker: scores chunks of one job, one after the other, on an event loop that it keeps."""

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        self._job = job
        self._options = options_of(args)
        self._runner = asyncio.Runner()
        self._context = scorer_of(args)
        self._scorer = self._runner.run(_enter(self._context))
        if self._runner.run(self._scorer.begin(args.max_tokens_per_document)) != job.scorer:
            raise ConfigError(
                "this worker serves another model or by other settings, such as the dtype, than the job began with"
            )

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """batch: {"chunk": numbers}; the rows of each, once its part is written, and which process wrote it."""
        chunks = [int(chunk) for chunk in batch["chunk"]]
        job, rows = self._job, []
        for chunk, table in job.source.tables(job.chunk_rows, chunks):
            scoring = self._scorer.score(job.source.rows_of(table), self._options, job.scorer)
            write_part(job, chunk, table, self._runner.run(scoring))
            rows.append(table.num_rows)
        return {"rows": rows, "worker": [f"{os.uname().nodename} {os.getpid()}"] * len(rows)}


async def _enter(context: Any) -> Any:
    return await context.__aenter__()


def run(args: argparse.Namespace) -> int:
    """Scores the file on Ray. Raises StartError."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs the ray extra: pip install 'prefixrank[ray]'") from None
    source = source_of(args)
    sent = argparse.Namespace(**{key: value for key, value in vars(args).items() if key not in ("run", "parser")})
    logging.getLogger("ray.data").setLevel(logging.WARNING)  # the bar tells it in rows
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.init(address=args.ray_address, include_dashboard=False, log_to_driver=False)
    try:
        job = job_of(args, source, _fingerprint(sent))
        with begun(job, args.restart, args.overwrite):
            failed = _score_pending(sent, job)
            return told(finish(job), args.output) if failed is None else stopped(failed)
    finally:
        ray.shutdown()


def _fingerprint(args: argparse.Namespace) -> str:
    """Of what the workers serve, asked on a machine such as theirs: this one may have no GPU. Raises StartError."""
    import ray

    asked = ray.remote(num_gpus=args.worker_gpus or None, max_calls=1)(_served).remote(args)
    try:
        return str(ray.get(asked))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, StartError):
            raise error.cause from None
        raise


def _served(args: argparse.Namespace) -> str:
    async def begin() -> str:
        async with scorer_of(args) as scorer:
            return await scorer.begin(args.max_tokens_per_document)

    return asyncio.run(begin())


def _score_pending(args: argparse.Namespace, job: Job) -> Any:
    """All chunks; what stopped it, if anything did."""
    import ray

    rows, pending, workers = job.source.rows, job.pending(), set()
    try:
        with Bar(rows, rows - rows_left(job.chunk_rows, rows, pending)) as bar:
            for row in _scored(args, job, pending):
                workers.add(row["worker"])
                bar.advance(row["rows"])
    except ray.exceptions.RayError as error:
        return error
    print(f"{len(workers)} workers scored {len(pending)} chunks", file=sys.stderr)
    return None


def _scored(args: argparse.Namespace, job: Job, pending: Sequence[int]) -> Any:
    """What each chunk's worker says, as it is done."""
    import ray

    if not pending:
        return
    chunks = ray.data.from_items([{"chunk": chunk} for chunk in pending], override_num_blocks=len(pending))
    scored = chunks.map_batches(
        ChunkScorer,
        fn_constructor_args=(args, job),
        batch_size=1,
        # One chunk at a time: what waits in one worker's line would keep another one idle.
        compute=ray.data.ActorPoolStrategy(size=args.workers, max_tasks_in_flight_per_actor=1),
        num_gpus=args.worker_gpus or None,
    )
    yield from scored.iter_rows()
