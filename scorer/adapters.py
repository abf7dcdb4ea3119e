"""LoRA adapters in PEFT's format, merged into their base model; with the head that was trained beside them, or not at
all."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel

from scorer.errors import ModelError, first_line

CONFIG = "adapter_config.json"
HEADS = {"CAUSAL_LM": False, "SEQ_CLS": True}  # task_type -> whether the head is one of classes
_NAME = "default"  # what PEFT calls the adapter
_HEAD = "score.weight"


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
    """The base model with the adapter's changes in its weights. Raises ModelError where a tensor has no place."""
    try:
        from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
    except ImportError as error:
        raise ModelError(f"{adapter.directory} is a LoRA adapter, {error}: pip install 'prefixrank[lora]'") from None
    try:
        config = PeftConfig.from_pretrained(str(adapter.directory))
        config.inference_mode = True
        wrapped: Any = PeftModel(cast(Any, model), config, _NAME)
        told: Any = set_peft_model_state_dict(wrapped, load_peft_weights(str(adapter.directory), device="cpu"), _NAME)
    except Exception as error:  # what a damaged adapter raises is not ours to list
        raise ModelError(f"adapter {adapter.directory} does not load: {first_line(error)}") from error
    if missing := sorted(name for name in told.missing_keys if f".{_NAME}" in name):
        raise ModelError(
            f"adapter {adapter.directory} lacks {len(missing)} tensors, such as {missing[0]}: scores would be random"
        )
    if unused := sorted(told.unexpected_keys):
        raise ModelError(f"adapter {adapter.directory}: {len(unused)} tensors have no place, such as {unused[0]}")
    return cast(PreTrainedModel, wrapped.merge_and_unload(safe_merge=True))


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
