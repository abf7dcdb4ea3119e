"""Decode plans with FlashInfer's kernels, launch by launch: to hold our own against, and for measuring."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import flashinfer
import numpy as np
import torch
from flashinfer.cascade import merge_state_in_place
from torch import Tensor

from attention.decode import DecodeLaunch, DecodePlan
from attention.plans import HeadShape

WORKSPACE_BYTES = 512 << 20


class RowKernel(StrEnum):
    """What computes requests of one row: the decode kernel on CUDA cores or tensor cores, or the prefill kernel."""

    DECODE = "decode"
    DECODE_TENSOR_CORES = "decode_tc"
    PREFILL = "prefill"


Run = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q, K pool, V pool) -> out


class FlashInferDecode:
    """Plans once, runs many times. The pools are [slots, kv_heads, head_dim]; their K/V is there already."""

    def __init__(self, shape: HeadShape) -> None:
        self._shape = shape
        self._workspaces: list[Tensor] = []

    def prepare(self, plan: DecodePlan, rows: RowKernel, shared: str = "auto") -> Run:
        """shared: FlashInfer's backend for requests of many rows."""
        while len(self._workspaces) < len(plan.launches):
            self._workspaces.append(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"))
        made = [self._launch(i, launch, rows, shared) for i, launch in enumerate(plan.launches)]

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = made[0](q, k, v)
            for launch in made[1:]:
                merge_state_in_place(out, lse, *launch(q, k, v))
            return out

        return run

    def _launch(
        self, number: int, launch: DecodeLaunch, rows: RowKernel, shared: str
    ) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        single = launch.requests == len(launch.q_rows)
        if single and rows is not RowKernel.PREFILL:
            wrapper = self._decode(number, launch, rows is RowKernel.DECODE_TENSOR_CORES)
        else:
            wrapper = self._prefill(number, launch, shared)
        order = np.asarray(launch.q_rows)
        plain = bool((order == np.arange(len(order))).all())
        there = None if plain else torch.from_numpy(order.astype(np.int64)).cuda()
        back = None if plain else torch.from_numpy(np.argsort(order)).cuda()
        size = launch.page_size

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            pages = tuple(x[: len(x) // size * size].view(-1, size, *x.shape[1:]) for x in (k, v))
            out, lse = wrapper.run(q if there is None else q[there], pages, return_lse=True)
            return (out, lse) if back is None else (out[back], lse[back])

        return run

    def _arrays(self, launch: DecodeLaunch) -> tuple[Tensor, ...]:
        kv = launch.kv
        given = (kv.paged_kv_indptr, kv.paged_kv_indices, kv.paged_kv_last_page_len)
        return tuple(torch.from_numpy(np.ascontiguousarray(a)) for a in given)

    def _decode(self, number: int, launch: DecodeLaunch, tensor_cores: bool) -> Any:
        shape = self._shape
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspaces[number], "NHD", use_tensor_cores=tensor_cores
        )
        indptr, indices, last = self._arrays(launch)
        wrapper.plan(
            indptr, indices.cuda(), last, num_qo_heads=shape.heads, num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim, page_size=launch.page_size, sm_scale=shape.scale, q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )  # fmt: skip
        return wrapper

    def _prefill(self, number: int, launch: DecodeLaunch, backend: str) -> Any:
        shape = self._shape
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspaces[number], "NHD", backend=backend)
        wrapper.plan(
            torch.from_numpy(launch.qo_indptr), *self._arrays(launch), num_qo_heads=shape.heads,
            num_kv_heads=shape.kv_heads, head_dim_qk=shape.head_dim, page_size=launch.page_size, causal=False,
            sm_scale=shape.scale, q_data_type=shape.dtype, kv_data_type=shape.dtype,
        )  # fmt: skip
        return wrapper
