"""Who scores a bulk job's requests: the service in this process, or a server."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefixrank.v1 import scorer_pb2 as pb
from scorer.bulk.rows import Ask
from scorer.client import AsyncScorerClient
from scorer.client_errors import FieldViolation, ScorerError
from scorer.config import Config
from scorer.errors import ConfigError, InvalidRequest
from scorer.refusal import Refused
from scorer.remote import credentials, token


@asynccontextmanager
async def remote(args: argparse.Namespace) -> AsyncIterator[tuple[Ask, str]]:
    """A server's answers, and what it serves. Raises ConfigError."""
    async with AsyncScorerClient(args.target, credentials(args), token=token(args.token_file)) as client:
        try:
            await client.wait_until_serving(args.timeout)
            info = await client.model_info(args.timeout)
        except (TimeoutError, ScorerError) as error:
            raise ConfigError(f"{args.target}: {error}") from None
        yield lambda request: client.score_request(request, args.timeout), named(info)


@asynccontextmanager
async def local(config: Config) -> AsyncIterator[tuple[Ask, str]]:
    """The service's own answers, without the wire. Raises StartError."""
    from scorer.metrics import Metrics
    from scorer.server import load_runtime
    from scorer.service import ScorerService

    runtime = load_runtime(config)
    service = ScorerService(Metrics("local"), "local")
    service.serve(runtime)

    async def ask(request: pb.ScoreRequest) -> pb.ScoreResponse:
        try:
            return await service.answer(request)
        except Refused as refused:
            raise _as_client_sees(refused) from None

    try:
        yield ask, named(service.info())
    finally:
        await runtime.batcher.drain()
        service.close()
        runtime.close()


def named(info: pb.GetModelInfoResponse) -> str:
    """What gives equal scores for equal requests."""
    return f"{info.model} {info.profile} {info.profile_revision} {info.dtype}"


def _as_client_sees(refused: Refused) -> ScorerError:
    cause, refusal = refused.__cause__, refused.refusal
    found = cause.violations if isinstance(cause, InvalidRequest) else ()
    violations = [FieldViolation(violation.field, violation.limit) for violation in found]
    return ScorerError(refusal.code, refusal.message, violations)
