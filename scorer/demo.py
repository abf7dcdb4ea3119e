"""`prefixrank demo`: a server of its own, a few queries through the client, readable rankings."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefixrank.v1 import scorer_pb2 as pb
from scorer.client import ScorerClient, build_request
from scorer.config import Config
from scorer.console import plain_console
from scorer.errors import StartError
from scorer.metrics import STAGES

PIPE_WIDTH = 120
DOCUMENT_CHARACTERS = 60
STOP_SECONDS = 60.0

# A proxy in the environment must not come between two processes of one machine.
LOOPBACK_OPTIONS = (("grpc.enable_http_proxy", 0),)

LISTENING = re.compile(r"listening grpc=([^\s\"]+) metrics=([^\s\"]+)(?: http=([^\s\"]+))?")

Query = dict[str, Any]


def run(config: Config, arguments: Sequence[str]) -> int:
    """Shows everything once and returns the exit code. `arguments` are the server's settings, as flags."""
    console, queries = output(), demo_queries()
    server = Server(arguments)
    try:
        with working(console, "starting the server (the first time, the model is converted: about a minute)"):
            target = server.wait_until_listening()
        with ScorerClient(target, channel_options=LOOPBACK_OPTIONS) as client:
            _show_model(console, client.model_info())
            rate = _rank(console, client, queries)
        _compare(console, config, queries, rate)
    finally:
        code = server.stop()
    console.print(f"\nserver stopped, exit code {code}")
    return int(code != 0)


def demo_queries() -> list[Query]:
    """The queries of demo_queries.json: each has "query" and "documents" of "id", "text" and "grade"."""
    text = files("scorer").joinpath("demo_queries.json").read_text(encoding="utf-8")
    queries: list[Query] = json.loads(text)["queries"]
    return queries


def output() -> Console:
    """Standard output: as wide as the terminal, or wide enough for a table where it is none."""
    console = plain_console()
    return console if console.is_terminal else plain_console(width=PIPE_WIDTH)


@contextmanager
def working(console: Console, what: str) -> Iterator[None]:
    """A spinner on a terminal, a line elsewhere."""
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(what)
        yield


def show_ranking(console: Console, request: pb.ScoreRequest, response: pb.ScoreResponse) -> None:
    """One request's documents, best first, and what they cost."""
    scored = sorted((r for r in response.results if r.HasField("score")), key=lambda r: -r.score)
    table = Table(title=Text(_line(request.query.text), style="bold"), title_justify="left", box=None, pad_edge=False)
    for name in ("rank", "score", "probability"):
        table.add_column(name, justify="right")
    table.add_column("document", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("tokens", justify="right")
    table.add_column("note")
    for rank, result in enumerate(scored, 1):
        probability = f"{result.probability:.4f}" if result.HasField("probability") else ""
        _add_row(table, request, result, str(rank), f"{result.score:+.3f}", probability)
    for result in response.results:
        if not result.HasField("score"):
            _add_row(table, request, result, "-", "", "")
    console.print()
    console.print(table)
    console.print(Text(_costs(response), style="dim"), soft_wrap=True)


def _add_row(table: Table, request: pb.ScoreRequest, result: pb.DocumentResult, *numbers: str) -> None:
    document = _line(request.documents[result.index].text)
    table.add_row(*numbers, Text(document), str(result.tokens), Text(_note(result)))


def _line(text: str) -> str:
    """The beginning of a text, on one line and harmless to a terminal."""
    text = " ".join(text[: 2 * DOCUMENT_CHARACTERS].split())
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= DOCUMENT_CHARACTERS else text[: DOCUMENT_CHARACTERS - 1] + "…"


def _note(result: pb.DocumentResult) -> str:
    if result.truncated:
        return f"cut from {result.original_document_tokens} to {result.document_tokens}"
    if result.status == pb.DOCUMENT_STATUS_OK:
        return ""
    return pb.DocumentStatus.Name(result.status).removeprefix("DOCUMENT_STATUS_").lower()


def _costs(response: pb.ScoreResponse) -> str:
    usage, timings = response.usage, response.timings
    shares = ", ".join(
        f"{pb.Strategy.Name(s.strategy).removeprefix('STRATEGY_').lower()} {s.documents}"
        for s in response.strategy.shares
    )
    stages = ", ".join(f"{stage} {getattr(timings, f'{stage}_seconds') * 1000:.1f}" for stage in STAGES)
    alone = usage.computed_tokens + usage.saved_tokens
    return (
        f"strategy: {shares or 'none'} ({response.strategy.reason})\n"
        f"tokens:   {usage.computed_tokens} computed, {alone} asked one document at a time\n"
        f"time:     {stages} ms"
    )


def _show_model(console: Console, info: pb.GetModelInfoResponse) -> None:
    verified = "" if info.profile_verified else ", unverified"
    labels = " / ".join(label.text for label in info.labels)
    console.print(
        Text(
            f"{info.model} ({info.architecture}, {info.dtype}, {info.device}, attention by {info.backend})\n"
            f"profile {info.profile}{verified}" + (f", labels {labels}" if labels else "")
        )
    )


def _rank(console: Console, client: ScorerClient, queries: Iterable[Query]) -> float:
    """Ranks every query's documents; returns documents/s, seen from here."""
    documents, seconds = 0, 0.0
    for query in queries:
        ids, texts = ([document[key] for document in query["documents"]] for key in ("id", "text"))
        request = build_request(query["query"], texts, ids=ids)
        started = time.perf_counter()
        response = client.score_request(request)
        seconds += time.perf_counter() - started
        documents += len(texts)
        show_ranking(console, request, response)
    return documents / seconds


def _compare(console: Console, config: Config, queries: Sequence[Query], rate: float) -> None:
    from scorer.verify import transformers_alone_rate  # torch and transformers: only now are they needed

    console.print()
    with working(console, "the same documents through transformers, one at a time"):
        alone = transformers_alone_rate(config, [(q["query"], [d["text"] for d in q["documents"]]) for q in queries])
    console.print(f"documents/s: {rate:.1f} here, {alone:.1f} by transformers one at a time: {rate / alone:.1f} x")


@dataclass
class Server:
    """`prefixrank serve` as a process, on free loopback ports unless one is given for gRPC."""

    arguments: Sequence[str] = ()
    port: int = 0
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", "scorer", "serve", *self.arguments]
        loopback = ["--host=127.0.0.1", f"--port={self.port}", "--metrics-port=0"]
        self.process = subprocess.Popen([*command, *loopback], stderr=subprocess.PIPE, text=True, errors="replace")
        self.target: str | None = None
        self.metrics: str | None = None
        self.http: str | None = None
        self._told = threading.Event()
        assert self.process.stderr is not None, "standard error is a pipe"
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def wait_until_listening(self) -> str:
        """The address of a server that is SERVING. Raises StartError with its last words where it ends instead."""
        self._told.wait()
        if self.target is None:
            code = self.process.wait()
            raise StartError(f"the server ended with exit code {code}\n" + "".join(self.tail).rstrip())
        return self.target

    def stop(self) -> int:
        """Stops it with SIGTERM; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._reader.join()

    def _read(self, stream: IO[str]) -> None:
        """Reads its log to the end, so that it never waits for us."""
        with stream:
            for line in stream:
                self.tail.append(line)
                if found := LISTENING.search(line):
                    self.target, self.metrics, self.http = found.groups()
                    self._told.set()
        self._told.set()
