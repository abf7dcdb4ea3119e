"""The bench through gRPC runs against a server of its own, with weights of a tiny shape."""

import argparse
import json

from loadtest import bench_serve
from loadtest.shapes import SIZES, Size

TINY = Size(2, 64, 4, 2, 16, 96, True)


def test_every_run_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(SIZES, "tiny", TINY)
    monkeypatch.setattr(bench_serve, "SHAPES", ((16, 8, 4),))
    monkeypatch.setattr(bench_serve, "OPEN_LOOP", {(16, 8, 4): (20,)})
    output = tmp_path / "rows" / "serve.jsonl"
    args = argparse.Namespace(
        size="tiny", target=None, shape=[], seconds=0.3, output=output, server_args="--device=cpu --threads=1"
    )
    assert bench_serve.run(args) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["prefixes"], row["concurrency"]) for row in rows] == [
        *[("distinct", c) for c in bench_serve.CONCURRENCIES],
        ("repeated", bench_serve.CONCURRENCIES[-1]),
        ("distinct", 0),
    ]
    for row in rows:
        assert row["calls"] > row["refused"]
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["items_per_s"] > 0
