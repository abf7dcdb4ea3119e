"""The largest legal request through a real server process, and `prefixrank verify` on small checkpoints."""

import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention import planner as planning
from attention.plans import Strategy
from prefixrank.v1 import scorer_pb2 as pb
from scorer.__main__ import main
from scorer.client import ScorerClient, build_request
from scorer.config import Config
from scorer.demo import LOOPBACK_OPTIONS, Server
from scorer.engine import Engine
from scorer.errors import ModelError
from scorer.runtime import Runtime
from scorer.selfcheck import TOLERANCE, alone_all, check_packing, deviation
from scorer.server import SERVICE
from scorer.verify import deviations
from tests.tiny import tiny_model_dir

WORDS = [
    "the",
    "capital",
    "of",
    "France",
    "is",
    "Paris",
    "and",
    "seven",
    "ways",
    "to",
    "cook",
    "rice",
    "open",
    "settings",
    "choose",
    "security",
    "reset",
    "password",
]
DOCUMENTS, BYTES = 1000, 4096


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("llama"), "llama")


# ---------------------------------------------------------------- a thousand documents of four kilobytes

# The tokenizer's records are a hundred times its text, and of text at most 4 Mi characters are encoded in one call: 400
# MiB. A pass, its K/V and the ids are a few MiB more. K/V of all tokens at once would be 700 MiB here, logits of the
# whole vocabulary 1.9 GiB, a square mask of all tokens 800 GiB.
GROWTH_MIB = 512


def document(number):
    """Four kilobytes, of its own for every number."""
    text = f"{number} " + " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(BYTES // 3))
    return text[:BYTES]


def peak_mib(process):
    """The most memory that the process had resident at any time, by the kernel."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


@contextmanager
def pulse(target):
    """Asks for the health all the while; gives the list of the answers, and raises what went wrong with one."""
    answers, stop, wrong = [], threading.Event(), []

    def ask():
        with grpc.insecure_channel(target, LOOPBACK_OPTIONS) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            while not stop.wait(0.05):
                try:
                    answers.append(check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5).status)
                except grpc.RpcError as error:
                    wrong.append(error)
                    return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()
    assert not wrong, wrong


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's peak memory from /proc")
def test_a_thousand_documents_of_four_kilobytes(qwen3):
    server = Server([f"--model={qwen3}", "--profile=instruct", "--threads=1"])
    try:
        target = server.wait_until_listening()
        with ScorerClient(target, channel_options=LOOPBACK_OPTIONS) as client:
            few = [0, 1, 500, DOCUMENTS - 1]
            alone = [client.score("which is it", [document(n)]).results[0].score for n in few]
            before = peak_mib(server.process)
            with pulse(target) as answers:
                response = client.score("which is it", [document(n) for n in range(DOCUMENTS)], timeout=240)
            after = peak_mib(server.process)
            assert client.score("which is it", [document(0)]).results[0].score == pytest.approx(alone[0], abs=1e-4)
    finally:
        code = server.stop()
    results = response.results
    assert [r.index for r in results] == list(range(DOCUMENTS))
    assert {r.status for r in results} == {pb.DOCUMENT_STATUS_OK}
    assert {r.document_tokens for r in results if r.truncated} == {1024}
    assert [results[n].score for n in few] == pytest.approx(alone, abs=1e-4)
    assert len({round(r.score, 3) for r in results}) > DOCUMENTS / 10
    usage = response.usage
    assert usage.item_tokens == sum(r.tokens for r in results) > 500_000
    assert usage.computed_tokens == usage.prefix_tokens + usage.item_tokens
    assert response.passes > 100
    assert len(answers) > 20
    assert set(answers) == {health_pb2.HealthCheckResponse.SERVING}
    assert after - before < GROWTH_MIB, f"{before:.0f} MiB grew to {after:.0f}"
    assert code == 0


# ---------------------------------------------------------------- verify


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_verify_finds_every_strategy_exact(family, request, capsys):
    assert main(["verify", f"--model={request.getfixturevalue(family)}", "--profile=instruct"]) == 0
    out = capsys.readouterr().out
    for strategy in Strategy:
        row = re.search(rf"│ {strategy}\s+│\s+16 │ (\S+) │ (\S+) │\s+ok │", out)
        assert row, f"{strategy} in\n{out}"
        assert float(row[1]) <= 1e-4
    worst = float(re.search(r"largest deviation (\S+): within the tolerance of 0.0001", out)[1])
    assert 0 < worst <= 1e-4


def test_verify_of_query_likelihood_by_the_command(llama):
    command = [Path(sys.executable).with_name("prefixrank"), "verify", f"--model={llama}", "--threads=1"]
    ran = subprocess.run([*command, "--profile=smollm2-query-likelihood"], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "within the tolerance of 0.0001" in ran.stdout


def test_verify_past_the_tolerance_exits_with_one(qwen3, capsys):
    assert main(["verify", f"--model={qwen3}", "--profile=instruct", "--tolerance=1e-12"]) == 1
    out = capsys.readouterr().out
    assert "BEYOND the tolerance of 1e-12" in out
    assert out.count("EXCEEDED") >= len(Strategy) - 1  # naive may be equal to the bit


def one_key_short(launch):
    """The launch without the last token of its prefix, where it is a multi-item one."""
    arrays = launch.multi_item
    if arrays is None:
        return launch
    places = np.concatenate([[1], arrays.token_pos_in_items_ptr]).astype(np.uint16)
    shorter = replace(
        arrays,
        prefix_len_ptr=arrays.prefix_len_ptr - 1,
        token_pos_in_items_ptr=places,
        token_pos_in_items_len=len(places),
    )
    return replace(launch, multi_item=shorter)


def broken_planner(*arguments):
    made = planning.plan(*arguments)
    return replace(made, launches=tuple(one_key_short(launch) for launch in made.launches))


def test_verify_finds_the_strategies_that_are_planned_wrong(qwen3):
    runtime = Runtime.load(Config.read({"model": str(qwen3), "profile": "instruct"}, environ={}))
    engine = Engine(runtime.engine.model, runtime.engine.attention, 16, 1024, broken_planner)
    try:
        found, refused = deviations(replace(runtime, engine=engine))
        with pytest.raises(ModelError, match="multi_item differs from transformers one document at a time by"):
            check_packing(engine, runtime.tokenization, runtime.profile.kind, None)
    finally:
        engine.close()
        runtime.close()
    assert not refused
    for each in found:
        assert (each.score > 1e-2) == (each.strategy in (Strategy.MULTI_ITEM, Strategy.PACKED_MULTI_ITEM)), each


def test_every_strategy_is_exact_on_the_embedded_model():
    runtime = Runtime.load(Config.read(environ={}))
    documents = ["The capital of France is Paris.", "Bananas grow in warm climates.", "巴黎 🙂", "x"]
    tokenized = runtime.tokenization.tokenize(build_request("what is the capital of France", documents)).request
    try:
        expected = [(tokenized, alone_all(runtime.engine.model, tokenized))]
        scores = [s.logits[0, 0] - s.logits[0, 1] for s in expected[0][1]]
        assert np.ptp(scores) > 0.1
        tolerance = TOLERANCE[runtime.engine.model.dtype]
        found = {s: deviation(runtime.engine, expected, s, runtime.profile.kind).score for s in Strategy}
    finally:
        runtime.close()
    assert max(found.values()) <= tolerance == 1e-4, found
