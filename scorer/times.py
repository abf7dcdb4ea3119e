"""Whose times the choice among strategies goes by: the file of `prefixrank calibrate`, or the built-in one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from attention.plans import HeadShape
from attention.timing import TimeModel, built_in
from scorer.errors import ConfigError

log = logging.getLogger(__name__)


def load_times(path: str | Path | None) -> TimeModel:
    """The calibration of a file, None: the built-in one of an H200. Raises ConfigError with the file and the field."""
    if path is None:
        return built_in()
    try:
        return TimeModel.read(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"calibration {path}: {error}") from None


def warn_of_others(times: TimeModel, heads: HeadShape | None, machine: str) -> None:
    """Logs where the times are not of this model's heads or of this machine: the choice may then be a slower one.

    heads: the model's, None where its layers differ; machine: the GPU's name, or "cpu".
    """
    for told in _others(times, heads, machine):
        log.warning("the times that strategies are compared by are %s", told)


def _others(times: TimeModel, heads: HeadShape | None, machine: str) -> Iterator[str]:
    if machine == "cpu":
        yield f"measured on {times.machine.name}, not on this CPU"
    elif machine != times.machine.name:
        yield f"measured on {times.machine.name}, not on this {machine}: prefixrank calibrate measures it"
    if heads is None:
        yield f"of layers with {heads_of(times.heads)}, and the model's layers differ"
    elif heads_of(heads) != heads_of(times.heads):
        yield (
            f"of layers with {heads_of(times.heads)}, and the model has {heads_of(heads)}: "
            "prefixrank calibrate --model DIR measures its own"
        )


def heads_of(heads: HeadShape) -> str:
    """In words."""
    return f"{heads.heads}/{heads.kv_heads} heads of {heads.head_dim}"
