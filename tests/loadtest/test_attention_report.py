"""The committed report follows from the committed rows, and README's figures from the report."""

import json
import re
from pathlib import Path

import pytest

from attention.plans import Strategy
from loadtest.attention_report import floor, report
from loadtest.attention_rows import ARTICLE, ARTICLE_STRATEGIES, read_rows
from loadtest.bench_attention import wanted

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "loadtest" / "results" / "h200-attention"
RATES = json.loads((RESULTS / "rates.json").read_text())


@pytest.fixture(scope="module")
def rows():
    return read_rows(RESULTS / "attention.jsonl")


def test_the_report_is_what_the_rows_say(rows, tmp_path):
    report(rows, RATES, tmp_path)
    assert (tmp_path / "attention.md").read_text() == (RESULTS / "attention.md").read_text()
    assert (tmp_path / "attention.png").stat().st_size > 10_000


def test_every_row_that_the_bench_wants_is_there(rows):
    asked = {(*w[:4], w[5].value, *w[6:]) for w in wanted()}
    assert {row.key for row in rows} == asked


def test_readme_repeats_the_reports_figures(rows):
    readme = (ROOT / "README.md").read_text()
    summary = (RESULTS / "attention.md").read_text().strip().splitlines()[-1]
    assert summary.split("ms `auto`")[1] in readme
    line = re.search(r"\| (\d+), (\d+), (\d+) \| `(\w+)` \| ([\d.]+) \|", readme)
    point, strategy, told = tuple(map(int, line.groups()[:3])), line[4], float(line[5])
    measured = [
        row.gpu
        for row in rows
        if (row.prefix, row.item, row.items) == point and row.strategy == strategy and row.kernel == "auto"
    ]
    assert any(abs(gpu - told) < 0.0006 for gpu in measured)


def test_the_articles_speed_ups_recompute():
    """Its conclusion: 26.70 x for multi_item, 24.62 x for split_cache at P8196 S4 M32; 0.03 x for custom_mask."""
    times = dict(zip(ARTICLE_STRATEGIES, ARTICLE[8196, 4, 32], strict=True))
    assert round(times[Strategy.NAIVE] / times[Strategy.MULTI_ITEM], 2) == 26.70
    assert round(times[Strategy.NAIVE] / times[Strategy.SPLIT_CACHE], 2) == 24.62
    short = dict(zip(ARTICLE_STRATEGIES, ARTICLE[96, 256, 32], strict=True))
    assert round(short[Strategy.NAIVE] / short[Strategy.CUSTOM_MASK], 2) == 0.03


def test_the_floor_counts_visible_pairs_once():
    tiny = floor((96, 4, 2), RATES)
    assert floor((8196, 256, 32), RATES) > 100 * tiny
    pairs = 8196 * 8197 / 2 + 32 * (256 * 8196 + 256 * 257 / 2)
    assert floor((8196, 256, 32), RATES) == pytest.approx(4 * 16 * 128 * pairs / RATES["attention_tflops"] / 1e9)
