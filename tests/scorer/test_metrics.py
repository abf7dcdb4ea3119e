import urllib.request
from itertools import product

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from attention.plans import Strategy
from batching.observer import Observer
from batching.page_pool import PagePool
from batching.prefix_cache import PrefixCache
from prefixrank.v1 import scorer_pb2 as pb
from scorer.metrics import METHODS, STAGES, Metrics

SCORED = (("method", "score"), ("priority", "normal"))


def samples(metrics):
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {(s.name, *sorted(s.labels.items())): s.value for f in families for s in f.samples}


def test_every_series_is_there_at_zero_before_traffic():
    before = samples(Metrics("1"))
    for code in ("OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL"):
        assert before["prefixrank_requests_total", ("code", code)] == 0
    for status in ("ok", "empty", "too_long", "numeric_error", "deadline", "invalid"):
        assert before["prefixrank_documents_total", ("status", status)] == 0
    for method, priority, stage in product(METHODS, ("low", "normal", "high"), STAGES):
        labels = ("method", method), ("priority", priority), ("stage", stage)
        assert before["prefixrank_stage_seconds_count", *labels] == 0
    for reason in ("queue_full", "deadline", "tenant_share"):
        assert before["prefixrank_admission_refusals_total", ("reason", reason)] == 0
    for found in ("pages", "nowhere"):
        assert before["prefixrank_cache_tokens_total", ("found", found)] == 0
    for strategy in Strategy:
        assert before["prefixrank_strategy_documents_total", ("strategy", strategy.value)] == 0
    for name in (
        "truncated_documents_total",
        "non_finite_scores_total",
        "computed_tokens_total",
        "saved_tokens_total",
        "internal_errors_total",
        "request_documents_count",
        "request_tokens_count",
        "in_flight_requests",
        "queue_tokens",
        "deadline_misses_total",
        "cancelled_total",
        "batch_fill_count",
        "batch_requests_count",
        "cache_evicted_blocks_total",
        "cache_withdrawn_blocks_total",
        "cache_blocks",
    ):
        assert before[f"prefixrank_{name}",] == 0
    for part in ("budget", "weights", "activations", "graphs", "workspace", "scratch", "cache"):
        assert before["prefixrank_memory_bytes", ("part", part)] == 0
    assert before["prefixrank_build_info", ("version", "1")] == 1
    assert before["prefixrank_model_info",] == 1


def answer(**timings):
    results = [
        pb.DocumentResult(status=pb.DOCUMENT_STATUS_OK, truncated=True),
        pb.DocumentResult(status=pb.DOCUMENT_STATUS_NUMERIC_ERROR),
    ]
    return pb.ScoreResponse(
        results=results[:1],
        timings=pb.Timings(**timings),
        usage=pb.Usage(prefix_tokens=10, item_tokens=5, computed_tokens=12, saved_tokens=3),
        strategy=pb.StrategyChoice(shares=[pb.StrategyShare(strategy=pb.STRATEGY_MULTI_ITEM, documents=2)]),
    ), results


def test_an_answer_is_counted_with_the_documents_that_its_reply_left_out():
    metrics = Metrics("1")
    metrics.answered(*answer())
    after = samples(metrics)
    assert after["prefixrank_documents_total", ("status", "ok")] == 1
    assert after["prefixrank_documents_total", ("status", "numeric_error")] == 1
    assert after["prefixrank_truncated_documents_total",] == 1
    assert after["prefixrank_non_finite_scores_total",] == 1
    assert after["prefixrank_computed_tokens_total",] == 12
    assert after["prefixrank_saved_tokens_total",] == 3
    assert after["prefixrank_strategy_documents_total", ("strategy", "multi_item")] == 2
    assert after["prefixrank_request_documents_sum",] == 2
    assert after["prefixrank_request_tokens_sum",] == 15


@pytest.mark.parametrize(
    ("priority", "told"),
    [
        (pb.PRIORITY_UNSPECIFIED, "normal"),
        (pb.PRIORITY_LOW, "low"),
        (pb.PRIORITY_NORMAL, "normal"),
        (pb.PRIORITY_HIGH, "high"),
        (7, "normal"),  # nobody looked at it, where the deadline came first
    ],
)
def test_times_tell_the_method_and_the_class(priority, told):
    metrics = Metrics("1")
    metrics.answered(*answer(total_seconds=1), priority)
    metrics.searched(pb.BeamSearchResponse(timings=pb.Timings(total_seconds=2)), priority)
    seconds = {key[1:]: value for key, value in samples(metrics).items() if key[0] == "prefixrank_stage_seconds_sum"}
    assert {key: value for key, value in seconds.items() if value} == {
        (("method", "score"), ("priority", told), ("stage", "total")): 1,
        (("method", "beam_search"), ("priority", told), ("stage", "total")): 2,
    }


def test_five_milliseconds_land_in_a_bucket_of_at_most_ten():
    metrics = Metrics("1")
    metrics.answered(*answer(forward_seconds=0.005))
    after = samples(metrics)
    at_most = {
        float(dict(key[1:])["le"]): value
        for key, value in after.items()
        if key[0] == "prefixrank_stage_seconds_bucket" and {("stage", "forward"), *SCORED} <= {*key[1:]}
    }
    assert at_most[0.01] == 1
    assert at_most[0.002] == 0
    assert min(at_most) == 0.001
    assert sorted(at_most)[-2] == 10.0


def test_the_queue_is_read_when_scraped():
    metrics, queue = Metrics("1"), [1, 2, 3]
    metrics.watch_queue(lambda: sum(queue))
    queue.append(4)
    assert samples(metrics)["prefixrank_queue_tokens",] == 10


def test_two_services_in_one_process_count_apart():
    a, b = Metrics("1"), Metrics("1")
    a.requests.labels("OK").inc()
    assert samples(b)["prefixrank_requests_total", ("code", "OK")] == 0


def test_listens_on_a_port_of_its_own_and_stops():
    endpoint = Metrics("1").listen("127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{endpoint.port}/metrics"
        assert b"prefixrank_requests_total" in urllib.request.urlopen(url, timeout=5).read()
        with pytest.raises(OSError, match="in use"):
            Metrics("1").listen("127.0.0.1", endpoint.port)
    finally:
        endpoint.close()
    assert not endpoint.thread.is_alive()


def test_what_the_batcher_and_its_cache_did_is_told():
    metrics = Metrics("1")
    cache = PrefixCache(PagePool(2), 4)
    metrics.batching.watch_cache(cache)
    for first in (0, 0, 50):
        lease = cache.acquire(cache.chain(b"", np.arange(first, first + 8, dtype=np.int32)), 0.0)
        cache.commit(lease)
        cache.release(lease)
    observer: Observer = metrics.batching
    observer.refused("deadline")
    observer.missed()
    observer.cancelled()
    observer.ran(512, 0.5, 3)
    after = samples(metrics)
    assert after["prefixrank_cache_tokens_total", ("found", "pages")] == 8
    assert after["prefixrank_cache_tokens_total", ("found", "nowhere")] == 16
    assert after["prefixrank_cache_evicted_blocks_total",] == 2
    assert after["prefixrank_cache_blocks",] == 2
    assert after["prefixrank_admission_refusals_total", ("reason", "deadline")] == 1
    assert after["prefixrank_deadline_misses_total",] == after["prefixrank_cancelled_total",] == 1
    assert after["prefixrank_batch_fill_bucket", ("le", "0.5")] == 1
    assert after["prefixrank_batch_fill_bucket", ("le", "0.25")] == 0
    assert after["prefixrank_batch_requests_sum",] == 3
