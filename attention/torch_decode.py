"""Decode steps with plain torch: on a CPU, in tests, and where there is no faster way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention.decode import Decode, DecodeLaunch, DecodePlan
from attention.kv_pages import KvPages
from attention.layout import Ints
from attention.plans import MaskKey
from attention.strategy import Attend

BLOCK = 1 << 18  # (row, key) pairs of one head that are scored at a time


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Rows that attend to the same keys, for several such sets at once: rows [g, r], slots [g, n]."""

    rows: Tensor
    slots: Tensor


class TorchDecode:
    """Exact attention of a decode step over paged K/V, by any plan."""

    name = "torch"

    def __init__(self, kv_pages: KvPages) -> None:
        self._kv_pages = kv_pages

    def begin(self, step: Decode, plans: Mapping[MaskKey, DecodePlan]) -> Attend:
        """Prepares one step, once for all of its layers; the answer is called layer after layer."""
        blocks = {key: [b for launch in plan.launches for b in _blocks(launch)] for key, plan in plans.items()}
        write = _index(step.write_slots)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, key: MaskKey) -> Tensor:
            self._kv_pages.write(layer, write.to(k.device), k, v)
            return self._run(layer, blocks[key], q, v.shape[-1], scale, key.soft_cap)

        return attend

    def _run(self, layer: int, blocks: list[_Block], q: Tensor, width: int, scale: float, cap: float) -> Tensor:
        """[n, heads, width]: a beam's blocks, merged by their log-sum-exp."""
        out = torch.zeros(*q.shape[:2], width, dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        for block in blocks:
            rows, slots = block.rows.to(q.device), block.slots.to(q.device)
            k, v = (x.view(*slots.shape, *x.shape[1:]) for x in self._kv_pages.read(layer, slots.flatten()))
            one, one_lse = _attention(q[rows], k, v, scale, cap)
            flat, own = rows.flatten(), one_lse.flatten(0, 1)
            merged = torch.logaddexp(lse[flat], own)
            old, new = (torch.exp(part - merged).unsqueeze(-1) for part in (lse[flat], own))
            out[flat] = out[flat] * old + one.flatten(0, 1) * new
            lse[flat] = merged
        return out.to(q.dtype)


def _blocks(launch: DecodeLaunch) -> Iterator[_Block]:
    """The launch's requests, as many at a time as BLOCK allows; those with different numbers of rows one by one."""
    slots, sizes = launch.slots(), np.diff(launch.qo_indptr)
    if (sizes == sizes[0]).all():
        rows = launch.q_rows.reshape(launch.requests, -1)
        yield from _even(rows, slots)
        return
    for g, (begin, end) in enumerate(zip(launch.qo_indptr[:-1], launch.qo_indptr[1:], strict=True)):
        yield from _even(launch.q_rows[None, begin:end], slots[g : g + 1])


def _even(rows: Ints, slots: Ints) -> Iterator[_Block]:
    """rows [g, r], slots [g, n]"""
    keys = slots.shape[1]
    most_rows = max(1, BLOCK // keys)
    most_groups = max(1, most_rows // rows.shape[1])
    for g in range(0, len(rows), most_groups):
        for r in range(0, rows.shape[1], most_rows):
            yield _Block(_index(rows[g : g + most_groups, r : r + most_rows]), _index(slots[g : g + most_groups]))


def _index(array: Ints) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float) -> tuple[Tensor, Tensor]:
    """q [g, r, heads, d] on k [g, n, kv_heads, d] and v, without a mask, in fp32.

    Returns [g, r, heads, width of v] and the log-sum-exp [g, r, heads].
    """
    g, r, heads, _ = q.shape
    kv_heads = k.shape[2]
    query = q.view(g, r, kv_heads, heads // kv_heads, -1).transpose(1, 2).flatten(2, 3).float()
    scores = query @ k.permute(0, 2, 3, 1).float() * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    lse = scores.logsumexp(dim=-1)
    out = torch.exp(scores - lse.unsqueeze(-1)) @ v.transpose(1, 2).float()
    shape = (g, kv_heads, r, heads // kv_heads)
    return (
        out.view(*shape, -1).transpose(1, 2).reshape(g, r, heads, -1),
        lse.view(shape).transpose(1, 2).reshape(g, r, heads),
    )
