"""A model over two GPUs with NCCL, through the real server: its hand-fused path with CUDA graphs, and its own modules.

Run: pytest -m gpu tests/gpu/test_tensor_parallel.py -s. About two minutes for 0.6B and four for 4B, most of it writing
and loading checkpoints.
"""

import json
import os
import signal
import time

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

from transformers import AutoTokenizer  # noqa: E402

from loadtest.random_checkpoint import write_checkpoint  # noqa: E402
from loadtest.shapes import SIZES  # noqa: E402
from prefixrank.v1 import scorer_pb2 as pb  # noqa: E402
from tests.scorer.test_tensor_parallel import followers, server  # noqa: E402

# bf16 keeps 8 bits: over 28 layers the order of sums moves a log-odds by a few hundredths.
TOLERANCE = 0.12
QUERY = "which of these is relevant " * 20
TEXTS = [f"document {n} " + "some text of a passage " * (1 + n % 9) for n in range(64)]
POISONED = "\a"  # of no text and no sample of the start's check
TIMED = 10
CAPTURED = "CUDA graphs captured in"
BY_MODULES = "no hand-fused path: --compile off"


def poison(directory):
    """One token's embedding becomes NaN, and with it every document that has the token."""
    (token,) = AutoTokenizer.from_pretrained(directory).encode(POISONED)
    for path in directory.glob("*.safetensors"):
        with path.open("r+b") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            found = json.loads(header).get("model.embed_tokens.weight")
            if found is not None:
                width = found["shape"][1]
                file.seek(8 + len(header) + found["data_offsets"][0] + 2 * width * token)
                file.write(b"\xc0\x7f" * width)  # bf16


def scored(client, texts, query=QUERY):
    return client.score(query, texts, timeout=120).results


def measured(directory, profile, tmp_path, said, environment=os.environ, **settings):
    """Scores, the seconds of a call, and what a document of NaN among them did to the others."""
    begun = time.perf_counter()
    with server(directory, tmp_path, profile=profile, device="auto", environment=environment, **settings) as made:
        started = time.perf_counter() - begun
        assert said in made.log.read_text(), made.log.read_text()
        assert len(followers(made.process)) == settings["tensor_parallel"] - 1
        found = np.array([result.score for result in scored(made.client, TEXTS)])
        begun = time.perf_counter()
        for n in range(TIMED):
            scored(made.client, TEXTS, f"{n} {QUERY}")
        seconds = (time.perf_counter() - begun) / TIMED
        heals(made.client, found)
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(60) == 0, made.log.read_text()
    print(f"{settings}: {seconds:.4f} s a call of {len(TEXTS)}; started in {started:.0f} s")
    return found, seconds


def heals(client, expected):
    """A document of NaN in the pass gets no score, its neighbours theirs, and so does the next call."""
    few = TEXTS[:4]
    *others, bad = scored(client, [*few, f"broken {POISONED}"])
    assert bad.status == pb.DOCUMENT_STATUS_NUMERIC_ERROR
    assert not bad.HasField("score")
    for results in (others, scored(client, few)):
        assert np.abs(np.array([result.score for result in results]) - expected[:4]).max() <= TOLERANCE


@pytest.mark.parametrize("size", ["0.6B", "4B"])
def test_scores_over_two_gpus_are_those_of_one(size, tmp_path):
    directory = tmp_path / "model"
    profile = write_checkpoint(SIZES[size], directory)
    poison(directory)
    torch.cuda.empty_cache()
    one, _ = measured(directory, profile, tmp_path, CAPTURED, tensor_parallel=1)
    two, fast = measured(directory, profile, tmp_path, CAPTURED, tensor_parallel=2)
    plain, slow = measured(directory, profile, tmp_path, BY_MODULES, tensor_parallel=2, compile="off")
    for name, other in (("one GPU", one), ("by modules", plain)):
        print(
            f"{size}: two GPUs, hand-fused, against {name}: {np.abs(two - other).max():.4f}, spread {other.std():.3f}"
        )
        assert np.abs(two - other).max() <= TOLERANCE
        assert len(set(np.argsort(-two)[:10]) & set(np.argsort(-other)[:10])) >= 8
    print(f"{size}: graphs over two GPUs take {fast / slow:.2f} of the modules' time")


def test_fp8_and_invariant_start_over_two_gpus(tmp_path):
    """And their scores are near those of bf16."""
    directory = tmp_path / "model"
    profile = write_checkpoint(SIZES["0.6B"], directory)
    poison(directory)
    plain, _ = measured(directory, profile, tmp_path, CAPTURED, tensor_parallel=2)
    same = os.environ | {"PREFIXRANK_INVARIANT": "true"}
    invariant, _ = measured(directory, profile, tmp_path, CAPTURED, same, tensor_parallel=2, page_size=64)
    assert np.abs(invariant - plain).max() <= TOLERANCE
    fp8, _ = measured(directory, profile, tmp_path, CAPTURED, tensor_parallel=2, quantization="fp8")
    ranks = [np.argsort(np.argsort(scores)) for scores in (fp8, plain)]
    assert np.corrcoef(*ranks)[0, 1] > 0.9
