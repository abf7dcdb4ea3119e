"""Times a decode step's attention on the GPU at hand, by our kernels and by FlashInfer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attention.decode import Decode, DecodeLaunch, DecodePlan, DecodeStrategy, plan_decode
from attention.decode_kernel import DecodeArrays, DecodeBlocks, DecodeParts, decode
from attention.decode_timing import DecodeLaw, DecodePoint
from attention.gpu_timing import milliseconds
from attention.layout import Ints, indptr, ranges
from attention.plans import HeadShape, PagedKv

PAGE_SIZE = 16
OURS = {
    "triton_cascade": DecodeStrategy.CASCADE_DECODE,
    "triton_cascade_scattered": DecodeStrategy.CASCADE_DECODE,
    "triton_batch": DecodeStrategy.BATCH_DECODE,
}
# The level or levels of one row a request by: FlashInfer's decode kernel, the same on tensor cores, its prefill kernel.
FLASHINFER = {
    "flashinfer_batch": (DecodeStrategy.BATCH_DECODE, "decode"),
    "flashinfer_batch_tc": (DecodeStrategy.BATCH_DECODE, "decode_tc"),
    "flashinfer_cascade": (DecodeStrategy.CASCADE_DECODE, "decode"),
    "flashinfer_cascade_tc": (DecodeStrategy.CASCADE_DECODE, "decode_tc"),
    "flashinfer_cascade_prefill": (DecodeStrategy.CASCADE_DECODE, "prefill"),
}


class DecodeRig:
    """Random K/V and queries, and GPU-only times over them."""

    def __init__(self, heads: HeadShape, most_prompt: int, most_own: int, blocks: DecodeBlocks | None = None) -> None:
        """most_own: beams times their own tokens."""
        self.heads = heads
        self._blocks = DecodeBlocks() if blocks is None else blocks
        slots = most_prompt + most_own + 513 * PAGE_SIZE
        make = {"device": "cuda", "dtype": heads.dtype}
        self._k, self._v = (torch.randn(slots, heads.kv_heads, heads.head_dim, **make) for _ in range(2))
        self._q = torch.randn(512, heads.heads, heads.head_dim, **make)
        self._new = torch.randn(512, heads.kv_heads, heads.head_dim, **make)
        self._flashinfer: object = None

    def time(self, variant: str, point: DecodePoint) -> float:
        """Milliseconds of one layer. Raises whatever a variant that this machine cannot run raises."""
        return milliseconds(self.call(variant, point))

    def call(self, variant: str, point: DecodePoint) -> Callable[[], Tensor]:
        """The step, planned: each call computes it and returns [beams, heads, head_dim]."""
        if variant in OURS:
            return self._ours(point, OURS[variant], variant.endswith("scattered"))
        return self._theirs(point, *FLASHINFER[variant])

    def law(self, points: Sequence[DecodePoint]) -> DecodeLaw:
        """Fitted to our kernels at these points."""
        names = {DecodeStrategy.CASCADE_DECODE: "triton_cascade", DecodeStrategy.BATCH_DECODE: "triton_batch"}
        return DecodeLaw.fit([(s, point, self.time(name, point)) for point in points for s, name in names.items()])

    def step(self, point: DecodePoint, scattered: bool = False) -> Decode:
        """Prompt pages in order or shuffled, then each beam's own tokens one after the other, from a whole page on."""
        pages = np.arange(-(-point.prompt // PAGE_SIZE), dtype=np.int32)
        room = -(-point.own // PAGE_SIZE) * PAGE_SIZE
        first = len(pages) * PAGE_SIZE + np.arange(point.beams, dtype=np.int32) * room
        history = first[:, None] + np.arange(point.own, dtype=np.int32)
        shuffled = np.random.default_rng(0).permutation(len(pages)).astype(np.int32) if scattered else pages
        return Decode(PAGE_SIZE, shuffled, point.prompt, history.astype(np.int32))

    def _ours(self, point: DecodePoint, strategy: DecodeStrategy, scattered: bool) -> Callable[[], Tensor]:
        step, shape, n = self.step(point, scattered), self.heads, point.beams
        meta = np.array([n, point.prompt, point.own, 0], np.int32)
        padded = np.append(step.prompt_slots(), np.zeros(self._blocks.keys, np.int32))
        on_device = [_upload(a) for a in (meta, padded, step.history)]
        arrays = DecodeArrays(on_device[0], on_device[1] if scattered else None, on_device[2])
        sizes = (shape.heads, shape.kv_heads, shape.head_dim)
        cascade = strategy is DecodeStrategy.CASCADE_DECODE
        parts = DecodeParts.make(n, sizes, self._blocks, self._q.device) if cascade else None
        q, new, out = self._q[:n], self._new[:n], torch.empty_like(self._q[:n])

        def call() -> Tensor:
            decode(q, new, new, (self._k, self._v), arrays, parts, out, shape.scale, self._blocks)
            return out

        return call

    def _theirs(self, point: DecodePoint, strategy: DecodeStrategy, rows: str) -> Callable[[], Tensor]:
        from attention.flashinfer_decode import FlashInferDecode, RowKernel

        if self._flashinfer is None:
            self._flashinfer = FlashInferDecode(self.heads)
        assert isinstance(self._flashinfer, FlashInferDecode), "made above"
        step = self.step(point)
        if strategy is DecodeStrategy.BATCH_DECODE:
            plan = DecodePlan((_whole_pages(step),))
        else:
            plan = plan_decode(step, strategy, deep=False)
            plan = replace(plan, launches=(plan.launches[0], _own_pages(step)))
        run, q = self._flashinfer.prepare(plan, RowKernel(rows)), self._q[: point.beams]
        return lambda: run(q, self._k, self._v)


def _whole_pages(step: Decode) -> DecodeLaunch:
    """batch_decode over whole pages, as a serving engine without ancestry would have them: the best case for it."""
    own = _own_pages(step).kv
    count = len(own.paged_kv_indices) // step.beams
    prompt = np.tile(step.prompt_pages, (step.beams, 1))
    pages = np.concatenate([prompt, own.paged_kv_indices.reshape(step.beams, count)], axis=1)
    assert step.prompt_tokens % PAGE_SIZE == 0, "the prompt ends with a page"
    return _launch(step, pages, own.paged_kv_last_page_len)


def _own_pages(step: Decode) -> DecodeLaunch:
    """Each beam's own tokens, which here lie page by page."""
    own = step.history.shape[1]
    count = -(-own // PAGE_SIZE)
    first = step.history[:, 0] // np.int32(PAGE_SIZE)
    pages = ranges(first, np.full(step.beams, count, np.int32)).reshape(step.beams, count)
    return _launch(step, pages, np.full(step.beams, (own - 1) % PAGE_SIZE + 1, np.int32))


def _launch(step: Decode, pages: Ints, last: Ints) -> DecodeLaunch:
    bounds = np.arange(step.beams + 1, dtype=np.int32)
    kv = PagedKv(indptr(np.full(step.beams, pages.shape[1], np.int32)), pages.ravel().astype(np.int32), last)
    return DecodeLaunch(bounds[:-1], bounds, kv, PAGE_SIZE)


def _upload(array: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int32)).cuda().ravel()
