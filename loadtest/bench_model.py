"""`prefixrank bench model`: the engine alone, requests as token ids, each shape beside its floor."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console

from attention.kv_pages import KvPages
from batching.packing import Group, pack
from batching.types import TokenizedRequest
from loadtest.model_passes import fits, prefix_pages, saturating, split
from loadtest.model_report import plot, read_rows
from loadtest.shapes import SATURATION, SCALING, SHAPES, SIZES, Shape, random_model, request
from scorer.console import plain_console
from scorer.errors import ConfigError
from scorer.hand_fused import KEY_BLOCK
from scorer.sizing import INVARIANT_TOKENS

if TYPE_CHECKING:
    from scorer.fast_path import FastPath

PAGE_SIZE = 16
DISTINCT = 48  # requests with prefixes of their own
SECONDS = 1.5
DEPTH = 2  # passes in flight: one runs while the next is prepared
ALONE = 30
LEAST_PASSES = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One shape. Times in milliseconds; ratios are floor over time, so 1 is the floor itself.

    alone_ms        median of one request at a time: planned, run, scores on the host
    host_ms         of it: packing, planning, filling the arrays
    items_per_s     requests batched into passes of pass_tokens, two in flight
    tflops          dense FLOPs over that time
    """

    size: str
    quantization: str
    invariant: bool
    shape: Shape
    alone_ms: float
    host_ms: float
    floor_ms: float
    alone_ratio: float
    pass_tokens: int
    items_per_s: float
    floor_items_per_s: float
    ratio: float
    tflops: float


def run(
    sizes: Sequence[str],
    output: Path | None,
    pass_tokens: int,
    profile: Path | None,
    quantization: str = "none",
    scaling: bool = False,
    invariant: bool = False,
    shapes: Sequence[Shape] = (),
) -> int:
    """Measures and prints; appends JSON lines to `output`.

    scaling: one prefix with more and more items instead of the shapes. invariant: each shape again in that mode, and
    what it costs. shapes: empty: all of its own.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench model needs an NVIDIA GPU")
    console = plain_console()
    shapes = SCALING if scaling else shapes or SHAPES
    for name in sizes:
        usual = _rows(console, name, shapes, pass_tokens, quantization, False, output, profile)
        if scaling:
            console.print(_flatness(usual))
        if invariant:
            taken = [shape for shape in shapes if fits(shape, INVARIANT_TOKENS)]
            again = _rows(console, name, taken, INVARIANT_TOKENS, quantization, True, output, None)
            console.print(_cost(usual, again), highlight=False, soft_wrap=True)
    if output is not None and not scaling:
        plot(read_rows(output), output.with_suffix(".png"))
    return 0


def _rows(
    console: Console,
    name: str,
    shapes: Sequence[Shape],
    pass_tokens: int,
    quantization: str,
    invariant: bool,
    output: Path | None,
    profile: Path | None,
) -> list[Row]:
    """Measures one model in one mode."""
    from scorer.fast_path import FastPath, Mode

    started = time.perf_counter()
    page_size = KEY_BLOCK if invariant else PAGE_SIZE
    kept = 2 * max(prefix_pages(shape, page_size) for shape in shapes)
    paged = any(shape[0] + shape[1] * shape[2] > pass_tokens for shape in shapes)
    mode = Mode(fp8=quantization == "fp8", invariant=invariant)
    model, pages = random_model(SIZES[name]), KvPages(kept if paged else 1, page_size)
    path = FastPath(model, pages, kept if paged else 0, 16_384, pass_tokens, mode)
    seconds = path.capture(paged=paged)
    whole, held = time.perf_counter() - started, torch.cuda.max_memory_allocated() / 2**30
    told = f"{name}{' invariant' if invariant else ''}: {path.graphs} graphs"
    console.print(f"{told} in {seconds:.1f} s, start {whole:.1f} s, {held:.1f} GiB")
    rows = []
    for shape in shapes:
        row = measure(path, name, shape, pass_tokens, quantization, invariant, page_size)
        rows.append(row)
        console.print(_line(row), highlight=False, soft_wrap=True)
        if output is not None:
            _append(output, row)
    if profile is not None:
        _profile(path, profile / f"{name}.txt", pass_tokens)
    del path, model, pages
    torch.cuda.empty_cache()
    return rows


def measure(
    path: FastPath,
    name: str,
    shape: Shape,
    pass_tokens: int,
    quantization: str,
    invariant: bool = False,
    page_size: int = PAGE_SIZE,
) -> Row:
    size = SIZES[name]
    requests = [request(shape, seed) for seed in range(DISTINCT)]
    alone, host = _alone(path, requests, shape, pass_tokens, page_size)
    items = _saturated(path, saturating(requests, shape, pass_tokens, page_size), page_size)
    floor = size.floor(shape)
    return Row(
        size=name,
        quantization=quantization,
        invariant=invariant,
        shape=shape,
        alone_ms=1e3 * alone,
        host_ms=1e3 * host,
        floor_ms=1e3 * floor,
        alone_ratio=floor / alone,
        pass_tokens=pass_tokens,
        items_per_s=items,
        floor_items_per_s=shape[2] / floor,
        ratio=items * floor / shape[2],
        tflops=items / shape[2] * size.flops(shape) / 1e12,
    )


def _alone(
    path: FastPath, requests: Sequence[TokenizedRequest], shape: Shape, pass_tokens: int, page_size: int
) -> tuple[float, float]:
    """Medians of (whole, host) seconds."""
    whole, host = [], []
    pages = np.arange(prefix_pages(shape, page_size), dtype=np.int32)
    for number in range(ALONE + 5):
        started = time.perf_counter()
        groups = split(requests[number % len(requests)], shape, pass_tokens, pages)
        waiting = [path.submit(pack([group], page_size), page_size) for group in groups]
        host.append(time.perf_counter() - started)
        for wait in waiting:
            wait()
        whole.append(time.perf_counter() - started)
    return float(np.median(whole[5:])), float(np.median(host[5:]))


def _saturated(path: FastPath, passes: Iterator[list[Group]], page_size: int) -> float:
    """Items per second."""
    waiting: list[tuple[Callable[[], object], int]] = []
    done = ended = 0
    started = None
    for groups in passes:
        items = sum(len(group.items) for group in groups)
        waiting.append((path.submit(pack(groups, page_size), page_size), items))
        if len(waiting) < DEPTH:
            continue
        wait, items = waiting.pop(0)
        wait()
        now = time.perf_counter()
        if started is None:
            started = now  # the first pass fills the pipeline
            continue
        done, ended = done + items, ended + 1
        if now - started > SECONDS and ended >= LEAST_PASSES:
            break
    for wait, _ in waiting:
        wait()
    assert started is not None, "passes come for ever"
    return done / (now - started)


def _flatness(rows: Sequence[Row]) -> str:
    """How items/s and their part of the floor change with the items of a request."""
    first = rows[0]
    parts = [
        f"M{row.shape[2]}: {row.items_per_s / first.items_per_s:.2f} x ({row.ratio / first.ratio:.2f} x of the floor)"
        for row in rows[1:]
    ]
    return f"{first.size}: items/s beside M{first.shape[2]}'s: " + ", ".join(parts)


def _cost(usual: Sequence[Row], invariant: Sequence[Row]) -> str:
    """What the same bits cost: the usual mode's items/s over the invariant's, and the time of one request alone."""
    by_shape = {row.shape: row for row in usual}
    parts = [
        f"P{row.shape[0]} S{row.shape[1]} M{row.shape[2]}: {by_shape[row.shape].items_per_s / row.items_per_s:.2f} x, "
        f"alone {row.alone_ms / by_shape[row.shape].alone_ms:.2f} x"
        for row in invariant
    ]
    return "invariant costs " + "; ".join(parts)


def _profile(path: FastPath, to: Path, pass_tokens: int) -> None:
    """Time by kernel over one saturated pass of the first shape and one of the longest prefix."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("w") as file:
        for shape in (SATURATION[0], SATURATION[1]):
            per_pass = max(1, pass_tokens // (shape[0] + shape[1] * shape[2]))
            requests = [request(shape, seed) for seed in range(per_pass)]
            batch = pack(next(saturating(requests, shape, pass_tokens, PAGE_SIZE)), PAGE_SIZE)
            path.submit(batch, PAGE_SIZE)()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
                for _ in range(3):
                    path.submit(batch, PAGE_SIZE)()
            table = found.key_averages().table(sort_by="self_device_time_total", row_limit=16, max_name_column_width=90)
            file.write(f"{shape}, three passes of {per_pass} requests\n{table}\n")


def _line(row: Row) -> str:
    return (
        f"{row.size:>4} P{row.shape[0]:<5} S{row.shape[1]:<4} M{row.shape[2]:<4} alone {row.alone_ms:7.2f} ms "
        f"(host {row.host_ms:5.2f}, floor {row.floor_ms:6.2f}, {row.alone_ratio:4.0%})   "
        f"{row.items_per_s:8.0f} items/s of {row.floor_items_per_s:6.0f} ({row.ratio:4.0%}), {row.tflops:4.0f} TFLOP/s"
    )


def _append(output: Path, row: Row) -> None:
    stamp = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": version("torch"),
        "triton": version("triton"),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a") as file:
        file.write(json.dumps(asdict(row) | stamp) + "\n")
