"""The one device thread: PackedBatch in, Reads out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from attention.layout import Layout
from attention.planner import plan
from attention.plans import Pages, Plan, Strategy
from attention.strategy import Attention, MaskKey
from batching.types import PackedBatch, Reads
from scorer.model import ScoringModel

Planner = Callable[[Layout, Sequence[Strategy], Pages, int | None, float], Plan]


class Engine:
    """Owns the model and its attention; whatever touches them runs on its thread, one call after the other."""

    def __init__(
        self, model: ScoringModel, attention: Attention, page_size: int, kept_pages: int, planner: Planner = plan
    ) -> None:
        """kept_pages: page ids below it outlive a pass. planner: how a layout becomes a plan."""
        self.model = model
        self.attention = attention
        self._page_size = page_size
        self._kept_pages = kept_pages
        self._planner = planner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    async def execute(self, batch: PackedBatch) -> Reads:
        """One forward pass on the device thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.run, batch)

    def run(self, batch: PackedBatch) -> Reads:
        """One forward pass on the calling thread."""
        started = time.perf_counter()
        pages = Pages(self._page_size, self._kept_pages, batch.pages)
        plans = {key: self._plan(batch, pages, key) for key in self.model.mask_keys}
        attend = self.attention.begin(batch.layout, pages, plans)
        planned = time.perf_counter()
        hidden = self.model.forward(batch.input_ids, batch.position_ids, batch.read_rows, attend)
        logits = self.model.logits(hidden, batch.read_indptr, batch.read_ids)
        lse = self.model.log_sum_exp(hidden, batch.normalize)
        return Reads(logits, lse, planned - started, time.perf_counter() - planned)

    def _plan(self, batch: PackedBatch, pages: Pages, key: MaskKey) -> Plan:
        return self._planner(batch.layout, batch.leaf_strategies, pages, key.window, key.soft_cap)

    def close(self) -> None:
        """Waits for the pass that runs, then ends the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
