"""What the service counts, for Prometheus. Every series exists at zero before the first call."""

from __future__ import annotations

import socket
import threading
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import product
from operator import attrgetter
from typing import Any
from wsgiref.simple_server import WSGIServer

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server

from attention.plans import Strategy
from batching.beams import Ended
from prefixrank.v1 import scorer_pb2 as pb
from scorer.batching_metrics import BatchingMetrics
from scorer.drift import RESULTS
from scorer.memory import PARTS

KNOCK_SECONDS = 0.05
STAGES = ("tokenize", "queue", "plan", "forward", "total")
METHODS = ("score", "beam_search")
CLASSES = {
    pb.PRIORITY_UNSPECIFIED: "normal",
    pb.PRIORITY_LOW: "low",
    pb.PRIORITY_NORMAL: "normal",
    pb.PRIORITY_HIGH: "high",
}
STATUS_PREFIX = "DOCUMENT_STATUS_"
STATUSES = tuple(name.removeprefix(STATUS_PREFIX).lower() for name in pb.DocumentStatus.keys()[1:])
_STATUS = attrgetter("status", "truncated")  # of a result: many times in every call
CODES = tuple(code.name for code in grpc.StatusCode)

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
DOCUMENTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
TOKENS = tuple(4**n for n in range(2, 13))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The HTTP server of the metrics, on a thread of its own."""

    server: WSGIServer
    thread: threading.Thread

    @property
    def port(self) -> int:
        return int(self.server.server_port)

    def close(self) -> None:
        """The server looks every half second whether it is to stop, and when somebody comes: so somebody comes."""
        stopping = threading.Thread(target=self.server.shutdown, name="metrics stop")
        stopping.start()
        at = str(self.server.server_address[0]), self.port
        while stopping.is_alive():
            with suppress(OSError), socket.create_connection(at, KNOCK_SECONDS):
                stopping.join(KNOCK_SECONDS)
        self.server.server_close()
        self.thread.join()


class Metrics:
    """The service's series, in a registry of their own."""

    def __init__(self, version: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = CollectorRegistry() if registry is None else registry

        def counter(name: str, told: str, label: str | None = None, values: Iterable[str] = ()) -> Counter:
            made = Counter(f"prefixrank_{name}", told, [label] if label else [], registry=registry)
            for value in values:
                made.labels(value)
            return made

        def histogram(name: str, told: str, buckets: tuple[float, ...], **labels: Iterable[str]) -> Histogram:
            made = Histogram(f"prefixrank_{name}", told, list(labels), registry=registry, buckets=buckets)
            for values in product(*labels.values()) if labels else ():
                made.labels(*values)
            return made

        self.requests = counter("requests", "Score calls that ended, by gRPC status code", "code", CODES)
        self.documents = counter("documents", "Documents of answered calls, by status", "status", STATUSES)
        self.strategies = counter("strategy_documents", "Documents computed, by strategy", "strategy", Strategy)
        self.truncated = counter("truncated_documents", "Documents cut to their limit")
        self.non_finite = counter("non_finite_scores", "Documents for which the model gave NaN or infinity")
        self.computed = counter("computed_tokens", "Tokens that went through the model")
        self.saved = counter("saved_tokens", "Tokens that scoring one document at a time would have computed beyond")
        self.prefix = counter("prefix_tokens", "Prefix tokens of answered calls")
        self.cached_prefix = counter("cached_prefix_tokens", "Of them, tokens whose K/V was cached when the call came")
        self.self_checks = counter(
            "self_checks", "Served requests of which documents were scored again alone", "result", RESULTS
        )
        self.drift = Gauge(
            "prefixrank_self_check_drift",
            "Largest difference of a served score to the same document's alone, of the last self-check",
            registry=registry,
        )
        self.serving = Gauge("prefixrank_serving", "1 while the service takes calls", registry=registry)
        self.internal_errors = counter("internal_errors", "Errors of our own making; the log has each with its id")
        self.stage_seconds = histogram(
            "stage_seconds",
            "Seconds of each stage of an answered call; the objective is of the method score above the low class",
            SECONDS,
            method=METHODS,
            priority=dict.fromkeys(CLASSES.values()),
            stage=STAGES,
        )
        self.request_documents = histogram("request_documents", "Documents of an answered call", DOCUMENTS)
        self.request_tokens = histogram("request_tokens", "Prefix and item tokens of an answered call", TOKENS)
        self.in_flight = Gauge("prefixrank_in_flight_requests", "Score calls under way", registry=registry)
        self.beam_sequences = counter("beam_sequences", "Sequences that beam searches returned, by end", "end", Ended)
        self.beam_steps = counter("beam_steps", "Steps of answered beam searches")
        self.queue_tokens = Gauge("prefixrank_queue_tokens", "Tokens that wait for a pass", registry=registry)
        self.batching = BatchingMetrics(registry)
        self.memory = Gauge(
            "prefixrank_memory_bytes",
            "Memory of the device as it was divided at the start: what may be taken, and what each part takes",
            ["part"],
            registry=registry,
        )
        for part in ("budget", *PARTS):
            self.memory.labels(part)
        # Looked up in every call, and a look by name costs as much as counting.
        self._of_status = cache(lambda status: self.documents.labels(_told(pb.DocumentStatus, status, STATUS_PREFIX)))
        self._of_strategy = cache(lambda number: self.strategies.labels(_told(pb.Strategy, number, "STRATEGY_")))
        self._of_stage = cache(self.stage_seconds.labels)
        self.model = Info("prefixrank_model", "What is served; no labels until it is loaded", registry=registry)
        Info("prefixrank_build", "The version of the service", registry=registry).info({"version": version})

    def divided(self, budget: int, parts: Mapping[str, int]) -> None:
        """Tells how the memory was divided."""
        for part, size in {"budget": budget, **parts}.items():
            self.memory.labels(part).set(size)

    def watch_queue(self, tokens: Callable[[], int]) -> None:
        """Reads the queue's depth whenever the metrics are scraped."""
        self.queue_tokens.set_function(tokens)

    def answered(
        self,
        response: pb.ScoreResponse,
        results: Iterable[pb.DocumentResult],
        priority: pb.Priority.ValueType = pb.PRIORITY_UNSPECIFIED,
    ) -> None:
        """Counts one answered call. `results` are those of all its documents, also where the reply keeps the best."""
        counted = Counts(map(_STATUS, results))
        for (status, truncated), count in counted.items():
            self._of_status(status).inc(count)
            self.truncated.inc(count * truncated)
            self.non_finite.inc(count * (status == pb.DOCUMENT_STATUS_NUMERIC_ERROR))
        for share in response.strategy.shares:
            self._of_strategy(share.strategy).inc(share.documents)
        self.request_documents.observe(counted.total())
        self._used(response, "score", priority)

    def searched(
        self, response: pb.BeamSearchResponse, priority: pb.Priority.ValueType = pb.PRIORITY_UNSPECIFIED
    ) -> None:
        """Counts one answered beam search."""
        for sequence in response.sequences:
            self.beam_sequences.labels(_told(pb.FinishReason, sequence.finish_reason, "FINISH_REASON_")).inc()
        self.beam_steps.inc(response.steps)
        self._used(response, "beam_search", priority)

    def _used(
        self, response: pb.ScoreResponse | pb.BeamSearchResponse, method: str, priority: pb.Priority.ValueType
    ) -> None:
        """Stages and tokens of an answered call."""
        for stage in STAGES:
            seconds = getattr(response.timings, f"{stage}_seconds")
            # Where the deadline came before it was looked at, it may be any number.
            self._of_stage(method, CLASSES.get(priority, "normal"), stage).observe(seconds)
        usage = response.usage
        self.request_tokens.observe(usage.prefix_tokens + usage.item_tokens)
        self.prefix.inc(usage.prefix_tokens)
        self.cached_prefix.inc(usage.cached_prefix_tokens)
        self.computed.inc(usage.computed_tokens)
        self.saved.inc(usage.saved_tokens)

    def checked(self, result: str, drift: float | None) -> None:
        """Counts one self-check."""
        self.self_checks.labels(result).inc()
        if drift is not None:
            self.drift.set(drift)

    def listen(self, host: str, port: int) -> Endpoint:
        """Serves the metrics over HTTP; port 0 takes any free one. Raises OSError where it cannot bind."""
        return Endpoint(*start_http_server(port, host, self.registry))


def _told(enum: Any, number: int, prefix: str) -> str:
    """A value of the proto as the series have it."""
    return str(enum.Name(number)).removeprefix(prefix).lower()
