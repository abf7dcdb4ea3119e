"""Whose times strategies are chosen by: a damaged file stops the start, and others' times are told at it."""

import json
import logging
from dataclasses import replace

import pytest

from attention.plans import HeadShape
from attention.timing import built_in
from scorer.__main__ import main
from scorer.calibrate import require_whole
from scorer.errors import ConfigError
from scorer.runtime import Runtime
from scorer.times import load_times, warn_of_others
from tests.scorer.test_runtime import config

H200 = "NVIDIA H200"


def warnings(caplog, logger="scorer.times"):
    return [r.getMessage() for r in caplog.records if r.name == logger and r.levelno == logging.WARNING]


@pytest.fixture
def damaged(tmp_path):
    file = tmp_path / "damaged.json"
    built_in().write(file)
    document = json.loads(file.read_text())
    document["fits"]["fa2/causal/paged"]["coefficients"].pop()
    file.write_text(json.dumps(document))
    return file


def test_every_command_names_the_file_and_the_field(damaged, capsys):
    told = "damaged.json: not a calibration: fits.fa2/causal/paged.coefficients: a list of 91 numbers, got 90"
    with pytest.raises(ConfigError, match=told):
        load_times(damaged)
    assert main(["explain", f"--calibration={damaged}"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["auto", "threshold", "measured"])
def test_no_start_with_a_damaged_calibration(tmp_path, damaged, policy):
    """Whatever chooses: it would answer INTERNAL later."""
    with pytest.raises(ConfigError, match=r"damaged\.json: not a calibration: fits\."):
        Runtime.load(config(tmp_path, calibration=str(damaged), policy=policy))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", None], ids=["empty", "bytes", "list", "folder"])
def test_a_file_that_is_no_calibration_is_a_setting_that_is_wrong(tmp_path, content):
    file = tmp_path / "c.json"
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.json"):
        load_times(file)


@pytest.mark.parametrize(
    ("heads", "machine", "told"),
    [
        ((16, 8, 128), H200, []),
        ((32, 8, 128), H200, ["of layers with 16/8 heads of 128, and the model has 32/8 heads of 128"]),
        ((16, 8, 64), H200, ["and the model has 16/8 heads of 64"]),
        (None, H200, ["of layers with 16/8 heads of 128, and the model's layers differ"]),
        ((16, 8, 128), "cpu", ["measured on NVIDIA H200, not on this CPU"]),
        ((16, 8, 128), "NVIDIA L4", ["measured on NVIDIA H200, not on this NVIDIA L4: prefixrank calibrate"]),
        ((4, 2, 16), "cpu", ["not on this CPU", "the model has 4/2 heads of 16"]),
    ],
)
def test_times_of_others_are_told(caplog, heads, machine, told):
    shape = None if heads is None else HeadShape(*heads, scale=1.0, dtype=None)
    warn_of_others(built_in(), shape, machine)
    found = warnings(caplog)
    assert len(found) == len(told)
    for message, part in zip(found, told, strict=True):
        assert part in message


@pytest.mark.parametrize(("policy", "expected"), [("measured", 2), ("threshold", 0), ("auto", 0)])
def test_a_start_on_a_cpu_says_whose_times_it_goes_by(tmp_path, caplog, policy, expected):
    Runtime.load(config(tmp_path, policy=policy)).close()
    assert len(warnings(caplog)) == expected


def test_a_start_with_a_calibration_of_other_heads_says_so(tmp_path, caplog):
    built_in().write(tmp_path / "c.json")
    Runtime.load(config(tmp_path, calibration=str(tmp_path / "c.json"))).close()
    assert any("of layers with 16/8 heads of 128, and the model has 4/2 heads of 16" in w for w in warnings(caplog))


def test_calibrate_writes_nothing_that_no_service_would_take():
    made = built_in()
    require_whole(made, 50.0)
    few = dict(list(made.fits.items())[:5])
    with pytest.raises(ConfigError, match=r"--seconds 0\.5 measured too little: not a calibration: fits\."):
        require_whole(replace(made, fits=few), 0.5)
    with pytest.raises(ConfigError, match="a finite number"):
        require_whole(replace(made, copy_ms=(float("nan"), 0.0)), 50.0)
