"""The report of bench decode, from rows as a GPU would have given them."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from attention.decode import DecodeStrategy
from attention.decode_timing import BUILT_IN, DecodePoint
from loadtest.bench_decode import Rows, points
from loadtest.decode_report import report
from loadtest.decode_rows import (
    BATCHES,
    OUR_BATCH,
    OUR_CASCADE,
    VARIANTS,
    AttentionRow,
    SearchRow,
    StepRow,
    attention_floor,
    read_rows,
)


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


ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMITTED = read_rows(ROOT / "loadtest" / "results" / "h200-decode" / "decode.jsonl")


def test_readmes_attention_is_that_of_the_committed_rows():
    times = {row.key: row.milliseconds for row in COMMITTED if row.kind == "attention"}
    lines = README[README.index("| prompt, beams, own |") :].splitlines()[2:]
    for line in lines[: lines.index("")]:
        point, *told = [cell.strip() for cell in line.strip("|").split("|")]
        point = tuple(int(n) for n in point.split(", "))
        ours, fastest = times[(*point, OUR_CASCADE)], min(times[(*point, name)] for name in BATCHES)
        assert told == [f"{x:.4f}" for x in (ours, times[(*point, OUR_BATCH)], fastest)] + [f"{fastest / ours:.1f}"]


def test_readmes_searches_are_the_committed_ones():
    times = {(r.beams, r.new, r.cached): r.milliseconds for r in COMMITTED if r.kind == "search" and r.prompt == 1024}
    told = re.search(
        r"128 beams and 16 tokens\s+(\d+) ms, 512 beams and 3 tokens (\d+) ms \((\d+) and (\d+) where", README
    )
    wanted = ((128, 16, False), (512, 3, False), (128, 16, True), (512, 3, True))
    assert told.groups() == tuple(f"{times[key]:.0f}" for key in wanted)
    step = next(r for r in COMMITTED if r.kind == "step" and (r.prompt, r.beams) == (1024, 128))
    assert f"A step of 128 beams takes {step.milliseconds:.1f} ms" in README
