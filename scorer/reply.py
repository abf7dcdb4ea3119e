"""The answers on the wire, built from what tokenisation and batcher give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attention.plans import Strategy
from batching.types import RequestScores, Scored
from prefixrank.v1 import scorer_pb2 as pb
from scorer.heads import Kind, Verdict, all_log_odds, reads_apart, sigmoid, verdict
from scorer.tokenized import DocumentTokens, Label, Status, Tokenized

if TYPE_CHECKING:
    from scorer.runtime import Runtime

# Looked up for every document, so once.
STATUSES = {status: pb.DocumentStatus.Value(f"DOCUMENT_STATUS_{status.name}") for status in Status}
STRATEGIES = {strategy: pb.Strategy.Value(f"STRATEGY_{strategy.name}") for strategy in Strategy}


def document_results(
    request: pb.ScoreRequest, tokenized: Tokenized, scores: RequestScores | None, kind: Kind
) -> pb.ScoreResponse:
    """A response with one result a document, in the request's order, and nothing else yet: results that are made where
    they stand are not copied."""
    response, outputs = pb.ScoreResponse(), request.options.outputs
    wanted = outputs.label_logits, outputs.vocabulary_probabilities
    documents, score_kind = tokenized.documents, _score_kind(kind, tokenized.labels)
    scored = () if scores is None or any(wanted) else scores.scored
    if len(scored) == len(documents) and (odds := all_log_odds(scored, kind)) is not None:
        _fill(response, documents, scored, score_kind, odds)
        return response
    for index, document in enumerate(documents):
        if scores is None or document.item is None:
            told = _told(document, STATUSES[document.status], document.message)
        elif (one := scores.scored[document.item]) is None:
            told = _told(document, pb.DOCUMENT_STATUS_DEADLINE, "the deadline came before its turn")
        else:
            told = _scored(document, one, score_kind, verdict(one, kind), tokenized.labels, wanted)
        response.results.add(index=index, **told)
    return response


def _fill(
    response: pb.ScoreResponse,
    documents: Sequence[DocumentTokens],
    scored: Sequence[Scored | None],
    score_kind: pb.ScoreKind.ValueType,
    odds: Sequence[float],
) -> None:
    """The results where every document has its log-odds. What most have in common is copied within the library."""
    common = pb.DocumentResult(status=pb.DOCUMENT_STATUS_OK, score_kind=score_kind)
    response.results.extend([common] * len(documents))
    numbered = enumerate(zip(response.results[:], documents, scored, odds, strict=True))
    for index, (result, document, one, score) in numbered:
        assert one is not None, "it has log-odds"
        result.index = index
        result.id, _, _, result.tokens, result.document_tokens, result.original_document_tokens, truncated, _ = document
        result.score = result.log_odds = score
        result.probability = sigmoid(score)
        result.strategy = STRATEGIES[one.strategy]
        if truncated:
            result.truncated = True


def per_document(tokenized: Tokenized, scores: RequestScores) -> RequestScores:
    """Scores by document, where one item held them all."""
    if not tokenized.listwise:
        return scores
    reason = f"listwise, each document sees those before it: {scores.reason}"
    whole, count = scores.scored[0], sum(document.item is not None for document in tokenized.documents)
    return replace(scores, scored=(None,) * count if whole is None else tuple(reads_apart(whole)), reason=reason)


def _told(document: DocumentTokens, status: pb.DocumentStatus.ValueType, message: str, **more: Any) -> dict[str, Any]:
    """The fields of a result. more: of a scored document."""
    return {
        "id": document.id,
        "status": status,
        "message": message,
        "tokens": document.tokens,
        "document_tokens": document.document_tokens,
        "original_document_tokens": document.original_document_tokens,
        "truncated": document.truncated,
        **more,
    }


def _scored(
    document: DocumentTokens,
    scored: Scored,
    score_kind: pb.ScoreKind.ValueType,
    given: Verdict,
    labels: Sequence[Label],
    outputs: tuple[bool, bool],
) -> dict[str, Any]:
    """outputs: whether label logits, and whether probabilities over the vocabulary, were asked for."""
    if not given.finite:
        told = "the model gave NaN or infinity for this document"
        return _told(document, pb.DOCUMENT_STATUS_NUMERIC_ERROR, told, strategy=STRATEGIES[scored.strategy])
    assert given.score is not None, "a finite verdict has a score"
    return _told(
        document,
        STATUSES[document.status],
        document.message,
        strategy=STRATEGIES[scored.strategy],
        score=given.score,
        score_kind=score_kind,
        log_odds=given.log_odds,  # None leaves a field out
        probability=given.probability,
        label_logits=_label_scores(given, labels, outputs[1]) if any(outputs) else (),
    )


def _label_scores(given: Verdict, labels: Sequence[Label], vocabulary: bool) -> Iterable[pb.LabelScore]:
    for i, (label, logit) in enumerate(zip(labels, given.label_logits, strict=True)):
        probability = given.vocabulary_probabilities[i] if vocabulary else None
        yield pb.LabelScore(label=label.text, token_id=label.token_id, logit=logit, vocabulary_probability=probability)


def score_response(
    request: pb.ScoreRequest,
    runtime: Runtime,
    tokenized: Tokenized,
    scores: RequestScores | None,
    whole: pb.ScoreResponse,
) -> pb.ScoreResponse:
    """The reply but for its own timings. whole: with the results of all documents; it becomes the reply, unless the
    caller wants the best alone."""
    top_n, results = request.options.top_n, whole.results
    response = pb.ScoreResponse(results=_best(results, top_n)) if top_n else whole
    response.request_id = request.request_id
    response.usage.CopyFrom(_usage(tokenized, scores, results))
    response.model, response.profile = runtime.info.model, runtime.profile.name
    response.profile_revision = runtime.info.profile_revision
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
