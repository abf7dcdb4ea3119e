"""The log's one record for each scoring call."""

from __future__ import annotations

import logging

import grpc

from prefixrank.v1 import scorer_pb2 as pb
from scorer.access import Caller
from scorer.refusal import VALUE_CHARACTERS

access_log = logging.getLogger("scorer.access")


def log_call(
    request: pb.ScoreRequest,
    response: pb.ScoreResponse,
    code: grpc.StatusCode,
    seconds: float,
    caller: Caller,
) -> None:
    """One record a call, each value a field that the log's renderer escapes; no text is logged."""
    access_log.info(
        "score",
        extra={
            "request_id": request.request_id[:VALUE_CHARACTERS],
            "tenant": request.tenant[:VALUE_CHARACTERS],
            "caller": caller.name,
            "code": code.name,
            "documents": len(request.documents),
            "prefix_tokens": response.usage.prefix_tokens,
            "cached_prefix_tokens": response.usage.cached_prefix_tokens,
            "item_tokens": response.usage.item_tokens,
            "computed_tokens": response.usage.computed_tokens,
            "passes": response.passes,
            "seconds": round(seconds, 4),
        },
    )


def log_search(
    request: pb.BeamSearchRequest,
    response: pb.BeamSearchResponse,
    code: grpc.StatusCode,
    seconds: float,
    caller: Caller,
) -> None:
    """The same for a beam search."""
    access_log.info(
        "beam_search",
        extra={
            "request_id": request.request_id[:VALUE_CHARACTERS],
            "tenant": request.tenant[:VALUE_CHARACTERS],
            "caller": caller.name,
            "code": code.name,
            "num_beams": request.num_beams,
            "max_new_tokens": request.max_new_tokens,
            "prefix_tokens": response.usage.prefix_tokens,
            "cached_prefix_tokens": response.usage.cached_prefix_tokens,
            "sequences": len(response.sequences),
            "computed_tokens": response.usage.computed_tokens,
            "passes": response.passes,
            "steps": response.steps,
            "seconds": round(seconds, 4),
        },
    )
