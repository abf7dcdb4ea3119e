"""Beam steps by the hand-fused layers: on a GPU one CUDA graph by number of beams, whatever prompt and history.

The step's ints travel in one upload; the head and the search for the best continuations are launched behind the graph
while it runs, and one small copy comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention.decode import Decode, DecodeStrategy
from attention.decode_kernel import BEAMS, FIRST, META, OWN, PROMPT, DecodeArrays, DecodeBlocks, DecodeParts, decode
from attention.decode_timing import BUILT_IN, DecodePoint
from attention.kv_pages import KvPages
from attention.layout import Ints
from batching.beams import Candidates
from scorer.beam_steps import BeamStep, Stepped
from scorer.beam_top import pair_log_probs, top_candidates
from scorer.fused_model import FusedModel
from scorer.model import ScoringModel
from scorer.pinned import Staging, to_host

BUCKETS = (1, 32, 64, 128, 256, 512)  # beams that graphs are made for
IN_FLIGHT = 2  # steps whose arrays wait in pinned memory
ROOM = 16  # ints before the rows: the step's numbers, aligned


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
    """A captured step. hidden [beams, width]"""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor


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
        self._model = model
        self._fused = fused
        self._kv_pages = kv_pages
        self._choose = choose
        self._blocks = blocks
        self._tma = tma
        self._cuda = model.device.type == "cuda"
        widest = BUCKETS[-1]
        self._rows = {name: ROOM + i * widest for i, name in enumerate(("ids", "positions", "scores", "history"))}
        size = self._rows["history"] + most_history
        self._ints = torch.zeros(size, dtype=torch.int32, device=model.device)
        self._prompt = torch.zeros(most_prompt + blocks.keys, dtype=torch.int32, device=model.device)
        self._prompt_named = b""
        self._pages_of, self._slots = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._staging = [Staging(size) for _ in range(IN_FLIGHT)] if self._cuda else []
        self._graphs: dict[StepKey, Graph] = {}
        shape = (fused.heads, fused.kv_heads, fused.head_dim)
        self._parts = {n: DecodeParts.make(n, shape, blocks, model.device) for n in BUCKETS}

    def capture(self) -> float:
        """Captures every graph, takes the memory that the widest step needs behind it, and returns the seconds."""
        started = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        for beams in reversed(BUCKETS):
            for strategy, consecutive in KINDS:
                self._capture(StepKey(beams, strategy, consecutive), pool)
        with torch.inference_mode():
            logits = self._model.every_logit(self._graphs[StepKey(BUCKETS[-1], *KINDS[0])].hidden)
            top_candidates(logits, torch.zeros(len(logits), device=logits.device), 4 * len(logits))
        torch.cuda.synchronize()
        return time.perf_counter() - started

    @property
    def graphs(self) -> int:
        return len(self._graphs)

    def submit(self, step: BeamStep) -> Callable[[], Stepped]:
        """Enqueues a step; the answer waits for it."""
        started = time.perf_counter()
        n = len(step.tokens)
        prompt = self._slots_of(step.decode)
        beams = next(beams for beams in BUCKETS if beams >= n)
        strategy = self._choose(DecodePoint(len(prompt), beams, step.decode.history.shape[1]))
        consecutive = strategy is DecodeStrategy.CASCADE_DECODE and bool((np.diff(prompt) == 1).all())
        key = StepKey(beams, strategy, consecutive)
        self._upload(step, prompt, consecutive)
        planned = time.perf_counter()
        if (graph := self._graphs.get(key)) is not None:
            graph.graph.replay()
            hidden = graph.hidden
        else:
            hidden = self._run(key)
        return self._collect(hidden[:n], step, planned - started)

    def _slots_of(self, step: Decode) -> Ints:
        """The slots of the prompt; the steps of one search name the same pages."""
        if self._pages_of is not step.prompt_pages or len(self._slots) != step.prompt_tokens:
            self._pages_of, self._slots = step.prompt_pages, step.prompt_slots()
        return self._slots

    def _upload(self, step: BeamStep, prompt: Ints, consecutive: bool) -> None:
        n, history = len(step.tokens), step.decode.history.ravel()
        used = self._rows["history"] + len(history)
        if not self._cuda:
            self._fill(step, prompt, self._ints.numpy())
        else:
            self._staging.append(self._staging.pop(0))
            self._fill(step, prompt, self._staging[-1].take())
            self._staging[-1].upload(self._ints, used)
        named = step.decode.prompt_pages.tobytes() + np.int64(len(prompt)).tobytes()
        if not consecutive and named != self._prompt_named:
            self._prompt[: len(prompt)].copy_(torch.from_numpy(prompt))
            self._prompt_named = named
        assert n <= BUCKETS[-1], "checked when the search was accepted"

    def _fill(self, step: BeamStep, prompt: Ints, ints: Ints) -> None:
        n, rows, history = len(step.tokens), self._rows, step.decode.history
        meta = ints[:META]
        meta[BEAMS], meta[PROMPT], meta[OWN] = n, step.decode.prompt_tokens, history.shape[1]
        meta[FIRST] = prompt[0] if len(prompt) else 0
        ints[rows["ids"] : rows["ids"] + n] = step.tokens
        ints[rows["positions"] : rows["positions"] + n] = step.decode.position
        ints[rows["scores"] : rows["scores"] + n] = step.scores.view(np.int32)
        ints[rows["history"] : rows["history"] + history.size] = history.ravel()

    def _view(self, name: str, count: int) -> Tensor:
        return self._ints[self._rows[name] : self._rows[name] + count]

    @torch.inference_mode()
    def _run(self, key: StepKey) -> Tensor:
        """[beams, width] final hidden states."""
        arrays = DecodeArrays(
            self._ints[:META], None if key.consecutive else self._prompt, self._ints[self._rows["history"] :]
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            held = self._kv_pages.layer(layer, k, v)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            parts = self._parts[key.beams] if key.strategy is DecodeStrategy.CASCADE_DECODE else None
            decode(q, k, v, held, arrays, parts, out, self._fused.scale, self._blocks, self._tma)
            return out

        return self._fused.forward(self._view("ids", key.beams), self._view("positions", key.beams), None, attend)

    @torch.inference_mode()
    def _capture(self, key: StepKey, pool: Any) -> None:
        """A step of no beams, run once to warm up and captured: nothing is kept."""
        self._ints.zero_()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run(key)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side):
            hidden = self._run(key)
        self._graphs[key] = Graph(graph, hidden)

    @torch.inference_mode()
    def _collect(self, hidden: Tensor, step: BeamStep, plan_seconds: float) -> Callable[[], Stepped]:
        started = time.perf_counter()
        logits = self._model.every_logit(hidden)
        if step.pairs is not None:
            at = (torch.from_numpy(part.astype(np.int64)).to(logits.device, non_blocking=True) for part in step.pairs)
            found = (pair_log_probs(logits, *at),)
        else:
            scores = self._view("scores", len(step.tokens)).view(torch.float32)
            log_probs, beams, tokens = top_candidates(logits, scores, step.count)
            found = (log_probs, torch.stack([beams, tokens]).to(torch.int32))  # type: ignore[assignment]
        on_host = tuple(to_host(part) if self._cuda else part for part in found)
        done = None
        if self._cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()

        def wait() -> Stepped:
            if done is not None:
                done.synchronize()
            log_probs, *places = (part.numpy() for part in on_host)
            beams, tokens = places[0] if step.pairs is None else step.pairs
            return Stepped(Candidates(log_probs, beams, tokens), plan_seconds, time.perf_counter() - started)

        return wait
