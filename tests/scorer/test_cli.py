"""The command line. What needs a model runs against a small server of the tests' own."""

import json
import os
import re
import subprocess
import sys
from codecs import BOM_UTF8
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import scorer
from prefixrank.v1 import scorer_pb2 as pb
from scorer import remote
from scorer.__main__ import main
from scorer.config import Config
from scorer.demo import Server, demo_queries
from scorer.errors import StartError
from tests.certificates import Pki
from tests.scorer.test_client import recording
from tests.tiny import tiny_model_dir


def cli(capsys, *arguments):
    """Exit code, standard output and standard error of one command in this process."""
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as exit:
        code = exit.code
    told = capsys.readouterr()
    return code, told.out, told.err


def piped(text, *arguments):
    """The same in a process of its own, with `text` on standard input."""
    command = [sys.executable, "-m", "scorer", *arguments]
    ran = subprocess.run(command, input=text.encode(), capture_output=True, timeout=60)
    return ran.returncode, ran.stdout.decode(), ran.stderr.decode()


@pytest.mark.parametrize(
    "command",
    ["serve", "score", "score-file", "health", "top", "demo", "verify", "explain", "calibrate"]
    + [f"bench {what}" for what in ("cpu", "attention", "load")],
)
def test_help_shows_an_example_and_units(capsys, command):
    code, out, _ = cli(capsys, *command.split(), "--help")
    assert code == 0
    assert f"example:\n  prefixrank {command}" in out
    assert any(unit in out for unit in ("tokens", "documents/s", "milliseconds", "seconds"))


@pytest.mark.parametrize("given", ["nan", "-1"])
@pytest.mark.parametrize("flag", ["score --timeout", "eval --timeout", "health --timeout", "bench load --scale"])
def test_a_time_or_a_scale_is_a_number_above_zero(capsys, flag, given):
    code, _, err = cli(capsys, *f"{flag}={given}".split())
    assert code == 2
    assert f"{flag.split()[-1]}: a number between 0.001 and 1000000, got '{given}'" in err


def test_help_of_serve_has_every_setting(capsys):
    _, out, _ = cli(capsys, "serve", "--help")
    for name, field in Config.model_fields.items():
        assert f"--{name.replace('_', '-')}" in out
        assert field.description.split()[0] in out


def test_help_is_instant_because_it_loads_no_model_code():
    heavy = ("torch", "transformers", "numpy", "grpc", "rich.table")
    code = (
        "import sys, scorer.__main__ as cli\n"
        "try: cli.main(['score', '--help'])\n"
        f"except SystemExit: print('LOADED', [m for m in {heavy} if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.endswith("LOADED []\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "COMMAND"),
        (["score", "a query alone"], "a query alone"),
        (["score", "q", "d", "--query", "q"], "not both"),
        (["score", "q", "d", "--input", "x"], "not both"),
        (["score", "q", "d", "--target", "h:1", "--model", "m"], "the server has its own"),
        (["score", "q", "d", "--target", "h:1", "--strategy", "magic"], "unknown strategy magic"),
        (["score", "q", "d", "--top-n=-1"], "--top-n: a whole number between 0 and 2147483647, got '-1'"),
        (["score", "q", "d", "--max-tokens-per-document=99999999999"], "--max-tokens-per-document: a whole number"),
        (["eval", "--collection=x", "--max-tokens-per-document=few"], "a whole number between 0 and"),
        (["serve", "--prot", "1"], "unrecognized arguments"),
        (["serve", "--max-pass", "1"], "unrecognized arguments"),
        (["bench", "everything"], "invalid choice"),
        (["bench", "load", "--rates=0"], "--rates: a number between 0.001 and 1000000, got '0'"),
        (["bench", "load", "--rates="], "--rates: a number between 0.001 and 1000000, got ''"),
        (["bench", "load", "--rates=1,nan"], "--rates: a number between 0.001 and 1000000, got 'nan'"),
        (["bench", "load", "--burst=0"], "--burst: a number between 1 and 10, got '0'"),
        (["bench", "load", "--seconds=-3"], "--seconds: a number between 0.001"),
        (["bench", "load", "--seconds=inf"], "--seconds: a number between 0.001"),
        (["bench", "load", "--parameters=-1"], "--parameters: a number between 0 and"),
        (["bench", "load", "--seed=-1"], "--seed: a whole number between 0 and"),
        (["bench", "load", "--scale=0"], "--scale: a number between 0.001"),
        (["bench", "load", "--timeout=nan"], "--timeout: a number between 0.001"),
        (["bench", "load", "--rates=1,1e5", "--seconds=2"], "100000 for --seconds 2 makes 200000 calls: at most"),
        (["bench", "serve", "--shape=1,2"], "--shape: 3 numbers with commas between, got '1,2'"),
        (["bench", "cache", "--shape=1,0,2"], "--shape: a whole number between 1 and"),
        (["bench", "tiers", "--rates=a"], "--rates: a number between 1 and"),
        (["calibrate", "--heads=0"], "--heads: a whole number between 1 and"),
        (["health", "--timeout=0"], "--timeout: a number between 0.001"),
    ],
)
def test_wrong_usage_exits_with_two(capsys, arguments, told):
    code, _, err = cli(capsys, *arguments)
    assert code == 2
    assert told in err


@pytest.mark.parametrize(
    "target", ["", " ", "localhost", "localhost:", "localhost:abc", ":1", "h:99999", "h:1/x", "dns://"]
)
@pytest.mark.parametrize(
    "command",
    [
        ["score", "q", "d"],
        ["score-file", "in.parquet", "--output=out.parquet"],
        ["eval", "--collection=x"],
        ["health"],
        ["top"],
        ["bench", "load"],
        ["bench", "serve"],
    ],
    ids=" ".join,
)
def test_a_target_that_is_none_is_refused_and_no_model_runs_in_its_place(capsys, command, target):
    """An unset variable of a shell is an empty one."""
    code, out, err = cli(capsys, *command, "--target", target)
    assert (code, out) == (2, "")
    assert err.endswith(f"argument --target: HOST:PORT, got {target!r}\n")


@pytest.mark.parametrize("name", ["localhost:1", "[::1]:1", "dns:///name:1", "ipv4:127.0.0.1:1", "unix:/run/scorer"])
def test_targets_that_grpc_knows(name):
    assert remote.target(name) == name


def test_health_says_why_a_server_does_not_serve(capsys, tmp_path):
    with recording() as (address, _, _):
        assert cli(capsys, "health", "--target", address) == (0, "serving\n", "")
        ca = Pki.made(tmp_path).path("ca.crt")
        code, out, _ = cli(capsys, "health", "--target", address, "--timeout=0.5", "--server-ca", ca)
        assert code == 1
        assert "not serving: UNAVAILABLE: " in out
        assert "SSL" in out or "andshake" in out
    with recording(serving=False) as (address, _, _):
        code, out, _ = cli(capsys, "health", "--target", address, "--timeout=0.3")
        assert (code, out) == (1, "not serving: its health is not SERVING\n")
    code, out, _ = cli(capsys, "health", "--target", "127.0.0.1:1", "--timeout=0.3")
    assert code == 1
    assert "Connection refused" in out
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    code, out, _ = cli(capsys, "health", "--target", f"127.0.0.1:{port}")
    server.stop(None)
    assert (code, out) == (1, "not serving: UNIMPLEMENTED: Method not found!\n")


def test_a_command_that_waits_for_a_server_says_so_and_why(capsys, tmp_path):
    told = "for 127.0.0.1:1: UNAVAILABLE: "
    rows = tmp_path / "in.parquet"
    pq.write_table(pa.table({"query": ["q"], "document": ["d"]}), rows)
    for command in (["bench", "load"], ["score-file", rows, "--output", tmp_path / "out.parquet"]):
        code, _, err = cli(capsys, *command, "--target=127.0.0.1:1", "--timeout=0.5")
        assert code == 2
        waits, stops = err.splitlines()
        assert waits.startswith(f"prefixrank: waiting up to 0.5 s {told}")
        assert stops.startswith("prefixrank: 127.0.0.1:1: not serving after 0.5 s: UNAVAILABLE: ")


@pytest.mark.parametrize("flag", ["--token-file", "--server-ca"])
@pytest.mark.parametrize("command", [["score", "q", "d"], ["health"], ["bench", "load"]], ids=" ".join)
def test_a_missing_token_or_certificate_is_named(capsys, command, flag):
    code, _, err = cli(capsys, *command, "--target=127.0.0.1:1", flag, "/nowhere.pem")
    assert (code, err) == (2, "prefixrank: cannot read /nowhere.pem: No such file or directory\n")


@pytest.mark.parametrize("command", [["serve"], ["score", "q", "d"], ["demo"], ["verify"], ["bench", "cpu"]])
def test_a_wrong_setting_is_one_line_and_exits_with_two(capsys, command):
    code, _, err = cli(capsys, *command, "--page-size", "0")
    assert code == 2
    assert err.startswith("prefixrank: page_size (from the command line)")
    assert err.count("\n") == 1


def test_a_setting_comes_from_the_file_of_config(capsys, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("prot = 1")
    code, _, err = cli(capsys, "serve", "--config", file)
    assert code == 2
    assert "prot (from" in err


def test_arguments_become_a_table(capsys):
    with recording() as (target, servicer, _):
        documents = ["one", "one two three", "[bold]two words[/bold]\x1b[31m"]
        code, out, err = cli(capsys, "score", "--target", target, "the query", *documents, "--top-n", "3")
    assert (code, err) == (0, "")
    assert servicer.requests[0].query.text == "the query"
    assert servicer.requests[0].options.top_n == 3
    lines = out.splitlines()
    ranks = [line.split()[:3] for line in lines if line.strip()[:1].isdigit()]
    assert ranks == [["1", "+3.000", "one"], ["2", "+2.000", "[bold]two"], ["3", "+1.000", "one"]]
    assert "the query" in out
    assert "5 computed" in out
    assert "\x1b" not in out


def test_options_reach_the_request(capsys):
    with recording() as (target, servicer, _):
        options = [
            "--instruction",
            "i",
            "--truncation",
            "left",
            "--max-tokens-per-document",
            "9",
            "--strategy",
            "naive",
        ]
        cli(capsys, "score", "--target", target, "q", "d", *options)
    (request,) = servicer.requests
    assert request.query.instruction == "i"
    assert request.options.truncation == pb.TRUNCATION_LEFT
    assert request.options.max_tokens_per_document == 9
    assert request.options.strategy == pb.STRATEGY_NAIVE


def test_lines_of_standard_input_are_documents():
    with recording() as (target, servicer, _):
        code, out, err = piped("erstes Dokument\r\n\nzweites\n", "score", "--target", target, "--query", "q", "--json")
    assert (code, err) == (0, "")
    assert [d.text for d in servicer.requests[0].documents] == ["erstes Dokument", "zweites"]
    (line,) = out.splitlines()
    reply = json.loads(line)
    assert [r["score"] for r in reply["results"]] == [2, 1]
    assert reply["usage"]["computed_tokens"] == 5
    assert reply["results"][0]["status"] == "DOCUMENT_STATUS_OK"


def test_bad_lines_are_named_and_the_others_scored(capsys, tmp_path):
    lines = [
        {"query": "q", "documents": ["a", {"id": "x", "text": "b c"}], "request_id": "r1"},
        "{not json",
        "",
        ["a list"],
        {"query": "q", "documents": "a"},
        {"query": "q", "documents": [1]},
        {"query": "q", "documents": ["a"], "topn": 3},
        {"query": "q", "documents": ["a"], "instruction": 3},
        {"query": "fail", "documents": ["a"]},
        {"query": "q", "documents": ["\ud800"]},
        {"query": "q", "documents": ["last"], "instruction": "i"},
    ]
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    file = tmp_path / "requests.jsonl"
    file.write_bytes(
        text.encode()
        + b'\n{"query": "\xff"}\n\xff\xfe\n{"query": 1, "documents": []}\n{"query": "q"}\n'
        + BOM_UTF8
        + b'{"query": "q", "documents": ["b"]}\n'
    )
    with recording() as (target, servicer, _):
        code, out, err = cli(capsys, "score", "--target", target, "--json", "--input", file)
    assert code == 1
    written = [json.loads(line) for line in out.splitlines()]
    assert [line.get("request_id") for line in written] == ["r1", *[None] * 8, "", *[None] * 4, ""], (
        "a line out for each line in"
    )
    assert written[1]["error"].startswith("line 2:")
    assert [d.id for d in servicer.requests[0].documents] == ["", "x"]
    assert servicer.requests[-2].query.instruction == "i"
    told = err.splitlines()
    assert [line.split(":")[0] for line in told] == [f"line {n}" for n in (2, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15)]
    assert "unknown keys ['topn']" in told[4]
    assert "INTERNAL: internal error, id 1" in told[6]
    assert told[7] == "line 10: documents[0]: not UTF-8 text: code point U+D800 at character 1"
    assert told[8] == "line 12: not UTF-8 text: byte 0xff at byte 12"
    assert told[9] == "line 13: not UTF-8 text: byte 0xff at byte 1", "not taken for UTF-16 by its first bytes"
    assert told[10] == 'line 14: "query" is not a string'
    assert told[11] == 'line 15: expected an object with "query" and "documents"'


def test_an_empty_input_is_told(capsys, tmp_path):
    file = tmp_path / "empty.jsonl"
    file.write_text("\n \n")
    told = cli(capsys, "score", "--target", "127.0.0.1:1", "--input", file)
    assert told == (0, "", "nothing to score: no line in the input\n")


def test_outputs_that_cannot_be_are_refused_before_the_work(capsys, tmp_path):
    for command in (["verify", "--record"], ["calibrate", "--output"], ["bench", "load", "--output"]):
        code, _, err = cli(capsys, *command, tmp_path)
        assert code == 2
        assert f"a file, got the directory {str(tmp_path)!r}" in err
    for name, told in (("x.txt", "a profile's name ends in .toml"), ("no/x.toml", "there is no directory")):
        code, _, err = cli(capsys, "verify", "--model=/nowhere", "--record", tmp_path / name)
        assert code == 2
        assert err.startswith(f"prefixrank: --record {tmp_path / name}: {told}")
    output = tmp_path / "no" / "out.parquet"
    code, _, err = cli(capsys, "score-file", "/nowhere.parquet", "--output", output)
    assert (code, err) == (2, f"prefixrank: the output {output}: there is no directory {output.parent}\n")
    assert not list(tmp_path.iterdir())


def test_more_threads_than_the_cores_have_use_for_are_refused(capsys):
    code, _, err = cli(capsys, "score", "--threads=9999", "q", "d")
    assert code == 2
    most = 4 * os.cpu_count()
    assert err.startswith(f"prefixrank: threads (from the command line): Value error, at most {most}, 4 for each of")


def test_text_that_is_no_utf_8_is_named_wherever_it_stands(capsys, tmp_path):
    """Nothing is scored that the caller did not write."""
    file = tmp_path / "documents.txt"
    file.write_bytes(b"good\nb\xffd\n")
    with recording() as (target, servicer, _):
        code, out, err = cli(capsys, "score", "--target", target, "--query", "q", "--input", file)
        assert (code, out) == (1, "")
        assert err == f"{file}: line 2: not UTF-8 text: byte 0xff at byte 2\n"
        code, out, err = cli(capsys, "score", "--target", target, "q", "d\udcff")
        assert (code, out) == (1, "")
        assert err == "the arguments: documents[0]: not UTF-8 text: code point U+DCFF at character 2\n"
    assert not servicer.requests


def test_calibrate_without_a_gpu_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = cli(capsys, "calibrate", "--output", tmp_path / "c.json")
    assert (code, err) == (2, "prefixrank: calibrate needs an NVIDIA GPU; on a CPU the choice is by document length\n")


def test_a_refused_request_exits_with_one(capsys):
    with recording() as (target, servicer, _):
        servicer.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "query: at most 3 tokens, got 4", None)
        code, out, err = cli(capsys, "score", "--target", target, "fail", "d")
    assert (code, out) == (1, "")
    assert err == "the arguments: INVALID_ARGUMENT: query: at most 3 tokens, got 4\n"


def test_nobody_at_the_target(capsys):
    code, _, err = cli(capsys, "score", "--target", "127.0.0.1:1", "q", "d", "--timeout", "5")
    assert code == 1
    assert err.startswith("127.0.0.1:1: UNAVAILABLE: "), "the arguments are not at fault"


def test_what_users_gave_is_told_as_it_is(capsys, tmp_path):
    """No emoji codes, no markup."""
    odd = ":smile:[bold]x[/bold]"
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"query": "q", "documents": [], odd: 1}))
    with recording() as (address, servicer, _):
        servicer.refusal = (grpc.StatusCode.INVALID_ARGUMENT, odd, None)
        _, _, err = cli(capsys, "score", "--target", address, "fail", "d")
        assert err == f"the arguments: INVALID_ARGUMENT: {odd}\n"
        _, _, err = cli(capsys, "score", "--target", address, "--input", file)
        assert odd in err


def test_every_console_is_a_plain_one():
    root = Path(scorer.__file__).parents[1]
    sources = [path for folder in ("scorer", "loadtest") for path in (root / folder).rglob("*.py")]
    assert [p.name for p in sources if re.search(r"(?<!\w)Console\(", p.read_text())] == ["console.py"]


def test_a_missing_input_file(capsys):
    code, _, err = cli(capsys, "score", "--target", "127.0.0.1:1", "--input", "/nowhere.jsonl")
    assert (code, err) == (2, "prefixrank: cannot read /nowhere.jsonl: No such file or directory\n")


def test_a_server_process_that_cannot_start_tells_why():
    server = Server(["--page-size=0"])
    with pytest.raises(StartError, match=r"exit code 2\nprefixrank: page_size \(from the command line\)"):
        server.wait_until_listening()
    assert server.stop() == 2


def test_scores_in_this_process(capsys, tmp_path):
    settings = ["--model", tiny_model_dir(tmp_path), "--profile", "instruct"]
    code, out, _ = cli(capsys, "score", "--json", *settings, "q", "one", "", "one two three")
    assert code == 0
    results = json.loads(out)["results"]
    assert [r["status"].removeprefix("DOCUMENT_STATUS_") for r in results] == ["OK", "EMPTY", "OK"]
    assert results[0]["score"] != results[2]["score"]
    code, _, err = cli(capsys, "score", *settings, " ", "one")
    assert code == 1
    assert err.splitlines()[-1].startswith("the arguments: INVALID_ARGUMENT: query")


def test_a_model_that_cannot_be_served_is_one_line_and_exits_with_two(capsys, tmp_path):
    code, _, err = cli(capsys, "score", "--model", tmp_path / "none", "--profile", "instruct", "q", "d")
    assert code == 2
    assert err.splitlines()[-1].startswith("prefixrank: ")
    assert "Traceback" not in err


def test_the_demo_ranks_compares_and_stops(tmp_path):
    settings = [f"--model={tiny_model_dir(tmp_path)}", "--profile=instruct", "--threads=1"]
    code, out, err = piped("", "demo", *settings)
    assert code == 0, err
    for query in demo_queries():
        assert query["query"] in out
    assert "one document at a time" in out
    assert "documents/s: " in out
    assert out.endswith("server stopped, exit code 0\n")
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("held", "told"),
    [
        (b"", "holds no token"),
        ("sécret".encode(), "the token is not of printable ASCII characters"),
        (b"\xff", "the token is not of printable ASCII characters"),
        (b"nul\0", "the token is not of printable ASCII characters"),
    ],
)
def test_a_token_file_that_holds_no_token_is_named(held, told, capsys, tmp_path):
    (file := tmp_path / "token").write_bytes(held)
    code, out, err = cli(capsys, "health", "--target=127.0.0.1:9", f"--token-file={file}")
    assert (code, out) == (2, "")
    assert f"--token-file {file}: {told}" in err
