"""A device that takes the time which the fitted attention model and the dense FLOPs say, and computes nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from attention.timing import TimeModel, built_in
from batching.pass_time import Work
from batching.types import PackedBatch, Reads


@dataclass(frozen=True, slots=True)
class ModelShape:
    """dense_parameters: those that every row is multiplied with."""

    name: str
    layers: int
    dense_parameters: float


QWEN3_06B = ModelShape("Qwen3-0.6B", 28, 0.44e9)
DENSE_FLOPS = 790e12  # an H200's bf16 rate,
DENSE_PART = 0.7  # and the part of it that the layers reach
FIXED_SECONDS = 0.0015  # of a pass: planning, launching, reading back


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """seconds of a pass = fixed + a * tokens + b * pairs."""

    fixed: float
    a: float
    b: float

    def seconds(self, work: Work) -> float:
        return self.fixed + self.a * work.tokens + self.b * work.pairs

    def tokens_per_second(self, work: Work, pass_tokens: int) -> float:
        """Of full passes of this kind of work."""
        full = pass_tokens / work.tokens
        return pass_tokens / self.seconds(Work(pass_tokens, work.pairs * full))


def device_time(shape: ModelShape = QWEN3_06B, model: TimeModel | None = None) -> DeviceTime:
    """Fits tokens and pairs to what the attention model says of a grid of passes, and adds the dense layers."""
    model = model or built_in()
    rows, told = [], []
    for prefix in (64, 512, 2048):
        for length in (16, 64, 180):
            for count in (16, 100, 400):
                work = Work.of(prefix, 0, [length] * count)
                milliseconds = model.ranked(prefix, 0, np.full(count, length, np.int32))[0].milliseconds
                rows.append((work.tokens, work.pairs))
                told.append(milliseconds / 1000 * shape.layers)
    x, y = np.array(rows, np.float64), np.array(told)
    solved = np.linalg.lstsq(x / y[:, None], np.ones(len(y)), rcond=None)[0]
    dense = 2 * shape.dense_parameters / (DENSE_FLOPS * DENSE_PART)
    return DeviceTime(FIXED_SECONDS, dense + max(float(solved[0]), 0.0), max(float(solved[1]), 0.0))


def work_of(batch: PackedBatch) -> Work:
    """What a pass computes, from its layout."""
    layout = batch.layout
    length, cached, start = (x.astype(np.float64) for x in (layout.length, layout.cached, layout.start))
    pairs = (length - cached) * start + (length**2 - cached**2) / 2
    return Work(batch.tokens, float(pairs.sum()))


class SimDevice:
    """Sleeps for as long as each pass takes, give or take `noise`. busy: seconds that it worked."""

    def __init__(self, time: DeviceTime, seed: int = 0, noise: float = 0.05) -> None:
        self._time = time
        self._rng = np.random.default_rng(seed)
        self._noise = noise
        self.busy = 0.0
        self.tokens = 0
        self.passes = 0

    async def __call__(self, batch: PackedBatch) -> Reads:
        seconds = self._time.seconds(work_of(batch)) * float(1 + self._noise * self._rng.uniform(-1, 1))
        self.busy += seconds
        self.tokens += batch.tokens
        self.passes += 1
        await asyncio.sleep(seconds)
        reads = len(batch.read_rows)
        return Reads(np.zeros(len(batch.read_ids), np.float32), np.zeros(reads, np.float32), 0.0, seconds)
