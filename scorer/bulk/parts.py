"""A job's files: a part for each chunk that is done, and at the end one output.

A part is written whole or not at all, so a job that was stopped goes on with the chunks that have none. All that is
unfinished lies in the folder of parts, which one run at a time has and which goes when the output is there.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from scorer.bulk.rows import ScoredRow
from scorer.bulk.source import OUTPUT, Source
from scorer.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One file to score. What changes a score or a chunk's rows is in it, so that parts of another job are noticed.

    scorer: the fingerprint of what is served
    """

    source: Source
    output: str
    chunk_rows: int
    scorer: str
    max_tokens_per_document: int

    @property
    def parts(self) -> Path:
        return parts_of(self.output)

    @property
    def chunks(self) -> int:
        return -(-self.source.rows // self.chunk_rows)

    def part(self, chunk: int) -> Path:
        return self.parts / f"{chunk:08d}.parquet"

    def pending(self) -> list[int]:
        """Chunks that have no part yet."""
        return [chunk for chunk in range(self.chunks) if not self.part(chunk).exists()]

    def told(self) -> dict[str, object]:
        """What must be the same for its parts to be this job's."""
        return {
            "query": self.source.query,
            "document": self.source.document,
            "input": self.source.digest,
            "chunk_rows": self.chunk_rows,
            "scorer": self.scorer,
            "max_tokens_per_document": self.max_tokens_per_document,
        }


def parts_of(output: str) -> Path:
    """Where its parts lie."""
    return Path(f"{output}.parts")


def check_output(output: str, restart: bool, overwrite: bool) -> None:
    """Raises ConfigError where the output cannot be written, or would replace a file that nobody said to replace."""
    path, goes_on = Path(output), _manifest(parts_of(output)).exists() and not restart
    if path.is_dir():
        raise ConfigError(f"the output {output} is a directory: name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"the output {output}: there is no directory {path.parent}")
    if path.exists() and not overwrite and not goes_on:
        raise ConfigError(f"the output {output} is there already: --overwrite replaces it")


@contextmanager
def begun(job: Job, restart: bool = False, overwrite: bool = False) -> Iterator[None]:
    """Makes the folder of parts, or finds it from an earlier run of the same job, and keeps other runs out of it.

    Raises ConfigError.
    """
    with ExitStack() as ending:
        with _writing(job):
            job.parts.mkdir(parents=True, exist_ok=True)
            lock = ending.enter_context((job.parts / "lock").open("w"))
            _take(lock, job)
            ending.callback(_leave, job)
            check_output(job.output, restart, overwrite)  # again: another run may have written it by now
            if restart:
                _clear(job.parts)
            _check_parts(job)
        yield


@contextmanager
def _writing(job: Job) -> Iterator[None]:
    """What the system refuses inside is the output's trouble, and nobody else's. Raises ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"the output {job.output}: {error}") from None


def _take(lock: IO[str], job: Job) -> None:
    """Held until it is closed, so a run that was killed holds none."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another run is at work on {job.output}") from None
    except OSError as error:  # some shared file systems have no locks
        log.warning("%s: %s: see to it that no other run has this output", lock.name, error.strerror)
    if not os.fstat(lock.fileno()).st_nlink:
        raise ConfigError(f"another run at work on {job.output} has just ended")


def _check_parts(job: Job) -> None:
    manifest, told = _manifest(job.parts), job.told()
    for left in job.parts.glob(".*.tmp"):
        left.unlink()
    if not manifest.exists() and not any(_parts(job.parts)):
        _whole(manifest, job.parts, lambda path: path.write_text(json.dumps(told), encoding="utf-8"))
    try:
        before = dict(json.loads(manifest.read_bytes()))
    except (FileNotFoundError, TypeError, ValueError):
        unknown = f"{job.parts} has parts, and no {manifest.name} that says of which job"
        raise ConfigError(f"{unknown}: --restart begins anew") from None
    changed = sorted(key for key in told.keys() | before.keys() if told.get(key) != before.get(key))
    if changed:
        raise ConfigError(f"{job.parts} has parts of another job ({', '.join(changed)} changed): --restart begins anew")


def _manifest(parts: Path) -> Path:
    return parts / "job.json"


def _parts(parts: Path) -> Iterator[Path]:
    return parts.glob("[0-9]*.parquet")


def _clear(parts: Path) -> None:
    """Killed in the middle it leaves fewer parts of the same job, never parts that nobody knows."""
    for part in _parts(parts):
        part.unlink()
    _manifest(parts).unlink(missing_ok=True)


def _leave(job: Job) -> None:
    """Removes the folder where nothing is left to go on with."""
    if not _manifest(job.parts).exists() and not any(_parts(job.parts)):
        with _writing(job):
            (job.parts / "lock").unlink()
        with suppress(OSError):  # what is not ours stays
            job.parts.rmdir()


def write_part(job: Job, chunk: int, table: pa.Table, scored: Sequence[ScoredRow]) -> None:
    """The chunk's rows with their scores beside them. Raises ConfigError where they cannot be written."""
    assert len(scored) == table.num_rows, "one result a row"
    columns = {name: [getattr(row, name) for row in scored] for name in OUTPUT.names}
    for field, values in zip(OUTPUT, columns.values(), strict=True):
        table = table.append_column(field, pa.array(values, field.type))
    with _writing(job):
        _whole(job.part(chunk), job.parts, lambda path: pq.write_table(table, path))


def finish(job: Job) -> dict[str, int]:
    """Puts all parts into the output, removes them, and counts the rows of each status. The job must have begun.

    Raises ConfigError where it cannot be written.
    """
    counts: dict[str, int] = {}

    def write(path: Path) -> None:
        writer: pq.ParquetWriter | None = None
        for chunk in range(job.chunks):
            # read_table would look for columns in the path (day=1/) and stumble over two of one name
            with pq.ParquetFile(job.part(chunk)) as part:
                table = part.read()
            for status in table["status"].to_pylist():
                counts[status] = counts.get(status, 0) + 1
            writer = pq.ParquetWriter(path, table.schema) if writer is None else writer
            writer.write_table(table)
        if writer is not None:
            writer.close()
        else:
            pq.write_table(job.source.output_schema().empty_table(), path)

    with _writing(job):
        _whole(Path(job.output), job.parts, write)
        _clear(job.parts)
    return counts


def _whole(path: Path, folder: Path, write: Callable[[Path], object]) -> None:
    """Written in the folder of parts, where what a killed run leaves is found again, and then put into its place."""
    work = folder / f".{uuid4().hex}.tmp"
    try:
        write(work)
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
