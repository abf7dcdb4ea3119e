"""A model over several ranks by transformers' own tensor-parallel plan: which are taken, and their shards as plain
tensors."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig

from scorer.errors import ModelError


def shard_plan(config: Any, model_class: Any, ranks: int) -> DistributedConfig:
    """How transformers is to shard it: by its plan for the family, but for the head, of which rank 0 reads a few rows.

    Raises ModelError where the family has no plan or its numbers do not divide.
    """
    text = config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise ModelError(f"transformers has no tensor-parallel plan for {model_class.__name__}: serve it on one GPU")
    heads = int(text.num_attention_heads)
    divided = {
        "attention heads": heads,
        "key/value heads": int(getattr(text, "num_key_value_heads", None) or heads),
        "intermediate size": int(getattr(text, "intermediate_size", None) or ranks),
    }
    for name, number in divided.items():
        if number % ranks:
            raise ModelError(f"{number} {name} do not divide by tensor_parallel {ranks}")
    prefix = model_class.base_model_prefix
    return DistributedConfig(tp_size=ranks, tp_plan={f"{prefix}.{name}": style for name, style in plan.items()})


@torch.no_grad()
def as_plain(model: nn.Module) -> None:
    """Puts the shards of linear layers in the place of distributed tensors, which cost time in every call; whatever is
    no layer of the plan is made whole. Every rank must call it."""
    whole: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                continue
            if isinstance(module, nn.Linear) and "forward" in vars(module):  # transformers put its own in its place
                setattr(module, name, _plain(cast(DTensor, parameter).to_local()))
            elif isinstance(module, nn.Linear | nn.Embedding):
                if id(parameter) not in whole:
                    whole[id(parameter)] = _plain(cast(DTensor, parameter).full_tensor())
                setattr(module, name, whole[id(parameter)])


def _plain(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=False)
