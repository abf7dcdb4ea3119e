"""Beam steps by the hand-fused layers: on a GPU one CUDA graph by number of beams, whatever prompt and history.

The step's ints travel in one upload, the graph holds the head and the search for the best continuations too, and one
small copy comes back. Where nothing constrains a search, its next step is written on the device from what the last one
found, so that the device need not wait for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.decode import Decode, DecodeStrategy
from attention.decode_kernel import META, DecodeArrays, DecodeBlocks, DecodeParts, decode
from attention.decode_timing import BUILT_IN, DecodePoint
from attention.kv_pages import KvPages
from attention.layout import Ints
from batching.beams import Candidates
from batching.trie import Pairs
from scorer.beam_head import BeamHead
from scorer.beam_steps import Ahead, BeamStep, Stepped
from scorer.beam_triton import advance
from scorer.fused_model import FusedModel
from scorer.garbage import uncollected
from scorer.model import ScoringModel
from scorer.pinned import Staging, to_host
from scorer.step_ints import StepInts

BUCKETS = (1, 32, 64, 128, 256, 512)  # beams that graphs are made for
IN_FLIGHT = 2  # steps whose arrays wait in pinned memory
CONTINUATIONS = 4  # for each beam that a graph looks for: those of up to three eos ids


Choose = Callable[[DecodePoint], DecodeStrategy]
# Kinds of graphs. A prompt that is short enough for batch_decode costs little to name slot by slot.
KINDS = (
    (DecodeStrategy.CASCADE_DECODE, True),
    (DecodeStrategy.CASCADE_DECODE, False),
    (DecodeStrategy.BATCH_DECODE, False),
)


class StepKey(NamedTuple):
    """What a graph is made for. beams: with padding; consecutive: the prompt's slots follow one another."""

    beams: int
    strategy: DecodeStrategy
    consecutive: bool


class Graph(NamedTuple):
    """A captured step. found [3, count]: what BeamHead.best gives."""

    graph: torch.cuda.CUDAGraph
    found: Tensor


class Last(NamedTuple):
    """The last step, as far as the next one follows from it. own: keys of a beam's history."""

    found: Tensor
    prompt: Ints
    consecutive: bool
    own: int
    ahead: Ahead


class FastBeams:
    """Computes steps of up to 512 beams. One thread submits; any may wait for results."""

    def __init__(
        self,
        model: ScoringModel,
        fused: FusedModel,
        kv_pages: KvPages,
        most_prompt: int,
        most_history: int,
        choose: Choose = BUILT_IN.choose,
        blocks: DecodeBlocks = DecodeBlocks(),  # noqa: B008 - frozen
        tma: bool = True,
    ) -> None:
        """most_prompt: tokens; most_history: beams times their tokens. choose: the strategy of each step."""
        self._fused = fused
        self._kv_pages = kv_pages
        self._choose = choose
        self._blocks = blocks
        self._tma = tma
        self._cuda = model.device.type == "cuda"
        self._head = BeamHead(model, BUCKETS[-1])
        self._places = StepInts(BUCKETS[-1], most_history, kv_pages.page_size)
        self._ints = torch.zeros(self._places.size, dtype=torch.int32, device=model.device)
        self._following = torch.zeros_like(self._ints)
        self._prompt = torch.zeros(most_prompt + blocks.keys, dtype=torch.int32, device=model.device)
        self._pages_of = self._slots = self._prompt_named = np.zeros(0, np.int32)
        self._prompt_staging = Staging(len(self._prompt)) if self._cuda else None
        self._staging = [Staging(self._places.size) for _ in range(IN_FLIGHT)] if self._cuda else []
        self._graphs: dict[StepKey, Graph] = {}
        shape = (fused.heads, fused.kv_heads, fused.head_dim)
        self._parts = {n: DecodeParts.make(n, shape, blocks, model.device) for n in BUCKETS}
        self._last: Last | None = None

    def capture(self) -> float:
        """Captures every graph, compiles what runs beside them, and returns the seconds."""
        started = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with uncollected():
            for beams in reversed(BUCKETS):
                for strategy, consecutive in KINDS:
                    key = StepKey(beams, strategy, consecutive)
                    self._capture(key, pool, side)
                    self._advance(self._graphs[key].found, 1)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    @property
    def graphs(self) -> int:
        return len(self._graphs)

    def submit(self, step: BeamStep) -> Callable[[], Stepped]:
        """Enqueues a step; the answer waits for it."""
        started = time.perf_counter()
        prompt, own = self._slots_of(step.decode), step.decode.history.shape[1]
        consecutive = bool((np.diff(prompt) == 1).all())
        key = self._key(len(step.tokens), prompt, own, consecutive)
        self._upload(step, prompt)
        ahead = step.ahead if step.pairs is None and self._places.fits(step.ahead) else None
        planned = time.perf_counter()
        if step.pairs is not None:
            self._last = None
            self._run(key, prompt)
            return self._collect_pairs(step.pairs, (started, planned))
        found = self._best(key, prompt, step.count)
        self._last = None if ahead is None else Last(found, prompt, consecutive, own, ahead)
        return self._collect(found, step.count, (started, planned))

    def follow(self) -> Callable[[], Stepped] | None:
        """Enqueues the step that follows from the last one's continuations, without waiting for these."""
        if self._last is None:
            return None
        started = time.perf_counter()
        last = self._last
        key = self._key(last.ahead.width, last.prompt, last.own + 1, last.consecutive)
        self._advance(last.found, last.own)
        planned = time.perf_counter()
        found = self._best(key, last.prompt, last.ahead.count)
        self._last = last._replace(found=found, own=last.own + 1)
        return self._collect(found, last.ahead.count, (started, planned))

    def _key(self, n: int, prompt: Ints, own: int, consecutive: bool) -> StepKey:
        """consecutive: whether the prompt's slots are, which only a cascade makes use of."""
        beams = next(beams for beams in BUCKETS if beams >= n)
        strategy = self._choose(DecodePoint(len(prompt), beams, own))
        return StepKey(beams, strategy, consecutive and strategy is DecodeStrategy.CASCADE_DECODE)

    def _slots_of(self, step: Decode) -> Ints:
        """The slots of the prompt; the steps of one search name the same pages."""
        if self._pages_of is not step.prompt_pages or len(self._slots) != step.prompt_tokens:
            self._pages_of, self._slots = step.prompt_pages, step.prompt_slots()
        return self._slots

    def _upload(self, step: BeamStep, prompt: Ints) -> None:
        if not self._cuda:
            self._places.fill(step, prompt, self._ints.numpy())
            return
        self._staging.append(self._staging.pop(0))
        used = self._places.fill(step, prompt, self._staging[-1].take())
        self._staging[-1].upload(self._ints, used)

    @torch.inference_mode()
    def _advance(self, found: Tensor, own: int) -> None:
        """Writes the next step over the last one. By way of a copy: programs read what others would write."""
        begin, widest = self._places.begin, self._places.widest
        step, following = self._ints[begin:], self._following[begin:]
        advance(found, self._ints, step, following, own, widest, self._kv_pages.page_size)
        step.copy_(following)

    def _best(self, key: StepKey, prompt: Ints, count: int) -> Tensor:
        """Runs a step; at least its `count` best continuations, as BeamHead.best gives them."""
        found = self._run(key, prompt)
        return found if count <= CONTINUATIONS * _capacity(key) else self._head.best(self._scores(key), count)

    def _run(self, key: StepKey, prompt: Ints) -> Tensor:
        if not key.consecutive and self._prompt_named is not prompt:
            self._name(prompt)
        if (graph := self._graphs.get(key)) is None:
            return self._step(key)
        graph.graph.replay()
        return graph.found

    def _name(self, prompt: Ints) -> None:
        """Uploads a prompt's slots, without waiting for the pass that may be computing it."""
        if self._prompt_staging is None:
            self._prompt[: len(prompt)].copy_(torch.from_numpy(prompt))
        else:
            self._prompt_staging.take()[: len(prompt)] = prompt
            self._prompt_staging.upload(self._prompt, len(prompt))
        self._prompt_named = prompt

    def _scores(self, key: StepKey) -> Tensor:
        return self._view("scores", key.beams).view(torch.float32)

    def _view(self, name: str, count: int) -> Tensor:
        return self._ints[self._places.row(name) : self._places.row(name) + count]

    @torch.inference_mode()
    def _step(self, key: StepKey) -> Tensor:
        """The kernels of a step, one after the other."""
        meta = self._ints[self._places.begin : self._places.begin + META]
        history = self._ints[self._places.row("history") :]
        arrays = DecodeArrays(meta, None if key.consecutive else self._prompt, history)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            held = self._kv_pages.layer(layer, k, v)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            parts = self._parts[key.beams] if key.strategy is DecodeStrategy.CASCADE_DECODE else None
            decode(q, k, v, held, arrays, parts, out, self._fused.scale, self._blocks, self._tma)
            return out

        hidden = self._fused.forward(self._view("ids", key.beams), self._view("positions", key.beams), None, attend)
        self._head.read(hidden, self._scores(key))
        return self._head.best(self._scores(key), CONTINUATIONS * _capacity(key))

    @torch.inference_mode()
    def _capture(self, key: StepKey, pool: Any, side: torch.cuda.Stream) -> None:
        """A step of no beams, run once to warm up and captured: nothing is kept."""
        self._ints.zero_()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(key)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side):
            found = self._step(key)
        self._graphs[key] = Graph(graph, found)

    def _collect(self, found: Tensor, count: int, times: tuple[float, float]) -> Callable[[], Stepped]:
        """times: when the step was taken up, and when it was planned."""
        ready = self._on_host(found)

        def wait() -> Stepped:
            log_probs, beams, tokens = ready()[:, :count]
            log_probs = log_probs.view(np.float32)
            there = log_probs != -np.inf
            return _stepped(Candidates(log_probs[there], beams[there], tokens[there]), times)

        return wait

    @torch.inference_mode()
    def _collect_pairs(self, pairs: Pairs, times: tuple[float, float]) -> Callable[[], Stepped]:
        at = (torch.from_numpy(p.astype(np.int64)).to(self._ints.device, non_blocking=True) for p in pairs)
        ready = self._on_host(self._head.log_probs(*at))
        return lambda: _stepped(Candidates(ready(), *pairs), times)

    def _on_host(self, tensor: Tensor) -> Callable[[], NDArray[Any]]:
        """Begins a copy; the answer waits for it."""
        if not self._cuda:
            return tensor.numpy
        host = to_host(tensor)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def wait() -> NDArray[Any]:
            done.synchronize()
            array: NDArray[Any] = host.numpy()
            return array

        return wait


def _capacity(key: StepKey) -> int:
    """Beams of the widest search that a graph may be for: the first step of every search has one."""
    return BUCKETS[-1] if key.beams == 1 else key.beams


def _stepped(candidates: Candidates, times: tuple[float, float]) -> Stepped:
    started, planned = times
    return Stepped(candidates, planned - started, time.perf_counter() - planned)
