"""Where a command's requests are scored: by the service in this process, by a server, or by transformers alone."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scorer.config import Config
from scorer.remote import connect

if TYPE_CHECKING:
    from prefixrank.v1 import scorer_pb2 as pb
    from scorer.runtime import Runtime

    Score = Callable[[pb.ScoreRequest], pb.ScoreResponse]


@contextmanager
def at(args: argparse.Namespace) -> Iterator[Score]:
    """By the running server `args.target`; `args.timeout`: seconds of each request. Raises ConfigError."""
    with connect(args) as client:
        yield lambda request: client.score_request(request, args.timeout)


@contextmanager
def here(config: Config, timeout: float) -> Iterator[Score]:
    """By the service itself, without the wire."""
    from scorer.metrics import Metrics
    from scorer.service import ScorerService

    runtime = _loaded(config)
    service = ScorerService(Metrics("local"), "local")
    service.serve(runtime)

    def score(request: pb.ScoreRequest) -> pb.ScoreResponse:
        with _as_a_client_hears():
            return runner.run(service.score(request, time.monotonic() + timeout))

    with asyncio.Runner() as runner:
        try:
            yield score
        finally:
            runner.run(runtime.batcher.drain())
            service.close()
            runtime.close()


@contextmanager
def plain(config: Config) -> Iterator[Score]:
    """By transformers' own forward, one document at a time: to compare with."""
    runtime = _loaded(config)

    def score(request: pb.ScoreRequest) -> pb.ScoreResponse:
        with _as_a_client_hears():
            return _one_at_a_time(runtime, request)

    try:
        yield score
    finally:
        runtime.close()


@contextmanager
def _as_a_client_hears() -> Iterator[None]:
    """A refusal is the error that a client would raise for its status."""
    from scorer.client import ScorerError
    from scorer.refusal import STATUS_CODES

    try:
        yield
    except tuple(STATUS_CODES) as error:
        raise ScorerError(STATUS_CODES[type(error)], str(error)) from None


def _one_at_a_time(runtime: Runtime, request: pb.ScoreRequest) -> pb.ScoreResponse:
    from prefixrank.v1 import scorer_pb2 as pb
    from scorer.heads import reads_apart, verdict
    from scorer.selfcheck import alone_all

    tokenized = runtime.tokenization.tokenize(request)
    profile = runtime.profile
    response = pb.ScoreResponse(model=runtime.info.model, profile=profile.name, profile_revision=profile.revision)
    scored = [] if tokenized.request is None else alone_all(runtime.engine.model, tokenized.request)
    if tokenized.listwise:
        scored = [read for item in scored for read in reads_apart(item)]
    for index, document in enumerate(tokenized.documents):
        result = response.results.add(id=document.id, index=index)
        result.status = pb.DocumentStatus.Value(f"DOCUMENT_STATUS_{document.status.upper()}")
        if document.item is not None:
            score = verdict(scored[document.item], profile.kind).score
            if score is None:
                result.status = pb.DOCUMENT_STATUS_NUMERIC_ERROR
            else:
                result.score = score
    return response


def _loaded(config: Config) -> Runtime:
    from scorer.console import plain_console
    from scorer.server import load_runtime

    with plain_console(stderr=True).status("loading and checking the model"):
        return load_runtime(config)
