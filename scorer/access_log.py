"""The log's one record for each scoring call."""

from __future__ import annotations

import logging

import grpc

from prefixrank.v1 import scorer_pb2 as pb
from scorer.access import Caller
from scorer.refusal import VALUE_CHARACTERS

access_log = logging.getLogger("scorer.access")


def log_call(
    request: pb.ScoreRequest, response: pb.ScoreResponse, code: grpc.StatusCode, seconds: float, caller: Caller
) -> None:
    """One record a call, each value a field that the log's renderer escapes; no text is logged."""
    own = {"documents": len(request.documents), "item_tokens": response.usage.item_tokens}
    _record("score", request, code, seconds, caller, own | _computed(response))


def log_search(
    request: pb.BeamSearchRequest,
    response: pb.BeamSearchResponse,
    code: grpc.StatusCode,
    seconds: float,
    caller: Caller,
) -> None:
    """The same for a beam search."""
    own = {
        "num_beams": request.num_beams,
        "max_new_tokens": request.max_new_tokens,
        "sequences": len(response.sequences),
        "steps": response.steps,
    }
    _record("beam_search", request, code, seconds, caller, own | _computed(response))


def log_warm(
    request: pb.WarmPrefixRequest,
    response: pb.WarmPrefixResponse,
    code: grpc.StatusCode,
    seconds: float,
    caller: Caller,
) -> None:
    """The same for a prefix that is computed ahead."""
    own = {
        "prefix_tokens": response.prefix_tokens,
        "cached_prefix_tokens": response.cached_prefix_tokens,
        "kept_tokens": response.kept_tokens,
    }
    _record("warm_prefix", request, code, seconds, caller, own)


def log_refused(told: pb.ScoreRequest, code: grpc.StatusCode, caller: Caller) -> None:
    """A call that was refused before it was read. told: id and tenant, where they are known."""
    _record("refused", told, code, 0.0, caller, {})


def _computed(response: pb.ScoreResponse | pb.BeamSearchResponse) -> dict[str, int]:
    usage = response.usage
    return {
        "prefix_tokens": usage.prefix_tokens,
        "cached_prefix_tokens": usage.cached_prefix_tokens,
        "computed_tokens": usage.computed_tokens,
        "passes": response.passes,
    }


def _record(
    event: str,
    request: pb.ScoreRequest | pb.BeamSearchRequest | pb.WarmPrefixRequest,
    code: grpc.StatusCode,
    seconds: float,
    caller: Caller,
    own: dict[str, int],
) -> None:
    """own: what only this kind of call has."""
    access_log.info(
        event,
        extra={
            "request_id": request.request_id[:VALUE_CHARACTERS],
            "tenant": request.tenant[:VALUE_CHARACTERS],
            "caller": caller.name,
            "code": code.name,
            **own,
            "seconds": round(seconds, 4),
        },
    )
