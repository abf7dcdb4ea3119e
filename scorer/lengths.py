"""Lengths of requests to be explained: of the command line, and of files of them. What is none is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attention.fields import Fields, parse, shown
from attention.layout import Ints
from scorer.errors import ConfigError

MOST_TOKENS, MOST_ITEMS = 1 << 20, 100_000  # of a prefix or an item; of one request
MOST_ROWS = 1 << 25  # that naive computes, every item behind a prefix of its own: tiles are counted one by one
MOST_TILE = 65_536
_PART = re.compile(r"([0-9]{1,9})(?:x([0-9]{1,9}))?", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Tokens of a prefix, of what is cached of it, and [M] of its items."""

    prefix: int
    cached: int
    items: Ints


def lengths_of(prefix: int, cached: int, items: str) -> Lengths:
    """Of --prefix, --cached and --items such as "4,4" or "64x32". Raises ConfigError with argument and limits."""
    between("--prefix", prefix, 1, MOST_TOKENS)
    between("--cached", cached, 0, prefix)
    return _bounded(Lengths(prefix, cached, _items(items)), "--prefix and --items")


def read_lengths(path: Path) -> Iterator[tuple[int, Lengths]]:
    """(line, lengths) of a file of JSON lines. Raises ConfigError with the file, the line and the field."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--lengths {path}: {error}") from None
    if not any(line.strip() for line in lines):
        raise ConfigError(f"--lengths {path}: no line in it")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, _line(line, f"--lengths {path}, line {number}")


def _line(line: str, place: str) -> Lengths:
    try:
        given = Fields.of(parse(line), ("prefix", "items"), ("cached",))
        prefix = given.whole("prefix", 1, MOST_TOKENS)
        cached = given.whole("cached", 0, prefix) if "cached" in given.values else 0
        items = np.array(given.wholes("items", 1, MOST_TOKENS, MOST_ITEMS), np.int32)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None
    return _bounded(Lengths(prefix, cached, items), f"{place}: prefix and items")


def between(name: str, given: int, least: int, most: int) -> None:
    """Raises ConfigError where an argument is outside its limits."""
    if not least <= given <= most:
        raise ConfigError(f"{name} {shown(given)}: from {least:,} to {most:,}")


def _bounded(lengths: Lengths, place: str) -> Lengths:
    if (rows := lengths.prefix * len(lengths.items) + int(lengths.items.sum(dtype=np.int64))) > MOST_ROWS:
        raise ConfigError(
            f"{place}: {rows:,} tokens where every item has a prefix of its own, at most {MOST_ROWS:,} are counted"
        )
    return lengths


def _items(text: str) -> Ints:
    lengths: list[int] = []
    for part in text.split(","):
        if (found := _PART.fullmatch(part.strip())) is None:
            raise ConfigError(f"--items {shown(text)}: give lengths such as 4,4 or 64x32")
        length, count = int(found[1]), int(found[2] or 1)
        if not 1 <= length <= MOST_TOKENS:
            raise ConfigError(f"--items {shown(text)}: an item has 1 to {MOST_TOKENS:,} tokens, got {length:,}")
        if not count >= 1 or len(lengths) + count > MOST_ITEMS:
            raise ConfigError(f"--items {shown(text)}: 1 to {MOST_ITEMS:,} items, got {len(lengths) + count:,}")
        lengths += [length] * count
    return np.array(lengths, np.int32)
