"""`prefixrank eval`: reranks BM25's candidates of a test collection and measures how well, beside BM25 itself."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import grpc
import numpy as np
from rich.progress import track
from rich.table import Table

from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import ScorerError, build_request
from scorer.collection import Collection
from scorer.console import plain_console
from scorer.errors import ConfigError, StartError
from scorer.flags import config_of, given_flags
from scorer.run_file import Ranking, RunFile
from scorer.scoring import at, here, plain

if TYPE_CHECKING:
    from scorer.scoring import Score

Scores = Mapping[str, Mapping[str, float]]  # by document id, by query id
INSTALL = "pip install 'prefixrank[eval]'"
# Scores of one query, scored again, may be so far apart in the mean: in bf16 other neighbours move one by up to 0.12.
SAME_SCORES = 0.05


def run(args: argparse.Namespace) -> int:
    """Prints the measures; 1 where a document got no score. Raises StartError where it cannot begin."""
    collection = Collection.read(args.collection)
    if not (queries := collection.first_judged(args.queries)):
        raise ConfigError(f"{args.collection}: no query has a relevant document")
    pools = bm25(collection, queries, args.depth)
    with _scorer(args) as score:
        run_file, failed = rerank(collection, pools, score, args)
    console = plain_console()
    console.print(table(collection, {"BM25": pools, "reranked": run_file.done}))
    console.print(_told(collection, pools, args, failed))
    return int(failed > 0)


def _scorer(args: argparse.Namespace) -> AbstractContextManager[Score]:
    if args.target and (given_flags(args) or args.config or args.plain):
        args.parser.error("settings and --plain are for a model in this process; with --target the server has its own")
    if args.target:
        return at(args)
    config = config_of(args)
    return plain(config) if args.plain else here(config, args.timeout)


def bm25(collection: Collection, queries: Sequence[str], depth: int) -> Scores:
    """The `depth` best documents of each query by BM25, equal ones in the collection's order; those that share no word
    with it are left out."""
    bm25s = _bm25s()
    ids = list(collection.documents)
    index = bm25s.BM25(method="lucene")
    index.index(bm25s.tokenize(list(collection.documents.values()), show_progress=False), show_progress=False)
    words = bm25s.tokenize([collection.queries[query] for query in queries], show_progress=False, return_ids=False)
    pools: dict[str, dict[str, float]] = {}
    for query, own in zip(queries, words, strict=True):
        known = [word for word in own if word in index.vocab_dict]
        # `retrieve` would order equal ones by whichever library selects them.
        scores = index.get_scores(known) if known else np.zeros(len(ids), np.float32)
        best = np.argsort(-scores, kind="stable")[:depth]
        pools[query] = {ids[i]: float(scores[i]) for i in best if scores[i] > 0}
    return pools


def _bm25s() -> Any:
    """The library, without a GPU: where JAX is installed it tries it as it is imported, and JAX takes three quarters of
    a GPU's memory, which the model needs."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        import bm25s
    except ImportError as error:
        raise ConfigError(f"{error}: {INSTALL}") from None
    return bm25s


def rerank(collection: Collection, pools: Scores, score: Score, args: argparse.Namespace) -> tuple[RunFile, int]:
    """Scores what the run file does not have yet. Returns it, and how many documents got no score."""
    console = plain_console(stderr=True)
    failed = 0
    with RunFile(args.run_file, _tag(score, args), {query: list(pool) for query, pool in pools.items()}) as run_file:
        todo = [query for query, pool in pools.items() if pool and query not in run_file.done]
        if done := [query for query in pools if query in run_file.done]:
            console.print(f"{len(done)} of {len(pools)} queries are in {args.run_file} already")
            again, _ = _ranked(collection, done[0], pools[done[0]], score, args)
            _check_same(args.run_file, done[0], run_file.done[done[0]], dict(again))
        for query in track(todo, "queries", console=console, disable=not console.is_terminal):
            ranking, without = _ranked(collection, query, pools[query], score, args)
            failed += without
            run_file.add(query, ranking)
    return run_file, failed


def _ranked(
    collection: Collection, query: str, pool: Mapping[str, float], score: Score, args: argparse.Namespace
) -> tuple[Ranking, int]:
    """One query's documents, and how many got no score: all of them where the model cannot take the query."""
    request = build_request(
        collection.queries[query],
        [collection.documents[id] for id in pool],
        ids=list(pool),
        max_tokens_per_document=args.max_tokens_per_document,
    )
    try:
        response = score(request)
    except ScorerError as error:
        if error.code is not grpc.StatusCode.INVALID_ARGUMENT:
            raise _stopped(query, error) from None
        plain_console(stderr=True).print(f"query {query} is not scored: {error.message}")
        response = pb.ScoreResponse(results=[pb.DocumentResult(id=id, index=i) for i, id in enumerate(pool)])
    return _ranking(response)


def _check_same(path: Path, query: str, held: Mapping[str, float], again: Mapping[str, float]) -> None:
    """Weights of the same name may have changed since the run began."""
    apart = sum(abs(score - again[id]) for id, score in held.items()) / len(held)
    if not apart <= SAME_SCORES:
        raise ConfigError(
            f"{path} holds another model's run, or one in another precision: the scores of query {query} are "
            f"{apart:.3g} apart in the mean; name another file, or remove it"
        )


def _tag(score: Score, args: argparse.Namespace) -> str:
    """What tells runs apart whose scores may differ."""
    try:
        made = score(build_request("a query", ["a document"]))
    except ScorerError as error:
        raise _stopped("of the first try", error) from None
    parts = [made.model, made.profile, made.profile_revision, f"depth={args.depth}"]
    parts += [f"cut={args.max_tokens_per_document}"] * bool(args.max_tokens_per_document) + ["plain"] * args.plain
    return quote(":".join(parts), safe=":=")


def _stopped(query: str, error: ScorerError) -> StartError:
    return StartError(f"query {query}: {error}; what was scored before it stays in the run file")


def _ranking(response: pb.ScoreResponse) -> tuple[Ranking, int]:
    """Best first, equal scores in BM25's order; documents without a score last, each below the one before it."""
    scored = sorted((r for r in response.results if r.HasField("score")), key=lambda r: (-r.score, r.index))
    ranking = [(r.id, r.score) for r in scored]
    rest = [r for r in response.results if not r.HasField("score")]
    lowest = ranking[-1][1] if ranking else 0.0
    ranking += [(r.id, lowest - place) for place, r in enumerate(rest, 1)]
    return ranking, len(rest)


def measured(collection: Collection, scores: Scores, queries: Sequence[str]) -> dict[str, float]:
    """nDCG@10 and MRR over these queries; one without candidates counts as 0."""
    try:
        import ir_measures
        from ir_measures import RR, nDCG
    except ImportError as error:
        raise ConfigError(f"{error}: {INSTALL}") from None
    qrels = {query: dict(collection.qrels[query]) for query in queries}
    run = {query: dict(scores[query]) for query in queries if scores.get(query)}
    sums = dict.fromkeys(("nDCG@10", "MRR"), 0.0)
    for found in ir_measures.iter_calc([nDCG @ 10, RR], qrels, run):
        sums["MRR" if found.measure == RR else "nDCG@10"] += found.value
    return {name: total / len(queries) for name, total in sums.items()}


def table(collection: Collection, runs: Mapping[str, Scores]) -> Table:
    """The measures of each run over the queries of the first."""
    made = Table()
    queries = list(next(iter(runs.values())))
    for heading in ("", "nDCG@10", "MRR"):
        made.add_column(heading, justify="right" if heading else "left")
    for name, scores in runs.items():
        values = measured(collection, scores, queries)
        assert all(math.isfinite(value) for value in values.values()), "a measure is a number"
        made.add_row(name, *(f"{values[heading]:.4f}" for heading in ("nDCG@10", "MRR")))
    return made


def _told(collection: Collection, pools: Scores, args: argparse.Namespace, failed: int) -> str:
    documents = sum(map(len, pools.values()))
    lines = [f"{len(pools)} queries, {documents} candidates of at most {args.depth} each; run in {args.run_file}"]
    if failed:
        lines.append(f"{failed} documents got no score and are ranked last")
    absent = sum(id not in collection.documents for query in pools for id in collection.qrels[query])
    if absent:
        lines.append(f"{absent} judged documents are not in the corpus; they count as not found")
    return "\n".join(lines)


def default_run_file(collection: Path) -> Path:
    """Where the run goes unless told otherwise."""
    return Path(f"{collection.resolve().name}.run")
