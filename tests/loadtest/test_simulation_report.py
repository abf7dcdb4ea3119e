"""README's simulated figures are those of the committed report."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORT = (ROOT / "loadtest" / "results" / "simulation" / "report.md").read_text()
README = (ROOT / "README.md").read_text()
README = README[README.index("### Scheduling, simulated") : README.index("### Attention on one H200")]


def cells(text, *begin):
    """Of the row that begins so."""
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|"))
    return next(row[len(begin) :] for row in rows if tuple(row[: len(begin)]) == begin)


@pytest.mark.parametrize(
    ("told", "name"),
    [("ours", "ours"), ("first come, first served", "first come"), ("shortest first", "shortest first")],
)
def test_policies(told, name):
    _, short, _, long, *_ = cells(REPORT, name)
    assert cells(README, told) == [short, long]


@pytest.mark.parametrize(("told", "load"), [("1 x what the device can do", "1 x"), ("2 x", "2 x"), ("3 x", "3 x")])
def test_deadlines(told, load):
    in_time, goodput, *_ = cells(REPORT, load)
    part = f"{float(in_time.rstrip('%')):.1f} %".replace("100.0 %", "100 %")
    assert cells(README, told) == [part, f"{int(goodput):,}"]


@pytest.mark.parametrize("part", [10, 20, 30])
def test_searches_beside_scoring(part):
    times = [
        ", ".join(re.findall(r"\(([\d.]+) x\)", " ".join(cells(REPORT, f"{part}%", how))))
        for how in ("in turns", "in one piece")
    ]
    assert cells(README, f"{part} %") == times
