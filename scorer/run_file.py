"""A run in TREC's format, written query by query, so that an interrupted one goes on where it was.

    query id, Q0, document id, rank, score, tag

The tag says what made the run. A query counts as done once the file has a line for each of its documents.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from scorer.errors import ConfigError

Ranking = Sequence[tuple[str, float]]  # documents with scores, best first


class RunFile:
    """The file, and what it held when it was opened.

    done  scores by document id, by query id
    """

    done: dict[str, dict[str, float]]

    def __init__(self, path: Path, tag: str, pools: Mapping[str, Sequence[str]]) -> None:
        """pools: the documents that each query is to have. Raises ConfigError where the file holds another run."""
        self._path = path
        self._tag = tag
        held = _read(path, tag)
        self.done = {query: held[query] for query, pool in pools.items() if held.get(query, {}).keys() == set(pool)}
        self._others = {query: scores for query, scores in held.items() if query not in pools}

    def __enter__(self) -> Self:
        """Opens it for writing, and leaves out what was torn."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_name(f"{self._path.name}.new")
            with fresh.open("w", encoding="utf-8", newline="\n") as file:
                for query, scores in (self._others | self.done).items():
                    file.writelines(self._lines(query, sorted(scores.items(), key=lambda pair: -pair[1])))
            fresh.replace(self._path)
            self._file = self._path.open("a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from None
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def add(self, query: str, ranking: Ranking) -> None:
        """Writes one query's documents to the disk."""
        self._file.writelines(self._lines(query, ranking))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done[query] = dict(ranking)

    def _lines(self, query: str, ranking: Ranking) -> list[str]:
        return [f"{query} Q0 {id} {rank} {score!r} {self._tag}\n" for rank, (id, score) in enumerate(ranking, 1)]


def _read(path: Path, tag: str) -> dict[str, dict[str, float]]:
    """Scores by document, by query. A last line without its end was torn by whatever stopped the writer."""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the run {path}: {error}") from None
    held: dict[str, dict[str, float]] = {}
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            query, _, document, _, score, made = line.split()
            held.setdefault(query, {})[document] = float(score)
        except ValueError:
            raise ConfigError(f"{path}, line {number}: not a line of a TREC run: {line[:80]!r}") from None
        if made != tag:
            raise ConfigError(f"{path} holds another run, {made}, not {tag}: name another file, or remove it")
    return held
