"""What of a server lies on a device: the model, its K/V pages and attention, its engine. Every rank has one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attention.factory import make
from attention.kv_pages import KvPages
from attention.strategy import Attention
from attention.timing import TimeModel
from scorer.beam_setup import beam_pages
from scorer.config import EMBEDDED, Config
from scorer.embedded import embedded_model
from scorer.engine import Engine
from scorer.errors import ConfigError, ModelError, first_line
from scorer.hand_fused import capture, prepare
from scorer.loading import find, load_model
from scorer.memory import MemoryPlan
from scorer.model import ScoringModel
from scorer.place import Place
from scorer.sizing import plan_memory
from scorer.times import load_times

if TYPE_CHECKING:
    from scorer.fast_path import FastPath
    from scorer.parallel import Group

log = logging.getLogger(__name__)

INVARIANT_RANKS = 2  # a + b is b + a; a sum of three depends on its order, and that on the row's place in the pass


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    """kept_pages: of cached prefixes; beam_pages: behind them, of what beams generate. group: the ranks that share the
    model; None: this process has all of it."""

    model: ScoringModel
    memory: MemoryPlan
    kv_pages: KvPages
    kept_pages: int
    beam_pages: int
    time_model: TimeModel
    engine: Engine
    fast: FastPath | None
    group: Group | None


def source_of(config: Config) -> str:
    """The checkpoint's directory or file; the embedded model is converted first. Raises ModelError."""
    return str(embedded_model()) if config.model == EMBEDDED else str(find(config.model, config.allow_download))


def load_device(
    config: Config, place: Place | None = None, check: Callable[[ScoringModel], None] = lambda model: None
) -> Device:
    """Loads and composes; blocks for seconds. place: of this rank, where there are several. check: raises where the
    model is not the one to serve. Raises StartError."""
    if config.threads:
        torch.set_num_threads(config.threads)
    time_model = load_times(config.calibration)  # before the model: a damaged file is told at once
    source = source_of(config)
    group = _join(config, place)
    model = load_model(source, config.dtype, config.device, config.allow_download, config.tensor_parallel)
    if model.context_note:
        log.warning("%s", model.context_note)
    check(model)
    prepared = prepare(config, model, group)
    memory = plan_memory(config, model, None if prepared is None else prepared.needs, group)
    kept_pages = memory.cache_tokens // config.page_size
    of_beams = beam_pages(config, model)
    lasting = kept_pages + of_beams
    kv_pages = KvPages(lasting + memory.scratch_pages, config.page_size)
    attention = _attention(config, model, kv_pages, time_model)
    fast = None if prepared is None else capture(prepared, kv_pages, kept_pages, lasting, memory)
    peers = None if group is None or group.rank else group
    if peers is not None:
        model.tell_alone = peers.alone
    engine = Engine(
        model,
        attention,
        config.page_size,
        lasting,
        fast=fast,
        max_pass_seconds=config.max_pass_seconds,
        peers=peers,
    )
    return Device(model, memory, kv_pages, kept_pages, of_beams, time_model, engine, fast, group)


def _join(config: Config, place: Place | None) -> Group | None:
    """Raises ModelError where the ranks do not find each other, ConfigError for what several of them cannot do."""
    if config.tensor_parallel == 1:
        return None
    if place is None:
        raise ConfigError("tensor_parallel: several GPUs are for prefixrank serve; score on its port")
    if config.kv_host_bytes or config.kv_file or config.kv_remote:
        raise ConfigError("tensor_parallel: the tiers below the cache hold the K/V of one GPU")
    if config.invariant and config.tensor_parallel > INVARIANT_RANKS:
        raise ConfigError(
            f"tensor_parallel: invariant is for {INVARIANT_RANKS} GPUs at most: larger sums vary in order"
        )
    cuda = config.device != "cpu" and torch.cuda.is_available()
    if cuda and (found := torch.cuda.device_count()) <= place.local:
        raise ConfigError(f"tensor_parallel {config.tensor_parallel}: this machine has {found} GPUs")
    from scorer.parallel import Group

    try:
        return Group(place, cuda)
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"tensor_parallel: the ranks do not find each other: {first_line(error)}") from error


def _attention(config: Config, model: ScoringModel, kv_pages: KvPages, time_model: TimeModel) -> Attention:
    """The backend asked for; under 'auto' FlashInfer where it can, and torch with the reason told where it cannot."""
    if config.attention == "flashinfer" or (config.attention == "auto" and model.device.type == "cuda"):
        try:
            return make("flashinfer", kv_pages, model.head_shape, time_model)
        except ValueError as error:
            if config.attention == "flashinfer":
                raise ModelError(f"--attention flashinfer: {error}") from None
            log.warning("attention runs on torch: %s", error)
    return make("torch", kv_pages)
