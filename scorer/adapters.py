"""LoRA adapters in PEFT's format, merged into their base model; with the head that was trained beside them, or not at
all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scorer.errors import ModelError, first_line

CONFIG = "adapter_config.json"
HEADS = {"CAUSAL_LM": False, "SEQ_CLS": True}  # task_type -> whether the head is one of classes
Call = tuple[tuple[Any, ...], dict[str, Any], Tensor]  # arguments of a module, and what it computed
_NAME = "default"  # what PEFT calls the adapter
_HEAD = "score.weight"
PROOF_TOKENS = 16  # spread over the vocabulary
# What merging may change in what a module computes, as a part of it: it rounds every weight once more, to the model's
# own type. A merge that is wrong changes it by as much as the adapter does.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's directory, as its configuration and its file of tensors tell of it.

    base        directory or name of the base model
    classifies  it was trained with a sequence-classification head
    classes     rows of the head that it brings; None where it brings none
    brings      names, in the base model, of whole tensors that it brings
    """

    directory: Path
    base: str
    classifies: bool
    classes: int | None
    brings: frozenset[str]


def adapter_at(path: Path) -> Adapter | None:
    """The adapter in this directory; None where it holds none. Raises ModelError where it is not one to be merged."""
    file = path / CONFIG
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind, task, base = (config[name] for name in ("peft_type", "task_type", "base_model_name_or_path"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file}: not a PEFT adapter's configuration ({type(error).__name__} {error})") from None
    _refuse(file, config, kind, task, base)
    shapes = {_plain(name): shape for name, shape in _shapes(path).items() if "lora_" not in name}
    rows = shapes.get(_HEAD)
    return Adapter(path, base, HEADS[task], None if rows is None else int(rows[0]), frozenset(shapes))


def _refuse(file: Path, config: dict[str, Any], kind: object, task: object, base: object) -> None:
    if kind != "LORA":
        raise ModelError(f"{file}: peft_type {kind!r}, but only LORA is merged into its base model")
    if task not in HEADS:
        raise ModelError(f"{file}: task_type {task!r}, but only {' and '.join(HEADS)} are scored")
    if not isinstance(base, str) or not base:
        raise ModelError(f"{file}: base_model_name_or_path names no model")
    if config.get("alora_invocation_tokens"):
        raise ModelError(f"{file}: alora_invocation_tokens switch the adapter on within a text: it cannot be merged")


def merged(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """The base model with the adapter's changes in its weights. Raises ModelError where a tensor has no place, and
    where the merged model does not compute what PEFT does with the adapter beside the weights."""
    try:
        from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
    except ImportError as error:
        raise ModelError(f"{adapter.directory} is a LoRA adapter, {error}: pip install 'prefixrank[lora]'") from None
    weighted = [name for name, module in model.named_modules() if name and module._parameters]
    try:
        config = PeftConfig.from_pretrained(str(adapter.directory))
        config.inference_mode = True
        wrapped: Any = PeftModel(cast(Any, model), config, _NAME)
        told: Any = set_peft_model_state_dict(wrapped, load_peft_weights(str(adapter.directory), device="cpu"), _NAME)
    except Exception as error:  # what a damaged adapter raises is not ours to list
        raise ModelError(f"adapter {adapter.directory} does not load: {first_line(error)}") from error
    if missing := _missing(wrapped, {name for name in told.missing_keys if f".{_NAME}" in name}):
        raise ModelError(
            f"adapter {adapter.directory} lacks {len(missing)} tensors, such as {missing[0]}: scores would be random"
        )
    if unused := sorted(told.unexpected_keys):
        raise ModelError(f"adapter {adapter.directory}: {len(unused)} tensors have no place, such as {unused[0]}")
    try:
        return _merged_as_told(wrapped, adapter, weighted)
    except ModelError:
        raise
    except Exception as error:  # such as weights that are not finite, or are quantised
        raise ModelError(f"adapter {adapter.directory} cannot be merged: {first_line(error)}") from error


def _missing(wrapped: nn.Module, names: set[str]) -> list[str]:
    """Those of the names by no other name of which the tensor came: both ends of tied embeddings may share one."""
    known = dict(wrapped.named_parameters(remove_duplicate=False))
    came = {id(parameter) for name, parameter in known.items() if name not in names}
    return sorted(name for name in names if name not in known or id(known[name]) not in came)


def _merged_as_told(wrapped: Any, adapter: Adapter, weighted: Sequence[str]) -> PreTrainedModel:
    """wrapped: PEFT's model, the adapter beside the weights. weighted: names of the base model's modules with weights.

    Module by module, each given what it was given before: over all layers rounding would add up, and send tokens to
    other experts.
    """
    calls = _calls(wrapped.eval().get_base_model(), weighted)
    _untie(wrapped)
    model = cast(PreTrainedModel, wrapped.merge_and_unload(safe_merge=True))
    allowed = TOLERANCE.get(model.dtype, 0.0)
    for name, (args, kwargs, expected) in calls.items():
        with torch.inference_mode():
            found = _tensor(model.get_submodule(name)(*args, **kwargs)).float()
        size = float(expected.float().norm())
        if not float((found - expected.float()).norm()) <= allowed * size:
            apart = float((found - expected.float()).norm()) / (size or 1.0)
            raise ModelError(
                f"adapter {adapter.directory}: merged into {adapter.base}, {name} computes what is {apart:.2g} of its "
                f"size away from PEFT's own, and {allowed:g} is allowed: merge it yourself and serve that checkpoint"
            )
    return model


def _calls(model: PreTrainedModel, names: Sequence[str]) -> dict[str, Call]:
    """How each of these modules was called for a few tokens, the last time."""
    calls: dict[str, Call] = {}

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls[name] = args, kwargs, _tensor(output)

        return model.get_submodule(name).register_forward_hook(keep, with_kwargs=True)

    hooks = [hook(name) for name in names]
    try:
        _run(model)
    finally:
        for each in hooks:
            each.remove()
    return calls


def _tensor(output: Any) -> Tensor:
    return cast(Tensor, output[0] if isinstance(output, tuple) else output)


def _untie(wrapped: Any) -> None:
    """Gives a module that the adapter changes weights of its own where it shares them, as a head does with embeddings:
    the change is for one of them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    owners = Counter(id(parameter) for module in wrapped.modules() for parameter in module._parameters.values())
    changed: list[Any] = [m.get_base_layer() for m in wrapped.modules() if isinstance(m, BaseTunerLayer)]
    for layer in changed:
        for name, parameter in layer.named_parameters(recurse=False):
            if owners[id(parameter)] > 1:
                owners[id(parameter)] -= 1
                setattr(layer, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
                wrapped.config.tie_word_embeddings = False


@torch.inference_mode()
def _run(model: PreTrainedModel) -> None:
    """A few tokens by transformers' own attention."""
    used = model.config._attn_implementation
    size = int(model.config.get_text_config().vocab_size)
    ids = torch.linspace(0, size - 1, PROOF_TOKENS, device=model.device).long()
    model.set_attn_implementation("eager")  # takes soft caps too
    try:
        model(input_ids=ids[None], use_cache=False)
    finally:
        model.set_attn_implementation(used)


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the adapter's tensors; none are read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path / "adapter_model.safetensors"), framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"adapter {path} does not load: adapter_model.safetensors: {error}") from None


def _plain(name: str) -> str:
    """A tensor's name in the base model."""
    return name.removeprefix("base_model.model.")
