"""`prefixrank bench model`: the engine alone, requests as token ids, each shape beside its floor."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console

from attention.kv_pages import KvPages
from attention.plans import Strategy
from batching.packing import Group, pack
from batching.types import PackedBatch, TokenizedRequest
from loadtest.model_report import plot, read_rows
from loadtest.shapes import SATURATION, SHAPES, SIZES, Shape, random_model, request
from scorer.errors import ConfigError

if TYPE_CHECKING:
    from scorer.fast_path import FastPath

PAGE_SIZE = 16
DISTINCT = 48  # requests with prefixes of their own
SECONDS = 1.5
DEPTH = 2  # passes in flight: one runs while the next is prepared
ALONE = 30


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
    sizes: Sequence[str], output: Path | None, pass_tokens: int, profile: Path | None, quantization: str = "none"
) -> int:
    """Measures and prints; appends JSON lines to `output`."""
    if not torch.cuda.is_available():
        raise ConfigError("bench model needs an NVIDIA GPU")
    from scorer.fast_path import FastPath, Mode

    console = Console()
    for name in sizes:
        started = time.perf_counter()
        mode = Mode(fp8=quantization == "fp8")
        path = FastPath(random_model(SIZES[name]), KvPages(1, PAGE_SIZE), 0, 16_384, pass_tokens, mode)
        seconds = path.capture(paged=False)
        whole, held = time.perf_counter() - started, torch.cuda.max_memory_allocated() / 2**30
        console.print(f"{name}: {path.graphs} graphs in {seconds:.1f} s, start {whole:.1f} s, {held:.1f} GiB")
        for shape in SHAPES:
            row = measure(path, name, shape, pass_tokens, quantization)
            console.print(_line(row), highlight=False, soft_wrap=True)
            if output is not None:
                _append(output, row)
        if profile is not None:
            _profile(path, profile / f"{name}.txt", pass_tokens)
        del path
        torch.cuda.empty_cache()
    if output is not None:
        plot(read_rows(output), output.with_suffix(".png"))
    return 0


def measure(path: FastPath, name: str, shape: Shape, pass_tokens: int, quantization: str) -> Row:
    size = SIZES[name]
    requests = [request(shape, seed) for seed in range(DISTINCT)]
    alone, host = _alone(path, requests)
    per_pass = max(1, pass_tokens // (shape[0] + shape[1] * shape[2]))
    items = _saturated(path, requests, per_pass) * shape[2]
    floor = size.floor(shape)
    return Row(
        size=name,
        quantization=quantization,
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


def _batch(requests: Sequence[TokenizedRequest]) -> PackedBatch:
    return pack([Group(r, tuple(range(len(r.items))), (Strategy.FUSED,) * len(r.items)) for r in requests])


def _alone(path: FastPath, requests: Sequence[TokenizedRequest]) -> tuple[float, float]:
    """Medians of (whole, host) seconds."""
    whole, host = [], []
    for number in range(ALONE + 5):
        started = time.perf_counter()
        wait = path.submit(_batch([requests[number % len(requests)]]), PAGE_SIZE)
        host.append(time.perf_counter() - started)
        wait()
        whole.append(time.perf_counter() - started)
    return float(np.median(whole[5:])), float(np.median(host[5:]))


def _saturated(path: FastPath, requests: Sequence[TokenizedRequest], per_pass: int) -> float:
    """Requests per second."""
    waiting = []
    done, at = 0, 0
    started = None
    while True:
        chosen = [requests[(at + i) % len(requests)] for i in range(per_pass)]
        at += per_pass
        waiting.append(path.submit(_batch(chosen), PAGE_SIZE))
        if len(waiting) < DEPTH:
            continue
        waiting.pop(0)()
        now = time.perf_counter()
        if started is None:
            started = now  # the first pass fills the pipeline
            continue
        done += per_pass
        if now - started > SECONDS and done >= 4 * per_pass:
            break
    for wait in waiting:
        wait()
    return done / (now - started)


def _profile(path: FastPath, to: Path, pass_tokens: int) -> None:
    """Time by kernel over one saturated pass of the first shape and one of the longest prefix."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("w") as file:
        for shape in (SATURATION[0], SATURATION[1]):
            per_pass = max(1, pass_tokens // (shape[0] + shape[1] * shape[2]))
            batch = _batch([request(shape, seed) for seed in range(per_pass)])
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
