"""What an open-loop run found. Pure: records in, figures out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


@dataclass(frozen=True, slots=True)
class Call:
    """One call. at: when it was sent, seconds after the start; seconds: until its end; documents: asked for.

    The rest is 0 unless code is OK.
    """

    at: float
    code: str
    seconds: float
    documents: int
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    prefix_tokens: int = 0
    cached_prefix_tokens: int = 0
    computed_tokens: int = 0
    saved_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """goodput: documents a second of calls that were answered within the objective. in_slo: p99 of answered calls was
    within it and nothing accepted timed out. late: how far behind its plan the client sent, at most."""

    rate: float
    seconds: float
    calls: int
    codes: dict[str, int]
    documents_per_second: float
    goodput: float
    in_slo: bool
    latency: dict[str, float]
    queue_p99: float
    compute_p99: float
    asked_tokens: int
    computed_tokens: int
    saved_share: float
    cached_prefix_share: float
    flops: float
    late: float

    @property
    def timed_out(self) -> int:
        """Accepted calls that were not answered in time: each fails the run."""
        return self.codes.get("DEADLINE_EXCEEDED", 0)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def figures(
    calls: Sequence[Call], rate: float, seconds: float, slo: float, late: float, parameters: float = 0.0
) -> Figures:
    """seconds: from the first call's plan to the last answer; parameters: of the model, for FLOP/s."""
    answered = [call for call in calls if call.code == "OK"]
    times = sorted(call.seconds for call in answered)
    computed, saved = sum(c.computed_tokens for c in answered), sum(c.saved_tokens for c in answered)
    prefix = sum(c.prefix_tokens for c in answered)
    latency = {name: quantile(times, q) for name, q in QUANTILES.items()}
    codes = Counter(call.code for call in calls)
    return Figures(
        rate=rate,
        seconds=seconds,
        calls=len(calls),
        codes=dict(codes),
        documents_per_second=sum(c.documents for c in answered) / seconds,
        goodput=sum(c.documents for c in answered if c.seconds <= slo) / seconds,
        in_slo=bool(answered) and latency["p99"] <= slo and not codes["DEADLINE_EXCEEDED"],
        latency=latency,
        queue_p99=quantile(sorted(c.queue_seconds for c in answered), 0.99),
        compute_p99=quantile(sorted(c.compute_seconds for c in answered), 0.99),
        asked_tokens=computed + saved,
        computed_tokens=computed,
        saved_share=saved / (computed + saved) if computed + saved else 0.0,
        cached_prefix_share=sum(c.cached_prefix_tokens for c in answered) / prefix if prefix else 0.0,
        flops=2 * parameters * computed / seconds,
        late=late,
    )


def quantile(ascending: Sequence[float], q: float) -> float:
    """The smallest value that at least this share is not above; NaN of none."""
    if not ascending:
        return float("nan")
    return ascending[min(len(ascending) - 1, max(0, -int(-q * len(ascending) // 1) - 1))]


def line(found: Figures) -> str:
    """One run in one line; times in milliseconds."""
    ms = {name: f"{value * 1000:.0f}" for name, value in found.latency.items()}
    refused = found.codes.get("RESOURCE_EXHAUSTED", 0)
    return (
        f"{found.rate:8.2f} {found.calls:6d} {found.documents_per_second:9.1f} {found.goodput:9.1f} "
        f"{'yes' if found.in_slo else 'no':>6} {ms['p50']:>7} {ms['p99']:>7} {ms['p99.9']:>7} "
        f"{found.queue_p99 * 1000:7.0f} {found.compute_p99 * 1000:7.0f} {refused:7d} {found.timed_out:9d} "
        f"{found.saved_share:6.0%} {found.cached_prefix_share:6.0%}"
    )


HEADER = (
    f"{'calls/s':>8} {'calls':>6} {'docs/s':>9} {'goodput':>9} {'in SLO':>6} {'p50 ms':>7} {'p99 ms':>7} {'p99.9':>7} "
    f"{'queue':>7} {'compute':>7} {'refused':>7} {'timed out':>9} {'saved':>6} {'cached':>6}"
)
