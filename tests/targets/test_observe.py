"""`make test-observe`: a real Prometheus scrapes a real loaded service; every panel and every rule shows something.

With PANELS=FILE the main panels are drawn from that data.
"""

import asyncio
import json
import math
import os
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from deploy.grafana import dashboard
from scorer.demo import Server
from tests.scorer.test_server import free_port
from tests.targets.load import traffic

pytestmark = pytest.mark.target

ROOT = Path(__file__).parent.parent.parent
SECONDS = 75
PROMETHEUS = Path(os.environ.get("PROMETHEUS_BIN", "/usr/bin")) / "prometheus"
DRAWN = (
    "Calls by code",
    "Time of answered calls",
    "p99 of each stage",
    "Documents by strategy",
    "Computed and saved",
    "Self-check drift",
)


class Prometheus:
    def __init__(self, port):
        self.base = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path, **parameters):
        url = f"{self.base}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        return told["data"]

    def values(self, expression):
        """Label set and value of each series of an instant query."""
        found = self.get("query", query=expression)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]


@contextmanager
def prometheus(directory, target):
    port = free_port()
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())
    for group in rules["groups"]:
        group["interval"] = "2s"
    (directory / "rules.yaml").write_text(yaml.safe_dump(rules))
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "2s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "prefixrank", "static_configs": [{"targets": [target]}]}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(settings))
    command = [PROMETHEUS, f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = subprocess.Popen(command)
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory):
    """A Prometheus that has watched a service with the embedded model answer for a while, and still does."""
    server = Server(["--self-check-seconds=3"])
    try:
        target = server.wait_until_listening()
        with prometheus(tmp_path_factory.mktemp("prometheus"), server.metrics) as found:
            done = []
            working = threading.Thread(target=lambda: done.append(asyncio.run(traffic(target, SECONDS))))
            working.start()
            time.sleep(SECONDS * 0.8)
            yield found
            working.join()
            answered, refused = done[0]
            assert answered > 20
            assert refused > 0
    finally:
        server.stop()


def asked(expression):
    """A panel's query as Grafana sends it."""
    return expression.replace("$__rate_interval", "30s").replace("$job", ".+")


@pytest.mark.parametrize("panel", list(dashboard.panels()), ids=lambda panel: panel.title)
def test_every_panel_shows_something(looked_at, panel):
    for expression, legend in panel.queries:
        found = looked_at.values(asked(expression))
        assert found, expression
        assert any(math.isfinite(value) for _, value in found), expression
        for label in ("code", "status", "stage", "strategy", "result", "instance", "job"):
            if f"{{{{{label}}}}}" in legend:
                assert all(metric.get(label) for metric, _ in found), legend


@pytest.mark.parametrize(
    ("title", "least"),
    [("Calls by code", 0.1), ("Time of answered calls", 0.001), ("Computed and saved", 1), ("Serving", 1)],
)
def test_what_must_move_under_load_moves(looked_at, title, least):
    (panel,) = [p for p in dashboard.panels() if p.title == title]
    for expression, _ in panel.queries:
        assert max(value for _, value in looked_at.values(asked(expression))) >= least


def test_the_self_check_ran_and_found_no_drift(looked_at):
    checks = {m["result"]: v for m, v in looked_at.values("prefixrank_self_checks_total")}
    assert checks["ok"] >= 2
    assert checks["drifted"] == 0
    assert looked_at.values("prefixrank_self_check_drift")[0][1] <= 1e-4


def test_every_rule_evaluates_and_records(looked_at):
    groups = looked_at.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    written = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())
    assert len(rules) == sum(len(group["rules"]) for group in written["groups"])
    assert [r["name"] for r in rules if r["health"] != "ok"] == []
    for rule in rules:
        if rule["type"] == "recording":
            assert looked_at.values(rule["name"]), rule["name"]


def test_no_alert_is_pending_but_what_the_load_explains(looked_at):
    """Two cores and a 135-million-parameter model: calls over 0.5 s are expected here, nothing else is."""
    alerts = {alert["labels"]["alertname"] for alert in looked_at.get("alerts")["alerts"]}
    assert alerts <= {"PrefixRankLatencyBurnFast", "PrefixRankLatencyBurnSlow", "PrefixRankQueueGrowth"}


@pytest.mark.skipif("PANELS" not in os.environ, reason="PANELS=FILE draws the main panels")
def test_draw_the_main_panels(looked_at):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    end = time.time()
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 6.5), constrained_layout=True)
    for axis, title in zip(axes.flat, DRAWN, strict=True):
        (panel,) = [p for p in dashboard.panels() if p.title == title]
        for expression, legend in panel.queries:
            data = looked_at.get("query_range", query=asked(expression), start=end - 50, end=end, step=1)
            for series in data["result"]:
                name = legend
                for label, value in series["metric"].items():
                    name = name.replace(f"{{{{{label}}}}}", value)
                points = [(float(at) - end + 50, float(value)) for at, value in series["values"]]
                if any(value > 0 for _, value in points) or len(data["result"]) == 1:
                    axis.plot(*zip(*points, strict=True), label=name)
        axis.set_title(f"{title} [{panel.unit}]")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
    figure.savefig(os.environ["PANELS"], dpi=70)
