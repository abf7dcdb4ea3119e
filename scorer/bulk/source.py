"""A job's input: a parquet file, in chunks of rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_128

from scorer.bulk.rows import Row
from scorer.errors import ConfigError

BLOCK_BYTES = 16 << 20

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
class Source:
    """The file, and the names of its columns. digest: of its bytes; state: what shows that they are still the same."""

    path: str
    query: str
    document: str
    rows: int
    digest: str
    state: tuple[int, int]

    def tables(self, chunk_rows: int, chunks: Sequence[int]) -> Iterator[tuple[int, pa.Table]]:
        """The rows of these chunks, ascending, read once. Raises ConfigError where it is another file by now, or cannot
        be read any more."""
        wanted, number = set(chunks), 0
        if not wanted:
            return
        with _reading(self.path), pq.ParquetFile(self.path) as file:
            for table in _even(file, chunk_rows):
                if _state(self.path) != self.state:
                    raise ConfigError(f"{self.path} was changed while its rows were scored")
                if number in wanted:
                    yield number, table
                number += 1
                if number > max(wanted):
                    return

    def rows_of(self, table: pa.Table) -> list[Row]:
        """Query and document of each row."""
        return list(zip(_texts(table[self.query]), _texts(table[self.document]), strict=True))

    def output_schema(self) -> pa.Schema:
        """Its columns, and those of the scores. Raises ConfigError."""
        with _reading(self.path):
            schema = pq.read_schema(self.path)
        for field in OUTPUT:
            schema = schema.append(field)
        return schema


def describe(path: str, query: str, document: str) -> Source:
    """Reads the input's bytes once. Raises ConfigError where it is not one that can be scored."""
    with _reading(path):
        state = _state(path)
        with pq.ParquetFile(path) as file:
            _check(path, file.schema_arrow, query, document)
            return Source(path, query, document, file.metadata.num_rows, _digest(path), state)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """What fails inside is the input's trouble. Raises ConfigError."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} is no parquet file that can be read: {error}") from None


def _check(path: str, schema: pa.Schema, query: str, document: str) -> None:
    for column in (query, document):
        count = schema.names.count(column)
        if count != 1:
            has = f"has {count} columns {column!r}" if count else f"has no column {column!r}"
            raise ConfigError(f"{path} {has}; it has {', '.join(schema.names)}")
        if not _is_text(schema.field(column).type):
            raise ConfigError(f"{path}: column {column!r} is {schema.field(column).type}, and no text")
    clash = sorted(set(schema.names) & set(OUTPUT.names))
    if clash:
        raise ConfigError(f"{path} already has the columns {', '.join(clash)} that scores are written to")


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def _state(path: str) -> tuple[int, int]:
    told = os.stat(path)
    return told.st_size, told.st_mtime_ns


def _digest(path: str) -> str:
    digest = xxh3_128()
    with Path(path).open("rb", buffering=0) as opened:
        while block := opened.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


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


def _texts(column: pa.ChunkedArray) -> list[object]:
    """Texts and nulls; where bytes are no UTF-8 the error that says so stands in their place."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_text(value) for value in column]


def _text(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return error
