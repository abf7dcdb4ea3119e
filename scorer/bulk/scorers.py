"""Who scores a bulk job's requests: the service in this process, or a server."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from prefixrank.v1 import scorer_pb2 as pb
from scorer.bulk.rows import Ask, Options, Row, ScoredRow, patiently, score_rows
from scorer.client import AsyncScorerClient
from scorer.client_errors import ScorerError, error_of
from scorer.config import Config
from scorer.errors import ConfigError
from scorer.flags import config_of
from scorer.refusal import Refused
from scorer.remote import credentials, token, wait_for


@dataclass(frozen=True, slots=True)
class Scorer:
    """ask: for scores; info: what is served at the moment, with its fingerprint. Both raise ScorerError."""

    ask: Ask
    info: Callable[[], Awaitable[pb.GetModelInfoResponse]]

    async def begin(self, max_tokens_per_document: int) -> str:
        """The fingerprint of what is served. Raises ConfigError where it cannot score as asked."""
        try:
            info = await self.info()
        except ScorerError as error:
            raise ConfigError(str(error)) from None
        if not info.fingerprint:
            raise ConfigError(f"the server's release, {info.version}, tells no fingerprint of what it serves")
        if max_tokens_per_document > (most := info.limits.max_tokens_per_document):
            told = f"at most {most}, the limit of profile {info.profile}, got {max_tokens_per_document}"
            raise ConfigError(f"--max-tokens-per-document: {told}")
        return info.fingerprint

    async def score(self, rows: list[Row], options: Options, fingerprint: str) -> list[ScoredRow]:
        """One result a row. Raises ScorerError, and ConfigError where something else is served than at the job's
        beginning."""
        scored = await score_rows(rows, self.ask, options)
        if (await patiently(self.info, options.patience)).fingerprint != fingerprint:
            raise ConfigError("another model or other settings are served now than when the job began")
        return scored


def scorer_of(args: argparse.Namespace) -> AbstractAsyncContextManager[Scorer]:
    """What the arguments name."""
    return remote(args) if args.target else local(config_of(args))


@asynccontextmanager
async def remote(args: argparse.Namespace) -> AsyncIterator[Scorer]:
    """A server's answers. Raises ConfigError."""
    async with AsyncScorerClient(args.target, credentials(args), token=token(args.token_file)) as client:
        await wait_for(client, args, args.target)
        yield Scorer(
            lambda request: client.score_request(request, args.timeout),
            lambda: client.model_info(args.timeout, fingerprint=True),
        )


@asynccontextmanager
async def local(config: Config) -> AsyncIterator[Scorer]:
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
            status = refused.refusal.status().SerializeToString()
            raise error_of(pb.Status.FromString(status)) from None

    async def info() -> pb.GetModelInfoResponse:
        told = service.info()
        told.fingerprint = await service.fingerprint()
        return told

    try:
        yield Scorer(ask, info)
    finally:
        await runtime.batcher.drain()
        service.close()
        runtime.close()
