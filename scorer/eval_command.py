"""`prefixrank eval`: its arguments; what it needs is loaded when it runs, so help is instant."""

from __future__ import annotations

import argparse
from pathlib import Path

from scorer.flags import MODEL_SETTINGS, POSITIVE, add_document_limit, add_settings, whole
from scorer.remote import add_target

EXAMPLE = """example:
  prefixrank eval --collection cranfield --queries 10 --depth 20
  prefixrank eval --collection cranfield --model ./Qwen3-Reranker-0.6B --profile qwen3-reranker --run-file cranfield.run
  prefixrank eval --collection cranfield --queries 10 --depth 20 --plain --run-file plain.run

The collection is a directory with corpus.jsonl ("_id", "title", "text"), queries.jsonl ("_id", "text") and qrels.trec.
Each query's DEPTH best documents by BM25 (bm25s, Lucene's variant, English stop words, no stemming) are scored; nDCG@10
and MRR (ir_measures) are over the queries to which some document is relevant. The run file is in TREC's format; an
interrupted run goes on from it, once a query that is in it got the same scores again. Exit codes: 0; 1 some document
got no score; 2 could not begin or go on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments and the settings of the model."""
    parser.add_argument("--collection", type=Path, required=True, metavar="DIR", help="the test collection")
    parser.add_argument("--queries", type=whole(1), metavar="N", help="only the first N judged queries (default: all)")
    parser.add_argument("--depth", type=whole(1), default=100, metavar="K", help="candidates a query (default: 100)")
    parser.add_argument("--run-file", type=Path, metavar="FILE", help="TREC run (default: <name of DIR>.run)")
    parser.add_argument("--plain", action="store_true", help="by transformers one document at a time, to compare with")
    parser.add_argument(
        "--timeout", type=POSITIVE, default=3600.0, metavar="SECONDS", help="of a query (default: 3600)"
    )
    add_document_limit(parser)
    add_target(parser)
    add_settings(parser, MODEL_SETTINGS)


def run(args: argparse.Namespace) -> int:
    from scorer.evaluate import default_run_file
    from scorer.evaluate import run as evaluate

    args.run_file = args.run_file or default_run_file(args.collection)
    return evaluate(args)
