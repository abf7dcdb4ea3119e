"""Runs any plan with FlashInfer's kernels: planned once a pass, run once a layer.

Everything that the layers share is computed on the host and uploaded in one piece before the first of them; inside a
layer nothing synchronises. Multi-item masks go to the paged wrappers only: the ragged ones accept and ignore them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import flashinfer
import numpy as np
import torch
from flashinfer.cascade import merge_state_in_place
from numpy.typing import NDArray
from torch import Tensor

from attention.copy_rows import copy_rows
from attention.cost import shape_of
from attention.fused_launch import FusedLaunch, is_fused
from attention.kv_pages import KvPages
from attention.layout import Ints, Layout, indptr
from attention.plans import HeadShape, Launch, MaskKey, MaskKind, PagedKv, Pages, Plan, RaggedKv
from attention.residency import Residency
from attention.strategy import Attend, Attention
from attention.timing import HEAD_DIMS, TimeModel, built_in

WORKSPACE_BYTES = 256 << 20  # split-KV partial results; shared by all wrappers, which run one after the other
STAGING_BYTES = 32 << 20  # index arrays of one pass


class Kernel(StrEnum):
    """FlashInfer's prefill kernels. fa2 packs a group's query heads into one tile and splits long keys over CTAs; fa3
    has wider tiles and asynchronous copies, and knows no custom mask."""

    FA2 = "fa2"
    FA3 = "fa3"


ChooseKernel = Callable[[Launch, int], Kernel]  # (launch, page size) -> kernel


def by_time(model: TimeModel | None) -> ChooseKernel:
    """The kernel that was measured to be faster, launch by launch; custom masks are fa2's alone."""
    measured = built_in() if model is None else model

    def choose(launch: Launch, page_size: int) -> Kernel:
        if launch.mask is MaskKind.CUSTOM:
            return Kernel.FA2
        return Kernel(measured.launch(shape_of(launch, page_size))[0])

    return choose


class FlashInferAttention(Attention):
    """Exact attention on an NVIDIA GPU. Raises ValueError where a model's shape or type has no kernel."""

    name = "flashinfer"
    isolates_nan = False  # masked keys are multiplied by zero, and the multi-item kernel reads past a request's end

    def __init__(
        self,
        kv_pages: KvPages,
        shape: HeadShape,
        time_model: TimeModel | None = None,
        choose: ChooseKernel | None = None,
    ) -> None:
        """time_model: chooses the kernels, None: the built-in one. choose: instead of it."""
        _refuse(shape)
        self._kv_pages = kv_pages
        self._shape = shape
        self._choose = by_time(time_model) if choose is None else choose
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._staging = [_Staging(), _Staging()]
        self._wrappers: dict[tuple[type[_Wrapper], Kernel, int], _Wrapper] = {}

    def begin(self, layout: Layout, pages: Pages, plans: Mapping[MaskKey, Plan]) -> Attend:
        self._staging.reverse()
        staging = self._staging[0]
        staging.reuse()
        used: dict[tuple[type[_Wrapper], Kernel], int] = {}
        prepared = {key: self._prepare(layout, pages, plan, staging, used) for key, plan in plans.items()}
        staging.upload()
        shape, kv_pages = self._shape, self._kv_pages

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, key: MaskKey) -> Tensor:
            assert abs(scale - shape.scale) < 1e-6, f"layer {layer} scales by {scale}, planned for {shape.scale}"
            return prepared[key].run(kv_pages, layer, q.contiguous(), k.contiguous(), v.contiguous())

        return attend

    def scrub(self, first_page: int) -> None:
        self._kv_pages.zero(first_page)

    def _prepare(
        self,
        layout: Layout,
        pages: Pages,
        plan: Plan,
        staging: _Staging,
        used: dict[tuple[type[_Wrapper], Kernel], int],
    ) -> _Pass:
        """Plans each launch with a wrapper of its own."""
        assert plan.num_pages <= self._kv_pages.pages, f"{plan.num_pages} pages needed, {self._kv_pages.pages} there"
        residency = Residency.of(layout, pages, plan)
        merged_into = {b: a for a, b in plan.merges}
        runs, fused = [], []
        for number, launch in enumerate(plan.launches):
            if is_fused(launch):
                cached = residency.cached_slots
                fused.append(FusedLaunch.of(launch, layout.rows, residency.place, cached, self._shape, staging.add))
                continue
            target = merged_into.get(number)
            merge_rows = None if target is None else _within(launch.q_rows, plan.launches[target].q_rows)
            run = _Run(
                wrappers=tuple(self._planned(part, plan, staging, used) for part in _single_masks(launch, plan)),
                rows=_Span.of(launch.q_rows, staging),
                keys=_key_span(launch, residency, staging),
                with_lse=target is not None or number in merged_into.values(),
                merge_into=target,
                merge_rows=None if merge_rows is None else _Span.of(merge_rows, staging),
            )
            runs.append((number, run))
        needs_cached = any(run.keys is not None for _, run in runs) and len(residency.cached_slots)
        return _Pass(
            runs=dict(runs),
            fused=tuple(fused),
            append=_Copy.of(plan.append_rows, plan.append_slots, staging),
            copy=_Copy.of(plan.copy_from, plan.copy_to, staging),
            cached_slots=staging.add(residency.cached_slots) if needs_cached else None,
            cached_places=staging.add(np.arange(len(residency.cached_slots), dtype=np.int32)) if needs_cached else None,
        )

    def _planned(
        self, launch: Launch, plan: Plan, staging: _Staging, used: dict[tuple[type[_Wrapper], Kernel], int]
    ) -> _Wrapper:
        kernel = self._choose(launch, plan.page_size)
        if launch.mask is MaskKind.CUSTOM and kernel is not Kernel.FA2:
            raise ValueError("only fa2 has custom masks")
        kind = _PagedWrapper if isinstance(launch.kv, PagedKv) else _RaggedWrapper
        place = used[kind, kernel] = used.get((kind, kernel), -1) + 1
        if (kind, kernel, place) not in self._wrappers:
            self._wrappers[kind, kernel, place] = kind(self._workspace, kernel)
        wrapper = self._wrappers[kind, kernel, place]
        wrapper.plan(launch, plan, self._shape, staging)
        return wrapper


def _refuse(shape: HeadShape) -> None:
    if shape.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"FlashInfer computes float16 and bfloat16, not {shape.dtype}: use the torch backend")
    if shape.head_dim not in HEAD_DIMS:
        raise ValueError(
            f"FlashInfer has kernels for head_dim {HEAD_DIMS}, not {shape.head_dim}: use the torch backend"
        )
    if not torch.cuda.is_available():
        raise ValueError("FlashInfer needs an NVIDIA GPU: use the torch backend")


def _key_span(launch: Launch, residency: Residency, staging: _Staging) -> _Span | None:
    """Where a launch without pages finds its keys."""
    return _Span.of(residency.place[launch.kv.kv_tokens], staging) if isinstance(launch.kv, RaggedKv) else None


def _single_masks(launch: Launch, plan: Plan) -> list[Launch]:
    """A custom launch as one launch a request: a plan takes one packed mask's bytes from its first bit on."""
    if launch.mask is not MaskKind.CUSTOM or launch.requests == 1:
        return [launch]
    assert isinstance(launch.kv, PagedKv), "custom masks are planned over pages"
    assert launch.custom_mask is not None, "a custom launch has a mask"
    sizes = np.diff(launch.qo_indptr).astype(np.int64) * launch.kv.lengths(plan.page_size)
    masks = np.split(launch.custom_mask, np.cumsum(sizes)[:-1])
    return [_one_request(launch, launch.kv, b, mask) for b, mask in enumerate(masks)]


def _one_request(launch: Launch, kv: PagedKv, b: int, mask: NDArray[np.bool_]) -> Launch:
    rows = launch.q_rows[launch.qo_indptr[b] : launch.qo_indptr[b + 1]]
    table = kv.paged_kv_indices[kv.paged_kv_indptr[b] : kv.paged_kv_indptr[b + 1]]
    one = PagedKv(indptr([len(table)]), table, kv.paged_kv_last_page_len[b : b + 1])
    return Launch(launch.mask, rows, indptr([len(rows)]), one, launch.window_left, custom_mask=mask)


def _within(rows: Ints, of: Ints) -> Ints:
    """Place of each of `rows` in `of`."""
    order = np.argsort(of)
    return order[np.searchsorted(of, rows, sorter=order)].astype(np.int32)


class _Staging:
    """Pinned host memory and its copy on the device: arrays are laid down one by one and travel in one piece."""

    def __init__(self) -> None:
        self._host = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(STAGING_BYTES, dtype=torch.uint8, device="cuda")
        self._view = self._host.numpy()
        self._used = 0
        self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def reuse(self) -> None:
        """Waits until the last upload has left the host memory."""
        self._uploaded.synchronize()
        self._used = 0

    def add(self, array: NDArray[Any]) -> Tensor:
        """The array on the device, once `upload` has run."""
        begin = -(-self._used // 16) * 16
        end = begin + array.nbytes
        assert end <= STAGING_BYTES, f"the index arrays of a pass need more than {STAGING_BYTES} bytes"
        self._view[begin:end] = np.ascontiguousarray(array).view(np.uint8).ravel()
        self._used = end
        return self._device[begin:end].view(_TORCH_DTYPES[array.dtype.name])

    def upload(self) -> None:
        self._device[: self._used].copy_(self._host[: self._used], non_blocking=True)
        self._uploaded.record()


_TORCH_DTYPES = {"int32": torch.int32, "uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32}


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """Some rows of a tensor: a slice where they follow one another, else their indices."""

    first: int
    count: int
    index: Tensor | None

    @classmethod
    def of(cls, rows: Ints, staging: _Staging) -> _Span:
        first = int(rows[0])
        if np.array_equal(rows, np.arange(first, first + len(rows), dtype=np.int32)):
            return cls(first, len(rows), None)
        return cls(first, len(rows), staging.add(rows))

    def take(self, source: Tensor) -> Tensor:
        if self.index is None:
            return source[self.first : self.first + self.count]
        return torch.index_select(source, 0, self.index)

    def put(self, target: Tensor, rows: Tensor) -> None:
        if self.index is None:
            target[self.first : self.first + self.count] = rows
        else:
            target.index_copy_(0, self.index.long(), rows)


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """Rows of one pair of tensors to rows of another."""

    source: Tensor
    target: Tensor

    @classmethod
    def of(cls, source: Ints, target: Ints, staging: _Staging) -> _Copy | None:
        return cls(staging.add(source), staging.add(target)) if len(source) else None

    def run(self, k: Tensor, v: Tensor, to_k: Tensor, to_v: Tensor) -> None:
        copy_rows(k, v, to_k, to_v, self.source, self.target)


class _Wrapper(ABC):
    """A FlashInfer wrapper of one kernel, planned anew for each pass. query_rows: rows of its last plan."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self.query_rows = 0
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def plan(self, launch: Launch, plan: Plan, shape: HeadShape, staging: _Staging) -> None:
        """Plans for one launch. The wrapper's pinned buffer is free again once its last upload is through."""
        self._planned.synchronize()
        self.query_rows = len(launch.q_rows)
        self._plan(launch, plan, shape, staging)
        self._planned.record()

    @abstractmethod
    def _plan(self, launch: Launch, plan: Plan, shape: HeadShape, staging: _Staging) -> None: ...

    @abstractmethod
    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """q, out [rows, heads, head_dim]; lse [rows, heads], None where no one merges; k, v: pages, or rows."""


def _common(launch: Launch, plan: Plan, shape: HeadShape) -> dict[str, Any]:
    return {
        "num_qo_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "head_dim_qk": shape.head_dim,
        "causal": launch.mask in (MaskKind.CAUSAL, MaskKind.MULTI_ITEM),
        "sm_scale": shape.scale,
        "window_left": launch.window_left,
        "logits_soft_cap": plan.logits_soft_cap or None,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
        "max_token_per_sequence": int(np.diff(launch.qo_indptr).max()),
    }


class _PagedWrapper(_Wrapper):
    def __init__(self, workspace: Tensor, kernel: Kernel) -> None:
        super().__init__(flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel.value))

    def _plan(self, launch: Launch, plan: Plan, shape: HeadShape, staging: _Staging) -> None:
        kv = launch.kv
        assert isinstance(kv, PagedKv), "the paged wrapper reads pages"
        masks: dict[str, Any] = {}
        if launch.multi_item is not None:
            masks = {
                "prefix_len_ptr": staging.add(launch.multi_item.prefix_len_ptr),
                "token_pos_in_items_ptr": staging.add(launch.multi_item.token_pos_in_items_ptr),
                "token_pos_in_items_len": launch.multi_item.token_pos_in_items_len,
                "max_item_len_ptr": staging.add(launch.multi_item.max_item_len_ptr),
            }
        if launch.mask is MaskKind.CUSTOM:
            masks = {"packed_custom_mask": torch.from_numpy(launch.packed_custom_mask(plan.page_size)).cuda()}
        arrays = (launch.qo_indptr, kv.paged_kv_indptr, kv.paged_kv_indices, kv.paged_kv_last_page_len)
        self._made.plan(
            *(torch.from_numpy(a) for a in arrays), page_size=plan.page_size, **_common(launch, plan, shape), **masks
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        self._made.run(q, (k, v), out=out, lse=lse, return_lse=lse is not None)


class _RaggedWrapper(_Wrapper):
    def __init__(self, workspace: Tensor, kernel: Kernel) -> None:
        super().__init__(flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=kernel.value))

    def _plan(self, launch: Launch, plan: Plan, shape: HeadShape, staging: _Staging) -> None:
        if launch.mask not in (MaskKind.NONE, MaskKind.CAUSAL):
            raise ValueError(f"the ragged wrapper would ignore a {launch.mask} mask: plan it over pages")
        kv = launch.kv
        assert isinstance(kv, RaggedKv), "the ragged wrapper reads no pages"
        self._made.plan(
            torch.from_numpy(launch.qo_indptr), torch.from_numpy(kv.kv_indptr), **_common(launch, plan, shape)
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        self._made.run(q, k, v, out=out, lse=lse, return_lse=lse is not None)


class SingleLaunch:
    """Runs one launch at a time, for measuring: what it prepared last is what runs."""

    def __init__(self, shape: HeadShape) -> None:
        self._shape = shape
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._staging = _Staging()
        self._wrappers: dict[tuple[type[_Wrapper], str], _Wrapper] = {}

    def prepare(self, launch: Launch, plan: Plan, kernel: str) -> Callable[..., None]:
        """The launch, planned: call it with q, k, v, out and lse."""
        if is_fused(launch):
            return self._prepare_fused(launch)
        kind = _PagedWrapper if isinstance(launch.kv, PagedKv) else _RaggedWrapper
        if (kind, kernel) not in self._wrappers:
            self._wrappers[kind, kernel] = kind(self._workspace, Kernel(kernel))
        self._staging.reuse()
        self._wrappers[kind, kernel].plan(launch, plan, self._shape, self._staging)
        self._staging.upload()
        return self._wrappers[kind, kernel].run

    def _prepare_fused(self, launch: Launch) -> Callable[..., None]:
        """Cached keys are taken for rows of the pass: gathering them is timed apart."""
        assert isinstance(launch.kv, RaggedKv), "a fused launch names its keys token by token"
        tokens = 1 + max(int(launch.kv.kv_tokens.max()), int(launch.q_rows.max()))
        none = launch.q_rows[:0]
        self._staging.reuse()
        made = FusedLaunch.of(launch, tokens, np.arange(tokens, dtype=np.int32), none, self._shape, self._staging.add)
        self._staging.upload()
        return lambda q, k, v, out, lse: made.run(q, k, v, (k, v), out)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """One launch as its layers run it.

    wrappers    one, or one for each custom mask, over consecutive parts of `rows`
    rows        query rows
    keys        of a ragged launch, in (cached tokens, rows)
    merge_into  the launch whose results take these in, at `merge_rows` of it
    """

    wrappers: tuple[_Wrapper, ...]
    rows: _Span
    keys: _Span | None
    with_lse: bool
    merge_into: int | None
    merge_rows: _Span | None


class _Flat:
    """K and V in (cached tokens, rows), put together only where a launch needs both."""

    def __init__(self, cached: tuple[Tensor, Tensor] | None, rows: tuple[Tensor, Tensor]) -> None:
        self._cached = cached
        self._rows = rows

    def take(self, span: _Span) -> tuple[Tensor, Tensor]:
        if self._cached is None:
            return span.take(self._rows[0]), span.take(self._rows[1])
        count = len(self._cached[0])
        if span.index is None and span.first + span.count <= count:
            return span.take(self._cached[0]), span.take(self._cached[1])
        if span.index is None and span.first >= count:
            own = _Span(span.first - count, span.count, None)
            return own.take(self._rows[0]), own.take(self._rows[1])
        k, v = (torch.cat([old, new]) for old, new in zip(self._cached, self._rows, strict=True))
        return span.take(k), span.take(v)


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """A plan, planned. runs: by the number of their launch."""

    runs: dict[int, _Run]
    fused: tuple[FusedLaunch, ...]
    append: _Copy | None
    copy: _Copy | None
    cached_slots: Tensor | None
    cached_places: Tensor | None

    def run(self, kv_pages: KvPages, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        held_k, held_v = kv_pages.layer(layer, k, v)
        if self.append is not None:
            self.append.run(k, v, held_k, held_v)
        if self.copy is not None:
            self.copy.run(held_k, held_v, held_k, held_v)
        flat = _Flat(self._cached(held_k, held_v), (k, v))
        out = torch.empty_like(q)
        for own in self.fused:
            own.run(q, k, v, (held_k, held_v), out)
        states = {number: self._launch(run, q, (held_k, held_v), flat, out) for number, run in self.runs.items()}
        for number, run in self.runs.items():
            if run.merge_into is not None and run.merge_rows is not None:
                _merge(states[run.merge_into], *states[number], run.merge_rows)
        for number, run in self.runs.items():
            if run.merge_into is None and run.rows.index is not None:
                run.rows.put(out, states[number][0])
        return out

    def _cached(self, held_k: Tensor, held_v: Tensor) -> tuple[Tensor, Tensor] | None:
        """The cached tokens' K and V one after the other, for launches without pages."""
        if self.cached_slots is None or self.cached_places is None:
            return None
        k, v = (held.new_empty((len(self.cached_slots), *held.shape[2:])) for held in (held_k, held_v))
        copy_rows(held_k, held_v, k, v, self.cached_slots, self.cached_places)
        return k, v

    def _launch(
        self, run: _Run, q: Tensor, paged: tuple[Tensor, Tensor], flat: _Flat, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A launch's results, in place where its rows follow one another and no other launch merges there first."""
        query = run.rows.take(q)
        in_place = run.rows.index is None and run.merge_into is None
        values = run.rows.take(out) if in_place else torch.empty_like(query)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=q.device) if run.with_lse else None
        k, v = paged if run.keys is None else flat.take(run.keys)
        first = 0
        for wrapper in run.wrappers:
            last = first + wrapper.query_rows if len(run.wrappers) > 1 else len(query)
            wrapper.run(query[first:last], k, v, values[first:last], lse)
            first = last
        return values, lse


def _merge(target: tuple[Tensor, Tensor | None], values: Tensor, lse: Tensor | None, rows: _Span) -> None:
    into, into_lse = target
    assert lse is not None, "merged launches tell their log-sum-exp"
    assert into_lse is not None, "merged launches tell their log-sum-exp"
    part, part_lse = rows.take(into), rows.take(into_lse)
    merge_states(part, part_lse, values, lse)
    if rows.index is not None:
        rows.put(into, part)


def merge_states(into: Tensor, into_lse: Tensor, values: Tensor, lse: Tensor) -> None:
    """Attention over both key sets, in place. into, values: [n, heads, head_dim]; the rest [n, heads] in fp32."""
    merge_state_in_place(into, into_lse, values, lse)
