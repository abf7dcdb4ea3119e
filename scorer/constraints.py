"""Constraints of beam searches by name: files of allowed sequences, read at the start."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from batching.trie import Trie
from batching.types import Ints
from scorer.errors import ConfigError

Encode = Callable[[str], Ints | None]  # a text's ids; None where it cannot be written without a control token


def read_constraints(files: Mapping[str, str], encode: Encode, vocabulary: int) -> dict[str, Trie]:
    """A trie for each named file, of whose lines each is a JSON array of token ids or a JSON string, a text.

    Raises ConfigError that names file and line.
    """
    return {name: _read(name, Path(file), encode, vocabulary) for name, file in files.items()}


def _read(name: str, file: Path, encode: Encode, vocabulary: int) -> Trie:
    try:
        sequences = list(_sequences(file, encode, vocabulary))
    except (OSError, ValueError) as error:
        raise ConfigError(f"constraint {name}: {file}: {error}") from None
    if not sequences:
        raise ConfigError(f"constraint {name}: {file}: no sequences")
    return Trie.of(sequences)


def _sequences(file: Path, encode: Encode, vocabulary: int) -> Iterator[list[int]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _sequence(line, f"line {number}", encode, vocabulary)


def _sequence(line: str, place: str, encode: Encode, vocabulary: int) -> list[int]:
    """Raises ValueError."""
    given: Any = json.loads(line)
    if isinstance(given, str):
        encoded = encode(given)
        if encoded is None or not len(encoded):
            raise ValueError(f"{place}: a text of at least one token that can be written without a control token")
        return [int(id_) for id_ in encoded]
    if not isinstance(given, list) or not given or not all(type(id_) is int for id_ in given):
        raise ValueError(f"{place}: an array of token ids or a string")
    if not all(0 <= id_ < vocabulary for id_ in given):
        raise ValueError(f"{place}: token ids from 0 to below the vocabulary size {vocabulary}")
    return given
