"""The answers on the wire, built from what tokenisation and batcher give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attention.plans import Strategy
from batching.types import RequestScores, Scored
from prefixrank.v1 import scorer_pb2 as pb
from scorer.heads import Kind, Verdict, reads_apart, verdict
from scorer.tokenized import DocumentTokens, Label, Status, Tokenized

if TYPE_CHECKING:
    from scorer.runtime import Runtime

# Looked up for every document, so once.
STATUSES = {status: pb.DocumentStatus.Value(f"DOCUMENT_STATUS_{status.name}") for status in Status}
STRATEGIES = {strategy: pb.Strategy.Value(f"STRATEGY_{strategy.name}") for strategy in Strategy}


def document_results(
    request: pb.ScoreRequest, tokenized: Tokenized, scores: RequestScores | None, kind: Kind
) -> list[pb.DocumentResult]:
    """One result a document, in the request's order."""
    score_kind, outputs = _score_kind(kind, tokenized.labels), request.options.outputs
    wanted = outputs.label_logits, outputs.vocabulary_probabilities
    results = []
    for document in tokenized.documents:
        if scores is None or document.item is None:
            results.append(_result(document, STATUSES[document.status], document.message))
        elif (scored := scores.scored[document.item]) is None:
            results.append(_result(document, pb.DOCUMENT_STATUS_DEADLINE, "the deadline came before its turn"))
        else:
            results.append(_scored(document, scored, score_kind, verdict(scored, kind), tokenized.labels, wanted))
    return results


def per_document(tokenized: Tokenized, scores: RequestScores) -> RequestScores:
    """Scores by document, where one item held them all."""
    if not tokenized.listwise:
        return scores
    reason = f"listwise, each document sees those before it: {scores.reason}"
    whole, count = scores.scored[0], sum(document.item is not None for document in tokenized.documents)
    return replace(scores, scored=(None,) * count if whole is None else tuple(reads_apart(whole)), reason=reason)


def _result(
    document: DocumentTokens, status: pb.DocumentStatus.ValueType, message: str, **more: Any
) -> pb.DocumentResult:
    """more: fields of a scored document, set in the one call that makes it."""
    return pb.DocumentResult(
        id=document.id,
        index=document.index,
        status=status,
        message=message,
        tokens=document.tokens,
        document_tokens=document.document_tokens,
        original_document_tokens=document.original_document_tokens,
        truncated=document.truncated,
        **more,
    )


def _scored(
    document: DocumentTokens,
    scored: Scored,
    score_kind: pb.ScoreKind.ValueType,
    given: Verdict,
    labels: Sequence[Label],
    outputs: tuple[bool, bool],
) -> pb.DocumentResult:
    """outputs: whether label logits, and whether probabilities over the vocabulary, were asked for."""
    if not given.finite:
        told = "the model gave NaN or infinity for this document"
        return _result(document, pb.DOCUMENT_STATUS_NUMERIC_ERROR, told, strategy=STRATEGIES[scored.strategy])
    assert given.score is not None, "a finite verdict has a score"
    result = _result(
        document,
        STATUSES[document.status],
        document.message,
        strategy=STRATEGIES[scored.strategy],
        score=given.score,
        score_kind=score_kind,
        log_odds=given.log_odds,  # None leaves a field out
        probability=given.probability,
    )
    if outputs[0] or outputs[1]:
        result.label_logits.extend(_label_scores(given, labels, outputs[1]))
    return result


def _label_scores(given: Verdict, labels: Sequence[Label], vocabulary: bool) -> Iterable[pb.LabelScore]:
    for i, (label, logit) in enumerate(zip(labels, given.label_logits, strict=True)):
        probability = given.vocabulary_probabilities[i] if vocabulary else None
        yield pb.LabelScore(label=label.text, token_id=label.token_id, logit=logit, vocabulary_probability=probability)


def score_response(
    request: pb.ScoreRequest,
    runtime: Runtime,
    tokenized: Tokenized,
    scores: RequestScores | None,
    results: Sequence[pb.DocumentResult],
) -> pb.ScoreResponse:
    """The reply but for its own timings."""
    response = pb.ScoreResponse(
        request_id=request.request_id,
        results=_best(results, request.options.top_n) if request.options.top_n else results,
        usage=_usage(tokenized, scores, results),
        model=runtime.info.model,
        profile=runtime.profile.name,
        profile_revision=runtime.info.profile_revision,
    )
    if scores is None:
        response.strategy.reason = "no document could be scored"
        return response
    response.passes = scores.passes
    response.strategy.CopyFrom(_choice(scores.scored, scores.reason))
    response.timings.queue_seconds = scores.queue_seconds
    response.timings.plan_seconds = scores.plan_seconds
    response.timings.forward_seconds = scores.forward_seconds
    return response


def _best(results: Sequence[pb.DocumentResult], n: int) -> list[pb.DocumentResult]:
    """The n best, best first, equal scores in the request's order, and then those that had no turn: any of them might
    have been among the best. What can have no score has no rank and is left out."""
    scored = [r for r in results if r.status == pb.DOCUMENT_STATUS_OK]
    no_turn = [r for r in results if r.status == pb.DOCUMENT_STATUS_DEADLINE]
    return sorted(scored, key=lambda r: (-r.score, r.index))[:n] + no_turn


def _choice(scored: Sequence[Scored | None], reason: str) -> pb.StrategyChoice:
    counts = Counter(s.strategy for s in scored if s is not None)
    shares = [pb.StrategyShare(strategy=STRATEGIES[s], documents=n) for s, n in sorted(counts.items())]
    return pb.StrategyChoice(shares=shares, reason=reason)


def _usage(tokenized: Tokenized, scores: RequestScores | None, results: Sequence[pb.DocumentResult]) -> pb.Usage:
    """Computed and saved add up to what scoring one document at a time would have computed."""
    items = [r.tokens for r in results if r.status == pb.DOCUMENT_STATUS_OK]
    prefixes = min(1, len(items)) if tokenized.listwise else len(items)  # a list is one sequence, whoever scores it
    alone = prefixes * tokenized.prefix_tokens + sum(items)
    computed = 0 if scores is None else scores.computed_tokens
    return pb.Usage(
        prefix_tokens=tokenized.prefix_tokens,
        cached_prefix_tokens=0 if scores is None else scores.cached_prefix_tokens,
        item_tokens=sum(items),
        computed_tokens=computed,
        # Documents that were computed and gave no number are computed tokens that nobody would call saved.
        saved_tokens=max(0, alone - computed),
    )


def model_info(runtime: Runtime, version: str) -> pb.GetModelInfoResponse:
    """What is served."""
    info, profile, limits = runtime.info, runtime.profile, runtime.limits
    labels = runtime.tokenization.labels
    return pb.GetModelInfoResponse(
        model=info.model,
        architecture=info.architecture,
        dtype=info.dtype,
        device=info.device,
        profile=profile.name,
        profile_revision=info.profile_revision,
        profile_verified=profile.verified,
        score_kind=_score_kind(profile.kind, labels),
        labels=[pb.LabelInfo(text=x.text, token_id=x.token_id, positive=i == 0) for i, x in enumerate(labels)],
        limits=pb.Limits(**{name: getattr(limits, name) for name in pb.Limits.DESCRIPTOR.fields_by_name}),
        strategies=[STRATEGIES[s] for s in info.strategies],
        backend=info.backend,
        version=version,
        vocabulary_size=info.vocabulary_size,
        listwise=profile.listwise,
        constraints=sorted(runtime.constraints),
        memory=pb.Memory(
            budget_bytes=runtime.memory.budget,
            **{f"{part}_bytes": size for part, size in runtime.memory.parts.items()},
        ),
    )


def _score_kind(kind: Kind, labels: Sequence[Label]) -> pb.ScoreKind.ValueType:
    if kind == "query_likelihood":
        return pb.SCORE_KIND_MEAN_LOG_PROBABILITY
    odds = len(labels) == 2 or kind == "classification"
    return pb.SCORE_KIND_LOG_ODDS if odds else pb.SCORE_KIND_LABEL_LOGIT
