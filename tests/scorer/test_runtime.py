"""What cannot be held or computed is said at the start."""

import pytest
import torch

from scorer.config import Config
from scorer.errors import ConfigError, ModelError
from scorer.runtime import Runtime, load_checked
from tests.tiny import tiny_model_dir

PROFILE = """\
name = "tiny"
kind = "label_logits"
prefix = "Query: {query}\\nPassage:"
item = " {document} End.\\nRelevant?"
labels = ["yes", "no"]
positive = "yes"
"""


def config(tmp_path, **settings):
    profile = tmp_path / "profile.toml"
    profile.write_text(PROFILE)
    return Config(
        model=str(tiny_model_dir(tmp_path / "model", "qwen3")), profile=str(profile), device="cpu", **settings
    )


def test_memory_that_does_not_suffice_names_the_settings_that_take_it(tmp_path, monkeypatch):
    def full(cls, given, place):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 8 GiB"
        )

    monkeypatch.setattr(Runtime, "load", classmethod(full))
    with pytest.raises(ModelError, match=r"^CUDA out of memory: lower --max-pass-tokens or --cache-tokens"):
        load_checked(config(tmp_path))


@pytest.mark.parametrize("setting", [{"quantization": "fp8"}, {"invariant": True}])
def test_what_only_the_hand_fused_path_can_is_refused_without_it(tmp_path, setting):
    with pytest.raises(ConfigError, match="needs the hand-fused path: it runs on an NVIDIA GPU"):
        Runtime.load(config(tmp_path, **setting))
