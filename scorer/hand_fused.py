"""Whether the model takes the hand-fused path, and its start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

import torch

from attention.kv_pages import KvPages
from scorer.config import Config
from scorer.errors import ConfigError, ModelError
from scorer.fused_model import FusedModel, refusal
from scorer.memory import FusedNeeds, MemoryPlan
from scorer.model import ScoringModel
from scorer.quantized import EXCLUDED_LAYERS
from scorer.sizing import fused_growth, most_pass_tokens

if TYPE_CHECKING:
    from scorer.fast_path import FastPath, Mode
    from scorer.parallel import Group

log = logging.getLogger(__name__)
T = TypeVar("T")

FP8_CAPABILITY = (8, 9)  # Ada and Hopper
KEY_BLOCK = 64  # keys that the fused kernel takes at a time


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The path before its graphs. demanded: by a setting, or by the other ranks, which have it: without it the service
    does not start. leads: of several ranks it is the one that tells."""

    model: ScoringModel
    fused: FusedModel
    mode: Mode
    needs: FusedNeeds
    demanded: bool
    leads: bool


def prepare(config: Config, model: ScoringModel, group: Group | None = None) -> Prepared | None:
    """The path with its weights, tried on a few rows, or None with the reason told: a warning where a GPU could do
    more.

    group: the ranks that share the model; they have the path all or none. Raises ConfigError where a setting needs the
    path and it cannot be, ModelError where some ranks could and others not.
    """
    fp8, invariant, leads = config.quantization == "fp8", config.invariant, group is None or not group.rank
    if reason := _on_all(_no_fast_path(config, model), group):
        if fp8 or invariant:
            raise ConfigError(f"{'quantization fp8' if fp8 else 'invariant'} needs the hand-fused path: {reason}")
        if leads:
            level = logging.WARNING if model.device.type == "cuda" else logging.INFO
            told = "no hand-fused path: %s; the model runs by its own modules, operator by operator"
            log.log(level, told, reason)
        return None
    from scorer.fast_path import FastPath, Mode

    mode, demanded = Mode(fp8, invariant), fp8 or invariant or group is not None
    summed = None if group is None else group.sum

    def made() -> Prepared:
        fused = FusedModel(model, min(config.max_context_tokens or model.max_context, model.max_context), fp8, summed)
        graphs, static = FastPath.sizes(model, most_pass_tokens(config, model), mode)
        return Prepared(model, fused, mode, FusedNeeds(fused_growth(model, fused), graphs, static), demanded, leads)

    return _tried(made, mode, demanded)


def capture(
    prepared: Prepared, kv_pages: KvPages, kept_pages: int, lasting: int, memory: MemoryPlan
) -> FastPath | None:
    """The path with its graphs captured, or None with the reason told. kept_pages: of cached prefixes; lasting: pages
    with ids below it outlive a pass."""
    from scorer.fast_path import FastPath

    def made() -> FastPath:
        fast = FastPath(
            prepared.model,
            kv_pages,
            lasting,
            memory.context_tokens,
            memory.pass_tokens,
            prepared.mode,
            prepared.fused,
        )
        seconds = fast.capture(paged=kept_pages > 0)
        if prepared.leads:
            log.info("hand-fused path: %d CUDA graphs captured in %.1f s", fast.graphs, seconds)
        return fast

    fast = _tried(made, prepared.mode, prepared.demanded)
    if fast is not None and prepared.mode.fp8 and prepared.leads:
        left = ", ".join(map(str, range(EXCLUDED_LAYERS)))
        log.info("fp8: q, k, v, output, gate, up and down projections of all layers but %s; all else as it is", left)
    return fast


def _tried(make: Callable[[], T], mode: Mode, demanded: bool) -> T | None:
    try:
        return make()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # what a compiler says of a GPU that nobody tried is not ours to list
        if demanded:
            raise ModelError(f"the hand-fused path does not run on this GPU: {error}{_way_out(mode)}") from error
        log.warning("the hand-fused path does not run on this GPU: %s; the model runs by its own modules", error)
        return None


def _way_out(mode: Mode) -> str:
    """What to do without the path, where it can be done without."""
    return "" if mode.fp8 or mode.invariant else "; --compile off runs the model by its own modules"


def _on_all(reason: str, group: Group | None) -> str:
    """Why no rank has the path; empty where all have it. Raises ModelError, on all of them, where they differ."""
    reasons = [reason] if group is None else group.gathered(reason)
    if any(reasons) and not all(reasons):
        rank = next(rank for rank, told in enumerate(reasons) if told)
        raise ModelError(f"tensor_parallel: rank {rank} has no hand-fused path and others have: {reasons[rank]}")
    return reason


def _no_fast_path(config: Config, model: ScoringModel) -> str:
    """Why there is none; empty where there is one."""
    if model.device.type != "cuda":
        return "it runs on an NVIDIA GPU"
    if config.compile == "off":
        return "--compile off"
    if config.policy != "auto":
        return f"--policy {config.policy} chooses among the other strategies"
    if config.invariant and config.page_size % KEY_BLOCK:
        return f"invariant wants pages that are whole blocks of keys: --page-size {KEY_BLOCK}"
    if config.quantization == "fp8" and torch.cuda.get_device_capability(model.device) < FP8_CAPABILITY:
        return "FP8 products need compute capability 8.9"
    if find_spec("triton") is None:
        return "Triton is not installed"
    return refusal(model)
