"""`prefixrank explain`: what each strategy would cost for given lengths, which is chosen, and what the article says."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from attention.article import row
from attention.cost import PACKED_ROWS, cost, shapes
from attention.plans import Strategy
from attention.timing import CANDIDATES, MEASURED_PREFIX, MEASURED_TOKENS, TimeModel
from batching.items import Item, Items
from batching.select import Measured, StrategyError, Threshold, choose
from batching.types import TokenizedRequest
from scorer.errors import ConfigError
from scorer.explain_table import show, whose
from scorer.lengths import MOST_TILE, MOST_TOKENS, Lengths, between, lengths_of, read_lengths
from scorer.times import heads_of, load_times

AGREES = 1.03  # the article's choice counts as right where it is within 3 % of the fastest


def run(args: argparse.Namespace) -> int:
    """Explains one request, a file of them, or a map of them. Raises ConfigError."""
    between("--q-tile", args.q_tile, 1, MOST_TILE)
    between("--multi-item-max-tokens", args.multi_item_max_tokens, 0, MOST_TOKENS)
    model = load_times(args.calibration)
    if args.map is not None:
        draw_map(model, args.map)
        print(f"wrote {args.map}")
        return 0
    if args.lengths is not None:
        return _explain_file(model, args)
    told = explain(model, lengths_of(args.prefix, args.cached, args.items), args.q_tile, _policy(model, args))
    if args.json:
        print(json.dumps(told))
    else:
        show(told, model, _advice(told["article"]))
    return 0


def explain(model: TimeModel, lengths: Lengths, q_tile: int, policy: Measured | Threshold) -> dict[str, Any]:
    """Counts and predicted milliseconds of every strategy, the choice with its reason, and the article's row.

    A strategy that the service would refuse for these lengths has no time, and the reason.
    """
    prefix, cached, items = lengths.prefix, lengths.cached, lengths.items
    refused = _refused(lengths, policy)
    ranked = {r.strategy: r for r in model.ranked(prefix, cached, items, [s for s in CANDIDATES if s not in refused])}
    packed = ranked.get(Strategy.PACKED_MULTI_ITEM)
    rows = PACKED_ROWS if packed is None else packed.packed_rows
    told = {s.value: _costs(model, s, lengths, q_tile, rows, refused.get(s)) for s in Strategy}
    request = _request(lengths)
    choice = choose(request, request.items, policy, cached)
    applies = row(prefix, float(items.mean()), len(items), cached > 0)
    fastest = min(r.milliseconds for r in ranked.values())
    advised = [told[s.value]["predicted_ms"] for s in applies.recommends if s not in refused]
    best_advice = min(advised, default=float("inf"))
    return {
        "measured_on": model.machine.name,
        "beyond_measured": prefix > MEASURED_PREFIX or prefix + int(items.sum()) > MEASURED_TOKENS,
        "strategies": told,
        "choice": Counter(choice.strategies).most_common(1)[0][0].value,
        "reason": choice.reason,
        "article": {
            "row": applies.scene,
            "recommends": [s.value for s in applies.recommends],
            "agrees": bool(best_advice <= AGREES * fastest),
        },
    }


def _request(lengths: Lengths, strategy: Strategy | None = None) -> TokenizedRequest:
    """Of tokens that are all the same."""
    tokens = np.zeros(max(lengths.prefix, int(lengths.items.max())), np.int32)
    items = (Item(tokens[:n], np.zeros(0, np.int32), np.zeros((0, 1), np.int32)) for n in lengths.items)
    return TokenizedRequest(tokens[: lengths.prefix], Items.of(items), strategy=strategy)


def _refused(lengths: Lengths, policy: Measured | Threshold) -> dict[Strategy, str]:
    """The strategies that the service would refuse to a caller who asks for them, and why."""
    refused: dict[Strategy, str] = {}
    for strategy in Strategy:
        request = _request(lengths, strategy)
        try:
            choose(request, request.items, policy, lengths.cached)
        except StrategyError as error:
            refused[strategy] = str(error)
    return refused


def _costs(
    model: TimeModel, strategy: Strategy, lengths: Lengths, q_tile: int, rows: int, refused: str | None
) -> dict[str, Any]:
    have = 0 if strategy is Strategy.NAIVE else lengths.cached
    merges = int(strategy in (Strategy.CASCADE, Strategy.CASCADE_CONTIGUOUS))
    counted = cost(shapes(strategy, lengths.prefix, have, lengths.items, rows), merges, q_tile, model.heads)
    made: dict[str, Any] = {
        "ctas": counted.ctas,
        "kv_tokens_scanned": counted.kv_tokens_scanned,
        "flops": counted.flops,
        "bytes": counted.bytes,
        "launches": counted.launches,
    }
    if refused is not None:
        return made | {"predicted_ms": None, "refused": refused}
    return made | {"predicted_ms": round(model.strategy(strategy, lengths.prefix, have, lengths.items, rows), 6)}


def _policy(model: TimeModel, args: argparse.Namespace) -> Measured | Threshold:
    return Measured(model) if args.policy == "measured" else Threshold(args.multi_item_max_tokens)


def _explain_file(model: TimeModel, args: argparse.Namespace) -> int:
    chosen: Counter[str] = Counter()
    agreed = total = 0
    for _, lengths in read_lengths(args.lengths):
        told = explain(model, lengths, args.q_tile, _policy(model, args))
        if args.json:
            print(json.dumps(told))
        chosen[told["choice"]] += 1
        agreed += told["article"]["agrees"]
        total += 1
    if not args.json:
        for strategy, count in chosen.most_common():
            print(f"{strategy:24s}{count:6d} of {total}")
        print(f"the article's advice is within {AGREES - 1:.0%} of the fastest for {agreed} of {total}")
        print(whose(model))
    return 0


def _advice(article: dict[str, Any]) -> str:
    verdict = "within" if article["agrees"] else "NOT within"
    advice = f"{article['row']}: {', '.join(article['recommends'])}"
    return f"article: {advice}; {verdict} {AGREES - 1:.0%} of the fastest by measurement"


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
    figure.suptitle(f"fastest strategy by the times of {model.machine.name}, {heads_of(model.heads)}")
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
