"""Rules and dashboard agree with the service's own metrics and with README; promtool's part is `make check`."""

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deploy.grafana import dashboard
from scorer.metrics import SECONDS, Metrics

ROOT = Path(__file__).parent.parent.parent
RULES = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())
TESTS = yaml.safe_load((ROOT / "deploy/prometheus/rules_test.yaml").read_text())
SERIES = re.compile(r"\bprefixrank_\w+")


def exported():
    page = generate_latest(Metrics("1").registry).decode()
    return {s.name for family in text_string_to_metric_families(page) for s in family.samples}


def rules(kind):
    return [rule for group in RULES["groups"] for rule in group["rules"] if kind in rule]


def anchors():
    headings = re.findall(r"^#+ (.+)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_every_series_that_a_rule_or_panel_names_is_exported():
    expressions = [rule["expr"] for rule in rules("expr")]
    expressions += [expression for panel in dashboard.panels() for expression, _ in panel.queries]
    named = {name for expression in expressions for name in SERIES.findall(expression)}
    assert len(named) > 15
    assert named <= exported()


def test_every_recorded_series_that_an_alert_uses_is_recorded():
    recorded = {rule["record"] for rule in rules("record")}
    for alert in rules("alert"):
        assert set(re.findall(r"\bprefixrank:[\w:]+", alert["expr"])) <= recorded


def test_the_objective_is_a_bucket():
    for rule in rules("expr"):
        for bound in re.findall(r'le="([\d.]+)"', rule["expr"]):
            assert float(bound) in SECONDS


@pytest.mark.parametrize("alert", rules("alert"), ids=lambda rule: rule["alert"])
def test_every_alert_has_a_runbook_a_severity_and_a_test_in_which_it_fires(alert):
    file, anchor = alert["annotations"]["runbook_url"].split("#")
    assert file == "README.md"
    assert anchor in anchors()
    assert alert["labels"]["severity"] in ("page", "ticket")
    fired = [
        t for story in TESTS["tests"] for t in story.get("alert_rule_test", ()) if t["alertname"] == alert["alert"]
    ]
    assert any(t["exp_alerts"] for t in fired)


def test_the_committed_dashboard_is_what_its_code_builds():
    assert dashboard.main(["--check"]) == 0
