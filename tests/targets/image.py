"""The second half of `make test-image`: runs a container that buildah made, and asks what it must answer."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from scorer.client import ScorerClient
from scorer.demo import LOOPBACK_OPTIONS
from tests.scorer.test_server import free_port

WRITABLE = ("tmp", "proc", "sys", "dev", "run", "etc/hosts", "etc/resolv.conf", "etc/hostname")
BUILD_TOOLS = ("gcc", "cc", "make", "ld", "g++")


def inside(container, *command):
    ran = subprocess.run(["buildah", "run", container, "--", *command], capture_output=True, text=True, timeout=120)
    return ran.returncode, ran.stdout.strip()


def wait_until(done, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if done():
            return True
        time.sleep(0.5)
    return False


def children(pid):
    """Processes below this one, the deepest last."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():  # any thread may have started one
        for child in (thread / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def main(container, image):
    told = json.loads(subprocess.run(["buildah", "inspect", "--type=image", image], capture_output=True).stdout)
    settings = told["Docker"]["config"]
    assert settings["User"] == "10001:10001"
    assert settings["Entrypoint"] == ["prefixrank"]
    assert settings["Healthcheck"]["Test"] == ["CMD", "prefixrank", "health"]
    assert settings["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert inside(container, "id", "-u") == (0, "10001")
    for tool in BUILD_TOOLS:
        assert inside(container, "sh", "-c", f"command -v {tool}")[0] != 0, f"{tool} in the final stage"

    root = Path(subprocess.run(["buildah", "mount", container], capture_output=True, text=True).stdout.strip())
    stamp = Path("build/image/stamp")
    stamp.touch()
    port, http = free_port(), free_port()
    command = [*settings["Entrypoint"], *settings["Cmd"], f"--port={port}", f"--http-port={http}", "--metrics-port=-1"]
    process = subprocess.Popen(["buildah", "run", container, "--", *command, "--host=127.0.0.1"])
    try:
        health = (*settings["Healthcheck"]["Test"][1:], f"--target=localhost:{port}")
        assert inside(container, *health, "--timeout=0.2")[0] == 1, "it loads: not healthy yet"
        assert wait_until(lambda: inside(container, *health)[0] == 0, 240), "it never became healthy"
        with ScorerClient(f"localhost:{port}", channel_options=LOOPBACK_OPTIONS) as client:
            results = client.score("capital of France", ["Bananas are yellow.", "Paris is the capital."]).results
            print("scores:", [round(result.score, 3) for result in results])
            assert results[1].score > results[0].score
        served = [pid for pid in children(process.pid) if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(served[-1], signal.SIGTERM)
        assert process.wait(60) == 0, "SIGTERM ends it with 0"
    finally:
        if process.poll() is None:
            for pid in (*reversed(children(process.pid)), process.pid):
                os.kill(pid, signal.SIGKILL)
    changed = subprocess.run(
        ["find", root, "-xdev", "-newer", stamp, "-type", "f", "-printf", "%P\\n"], capture_output=True, text=True
    ).stdout.split()
    wrote = [path for path in changed if not path.startswith(WRITABLE)]
    assert not wrote, f"written outside /tmp: {wrote}"
    print("image: user 10001, healthy, scored, stopped with 0, wrote nothing outside /tmp")


if __name__ == "__main__":
    main(*sys.argv[1:])
