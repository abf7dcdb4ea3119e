"""The model and who may touch it: PackedBatch in, Reads out.

A pass that runs operator by operator has the device thread to itself. A fast pass is only enqueued, by the caller: all
of it is Python and launches that do not wait, and two threads that want the interpreter at once take turns of half a
millisecond. Both enqueue on one stream, so whatever is enqueued later runs later. Where other ranks run the same
passes, all are told and enqueued on the device thread: they run in the order in which they are told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from attention.layout import Layout
from attention.planner import plan
from attention.plans import MaskKey, Pages, Plan, Strategy
from attention.strategy import Attend, Attention
from batching.errors import DeviceGone
from batching.packing import alone
from batching.types import PackedBatch, Reads
from scorer.model import ScoringModel
from scorer.threads import guarded, on_thread

T = TypeVar("T")
HOPELESS = 4  # items run alone without one finite score after which no more are tried

Planner = Callable[[Layout, Sequence[Strategy], Pages, int | None, float, int], Plan]


class Fast(Protocol):
    """A faster way to compute some passes. NaN in one item may reach others that share its pass."""

    def takes(self, batch: PackedBatch) -> bool:
        """Whether it can compute this pass."""

    def submit(self, batch: PackedBatch, page_size: int) -> Callable[[], Reads]:
        """Enqueues a pass and does not wait for the device; the answer waits for its reads, on any thread."""

    def scrub(self) -> None:
        """Removes what a pass may have left for later ones, after it met NaN."""

    def close(self) -> None:
        """Lets go of what it shares with other ranks. Nothing is submitted afterwards."""


class Peers(Protocol):
    """Other ranks, each with a shard of the model. What changes their tensors is told before it is done here."""

    def forward(self, batch: PackedBatch, fast: bool) -> None: ...

    def scrub(self, first_page: int) -> None: ...

    def stop(self) -> None: ...


class Engine:
    """Owns the model and its attention; whatever waits for the device runs on its thread, one call after the other."""

    def __init__(
        self,
        model: ScoringModel,
        attention: Attention,
        page_size: int,
        kept_pages: int,
        planner: Planner = plan,
        fast: Fast | None = None,
        max_pass_seconds: float = 0.0,
        peers: Peers | None = None,
    ) -> None:
        """kept_pages: page ids below it outlive a pass. planner: how a layout becomes a plan. fast: takes what it
        can, the model's own modules the rest. max_pass_seconds: longer ones are taken for hung; 0: none is. peers:
        run the same passes on their shards."""
        self.model = model
        self.attention = attention
        self._page_size = page_size
        self._kept_pages = kept_pages
        self._planner = planner
        self._fast = fast
        self._peers = peers
        self._max_pass_seconds = max_pass_seconds or None
        self._waiting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reads")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    async def execute(self, batch: PackedBatch) -> Reads:
        """One forward pass; the caller's thread, or the device's, is free for the next one while a fast pass runs.

        Raises DeviceGone where the pass hangs: its thread cannot be stopped, and nothing runs behind it.
        """
        return await self._in_time(self._execute(batch))

    async def between(self, work: Callable[[], T]) -> T:
        """Calls `work` on the device thread, between passes. Raises DeviceGone as `execute` does."""
        return await self._in_time(on_thread(self._thread, work))

    async def _in_time(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._max_pass_seconds) as patience:
                return await work
        except TimeoutError:
            if not patience.expired():  # what the pass itself raised
                raise
            raise DeviceGone(f"a pass did not end within {self._max_pass_seconds:g} seconds") from None

    async def _execute(self, batch: PackedBatch) -> Reads:
        try:
            return await self._computed(batch)
        except DeviceGone:  # nothing runs behind it
            raise
        except Exception:
            with suppress(Exception):  # the pass's own failure is what counts
                await on_thread(self._thread, self._finish)
            raise

    def _finish(self) -> None:
        """Whatever a failed pass began has ended: its pages may be given to others, and filled beside the passes."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    async def _computed(self, batch: PackedBatch) -> Reads:
        if self._fast is None or not self._fast.takes(batch):
            return await on_thread(self._thread, self.run, batch)
        if self._peers is None:
            wait = guarded(self._fast.submit, batch, self._page_size)
        else:
            wait = await on_thread(self._thread, self._submit, batch)
        reads = await on_thread(self._waiting, wait)
        return await on_thread(self._thread, self._healed, batch, reads) if self._bad(batch, reads) else reads

    def run(self, batch: PackedBatch) -> Reads:
        """One forward pass on the calling thread; where NaN may have spread, its items once more, each alone."""
        reads = self._submit(batch)() if self._takes(batch) else self._forward(batch)
        return self._healed(batch, reads)

    def _takes(self, batch: PackedBatch) -> bool:
        return self._fast is not None and self._fast.takes(batch)

    def _submit(self, batch: PackedBatch) -> Callable[[], Reads]:
        """Enqueues a fast pass, here and on the other ranks; the answer waits for its reads."""
        assert self._fast is not None, "it takes this pass"
        if self._peers is None:
            return self._fast.submit(batch, self._page_size)
        with _in_step():
            self._peers.forward(batch, fast=True)
            wait = self._fast.submit(batch, self._page_size)

        def waited() -> Reads:
            with _in_step():
                return wait()

        return waited

    def _bad(self, batch: PackedBatch, reads: Reads) -> list[int]:
        """The items that NaN may have reached from others."""
        if (self.attention.isolates_nan and not self._takes(batch)) or len(batch.shares) == 1:
            return []
        if np.isfinite(reads.logits).all() and np.isfinite(reads.lse[batch.normalize]).all():
            return []
        return [number for number in range(len(batch.shares)) if not _finite(batch, reads, number)]

    def _healed(self, batch: PackedBatch, reads: Reads) -> Reads:
        if bad := self._bad(batch, reads):
            self._again(batch, reads, bad)
        return reads

    def _again(self, batch: PackedBatch, reads: Reads, bad: list[int]) -> None:
        """Replaces the reads of these items. An item that is bad by itself stays bad, and spoils no scratch page."""
        healed = 0
        for tried, number in enumerate(bad):
            if tried >= HOPELESS and not healed:
                break  # it is the prefix, or the model
            self._scrub()
            own = self._forward(alone(batch, number))
            share = batch.shares[number]
            reads.logits[batch.read_indptr[share.first] : batch.read_indptr[share.last]] = own.logits
            reads.lse[share.first : share.last] = own.lse
            healed += _finite(batch, reads, number)
        self._scrub()
        if self._fast is not None:
            self._fast.scrub()

    def _scrub(self) -> None:
        if self._peers is not None:
            self._peers.scrub(self._kept_pages)
        self.attention.scrub(self._kept_pages)

    def shard(self, batch: PackedBatch, fast: bool) -> None:
        """The part of a pass that falls to another rank than the first, which says which way it is computed. A fast one
        is only enqueued."""
        if not fast:
            self._hidden(batch, self._begin(batch))
            return
        assert self._fast is not None, "the ranks have a fast path all or none"
        self._fast.submit(batch, self._page_size)

    def scrub(self, first_page: int) -> None:
        """On another rank than the first: removes whatever a pass that met NaN may have left for later ones."""
        self.attention.scrub(first_page)
        if self._fast is not None:
            self._fast.scrub()

    def _begin(self, batch: PackedBatch) -> Attend:
        pages = Pages(self._page_size, self._kept_pages, batch.pages)
        plans = {key: self._plan(batch, pages, key) for key in self.model.mask_keys}
        return self.attention.begin(batch.layout, pages, plans)

    def _hidden(self, batch: PackedBatch, attend: Attend) -> Tensor:
        """Hidden states of the read rows. Raises DeviceGone where a pass fails that other ranks are in."""
        with _in_step() if self._peers is not None else nullcontext():
            if self._peers is not None:
                self._peers.forward(batch, fast=False)
            return self.model.forward(batch.input_ids, batch.position_ids, batch.read_rows, attend)

    def _forward(self, batch: PackedBatch) -> Reads:
        started = time.perf_counter()
        attend = self._begin(batch)
        planned = time.perf_counter()
        hidden = self._hidden(batch, attend)
        logits = self.model.logits(hidden, batch.read_indptr, batch.read_ids)
        lse = self.model.log_sum_exp(hidden, batch.normalize)
        return Reads(logits, lse, planned - started, time.perf_counter() - planned)

    def _plan(self, batch: PackedBatch, pages: Pages, key: MaskKey) -> Plan:
        return self._planner(batch.layout, batch.leaf_strategies, pages, key.window, key.soft_cap, batch.packed_rows)

    def close(self) -> None:
        """Waits for the pass that runs, then ends the thread, and the other ranks."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._waiting.shutdown(wait=True, cancel_futures=True)
        if self._fast is not None:
            self._fast.close()
        if self._peers is not None:
            self._peers.stop()


@contextmanager
def _in_step() -> Iterator[None]:
    """Raises DeviceGone where a pass fails that other ranks are in: they wait for sums that never come, or would take
    those of the next pass for them."""
    try:
        yield
    except Exception as error:
        raise DeviceGone(f"a pass over several ranks failed: {type(error).__name__}: {error}") from error


def _finite(batch: PackedBatch, reads: Reads, number: int) -> bool:
    share = batch.shares[number]
    logits = reads.logits[batch.read_indptr[share.first] : batch.read_indptr[share.last]]
    lse = reads.lse[share.first : share.last][batch.normalize[share.first : share.last]]
    return bool(np.isfinite(logits).all() and np.isfinite(lse).all())
