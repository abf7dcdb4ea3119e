"""Packed equals alone, on the user's own model: at every start, and in `prefixrank verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from attention.plans import WINDOWLESS, Strategy
from batching.items import Item, Items
from batching.packing import Group, pack, unpack
from batching.select import Policy, may_take
from batching.types import Scored, TokenizedRequest
from prefixrank.v1 import scorer_pb2 as pb
from scorer.engine import Engine
from scorer.errors import InvalidRequest, ModelError, ProfileError
from scorer.heads import Kind, verdict
from scorer.model import ScoringModel

if TYPE_CHECKING:
    from scorer.profile import Profile
    from scorer.tokenization import Tokenization

# What one-document-at-a-time and packed scores may differ in, in log-odds or mean log-probability: the order of sums.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 3e-1}

QUERIES = ("how do I reset my password", "what is the capital of France?")
DOCUMENTS = (
    "Open the settings, choose security, then reset password.",
    "The capital of France is Paris.",
    "Seven ways to cook rice: boil it, steam it, fry it.",
    "1 2 3 4 5 6 7",
    "密码重置：打开设置。🙂",
    "x",
    "Paris is a city on the Seine. " * 4,
    "To change a forgotten password, follow the link that we send to your address. " * 6,
)
_RAISE = "raise max_context_tokens or max_request_tokens, or the profile's limits"
START_DOCUMENTS = (*DOCUMENTS[:2], *DOCUMENTS[4:7])  # short, unusual, and longer than a tile: every start takes them


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one strategy is from transformers one document at a time.

    score   largest difference of scores (log-odds, label logit or mean log-probability)
    logit   largest difference of the logits that were read
    """

    strategy: Strategy
    score: float
    logit: float
    documents: int


def sample_requests(
    tokenization: Tokenization, queries: Sequence[str] = QUERIES, documents: Sequence[str] = DOCUMENTS
) -> list[TokenizedRequest]:
    """A few queries with short and long, plain and awkward documents, cut to what the profile takes.

    Raises ModelError where the limits take none: over no document at all every strategy would be exact.
    """
    made = [sample for query in queries if (sample := _sample(tokenization, query, documents)) is not None]
    if not made:
        raise ModelError(f"the limits let none of the sample documents through: {_RAISE}")
    return made


def _sample(tokenization: Tokenization, query: str, documents: Sequence[str]) -> TokenizedRequest | None:
    """The documents that the limits let through behind one query, asked for one by one: some limits are small."""
    found: list[TokenizedRequest] = []
    for text in documents:
        request = pb.ScoreRequest(query=pb.QueryPrefix(text=query), documents=[pb.Document(text=text)])
        if (tokenized := _tokenized(tokenization, request)) is not None:
            found.append(tokenized)
    return replace(found[0], items=Items.of(one.items[0] for one in found)) if found else None


def alone(model: ScoringModel, request: TokenizedRequest, item: Item) -> Scored:
    """[prefix, item] through transformers' own forward, its own attention, read at the same places."""
    keep = len(item.ids) - int(item.read_offsets.min())
    logits = model.alone(np.concatenate([request.prefix, item.ids]), keep)
    logits = logits[keep - len(item.ids) + item.read_offsets].float()
    lse = torch.logsumexp(logits, dim=-1).cpu().numpy() if request.normalize else None
    read = torch.gather(logits, 1, torch.from_numpy(item.read_ids.astype(np.int64)).to(logits.device))
    return Scored(read.cpu().numpy(), lse, Strategy.NAIVE)


def packed(engine: Engine, request: TokenizedRequest, strategy: Strategy) -> list[Scored]:
    """All items in one pass of the engine, on the calling thread."""
    count = len(request.items)
    batch = pack([Group(request, tuple(range(count)), (strategy,) * count)])
    return unpack(batch, engine.run(batch))[0]


def deviation(
    engine: Engine, requests: Sequence[tuple[TokenizedRequest, Sequence[Scored]]], strategy: Strategy, kind: Kind
) -> Deviation:
    """The largest differences over requests that come with their scores alone."""
    score = logit = 0.0
    for request, expected in requests:
        for got, want in zip(packed(engine, request, strategy), expected, strict=True):
            score = max(score, _difference(_score(got, kind), _score(want, kind)))
            logit = max(logit, _difference(got.logits, want.logits))
    return Deviation(strategy, score, logit, sum(len(request.items) for request, _ in requests))


def _difference(a: object, b: object) -> float:
    """Largest absolute difference; NaN counts as infinitely far."""
    worst = float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)), initial=0.0))
    return worst if np.isfinite(worst) else float("inf")


def _score(scored: Scored, kind: Kind) -> float:
    score = verdict(scored, kind).score
    return float("nan") if score is None else score


def check_packing(
    engine: Engine, tokenization: Tokenization, kind: Kind, policy: Policy, tolerance: float | None
) -> list[Deviation]:
    """Every strategy that AUTO may take, on samples. Raises ModelError where one is off or scores are constant."""
    allowed = TOLERANCE[engine.model.dtype] if tolerance is None else tolerance
    samples = sample_requests(tokenization, QUERIES[:1], START_DOCUMENTS)
    requests = [(request, alone_all(engine.model, request)) for request in samples]
    _refuse_constant([scored for _, expected in requests for scored in expected], kind)
    strategies = [s for s in may_take(policy) if s not in WINDOWLESS or policy.window is None]
    found = [deviation(engine, requests, strategy, kind) for strategy in strategies]
    for strategy in found:
        if strategy.score > allowed:
            raise ModelError(
                f"{engine.model.architecture}: {strategy.strategy} differs from transformers one document at a time by "
                f"{strategy.score:.3g}, more than {allowed:g}: this model cannot be packed exactly"
            )
    return found


def alone_all(model: ScoringModel, request: TokenizedRequest) -> list[Scored]:
    """Every item of a request through transformers' own forward, one at a time."""
    return [alone(model, request, item) for item in request.items]


def _refuse_constant(scored: Sequence[Scored], kind: Kind) -> None:
    scores = np.array([_score(s, kind) for s in scored])
    if not np.isfinite(scores).all():
        raise ModelError(
            f"the model gives {int((~np.isfinite(scores)).sum())} of {len(scores)} samples no finite score"
        )
    if np.ptp(scores) < 1e-3:
        raise ModelError(
            f"all {len(scores)} samples score {scores[0]:.4f}: the labels or the template do not fit this checkpoint"
        )


def golden_scores(
    engine: Engine, tokenization: Tokenization, pairs: Sequence[tuple[str, str]], kind: Kind
) -> list[float]:
    """The scores of (query, document) pairs, each in a pass of its own, on the calling thread."""
    scores = []
    for query, document in pairs:
        request = pb.ScoreRequest(query=pb.QueryPrefix(text=query), documents=[pb.Document(text=document)])
        tokenized = _tokenized(tokenization, request)
        if tokenized is None:
            pair = f"({query[:40]!r}, {document[:40]!r})"
            raise ProfileError(f"the limits do not let the golden pair {pair} through: {_RAISE}")
        scores.append(_score(packed(engine, tokenized, Strategy.DIRECT_RAGGED)[0], kind))
    return scores


def _tokenized(tokenization: Tokenization, request: pb.ScoreRequest) -> TokenizedRequest | None:
    """A request of one document, None where the limits refuse it."""
    try:
        return tokenization.tokenize(request).request
    except InvalidRequest:
        return None


def check_golden(engine: Engine, tokenization: Tokenization, profile: Profile) -> None:
    """Raises ProfileError where a golden score is not met."""
    pairs = [(golden.query, golden.document) for golden in profile.golden]
    allowed = profile.golden_tolerance + (0.0 if engine.model.dtype is torch.float32 else TOLERANCE[engine.model.dtype])
    for golden, score in zip(profile.golden, golden_scores(engine, tokenization, pairs, profile.kind), strict=True):
        if not abs(score - golden.score) <= allowed:
            raise ProfileError(
                f"profile {profile.name}: golden pair ({golden.query[:40]!r}, {golden.document[:40]!r}) scored "
                f"{score:.4f}, expected {golden.score:.4f} within {allowed:g}: not this checkpoint, or not its template"
            )
