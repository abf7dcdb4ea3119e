"""Everything that scores, put together from the settings and proved before it serves."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attention.factory import make
from attention.kv_pages import KvPages
from attention.plans import Strategy
from attention.strategy import Attention
from attention.timing import TimeModel, built_in
from batching.batcher import Batcher, BatcherLimits, Scheduling
from batching.page_pool import PagePool
from batching.prefix_cache import PrefixCache
from batching.select import Measured, Policy, Replayed, Threshold
from batching.shares import FairShares
from scorer.config import EMBEDDED, Config, Limits
from scorer.embedded import embedded_model
from scorer.engine import Engine
from scorer.errors import ConfigError, ModelError, ProfileError
from scorer.fused_model import refusal
from scorer.kv_setup import fingerprint, make_tiers
from scorer.kv_tiers import KvTiers
from scorer.loading import find, load_model, places, tokenizer_place
from scorer.model import ScoringModel
from scorer.profile import Profile, builtin_names, load_profile
from scorer.selfcheck import TOLERANCE, check_golden, check_packing
from scorer.tokenization import Tokenization, load_tokenizer

if TYPE_CHECKING:
    from scorer.fast_path import FastPath

log = logging.getLogger(__name__)

EMBEDDED_PROFILE = "smollm2"
# Cancelling, deadlines and other callers wait for one pass: long enough for the kernels, short enough for them.
PASS_TOKENS = {"cpu": 1024, "cuda": 16_384}
INVARIANT_TOKENS = 4096  # every pass costs as much as a full one
FP8_CAPABILITY = (8, 9)  # Ada and Hopper
FP8_TOLERANCE = 1.0  # log-odds: FP8 moves them by tenths, a document that sees its neighbours by far more
KEY_BLOCK = 64  # keys that the fused kernel takes at a time
MAX_PASS_ITEMS = 1024  # with the tokens of a pass it bounds the pages that a plan may need


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served, as GetModelInfo tells it. profile_revision: of the profile, which hashes itself for it."""

    model: str
    profile_revision: str
    architecture: str
    dtype: str
    device: str
    backend: str
    vocabulary_size: int
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Runtime:
    """A loaded model with its profile, tokenisation, device thread and batcher."""

    config: Config
    profile: Profile
    tokenization: Tokenization
    engine: Engine
    batcher: Batcher
    limits: Limits
    info: ModelInfo
    tiers: KvTiers | None = None

    @classmethod
    def load(cls, config: Config) -> Runtime:
        """Loads and composes; blocks for seconds. Raises StartError."""
        if config.threads:
            torch.set_num_threads(config.threads)
        # The path before the profile, as the likelier mistake; the embedded model after it, as it may take a minute.
        path = None if config.model == EMBEDDED else find(config.model, config.allow_download)
        profile = _profile(config)
        source = str(embedded_model() if path is None else path)
        model = load_model(source, config.dtype, config.device, config.allow_download)
        if model.context_note:
            log.warning("%s", model.context_note)
        _check_head(profile, model)
        limits = _limits(config, profile, model)
        tokenizer = load_tokenizer(tokenizer_place(source), config.allow_download)
        tokenization = Tokenization(tokenizer, profile, limits, model.classes)
        _check_item_end(profile, model, tokenization)
        kept_pages = config.cache_tokens // config.page_size
        time_model = _time_model(config)
        kv_pages = _kv_pages(config, model, limits, kept_pages)
        attention = _attention(config, model, kv_pages, time_model)
        fast = _fast_path(config, model, limits, kv_pages, kept_pages)
        patience = config.max_pass_seconds
        engine = Engine(model, attention, config.page_size, kept_pages, fast=fast, max_pass_seconds=patience)
        identity = b"".join(map(fingerprint, places(source))) + profile.revision.encode()
        tiers = make_tiers(config, model, kv_pages, identity)
        return cls(
            config=config,
            profile=profile,
            tokenization=tokenization,
            engine=engine,
            batcher=Batcher(
                engine.execute,
                BatcherLimits(limits.max_pass_tokens, MAX_PASS_ITEMS, config.max_queue_tokens),
                _policy(config, model, attention, time_model, fast is not None),
                PrefixCache(PagePool(kept_pages), config.page_size),
                scheduling=Scheduling(
                    shares=FairShares(config.tenant_weights), passes_in_flight=1 if fast is None else 2
                ),
                salt=identity,
                tiers=None if tiers is None else (tiers, tiers.rates()),
            ),
            tiers=tiers,
            limits=limits,
            info=ModelInfo(
                model=EMBEDDED if config.model == EMBEDDED else model.name,
                profile_revision=profile.revision,
                architecture=model.architecture,
                dtype=str(model.dtype).removeprefix("torch."),
                device=str(model.device),
                backend=attention.name,
                vocabulary_size=model.vocabulary,
                strategies=tuple(Strategy),
            ),
        )

    def check(self) -> None:
        """The start's proofs: labels and seams, packed equals alone, golden scores. Blocks. Raises StartError."""
        self.tokenization.prove()
        policy, tolerance = self.batcher.policy, self.tolerance
        found = check_packing(self.engine, self.tokenization, self.profile.kind, policy, tolerance)
        log.info("packed equals alone: %s", ", ".join(f"{d.strategy} within {d.score:.2g}" for d in found))
        if self.profile.verified:
            check_golden(self.engine, self.tokenization, self.profile)
        elif self.config.require_golden:
            raise ProfileError(f"profile {self.profile.name} has no golden scores: record them with prefixrank verify")
        else:
            log.warning("profile %s is unverified: it has no golden scores of this checkpoint", self.profile.name)

    @property
    def tolerance(self) -> float:
        """What packed and alone scores may differ in."""
        if self.config.tolerance is not None:
            return self.config.tolerance
        return FP8_TOLERANCE if self.config.quantization == "fp8" else TOLERANCE[self.engine.model.dtype]

    def close(self) -> None:
        self.engine.close()
        if self.tiers is not None:
            self.tiers.close()


def load_checked(config: Config) -> Runtime:
    """Loads the model and proves it. Raises StartError, also where the GPU's memory does not hold what the limits ask
    for: at the start, where all of it is taken, and not under traffic."""
    try:
        runtime = Runtime.load(config)
        try:
            runtime.check()
        except BaseException:
            runtime.close()
            raise
    except torch.OutOfMemoryError as error:
        told = str(error).split(". ")[0]
        raise ModelError(f"{told}: lower --max-pass-tokens or --cache-tokens, or take a smaller model") from None
    return runtime


def _profile(config: Config) -> Profile:
    if config.profile is not None:
        return load_profile(config.profile)
    if config.model == EMBEDDED:
        return load_profile(EMBEDDED_PROFILE)
    raise ProfileError(
        f"model {config.model!r} needs a profile that names its template and labels: add --profile NAME or FILE.toml "
        f"(built in: {', '.join(builtin_names())})"
    )


def _check_head(profile: Profile, model: ScoringModel) -> None:
    """That the profile reads what the checkpoint has: classes, or a vocabulary."""
    if (profile.kind == "classification") != bool(model.classes):
        has = f"classes {', '.join(model.classes[:8])}" if model.classes else "a language-model head"
        raise ProfileError(
            f"profile {profile.name} is of kind {profile.kind}, and {model.architecture} has {has}: "
            f"it needs {'kind classification' if model.classes else 'kind label_logits or query_likelihood'}"
        )


def _check_item_end(profile: Profile, model: ScoringModel, tokenization: Tokenization) -> None:
    """transformers reads classes at the last token that is not the pad token: it must be the item's last."""
    if model.classes and tokenization.item_end == model.pad_token_id:
        raise ProfileError(
            f"profile {profile.name}: items end with the pad token {model.pad_token_id}, and {model.architecture} "
            "reads its classes before padding: let the item end with another token"
        )


def _limits(config: Config, profile: Profile, model: ScoringModel) -> Limits:
    pass_tokens = config.max_pass_tokens or (INVARIANT_TOKENS if config.invariant else PASS_TOKENS[model.device.type])
    longest = config.max_context_tokens or (pass_tokens if model.device.type == "cuda" else model.max_context)
    context = min(model.max_context, longest)
    return Limits(
        max_documents=config.max_documents,
        max_request_tokens=config.max_request_tokens,
        max_pass_tokens=pass_tokens,
        max_context_tokens=context,
        max_query_tokens=min(profile.limits.max_query_tokens, context),
        default_tokens_per_document=min(profile.limits.default_tokens_per_document, context),
        max_tokens_per_document=min(profile.limits.max_tokens_per_document, context),
        max_message_bytes=config.max_message_bytes,
        vocabulary_size=model.vocabulary,
    )


def _kv_pages(config: Config, model: ScoringModel, limits: Limits, kept_pages: int) -> KvPages:
    """Kept pages, and on a GPU scratch pages for what a plan writes during a pass."""
    scratch = 2 * (limits.max_pass_tokens + limits.max_context_tokens) // config.page_size + 2 * MAX_PASS_ITEMS
    return KvPages(kept_pages + (scratch if model.device.type == "cuda" else 0), config.page_size)


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


def _fast_path(
    config: Config, model: ScoringModel, limits: Limits, kv_pages: KvPages, kept_pages: int
) -> FastPath | None:
    """The hand-fused path with its graphs captured, or None with the reason told.

    Raises ConfigError where a setting needs it and it cannot be.
    """
    fp8, invariant = config.quantization == "fp8", config.invariant
    if reason := _no_fast_path(config, model):
        if fp8 or invariant:
            raise ConfigError(f"{'quantization fp8' if fp8 else 'invariant'} needs the hand-fused path: {reason}")
        if model.device.type == "cuda":
            log.warning("no hand-fused path: %s; the model runs by its own modules, operator by operator", reason)
        return None
    from scorer.fast_path import FastPath, Mode

    mode = Mode(fp8, invariant)
    try:
        fast = FastPath(model, kv_pages, kept_pages, limits.max_context_tokens, limits.max_pass_tokens, mode)
        seconds = fast.capture(paged=kept_pages > 0)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # what a compiler says of a GPU that nobody tried is not ours to list
        if fp8 or invariant:
            raise ModelError(f"the hand-fused path does not run on this GPU: {error}") from error
        log.warning("the hand-fused path does not run on this GPU: %s; the model runs by its own modules", error)
        return None
    log.info("hand-fused path: %d CUDA graphs captured in %.1f s", fast.graphs, seconds)
    if fp8:
        log.info("fp8: q, k, v, output, gate, up and down projections of every layer; all else as it is")
    return fast


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


def _policy(config: Config, model: ScoringModel, attention: Attention, time_model: TimeModel, fast: bool) -> Policy:
    """How AUTO chooses."""
    if fast:
        return Replayed(only=config.invariant)
    window = _shortest_window(model)
    if config.policy == "measured" or (config.policy == "auto" and attention.name == "flashinfer"):
        return Measured(time_model, window)
    return Threshold(config.multi_item_max_tokens, window)


def _time_model(config: Config) -> TimeModel:
    if config.calibration is None:
        return built_in()
    try:
        return TimeModel.read(Path(config.calibration).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"calibration {config.calibration}: {error}") from None


def _shortest_window(model: ScoringModel) -> int | None:
    return min((key.window for key in model.mask_keys if key.window is not None), default=None)
