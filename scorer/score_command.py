"""`prefixrank score`: texts or lines in, tables or JSON lines out, with the model in this process or on a server."""

from __future__ import annotations

import argparse
import json
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from scorer.errors import ConfigError
from scorer.flags import MODEL_SETTINGS, POSITIVE, add_document_limit, add_settings, config_of, given_flags, whole
from scorer.remote import add_target
from scorer.scoring import at, here

if TYPE_CHECKING:
    from prefixrank.v1 import scorer_pb2 as pb
    from scorer.scoring import Score

    Show = Callable[[pb.ScoreRequest, pb.ScoreResponse], None]

EXAMPLE = """example:
  prefixrank score "capital of France" "Paris is the capital." "Bananas are yellow."
  prefixrank score --target localhost:50051 --query "capital of France" < one-document-a-line.txt
  prefixrank score --json --input requests.jsonl > scores.jsonl

A JSON line is {"query": "...", "documents": ["...", {"id": "a", "text": "..."}]} with, if wanted, "instruction" and
"request_id". Without --target the model runs in this process. Scores are natural-log odds under a profile with two
labels; lengths are in tokens, times in seconds.
Exit codes: 0 every request answered; 1 a line or a request failed, the others are answered; 2 could not begin."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request to score, or what is wrong with the line it should have come from."""

    where: str
    request: pb.ScoreRequest | None
    problem: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments and the settings of the model."""
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="the query, then its documents")
    parser.add_argument("--query", help="the query; the documents are then lines of --input")
    parser.add_argument("--input", metavar="FILE", help="JSON lines, or with --query documents (default: stdin)")
    parser.add_argument("--json", action="store_true", help="write one JSON object a request instead of tables")
    parser.add_argument(
        "--timeout", type=POSITIVE, default=60.0, metavar="SECONDS", help="of each request (default: 60)"
    )
    parser.add_argument("--instruction", help="instead of the profile's own")
    parser.add_argument("--top-n", type=whole(0), default=0, metavar="N", help="only the best N, sorted (default: all)")
    add_document_limit(parser)
    parser.add_argument("--truncation", default="right", choices=["right", "left", "none"], help="the side to cut")
    parser.add_argument("--strategy", default="auto", metavar="NAME", help="such as multi_item (default: auto)")
    add_target(parser)
    add_settings(parser, MODEL_SETTINGS)


def run(args: argparse.Namespace) -> int:
    """Scores what is asked for; 1 where a line or a request failed."""
    _refuse_combinations(args)
    config = None if args.target else config_of(args)
    with ExitStack() as stack:
        jobs = _jobs(args, stack)
        score = stack.enter_context(at(args) if config is None else here(config, args.timeout))
        return _score_all(jobs, score, _show_json if args.json else _show_table(), args.target or "the model")


def _refuse_combinations(args: argparse.Namespace) -> None:
    refuse = args.parser.error
    if args.texts and (args.query is not None or args.input is not None):
        refuse("give the texts as arguments, or --query and --input, not both")
    if len(args.texts) == 1:
        refuse("a query alone: give its documents as well, or use --query and give them a line each")
    if args.target and (given_flags(args) or args.config):
        refuse("settings are for a model in this process; with --target the server has its own")
    if not args.texts and args.input is None and sys.stdin.isatty():
        refuse("nothing to score: give texts, --input, or lines on standard input")


def _jobs(args: argparse.Namespace, stack: ExitStack) -> Iterable[Job]:
    """What is to be scored. Lines are read as they are needed, from a file that `stack` closes."""
    options = _request_options(args)
    if args.texts:
        query, *documents = args.texts
        return [_job("the arguments", partial(_request, query, documents, options))]
    lines = _open(args.input, stack)
    if args.query is not None:
        return [_job(args.input or "standard input", partial(_lines_request, args.query, lines, options))]
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    return (_job(f"line {number}", partial(_json_request, line, options)) for number, line in numbered)


def _open(name: str | None, stack: ExitStack) -> BinaryIO:
    if name is None or name == "-":
        return sys.stdin.buffer
    try:
        return stack.enter_context(open(name, "rb"))
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None


def _lines_request(query: str, lines: Iterable[bytes], options: Mapping[str, Any]) -> pb.ScoreRequest:
    """The request of one query and a document a line. Raises ValueError."""
    documents = [_decoded(number, line) for number, line in enumerate(lines, 1)]
    return _request(query, [line for line in documents if line.strip()], options)


def _decoded(number: int, line: bytes) -> str:
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"line {number}: {_not_utf8(error)}") from None


def _not_utf8(error: UnicodeDecodeError) -> str:
    """What is no text, where a codec's own words would not tell."""
    return f"not UTF-8 text: byte 0x{error.object[error.start]:02x} at byte {error.start + 1}"


def _job(where: str, build: Callable[[], pb.ScoreRequest]) -> Job:
    try:
        return Job(where, build())
    except UnicodeDecodeError as error:
        return Job(where, None, _not_utf8(error))
    except ValueError as error:
        return Job(where, None, str(error))


def _request_options(args: argparse.Namespace) -> dict[str, Any]:
    from prefixrank.v1 import scorer_pb2 as pb

    strategy = "UNSPECIFIED" if args.strategy == "auto" else args.strategy.upper()
    if f"STRATEGY_{strategy}" not in pb.Strategy.keys():  # noqa: SIM118  an enum's wrapper is no mapping
        args.parser.error(f"unknown strategy {args.strategy}")
    return {
        "instruction": args.instruction,
        "top_n": args.top_n,
        "max_tokens_per_document": args.max_tokens_per_document,
        "truncation": pb.Truncation.Value(f"TRUNCATION_{args.truncation.upper()}"),
        "strategy": pb.Strategy.Value(f"STRATEGY_{strategy}"),
    }


def _request(query: str, documents: Sequence[str], options: Mapping[str, Any]) -> pb.ScoreRequest:
    from scorer.client import build_request

    return build_request(query, documents, **options)


def _json_request(line: bytes, options: Mapping[str, Any]) -> pb.ScoreRequest:
    """The request of one JSON line. Raises ValueError saying what is wrong with it."""
    given = json.loads(line.removeprefix(BOM_UTF8).decode())  # of bytes it would guess at UTF-16
    if not isinstance(given, dict) or not {"query", "documents"} <= given.keys():
        raise ValueError('expected an object with "query" and "documents"')
    documents = given["documents"]
    if not isinstance(given["query"], str):
        raise ValueError('"query" is not a string')
    if not isinstance(documents, list):
        raise ValueError('"documents" is not a list')
    unknown = given.keys() - {"query", "documents", "instruction", "request_id"}
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    own = {key: given[key] for key in ("instruction", "request_id") if key in given}
    if not all(isinstance(value, str) for value in own.values()):
        raise ValueError('"instruction" and "request_id" are strings')
    pairs = [_document(i, document) for i, document in enumerate(documents)]
    ids, texts = [id for id, _ in pairs], [text for _, text in pairs]
    return _request(given["query"], texts, {**options, **own, "ids": ids})


def _document(index: int, given: object) -> tuple[str, str]:
    if isinstance(given, str):
        return "", given
    if isinstance(given, dict) and {"text"} <= given.keys() <= {"id", "text"}:
        id, text = given.get("id", ""), given["text"]
        if isinstance(id, str) and isinstance(text, str):
            return id, text
    raise ValueError(f'documents[{index}] is neither a string nor {{"id": "...", "text": "..."}}')


def _score_all(jobs: Iterable[Job], score: Score, show: Show, by: str) -> int:
    """Scores one job after another. What is wrong with one is told, and the others go on. by: who scores."""
    from rich.progress import Progress

    from scorer.client import ScorerError
    from scorer.console import plain_console

    console = plain_console(stderr=True)
    alone = isinstance(jobs, list)
    long = console.is_terminal and not alone
    failed = False
    job = None
    # A bar on standard error must not take standard output with it when that goes to a file.
    with Progress(console=console, disable=not long, transient=True, redirect_stdout=sys.stdout.isatty()) as progress:
        for job in progress.track(jobs, total=None, description="scoring"):
            try:
                if job.request is None:
                    raise ValueError(job.problem)
                show(job.request, score(job.request))
            except (ValueError, ScorerError) as error:
                failed = True
                told = f"{by if alone and _not_the_inputs(error) else job.where}: {error}"
                if show is _show_json:  # a line out for each line in
                    print(json.dumps({"error": told}, ensure_ascii=False), flush=True)
                console.print(told, style="red", soft_wrap=True)
    if job is None:
        console.print("nothing to score: no line in the input")
    return int(failed)


def _not_the_inputs(error: Exception) -> bool:
    """A status that tells of the server, or of the way there."""
    from scorer.client import ScorerError

    return isinstance(error, ScorerError) and error.code.name != "INVALID_ARGUMENT"


def _show_json(request: pb.ScoreRequest, response: pb.ScoreResponse) -> None:
    from google.protobuf.json_format import MessageToDict

    given = MessageToDict(response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    # Protobuf's JSON makes strings of 64-bit numbers.
    given["usage"] = {name: int(value) for name, value in given["usage"].items()}
    print(json.dumps(given, ensure_ascii=False), flush=True)


def _show_table() -> Show:
    from scorer.demo import output, show_ranking

    return partial(show_ranking, output())
