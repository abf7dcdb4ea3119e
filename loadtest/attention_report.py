"""Markdown and a plot of what `prefixrank bench attention` measured."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from loadtest.attention_rows import ARTICLE, ARTICLE_STRATEGIES, HEAD_DIM, HEADS, KV_HEADS, Row

NAMES = {"naive", "split_cache", "direct_ragged", "cascade", "multi_item", "custom_mask"}
WORTH_COMPARING = 0.05  # ms: below it, launch noise decides
Point = tuple[int, int, int]


def report(rows: list[Row], rates: dict[str, Any], output: Path) -> None:
    """Writes attention.md and attention.png."""
    parts = [
        "# Attention of one layer",
        "",
        f"`prefixrank bench attention`, {rates['date']}, {rates['gpu']}, torch {rates['torch']}, "
        f"FlashInfer {rates['flashinfer']}. Heads {HEADS}/{KV_HEADS}, head_dim {HEAD_DIM}, page 16. "
        f"Measured in the same run: dense bf16 products {rates['gemm_tflops']:.0f} TFLOP/s, causal attention "
        f"{rates['attention_tflops']:.0f} TFLOP/s, memory {rates['memory_tb_s']:.2f} TB/s. Floors divide by these two "
        "attention and memory rates.",
        "",
        *_article_table([row for row in rows if row.table == "article"], rates),
        "",
        *_ranking_table([row for row in rows if row.table == "ranking"], rates),
    ]
    (output / "attention.md").write_text("\n".join(parts) + "\n", encoding="utf-8")
    _plot([row for row in rows if row.table == "ranking"], rates, output / "attention.png")


def floor(point: Point, rates: dict[str, Any]) -> float:
    """Milliseconds: the visible pairs at the attention rate, or Q, K, V and output once at the memory rate."""
    prefix, item, items = point
    pairs = prefix * (prefix + 1) / 2 + items * (item * prefix + item * (item + 1) / 2)
    tokens = prefix + item * items
    moved = 2 * HEAD_DIM * tokens * (2 * HEADS + 2 * KV_HEADS)
    flops = 4 * HEADS * HEAD_DIM * pairs
    return 1e3 * max(flops / (float(rates["attention_tflops"]) * 1e12), moved / (float(rates["memory_tb_s"]) * 1e12))


def _by_point(rows: list[Row]) -> dict[Point, list[Row]]:
    points: dict[Point, list[Row]] = defaultdict(list)
    for row in rows:
        points[row.prefix, row.item, row.items].append(row)
    return points


def _article_table(rows: list[Row], rates: dict[str, Any]) -> list[str]:
    points = _by_point(rows)
    lines = [
        "## The article's table",
        "",
        "fp16, 10 warm-ups, 100 iterations (20 above 5 ms). Each cell: the article's figure / ours, event mean / event "
        "median / GPU-only, of the faster of fa2, fa3 and auto by GPU-only time.",
        "",
        "| strategy | " + " | ".join(f"P{p} S{s} M{m}" for p, s, m in points) + " |",
        "|---" * (len(points) + 1) + "|",
    ]
    for strategy in dict.fromkeys(row.strategy for row in rows):
        cells = []
        for point, measured in points.items():
            own = [row for row in measured if row.strategy == strategy]
            best = min(own, key=lambda row: row.gpu, default=None)
            published = _published(point, strategy)
            ours = "-" if best is None else f"{best.event_mean:.3f} / {best.event_median:.3f} / {best.gpu:.3f}"
            cells.append(f"{published} / {ours}")
        lines.append(f"| {strategy} | " + " | ".join(cells) + " |")
    lines.append("| floor | " + " | ".join(f"{floor(point, rates):.3f}" for point in points) + " |")
    return lines


def _published(point: Point, strategy: str) -> str:
    names = [s.value for s in ARTICLE_STRATEGIES]
    return f"{ARTICLE[point][names.index(strategy)]:.3f}" if strategy in names else "-"


def _ranking_table(rows: list[Row], rates: dict[str, Any]) -> list[str]:
    points = _by_point(rows)
    regrets, against = [], []
    lines = [
        "## The ranking grid",
        "",
        "bf16, GPU-only ms. `auto` is the strategy of the smallest predicted time, kernels chosen launch by launch.",
        "",
        "| P | S | M | floor | best | ms | auto | ms | best of the article's six | ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for point, measured in sorted(points.items()):
        best = min(measured, key=lambda row: row.gpu)
        auto = min((row for row in measured if row.kernel == "auto"), key=lambda row: row.predicted)
        six = min((row for row in measured if row.strategy in NAMES), key=lambda row: row.gpu)
        if best.gpu > WORTH_COMPARING:
            regrets.append(auto.gpu / best.gpu - 1)
            against.append(auto.gpu / six.gpu - 1)
        cells = [_label(best), f"{best.gpu:.3f}", _label(auto), f"{auto.gpu:.3f}", _label(six), f"{six.gpu:.3f}"]
        lines.append(f"| {' | '.join(map(str, point))} | {floor(point, rates):.3f} | {' | '.join(cells)} |")
    lines += ["", *_summary(regrets, against)]
    return lines


def _label(row: Row) -> str:
    packing = f" {row.packed_rows}" if row.strategy == "packed_multi_item" else ""
    return f"{row.strategy}{packing} {row.kernel}"


def _summary(regrets: list[float], against: list[float]) -> list[str]:
    import numpy as np

    if not regrets:
        return []
    ahead = sum(a <= 0.0 for a in against)
    mean, p95 = np.mean(regrets), np.percentile(regrets, 95)
    return [
        f"Over the {len(regrets)} points above {WORTH_COMPARING} ms `auto` is behind the best by {mean:.1%} in the "
        f"mean, {p95:.1%} at p95 and {max(regrets):.1%} at most; it is as fast as the best of the article's six or "
        f"faster at {ahead}, and at most {max(against):.1%} behind.",
    ]


def _plot(rows: list[Row], rates: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    points = _by_point(rows)
    prefixes = sorted({p for p, _, _ in points})
    figure, axes = plt.subplots(1, len(prefixes), figsize=(5 * len(prefixes), 4), sharey=True, layout="constrained")
    for axis, prefix in zip(axes, prefixes, strict=True):
        for strategy in dict.fromkeys(row.strategy for row in rows):
            own = [
                (s * m, min(row.gpu for row in measured if row.strategy == strategy) / floor((p, s, m), rates))
                for (p, s, m), measured in sorted(points.items())
                if p == prefix and s == 64
            ]
            axis.plot(*zip(*own, strict=True), marker="o", label=strategy)
        axis.set(xscale="log", yscale="log", title=f"prefix {prefix}, items of 64", xlabel="item tokens")
        axis.axhline(1.0, color="black", linewidth=0.8)
    axes[0].set_ylabel("time / floor")
    axes[-1].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)
