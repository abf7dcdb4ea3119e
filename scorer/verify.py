"""`prefixrank verify`: every strategy against transformers one document at a time, on the user's own model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.progress import track
from rich.table import Table

from attention.plans import Strategy
from batching.select import StrategyError, choose
from batching.types import Scored, TokenizedRequest
from prefixrank.v1 import scorer_pb2 as pb
from scorer.config import Config
from scorer.console import plain_console
from scorer.errors import ConfigError
from scorer.profile import record_golden
from scorer.runtime import Runtime
from scorer.selfcheck import (
    DOCUMENTS,
    QUERIES,
    Deviation,
    alone_all,
    deviation,
    golden_scores,
    sample_requests,
)


def run(config: Config, record: Path | None = None) -> int:
    """Loads the model and proves it. 0: all within tolerance. Raises StartError."""
    if record is not None:
        _check_record(record)
    runtime = Runtime.load(config)
    try:
        return prove(runtime, record)
    finally:
        runtime.close()


def prove(runtime: Runtime, record: Path | None = None) -> int:
    """Prints the deviations; with `record`, writes the profile with golden scores there. 0: all within the tolerance of
    the service's own start. Raises StartError."""
    console = plain_console()
    runtime.tokenization.prove()
    tolerance = runtime.tolerance
    found, refused = deviations(runtime)
    console.print(_table(runtime, found, refused, tolerance))
    if record is not None:
        _record(runtime, record)
        console.print(f"wrote {record} with golden scores")
    worst = max(d.score for d in found)
    within = worst <= tolerance
    verdict = "within" if within else "BEYOND"
    console.print(f"largest deviation {worst:.3g}: {verdict} the tolerance of {tolerance:g}")
    return 0 if within else 1


def deviations(runtime: Runtime) -> tuple[list[Deviation], dict[Strategy, str]]:
    """Every strategy's deviation on the sample requests, and why some cannot compute them. Raises ModelError where the
    limits take none of the samples."""
    requests = sample_requests(runtime.tokenization)
    console = plain_console(stderr=True)
    expected = [
        (request, alone_all(runtime.engine.model, request))
        for request in track(requests, "one at a time", console=console, disable=not console.is_terminal)
    ]
    found: list[Deviation] = []
    refused: dict[Strategy, str] = {}
    for strategy in Strategy:
        try:
            _refuse(runtime, requests, strategy)
        except StrategyError as error:
            refused[strategy] = str(error)
            continue
        found.append(deviation(runtime.engine, expected, strategy, runtime.profile.kind))
    return found, refused


def _refuse(runtime: Runtime, requests: Sequence[TokenizedRequest], strategy: Strategy) -> None:
    """Raises StrategyError where the service itself would refuse this strategy."""
    for request in requests:
        asked = TokenizedRequest(request.prefix, request.items, request.normalize, strategy)
        choose(asked, asked.items, runtime.batcher.policy)


def _table(runtime: Runtime, found: Sequence[Deviation], refused: dict[Strategy, str], tolerance: float) -> Table:
    info = runtime.info
    table = Table(
        title=f"{info.model}, profile {runtime.profile.name}, {info.dtype} on {info.device}: largest |packed - alone|"
    )
    for heading in ("strategy", "documents", "score", "logit", f"tolerance {tolerance:g}"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for d in found:
        told = "ok" if d.score <= tolerance else "EXCEEDED"
        table.add_row(d.strategy, str(d.documents), f"{d.score:.2e}", f"{d.logit:.2e}", told)
    for strategy, why in refused.items():
        table.add_row(strategy, "0", "-", "-", f"refused: {why}")
    return table


def _check_record(path: Path) -> None:
    """Before the proof, which may take minutes. Raises ConfigError."""
    if path.suffix != ".toml":
        raise ConfigError(f"--record {path}: a profile's name ends in .toml")
    if not path.parent.is_dir():
        raise ConfigError(f"--record {path}: there is no directory {path.parent}")


def _record(runtime: Runtime, path: Path) -> None:
    pairs = [(query, document) for query in QUERIES for document in DOCUMENTS[:4]]
    scores = golden_scores(runtime.engine, runtime.tokenization, pairs, runtime.profile.kind)
    triples = [(query, document, round(score, 5)) for (query, document), score in zip(pairs, scores, strict=True)]
    try:
        record_golden(path, runtime.profile, triples)
    except OSError as error:
        raise ConfigError(f"--record {path}: {error.strerror}") from None


def transformers_alone(runtime: Runtime, request: pb.ScoreRequest) -> tuple[list[Scored], float]:
    """A request's documents through transformers' own forward, one at a time; and the seconds it took."""
    tokenized = runtime.tokenization.tokenize(request).request
    assert tokenized is not None, "a request with text"
    started = time.perf_counter()
    scored = alone_all(runtime.engine.model, tokenized)
    return scored, time.perf_counter() - started


def transformers_alone_rate(config: Config, queries: Sequence[tuple[str, Sequence[str]]]) -> float:
    """Documents/s of transformers one document at a time over (query, documents) pairs."""
    runtime = Runtime.load(config)
    try:
        seconds, documents = 0.0, 0
        for query, texts in queries:
            request = pb.ScoreRequest(query=pb.QueryPrefix(text=query))
            request.documents.extend(pb.Document(text=text) for text in texts)
            seconds += transformers_alone(runtime, request)[1]
            documents += len(texts)
        return documents / seconds
    finally:
        runtime.close()
