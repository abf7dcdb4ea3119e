"""The bench of the prefix cache runs on a CPU, with weights of tiny shapes."""

import json

import pytest

from loadtest import bench_cache
from loadtest.random_checkpoint import write_checkpoint
from loadtest.shapes import Size
from scorer.__main__ import main

TINY = Size(2, 64, 4, 2, 16, 96, True)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("0.6B", "4B"):  # what is there is not written again: the sizes of true shapes are tiny here
        write_checkpoint(TINY, tmp_path / "prefixrank" / f"random-{name}")
    return ["bench", "cache", "--device=cpu", "--threads=1", "--shape=64,8,2", "--seconds=0.02"]


def test_a_cached_prefix_is_found_and_a_new_one_is_not(tiny, tmp_path, capsys):
    output = tmp_path / "rows" / "cache.jsonl"
    assert main([*tiny, "--size=0.6B", f"--output={output}"]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 6 + 2 * bench_cache.TURNS
    cached = {(row["what"], row["prefixes"]): row["cached"] for row in rows}
    assert cached["calls", "new"] == cached["no cache", "new"] == cached["cache that misses", "new"] == 0
    assert cached["calls", "cached"] == 64
    assert cached["two in a pass", "shared"] == 32, "one of the two finds it"
    assert "a cache that never hits costs" in capsys.readouterr().out


def test_several_sizes_run_one_after_the_other(tiny, tmp_path):
    output = tmp_path / "cache.jsonl"
    assert main([*tiny, "--size=0.6B", "--size=4B", f"--output={output}"]) == 0
    models = [json.loads(line)["model"] for line in output.read_text().splitlines()]
    assert list(dict.fromkeys(models)) == ["0.6B", "4B"]


def test_a_size_that_cannot_start_ends_the_command_with_its_reason(tiny, capfd):
    assert main([*tiny, "--size=0.6B", "--size=4B", "--max-pass-tokens=100000000"]) == 2
    told = capfd.readouterr().err
    assert "prefixrank: " in told
    assert "Traceback" not in told
