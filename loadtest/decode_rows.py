"""Rows of `prefixrank bench decode`, and the floors that they are held against."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from loadtest.attention_rows import HEAD_DIM, HEADS, KV_HEADS

ATTENTION_FLOPS, BANDWIDTH = 600e12, 4.3e12  # an H200's, as in `loadtest.shapes`, which loads torch

OUR_CASCADE, OUR_BATCH = "triton_cascade", "triton_batch"
VARIANTS = (
    OUR_CASCADE,
    "triton_cascade_scattered",
    OUR_BATCH,
    "flashinfer_batch",
    "flashinfer_batch_tc",
    "flashinfer_cascade",
    "flashinfer_cascade_tc",
    "flashinfer_cascade_prefill",
)
BATCHES = (OUR_BATCH, "flashinfer_batch", "flashinfer_batch_tc")
VALUE_BYTES = 2


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One layer's attention of a step. milliseconds: GPU only; None where it could not be run, `told` says why."""

    prompt: int
    beams: int
    own: int
    variant: str
    milliseconds: float | None
    told: str = ""
    kind: str = "attention"

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.prompt, self.beams, self.own, self.variant)

    @property
    def floor(self) -> float:
        """Milliseconds: every key read once, every product done once."""
        return 1e3 * attention_floor(self.prompt, self.beams, self.own)


@dataclass(frozen=True, slots=True)
class StepRow:
    """A whole step of a model: ints up, layers, head, the best continuations back on the host."""

    size: str
    prompt: int
    beams: int
    own: int
    milliseconds: float
    kind: str = "step"

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.size, self.prompt, self.beams, self.own)


@dataclass(frozen=True, slots=True)
class SearchRow:
    """A whole search. cached: its prompt's K/V was in the cache."""

    size: str
    prompt: int
    beams: int
    new: int
    cached: bool
    milliseconds: float
    fastest: float
    kind: str = "search"

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.size, self.prompt, self.beams, self.new, self.cached)


AnyRow = AttentionRow | StepRow | SearchRow
KINDS: dict[str, type[AnyRow]] = {"attention": AttentionRow, "step": StepRow, "search": SearchRow}


def read_rows(path: Path) -> list[AnyRow]:
    """Every row measured so far."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [_row(line) for line in lines]


def _row(line: dict[str, Any]) -> AnyRow:
    kind = KINDS[line["kind"]]
    return kind(**{field.name: line[field.name] for field in fields(kind)})


def attention_floor(
    prompt: int, beams: int, own: int, layers: int = 1, shape: tuple[int, int] = (HEADS, KV_HEADS)
) -> float:
    """Seconds that a step's attention takes at least on an H200."""
    heads, kv_heads = shape
    flops = 4 * beams * (prompt + own) * heads * HEAD_DIM
    moved = 2 * VALUE_BYTES * (prompt + beams * own) * kv_heads * HEAD_DIM
    return layers * max(flops / ATTENTION_FLOPS, moved / BANDWIDTH)
