"""`make test-kernels`: the GPU image's build of FlashInfer's kernels, with a stand-in for the compilers.

It shows that the real FlashInfer finds its sources, and afterwards every module that our launches may ask for. That
nvcc compiles them is not tried here.
"""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attention.timing import HEAD_DIMS

pytestmark = pytest.mark.target

ROOT = Path(__file__).parent.parent.parent
# What the wrappers load in plan(), by the arguments that decide on the module.
ASK = """
import json, sys, torch
from flashinfer.jit.attention.modules import gen_batch_decode_module, gen_batch_prefill_module
from flashinfer.jit.cascade import gen_cascade_module
missing = [] if gen_cascade_module().is_aot else ["cascade"]
for kernel, dtype, size, window, cap in json.loads(sys.argv[1]):
    dtypes = (getattr(torch, dtype),) * 3
    asked = gen_batch_prefill_module(kernel, *dtypes, torch.int32, size, size, 0, window, cap, False)
    asked = [asked, gen_batch_decode_module(*dtypes, torch.int32, size, size, 0, False, False)]
    missing += [spec.name for spec in asked if not spec.is_aot]
print(json.dumps(missing))
"""


@pytest.fixture
def environment(tmp_path):
    """FlashInfer with a CUDA of stand-ins and without kernels, for Hopper."""
    (tmp_path / "bin").mkdir()
    shutil.copy(Path(__file__).parent / "nvcc.py", tmp_path / "bin/nvcc")
    return os.environ | {
        "CUDA_HOME": str(tmp_path),
        "CXX": str(tmp_path / "bin/nvcc"),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
    }


@pytest.fixture
def built_into():
    package = Path(importlib.util.find_spec("flashinfer").origin).parent
    folder = package / "data/aot"
    shutil.rmtree(folder, ignore_errors=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def missing(environment, kernels):
    asked = list(itertools.product(kernels, ("float16", "bfloat16"), HEAD_DIMS, (False, True), (False, True)))
    command = [sys.executable, "-c", ASK, json.dumps(asked)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(("architectures", "kernels"), [("9.0a", ("fa2", "fa3")), ("8.9 10.0a", ("fa2",))])
def test_every_module_that_a_launch_asks_for_is_there(environment, built_into, architectures, kernels):
    environment["FLASHINFER_CUDA_ARCH_LIST"] = architectures
    assert missing(environment, kernels), "nothing is there before"
    ran = subprocess.run(
        [sys.executable, ROOT / "deploy/flashinfer_kernels.py"], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert missing(environment, kernels) == []
    assert len(list(built_into.glob("*/*.so"))) == 1 + 6 + 24 * len(kernels)
