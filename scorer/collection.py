"""A test collection on disk: documents, queries, and which documents were judged relevant to which query.

corpus.jsonl   {"_id": "...", "title": "...", "text": "..."} a line; the title may be missing or empty
queries.jsonl  {"_id": "...", "text": "..."} a line
qrels.trec     query id, iteration, document id, grade, separated by white space
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scorer.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Collection:
    """documents, queries: texts by id, in the order of the files. qrels: grades by document id, by query id."""

    documents: Mapping[str, str]
    queries: Mapping[str, str]
    qrels: Mapping[str, Mapping[str, int]]

    @classmethod
    def read(cls, directory: Path) -> Collection:
        """Raises ConfigError naming the file, the line and what is wrong with it."""
        documents = {id: _joined(line) for id, line in _texts(directory / "corpus.jsonl", ("title", "text"))}
        queries = {id: line["text"] for id, line in _texts(directory / "queries.jsonl", ("text",))}
        return cls(documents, queries, _qrels(directory / "qrels.trec"))

    def first_judged(self, count: int | None) -> Sequence[str]:
        """Ids of the first `count` queries to which some document is relevant; None: of all."""
        judged = [id for id in self.queries if any(grade > 0 for grade in self.qrels.get(id, {}).values())]
        return judged[:count]


def _joined(line: Mapping[str, str]) -> str:
    """The title in front of the text, as rankers are given them."""
    return " ".join(filter(None, (line["title"].strip(), line["text"].strip())))


def _texts(file: Path, fields: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    seen: set[str] = set()
    for number, line in _lines(file):
        where = f"{file}, line {number}"
        try:
            given = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError(f"{where}: not an object")
        found = {name: _text(given, name, where) for name in fields}
        id = _text(given, "_id", where)
        if not id or id.split() != [id]:
            raise ConfigError(f"{where}: _id {id!r} is empty or has white space, which a run file cannot hold")
        if id in seen:
            raise ConfigError(f"{where}: _id {id!r} was there before")
        seen.add(id)
        yield id, found


def _text(given: Mapping[str, Any], name: str, where: str) -> str:
    value = given.get(name, "" if name == "title" else None)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name!r} is missing or no text")
    return value


def _qrels(file: Path) -> dict[str, dict[str, int]]:
    qrels: dict[str, dict[str, int]] = {}
    for number, line in _lines(file):
        try:
            query, _, document, grade = line.split()
            qrels.setdefault(query, {})[document] = int(grade)
        except ValueError:
            raise ConfigError(
                f"{file}, line {number}: expected query id, iteration, document id and grade, got {line[:80]!r}"
            ) from None
    return qrels


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        with file.open(encoding="utf-8") as opened:
            yield from ((number, line) for number, line in enumerate(opened, 1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
