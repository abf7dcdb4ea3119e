"""The rules as the Prometheus operator takes them: `python -m deploy.prometheus.generate`, with --check compares."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

RULES = Path(__file__).parent / "rules.yaml"
FILE = Path(__file__).parent.parent / "k8s" / "base" / "prometheusrule.yaml"
HEAD = "# Made from deploy/prometheus/rules.yaml by deploy/prometheus/generate.py.\n"


def build() -> str:
    """The PrometheusRule."""
    made = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "prefixrank"},
        "spec": yaml.safe_load(RULES.read_text(encoding="utf-8")),
    }
    return HEAD + yaml.safe_dump(made, sort_keys=False, width=120)


def main(arguments: Sequence[str]) -> int:
    """Writes the file, or compares it."""
    if "--check" not in arguments:
        FILE.write_text(build(), encoding="utf-8")
        return 0
    if FILE.read_text(encoding="utf-8") == build():
        return 0
    print(f"{FILE} is not what its code builds: make generated", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
