"""`prefixrank explain`: counts, choice, the article's rows, files of lengths, and the map."""

import json

import numpy as np
import pytest

from attention.article import ROWS, row
from attention.plans import Strategy
from attention.timing import TimeModel, built_in
from batching.select import Measured, Threshold
from scorer.__main__ import main
from scorer.explain import explain

KEYS = {"ctas", "kv_tokens_scanned", "flops", "bytes", "launches", "predicted_ms"}


def run(capsys, *arguments):
    code = main(["explain", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_articles_example_as_json(capsys):
    code, out, _ = run(capsys, "--prefix", 96, "--items", "4,4", "--q-tile", 8, "--json")
    told = json.loads(out)
    assert code == 0
    assert set(told["strategies"]) == {s.value for s in Strategy}
    assert all(set(costs) == KEYS for costs in told["strategies"].values())
    counted = {name: (c["ctas"], c["kv_tokens_scanned"]) for name, c in told["strategies"].items()}
    assert counted["naive"] == (26, 1448)
    assert counted["direct_ragged"] == (14, 824)
    assert counted["cascade"] == (15, 728)
    assert counted["multi_item"] == (13, 728)
    assert told["strategies"]["cascade"]["launches"] == 4, "prefix, shared, unique, merge"
    assert told["choice"] in told["strategies"]
    assert "NVIDIA H200" in told["reason"]


def test_the_table_names_the_choice_and_the_articles_row(capsys):
    code, out, _ = run(capsys, "--prefix", 2048, "--items", "32x256")
    assert code == 0
    assert "choice: fused" in out
    assert "the general case" in out


# Row of section 5.3, and lengths at which it applies: (prefix, item, items, cached).
SCENES = {
    "few requests (M <= 4)": (8192, 200, 4, False),
    "long prefix, large batch, very short items": (8192, 4, 32, False),
    "short prefix, large batch": (96, 4, 32, False),
    "prefix K/V exists, longer items": (2048, 128, 32, True),
    "prefix K/V new, short items": (512, 16, 64, False),
    "the general case": (512, 128, 32, False),
}


def test_every_row_of_the_article_has_a_scene():
    assert {r.scene for r in ROWS} == {*SCENES, "an arbitrary mask"}
    assert row(100, 5.0, 50, False, arbitrary_mask=True).recommends == (Strategy.CUSTOM_MASK,)


@pytest.mark.parametrize("scene", SCENES)
def test_the_articles_row_and_whether_the_measured_choice_agrees(scene):
    prefix, item, items, cached = SCENES[scene]
    told = explain(built_in(), prefix, prefix * cached, np.full(items, item), 64, Measured(built_in()))
    assert told["article"]["row"] == scene
    times = {name: costs["predicted_ms"] for name, costs in told["strategies"].items()}
    advised = min(times[name] for name in told["article"]["recommends"])
    fastest = times[told["choice"]]
    assert told["article"]["agrees"] == (advised <= 1.03 * fastest)
    assert fastest == min(t for name, t in times.items() if name not in ("naive", "custom_mask", "reference"))


def test_where_the_machine_agrees_with_the_article_and_where_not():
    """On an H200: ragged for longer items behind a short prefix, or as good as the best; not for short ones behind a
    long one."""

    def agrees(prefix, item, items):
        return explain(built_in(), prefix, 0, np.full(items, item), 64, Measured(built_in()))["article"]["agrees"]

    assert agrees(96, 256, 64)
    assert not agrees(8196, 64, 64)


def test_cached_prefixes_cost_only_their_items():
    whole = explain(built_in(), 2048, 0, np.full(32, 64), 64, Measured(built_in()))["strategies"]
    cached = explain(built_in(), 2048, 2048, np.full(32, 64), 64, Measured(built_in()))["strategies"]
    assert cached["direct_ragged"]["flops"] < whole["direct_ragged"]["flops"] / 1.4
    assert cached["naive"] == whole["naive"], "naive uses no cache"


def test_the_threshold_policy_is_explained_too():
    told = explain(built_in(), 100, 0, np.array([10, 100, 101]), 64, Threshold(64))
    assert told["choice"] == "direct_ragged"
    assert "longer than 64 tokens" in told["reason"]


def test_a_file_of_lengths(capsys, tmp_path):
    file = tmp_path / "lengths.jsonl"
    lines = [{"prefix": 70, "items": [90] * 50}, {"prefix": 2048, "cached": 2048, "items": [8] * 300}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    code, out, _ = run(capsys, "--lengths", file)
    assert code == 0
    assert "of 2" in out
    code, out, _ = run(capsys, "--lengths", file, "--json")
    assert len([json.loads(line) for line in out.splitlines()]) == 2


@pytest.mark.parametrize(
    ("line", "told"),
    [("not json", "line 2"), ('{"prefix": 5}', "items"), ('{"prefix": 0, "items": [3]}', "prefix 0")],
)
def test_a_bad_line_of_lengths_is_named(capsys, tmp_path, line, told):
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"prefix": 70, "items": [90]}\n' + line)
    code, _, err = run(capsys, "--lengths", file)
    assert code == 2
    assert told in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--items", "4,x"], "--items"),
        (["--items", "0"], "at least one token"),
        (["--prefix", "0"], "prefix 0"),
        (["--prefix", "5", "--cached", "6"], "cached 6"),
        (["--calibration", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_explained_exits_with_two(capsys, arguments, told):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert told in err
    assert err.count("\n") == 1


def test_the_map_is_drawn(capsys, tmp_path):
    file = tmp_path / "map.png"
    code, _, _ = run(capsys, "--map", file)
    assert code == 0
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_calibration_reads_back_as_it_was_written(tmp_path):
    model = built_in()
    model.write(tmp_path / "c.json")
    again = TimeModel.read((tmp_path / "c.json").read_text())
    for strategy in (Strategy.CASCADE_CONTIGUOUS, Strategy.PACKED_MULTI_ITEM, Strategy.DIRECT_RAGGED_GROUPED):
        lengths = np.array([5, 40, 300])
        assert again.strategy(strategy, 700, 0, lengths) == pytest.approx(model.strategy(strategy, 700, 0, lengths))
    with pytest.raises(ValueError, match="not a calibration"):
        TimeModel.read('{"fits": {}}')


def test_calibrate_says_what_is_missing_here(capsys):
    assert main(["calibrate", "--output", "x.json"]) == 2
    assert "calibrate needs" in capsys.readouterr().err
