"""A model over two GPUs with NCCL, through the real server. Run: pytest -m gpu tests/gpu/test_tensor_parallel.py -s

About 90 seconds for 0.6B and three minutes for 4B, most of it writing and loading checkpoints.
"""

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

from loadtest.random_checkpoint import write_checkpoint  # noqa: E402
from loadtest.shapes import SIZES  # noqa: E402
from tests.scorer.test_tensor_parallel import followers, server  # noqa: E402

# bf16 keeps 8 bits: over 28 layers the order of sums moves a log-odds by a few hundredths.
TOLERANCE = 0.12
QUERY = "which of these is relevant " * 20
TEXTS = [f"document {n} " + "some text of a passage " * (1 + n % 9) for n in range(64)]
TIMED = 10


def measured(directory, profile, tmp_path, **settings):
    with server(directory, tmp_path, profile=profile, device="auto", environment=os.environ, **settings) as made:
        found = made.client.score(QUERY, TEXTS, timeout=120).results
        started = time.perf_counter()
        for n in range(TIMED):
            made.client.score(f"{n} {QUERY}", TEXTS, timeout=120)
        seconds = (time.perf_counter() - started) / TIMED
        others = followers(made.process)
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(60) == 0
        return np.array([result.score for result in found]), seconds, len(others)


@pytest.mark.parametrize("size", ["0.6B", "4B"])
def test_scores_over_two_gpus_are_those_of_one(size, tmp_path):
    directory = tmp_path / "model"
    profile = write_checkpoint(SIZES[size], directory)
    torch.cuda.empty_cache()
    one, fast, _ = measured(directory, profile, tmp_path, tensor_parallel=1)
    plain, off, _ = measured(directory, profile, tmp_path, tensor_parallel=1, compile="off")
    two, over, others = measured(directory, profile, tmp_path)
    assert others == 1
    for name, single in (("hand-fused", one), ("modules", plain)):
        print(f"{size}: two GPUs against one, {name}: {np.abs(two - single).max():.4f}, spread {single.std():.3f}")
        assert np.abs(two - single).max() <= TOLERANCE
        assert len(set(np.argsort(-two)[:10]) & set(np.argsort(-single)[:10])) >= 8
    print(f"{size}: a call of {len(TEXTS)}: {fast:.4f} s one GPU, {off:.4f} s by modules, {over:.4f} s over two")
