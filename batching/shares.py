"""Which part of the device each tenant may have: weighted max-min shares of what they ask for. Pure; time is given."""

from __future__ import annotations

import math
from collections.abc import Mapping

MEMORY_SECONDS = 2.0  # over which what a tenant asked for is forgotten
FORGOTTEN = 1e-3  # of the device: a tenant that asks for less is not counted
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3  # between them sums of as many as there may be stay exact enough to divide by
MAX_TENANTS = 4096  # names come from callers: the least active are forgotten beyond


class FairShares:
    """A tenant that asks for less than its share leaves the rest to the others; alone it has the whole device."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """weights: of the tenants that differ from 1. Raises ValueError unless all are within the limits."""
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
                limits = f"between {MIN_WEIGHT:g} and {MAX_WEIGHT:g}"
                raise ValueError(f"the weight of tenant {tenant!r} must be {limits}, got {weight}")
        self._demand: dict[str, float] = {}
        self._updated = -math.inf

    def asked(self, tenant: str, seconds: float, now: float) -> None:
        """A tenant asked for this much of the device's time, whether it gets it or not."""
        self._forget(now)
        self._demand[tenant] = self._demand.get(tenant, 0.0) + seconds / MEMORY_SECONDS
        if len(self._demand) > MAX_TENANTS:
            del self._demand[min(self._demand, key=lambda name: self._demand[name])]

    def share(self, tenant: str, now: float) -> float:
        """The part of the device, 0..1, that this tenant may have while the others get theirs."""
        self._forget(now)
        left, mine = 1.0, self.weight(tenant)
        others = {name: demand for name, demand in self._demand.items() if name != tenant and demand > FORGOTTEN}
        total = mine + sum(map(self.weight, others))
        for name in sorted(others, key=lambda other: others[other] / self.weight(other)):
            weight = self.weight(name)
            if others[name] / weight > left / total:
                break  # this one and all that follow want more than their share
            left -= others[name]
            total -= weight
        return left * mine / total

    def weight(self, tenant: str) -> float:
        """How much of the device a tenant may have, beside the others'."""
        return self._weights.get(tenant, 1.0)

    def _forget(self, now: float) -> None:
        if now <= self._updated:
            return
        kept = math.exp(-(now - self._updated) / MEMORY_SECONDS)
        self._updated = now
        self._demand = {name: left for name, demand in self._demand.items() if (left := demand * kept) > FORGOTTEN / 10}
