"""What the loaded model takes on its device, and the limits that fit there."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from torch import Tensor

from attention.plans import MaskKey
from scorer.beam_setup import beam_bytes
from scorer.config import Config
from scorer.fused_model import FusedModel
from scorer.live_bytes import ROWS, growth
from scorer.memory import SMALLEST_PASS, Asked, FusedNeeds, Growth, MemoryPlan, Needs, Wanted, fit
from scorer.model import HEAD_ROWS, HEAD_TOKENS, ScoringModel
from scorer.probe import LayerShape

if TYPE_CHECKING:
    from scorer.parallel import Group

log = logging.getLogger(__name__)

# Cancelling, deadlines and other callers wait for one pass: long enough for the kernels, short enough for them.
PASS_TOKENS = {"cpu": 1024, "cuda": 16_384}
INVARIANT_TOKENS = 4096  # every pass costs as much as a full one
CACHE_TOKENS = {"cpu": 16_384, "cuda": 1 << 19}  # more prefixes than that are seldom worth their memory
MAX_PASS_ITEMS = 1024  # with the tokens of a pass it bounds the pages that a plan may need
LEAST_CONTEXT = 512
WORKSPACE = 384 << 20  # FlashInfer's, and index arrays
PLAIN_ROWS = 256  # query rows that attention without a kernel takes at a time
CGROUP = Path("/sys/fs/cgroup")


def plan_memory(
    config: Config, model: ScoringModel, fused: FusedNeeds | None, group: Group | None = None
) -> MemoryPlan:
    """The limits that this process serves with. Raises ConfigError where those asked for do not fit.

    fused: what the hand-fused path takes, if there is one. group: ranks that serve with the same limits.
    """
    needs = needs_of(config, model, fused)
    free = free_bytes(model.device)
    if group is not None:
        free = group.least(free if model.device.type == "cuda" else free // group.count)
    plan = fit(needs.weights + int(config.memory_fraction * free), needs, _wanted(config, model))
    if group is not None:
        plan = group.agreed(plan)
        if group.rank:
            return plan  # rank 0 tells it
    limits = (plan.pass_tokens, plan.context_tokens, plan.cache_tokens)
    log.info("memory: passes of %d tokens, contexts of %d, %d cached; %s", *limits, plan.told())
    return plan


def needs_of(config: Config, model: ScoringModel, fused: FusedNeeds | None = None) -> Needs:
    """What the model takes, measured and counted."""
    on_gpu = model.device.type == "cuda"
    eager, graphs, static = [plain_growth(model)], Growth(), 0
    if fused is not None:
        eager.append(fused.growth)
        graphs, static = replace(fused.growth, fixed=fused.growth.fixed + fused.graphs, key=0), fused.static
    kv_token = sum(_kv_bytes(layer, model.dtype) for layer in model.layers)
    return Needs(
        weights=_held(model),
        eager=tuple(eager),
        graphs=graphs,
        kv_token=kv_token,
        page_size=config.page_size,
        workspace=(WORKSPACE if on_gpu else 0) + static + beam_bytes(config, model, kv_token),
        scratch=(2.0, 2 * MAX_PASS_ITEMS) if on_gpu else (0.0, 0),
    )


def most_pass_tokens(config: Config, model: ScoringModel) -> int:
    """Of a pass, where memory allows it."""
    if config.max_pass_tokens:
        return config.max_pass_tokens
    return INVARIANT_TOKENS if config.invariant else PASS_TOKENS[model.device.type]


def _wanted(config: Config, model: ScoringModel) -> Wanted:
    kind, most = model.device.type, most_pass_tokens(config, model)
    context = Asked("--max-context-tokens", config.max_context_tokens or None, model.max_context, LEAST_CONTEXT)
    return Wanted(
        pass_tokens=Asked("--max-pass-tokens", config.max_pass_tokens or None, most, SMALLEST_PASS),
        context_tokens=None if kind == "cuda" and not config.max_context_tokens else context,
        cache_tokens=Asked("--cache-tokens", config.cache_tokens, CACHE_TOKENS[kind]),
        model_context=model.max_context,
    )


def plain_growth(model: ScoringModel) -> Growth:
    """A pass by the model's own modules: they are measured on a few rows, attention and head are counted."""
    ids = np.arange(ROWS, dtype=np.int32) % model.vocabulary
    chunk = model.chunks.rows

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, key: MaskKey) -> Tensor:
        return q.new_zeros(*q.shape[:2], v.shape[-1])

    def run(rows: int, chunk_rows: int) -> None:
        model.chunks.rows = chunk_rows
        model.forward(ids[:rows], np.arange(rows, dtype=np.int32), ids[:1], attend)

    try:
        found = growth(run, chunk)
    finally:
        model.chunks.rows = chunk
    attention = [_attention_growth(layer, model) for layer in model.layers]
    return replace(
        found,
        fixed=_head_bytes(model),
        row=found.row + max(a.row for a in attention) + model.width * model.dtype.itemsize,
        key=max(a.key for a in attention),
    )


def fused_growth(model: ScoringModel, fused: FusedModel) -> Growth:
    """A pass by the hand-fused path, with every row read."""
    ids = torch.zeros(ROWS, dtype=torch.int32, device=model.device)
    places = torch.arange(ROWS, dtype=torch.int32, device=model.device)
    chunk = fused.chunk_rows

    def run(rows: int, chunk_rows: int) -> None:
        fused.chunk_rows = chunk_rows
        fused.forward(ids[:rows], places[:rows], places[:rows], lambda _, q, k, v: q.new_zeros(q.shape))

    try:
        found = growth(run, chunk)
    finally:
        fused.chunk_rows = chunk
    outputs = model.width * (model.dtype.itemsize + torch.float32.itemsize)
    cached = 2 * fused.kv_heads * fused.head_dim * model.dtype.itemsize  # one after the other, for the kernel
    return replace(found, fixed=_head_bytes(model), row=found.row + outputs, key=cached)


def _attention_growth(layer: LayerShape, model: ScoringModel) -> Growth:
    """What the plain torch attention takes, which of all takes most: rows side by side and padded, in fp32 where no
    kernel takes them."""
    size, single = model.dtype.itemsize, torch.float32.itemsize
    kv = layer.kv_heads * (layer.head_dim + layer.value_dim)
    wide = layer.heads * (layer.head_dim + layer.value_dim)
    scores = 4 * PLAIN_ROWS * single
    padded = 2 * wide * size
    if model.device.type != "cpu" or layer.mask_key.soft_cap:
        padded += wide * single + layer.heads * scores
    row = padded * 5 // 4 + layer.heads * layer.value_dim * (2 * single + size)
    group = layer.heads // layer.kv_heads
    return Growth(row=row, key=2 * kv * size + kv * single + layer.kv_heads * scores + 2 * group * PLAIN_ROWS)


def _head_bytes(model: ScoringModel) -> int:
    tokens = min(HEAD_TOKENS, model.head_rows)
    return torch.float32.itemsize * (tokens * model.width + 4 * HEAD_ROWS * (tokens + model.width))


def _kv_bytes(layer: LayerShape, dtype: torch.dtype) -> int:
    return layer.kv_heads * (layer.head_dim + layer.value_dim) * dtype.itemsize


def _held(model: ScoringModel) -> int:
    """Bytes of the weights, each storage once; on a GPU of all that was allocated."""
    if model.device.type == "cuda":
        return torch.cuda.memory_allocated(model.device)
    held = [_storage(parameter) for parameter in model.hf.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def _storage(parameter: Any) -> torch.UntypedStorage:
    """Of this rank's shard, where the parameter is distributed, as experts are."""
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.untyped_storage()


def free_bytes(device: torch.device) -> int:
    """Of the device; on a CPU of the machine, or of its container where that has less."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    available = int(psutil.virtual_memory().available)
    inside = container_free(CGROUP)
    return available if inside is None else min(available, inside)


def container_free(root: Path) -> int | None:
    """What a container's own limit leaves (cgroup v2, else v1); None where it has none. Clean file pages count as
    free."""
    for limit, used, stat, clean in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            most, held = (root / limit).read_text().strip(), int((root / used).read_text())
            told = dict(line.split() for line in (root / stat).read_text().splitlines())
        except (OSError, ValueError):
            continue
        return None if most == "max" else max(0, int(most) - held + int(told.get(clean, 0)))
    return None
