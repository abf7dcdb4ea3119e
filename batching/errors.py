"""What `Batcher.submit` raises, and DeviceGone, which the device may raise to it.

BatchingError
├── NotAdmitted        load: not accepted, come again after `retry_after` seconds
│   ├── QueueFull      more tokens wait than the service accepts
│   ├── CannotFinish   the deadline would come before the predicted end
│   └── OverShare      the tenant has its fair share of the queue already
├── Expired        the deadline came before the scores
├── Closed         nothing is accepted any more
└── DeviceFailed   the pass that this request was part of failed
"""

from __future__ import annotations

MIN_RETRY, MAX_RETRY = 0.01, 60.0  # seconds


class BatchingError(Exception):
    """Base of what `Batcher.submit` raises."""


class NotAdmitted(BatchingError):
    """Load: not accepted.

    reason       the metric's label
    retry_after  seconds after which the same request would have been accepted, as far as can be told
    """

    reason = "refused"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = min(max(retry_after, MIN_RETRY), MAX_RETRY)


class QueueFull(NotAdmitted):
    """More tokens wait than the service accepts."""

    reason = "queue_full"


class CannotFinish(NotAdmitted):
    """The deadline would come before the predicted end."""

    reason = "deadline"


class OverShare(NotAdmitted):
    """The tenant has its fair share of the queue already."""

    reason = "tenant_share"


REFUSALS = (QueueFull.reason, CannotFinish.reason, OverShare.reason)


class Expired(BatchingError):
    """The deadline came before the scores."""


class Closed(BatchingError):
    """The batcher accepts nothing any more."""


class DeviceFailed(BatchingError):
    """The pass that this request was part of failed."""


class DeviceGone(Exception):
    """The device will compute nothing any more, whoever asks."""


def refuse_expired(deadline: float | None, now: float) -> None:
    """Raises Expired for a request whose deadline came before anything was done for it."""
    if deadline is not None and now >= deadline:
        raise Expired("its deadline has come")
