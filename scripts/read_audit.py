"""Says what pip-audit found: `read_audit.py REPORT.json`; 1 where a pinned release has a known vulnerability.

pip-audit calls a release that it has no data on "skipped", and exits with 0 where it skipped all of them.
"""

import json
import sys
from pathlib import Path


def main(report: str) -> int:
    """The exit code."""
    text = Path(report).read_text(encoding="utf-8")
    releases = json.loads(text)["dependencies"] if text.strip() else []
    audited = [release for release in releases if "skip_reason" not in release]
    vulnerable = [release for release in audited if release["vulns"]]
    for release in vulnerable:
        print(release["name"], release["version"], ", ".join(vuln["id"] for vuln in release["vulns"]))
    if audited:
        print(f"pip-audit: {len(vulnerable)} of {len(audited)} releases are vulnerable, of {len(releases)} pinned")
    else:
        why = releases[0]["skip_reason"] if releases else "no answer"
        print(f"pip-audit SKIPPED: no data on any of the {len(releases)} pinned releases here: {why}")
    return int(bool(vulnerable))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
