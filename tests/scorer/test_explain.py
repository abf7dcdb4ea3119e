"""`prefixrank explain`: counts, choice, the article's rows, files of lengths, and the map."""

import io
import json

import numpy as np
import pytest

from attention.article import ROWS, row
from attention.plans import Strategy
from attention.timing import TimeModel, built_in
from batching.select import Measured, Threshold
from scorer.__main__ import main
from scorer.explain import explain
from scorer.explain_table import short, show
from scorer.lengths import Lengths

KEYS = {"ctas", "kv_tokens_scanned", "flops", "bytes", "launches", "predicted_ms"}


def run(capsys, *arguments):
    code = main(["explain", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def explained(prefix, cached, items, policy=None):
    return explain(built_in(), Lengths(prefix, cached, items), 64, policy or Measured(built_in()))


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
    assert "on NVIDIA H200, whatever this machine is" in out


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
    told = explained(prefix, prefix * cached, np.full(items, item))
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
        return explained(prefix, 0, np.full(items, item))["article"]["agrees"]

    assert agrees(96, 256, 64)
    assert not agrees(8196, 64, 64)


def test_cached_prefixes_cost_only_their_items():
    whole = explained(2048, 0, np.full(32, 64))["strategies"]
    cached = explained(2048, 2048, np.full(32, 64))["strategies"]
    assert cached["direct_ragged"]["flops"] < whole["direct_ragged"]["flops"] / 1.4
    assert cached["naive"] == whole["naive"], "naive uses no cache"


def test_the_threshold_policy_is_explained_too():
    told = explained(100, 0, np.array([10, 100, 101]), Threshold(64))
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


WHOLE = "a whole number from 1 to 1,048,576, got"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("not json", "no JSON: Expecting value"),
        ("444", "the file: an object, got 444"),
        ("[]", "an object, got a list of 0"),
        ("null", "an object, got null"),
        ("[" * 100_000, "nested too deep"),
        ('{"prefix": ' + "9" * 5000 + "}", "too many digits"),
        ('{"prefix": 5}', "items: is missing"),
        ('{"items": [5]}', "prefix: is missing"),
        ('{"prefix": 9, "items": [3], "cahced": 9}', "cahced: no such field; there are prefix, items, cached"),
        ('{"prefix": 0, "items": [3]}', f"prefix: {WHOLE} 0"),
        ('{"prefix": 96.7, "items": [3]}', f"prefix: {WHOLE} 96.7"),
        ('{"prefix": "96", "items": [3]}', f'prefix: {WHOLE} "96"'),
        ('{"prefix": true, "items": [3]}', f"prefix: {WHOLE} true"),
        ('{"prefix": 1e400, "items": [3]}', f"prefix: {WHOLE} Infinity"),
        ('{"prefix": NaN, "items": [3]}', f"prefix: {WHOLE} NaN"),
        ('{"prefix": 4294967297, "items": [3]}', f"prefix: {WHOLE} 4294967297"),
        ('{"prefix": 9, "items": "444"}', 'items: a list of 1 to 100,000 whole numbers, got "444"'),
        ('{"prefix": 9, "items": 4}', "items: a list of 1 to 100,000 whole numbers, got 4"),
        ('{"prefix": 9, "items": []}', "items: a list of 1 to 100,000 whole numbers, got 0"),
        ('{"prefix": 9, "items": {"4": 4}}', "got an object of 1"),
        ('{"prefix": 9, "items": [4, 4.5]}', f"items[1]: {WHOLE} 4.5"),
        ('{"prefix": 9, "items": [4, -1]}', f"items[1]: {WHOLE} -1"),
        ('{"prefix": 9, "items": [4, [4]]}', f"items[1]: {WHOLE} a list of 1"),
        ('{"prefix": 9, "items": [' + "9" * 4000 + "]}", f"items[0]: {WHOLE} a number of more than 30 digits"),
        ('{"prefix": 9, "items": [4], "cached": 10}', "cached: a whole number from 0 to 9, got 10"),
        ('{"prefix": 9, "items": [4], "cached": null}', "cached: a whole number from 0 to 9, got null"),
        ('{"prefix": 1048576, "items": [' + ",".join(["4"] * 99) + "]}", "at most 33,554,432 are counted"),
    ],
)
def test_a_bad_line_of_lengths_is_named(capsys, tmp_path, line, told):
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"prefix": 70, "items": [90]}\n' + line)
    code, _, err = run(capsys, "--lengths", file)
    assert code == 2
    assert f"{file}, line 2: " in err
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe{}", None], ids=["empty", "blank", "bytes", "folder"])
def test_a_file_without_lengths_is_told(capsys, tmp_path, content):
    file = tmp_path / "lengths.jsonl"
    file.mkdir() if content is None else file.write_bytes(content)
    code, out, err = run(capsys, "--lengths", file)
    assert (code, out) == (2, "")
    assert f"--lengths {file}: " in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--items", "4,x"], "--items"),
        (["--items", "0"], "an item has 1 to 1,048,576 tokens, got 0"),
        (["--items", "4x-1"], "give lengths such as 4,4 or 64x32"),
        (["--items=-4"], "give lengths such as 4,4 or 64x32"),
        (["--items", "4x"], "give lengths such as 4,4 or 64x32"),
        (["--items", "4x0"], "1 to 100,000 items, got 0"),
        (["--items", ""], "give lengths such as 4,4 or 64x32"),
        (["--items", "4,,4"], "give lengths such as 4,4 or 64x32"),
        (["--items", "1_000"], "give lengths such as 4,4 or 64x32"),
        (["--items", "٣"], "give lengths such as 4,4 or 64x32"),
        (["--items", "1.5"], "give lengths such as 4,4 or 64x32"),
        (["--items", "9" * 5000], "give lengths such as 4,4 or 64x32"),
        (["--items", "999999999"], "an item has 1 to 1,048,576 tokens, got 999,999,999"),
        (["--items", "4x999999999"], "1 to 100,000 items, got 999,999,999"),
        (["--items", "4x60000,4x60000"], "1 to 100,000 items, got 120,000"),
        (["--prefix", "0"], "--prefix 0: from 1 to 1,048,576"),
        (["--prefix", "-5"], "--prefix -5: from 1 to 1,048,576"),
        (["--prefix", str(2**31)], "--prefix 2147483648: from 1 to 1,048,576"),
        (["--prefix", "1048576", "--items", "4x100"], "at most 33,554,432 are counted"),
        (["--prefix", "5", "--cached", "6"], "--cached 6: from 0 to 5"),
        (["--cached", "-1"], "--cached -1: from 0 to 96"),
        (["--q-tile", "0"], "--q-tile 0: from 1 to 65,536"),
        (["--q-tile", str(2**40)], "from 1 to 65,536"),
        (["--policy", "threshold", "--multi-item-max-tokens", "-1"], "--multi-item-max-tokens -1: from 0"),
        (["--multi-item-max-tokens", str(2**62)], "from 0 to 1,048,576"),
        (["--calibration", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_explained_exits_with_two(capsys, arguments, told):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1
    assert len(err) < 300


@pytest.mark.parametrize("name", ["prefix", "cached", "q-tile", "multi-item-max-tokens"])
@pytest.mark.parametrize("given", ["9" * 5000, "1e3", "1_000", "٣", "4.0", "", "0x10", "true"])
def test_what_is_no_number_is_told_with_its_argument(capsys, name, given):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", f"--{name}={given}"])
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert f"argument --{name}: a whole number, got " in told
    assert len(told) < 200


def test_a_file_and_a_map_are_not_asked_for_at_once(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "--lengths", "x", "--map", "y"])
    assert "not allowed with" in capsys.readouterr().err


# The most of each length that is taken, and less.
LARGEST = [(2048, [64] * 32), (1 << 20, [1 << 20] * 15), (1, [1]), (500, [30] * 60_000)]


@pytest.mark.parametrize(("prefix", "items"), LARGEST)
def test_the_table_has_every_number_whole_in_80_columns(monkeypatch, prefix, items):
    """Through a pipe and on narrow terminals."""
    told = explained(prefix, 0, np.array(items))
    for columns in ("80", "40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        out = io.StringIO()
        show(told, built_in(), "advice", out)
        _hold_table(out.getvalue().splitlines(), dict(told["strategies"]))


def test_the_readmes_example_is_whole_through_a_pipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, exact, _ = run(capsys, "--prefix", 2048, "--items", "64x32", "--json")
    _, out, _ = run(capsys, "--prefix", 2048, "--items", "64x32")
    _hold_table(out.splitlines(), json.loads(exact)["strategies"])
    assert " 3296.72 " in out


def _hold_table(lines, strategies):
    assert not any("…" in line for line in lines)
    assert all(len(line.rstrip()) <= 80 for line in lines[: len(Strategy) + 2])
    assert lines[1].split() == ["strategy", "CTAs", "KV", "keys", "GFLOP", "MB", "launches", "ms"]
    for line in lines[2 : 2 + len(Strategy)]:
        name, *shown = line.split()
        costs = strategies.pop(name)
        numbers = [costs["ctas"], costs["kv_tokens_scanned"], costs["flops"] / 1e9, costs["bytes"] / 1e6]
        for told, number in zip(shown, [*numbers, costs["launches"], costs["predicted_ms"]], strict=True):
            assert told == "-" if number is None else read(told) == pytest.approx(number, rel=6e-4, abs=6e-4)
    assert not strategies


def read(told):
    scales = {"M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
    return float(told[:-1]) * scales[told[-1]] if told[-1] in scales else float(told)


def test_any_number_is_told_in_seven_characters():
    for number in (0, 0.0004, 1, 999.9994, 999.9996, 9_999_999, 9_999_999.6, 1e9 - 1, 999.96e6, 1e12, 1e18, 1e25):
        for decimals in (0, 3, 4):
            assert len(short(number, decimals)) <= 7
            assert read(short(number, decimals)) == pytest.approx(number, rel=0.05 if number > 1e20 else 6e-4, abs=0.5)


def test_a_strategy_that_would_be_refused_has_no_time_and_the_reason(capsys):
    code, out, _ = run(capsys, "--prefix", 512, "--items", "70000,10")
    assert code == 0
    assert "no time: multi_item takes items of up to 65535 tokens, got 70000: direct_ragged" in out
    assert "no time: reference takes requests of up to 4096 tokens, got 70522" in out
    assert "more takes longer" in out
    told = explained(512, 0, np.array([70_000, 10]))
    refused = {name for name, costs in told["strategies"].items() if costs["predicted_ms"] is None}
    assert refused == {"multi_item", "packed_multi_item", "fused", "custom_mask", "reference"}
    assert all(("refused" in costs) == (name in refused) for name, costs in told["strategies"].items())
    assert told["choice"] not in refused
    assert told["beyond_measured"]


def test_advice_that_would_be_refused_agrees_with_nothing():
    """A long prefix whose K/V is new, and short items but one: the article's row has a strategy that cannot run."""
    told = explained(512, 0, np.array([70_000] + [1] * 9000))
    assert told["article"]["recommends"] == ["multi_item"]
    assert not told["article"]["agrees"]


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
