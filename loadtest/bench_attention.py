"""`prefixrank bench attention`: every strategy at the article's points and on a ranking grid, on this machine's GPU.

A point's rows are measured by turns and then written (JSON lines), so a run that was interrupted goes on at the point
where it stopped. `report` turns the rows into Markdown and plots.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attention.plans import Strategy
from loadtest.attention_report import report
from loadtest.attention_rows import ARTICLE, HEAD_DIM, HEADS, KV_HEADS, PAGE, Row, read_rows
from scorer.errors import ConfigError

WARM_UPS, ITERATIONS = 10, 100
SLOW_ITERATIONS = 20  # for what takes over SLOW_MS a call
SLOW_MS = 5.0
DENSE_LIMIT = 18_000  # tokens up to which custom_mask is run: its mask takes a bit for each pair
NAIVE_LIMIT = 300_000  # tokens up to which naive is run

GRID = tuple(
    (p, s, m)
    for p in (512, 2048, 8192)
    for s in (16, 32, 64, 128, 256)
    for m in (8, 32, 128, 256)
    if p + s * m <= 65_536 - 512
)
KERNELS = {Strategy.CUSTOM_MASK: ("fa2",), Strategy.FUSED: ("auto",)}  # of the strategies that have one only
VARIANTS = (
    *((s, 128) for s in Strategy if s is not Strategy.REFERENCE and s is not Strategy.PACKED_MULTI_ITEM),
    (Strategy.PACKED_MULTI_ITEM, 64),
    (Strategy.PACKED_MULTI_ITEM, 128),
)


class Variant(NamedTuple):
    """A strategy as it is measured. packed_rows: of packed_multi_item; kernel: fa2, fa3 or auto."""

    strategy: Strategy
    packed_rows: int
    kernel: str


Times = tuple[float, float, float]  # event mean, event median, GPU-only, in milliseconds


def run(args: argparse.Namespace) -> int:
    """Measures what is missing and reports."""
    args.output.mkdir(parents=True, exist_ok=True)
    rows_file, rates_file = args.output / "attention.jsonl", args.output / "rates.json"
    if not args.report:
        measure(rows_file, rates_file, args.calibration)
    rows = read_rows(rows_file)
    rates = json.loads(rates_file.read_text(encoding="utf-8"))
    report(rows, rates, args.output)
    print(f"wrote {args.output / 'attention.md'} from {len(rows)} rows")
    return 0


def wanted() -> Iterator[tuple[str, int, int, int, str, Strategy, int, str]]:
    """(table, prefix, item, items, dtype, strategy, packed rows, kernel) of every row."""
    for table, points, dtype in (("article", tuple(ARTICLE), "float16"), ("ranking", GRID, "bfloat16")):
        for prefix, item, items in points:
            for strategy, rows in VARIANTS:
                if table == "ranking" and strategy in (Strategy.NAIVE, Strategy.CUSTOM_MASK):
                    continue
                total = prefix + item * items
                if strategy is Strategy.CUSTOM_MASK and total > DENSE_LIMIT:
                    continue
                if strategy is Strategy.NAIVE and (prefix + item) * items > NAIVE_LIMIT:
                    continue
                for kernel in KERNELS.get(strategy, ("fa2", "fa3", "auto")):
                    yield table, prefix, item, items, dtype, strategy, rows, kernel


def measure(rows_file: Path, rates_file: Path, calibration: Path | None) -> None:
    """Appends every row that is not there yet."""
    from rich.progress import track

    from scorer.console import plain_console
    from scorer.times import load_times

    _need_gpu()
    model = load_times(calibration)
    have = {row.key for row in read_rows(rows_file)}
    missing = [w for w in wanted() if (*w[:4], w[5].value, *w[6:]) not in have]
    todo = [(point, [Variant(*w[5:]) for w in group]) for point, group in groupby(missing, key=lambda w: w[:5])]
    console = plain_console(stderr=True)
    rigs: dict[str, Any] = {}
    with rows_file.open("a", encoding="utf-8") as out:
        for point, variants in track(todo, "measuring", console=console, disable=not console.is_terminal):
            table, prefix, item, items, dtype = point
            if dtype not in rigs:
                rigs.clear()
                rigs[dtype] = Rig(dtype, model)
            times = rigs[dtype].times(prefix, item, items, variants)
            for variant, (mean, median, gpu) in zip(variants, times, strict=True):
                strategy, packed_rows, kernel = variant
                lengths = np.full(items, item, np.int32)
                predicted = model.strategy(strategy, prefix, 0, lengths, packed_rows, writes=False)
                key = (table, prefix, item, items, dtype, strategy.value, packed_rows, kernel)
                row = Row(*key, event_mean=mean, event_median=median, gpu=gpu, predicted=predicted)
                out.write(json.dumps(asdict(row)) + "\n")
            out.flush()
    if not rates_file.exists():
        rig = next(iter(rigs.values()), None) or Rig("bfloat16", model)
        rates_file.write_text(json.dumps(rig.rates()) + "\n", encoding="utf-8")


def _need_gpu() -> None:
    try:
        import flashinfer  # noqa: F401
        import torch
    except ImportError as error:
        raise ConfigError(f"bench attention needs FlashInfer ({error}): install the gpu extra") from None
    if not torch.cuda.is_available():
        raise ConfigError("bench attention needs an NVIDIA GPU; --report writes the report of rows measured elsewhere")


class Rig:
    """The GPU's side: an attention object for each variant, as their plans lie in buffers of their own, and timing."""

    def __init__(self, dtype: str, model: Any) -> None:
        import torch

        from attention.calibration import Bench
        from attention.plans import HeadShape

        self._heads = HeadShape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, getattr(torch, dtype))
        self._bench = Bench(self._heads)
        self._model = model
        self._chosen: set[str] = set()
        self._attention: dict[Variant, Any] = {}

    def times(self, prefix: int, item: int, items: int, variants: Sequence[Variant]) -> list[Times]:
        """GPU-only times by turns, then the others one variant after another. Where `auto` chose one kernel for every
        launch, it is what that kernel's variant is, and has its times."""
        from attention.gpu_timing import in_turns

        calls: dict[Variant, Callable[[], object]] = {}
        twins: dict[Variant, Variant] = {}
        for variant in variants:
            call, kernels = self._prepared(prefix, item, items, variant)
            twin = variant._replace(kernel=next(iter(kernels), ""))
            if variant.kernel == "auto" and len(kernels) == 1 and twin in calls:
                twins[variant] = twin
            else:
                calls[variant] = call
        gpu = in_turns(list(calls.values()))
        found = {variant: (*self._events(calls[variant], ms), ms) for variant, ms in zip(calls, gpu, strict=True)}
        return [found[twins.get(variant, variant)] for variant in variants]

    def _prepared(self, prefix: int, item: int, items: int, variant: Variant) -> tuple[Callable[[], object], set[str]]:
        """A call of one layer, and the kernels of its launches, those of the fused strategy left out."""
        from attention.plans import MaskKey

        layout, pages, made = _planned(prefix, item, items, variant.strategy, variant.packed_rows)
        self._chosen.clear()
        attend = self._attention_of(variant).begin(layout, pages, {MaskKey(): made})
        bench, rows = self._bench, layout.rows
        q, k, v = (bench.rows(x, rows) for x in (bench.q, bench.k, bench.v))
        return lambda: attend(0, q, k, v, self._heads.scale, MaskKey()), set(self._chosen)

    def _attention_of(self, variant: Variant) -> Any:
        from attention.flashinfer_backend import FlashInferAttention, Kernel, by_time
        from attention.plans import MaskKind

        measured = by_time(self._model)

        def choose(launch: Any, page_size: int) -> Kernel:
            if variant.kernel == "auto":
                kernel = measured(launch, page_size)
            else:
                kernel = Kernel.FA2 if launch.mask is MaskKind.CUSTOM else Kernel(variant.kernel)
            self._chosen.add(kernel.value)
            return kernel

        if variant not in self._attention:
            self._attention[variant] = FlashInferAttention(self._bench.kv_pages, self._heads, choose=choose)
        return self._attention[variant]

    def _events(self, call: Callable[[], object], gpu: float) -> tuple[float, float]:
        events = self._bench.events(call, WARM_UPS, SLOW_ITERATIONS if gpu > SLOW_MS else ITERATIONS)
        return float(np.mean(events)), float(np.median(events))

    def rates(self) -> dict[str, float | str]:
        """What the floors divide by, measured in this run: dense products, attention, memory."""
        return self._bench.rates()


def _planned(prefix: int, item: int, items: int, strategy: Strategy, packed_rows: int) -> tuple[Any, Any, Any]:
    """Layout, pages and a plan that writes only what the strategy writes again: the first write is not attention."""
    from attention.calibration import Point
    from attention.layout import unshared
    from attention.planner import plan
    from attention.plans import Pages

    layout, pages = Point(prefix, (item,) * items, False).layout()
    if strategy is Strategy.NAIVE:
        layout, _ = unshared(layout)
        pages = Pages.scratch(layout, PAGE)
    made = plan(layout, [strategy] * len(layout.leaves), pages, packed_rows=packed_rows)
    _, first = np.unique(made.append_rows, return_index=True)
    again = np.ones(len(made.append_rows), np.bool_)
    again[first] = False
    return layout, pages, replace(made, append_rows=made.append_rows[again], append_slots=made.append_slots[again])
