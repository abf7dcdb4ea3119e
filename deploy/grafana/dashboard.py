"""The Grafana dashboard, built from code: `python -m deploy.grafana.dashboard` writes prefixrank.json beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

FILE = Path(__file__).parent / "prefixrank.json"
JOB = 'job=~"$job"'
WINDOW = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. queries: (PromQL, legend)."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    told: str = ""


def _gauge(title: str, name: str, how: str = "sum") -> Panel:
    return Panel(title, "short", ((f"{how} by (instance) (prefixrank_{name}{{{JOB}}})", "{{instance}}"),))


def _rates(title: str, name: str, by: str) -> Panel:
    return Panel(title, "cps", ((_rate(name, by), f"{{{{{by}}}}}"),))


def _rate(name: str, by: str, selector: str = "") -> str:
    return f"sum by ({by}) (rate(prefixrank_{name}{{{JOB}{selector}}}{WINDOW}))"


def _quantile(q: float, selector: str, by: str = "le") -> str:
    return f"histogram_quantile({q}, {_rate('stage_seconds_bucket', by, selector)})"


def _share(part: str, whole: str) -> str:
    return f"{part} / ({whole})"


_OBJECTIVE = ',method="score",priority!="low"'
_TOTAL = ',stage="total"'
_TOLD = "Score calls above the low class."
_SAVED, _COMPUTED = _rate("saved_tokens_total", "job"), _rate("computed_tokens_total", "job")

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Calls",
        (
            Panel("Calls by code", "reqps", ((_rate("requests_total", "code"), "{{code}}"),)),
            Panel(
                "Time of answered calls",
                "s",
                tuple((_quantile(q, _OBJECTIVE + _TOTAL), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)),
                _TOLD,
            ),
            Panel(
                "Calls slower than 0.5 s",
                "percentunit",
                (
                    (
                        "1 - "
                        + _share(
                            _rate("stage_seconds_bucket", "job", _OBJECTIVE + _TOTAL + ',le="0.5"'),
                            _rate("stage_seconds_count", "job", _OBJECTIVE + _TOTAL),
                        ),
                        "{{job}}",
                    ),
                ),
                f"{_TOLD} The objective is at most 1 %.",
            ),
            Panel(
                "p99 of each kind of call",
                "s",
                ((_quantile(0.99, _TOTAL, "method, priority, le"), "{{method}}, {{priority}}"),),
                "Bulk jobs (low) and beam searches are not of the objective.",
            ),
            _rates("Documents by status", "documents_total", "status"),
        ),
    ),
    (
        "Where the time goes",
        (
            Panel(
                "p99 of each stage",
                "s",
                ((_quantile(0.99, _OBJECTIVE, "stage, le"), "{{stage}}"),),
                f"{_TOLD} Queue far above forward: not enough replicas. Tokenize above forward: CPUs are short.",
            ),
            _gauge("Tokens that wait", "queue_tokens"),
            _gauge("Calls under way", "in_flight_requests"),
            Panel(
                "How full passes are",
                "percentunit",
                tuple(
                    (f"histogram_quantile({q}, {_rate('batch_fill_bucket', 'le')})", f"p{q * 100:g}")
                    for q in (0.1, 0.5)
                ),
                "Near 100 % and a queue: the device is busy. Low and a queue: look at plan and tokenize.",
            ),
            Panel(
                "Accepted and not answered",
                "cps",
                (
                    (_rate("deadline_misses_total", "job"), "deadline came first"),
                    (_rate("cancelled_total", "job"), "caller went away"),
                ),
            ),
            _rates("Not accepted, by reason", "admission_refusals_total", "reason"),
            _rates("Documents by strategy", "strategy_documents_total", "strategy"),
        ),
    ),
    (
        "Tokens",
        (
            Panel("Computed and saved", "cps", ((_COMPUTED, "computed"), (_SAVED, "saved"))),
            Panel(
                "Share saved by sharing prefixes",
                "percentunit",
                ((_share(_SAVED, f"{_SAVED} + {_COMPUTED}"), "{{job}}"),),
            ),
            Panel(
                "Prefix tokens found in the cache",
                "percentunit",
                (
                    (
                        _share(_rate("cached_prefix_tokens_total", "job"), _rate("prefix_tokens_total", "job")),
                        "{{job}}",
                    ),
                ),
            ),
            _rates("Prefix tokens by where they were found", "cache_tokens_total", "found"),
            _gauge("Blocks in the cache", "cache_blocks"),
            _rates("Blocks that made room", "cache_evicted_blocks_total", "instance"),
            Panel(
                "Documents of a call",
                "short",
                tuple(
                    (f"histogram_quantile({q}, {_rate('request_documents_bucket', 'le')})", f"p{q * 100:g}")
                    for q in (0.5, 0.99)
                ),
            ),
        ),
    ),
    (
        "Is it right",
        (
            _gauge("Self-check drift", "self_check_drift", "max"),
            _rates("Self-checks", "self_checks_total", "result"),
            _rates("Scores that are no numbers", "non_finite_scores_total", "instance"),
            _rates("Internal errors", "internal_errors_total", "instance"),
            _gauge("Serving", "serving"),
        ),
    ),
)


def panels() -> Iterator[Panel]:
    """All of them, in order."""
    for _, row in ROWS:
        yield from row


def build() -> str:
    """The dashboard as JSON."""
    source = DataSourceRef(type_val="prometheus", uid="$datasource")
    dashboard = (
        Dashboard("PrefixRank")
        .uid("prefixrank")
        .tags(["prefixrank"])
        .refresh("30s")
        .time("now-1h", "now")
        .with_variable(DatasourceVariable("datasource").type("prometheus"))
        .with_variable(
            QueryVariable("job")
            .datasource(source)
            .query("label_values(prefixrank_serving, job)")
            .include_all(True)
            .multi(True)
        )
    )
    for title, row in ROWS:
        dashboard = dashboard.with_row(Row(title))
        for panel in row:
            dashboard = dashboard.with_panel(_panel(panel, source, 24 // min(len(row), 4)))
    return JSONEncoder(sort_keys=True, indent=2).encode(dashboard.build()) + "\n"


def _panel(panel: Panel, source: DataSourceRef, span: int) -> TimeSeries:
    made = TimeSeries().title(panel.title).description(panel.told).datasource(source).unit(panel.unit).min(0)
    for number, (expression, legend) in enumerate(panel.queries):
        query = Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + number))
        made = made.with_target(query)
    return made.span(span).height(8)


def main(arguments: Sequence[str]) -> int:
    """Writes the file, or with --check compares it."""
    built = build()
    if "--check" in arguments:
        if FILE.read_text(encoding="utf-8") != built:
            print(f"{FILE} is not what its code builds: make generated", file=sys.stderr)
            return 1
        return 0
    FILE.write_text(built, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
