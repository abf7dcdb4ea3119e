"""README's figures of the engine and the service are those of the committed rows."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

from loadtest.model_report import plot, read_rows
from loadtest.shapes import SCALING, SHAPES, SIZES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MODEL = ROOT / "loadtest" / "results" / "h200-model" / "model.jsonl"
SERVE = [json.loads(line) for line in (ROOT / "loadtest" / "results" / "h200-serve" / "serve.jsonl").open()]


def table(head):
    """The rows of README's table whose first line begins so, by shape."""
    lines = README[README.index(head) :].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    return {tuple(map(int, row[0].split(", "))): row[1:] for row in cells}


def test_the_engines_table():
    rows = {(row["size"], row["quantization"], tuple(row["shape"])): row for row in read_rows(MODEL)}
    kinds = [("0.6B", "none"), ("0.6B", "fp8"), ("4B", "none"), ("8B", "none")]
    found = table("| P, S, M | 0.6B, one request alone")
    assert list(found) == list(SHAPES)
    for shape, (alone, *rest) in found.items():
        assert alone == f"{rows['0.6B', 'none', shape]['alone_ms']:.1f} ms"
        for kind, told in zip(kinds, rest, strict=True):
            row = rows.get((*kind, shape))
            assert told == ("-" if row is None else f"{row['items_per_s']:,.0f} ({row['ratio']:.0%})")


def test_the_engines_other_figures():
    text = README[README.index("### The engine on one H200") :].replace("\n", " ")
    rows = {(row["size"], row["quantization"], tuple(row["shape"])): row["items_per_s"] for row in read_rows(MODEL)}
    for size in ("4B", "8B"):
        rough, plain = (rows[size, kind, (512, 256, 32)] for kind in ("fp8", "none"))
        assert re.search(rf"{size} {rough:.0f}(?: items/s)? \({rough / plain:.2f} x", text)
    found = read_rows(MODEL.with_name("invariant.jsonl"))
    usual, invariant = ({tuple(r["shape"]): r for r in found if r["invariant"] is kind} for kind in (False, True))
    slower = [usual[shape]["items_per_s"] / row["items_per_s"] for shape, row in invariant.items()]
    longer = [row["alone_ms"] / usual[shape]["alone_ms"] for shape, row in invariant.items()]
    told = f"costs {min(slower):.2f} to {max(slower):.2f} x in items/s and {min(longer):.2f} to {max(longer):.2f} x"
    assert told in text
    more = read_rows(MODEL.with_name("scaling.jsonl"))
    *items, last = (f"{row['items_per_s']:,.0f}" for row in more)
    assert f"{', '.join(items)} and {last} items/s at 32, 64, 128, 256, 512 and 1,000 items" in text
    assert [tuple(row["shape"]) for row in more] == list(SCALING)


def test_ratios_follow_from_the_floor():
    for row in read_rows(MODEL):
        floor = SIZES[row["size"]].floor(tuple(row["shape"]))
        assert row["ratio"] == pytest.approx(row["items_per_s"] * floor / row["shape"][2])


def test_the_services_table():
    rows = {(tuple(row["shape"]), row["prefixes"], row["concurrency"]): row for row in SERVE}
    found = table("| P, S, M | one call at a time, p50")
    assert list(found) == list(SHAPES)
    for shape, (alone, distinct, repeated) in found.items():
        assert alone == f"{rows[shape, 'distinct', 1]['p50_ms']:.1f} ms"
        assert distinct == f"{rows[shape, 'distinct', 32]['items_per_s']:,.0f}"
        assert repeated == f"{rows[shape, 'repeated', 32]['items_per_s']:,.0f}"


def test_the_open_loops_figures():
    rows = {(tuple(row["shape"]), row["offered"]): row for row in SERVE if row["concurrency"] == 0}
    three = r"at ([\d,]+), ([\d,]+) and ([\d,]+)(?: items/s offered)?: (?:p99 )?(\d+), (\d+) and (\d+) ms"
    text = README[README.index("With Poisson arrivals") :].replace("\n", " ")
    for shape, told in zip([(70, 90, 100), (120, 180, 10)], re.findall(three, text), strict=False):
        rates, times = told[:3], told[3:]
        assert times == tuple(f"{rows[shape, float(rate.replace(',', ''))]['p99_ms']:.0f}" for rate in rates)
    assert len(re.findall(three, text)) >= 2


def test_the_plot_is_drawn(tmp_path):
    plot(read_rows(MODEL), tmp_path / "model.png")
    assert (tmp_path / "model.png").stat().st_size > 10_000


def test_the_floor_is_the_sum_of_both_parts():
    """0.6B's: 440.4 million weights in blocks."""
    size = SIZES["0.6B"]
    assert size.block_parameters == 28 * (1024 * 128 * 48 + 3 * 1024 * 3072)
    pairs = 512 * 513 / 2 + 32 * (64 * 512 + 64 * 65 / 2)
    expected = 2 * size.block_parameters * 2560 / 790e12 + 4 * 28 * 16 * 128 * pairs / 600e12
    assert size.floor((512, 64, 32)) == pytest.approx(expected)
    assert size.floor((512, 64, 32), cached=512) < expected


def results(name):
    return [json.loads(line) for line in (ROOT / "loadtest" / "results" / name).open()]


def test_the_open_loop_of_texts():
    lines = README[README.index("| profile | calls/s |") :].splitlines()[2:]
    told = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    for row, cells in zip(results("h200-load/load.jsonl"), told, strict=True):
        times = (row["latency"]["p50"], row["latency"]["p99"], row["queue_p99"], row["compute_p99"])
        assert cells == [
            f"`{row['profile']}`",
            f"{row['rate']:.0f}",
            f"{row['documents_per_second']:,.0f}",
            f"{row['goodput']:,.0f}",
            *(f"{1e3 * seconds:.0f}" for seconds in times),
            f"{row['codes'].get('RESOURCE_EXHAUSTED', 0)} of {row['calls']}",
        ]
        assert set(row["codes"]) <= {"OK", "RESOURCE_EXHAUSTED"}, "nothing that was accepted timed out"


def test_the_turns_of_the_caches_cost():
    turns = {}
    for row in results("h200-cache/cache.jsonl"):
        turns.setdefault((row["model"], row["what"]), []).append(row["items_per_s"])
    wide = turns.pop(("0.6B", "no cache"))
    assert f"0.6B's turns lie between {min(wide):,.0f}\nand {max(wide):,.0f} items/s, all others within 0.8 %" in README
    for (_, what), found in turns.items():
        if what in ("no cache", "cache that misses"):
            assert max(abs(one / median(found) - 1) for one in found) < 0.008


def test_what_the_cache_saves_and_costs():
    lines = README[README.index("| shape | one call, prefix new") :].splitlines()[2:]
    told = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    measured = results("h200-cache/cache.jsonl")
    assert [cells[0] for cells in told] == sorted({row["model"] for row in measured})
    for size, *cells in told:
        rows = [row for row in measured if row["model"] == size]
        by_key = {(row["what"], row["prefixes"], row["at_once"]): row for row in rows}
        none, missing = (
            median(r["items_per_s"] for r in rows if r["what"] == w) for w in ("no cache", "cache that misses")
        )
        assert cells == [
            *(f"{by_key['calls', kind, 1]['p50_ms']:.1f} ms" for kind in ("new", "cached")),
            *(f"{by_key['calls', kind, 32]['items_per_s']:,.0f}" for kind in ("new", "cached")),
            *(f"{by_key['two in a pass', kind, 1]['p50_ms']:.1f} ms" for kind in ("apart", "shared")),
            f"{missing / none - 1:+.1%}",
        ]
