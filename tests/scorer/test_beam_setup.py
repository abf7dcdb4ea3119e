"""What a service's beam steps are made of."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
import torch

from batching.beams import BeamOptions
from scorer.beam_run import BeamRequest
from scorer.beam_setup import make_steps
from scorer.beam_steps import ModelSteps
from tests.models import tiny
from tests.scorer.test_beam import agree, by_transformers, prompt_of, searcher

GIVEN = SimpleNamespace()  # config, memory and time model, which only a capture reads


def captures(*_):
    return SimpleNamespace(submit=None)


def fails(*_):
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand what torch adds to that")


@pytest.mark.parametrize(("fast", "captured"), [(None, True), (GIVEN, True), (GIVEN, False)])
def test_a_capture_is_used_where_there_is_a_fused_path_that_it_can_be_made_of(fast, captured):
    steps = make_steps(GIVEN, tiny("qwen3"), None, GIVEN, GIVEN, fast, captures if captured else fails)
    assert isinstance(steps, ModelSteps) == (fast is None or not captured)


def test_where_a_capture_fails_one_line_says_why_and_searches_go_by_modules(caplog):
    model, prompt, asked = tiny("qwen3"), prompt_of(20), BeamOptions(3, 4)

    async def run():
        steps = lambda model, pages: make_steps(GIVEN, model, pages, GIVEN, GIVEN, GIVEN, fails)  # noqa: E731
        async with searcher(model, steps=steps) as (made, _):
            return await made.search(BeamRequest(prompt, asked))

    with caplog.at_level(logging.INFO, "scorer.beam_setup"):
        found = asyncio.run(run())
    agree(found.hypotheses, by_transformers(model, prompt, asked))
    (line,) = [record for record in caplog.records if record.name == "scorer.beam_setup"]
    assert line.levelno == logging.WARNING
    assert "RuntimeError: CUDA error: operation not permitted when stream is capturing" in line.message
    assert "\n" not in line.message


def test_too_little_memory_is_no_reason_to_go_on():
    def runs_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        make_steps(GIVEN, tiny("qwen3"), None, GIVEN, GIVEN, GIVEN, runs_out)
