"""Builds, for an image without a CUDA compiler, every kernel of FlashInfer that the service may ask for.

usage: FLASHINFER_CUDA_ARCH_LIST=9.0a python flashinfer_kernels.py

They go to the folder where FlashInfer looks before it compiles. FlashInfer's own `python -m flashinfer.aot` looks for
its sources where a checkout has them; an installed package has them elsewhere, and there it ends with an error.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator

import torch
from flashinfer.jit import env
from flashinfer.jit.attention.modules import gen_batch_decode_module, gen_batch_prefill_module
from flashinfer.jit.cascade import gen_cascade_module
from flashinfer.jit.core import JitSpec, build_jit_specs

from attention.timing import HEAD_DIMS, KERNELS

DTYPES = (torch.float16, torch.bfloat16)
EITHER = (False, True)


def kernels(architectures: str) -> tuple[str, ...]:
    """fa3 is for Hopper alone."""
    return KERNELS if any(each.startswith("9.0") for each in architectures.split()) else KERNELS[:1]


def specs(architectures: str) -> Iterator[JitSpec]:
    """What is to be compiled, with and without a window and a soft cap of logits."""
    yield gen_cascade_module()
    for dtype, head_dim, window, cap in itertools.product(DTYPES, HEAD_DIMS, EITHER, EITHER):
        for kernel in kernels(architectures):
            yield gen_batch_prefill_module(
                kernel, dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, window, cap, False
            )
    for dtype, head_dim in itertools.product(DTYPES, HEAD_DIMS):  # for `bench decode` and `calibrate`
        yield gen_batch_decode_module(dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False)


def build(architectures: str) -> list[str]:
    """Compiles them and puts each where FlashInfer looks; their names."""
    built = list(specs(architectures))
    build_jit_specs(built, verbose=True, skip_prebuilt=False)
    for spec in built:
        spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(spec.jit_library_path, spec.aot_path)
    shutil.rmtree(env.FLASHINFER_WORKSPACE_DIR)
    return [spec.name for spec in built]


if __name__ == "__main__":
    print(len(build(os.environ["FLASHINFER_CUDA_ARCH_LIST"])), "modules in", env.FLASHINFER_AOT_DIR)
