"""A job's files: the input in chunks, a part for each chunk that is done, and at the end one output.

A part is written whole or not at all, so a job that was stopped goes on with the chunks that have none.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scorer.bulk.rows import Row, ScoredRow
from scorer.errors import ConfigError

OUTPUT = pa.schema(
    [
        ("score", pa.float64()),
        ("probability", pa.float64()),
        ("status", pa.string()),
        ("message", pa.string()),
        ("document_tokens", pa.int32()),
        ("truncated", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class Job:
    """One file to score. What changes a score or a chunk's rows is in it, so that parts of another job are noticed."""

    input: str
    output: str
    query: str
    document: str
    chunk_rows: int
    rows: int
    input_bytes: int
    scorer: str
    max_tokens_per_document: int

    @property
    def parts(self) -> Path:
        return Path(f"{self.output}.parts")

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk_rows)

    def part(self, chunk: int) -> Path:
        return self.parts / f"{chunk:08d}.parquet"

    def pending(self) -> list[int]:
        """Chunks that have no part yet."""
        return [chunk for chunk in range(self.chunks) if not self.part(chunk).exists()]


def describe(input: str, query: str, document: str) -> tuple[int, int]:
    """Rows and bytes of the input. Raises ConfigError where it is not one that can be scored."""
    try:
        file = pq.ParquetFile(input)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{input} is no parquet file that can be read: {error}") from None
    with file:
        names = file.schema_arrow.names
        for column in (query, document):
            if column not in names:
                raise ConfigError(f"{input} has no column {column!r}; it has {', '.join(names)}")
        clash = sorted(set(names) & set(OUTPUT.names))
        if clash:
            raise ConfigError(f"{input} already has the columns {', '.join(clash)} that scores are written to")
        return file.metadata.num_rows, os.path.getsize(input)


def begin(job: Job, restart: bool) -> None:
    """Makes the folder of parts, or finds it from an earlier run of the same job. Raises ConfigError."""
    if restart:
        shutil.rmtree(job.parts, ignore_errors=True)
    manifest = job.parts / "job.json"
    told = {key: value for key, value in asdict(job).items() if key not in ("input", "output")}
    if manifest.exists():
        before = json.loads(manifest.read_text(encoding="utf-8"))
        changed = sorted(key for key in told.keys() | before.keys() if told.get(key) != before.get(key))
        if changed:
            raise ConfigError(
                f"{job.parts} has parts of another job ({', '.join(changed)} changed): --restart begins anew"
            )
        return
    job.parts.mkdir(parents=True, exist_ok=True)
    _whole(manifest, lambda path: path.write_text(json.dumps(told), encoding="utf-8"))


def tables(job: Job, chunks: Sequence[int]) -> Iterator[tuple[int, pa.Table]]:
    """The rows of these chunks, ascending, read once."""
    wanted, number = set(chunks), 0
    if not wanted:
        return
    with pq.ParquetFile(job.input) as file:
        for table in _even(file, job.chunk_rows):
            if number in wanted:
                yield number, table
            number += 1
            if number > max(wanted):
                return


def _even(file: pq.ParquetFile, rows: int) -> Iterator[pa.Table]:
    """Tables of exactly so many rows but for the last: the file's row groups end where they want."""
    kept: list[pa.Table] = []
    count = 0
    for batch in file.iter_batches(batch_size=rows):
        table = pa.Table.from_batches([batch])
        while count + table.num_rows >= rows:
            yield pa.concat_tables([*kept, table.slice(0, rows - count)])
            table, kept, count = table.slice(rows - count), [], 0
        if table.num_rows:
            kept.append(table)
            count += table.num_rows
    if kept:
        yield pa.concat_tables(kept)


def rows_of(job: Job, table: pa.Table) -> list[Row]:
    """Query and document of each row."""
    return list(zip(table[job.query].to_pylist(), table[job.document].to_pylist(), strict=True))


def write_part(job: Job, chunk: int, table: pa.Table, scored: Sequence[ScoredRow]) -> None:
    """The chunk's rows with their scores beside them."""
    assert len(scored) == table.num_rows, "one result a row"
    columns = {name: [getattr(row, name) for row in scored] for name in OUTPUT.names}
    for field, values in zip(OUTPUT, columns.values(), strict=True):
        table = table.append_column(field, pa.array(values, field.type))
    _whole(job.part(chunk), lambda path: pq.write_table(table, path))


def finish(job: Job) -> dict[str, int]:
    """Puts all parts into the output, removes them, and counts the rows of each status."""
    counts: dict[str, int] = {}

    def write(path: Path) -> None:
        writer: pq.ParquetWriter | None = None
        for chunk in range(job.chunks):
            table = pq.read_table(job.part(chunk))
            for status in table["status"].to_pylist():
                counts[status] = counts.get(status, 0) + 1
            writer = pq.ParquetWriter(path, table.schema) if writer is None else writer
            writer.write_table(table)
        if writer is not None:
            writer.close()
        else:
            pq.write_table(_empty(job), path)

    _whole(Path(job.output), write)
    shutil.rmtree(job.parts)
    return counts


def _empty(job: Job) -> pa.Table:
    schema = pq.read_schema(job.input)
    for field in OUTPUT:
        schema = schema.append(field)
    return schema.empty_table()


def _whole(path: Path, write: Callable[[Path], object]) -> None:
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(work)
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
