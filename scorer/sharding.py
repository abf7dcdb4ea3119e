"""A model over several ranks by transformers' own tensor-parallel plan: which are taken, and their shards as plain
tensors."""

from __future__ import annotations

from typing import Any

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
        "expert intermediate size": int(getattr(text, "moe_intermediate_size", None) or ranks),
    }
    for name, number in divided.items():
        if number % ranks:
            raise ModelError(f"{number} {name} do not divide by tensor_parallel {ranks}")
    prefix = model_class.base_model_prefix
    return DistributedConfig(tp_size=ranks, tp_plan={f"{prefix}.{name}": style for name, style in plan.items()})


@torch.no_grad()
def as_plain(model: nn.Module) -> None:
    """Puts the shards of linear layers in the place of distributed tensors, which cost time in every call, and makes
    embeddings whole again, which transformers shards where they are the head too. Experts stay distributed: whether
    transformers sums what they compute over the ranks, it tells by that in each call. Every rank must call it."""
    whole: dict[int, nn.Parameter] = {}
    for module in model.modules():
        sharded = {n: p for n, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
        if isinstance(module, nn.Linear) and "forward" in vars(module):  # transformers' own, which sums over the ranks
            for name, parameter in sharded.items():
                setattr(module, name, _plain(parameter.to_local()))
        elif sharded and isinstance(module, nn.Linear | nn.Embedding):
            vars(module).pop("forward", None)
            for name, parameter in sharded.items():
                if id(parameter) not in whole:
                    whole[id(parameter)] = _plain(parameter.full_tensor())
                setattr(module, name, whole[id(parameter)])


def _plain(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=False)
