"""The hand-fused layers over two ranks compute what those of one process do, and the ranks stay in step."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.scorer.two_ranks import results
from tests.tiny import tiny_model_dir

# fp32: each sum over a layer's width is made of two halves, in another order than in one process.
TOLERANCE = 2e-5
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3-tied": {"tie_word_embeddings": True},
}


def checkpoint(directory, family, overrides):
    """With biases and norms that are no zeros and ones."""
    tiny_model_dir(directory, family, **overrides)
    model = AutoModelForCausalLM.from_pretrained(directory)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    model.save_pretrained(directory)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two ranks found, and what one process does."""
    directory = tmp_path_factory.mktemp("checkpoints")
    for name, overrides in FAMILIES.items():
        checkpoint(directory / name, name.split("-")[0], overrides)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.scorer.two_ranks"]
    environments = [
        os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LOCAL_RANK": str(r)} for r in (0, 1)
    ]
    ranks = [
        subprocess.Popen([*command, str(rank), rendezvous, directory], env=env) for rank, env in enumerate(environments)
    ]
    try:
        expected = results(directory, None)
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return np.load(directory / "results.npz"), expected


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_over_two_ranks_are_those_of_one(family, found):
    two, one = found
    assert np.ptp(one[family]) > 1
    for name in (family, f"{family} in chunks", f"{family} by transformers"):
        close(two[name], one[name])
    close(two[f"{family} logits"], one[f"{family} by transformers"])


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_fp8_by_local_shards_is_as_near_to_the_unquantised(found):
    """Scales are of a shard's own rows and channels: other numbers than one process's, no worse ones."""
    two, one = found
    errors = [np.abs(each["fp8"] - one["qwen3"]).mean() for each in (two, one)]
    assert 0 < errors[0] < 1.3 * errors[1]


def test_an_engine_over_two_ranks_takes_the_fast_path_heals_and_goes_on(found):
    two, one = found
    for name in ("good", "bad", "again"):
        np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-4)
    assert np.isnan(two["bad"][-2:]).all()
    np.testing.assert_allclose(two["bad"][:-2], two["good"], rtol=0, atol=1e-4)
    assert np.array_equal(two["again"], two["good"])
