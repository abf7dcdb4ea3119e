"""Measures launches on the GPU at hand and fits their times: `prefixrank calibrate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from attention.copy_rows import copy_rows
from attention.cost import LaunchShape, shape_of
from attention.decode_rig import DecodeRig
from attention.decode_timing import DecodePoint
from attention.flashinfer_backend import Kernel, SingleLaunch, merge_states
from attention.fused_launch import is_fused
from attention.gpu_timing import elapsed, milliseconds
from attention.kv_pages import KvPages
from attention.layout import Layout, Segment
from attention.planner import plan
from attention.plans import HeadShape, Launch, Pages, Plan, RaggedKv, Strategy
from attention.timing import (
    CANDIDATES,
    ENOUGH,
    PACKINGS,
    Fit,
    Machine,
    Reals,
    TimeModel,
    features,
    fits_for,
    kernels_for,
    kind_of,
)

PAGE_SIZE = 16
KEPT_PAGES = 1024
MAX_TOKENS = 65_536
DECODE_POINTS = tuple(
    DecodePoint(prompt, beams, own) for prompt in (128, 512, 2048, 8192) for beams in (8, 64, 512) for own in (4, 64)
)


@dataclass(frozen=True, slots=True)
class Point:
    """One prefix and its items, in tokens."""

    prefix: int
    items: tuple[int, ...]
    cached: bool

    def layout(self) -> tuple[Layout, Pages]:
        """The prefix in scattered kept pages, cached or not."""
        have = self.prefix if self.cached else 0
        layout = Layout.of([Segment(-1, self.prefix, have), *[Segment(0, n) for n in self.items]])
        scattered = np.random.default_rng(0).permutation(KEPT_PAGES).astype(np.int32)
        kept = scattered[: -(-self.prefix // PAGE_SIZE)]
        return layout, Pages(PAGE_SIZE, KEPT_PAGES, (kept, *[None] * len(self.items)))


def typical_points() -> Iterator[Point]:
    """What rankers ask for: round lengths, items of one length, a prefix that nobody has computed yet."""
    for prefix in (512, 2048, 8192):
        for item in (16, 32, 64, 128, 256):
            for items in (8, 32, 128, 256):
                if prefix + item * items <= MAX_TOKENS - 512:
                    yield Point(prefix, (item,) * items, False)


def random_points(seed: int) -> Iterator[Point]:
    """Log-random prefixes of 64-8,192 tokens and 1-512 items of 4-512, of one length or mixed, up to 64k tokens."""
    rng = np.random.default_rng(seed)
    while True:
        prefix = int(np.exp(rng.uniform(np.log(64), np.log(8192))))
        length = int(np.exp(rng.uniform(np.log(4), np.log(512))))
        count = max(1, int(np.exp(rng.uniform(0, np.log(512)))))
        mixed = rng.random() < 2 / 3
        spread = np.exp(rng.normal(0.0, 0.5, count)) if mixed else np.ones(count)
        items = np.clip(length * spread, 1, 2048).astype(int)
        cached = bool(rng.integers(2))
        if prefix + int(items.sum()) <= MAX_TOKENS - 512:
            yield Point(prefix, tuple(items.tolist()), cached)


class Bench:
    """Random tensors and pages on the GPU, and GPU-only times of what runs on them."""

    def __init__(self, heads: HeadShape) -> None:
        self.heads = heads
        self.kv_pages = KvPages(KEPT_PAGES + MAX_TOKENS // PAGE_SIZE * 4, PAGE_SIZE)
        make = {"device": "cuda", "dtype": heads.dtype}
        self.q = torch.randn(MAX_TOKENS, heads.heads, heads.head_dim, **make)
        self.k, self.v = (torch.randn(MAX_TOKENS, heads.kv_heads, heads.head_dim, **make) for _ in range(2))
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(MAX_TOKENS, heads.heads, device="cuda")
        self._single = SingleLaunch(heads)
        self.held = self.kv_pages.layer(0, self.k[:1], self.v[:1])
        for held in self.held:
            held.normal_()

    def milliseconds(self, call: Callable[[], object], replays: int = 5) -> float:
        """See `gpu_timing.milliseconds`."""
        return milliseconds(call, replays)

    def events(self, call: Callable[[], object], warm_ups: int, iterations: int) -> list[float]:
        """Milliseconds between CUDA events around single calls: with the host's launch time."""
        for _ in range(warm_ups):
            call()
        torch.cuda.synchronize()
        return [elapsed(call) for _ in range(iterations)]

    @staticmethod
    def rows(tensor: Tensor, count: int) -> Tensor:
        """That many rows, repeated if there are not so many."""
        return tensor[:count] if count <= len(tensor) else tensor.repeat(-(-count // len(tensor)), 1, 1)[:count]

    def rates(self) -> dict[str, float | str]:
        """What this GPU reaches: dense bf16 products, causal attention over 8,192 tokens, copying memory."""
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        gemm = 2 * 8192.0**3 / (self.milliseconds(lambda: a @ b) * 1e9)
        layout = Layout.of([Segment(-1, 8192)])
        planned = plan(layout, [Strategy.CASCADE_CONTIGUOUS], Pages.scratch(layout, PAGE_SIZE))
        heads = self.heads
        pairs = 4.0 * heads.heads * heads.head_dim * 8192 * 8193 / 2
        attention = pairs / (self.launch(planned.launches[-1], planned, Kernel.FA3) * 1e9)
        big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        other = torch.empty_like(big)
        memory = 2 * big.numel() / (self.milliseconds(lambda: other.copy_(big)) * 1e9)
        return {
            "gpu": torch.cuda.get_device_name(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "torch": torch.__version__,
            "flashinfer": version("flashinfer-python"),
            "gemm_tflops": gemm,
            "attention_tflops": attention,
            "memory_tb_s": memory,
        }

    def launch(self, launch: Launch, planned: Plan, kernel: str) -> float:
        """Milliseconds of one launch with one kernel."""
        run = self._single.prepare(launch, planned, kernel)
        rows = int(launch.qo_indptr[-1])
        k, v = self.held
        if isinstance(launch.kv, RaggedKv):
            keys = int(launch.kv.kv_indptr[-1])
            k, v = (self.k, self.v) if is_fused(launch) else (self.k[:keys], self.v[:keys])
        q, out, lse = self.q[:rows], self.out[:rows], self.lse[:rows]
        return self.milliseconds(lambda: run(q, k, v, out, lse))


def calibrate(
    heads: HeadShape, seconds: float = 50.0, seed: int = 1, tell: Callable[[float], None] | None = None
) -> TimeModel:
    """Measures for so many seconds and fits. tell: called with the share done. heads: the model's, on this GPU.

    Typical points come first, a third of the time: round lengths are where kernels' tiles just fit or just do not, and
    among random ones there is hardly one.
    """
    bench = Bench(heads)
    machine = _machine()
    samples: dict[str, list[tuple[Reals, float]]] = {}
    started = time.monotonic()
    for point in chain(typical_points(), random_points(seed)):
        share = (time.monotonic() - started) / seconds
        if tell is not None:
            tell(min(share, 1.0))
        if share >= 1.0:
            break
        for shape, launch, planned in distinct_launches(point):
            for kernel in kernels_for(shape):
                measured = features(shape, kernel, heads, machine.processors), bench.launch(launch, planned, kernel)
                for name in fits_for(shape, kernel, heads):
                    samples.setdefault(name, []).append(measured)
    fits = {name: _fit(rows) for name, rows in samples.items() if name.count("/") == 2 or len(rows) >= ENOUGH}
    decode = DecodeRig(heads, most_prompt=8192, most_own=512 * 64).law(DECODE_POINTS)
    return TimeModel(machine, heads, fits, _copy_law(bench), _merge_law(bench), decode)


def _fit(rows: list[tuple[Reals, float]]) -> Fit:
    return Fit.of(np.stack([x for x, _ in rows]), np.array([ms for _, ms in rows]))


def distinct_launches(point: Point) -> Iterator[tuple[LaunchShape, Launch, Plan]]:
    """Every launch that some strategy makes of a point, each once."""
    layout, pages = point.layout()
    seen: set[tuple[str, bytes, bytes]] = set()
    for strategy in CANDIDATES:
        for rows in PACKINGS if strategy is Strategy.PACKED_MULTI_ITEM else PACKINGS[-1:]:
            planned = plan(layout, [strategy] * len(layout.leaves), pages, packed_rows=rows)
            for launch in planned.launches:
                shape = shape_of(launch, PAGE_SIZE)
                key = (kind_of(shape), shape.q_lens.tobytes(), shape.kv_lens.tobytes())
                if key not in seen:
                    seen.add(key)
                    yield shape, launch, planned


def _machine() -> Machine:
    properties = torch.cuda.get_device_properties(0)
    return Machine(properties.name, properties.multi_processor_count)


def _copy_law(bench: Bench) -> tuple[float, float]:
    """Fixed and per-row milliseconds of writing K/V rows to pages."""

    def copy(rows: int) -> float:
        index = torch.arange(rows, dtype=torch.int32, device="cuda")
        return bench.milliseconds(lambda: copy_rows(bench.k, bench.v, *bench.held, index, index))

    return _line(copy, (256, 2048, 16_384, 61_440))


def _merge_law(bench: Bench) -> tuple[float, float]:
    """Fixed and per-row milliseconds of merging two partial results."""
    other = torch.randn_like(bench.q)
    lse = torch.randn_like(bench.lse)

    def merge(rows: int) -> float:
        return bench.milliseconds(lambda: merge_states(bench.out[:rows], bench.lse[:rows], other[:rows], lse[:rows]))

    return _line(merge, (256, 2048, 16_384, 61_440))


def _line(measure: Callable[[int], float], sizes: tuple[int, ...]) -> tuple[float, float]:
    """Fixed and per-unit part, relative errors weighing alike."""
    times = np.array([measure(size) for size in sizes])
    terms = np.stack([np.ones(len(sizes)), np.array(sizes, float)], axis=1) / times[:, None]
    fixed, each = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)[0]
    return max(0.0, float(fixed)), max(0.0, float(each))
