"""A plot of what `prefixrank bench model` measured: items/s over the floor's, by shape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.shapes import SHAPES


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, a later one of the same run replacing an earlier."""
    rows: dict[Any, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        mode = (row["quantization"], row.get("invariant", False))
        rows[row["size"], *mode, tuple(row["shape"])] = row
    return list(rows.values())


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a PNG, unless matplotlib is not there."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if not row.get("invariant")]
    kinds = list(dict.fromkeys((row["size"], row["quantization"]) for row in rows))
    figure, axis = plt.subplots(figsize=(11, 4), layout="constrained")
    width = 0.8 / max(1, len(kinds))
    for number, (size, quantization) in enumerate(kinds):
        own = {
            tuple(row["shape"]): row["ratio"]
            for row in rows
            if (row["size"], row["quantization"]) == (size, quantization)
        }
        at = [place for place, shape in enumerate(SHAPES) if shape in own]
        label = size if quantization == "none" else f"{size} {quantization}"
        axis.bar([place + number * width for place in at], [own[SHAPES[place]] for place in at], width, label=label)
    axis.set_xticks([place + 0.3 for place in range(len(SHAPES))], ["P{} S{} M{}".format(*shape) for shape in SHAPES])
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_ylabel("items/s over the bf16 floor's")
    axis.tick_params(axis="x", labelsize=8)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
