"""What the batcher and the prefix cache count, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from batching.errors import REFUSALS
from batching.prefix_cache import CacheCounts, PrefixCache
from batching.tiering import ReadAhead, TierCounts
from scorer.tier_totals import FAULT_KINDS, STORES, TierTotals

FILL = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)


class BatchingMetrics(Collector):
    """Observes a batcher, and reads its cache's own counts whenever the metrics are scraped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._cache: PrefixCache | None = None
        self._ahead: ReadAhead | None = None
        self._totals: TierTotals | None = None
        self._refused = Counter(
            "prefixrank_admission_refusals", "Requests not accepted, by reason", ["reason"], registry=registry
        )
        for reason in REFUSALS:
            self._refused.labels(reason)
        self._missed = Counter(
            "prefixrank_deadline_misses", "Accepted requests whose deadline came first", registry=registry
        )
        self._cancelled = Counter("prefixrank_cancelled", "Accepted requests whose caller went away", registry=registry)
        self._fill = Histogram(
            "prefixrank_batch_fill", "Part of a pass's token budget that was used", registry=registry, buckets=FILL
        )
        self._requests = Histogram(
            "prefixrank_batch_requests", "Requests that shared a pass", registry=registry, buckets=REQUESTS
        )
        registry.register(self)

    def watch_cache(self, cache: PrefixCache, ahead: ReadAhead | None = None, totals: TierTotals | None = None) -> None:
        """From now on these counts are told; `ahead` and `totals` where there are tiers."""
        self._cache, self._ahead, self._totals = cache, ahead, totals

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def missed(self) -> None:
        self._missed.inc()

    def cancelled(self) -> None:
        self._cancelled.inc()

    def ran(self, tokens: int, fill: float, requests: int) -> None:
        self._fill.observe(fill)
        self._requests.observe(requests)

    def collect(self) -> Iterator[Metric]:
        counts = CacheCounts() if self._cache is None else self._cache.counts
        tokens = CounterMetricFamily(
            "prefixrank_cache_tokens", "Prefix tokens of requests, by where their K/V was found", labels=["found"]
        )
        fetched = {} if self._ahead is None else self._ahead.counts.fetched_tokens
        for store in STORES:
            tokens.add_metric([store], fetched.get(store, 0))
        tokens.add_metric(["pages"], counts.hit_tokens - sum(fetched.values()))
        tokens.add_metric(["nowhere"], counts.missed_tokens)
        yield tokens
        yield from self._tiers_told()
        yield CounterMetricFamily(
            "prefixrank_cache_evicted_blocks", "Cached blocks that made room", value=counts.evicted_blocks
        )
        yield CounterMetricFamily(
            "prefixrank_cache_withdrawn_blocks",
            "Blocks whose pass failed or was cancelled before it wrote them",
            value=counts.withdrawn_blocks,
        )
        yield GaugeMetricFamily(
            "prefixrank_cache_blocks",
            "Blocks of prefixes in the cache",
            value=0 if self._cache is None else len(self._cache),
        )

    def _tiers_told(self) -> Iterator[Metric]:
        counts = TierCounts() if self._ahead is None else self._ahead.counts
        totals = TierTotals() if self._totals is None else self._totals
        chosen = CounterMetricFamily(
            "prefixrank_fetch_decisions", "Prefixes found in a tier, and what was done", labels=["choice"]
        )
        for choice, number in counts.chosen.items():
            chosen.add_metric([choice], number)
        yield chosen
        yield CounterMetricFamily(
            "prefixrank_fetch_regret_seconds",
            "Seconds by which fetches took longer than computing again would have",
            value=counts.regret_seconds,
        )
        moved = CounterMetricFamily(
            "prefixrank_tier_bytes", "Bytes copied up from and down to tiers", labels=["tier", "direction"]
        )
        faults = CounterMetricFamily(
            "prefixrank_tier_faults", "Entries or calls of a tier that could not be used", labels=["tier", "kind"]
        )
        for store in STORES:
            for direction in ("up", "down"):
                moved.add_metric([store, direction], totals.moved.get((store, direction), 0))
            for kind in FAULT_KINDS:
                faults.add_metric([store, kind], totals.faults.get((store, kind), 0))
        yield moved
        yield faults
