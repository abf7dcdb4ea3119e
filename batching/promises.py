"""When each tenant's own device, as fast as its share, would be done with what it was promised. Pure; time is given.

So a tenant that sends a thousand requests at once gets them done one after the other, not before all others'.
"""

from __future__ import annotations


class Promises:
    """until: by tenant; of some whose time is over, too."""

    def __init__(self) -> None:
        self.until: dict[str, float] = {}

    def begin(self, tenant: str, now: float) -> float:
        """When it would begin with what comes next."""
        return max(now, self.until.get(tenant, now))

    def keep(self, most: int, now: float) -> None:
        """Forgets what is over where there are more than so many: names come from callers."""
        if len(self.until) > most:
            self.until = {tenant: until for tenant, until in self.until.items() if until > now}

    def give_back(self, tenant: str, seconds: float, waiting: float, now: float) -> None:
        """So many seconds were not needed. It is never done before what its others wait for, so many seconds, nor
        before now: what is past comes back to nobody."""
        until = self.begin(tenant, now)
        self.until[tenant] = max(until - seconds, min(until, now + waiting))
