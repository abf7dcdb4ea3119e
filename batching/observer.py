"""Who is told what happens in the batcher, for metrics."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Called on the batcher's event loop; must not block."""

    def refused(self, reason: str) -> None:
        """A request was not accepted; reason as in batching.errors."""

    def missed(self) -> None:
        """An accepted request's deadline came before its scores."""

    def cancelled(self) -> None:
        """An accepted request's caller went away."""

    def ran(self, tokens: int, fill: float, requests: int) -> None:
        """A pass ran: its tokens, the part of the budget that they are, and how many requests they belong to."""


class Unobserved:
    """Tells no one."""

    def refused(self, reason: str) -> None:
        pass

    def missed(self) -> None:
        pass

    def cancelled(self) -> None:
        pass

    def ran(self, tokens: int, fill: float, requests: int) -> None:
        pass
