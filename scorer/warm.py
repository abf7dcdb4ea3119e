"""WarmPrefix: a prefix computed before its documents are known."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from batching import holding
from batching.types import Ints
from prefixrank.v1 import scorer_pb2 as pb
from scorer.errors import InvalidRequest
from scorer.profile import QUERY

if TYPE_CHECKING:
    from scorer.runtime import Runtime

DEFAULT_SECONDS = 60.0
MAX_SECONDS = 3600.0

OnTokenizer = Callable[[Callable[[pb.WarmPrefixRequest], Ints], pb.WarmPrefixRequest], Awaitable[Ints]]


async def warm(
    runtime: Runtime, request: pb.WarmPrefixRequest, deadline: float | None, on_tokenizer: OnTokenizer
) -> pb.WarmPrefixResponse:
    """Computes the request's prefix unless it is cached. Raises InvalidRequest, and as Batcher.submit does."""
    seconds = _seconds(request)
    response = pb.WarmPrefixResponse(request_id=request.request_id, status=pb.WARM_STATUS_NOTHING_TO_WARM)
    by_query = request.WhichOneof("prefix") == "query"
    if (by_query and QUERY not in runtime.profile.prefix) or not runtime.batcher.cache.pool.pages:
        return response
    prefix = await on_tokenizer(runtime.tokenization.prefix, request)
    warmed = await holding.warm(runtime.batcher, prefix, request.tenant, seconds, deadline)
    there = warmed.cached == len(prefix)
    response.status = pb.WARM_STATUS_ALREADY_WARM if there else pb.WARM_STATUS_WARMED
    response.prefix_tokens = len(prefix)
    response.cached_prefix_tokens, response.kept_tokens = warmed.cached, warmed.kept
    response.ttl_seconds = seconds
    return response


def _seconds(request: pb.WarmPrefixRequest) -> float:
    seconds = request.ttl_seconds
    if not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise InvalidRequest.of("ttl_seconds", f"between 0 and {MAX_SECONDS:g}", seconds)
    return seconds or DEFAULT_SECONDS
