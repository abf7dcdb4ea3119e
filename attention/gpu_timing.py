"""How long calls take on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch


def milliseconds(call: Callable[[], object], replays: int = 5) -> float:
    """Median time of one call, several captured in one CUDA graph: no host time in it."""
    return in_turns([call], replays)[0]


def in_turns(calls: Sequence[Callable[[], object]], rounds: int = 5) -> list[float]:
    """Median time of each, by turns: the GPU's clock follows what it did just before, and so meets all alike."""
    captured = [_captured(call) for call in calls]
    for graph, _ in captured:
        graph.replay()
    times = [[elapsed(graph.replay) / repeats for graph, repeats in captured] for _ in range(rounds)]
    return [float(median) for median in np.median(np.array(times).reshape(rounds, len(calls)), axis=0)]


def _captured(call: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of some calls, about half a millisecond of them, and how many."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        first = elapsed(call)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    repeats = int(np.clip(0.5 / max(first, 0.02), 1, 10))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph, repeats


def elapsed(call: Callable[[], object]) -> float:
    """Milliseconds between CUDA events around one call: with the host's launch time."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
