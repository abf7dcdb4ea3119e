"""What may be imported without what: the linter sees our own modules, a fresh interpreter sees everything."""

import subprocess
import sys

import pytest

PURE = [
    "attention.layout",
    "attention.mask",
    "attention.plans",
    "attention.planner",
    "attention.expand",
    "attention.decode",
    "attention.strategy",
    "batching.types",
    "batching.packing",
    "batching.beams",
    "batching.select",
    "batching.page_pool",
    "batching.runs",
    "batching.ghosts",
    "batching.eviction",
    "batching.prefix_cache",
    "batching.scheduler",
    "batching.batcher",
]


def loaded(module):
    """Top-level names of everything that importing `module` alone brings in."""
    code = f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize("module", PURE)
def test_the_pure_half_loads_no_torch_and_no_wire(module):
    assert not loaded(module) & {"torch", "transformers", "grpc", "google", "prefixrank", "scorer", "flashinfer"}


@pytest.mark.parametrize("module", ["scorer.client", "prefixrank.v1.scorer_pb2_grpc"])
def test_a_pipeline_loads_grpc_and_protobuf_only(module):
    heavy = {"torch", "transformers", "numpy", "pydantic", "attention", "batching", "tokenizers", "rich"}
    assert not loaded(module) & heavy


def test_the_command_line_starts_without_torch():
    assert "torch" not in loaded("scorer.__main__")
