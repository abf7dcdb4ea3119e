"""`prefixrank explain`: what each strategy would cost for given lengths, which is chosen, and what the article says."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attention.article import row
from attention.cost import cost, shapes
from attention.layout import Ints
from attention.plans import Strategy
from attention.timing import CANDIDATES, TimeModel
from batching.select import Measured, Threshold, choose
from batching.types import Item, TokenizedRequest
from scorer.errors import ConfigError
from scorer.times import load_times

AGREES = 1.03  # the article's choice counts as right where it is within 3 % of the fastest


def run(args: argparse.Namespace) -> int:
    """Explains one request, a file of them, or a map of them."""
    model = load_times(args.calibration)
    if args.map is not None:
        draw_map(model, args.map)
        print(f"wrote {args.map}")
        return 0
    if args.lengths is not None:
        return _explain_file(model, args)
    told = explain(model, args.prefix, args.cached, _items(args.items), args.q_tile, _policy(model, args))
    if args.json:
        print(json.dumps(told))
    else:
        _print(told, model)
    return 0


def explain(
    model: TimeModel, prefix: int, cached: int, lengths: Ints, q_tile: int, policy: Measured | Threshold
) -> dict[str, Any]:
    """Counts and predicted milliseconds of every strategy, the choice with its reason, and the article's row."""
    if not len(lengths) or lengths.min() < 1:
        raise ConfigError("items: at least one, and every item has at least one token")
    if prefix < 1 or not 0 <= cached <= prefix or q_tile < 1:
        raise ConfigError(f"prefix {prefix}, cached {cached}, q-tile {q_tile}: at least 1, 0 to the prefix, at least 1")
    ranked = {r.strategy: r for r in model.ranked(prefix, cached, lengths)}
    rows = ranked[Strategy.PACKED_MULTI_ITEM].packed_rows
    told = {s.value: _costs(model, s, prefix, cached, lengths, q_tile, rows) for s in Strategy}
    items = tuple(Item(np.zeros(n, np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32)) for n in lengths)
    choice = choose(TokenizedRequest(np.zeros(prefix, np.int32), items), items, policy, cached)
    applies = row(prefix, float(lengths.mean()), len(lengths), cached > 0)
    fastest = min(r.milliseconds for r in ranked.values())
    best_advice = min(told[s.value]["predicted_ms"] for s in applies.recommends)
    return {
        "strategies": told,
        "choice": Counter(choice.strategies).most_common(1)[0][0].value,
        "reason": choice.reason,
        "article": {
            "row": applies.scene,
            "recommends": [s.value for s in applies.recommends],
            "agrees": bool(best_advice <= AGREES * fastest),
        },
    }


def _costs(
    model: TimeModel, strategy: Strategy, prefix: int, cached: int, lengths: Ints, q_tile: int, rows: int
) -> dict[str, Any]:
    have = 0 if strategy is Strategy.NAIVE else cached
    merges = int(strategy in (Strategy.CASCADE, Strategy.CASCADE_CONTIGUOUS))
    counted = cost(shapes(strategy, prefix, have, lengths, rows), merges, q_tile, model.heads)
    return {
        "ctas": counted.ctas,
        "kv_tokens_scanned": counted.kv_tokens_scanned,
        "flops": counted.flops,
        "bytes": counted.bytes,
        "launches": counted.launches,
        "predicted_ms": round(model.strategy(strategy, prefix, have, lengths, rows), 6),
    }


def _policy(model: TimeModel, args: argparse.Namespace) -> Measured | Threshold:
    return Measured(model) if args.policy == "measured" else Threshold(args.multi_item_max_tokens)


def _items(text: str) -> Ints:
    """Lengths of "4,4" or "64x32"."""
    lengths: list[int] = []
    try:
        for part in text.split(","):
            length, _, count = part.partition("x")
            lengths += [int(length)] * (int(count) if count else 1)
    except ValueError:
        raise ConfigError(f"--items {text!r}: give lengths such as 4,4 or 64x32") from None
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"--items {text!r}: every item has at least one token")
    return np.array(lengths, np.int32)


def _explain_file(model: TimeModel, args: argparse.Namespace) -> int:
    chosen: Counter[str] = Counter()
    agreed = total = 0
    for number, given in _lines(args.lengths):
        try:
            lengths = np.array([int(n) for n in given["items"]], np.int32)
            prefix, cached = int(given["prefix"]), int(given.get("cached", 0))
            told = explain(model, prefix, cached, lengths, args.q_tile, _policy(model, args))
        except ConfigError as error:
            raise ConfigError(f"{args.lengths}, line {number}: {error}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{args.lengths}, line {number}: {error!r}") from None
        if args.json:
            print(json.dumps(told))
        chosen[told["choice"]] += 1
        agreed += told["article"]["agrees"]
        total += 1
    if not args.json:
        for strategy, count in chosen.most_common():
            print(f"{strategy:24s}{count:6d} of {total}")
        print(f"the article's advice is within {AGREES - 1:.0%} of the fastest by measurement for {agreed} of {total}")
    return 0


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--lengths {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None


def _print(told: dict[str, Any], model: TimeModel) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"one layer, {model.heads.heads}/{model.heads.kv_heads} heads, on {model.machine.name}")
    for heading in ("strategy", "CTAs", "KV tokens scanned", "GFLOP", "MB", "launches", "predicted ms"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=heading == "strategy")
    for name, c in told["strategies"].items():
        numbers = (f"{c['flops'] / 1e9:.3f}", f"{c['bytes'] / 1e6:.3f}", str(c["launches"]), f"{c['predicted_ms']:.4f}")
        table.add_row(name, str(c["ctas"]), str(c["kv_tokens_scanned"]), *numbers)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"choice: {told['choice']} ({told['reason']})")
    article = told["article"]
    verdict = "within" if article["agrees"] else "NOT within"
    advice = f"{article['row']}: {', '.join(article['recommends'])}"
    console.print(f"article: {advice}; {verdict} {AGREES - 1:.0%} of the fastest by measurement")


def draw_map(model: TimeModel, path: Path, items: tuple[int, ...] = (8, 32, 128, 512)) -> None:
    """The fastest strategy over prefix 64-8,192 and item length 4-512, a panel for each number of items."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("drawing needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    prefixes, lengths = np.geomspace(64, 8192, 29).astype(int), np.geomspace(4, 512, 29).astype(int)
    figure, axes = plt.subplots(1, len(items), figsize=(4 * len(items), 4.2), sharey=True, layout="constrained")
    colours = plt.get_cmap("tab10", len(CANDIDATES))
    for axis, count in zip(axes, items, strict=True):
        best = [[_fastest(model, p, s, count) for p in prefixes] for s in lengths]
        axis.pcolormesh(prefixes, lengths, best, cmap=colours, vmin=-0.5, vmax=len(CANDIDATES) - 0.5, shading="nearest")
        axis.set(xscale="log", yscale="log", title=f"{count} items", xlabel="prefix tokens")
    axes[0].set_ylabel("item tokens")
    handles = [Patch(color=colours(i), label=strategy.value) for i, strategy in enumerate(CANDIDATES)]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--map {path}: {error}") from None
    finally:
        plt.close(figure)


def _fastest(model: TimeModel, prefix: int, length: int, count: int) -> int:
    return CANDIDATES.index(model.ranked(int(prefix), 0, np.full(count, length, np.int32))[0].strategy)
