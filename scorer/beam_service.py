"""BeamSearch: from a request to a search and back."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from batching.beams import BeamOptions, EarlyStopping, Ended, Hypothesis
from batching.scheduler import Asked
from batching.trie import Trie
from batching.types import Ints
from prefixrank.v1 import scorer_pb2 as pb
from scorer.beam import MAX_BEAMS
from scorer.beam_run import BeamRequest, BeamResult
from scorer.errors import Unsupported
from scorer.profile import QUERY
from scorer.tokenized import PRIORITIES
from scorer.validation import Violations

if TYPE_CHECKING:
    from scorer.runtime import Runtime

MAX_LENGTH_PENALTY = 16.0  # either way: any length to this power is far within float64, in which scores are
MAX_EOS = 16
STOPPING = {
    pb.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    pb.EARLY_STOPPING_HEURISTIC: EarlyStopping.HEURISTIC,
    pb.EARLY_STOPPING_FULL: EarlyStopping.FULL,
    pb.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}
REASONS = {
    Ended.EOS: pb.FINISH_REASON_EOS,
    Ended.LENGTH: pb.FINISH_REASON_LENGTH,
    Ended.CONSTRAINT: pb.FINISH_REASON_CONSTRAINT,
}

PROMPTS = {"query": "query.text", "raw_text": "raw_text", "token_ids": "token_ids.ids"}

Prepare = Callable[[pb.BeamSearchRequest], BeamRequest]
OnTokenizer = Callable[[Prepare, pb.BeamSearchRequest], Awaitable[BeamRequest]]


async def beam_search(
    runtime: Runtime, request: pb.BeamSearchRequest, deadline: float | None, on_tokenizer: OnTokenizer
) -> pb.BeamSearchResponse:
    """Searches the continuations of one prompt. Raises InvalidRequest, Unsupported, and as BeamSearcher.search does."""
    started = time.perf_counter()
    if runtime.beams is None:
        raise Unsupported(runtime.no_beams)
    prepared = await on_tokenizer(lambda asked: prepare(runtime, asked), request)
    tokenize_seconds = time.perf_counter() - started
    result = await runtime.beams.search(prepared, deadline)
    response = _response(runtime, request, prepared, result)
    response.timings.tokenize_seconds = tokenize_seconds
    response.timings.total_seconds = time.perf_counter() - started
    return response


def prepare(runtime: Runtime, request: pb.BeamSearchRequest) -> BeamRequest:
    """The request in ids. Raises InvalidRequest naming every bad field."""
    bad = Violations()
    options = _options(runtime, request, bad)
    if request.WhichOneof("prefix") == "query" and QUERY not in runtime.profile.prefix:
        bad.add(
            "query", f"absent: profile {runtime.profile.name} has no query in its prefix; give raw_text or token_ids"
        )
    if request.priority not in pb.Priority.values():
        bad.add("priority", f"between 0 and {max(pb.Priority.values())}", request.priority)
    trie = _trie(runtime, request, bad)
    bad.check()
    prompt = runtime.tokenization.prefix(request)
    _check_prompt(runtime, request, len(prompt), bad)
    context, new = runtime.limits.max_context_tokens, request.max_new_tokens
    if len(prompt) + new > context:
        bad.add("max_new_tokens", f"at most {context - len(prompt)} behind a prompt of {len(prompt)} tokens", new)
    bad.check()
    return BeamRequest(prompt, options, trie, Asked(request.tenant, PRIORITIES[request.priority]))


def _check_prompt(runtime: Runtime, request: pb.BeamSearchRequest, tokens: int, bad: Violations) -> None:
    assert runtime.beams is not None, "checked before"
    if tokens > (most := runtime.beams.max_prompt):
        field = PROMPTS[request.WhichOneof("prefix") or "raw_text"]
        bad.add(field, f"at most {most} tokens, as the prefix cache (cache_tokens) holds no more", tokens)


def _options(runtime: Runtime, request: pb.BeamSearchRequest, bad: Violations) -> BeamOptions:
    assert runtime.beams is not None, "checked before"
    beams, new, penalty = request.num_beams, request.max_new_tokens, request.length_penalty
    if not 1 <= beams <= MAX_BEAMS:
        bad.add("num_beams", f"between 1 and {MAX_BEAMS}", beams)
    if new < 1:
        bad.add("max_new_tokens", "at least 1", new)
    elif beams * (new - 1) > runtime.beams.max_tokens:
        told = f"num_beams * (max_new_tokens - 1) of at most {runtime.beams.max_tokens}"
        bad.add("max_new_tokens", told, f"{beams} * {new - 1}")
    if request.num_return_sequences > beams:
        bad.add("num_return_sequences", f"at most num_beams, {beams}", request.num_return_sequences)
    if not (math.isfinite(penalty) and abs(penalty) <= MAX_LENGTH_PENALTY):
        bad.add("length_penalty", f"between {-MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}", penalty)
    if request.early_stopping not in STOPPING:
        bad.add("early_stopping", f"between 0 and {max(STOPPING)}", request.early_stopping)
    return BeamOptions(
        num_beams=beams,
        max_new_tokens=new,
        length_penalty=penalty if request.HasField("length_penalty") else 1.0,
        early_stopping=STOPPING.get(request.early_stopping, EarlyStopping.HEURISTIC),
        eos_ids=_eos_ids(runtime, request, bad),
    )


def _eos_ids(runtime: Runtime, request: pb.BeamSearchRequest, bad: Violations) -> tuple[int, ...]:
    given, size = tuple(dict.fromkeys(request.eos_token_ids)), runtime.limits.vocabulary_size
    if given and request.ignore_eos:
        bad.add("eos_token_ids", "absent where ignore_eos is set", list(given))
    if len(given) > MAX_EOS:
        bad.add("eos_token_ids", f"at most {MAX_EOS}", len(given))
    if given and max(given) >= size:
        bad.add("eos_token_ids", f"below the vocabulary size {size}", max(given))
    return () if request.ignore_eos else given or runtime.eos_ids


def _trie(runtime: Runtime, request: pb.BeamSearchRequest, bad: Violations) -> Trie | None:
    if not request.HasField("constraint"):
        return None
    allowed = request.constraint
    match allowed.WhichOneof("allowed"):
        case "name":
            if allowed.name not in runtime.constraints:
                known = ", ".join(sorted(runtime.constraints)) or "none"
                bad.add("constraint.name", f"one that the service was started with ({known})", repr(allowed.name))
            return runtime.constraints.get(allowed.name)
        case "tokens":
            sequences = [list(sequence.ids) for sequence in allowed.tokens.sequences]
            return _checked(sequences, "constraint.tokens.sequences", runtime.limits.vocabulary_size, bad)
        case "texts":
            encoded = _encoded(runtime, allowed.texts.texts, bad)
            size = runtime.limits.vocabulary_size
            return None if encoded is None else _checked(encoded, "constraint.texts.texts", size, bad)
        case _:
            bad.add("constraint", "one of tokens, texts and name")
    return None


def _encoded(runtime: Runtime, texts: Sequence[str], bad: Violations) -> list[list[int]] | None:
    found = []
    for number, text in enumerate(texts):
        ids = runtime.tokenization.continuation(text)
        if ids is None:
            bad.add(f"constraint.texts.texts[{number}]", "text that can be written without a control token")
            return None
        found.append(ids.tolist())
    return found


def _checked(sequences: Sequence[Sequence[int]], field: str, size: int, bad: Violations) -> Trie | None:
    if not sequences:
        bad.add(field, "at least one sequence", 0)
        return None
    for number, sequence in enumerate(sequences):
        if not sequence:
            bad.add(f"{field}[{number}]", "at least one token", 0)
            return None
        if (highest := max(sequence)) >= size:
            bad.add(f"{field}[{number}]", f"below the vocabulary size {size}", highest)
            return None
    return Trie.of(sequences)


def _response(
    runtime: Runtime, request: pb.BeamSearchRequest, prepared: BeamRequest, result: BeamResult
) -> pb.BeamSearchResponse:
    best = result.hypotheses[: request.num_return_sequences or len(result.hypotheses)]
    prompt, generated = len(prepared.prompt), sum(len(found.tokens) for found in best)
    return pb.BeamSearchResponse(
        request_id=request.request_id,
        sequences=[_sequence(runtime, found) for found in best],
        usage=pb.Usage(
            prefix_tokens=prompt,
            cached_prefix_tokens=result.cached_prefix_tokens,
            item_tokens=generated,
            computed_tokens=result.computed_tokens,
            saved_tokens=max(0, len(best) * prompt + generated - result.computed_tokens),
        ),
        timings=pb.Timings(
            queue_seconds=result.queue_seconds,
            plan_seconds=result.plan_seconds,
            forward_seconds=result.forward_seconds,
        ),
        passes=result.passes,
        steps=result.steps,
        model=runtime.info.model,
        profile=runtime.profile.name,
        profile_revision=runtime.profile.revision,
    )


def _sequence(runtime: Runtime, found: Hypothesis) -> pb.BeamSequence:
    return pb.BeamSequence(
        token_ids=found.tokens,
        text=runtime.tokenization.text(_ints(found.tokens)),
        score=found.score,
        token_log_probs=found.log_probs,
        finish_reason=REASONS[found.ended],
    )


def _ints(tokens: Sequence[int]) -> Ints:
    return np.array(tokens, np.int32)
