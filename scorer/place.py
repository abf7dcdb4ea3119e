"""Which of a tensor-parallel server's processes one is, and how it is told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from scorer.config import Config, torchrun_place
from scorer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank a process is. rendezvous: where the ranks find each other; local: its GPU on this machine."""

    rank: int
    count: int
    local: int
    rendezvous: str


def given_place(config: Config) -> Place | None:
    """As torchrun tells it; None where it did not start this process. Raises ConfigError where it started others than
    asked for."""
    if (told := torchrun_place()) is None:
        return None
    rank, count, local = told
    if count != config.tensor_parallel:
        raise ConfigError(f"tensor_parallel is {config.tensor_parallel}, and torchrun started {count} processes")
    return Place(rank, count, local, "env://")


def order(config: Config, place: Place) -> str:
    """The line that tells a follower what to be."""
    return json.dumps({"config": config.model_dump(mode="json"), "place": asdict(place)})


def read_order(line: str) -> tuple[Config, Place]:
    """What `order` told."""
    told = json.loads(line)
    return Config.model_validate(told["config"]), Place(**told["place"])
