"""One of two ranks on a CPU: the hand-fused layers of every checkpoint in a directory, over gloo.

Run: python -m tests.scorer.two_ranks RANK RENDEZVOUS DIRECTORY. Rank 0 leaves what it found in results.npz there.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from attention.kv_pages import KvPages
from attention.layout import Layout, Segment
from attention.planner import plan
from attention.plans import MaskKey, Pages, Strategy
from attention.torch_backend import TorchAttention
from batching.items import Item
from batching.packing import Group as Packed
from batching.packing import pack
from batching.types import Reads, TokenizedRequest
from scorer.engine import Engine
from scorer.follower import obey
from scorer.fused_model import FusedModel
from scorer.loading import load_model
from scorer.parallel import Group
from scorer.place import Place

PLAIN = MaskKey(None, 0.0)
LAYOUT = Layout.of([Segment(-1, 23), *[Segment(0, n, reads=(n - 1,)) for n in (5, 9, 1, 17)]])
IDS = np.random.default_rng(0).integers(0, 500, LAYOUT.rows).astype(np.int32)
FIRST = 28  # tokens of the prefix and its first document
PAGE_SIZE, PAGES = 16, 64
POISON = 3  # a token whose embedding is NaN in the engine's passes


def fused_of(model, **kwargs):
    return FusedModel(model, positions=256, **kwargs)


def hidden_states(model, fused, reads=True):
    """[reads, hidden] by the hand-fused layers over torch's attention."""
    pages = Pages.scratch(LAYOUT, PAGE_SIZE)
    planned = plan(LAYOUT, [Strategy.FUSED] * 4, pages)
    attend = TorchAttention(KvPages(PAGES, PAGE_SIZE)).begin(LAYOUT, pages, {PLAIN: planned})
    rows = torch.from_numpy(LAYOUT.read_rows).long()
    found = fused.forward(
        torch.from_numpy(IDS),
        torch.from_numpy(LAYOUT.position_ids),
        rows if reads else None,
        lambda layer, q, k, v: attend(layer, q, k, v, fused.scale, PLAIN),
    )
    return (found if reads else found[rows]).numpy()


class LayersOnCpu:
    """What FastPath is on a GPU, without graphs. NaN in one item of a pass reaches all of them."""

    def __init__(self, model, fused, kept_pages):
        self._model, self._fused, self._kept_pages = model, fused, kept_pages
        self._attention = TorchAttention(KvPages(PAGES, PAGE_SIZE))
        self.scrubbed = self.submitted = 0

    def takes(self, batch):
        return all(strategy is Strategy.FUSED for strategy in batch.leaf_strategies)

    def scrub(self):
        self.scrubbed += 1

    def close(self):
        self._fused = None

    def submit(self, batch, page_size):
        self.submitted += 1
        pages = Pages(page_size, self._kept_pages, batch.pages)
        planned = plan(batch.layout, batch.leaf_strategies, pages)
        attend = self._attention.begin(batch.layout, pages, {PLAIN: planned})
        hidden = self._fused.forward(
            torch.from_numpy(batch.input_ids),
            torch.from_numpy(batch.position_ids),
            torch.from_numpy(batch.read_rows).long(),
            lambda layer, q, k, v: attend(layer, q, k, v, self._fused.scale, PLAIN),
        )
        logits = self._model.logits(hidden, batch.read_indptr, batch.read_ids)
        spoiled = np.float32("nan" if np.isnan(logits).any() else 0)
        lse = np.full(len(batch.read_rows), np.nan, np.float32)
        return lambda: Reads(logits + spoiled, lse, 0.0, 0.0)


def batches():
    """A pass of good documents, and one in which the last document is not."""
    rng = np.random.default_rng(1)
    labels = np.array([[7, 11]], np.int32)

    def item(length):
        return Item(rng.integers(10, 500, length).astype(np.int32), np.array([length - 1]), labels)

    good = TokenizedRequest(rng.integers(10, 500, 20).astype(np.int32), tuple(map(item, (5, 17, 9))))
    bad = replace(good, items=(*good.items, Item(np.array([30, POISON, 40], np.int32), np.array([2]), labels)))
    return [pack([Packed(r, tuple(range(len(r.items))), (Strategy.FUSED,) * len(r.items))]) for r in (good, bad)]


def passes(group, model, fused):
    """Rank 0 runs the passes, good, bad and good again, as the other one follows: logits of each, and counts."""
    model.hf.get_input_embeddings().weight.data[POISON] = float("nan")
    fast = LayersOnCpu(model, fused, PAGES)
    peers = group if group is not None and not group.rank else None
    engine = Engine(model, TorchAttention(KvPages(PAGES, PAGE_SIZE)), PAGE_SIZE, PAGES, fast=fast, peers=peers)
    if group is not None and group.rank:
        obey(engine, group)
        group.leave()
        assert (fast.submitted, fast.scrubbed > 0) == (3, True), "it took the fast passes and cleaned up"
        return {}
    good, bad = batches()
    found = [engine.run(batch).logits for batch in (good, bad, good)]
    engine.close()
    return dict(zip(("good", "bad", "again"), found, strict=True))


def results(directory, group):
    found = {}
    ranks = 1 if group is None else group.count
    summed = None if group is None else group.sum
    for checkpoint in sorted(path for path in directory.iterdir() if path.is_dir()):
        model = load_model(str(checkpoint), "float32", "cpu", False, ranks)
        assert not any(isinstance(parameter, DTensor) for parameter in model.hf.parameters())
        fused = fused_of(model, summed=summed)
        found[checkpoint.name] = hidden_states(model, fused)
        fused.chunk_rows = 9
        found[f"{checkpoint.name} in chunks"] = hidden_states(model, fused, reads=False)
        if checkpoint.name == "qwen3":
            quantized = fused_of(model, fp8=lambda layer, name: layer > 0, summed=summed)
            found["fp8"] = hidden_states(model, quantized)
        hidden = torch.from_numpy(found[checkpoint.name][:1])
        found[f"{checkpoint.name} logits"] = model.head(hidden, slice(None)).numpy()
        found[f"{checkpoint.name} by transformers"] = model.alone(IDS[:FIRST], 1).numpy()
    return found | passes(group, model, fused)


def main():
    rank, rendezvous, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    found = results(directory, Group(Place(rank, 2, rank, rendezvous), cuda=False))
    if not rank:
        np.savez(directory / "results.npz", **found)


if __name__ == "__main__":
    main()
