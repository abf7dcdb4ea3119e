"""The report of bench decode, from rows as a GPU would have given them."""

import json
from dataclasses import asdict

import pytest

from attention.decode import DecodeStrategy
from attention.decode_timing import BUILT_IN, DecodePoint
from loadtest.bench_decode import Rows, points
from loadtest.decode_report import report
from loadtest.decode_rows import VARIANTS, AttentionRow, SearchRow, StepRow, attention_floor, read_rows


def made(variant, point):
    batch = "batch" in variant
    strategy = DecodeStrategy.BATCH_DECODE if batch else DecodeStrategy.CASCADE_DECODE
    slower = 1.0 if variant in ("triton_cascade", "triton_batch") else 1.2
    return AttentionRow(*point, variant, BUILT_IN.time(strategy, point) * slower)


def written(tmp_path, rows):
    path = tmp_path / "decode.jsonl"
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return path


def test_it_says_what_was_measured_and_what_follows(tmp_path):
    rows = [made(v, p) for p in points(quick=True) for v in VARIANTS if v != "flashinfer_batch"]
    rows += [AttentionRow(*p, "flashinfer_batch", None, "RuntimeError: no nvcc") for p in points(quick=True)]
    rows += [StepRow("0.6B", 1024, 256, 8, 1.5), StepRow("0.6B", 16_384, 256, 8, 3.5)]
    rows += [SearchRow("0.6B", 1024, 128, 16, False, 30.0, 29.0)]
    report(read_rows(written(tmp_path, rows)), tmp_path)
    text = (tmp_path / "decode.md").read_text()
    assert "`flashinfer_batch` was not run: RuntimeError: no nvcc" in text
    assert "built in: regret 0.00% in the mean, 0.00% at most" in text
    assert f"| 32768 | 256 | 64 | {1e3 * attention_floor(32_768, 256, 64):.4f} |" in text
    added = 1e3 * (attention_floor(16_384, 256, 8, 28) - attention_floor(1024, 256, 8, 28))
    assert f"| 0.6B | 16384 | 256 | 8 | 3.500 | {2.0 / added:.2f} |" in text
    assert "| 0.6B | 1024 | 128 | 16 | new | 30.00 | 29.00 |" in text


def test_the_floor_is_the_larger_of_products_and_memory():
    flops = 4 * 256 * (32_768 + 64) * 16 * 128 / 600e12
    assert attention_floor(32_768, 256, 64) == pytest.approx(flops)
    moved = 4 * (256 + 512 * 256) * 8 * 128 / 4.3e12
    assert attention_floor(256, 512, 256) == pytest.approx(moved)


def test_a_run_goes_on_where_it_stopped(tmp_path):
    rows = Rows(tmp_path / "decode.jsonl")
    wanted = [(*point, variant) for point in points(quick=False) for variant in VARIANTS]
    assert len(wanted) == 8 * 5 * 4 * len(VARIANTS)
    assert rows.missing(wanted, "attention") == wanted
    rows.add(made(VARIANTS[0], DecodePoint(*wanted[0][:3])))
    rows.add(StepRow("0.6B", 1024, 256, 8, 1.5))
    assert rows.missing(wanted, "attention") == wanted[1:]
    assert rows.missing([("0.6B", 1024, 256, 8)], "step") == []
