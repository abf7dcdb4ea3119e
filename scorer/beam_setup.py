"""What beam search takes of a service, and the steps that it gets there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from attention.kv_pages import KvPages
from attention.timing import TimeModel
from scorer.beam import MAX_BEAMS
from scorer.beam_steps import ModelSteps, Steps
from scorer.config import Config
from scorer.memory import MemoryPlan
from scorer.model import ScoringModel

if TYPE_CHECKING:
    from scorer.fast_path import FastPath

log = logging.getLogger(__name__)

LOGITS_HELD = 3  # a step's logits, and what is computed from them before they go


def no_beams(config: Config, model: ScoringModel) -> str:
    """Why there is no beam search; empty where there is one."""
    if model.classes:
        return f"{model.architecture} has no language-model head: it cannot generate"
    if not config.max_beam_tokens:
        return "the service was started without room for beams: max_beam_tokens is 0"
    if config.cache_tokens is not None and config.cache_tokens < config.page_size:
        return f"beams share their prompt's pages in the prefix cache: cache_tokens is {config.cache_tokens}"
    if config.tensor_parallel > 1:
        return "beam steps run on one GPU: tensor_parallel is set"
    return ""


def beam_pages(config: Config, model: ScoringModel) -> int:
    """Pages of the beams' own K/V."""
    return 0 if no_beams(config, model) else -(-config.max_beam_tokens // config.page_size)


def beam_bytes(config: Config, model: ScoringModel, kv_token: int) -> int:
    """What searches take beside passes: their K/V and, at the widest step, logits of the whole vocabulary."""
    pages = beam_pages(config, model)
    widest = min(MAX_BEAMS, config.max_beam_tokens)
    logits = LOGITS_HELD * widest * model.head_rows * torch.float32.itemsize
    return pages * config.page_size * kv_token + (logits if pages else 0)


def captured_steps(
    config: Config, model: ScoringModel, kv_pages: KvPages, memory: MemoryPlan, time_model: TimeModel, fast: FastPath
) -> Steps:
    """Steps by the hand-fused layers. Raises whatever compiling and capturing them raises."""
    from scorer.fast_beams import FastBeams

    history = config.max_beam_tokens + 2 * MAX_BEAMS
    beams = FastBeams(model, fast.fused, kv_pages, memory.context_tokens, history, time_model.decode.choose)
    seconds = beams.capture()
    log.info("beam steps: %d CUDA graphs captured in %.1f s", beams.graphs, seconds)
    return beams


def make_steps(
    config: Config,
    model: ScoringModel,
    kv_pages: KvPages,
    memory: MemoryPlan,
    time_model: TimeModel,
    fast: FastPath | None,
    captured: Callable[..., Steps] = captured_steps,
) -> Steps:
    """The beams' steps: captured where there is the hand-fused path and the GPU takes them, else by the model's
    modules."""
    if fast is not None:
        try:
            return captured(config, model, kv_pages, memory, time_model, fast)
        except torch.OutOfMemoryError:
            raise  # passes would meet it later
        except Exception as error:  # noqa: BLE001  a compiler, a driver: scoring does not depend on it
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            log.warning("beam steps are not captured and run module by module, which is slower: %s", why)
    return ModelSteps(model, kv_pages)
