"""Everything that scores, put together from the settings and proved before it serves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
import transformers

from attention.plans import Strategy
from batching.batcher import Batcher, BatcherLimits, Scheduling
from batching.page_pool import PagePool
from batching.prefix_cache import PrefixCache
from batching.select import Measured, Policy, Replayed, Threshold
from batching.shares import FairShares
from batching.trie import Trie
from scorer.beam import MAX_BEAMS, BeamSearcher
from scorer.beam_pages import BeamPages
from scorer.beam_setup import make_steps, no_beams
from scorer.build import build_version
from scorer.config import EMBEDDED, Config, Limits
from scorer.constraints import read_constraints
from scorer.device import Device, load_device, source_of
from scorer.engine import Engine
from scorer.errors import ModelError, ProfileError
from scorer.fingerprint import Checkpoint
from scorer.kv_setup import make_tiers
from scorer.kv_tiers import KvTiers
from scorer.loading import find, tokenizer_place
from scorer.memory import MemoryPlan
from scorer.model import ScoringModel
from scorer.place import Place
from scorer.profile import Profile, builtin_names, load_profile
from scorer.selfcheck import TOLERANCE, check_golden, check_packing
from scorer.sizing import MAX_PASS_ITEMS
from scorer.times import warn_of_others
from scorer.tokenization import Tokenization, load_tokenizer
from scorer.worst_pass import warm_up

log = logging.getLogger(__name__)

EMBEDDED_PROFILE = "smollm2"
FP8_TOLERANCE = 1.0  # log-odds: FP8 moves them by tenths, a document that sees its neighbours by far more


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
    memory: MemoryPlan
    info: ModelInfo
    checkpoint: Checkpoint
    tiers: KvTiers | None = None
    beams: BeamSearcher | None = None
    no_beams: str = ""
    constraints: Mapping[str, Trie] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, config: Config, place: Place | None = None) -> Runtime:
        """Loads and composes; blocks for seconds. place: of rank 0, where there are several. Raises StartError."""
        # The path before the profile, as the likelier mistake; the embedded model after it, as it may take a minute.
        if config.model != EMBEDDED:
            find(config.model, config.allow_download)
        profile = _profile(config)
        source = source_of(config)
        checkpoint = Checkpoint(source)
        device = load_device(config, place, lambda model: _check_head(profile, model))
        model, engine = device.model, device.engine
        limits, policy = _limits(config, profile, model, device.memory), _policy(config, device)
        if config.calibration is not None or isinstance(policy, Measured):
            warn_of_others(device.time_model, model.head_shape, _machine(model))
        checkpoint.look()
        tokenizer = load_tokenizer(tokenizer_place(source), config.allow_download)
        tokenization = Tokenization(tokenizer, profile, limits, model.classes)
        _check_item_end(profile, model, tokenization)
        tiers = make_tiers(config, model, device.kv_pages, source, profile.revision)
        batcher = Batcher(
            engine.execute,
            BatcherLimits(limits.max_pass_tokens, MAX_PASS_ITEMS, config.max_queue_tokens),
            policy,
            PrefixCache(PagePool(device.kept_pages), config.page_size),
            scheduling=Scheduling(
                shares=FairShares(config.tenant_weights), passes_in_flight=1 if device.fast is None else 2
            ),
            salt=profile.revision.encode(),  # the pages are this process's, and so this model's
            tiers=None if tiers is None else (tiers, tiers.rates()),
        )
        return cls(
            config=config,
            profile=profile,
            tokenization=tokenization,
            engine=engine,
            batcher=batcher,
            tiers=tiers,
            beams=_searcher(config, device, batcher),
            no_beams=no_beams(config, model),
            constraints=read_constraints(config.constraints, tokenization.continuation, model.vocabulary),
            eos_ids=model.eos_token_ids,
            limits=limits,
            memory=device.memory,
            checkpoint=checkpoint,
            info=ModelInfo(
                model=EMBEDDED if config.model == EMBEDDED else model.name,
                profile_revision=profile.revision,
                architecture=model.architecture,
                dtype=str(model.dtype).removeprefix("torch."),
                device=str(model.device),
                backend=engine.attention.name,
                vocabulary_size=model.vocabulary,
                strategies=tuple(Strategy),
            ),
        )

    def check(self) -> None:
        """The start's proofs: labels and seams, packed equals alone, golden scores. Blocks. Raises StartError."""
        self.tokenization.prove()
        warm_up(self.engine, self.batcher.policy, self.memory)
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

    def fingerprint(self) -> str:
        """Of all that a score depends on beside rounding. Reads the checkpoint when it is first asked for; blocks."""
        config, limits = self.config, self.limits
        told = (
            self.checkpoint.digest(),
            self.tokenization.fingerprint,
            self.profile.revision,
            self.info.dtype,
            (config.quantization, config.invariant, None if self.tiers is None else config.kv_codec),
            (limits.max_context_tokens, limits.max_request_tokens, limits.max_query_tokens),
            (limits.default_tokens_per_document, limits.max_tokens_per_document),
            (build_version(), transformers.__version__),  # another release may round, or mend, differently
        )
        return blake2b(repr(told).encode(), digest_size=16).hexdigest()

    def close(self) -> None:
        self.engine.close()
        if self.tiers is not None:
            self.tiers.close()


def load_checked(config: Config, place: Place | None = None) -> Runtime:
    """Loads the model and proves it. Raises StartError, also where the GPU's memory does not hold what the limits ask
    for: at the start, where all of it is taken, and not under traffic."""
    try:
        runtime = Runtime.load(config, place)
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


def _limits(config: Config, profile: Profile, model: ScoringModel, memory: MemoryPlan) -> Limits:
    context = memory.context_tokens
    return Limits(
        max_documents=config.max_documents,
        max_request_tokens=config.max_request_tokens,
        max_pass_tokens=memory.pass_tokens,
        max_context_tokens=context,
        cache_tokens=memory.cache_tokens,
        max_query_tokens=min(profile.limits.max_query_tokens, context),
        default_tokens_per_document=min(profile.limits.default_tokens_per_document, context),
        max_tokens_per_document=min(profile.limits.max_tokens_per_document, context),
        max_message_bytes=config.max_message_bytes,
        vocabulary_size=model.vocabulary,
        max_num_beams=0 if no_beams(config, model) else MAX_BEAMS,
        max_beam_tokens=0 if no_beams(config, model) else config.max_beam_tokens,
    )


def _searcher(config: Config, device: Device, batcher: Batcher) -> BeamSearcher | None:
    if no_beams(config, device.model):
        return None
    steps = make_steps(config, device.model, device.kv_pages, device.memory, device.time_model, device.fast)
    return BeamSearcher(
        batcher, device.engine, steps, BeamPages(device.kept_pages, device.beam_pages, config.page_size)
    )


def _policy(config: Config, device: Device) -> Policy:
    """How AUTO chooses."""
    if device.fast is not None:
        return Replayed(only=config.invariant)
    window = _shortest_window(device.model)
    if config.policy == "measured" or (config.policy == "auto" and device.engine.attention.name == "flashinfer"):
        return Measured(device.time_model, window)
    return Threshold(config.multi_item_max_tokens, window)


def _machine(model: ScoringModel) -> str:
    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type


def _shortest_window(model: ScoringModel) -> int | None:
    return min((key.window for key in model.mask_keys if key.window is not None), default=None)
