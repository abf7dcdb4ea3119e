"""What the tiers below the pages moved, and what went wrong there."""

from __future__ import annotations

from dataclasses import dataclass, field

STORES = ("host", "file", "remote")
FAULT_KINDS = ("damaged", "truncated", "foreign", "io")


@dataclass(slots=True)
class TierTotals:
    """Since the start, by store. moved: bytes, by (store, direction)."""

    moved: dict[tuple[str, str], int] = field(default_factory=dict)
    faults: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, store: str, direction: str, size: int) -> None:
        self.moved[store, direction] = self.moved.get((store, direction), 0) + size

    def fault(self, store: str, kind: str) -> None:
        self.faults[store, kind] = self.faults.get((store, kind), 0) + 1
