"""`prefixrank bench decode`: a decode step's attention by every way, and whole beam searches, on this machine's GPU.

Each row is written as it is measured (JSON lines), so a run that was interrupted goes on where it stopped; what a
machine cannot run is a row without a time, and says why.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.progress import track

from attention.decode_timing import DecodePoint
from loadtest.attention_rows import HEAD_DIM, HEADS, KV_HEADS
from loadtest.decode_report import report
from loadtest.decode_rows import KINDS, OUR_CASCADE, VARIANTS, AttentionRow, SearchRow, StepRow, read_rows
from scorer.console import plain_console
from scorer.errors import ConfigError

if TYPE_CHECKING:
    from batching.batcher import Batcher
    from scorer.beam import BeamSearcher
    from scorer.fast_beams import FastBeams

PROMPTS = tuple(256 << i for i in range(8))
BEAMS = (8, 32, 128, 256, 512)
OWN = (4, 16, 64, 256)
STEP_PROMPTS = (1024, 2048, 4096, 8192, 16_384)
STEP_BEAMS = (32, 128, 256, 512)
STEP_OWN = 8
# (prompt tokens, beams, new tokens)
SEARCHES = ((1024, 128, 16), (1024, 512, 3), (1024, 512, 16), (1024, 32, 16), (4096, 128, 16), (256, 128, 16))
REPEATS = 7
PAGE = 16
PASS_TOKENS = 4096
BEAM_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Rows:
    """The file of what was measured so far."""

    path: Path

    def missing(self, wanted: Sequence[tuple[Any, ...]], kind: str) -> list[tuple[Any, ...]]:
        have = {row.key for row in read_rows(self.path) if row.kind == kind}
        return [key for key in wanted if key not in have]

    def add(self, row: AttentionRow | StepRow | SearchRow) -> None:
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(row)) + "\n")


def run(args: argparse.Namespace) -> int:
    """Measures what is missing and reports."""
    args.output.mkdir(parents=True, exist_ok=True)
    rows = Rows(args.output / "decode.jsonl")
    if not args.report:
        _need_gpu()
        only = set(args.only or KINDS)
        if "attention" in only:
            measure_attention(rows, args.quick)
        for size in args.size or ["0.6B"]:
            measure_model(rows, size, only)
    report(read_rows(rows.path), args.output)
    print(f"wrote {args.output / 'decode.md'}")
    return 0


def points(quick: bool) -> Iterator[DecodePoint]:
    """quick: a third of the grid, with the points that bars are about."""
    own = (16, 64) if quick else OWN
    yield from (DecodePoint(p, n, s) for p in (PROMPTS[::2] if quick else PROMPTS) for n in BEAMS for s in own)
    if quick:
        yield DecodePoint(32_768, 256, 64)


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("bench decode needs an NVIDIA GPU; --report writes the report of rows measured elsewhere")


def measure_attention(rows: Rows, quick: bool) -> None:
    """One layer's attention at every point by every variant."""
    import torch

    from attention.decode_rig import DecodeRig
    from attention.plans import HeadShape

    todo = rows.missing([(*point, variant) for point in points(quick) for variant in VARIANTS], "attention")
    if not todo:
        return
    heads = HeadShape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, torch.bfloat16)
    rig = DecodeRig(heads, max(PROMPTS), max(BEAMS) * max(OWN))
    rig.time(OUR_CASCADE, DecodePoint(1024, 128, 16))  # what is measured first would meet a GPU that idled
    broken: dict[str, str] = {}
    for *lengths, variant in track(todo, "attention", console=plain_console(stderr=True)):
        point = DecodePoint(*lengths)
        milliseconds, told = None, broken.get(variant, "")
        if not told:
            try:
                milliseconds = rig.time(variant, point)
            except Exception as error:  # noqa: BLE001  a compiler that is missing, a module that is not built
                told = broken[variant] = f"{type(error).__name__}: {error}"[:300]
        rows.add(AttentionRow(*point, variant, milliseconds, told))


class Rig:
    """A model of true shape with random weights, and all that a search needs of the service."""

    def __init__(self, size: str) -> None:
        from attention.factory import make
        from attention.kv_pages import KvPages
        from loadtest.shapes import SIZES, random_model
        from scorer.beam import MAX_BEAMS
        from scorer.engine import Engine
        from scorer.fast_beams import FastBeams
        from scorer.fast_path import FastPath

        self.kept, self.beam_pages = max(STEP_PROMPTS) * 4 // PAGE, -(-BEAM_TOKENS // PAGE)
        lasting = self.kept + self.beam_pages
        model = random_model(SIZES[size])
        kv_pages = KvPages(lasting, PAGE)
        fast = FastPath(model, kv_pages, lasting, max(STEP_PROMPTS) + 64, PASS_TOKENS)
        fast.capture(paged=True)
        self.steps = FastBeams(model, fast.fused, kv_pages, max(STEP_PROMPTS), BEAM_TOKENS + 2 * MAX_BEAMS)
        self.steps.capture()
        self.vocabulary = model.vocabulary
        self.engine = Engine(model, make("torch", kv_pages), PAGE, lasting, fast=fast)

    def searcher(self) -> tuple[Batcher, BeamSearcher]:
        """A batcher with an empty cache, and a searcher over it, for one event loop."""
        from batching.batcher import Batcher, BatcherLimits, Scheduling
        from batching.page_pool import PagePool
        from batching.prefix_cache import PrefixCache
        from batching.select import Replayed
        from scorer.beam import BeamSearcher
        from scorer.beam_pages import BeamPages

        limits, cache = BatcherLimits(PASS_TOKENS, 1024, 1 << 30), PrefixCache(PagePool(self.kept), PAGE)
        batcher = Batcher(self.engine.execute, limits, Replayed(), cache, scheduling=Scheduling(passes_in_flight=2))
        return batcher, BeamSearcher(batcher, self.engine, self.steps, BeamPages(self.kept, self.beam_pages, PAGE))

    def close(self) -> None:
        self.engine.close()


def measure_model(rows: Rows, size: str, only: set[str]) -> None:
    """Steps and whole searches of one model shape."""
    points = [(size, p, n, STEP_OWN) for p in STEP_PROMPTS for n in STEP_BEAMS if "step" in only]
    steps = rows.missing(points, "step")
    cases = [(size, *shape, cached) for shape in SEARCHES for cached in (False, True) if "search" in only]
    searches = rows.missing(cases, "search")
    if not steps and not searches:
        return
    rig = Rig(size)
    for _, prompt, beams, own in steps:
        taken = time_step(rig.steps, rig.kept, DecodePoint(prompt, beams, own))
        _told(rows, StepRow(size, prompt, beams, own, 1e3 * taken))
    for _, prompt, beams, new, cached in searches:
        found = asyncio.run(time_searches(rig, (prompt, beams, new), cached))
        median, fastest = 1e3 * float(np.median(found)), 1e3 * float(np.min(found))
        _told(rows, SearchRow(size, prompt, beams, new, cached, median, fastest))
    rig.close()


def _told(rows: Rows, row: StepRow | SearchRow) -> None:
    print(row, file=sys.stderr)
    rows.add(row)


def time_step(steps: FastBeams, pages: int, point: DecodePoint) -> float:
    """Median seconds of one step, its candidates on the host: what the beams hold does not change the time."""
    from attention.decode import Decode
    from scorer.beam_steps import BeamStep

    prompt_pages = np.arange(-(-point.prompt // PAGE), dtype=np.int32)
    history = pages * PAGE + np.arange(point.beams * point.own, dtype=np.int32).reshape(point.beams, -1)
    decode = Decode(PAGE, prompt_pages, point.prompt, history)
    tokens = np.random.default_rng(0).integers(0, 1000, point.beams).astype(np.int32)
    step = BeamStep(tokens, np.zeros(point.beams, np.float32), decode, 2 * point.beams)
    taken = []
    for _ in range(REPEATS + 3):
        started = time.perf_counter()
        steps.submit(step)()
        taken.append(time.perf_counter() - started)
    return float(np.median(taken[3:]))


async def time_searches(rig: Rig, shape: tuple[int, int, int], cached: bool) -> list[float]:
    """Seconds of whole searches, each over a prompt of its own, which may be in the cache already."""
    from batching.beams import BeamOptions
    from scorer.beam_run import BeamRequest

    prompt, beams, new = shape
    batcher, searcher = rig.searcher()
    rng, taken = np.random.default_rng(0), []
    for number in range(REPEATS + 2):
        ids = rng.integers(0, rig.vocabulary - 1000, prompt).astype(np.int32)
        request = BeamRequest(ids, BeamOptions(beams, new, eos_ids=(rig.vocabulary - 1,)))
        if cached:
            await searcher.search(request)
        started = time.perf_counter()
        found = await searcher.search(request)
        if number >= 2:
            taken.append(time.perf_counter() - started)
        assert len(found.hypotheses) == beams, "every beam ends somewhere"
    await batcher.drain()
    return taken
