"""The largest legal request through a real server process, several passes over kept prefixes, query likelihood, and
`prefixrank verify` on small checkpoints."""

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import AutoModelForCausalLM, AutoTokenizer

from attention import planner as planning
from attention.plans import Strategy
from prefixrank.v1 import scorer_pb2 as pb
from scorer.__main__ import main
from scorer.client import AsyncScorerClient, ScorerClient, build_request
from scorer.config import Config
from scorer.demo import LOOPBACK_OPTIONS, Server
from scorer.engine import Engine
from scorer.errors import ModelError
from scorer.profile import load_profile
from scorer.runtime import Runtime, load_checked
from scorer.selfcheck import TOLERANCE, alone_all, deviation
from scorer.server import SERVICE
from scorer.verify import deviations, prove
from tests.models import last_prefix_token_hidden
from tests.scorer.test_service import served
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


@contextmanager
def started(directory, profile, **settings):
    """A client of a server in this process, which serves on a thread of its own."""
    config = {"model": str(directory), "profile": profile, "threads": 1, **settings}
    runtime = Runtime.load(Config.read(config, environ={}))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def there(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    stack = AsyncExitStack()
    try:
        at = there(stack.enter_async_context(served(runtime)))
        yield Remote(there, at.client)
    finally:
        there(stack.aclose())
        there(runtime.batcher.drain())
        runtime.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@dataclass(frozen=True)
class Remote:
    """An asyncio client on another thread's loop, called from any thread."""

    there: Callable[[Coroutine], object]
    client: AsyncScorerClient

    def score_request(self, request):
        return self.there(self.client.score_request(request))

    def score(self, query, documents, **options):
        return self.there(self.client.score(query, documents, **options))


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
    assert usage.cached_prefix_tokens == usage.prefix_tokens  # from the calls before
    assert usage.computed_tokens == usage.item_tokens
    assert response.passes > 100
    assert len(answers) > 20
    assert set(answers) == {health_pb2.HealthCheckResponse.SERVING}
    assert after - before < GROWTH_MIB, f"{before:.0f} MiB grew to {after:.0f}"
    assert code == 0


# ---------------------------------------------------------------- several passes over kept prefixes


@pytest.fixture(params=[{}, {"cache_tokens": 64}, {"cache_tokens": 64, "page_size": 1}, {"cache_tokens": 0}], ids=str)
def keeping(request, qwen3):
    """A server that keeps this much of the prefixes between passes, and passes of 300 tokens."""
    settings = {"max_pass_tokens": 300, **request.param}
    with started(qwen3, "instruct", **settings) as client:
        yield client


def seeded(number, tokens):
    return np.random.default_rng(number).integers(3, 500, tokens).tolist()


def whole_items(prefix, items):
    """A request for token ids, the same for the same numbers."""
    return pb.ScoreRequest(
        token_ids=pb.TokenIds(ids=seeded(prefix, prefix)),
        documents=[pb.Document(token_ids=pb.TokenIds(ids=seeded([prefix, n], 20 + n))) for n in items],
    )


@pytest.mark.parametrize("prefix", [7, 45, 200, 1100])  # the last fills more than 64 pages
def test_later_passes_read_the_prefix_that_the_first_one_kept(keeping, prefix):
    alone = [keeping.score_request(whole_items(prefix, [n])).results[0].score for n in range(24)]
    response = keeping.score_request(whole_items(prefix, range(24)))
    assert response.passes > 2
    assert np.ptp(alone) > 0.5
    assert [r.score for r in response.results] == pytest.approx(alone, abs=1e-4)


def test_concurrent_requests_of_several_passes_keep_their_own_prefixes(keeping):
    prefixes = range(30, 130, 5)
    alone = {p: [keeping.score_request(whole_items(p, [n])).results[0].score for n in (0, 11, 23)] for p in prefixes}
    with ThreadPoolExecutor(len(prefixes)) as pool:
        responses = list(pool.map(lambda p: keeping.score_request(whole_items(p, range(24))), prefixes))
    assert all(response.passes > 2 for response in responses)
    for prefix, response in zip(prefixes, responses, strict=True):
        assert [response.results[n].score for n in (0, 11, 23)] == pytest.approx(alone[prefix], abs=1e-4)


# ---------------------------------------------------------------- query likelihood


@pytest.mark.parametrize("query", ["what is the capital", "q", "🙂 中文 7", "Paris, France"])
def test_query_likelihood_is_the_mean_of_transformers_log_probabilities(likelihood, llama, query):
    documents = ["The capital of France is Paris.", "bananas 🙂 中文", "x", "a list:\n\n- one\n- two"]
    expected = [mean_log_probability(llama, query, document) for document in documents]
    assert np.ptp(expected) > 0.1
    for strategy in pb.Strategy.values():
        results = likelihood.score(query, documents, strategy=strategy).results
        assert {r.score_kind for r in results} == {pb.SCORE_KIND_MEAN_LOG_PROBABILITY}
        assert [r.score for r in results] == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def likelihood(llama):
    with started(llama, "smollm2-query-likelihood") as client:
        yield client


@torch.no_grad()
def mean_log_probability(directory, query, document):
    """Of the query behind prefix and document, by transformers alone; which tokens are the query is told by offsets."""
    profile = load_profile("smollm2-query-likelihood")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    before = (profile.prefix + profile.item).replace("{document}", document).removesuffix("{query}")
    encoded = AutoTokenizer.from_pretrained(directory)(before + query, return_offsets_mapping=True)
    ids = torch.tensor(encoded.input_ids)
    own = [i for i, (_, end) in enumerate(encoded.offset_mapping) if end > len(before)]
    log_probabilities = model(ids[None]).logits[0].log_softmax(-1)
    return float(np.mean([log_probabilities[i - 1, ids[i]] for i in own]))


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


@pytest.mark.parametrize("limit", ["--max-context-tokens=40", "--max-request-tokens=1"])
def test_verify_and_the_start_refuse_limits_that_take_no_sample(qwen3, capsys, limit):
    """Over no document every strategy would be exact."""
    assert main(["verify", f"--model={qwen3}", "--profile=instruct", limit]) == 2
    told = capsys.readouterr()
    assert "none of the sample documents through: raise max_context_tokens or max_request_tokens" in told.err
    assert "within the tolerance" not in told.out
    name, value = limit.removeprefix("--").split("=")
    settings = {"model": str(qwen3), "profile": "instruct", name.replace("-", "_"): int(value)}
    with pytest.raises(ModelError, match="none of the sample documents"):
        load_checked(Config.read(settings, environ={}))


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [({}, "0.0001"), ({"quantization": "fp8"}, "1"), ({"quantization": "fp8", "tolerance": 0.25}, "0.25")],
)
def test_verify_allows_what_the_start_allows(qwen3, capsys, settings, tolerance):
    runtime = Runtime.load(Config.read({"model": str(qwen3), "profile": "instruct"}, environ={}))
    try:
        assert prove(replace(runtime, config=runtime.config.model_copy(update=settings))) == 0
    finally:
        runtime.close()
    assert f"within the tolerance of {tolerance}\n" in capsys.readouterr().out


def one_key_short(launch):
    """The launch without the last token of its prefix, where it is a multi-item one."""
    return launch if launch.multi_item is None else last_prefix_token_hidden(launch)


def broken_planner(*arguments):
    made = planning.plan(*arguments)
    return replace(made, launches=tuple(one_key_short(launch) for launch in made.launches))


def test_verify_finds_the_strategies_that_are_planned_wrong(qwen3):
    runtime = Runtime.load(Config.read({"model": str(qwen3), "profile": "instruct"}, environ={}))
    engine = Engine(runtime.engine.model, runtime.engine.attention, 16, 1024, broken_planner)
    try:
        broken = replace(runtime, engine=engine)
        found, refused = deviations(broken)
        with pytest.raises(ModelError, match="multi_item differs from transformers one document at a time by"):
            broken.check()
    finally:
        engine.close()
        runtime.close()
    assert not refused
    for each in found:
        assert (each.score > 1e-2) == (
            each.strategy in (Strategy.MULTI_ITEM, Strategy.PACKED_MULTI_ITEM, Strategy.FUSED)
        ), each


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
