"""The hand-fused path on a GPU: passes of the `fused` strategy, replayed from CUDA graphs.

A pass is planned and padded on the host, travels in one upload, and is one graph launch; whoever submits it does not
wait for it, so that the next one is prepared meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention.fused_kernel import Blocks, DeviceTiles, Parts, fused, gather_rows, keep_rows
from attention.fused_pass import FusedPass
from attention.kv_pages import KvPages
from attention.layout import Ints
from attention.plans import Pages, Strategy
from attention.tiles import COLUMNS, SHORTEST_SPLIT, Tiles
from batching.types import Floats, PackedBatch, Reads
from scorer.fused_model import FusedModel
from scorer.garbage import uncollected
from scorer.model import ScoringModel
from scorer.pass_arrays import (
    CACHED_TOKENS,
    LABELS,
    SPLIT_TOKENS,
    GraphKey,
    PassArrays,
    few_reads,
    fill,
    graph_key,
    part_capacity,
    places,
    token_buckets,
)
from scorer.pinned import Staging, to_host

log = logging.getLogger(__name__)

IN_FLIGHT = 3  # passes whose arrays wait in pinned memory
GATHER_ROWS = 4_096  # (read, token) pairs whose head rows are gathered at a time
HEAD_ROWS = 512
UNSPLIT = 1 << 30
GRAPH_BYTES = 4 << 20  # what a captured graph takes beside the tensors in it


@dataclass(frozen=True, slots=True)
class Mode:
    """How passes are computed.

    fp8        products of weights and activations in FP8
    invariant  the same document gets the same bits whatever shares its pass: one bucket, so that every product runs by
               the same kernel; every item begins a tile, so that its keys are summed in the same blocks; no split
    """

    fp8: bool = False
    invariant: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A captured pass, and where it leaves its results until the next one: hidden [reads, width]; logits
    [reads, LABELS] fp32."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    logits: Tensor


class FastPath:
    """Scores passes whose items all take the `fused` strategy. One thread submits; any may wait for results."""

    def __init__(
        self,
        model: ScoringModel,
        kv_pages: KvPages,
        kept_pages: int,
        positions: int,
        most_tokens: int,
        mode: Mode = Mode(),
        fused: FusedModel | None = None,
    ) -> None:
        """positions: of the longest path. most_tokens: rows of a pass beyond which nothing is captured. fused: of the
        model, where it was made before."""
        self._model = model
        self._fused = FusedModel(model, positions, mode.fp8) if fused is None else fused
        self._kv_pages = kv_pages
        self._kept_pages = kept_pages
        self._blocks = Blocks.of(self._fused.head_dim)
        self._cut = self._blocks.cut(self._fused.heads, self._fused.kv_heads)._replace(aligned=mode.invariant)
        self._buckets = (most_tokens,) if mode.invariant else token_buckets(most_tokens)
        self._split_tokens = 0 if mode.invariant else SPLIT_TOKENS
        self._invariant = mode.invariant
        self._graphs: dict[GraphKey, Graph] = {}
        self._paged = False  # whether they are for passes with kept prefixes
        # Passes follow one another on one stream, and each is fetched before the next begins: they share this memory.
        self._hidden = torch.zeros(most_tokens, model.width, dtype=model.dtype, device=model.device)
        self._logits = torch.zeros(most_tokens, LABELS, dtype=torch.float32, device=model.device)
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures: every stream that ran a product keeps a workspace of its own.
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream(model.device)
        most = max(
            places(GraphKey(most_tokens, most_tokens, True, split), self._cut)[1]
            for split in {False, not mode.invariant}
        )
        self._ints = torch.zeros(most, dtype=torch.int32, device=model.device)
        self._staging = [Staging(most) for _ in range(IN_FLIGHT)]
        self._cached = self._make_cached(CACHED_TOKENS if kept_pages else 1)
        self._parts = self._make_parts(part_capacity(SPLIT_TOKENS, self._cut))

    @staticmethod
    def sizes(model: ScoringModel, most_tokens: int, mode: Mode) -> tuple[int, int]:
        """Bytes of graphs beside the largest one's activations, and of buffers beside graphs; prefixes kept."""
        assert model.head_shape is not None, "the fused path's models have one"
        heads, kv_heads, head_dim, _, dtype = model.head_shape
        blocks = Blocks.of(head_dim)
        cut = blocks.cut(heads, kv_heads)._replace(aligned=mode.invariant)
        buckets = 1 if mode.invariant else len(token_buckets(most_tokens))
        split = 0 if mode.invariant else len([size for size in token_buckets(most_tokens) if size <= SPLIT_TOKENS])
        outputs = most_tokens * (model.width * dtype.itemsize + LABELS * 4)
        parts = 4 * part_capacity(SPLIT_TOKENS, cut) * kv_heads * blocks.rows * (head_dim + 1)
        ints = 4 * places(GraphKey(most_tokens, most_tokens, True, False), cut)[1]
        cached = 2 * CACHED_TOKENS * kv_heads * head_dim * dtype.itemsize
        return 2 * (buckets + split) * GRAPH_BYTES + outputs, parts + ints + cached

    def takes(self, batch: PackedBatch) -> bool:
        """Whether all of its items are to be computed this way."""
        return set(batch.leaf_strategies) == {Strategy.FUSED}

    def capture(self, paged: bool) -> float:
        """Captures every graph that traffic can meet and returns the seconds it took.

        paged: prefixes are kept. A pass without any then takes a graph with pages all the same: a few empty kernels
        cost it less than graphs of its own would cost every start.
        """
        started = time.perf_counter()
        self._paged = paged
        with uncollected():
            for tokens in reversed(self._buckets):
                for reads in sorted({tokens} if self._invariant else {few_reads(tokens), tokens}, reverse=True):
                    for split in sorted({False, tokens <= self._split_tokens}):
                        self._capture(GraphKey(tokens, reads, paged, split))
        torch.cuda.synchronize()
        return time.perf_counter() - started

    @property
    def fused(self) -> FusedModel:
        """The layers, for others who run them."""
        return self._fused

    @property
    def graphs(self) -> int:
        return len(self._graphs)

    def submit(self, batch: PackedBatch, page_size: int) -> Callable[[], Reads]:
        """Enqueues a pass; the answer waits for its reads."""
        started = time.perf_counter()
        arrays = self._arrays(batch, page_size)
        key = graph_key(arrays, self._buckets, self._cut)
        if self._invariant:
            assert key is not None, "an invariant pass fits its one graph"
            key = key._replace(reads=key.tokens)
        key = None if key is None else key._replace(paged=key.paged or self._paged)
        graph = None if key is None else self._graphs.get(key)
        staging = self._next_staging()
        if graph is not None and key is not None:
            parts, _ = places(key, self._cut)
            used = fill(arrays, key, parts, self._cut, staging.take())
            planned = time.perf_counter()
            staging.upload(self._ints, used)
            graph.graph.replay()
            hidden, logits = graph.hidden, graph.logits
        else:
            planned = time.perf_counter()
            hidden, logits = self._eager(arrays)
        return self._collect(batch, arrays, hidden, logits, planned - started)

    def scrub(self) -> None:
        """Clears the copies of cached keys: a tile's last block reads past its own, and zero times NaN is NaN."""
        for copies in self._cached:
            copies.zero_()

    def close(self) -> None:
        """Lets go of the graphs: NCCL does not end a group of ranks while there are graphs of its sums."""
        self._graphs.clear()

    def _next_staging(self) -> Staging:
        self._staging.append(self._staging.pop(0))
        return self._staging[-1]

    def _arrays(self, batch: PackedBatch, page_size: int) -> PassArrays:
        layout, pages = batch.layout, Pages(page_size, self._kept_pages, batch.pages)
        shortest = SHORTEST_SPLIT if layout.rows <= self._split_tokens else UNSPLIT
        made = FusedPass.of(layout, pages, self._cut, shortest)
        labels = np.unique(batch.read_ids)
        return PassArrays(
            ids=batch.input_ids,
            positions=batch.position_ids,
            reads=batch.read_rows,
            labels=labels if len(labels) <= LABELS else labels[:0],
            tiles=made.tiles,
            keep_rows=made.keep_rows,
            keep_slots=made.keep_slots,
        )

    @torch.inference_mode()
    def _capture(self, key: GraphKey) -> None:
        """An empty pass, run once to warm up and captured; by every rank in the same order, as their sums meet."""
        parts, _ = places(key, self._cut)
        host = np.zeros(len(self._ints), np.int32)
        used = fill(_empty(), key, parts, self._cut, host)
        self._ints[:used].copy_(torch.from_numpy(host[:used]))
        views = {p.name: self._ints[p.begin : p.end].view(p.shape) for p in parts}
        self._side.wait_stream(self._stream)
        with torch.cuda.stream(self._side):
            self._run(views, key.paged, key.split)
        self._stream.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # NCCL has a thread that looks after its sums: what that asks the device must not spoil a capture.
        strict = "thread_local" if self._fused.over_ranks else "global"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode=strict):
            results = self._run(views, key.paged, key.split)
            hidden, logits = self._hidden[: key.reads], self._logits[: key.reads]
            for kept, result in zip((hidden, logits), results, strict=True):
                kept.copy_(result)
            del results
        self._graphs[key] = Graph(graph, hidden, logits)

    @torch.inference_mode()
    def _eager(self, arrays: PassArrays) -> tuple[Tensor, Tensor]:
        """A pass that no graph takes, operator by operator, without padding."""
        key = GraphKey(len(arrays.ids), len(arrays.reads), arrays.paged, bool(arrays.tiles.parts))
        tiles = arrays.tiles
        given = {name: getattr(tiles, name) for name in ("tiles", "runs", "item_start", "merges", "slots")}
        own = ("ids", "positions", "reads", "labels", "keep_rows", "keep_slots")
        given |= {name: getattr(arrays, name) for name in own}
        views = {name: torch.from_numpy(_some(array)).to(self._model.device) for name, array in given.items()}
        views["last_tiles"] = views["tiles"]
        views["cached"] = torch.tensor([len(tiles.slots)], dtype=torch.int32, device=self._model.device)
        return self._run(views, key.paged, key.split)

    def _run(self, views: dict[str, Tensor], paged: bool, split: bool) -> tuple[Tensor, Tensor]:
        """(final hidden states of the reads, logits of the labels there)"""
        common = (views["runs"], views["item_start"], views["merges"] if split else None)
        tiles, last = (DeviceTiles(views[name], *common) for name in ("tiles", "last_tiles"))
        parts = self._parts if split else None
        if parts is not None and len(views["tiles"]) > len(parts.out):
            parts = self._make_parts(len(views["tiles"]))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cached = self._through_pages(layer, k, v, views) if paged else None
            out = q.new_empty(q.shape)
            fused(q, k, v, cached, last if layer == self._fused.layers - 1 else tiles, parts, out, self._fused.scale,
                  self._blocks)  # fmt: skip
            return out

        hidden = self._fused.forward(views["ids"], views["positions"], views["reads"], attend)
        return hidden, self._model.head(hidden, views["labels"])

    def _through_pages(self, layer: int, k: Tensor, v: Tensor, views: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Keeps what is to be kept, and returns the cached K and V that the tiles read, one row after the other."""
        held = self._kv_pages.layer(layer, k, v)
        keep_rows(k, v, *held, views["keep_rows"], views["keep_slots"])
        slots = views["slots"]
        cached = self._cached if len(slots) <= len(self._cached[0]) else self._make_cached(len(slots))
        gather_rows(*held, *cached, slots, views["cached"])
        return cached

    def _make_cached(self, tokens: int) -> tuple[Tensor, Tensor]:
        shape = (tokens, self._fused.kv_heads, self._fused.head_dim)
        k, v = (torch.zeros(shape, dtype=self._fused.dtype, device=self._model.device) for _ in range(2))
        return k, v

    def _make_parts(self, count: int) -> Parts:
        return Parts.make(count, self._fused.kv_heads, self._blocks.rows, self._fused.head_dim, self._model.device)

    @torch.inference_mode()
    def _collect(
        self, batch: PackedBatch, arrays: PassArrays, hidden: Tensor, logits: Tensor, plan_seconds: float
    ) -> Callable[[], Reads]:
        count = len(arrays.reads)
        started = time.perf_counter()
        rows: Ints = np.repeat(np.arange(count, dtype=np.int32), np.diff(batch.read_indptr))
        few = len(arrays.labels) > 0
        on_host = to_host(logits[:count] if few else self._gathered(hidden, rows, batch.read_ids))
        wanted = np.flatnonzero(batch.normalize).astype(np.int32)
        lse_host = to_host(self._log_sum_exp(hidden, wanted)) if len(wanted) else None
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)  # finding the current one costs more than recording
        columns = np.searchsorted(arrays.labels, batch.read_ids) if few else None  # while the device works

        def wait() -> Reads:
            done.synchronize()
            values: Floats = on_host.numpy()
            chosen = values.copy() if columns is None else values[rows, columns]
            lse = np.full(count, np.nan, np.float32)
            if lse_host is not None:
                lse[wanted] = lse_host.numpy()
            return Reads(chosen, lse, plan_seconds, time.perf_counter() - started)

        return wait

    def _gathered(self, hidden: Tensor, rows: Ints, tokens: Ints) -> Tensor:
        """[pairs] fp32 logits of tokens[i] at hidden[rows[i]]."""
        place, ids = (torch.from_numpy(a.astype(np.int64)).to(hidden.device, non_blocking=True) for a in (rows, tokens))
        blocks = [
            self._model.pair_logits(hidden, place[i : i + GATHER_ROWS], ids[i : i + GATHER_ROWS])
            for i in range(0, len(rows), GATHER_ROWS)
        ]
        return torch.cat(blocks) if blocks else hidden.new_empty(0, dtype=torch.float32)

    def _log_sum_exp(self, hidden: Tensor, wanted: Ints) -> Tensor:
        rows = hidden[torch.from_numpy(wanted).long().to(hidden.device, non_blocking=True)]
        return torch.cat([self._model.lse(rows[i : i + HEAD_ROWS]) for i in range(0, len(rows), HEAD_ROWS)])


def _some(array: Ints) -> Ints:
    """At least one row, as kernels take no empty arrays."""
    return np.ascontiguousarray(array if len(array) else np.zeros((1, *array.shape[1:]), np.int32), np.int32)


def _empty() -> PassArrays:
    """No rows: all of a graph is padding."""
    none = np.zeros(0, np.int32)
    tiles = Tiles(np.zeros((0, COLUMNS), np.int32), none, np.zeros((0, 2), np.int32), none, np.zeros((0, 4), np.int32))
    return PassArrays(none, none, none, none, tiles, none, none)
