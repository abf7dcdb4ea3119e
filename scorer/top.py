"""`prefixrank top`: what a server does right now, from two readings of its metrics."""

from __future__ import annotations

import argparse
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING

from scorer.errors import ConfigError, first_line
from scorer.flags import address, number, whole

if TYPE_CHECKING:
    from rich.console import RenderableType

EXAMPLE = """example:
  prefixrank top --target localhost:9100

Rates are of the last --interval seconds, times in milliseconds. A server that goes is waited for. Exit codes: 0; 2 no
metrics there to begin with, or a wrong argument."""

Key = tuple[str, frozenset[tuple[str, str]]]
Samples = Mapping[Key, float]
STAGES = ("tokenize", "queue", "plan", "forward", "total")
QUANTILES = (0.5, 0.9, 0.99)
READ_SECONDS = 5.0
MIN_SECONDS, MAX_SECONDS = 0.1, 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    told = "a server's metrics (default: localhost:9100)"
    parser.add_argument("--target", type=address, metavar="HOST:PORT", default="localhost:9100", help=told)
    told = "between readings, at least 0.1 (default: 2)"
    parser.add_argument("--interval", type=number(MIN_SECONDS, MAX_SECONDS), default=2.0, metavar="SECONDS", help=told)
    parser.add_argument("--count", type=whole(0), default=0, metavar="N", help="stop after N views; 0 (default): never")


def run(args: argparse.Namespace) -> int:
    """Shows views until --count or the keyboard ends it."""
    from rich.live import Live

    from scorer.console import plain_console

    def read() -> Samples:
        return fetch(f"http://{args.target}/metrics")

    console = plain_console()
    shown = views(read, args.interval, args.count)
    if not console.is_terminal:
        for each in shown:
            console.print(each)
        return 0
    with Live(next(shown), console=console, auto_refresh=False, screen=args.count == 0) as live:
        for each in shown:
            live.update(each, refresh=True)
    return 0


def views(read: Callable[[], Samples], interval: float, count: int) -> Iterator[RenderableType]:
    """A picture every `interval` seconds, `count` of them; 0: without end.

    Raises ConfigError where there is nothing to read at first; later that is a picture too.
    """
    before, at = read(), time.monotonic()
    shown = 0
    while not count or shown < count:
        time.sleep(interval)
        try:
            after, now = read(), time.monotonic()
        except ConfigError as error:
            yield f"{time.strftime('%H:%M:%S')} {error}; looking again"
        else:
            yield view(Reading(before, after, now - at))
            before, at = after, now
        shown += 1


def fetch(url: str) -> Samples:
    """The samples at this http:// address. Raises ConfigError where there are none of ours."""
    try:
        with urllib.request.urlopen(url, timeout=READ_SECONDS) as page:  # nosec B310
            found = parse(page.read().decode())
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(f"no metrics at {url}: {first_line(error)}") from None
    if _key("serving", {}) not in found:
        raise ConfigError(f"no metrics of prefixrank at {url}")
    return found


def parse(text: str) -> Samples:
    """The samples of a metrics page. Raises ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


@dataclass(frozen=True, slots=True)
class Calls:
    """Answered calls of one kind, by their labels."""

    method: str
    priorities: tuple[str, ...]

    def include(self, labels: Mapping[str, str]) -> bool:
        """A server of an earlier release tells of Score alone, and of no class."""
        return labels.get("method", "score") == self.method and labels.get("priority", "normal") in self.priorities


INTERACTIVE = Calls("score", ("normal", "high"))  # those of the objective
OTHERS = {"low class": Calls("score", ("low",)), "beam search": Calls("beam_search", ("low", "normal", "high"))}


@dataclass(frozen=True, slots=True)
class Reading:
    """Two readings and the seconds between them."""

    before: Samples
    after: Samples
    seconds: float

    def now(self, name: str, **labels: str) -> float:
        """A gauge; 0 where it is absent."""
        return self.after.get(_key(name, labels), 0.0)

    def rate(self, name: str, **labels: str) -> float:
        """A counter's growth in a second. A server that started anew counts from zero."""
        key = _key(name, labels)
        grown = self.after.get(key, 0.0) - self.before.get(key, 0.0)
        return (grown if grown >= 0 else self.after.get(key, 0.0)) / self.seconds

    def by(self, name: str, label: str) -> dict[str, float]:
        """Rates by the values of one label, the largest first; those at zero are left out."""
        names = f"prefixrank_{name}"
        values = {dict(labels).get(label, "") for known, labels in self.after if known == names}
        rates = {value: self.rate(name, **{label: value}) for value in values}
        return {value: rate for value, rate in sorted(rates.items(), key=lambda x: -x[1]) if rate > 0}

    def quantile(self, q: float, stage: str, calls: Calls) -> float | None:
        """Seconds, interpolated within a bucket as Prometheus does; None where nothing was answered."""
        counts: dict[float, float] = {}
        for name, labels in self.after:
            told = dict(labels)
            if name == "prefixrank_stage_seconds_bucket" and told["stage"] == stage and calls.include(told):
                upper = float(told["le"])
                counts[upper] = counts.get(upper, 0.0) + self.rate("stage_seconds_bucket", **told)
        return quantile(q, sorted(counts.items()))


def quantile(q: float, buckets: list[tuple[float, float]]) -> float | None:
    """buckets: (upper bound, count up to it), ascending, the last bound infinite."""
    total = buckets[-1][1] if buckets else 0.0
    if not total:
        return None
    wanted, lower, below = q * total, 0.0, 0.0
    for upper, count in buckets:
        if count >= wanted and count > below:
            return lower if upper == float("inf") else lower + (upper - lower) * (wanted - below) / (count - below)
        lower, below = upper, count
    return lower


def view(reading: Reading) -> RenderableType:
    """One picture of a reading."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.table import Table

    stages = Table("stage", *(f"p{q * 100:g} ms" for q in QUANTILES), title="time of answered calls")
    rows = [(stage, stage, INTERACTIVE) for stage in STAGES]
    rows += [(f"total, {name}", "total", kind) for name, kind in OTHERS.items()]
    for name, stage, kind in rows:
        times = [reading.quantile(q, stage, kind) for q in QUANTILES]
        stages.add_row(name, *("-" if t is None else f"{t * 1000:.1f}" for t in times))
    calls = _rates("calls/s by code", reading.by("requests_total", "code"))
    documents = _rates("documents/s by status", reading.by("documents_total", "status"))
    strategies = _rates("documents/s by strategy", reading.by("strategy_documents_total", "strategy"))
    return Group(_headline(reading), stages, Columns([calls, documents, strategies]))


def _headline(reading: Reading) -> str:
    computed, saved = reading.rate("computed_tokens_total"), reading.rate("saved_tokens_total")
    prefix, cached = reading.rate("prefix_tokens_total"), reading.rate("cached_prefix_tokens_total")
    state = "serving" if reading.now("serving") else "NOT SERVING"
    return (
        f"{state}   in flight {reading.now('in_flight_requests'):g}   queue {reading.now('queue_tokens'):g} tokens   "
        f"computed {computed:.0f} tokens/s   saved {_share(saved, saved + computed)}   "
        f"prefix cached {_share(cached, prefix)}   drift {reading.now('self_check_drift'):.2g}"
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _rates(title: str, rates: Mapping[str, float]) -> RenderableType:
    from rich.table import Table

    table = Table("", "", title=title, show_header=False)
    for name, rate in rates.items():
        table.add_row(name, f"{rate:.1f}")
    return table


def _key(name: str, labels: Mapping[str, str]) -> Key:
    return f"prefixrank_{name}", frozenset(labels.items())
