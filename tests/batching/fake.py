"""A device that needs no model: a label's logit is a sum over what its item may see, and nothing else."""

import asyncio
from collections import Counter

import numpy as np

from attention.plans import Strategy
from batching.batcher import Batcher, BatcherLimits, Scheduling
from batching.items import Item
from batching.page_pool import PagePool
from batching.prefix_cache import PrefixCache
from batching.select import Threshold
from batching.types import PackedBatch, Reads, TokenizedRequest


def ids(*values):
    return np.array(values, np.int32)


def item(*tokens, labels=(1, 2)):
    return Item(ids(*tokens), ids(len(tokens) - 1), np.array([labels], np.int32))


def request(prefix, *items, **kwargs):
    return TokenizedRequest(ids(*prefix), tuple(item(*tokens) for tokens in items), **kwargs)


def expected(asked, i):
    """The logits that FakeDevice gives to item i of a request."""
    visible = [*asked.prefix, *asked.items[i].ids]
    return [float(np.dot(visible, np.arange(1, len(visible) + 1))) + label for label in asked.items[i].read_ids[0]]


PAGE = 4


def runs_of(cache):
    """All that is indexed."""
    return list(cache._runs.values())


def evicted(cache, pages, now=0.0):
    """Makes room; of how many blocks."""
    before = cache.counts.evicted_blocks
    cache._evict(pages, now)
    return cache.counts.evicted_blocks - before


def blocks_in_use(cache):
    """How many indexed blocks some lease holds."""
    return sum(len(run.pages) for run in runs_of(cache) if run.users)


class FakeDevice:
    """Computes with kept pages as a model would: a cached token is found in its page, or the scores are wrong."""

    def __init__(self):
        self.batches: list[PackedBatch] = []
        self.slots: dict[int, int] = {}
        self.failures: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, batch):
        self.batches.append(batch)
        await self.gate.wait()
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        return self.compute(batch)

    def compute(self, batch):
        layout, tokens = batch.layout, {}
        for segment in range(layout.segments):
            first, last = layout.row_start[segment], layout.row_start[segment + 1]
            new = batch.input_ids[first:last].tolist()
            tokens[segment] = [*self._kept(batch, segment, new)] if batch.pages[segment] is not None else new
        logits = []
        for row, first, last in zip(batch.read_rows, batch.read_indptr, batch.read_indptr[1:], strict=False):
            leaf = int(np.searchsorted(layout.row_start, row, side="right") - 1)
            seen = [token for segment in layout.path(leaf) for token in tokens[segment]]
            total = float(np.dot(seen, np.arange(1, len(seen) + 1)))
            logits += [total + label for label in batch.read_ids[first:last]]
        return Reads(np.array(logits, np.float32), np.zeros(len(batch.read_rows), np.float32), 0.001, 0.01)

    def _kept(self, batch, segment, new):
        layout, pages = batch.layout, batch.pages[segment]
        start, length, cached = (int(x[segment]) for x in (layout.start, layout.length, layout.cached))
        slots = [pages[p // PAGE - start // PAGE] * PAGE + p % PAGE for p in range(start, start + length)]
        assert len(pages) == -(-(start + length) // PAGE) - start // PAGE, "as many pages as the segment touches"
        self.slots.update(zip(slots[cached:], new, strict=True))
        return [self.slots[slot] for slot in slots]


class TimedDevice(FakeDevice):
    """Takes so long for each pass, by the loop's clock."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    async def __call__(self, batch):
        self.batches.append(batch)
        await asyncio.sleep(self.seconds)
        return self.compute(batch)


class Counting:
    """An observer that remembers what it was told."""

    def __init__(self):
        self.counts = Counter()
        self.fills = []

    def refused(self, reason):
        self.counts[reason] += 1

    def missed(self):
        self.counts["missed"] += 1

    def cancelled(self):
        self.counts["cancelled"] += 1

    def ran(self, tokens, fill, requests):
        self.fills.append((tokens, fill, requests))


def batcher(device, pass_tokens=64, queue_tokens=10_000, pages=16, threshold=8, window=None, **kwargs):
    return Batcher(
        device,
        BatcherLimits(pass_tokens, 2048, queue_tokens),
        Threshold(threshold, window),
        PrefixCache(PagePool(pages), PAGE),
        **kwargs,
    )


def assert_right(asked, answer, strategies=tuple(Strategy)):
    for i, scored in enumerate(answer.scored):
        assert scored.logits[0].tolist() == expected(asked, i)
        assert scored.strategy in strategies


class PerToken:
    """A millisecond a token is predicted."""

    margin, known = 1.0, True

    def __init__(self):
        self.learned = []

    def share(self, work, pass_tokens):
        return work.tokens / 1000

    def learn(self, work, seconds):
        self.learned.append((work.tokens, seconds))


def timed(seconds, device=None, scheduling=None, **kwargs):
    """A batcher by the loop's clock, over a device that takes so long for a pass."""
    made = batcher(
        device or TimedDevice(seconds),
        scheduling=scheduling or Scheduling(pass_time=PerToken()),
        clock=asyncio.get_running_loop().time,
        **kwargs,
    )
    made.observer = Counting()
    return made


def submitted(made, asked, deadline=None):
    return asyncio.create_task(made.submit(asked, deadline))
