"""A device that needs no model: a label's logit is a sum over what its item may see, and nothing else."""

import asyncio

import numpy as np

from attention.plans import Strategy
from batching.batcher import Batcher, BatcherLimits
from batching.page_pool import PagePool
from batching.select import Threshold
from batching.types import Item, PackedBatch, Reads, TokenizedRequest


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


class FakeDevice:
    """Computes with kept pages as a model would: a cached prefix is found by its pages, or the scores are wrong."""

    def __init__(self):
        self.batches: list[PackedBatch] = []
        self.kept: dict[tuple, list[int]] = {}
        self.failures: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, batch):
        self.batches.append(batch)
        await self.gate.wait()
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        layout, tokens = batch.layout, {}
        for segment in range(layout.segments):
            first, last = layout.row_start[segment], layout.row_start[segment + 1]
            pages = batch.pages[segment]
            old = self.kept[tuple(pages)][: layout.cached[segment]] if layout.cached[segment] else []
            tokens[segment] = [*old, *batch.input_ids[first:last]]
            if pages is not None:
                self.kept[tuple(pages)] = tokens[segment]
        logits = []
        for row, first, last in zip(batch.read_rows, batch.read_indptr, batch.read_indptr[1:], strict=False):
            leaf = int(np.searchsorted(layout.row_start, row, side="right") - 1)
            seen = [token for segment in layout.path(leaf) for token in tokens[segment]]
            total = float(np.dot(seen, np.arange(1, len(seen) + 1)))
            logits += [total + label for label in batch.read_ids[first:last]]
        return Reads(np.array(logits, np.float32), np.zeros(len(batch.read_rows), np.float32), 0.001, 0.01)


def batcher(device, pass_tokens=64, queue_tokens=10_000, pages=16, threshold=8, window=None, **kwargs):
    return Batcher(
        device,
        BatcherLimits(pass_tokens, 2048, queue_tokens, page_size=4),
        Threshold(threshold, window),
        PagePool(pages),
        **kwargs,
    )


def assert_right(asked, answer, strategies=tuple(Strategy)):
    for i, scored in enumerate(answer.scored):
        assert scored.logits[0].tolist() == expected(asked, i)
        assert scored.strategy in strategies
