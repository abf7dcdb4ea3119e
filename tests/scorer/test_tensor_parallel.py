"""One model over two processes: the same scores as from one, and no process that outlives or awaits a lost one."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import grpc
import numpy as np
import psutil
import pytest
from transformers import CONFIG_MAPPING, LlamaForCausalLM

from attention.plans import Strategy
from batching.errors import DeviceGone
from batching.packing import Group, pack
from batching.types import Reads
from scorer.client import ScorerClient, ScorerError
from scorer.config import Config, torchrun_place
from scorer.device import load_device
from scorer.errors import ConfigError, ModelError
from scorer.follower import obey
from scorer.hand_fused import prepare
from scorer.parallel import Alone, Forward, Scrub, Stop
from scorer.place import Place, given_place, order, read_order
from scorer.profile import record_golden
from scorer.runtime import Runtime
from scorer.sharding import shard_plan
from tests.cases.live import PROFILE, UNCUT, live
from tests.models import engine, tiny
from tests.scorer.test_engine import request
from tests.scorer.test_runtime import config
from tests.tiny import tiny_model_dir

# fp32: each sum over a layer's width is made of two halves, in another order than in one process.
TOLERANCE = 2e-5
QUERY = "what is the capital of France"
TEXTS = ["The capital of France is Paris.", "Bananas grow.", "x", "7 digits 1234567", "Seven ways to cook rice. " * 9]
SECONDS = 120  # of a start with every core taken
SERVE = [sys.executable, "-m", "scorer"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "scorer"]


FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
EXPERTS = {
    "qwen3_moe": {**FEW, "num_experts": 4},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": None},
    "deepseek_v3": {**FEW, **LATENT, **GROUPS, "head_dim": 8, "num_key_value_heads": 4},
}
ON_CPU = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@contextmanager
def server(directory, tmp_path, command=SERVE, profile=None, environment=ON_CPU, **settings):
    """A server over two processes, and the client that waited for it."""
    if profile is None:
        record_golden(profile := tmp_path / "profile.toml", PROFILE, ())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    flags = {"model": directory, "profile": profile, "port": port, "metrics_port": -1, "tensor_parallel": 2, **settings}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    log = tmp_path / f"{port}.log"
    with log.open("w") as written:
        process = subprocess.Popen([*command, "serve", *arguments], env=environment, stderr=written)
    try:
        with ScorerClient(f"127.0.0.1:{port}") as client:
            wait_until_serving(client, process, log)
            yield SimpleNamespace(process=process, client=client, port=port, log=log)
    finally:
        for each in (*psutil.Process(process.pid).children(recursive=True), process) if process.poll() is None else ():
            each.kill()
        process.wait(SECONDS)


def wait_until_serving(client, process, log):
    for _ in range(SECONDS):
        assert process.poll() is None, log.read_text()
        with suppress(TimeoutError):
            client.wait_until_serving(1)
            return
    raise AssertionError(f"not serving after {SECONDS} s: {log.read_text()}")


def scores(client, **options):
    results = client.score(QUERY, TEXTS, timeout=60, max_tokens_per_document=UNCUT, **options).results
    return np.array([result.score for result in results])


def in_one_process(directory, tmp_path, **settings):
    with live(directory, PROFILE, tmp_path, check=False, **settings) as one:
        return one.scores(QUERY, TEXTS)


def followers(process):
    return [p for p in psutil.Process(process.pid).children(recursive=True) if "scorer.follower" in p.cmdline()]


def ended(processes):
    """Whether all of them end."""
    return not psutil.wait_procs(processes, timeout=SECONDS)[1]


def test_scores_are_those_of_one_process_and_sigterm_ends_both(tmp_path):
    """Passes of 96 tokens: the call needs several, over pages that each process keeps for its heads."""
    directory = tiny_model_dir(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    expected = in_one_process(directory, tmp_path, max_pass_tokens=96)
    with server(directory, tmp_path, max_pass_tokens=96) as made:
        found = scores(made.client)
        assert np.ptp(expected) > 1
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
        again = made.client.score(QUERY, TEXTS[:2], timeout=60)
        assert again.usage.cached_prefix_tokens > 0
        np.testing.assert_allclose([r.score for r in again.results], expected[:2], rtol=0, atol=TOLERANCE)
        others = followers(made.process)
        assert len(others) == 1
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(SECONDS) == 0, made.log.read_text()
        assert ended(others)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_shared_out(family, tmp_path):
    directory = tiny_model_dir(tmp_path / "model", family, **EXPERTS[family])
    expected = in_one_process(directory, tmp_path)
    with server(directory, tmp_path) as made:
        assert np.ptp(expected) > 1
        np.testing.assert_allclose(scores(made.client), expected, rtol=0, atol=TOLERANCE)


def test_under_torchrun_rank_0_serves_and_a_killed_rank_0_takes_the_other_along(tmp_path):
    directory = tiny_model_dir(tmp_path / "model", "llama")
    expected = in_one_process(directory, tmp_path)
    with server(directory, tmp_path, TORCHRUN) as made:
        np.testing.assert_allclose(scores(made.client), expected, rtol=0, atol=TOLERANCE)
        workers = psutil.Process(made.process.pid).children(recursive=True)
        listening = [p for p in workers if made.port in {c.laddr.port for c in p.net_connections() if c.laddr}]
        listening[0].kill()
        assert ended(workers)
        assert made.process.wait(SECONDS) != 0


def test_a_lost_rank_ends_the_service_and_does_not_hang_it(tmp_path):
    with server(tiny_model_dir(tmp_path / "model", "qwen3"), tmp_path) as made:
        scores(made.client)
        (other,) = followers(made.process)
        other.kill()
        assert made.process.wait(SECONDS) == 1
        told = made.log.read_text()
        assert "rank 1 of 2 ended with exit code -9" in told
        assert "Traceback" not in told
        with pytest.raises(ScorerError) as caught:
            made.client.score(QUERY, TEXTS[:1], timeout=5)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE


def test_a_killed_server_leaves_no_rank_behind(tmp_path):
    with server(tiny_model_dir(tmp_path / "model", "llama"), tmp_path) as made:
        others = followers(made.process)
        made.process.kill()
        assert ended(others)


# --- what is refused


def shape(**numbers):
    return CONFIG_MAPPING["llama"](
        num_attention_heads=6, num_key_value_heads=3, hidden_size=48, intermediate_size=96, **numbers
    )


def test_what_does_not_divide_is_refused_with_its_numbers():
    with pytest.raises(ModelError, match=r"^3 key/value heads do not divide by tensor_parallel 2$"):
        shard_plan(shape(), LlamaForCausalLM, 2)
    with pytest.raises(ModelError, match=r"^6 attention heads do not divide by tensor_parallel 4$"):
        shard_plan(shape(), LlamaForCausalLM, 4)
    with pytest.raises(ModelError, match=r"^49 expert intermediate size do not divide by tensor_parallel 3$"):
        shard_plan(shape(moe_intermediate_size=49), LlamaForCausalLM, 3)
    plan = shard_plan(shape(), LlamaForCausalLM, 3)
    assert plan.tp_plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert not any("lm_head" in name for name in plan.tp_plan)


def test_a_family_without_a_plan_is_refused():
    config = shape()
    config.base_model_tp_plan = None
    with pytest.raises(ModelError, match="no tensor-parallel plan for LlamaForCausalLM"):
        shard_plan(config, LlamaForCausalLM, 3)


def test_several_gpus_are_for_serve(tmp_path):
    with pytest.raises(ConfigError, match="are for prefixrank serve"):
        Runtime.load(config(tmp_path, tensor_parallel=2))
    with pytest.raises(ConfigError, match="the tiers below the cache hold the K/V of one GPU"):
        load_device(config(tmp_path, tensor_parallel=2, kv_host_bytes=1000), Place(0, 2, 0, "tcp://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="invariant is for 2 GPUs at most"):
        load_device(config(tmp_path, tensor_parallel=3, invariant=True), Place(0, 3, 0, "tcp://127.0.0.1:1"))


def test_places():
    assert torchrun_place({"RANK": "1", "WORLD_SIZE": "2"}) is None, "another launcher's variables say nothing"
    told = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert torchrun_place(told) == (1, 2, 1)
    made = Config(model="m", tensor_parallel=2, cache_tokens=7, tenant_weights={"a": 2.0})
    place = Place(1, 2, 1, "tcp://127.0.0.1:5")
    assert read_order(order(made, place)) == (made, place)


def test_torchrun_must_start_as_many_as_asked_for(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="tensor_parallel is 2, and torchrun started 4 processes"):
        given_place(Config(tensor_parallel=2))


# --- in step


class Told:
    """Ranks that write down what they are told."""

    def __init__(self):
        self.orders = []

    def forward(self, batch, fast):
        self.orders.append(Forward(batch, fast))

    def scrub(self, first_page):
        self.orders.append(Scrub(first_page))

    def alone(self, ids, keep):
        self.orders.append(Alone(ids, keep))

    def stop(self):
        self.orders.append(Stop())

    def told(self):
        return self.orders.pop(0)


def batch_of(strategy=Strategy.MULTI_ITEM, seed=0):
    asked = request(np.random.default_rng(seed), 20, [5, 9])
    return pack([Group(asked, (0, 1), (strategy,) * 2)])


class Fast:
    """A fast path that writes down, beside what the ranks are told, what it does; its passes are of NaN if told so."""

    def __init__(self, log, spoiled=False, broken=""):
        self.log, self.spoiled, self.broken = log, spoiled, broken

    def takes(self, batch):
        return all(strategy is Strategy.FUSED for strategy in batch.leaf_strategies)

    def submit(self, batch, page_size):
        self.log.append(("submit", threading.current_thread().name, batch))
        if self.broken == "submit":
            raise RuntimeError("misaligned address")

        def wait():
            if self.broken == "wait":
                raise RuntimeError("unspecified launch failure")
            value = np.nan if self.spoiled else 1.0
            return Reads(
                np.full(len(batch.read_ids), value, np.float32), np.zeros(len(batch.read_rows), np.float32), 0, 0
            )

        return wait

    def scrub(self):
        self.log.append("fast scrub")

    def close(self):
        self.log.append("fast closed")


class Logged(Told):
    """Its orders in one list with what a fast path does."""

    def forward(self, batch, fast):
        self.orders.append(("told", threading.current_thread().name, batch) if fast else "told to run the modules")

    def scrub(self, first_page):
        self.orders.append("told to scrub")


def test_a_follower_runs_what_it_is_told_until_stop():
    peers, batch = Told(), batch_of()
    first = engine(tiny("qwen3"), peers=peers)
    reads = first.run(batch)
    first.close()
    peers.alone(batch.input_ids[:4], 1)
    peers.scrub(3)
    peers.stop()
    assert [type(o) for o in peers.orders] == [Forward, Stop, Alone, Scrub, Stop]
    del peers.orders[1]
    seen = []
    other = engine(tiny("qwen3"))
    other.model.tell_alone, before = (lambda ids, keep: seen.append(keep)), other.model.tell_alone
    try:
        obey(other, peers)
    finally:
        other.model.tell_alone = before
    assert seen == [1]
    assert not peers.orders
    assert np.isfinite(reads.logits).all()


def test_a_pass_that_fails_after_it_was_told_ends_the_device(monkeypatch):
    def broken(*_):
        raise RuntimeError("connection closed by peer")

    made = engine(tiny("qwen3"), peers=Told())
    monkeypatch.setattr(made.model, "forward", broken)
    with pytest.raises(DeviceGone, match="over several ranks failed: RuntimeError: connection closed by peer"):
        made.run(batch_of())


def test_fast_passes_are_told_and_submitted_on_one_thread_in_one_order():
    peers, given = Logged(), [batch_of(Strategy.FUSED, seed) for seed in range(4)]
    made = engine(tiny("qwen3"), peers=peers, fast=Fast(peers.orders))

    async def all_at_once():
        return await asyncio.gather(*map(made.execute, given))

    assert all((reads.logits == 1).all() for reads in asyncio.run(all_at_once()))
    assert [what for what, _, _ in peers.orders] == ["told", "submit"] * 4
    assert {name for _, name, _ in peers.orders} == {"device_0"}
    assert [batch for _, _, batch in peers.orders] == [batch for batch in given for _ in range(2)]
    del peers.orders[:]
    made.run(given[0])
    assert [what for what, _, _ in peers.orders] == ["told", "submit"]


def test_after_nan_the_ranks_run_each_document_by_the_modules_and_clean_up():
    peers = Logged()
    made = engine(tiny("qwen3"), peers=peers, fast=Fast(peers.orders, spoiled=True))
    reads = asyncio.run(made.execute(batch_of(Strategy.FUSED)))
    assert np.isfinite(reads.logits).all()
    assert [order if isinstance(order, str) else order[0] for order in peers.orders] == [
        "told",
        "submit",
        *["told to scrub", "told to run the modules"] * 2,
        "told to scrub",
        "fast scrub",
    ]


def test_the_graphs_are_let_go_before_the_ranks_part():
    peers = Logged()
    engine(tiny("qwen3"), peers=peers, fast=Fast(peers.orders)).close()
    assert peers.orders == ["fast closed", Stop()]


@pytest.mark.parametrize("run", ["run", "execute"])
@pytest.mark.parametrize(("broken", "said"), [("submit", "misaligned address"), ("wait", "unspecified launch failure")])
def test_a_fast_pass_that_fails_after_it_was_told_ends_the_device(broken, said, run):
    peers = Logged()
    made = engine(tiny("qwen3"), peers=peers, fast=Fast(peers.orders, broken=broken))
    with pytest.raises(DeviceGone, match=f"over several ranks failed: RuntimeError: {said}"):
        made.run(batch_of(Strategy.FUSED)) if run == "run" else asyncio.run(made.execute(batch_of(Strategy.FUSED)))


def test_one_process_submits_fast_passes_where_they_are_asked_for_and_their_failures_are_their_own():
    log = []
    made = engine(tiny("qwen3"), fast=Fast(log, broken="submit"))
    with pytest.raises(RuntimeError, match=r"^misaligned address$"):
        asyncio.run(made.execute(batch_of(Strategy.FUSED)))
    assert log[0][1] == "MainThread"


def test_a_follower_computes_each_pass_the_way_it_is_told():
    peers, log, batch = Told(), [], batch_of(Strategy.FUSED)
    peers.forward(batch, fast=True)
    peers.forward(batch, fast=False)
    peers.scrub(3)
    peers.forward(batch, fast=True)
    peers.stop()
    other = engine(tiny("qwen3"), fast=Fast(log))
    seen, forward = [], other.model.forward
    other.model.forward = lambda *given: seen.append(len(log)) or forward(*given)
    try:
        obey(other, peers)
    finally:
        del other.model.forward
    assert seen == [1], "by the modules after one fast pass"
    assert [entry if isinstance(entry, str) else entry[0] for entry in log] == ["submit", "fast scrub", "submit"]


class Apart:
    """Ranks of which the other says something else."""

    rank = 1

    def __init__(self, other):
        self.other = other

    def gathered(self, value):
        return [self.other, value]


def test_ranks_have_the_hand_fused_path_all_or_none():
    reason = "it runs on an NVIDIA GPU"
    assert prepare(Config(tensor_parallel=2), tiny("qwen3"), Apart(reason)) is None
    with pytest.raises(ModelError, match=f"rank 1 has no hand-fused path and others have: {reason}"):
        prepare(Config(tensor_parallel=2), tiny("qwen3"), Apart(""))


def test_a_plan_that_fails_is_told_to_nobody():
    def broken(*_):
        raise RuntimeError("no such strategy")

    made = engine(tiny("qwen3"), peers=Told(), planner=broken)
    with pytest.raises(RuntimeError, match="no such strategy"):
        made.run(batch_of())
    assert not made._peers.orders
