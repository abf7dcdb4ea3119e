"""`make load`: a server with the embedded model, a short open-loop run, then Locust with two workers.

Fails where an accepted call timed out, or where a call failed at all. CSV and HTML land in build/load.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from scorer.__main__ import main as prefixrank
from scorer.demo import Server

SECONDS = 20
LOCUST = (
    "--headless",
    "--processes=2",
    "--users=2",
    "--spawn-rate=2",
    f"--run-time={SECONDS}s",
    "--stop-timeout=60",
    "--traffic=laptop",
    "--only-summary",
    "--exit-code-on-error=1",
)


def main() -> int:
    """0 where everything that was accepted was answered."""
    folder = Path("build/load")
    folder.mkdir(parents=True, exist_ok=True)
    server = Server()
    try:
        target = server.wait_until_listening()
        open_loop = prefixrank(
            [
                "bench",
                "load",
                f"--target={target}",
                "--rates=0.5,1",
                f"--seconds={SECONDS}",
                "--burst=3",
                f"--output={folder / 'open-loop.jsonl'}",
            ]
        )
        closed_loop = _locust(target, folder)
    finally:
        stopped = server.stop()
    for name, code in (("open loop", open_loop), ("locust", closed_loop), ("the server's stop", stopped)):
        print(f"{name}: {'ok' if code == 0 else f'FAILED, exit code {code}'}")
    return int(bool(open_loop or closed_loop or stopped))


def _locust(target: str, folder: Path) -> int:
    command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).parent / "locustfile.py"), *LOCUST]
    command += [f"--host={target}", f"--csv={folder / 'locust'}", f"--html={folder / 'locust.html'}"]
    code = subprocess.run(command, timeout=SECONDS + 180).returncode
    with (folder / "locust_stats.csv").open(encoding="utf-8", newline="") as file:
        total = next(row for row in csv.DictReader(file) if row["Name"] == "Aggregated")
    calls, failed = int(total["Request Count"]), int(total["Failure Count"])
    print(f"locust: {calls} calls, {failed} failed, median {total['Median Response Time']} ms")
    return code or int(failed > 0 or calls == 0)


if __name__ == "__main__":
    sys.exit(main())
