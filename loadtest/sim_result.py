"""What became of a simulated trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from loadtest.traces import Call


@dataclass(frozen=True, slots=True)
class Outcome:
    """end: when it was answered, None where it was refused or late; handler_seconds: measured, of a refusal."""

    call: Call
    refused: str = ""
    end: float | None = None
    cached: int = 0
    handler_seconds: float = 0.0

    @property
    def met(self) -> bool:
        return self.end is not None and self.end - self.call.at <= self.call.profile.seconds


@dataclass(slots=True)
class Result:
    """What became of a trace. seconds: of virtual time; busy: of the device."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    busy: float = 0.0
    tokens: int = 0

    def of(self, name: str) -> list[Outcome]:
        """Those of one profile."""
        return [outcome for outcome in self.outcomes if outcome.call.profile.name == name]

    def latency(self, name: str, quantile: float) -> float:
        """Seconds, of the answered calls of one profile."""
        return float(np.quantile([o.end - o.call.at for o in self.of(name) if o.end is not None], quantile))

    @property
    def accepted(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.refused]

    @property
    def met(self) -> float:
        """Part of the accepted calls that were answered in time."""
        return sum(outcome.met for outcome in self.accepted) / max(1, len(self.accepted))

    @property
    def goodput(self) -> float:
        """Documents/s answered in time."""
        return self.documents(self.outcomes) / self.seconds

    @staticmethod
    def documents(outcomes: Iterable[Outcome]) -> int:
        return sum(len(outcome.call.documents) for outcome in outcomes if outcome.met)

    @property
    def hit_ratio(self) -> float:
        """Part of the accepted calls' prefix tokens that were cached."""
        return sum(o.cached for o in self.accepted) / max(1, sum(o.call.profile.prefix for o in self.accepted))

    def tokens_of(self, tenant: str) -> int:
        """Asked for by this tenant, and answered in time."""
        return sum(o.call.tokens for o in self.outcomes if o.met and o.call.profile.tenant == tenant)

    @property
    def refusal_p99(self) -> float:
        """Measured seconds."""
        return float(np.quantile([o.handler_seconds for o in self.outcomes if o.refused] or [0.0], 0.99))
