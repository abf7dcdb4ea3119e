"""From a checkpoint on disk, or a LoRA adapter beside one, to a ScoringModel; whatever does not fit is refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from scorer.adapters import Adapter, adapter_at, merged
from scorer.errors import ModelError, first_line
from scorer.model import ATTENTION_NAME, CLASSIFIER, ScoringModel

POINTER = b"version https://git-lfs.github.com/spec/"
READ = {".safetensors", ".gguf", ".json", ".model"}  # what a checkpoint is read from
log = logging.getLogger(__name__)


def find(source: str, allow_download: bool) -> Path:
    """Where a checkpoint should lie. Raises ModelError where nothing is there and nothing may be fetched."""
    path = Path(source).expanduser()
    if not path.exists() and not allow_download:
        raise ModelError(f"model {source!r}: no such directory or file (--allow-download fetches from the hub)")
    return path


def tokenizer_place(source: str) -> str:
    """Where the tokenizer lies: with the checkpoint, or where an adapter has none with its base model."""
    adapter = adapter_at(Path(source).expanduser())
    return source if adapter is None or (adapter.directory / "tokenizer.json").is_file() else adapter.base


def places(source: str) -> tuple[str, ...]:
    """Everything that the model is made of: a checkpoint, or an adapter and its base model."""
    adapter = adapter_at(Path(source).expanduser())
    return (source,) if adapter is None else (source, adapter.base)


def load_model(source: str, dtype: str, device: str, allow_download: bool, ranks: int = 1) -> ScoringModel:
    """Loads a safetensors directory, a .gguf file, a LoRA adapter with its base model, or, if allowed, a repository of
    the hub.

    dtype and device may be 'auto'. ranks: processes that each load a shard, all of which have joined a group. Raises
    ModelError.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    where = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device
    path = find(source, allow_download)
    adapter = adapter_at(path)
    if ranks > 1 and (adapter is not None or path.is_file()):
        kind = "LoRA adapter" if adapter is not None else "GGUF file"
        raise ModelError(
            f"model {source!r} is a {kind}, and tensor_parallel {ranks} shards only a directory of safetensors"
        )
    for place in places(source):
        _refuse_pointers(Path(place).expanduser())
    model, missing = _load(source if adapter is None else adapter.base, dtype, where, allow_download, adapter, ranks)
    if missing := missing - (adapter.brings if adapter else frozenset()):
        told = f"{len(missing)} tensors, such as {min(missing)}"
        raise ModelError(f"model {source!r} lacks {told}: scores would be random")
    if adapter is not None:
        model = merged(model, adapter)
    try:
        model = cast(Any, model).to(where)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"model {source!r} cannot go to {where}: {first_line(error)}") from None
    return ScoringModel(model, path.name if path.exists() else source)


def _load(
    source: str, dtype: str, where: str, allow_download: bool, adapter: Adapter | None, ranks: int
) -> tuple[PreTrainedModel, set[str]]:
    """The model on the CPU, and the names of the tensors that its checkpoint lacks."""
    path = Path(source).expanduser()
    if adapter is not None and not path.exists() and not allow_download:
        raise ModelError(
            f"the adapter {adapter.directory} is for base model {source!r}, which is not here: set "
            "base_model_name_or_path in its adapter_config.json to a directory (--allow-download fetches from the hub)"
        )
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(path) if path.exists() else source}
    if path.is_file():
        place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    common: dict[str, Any] = {"local_files_only": not allow_download, "trust_remote_code": False}
    config: Any = None
    try:
        config = AutoConfig.from_pretrained(**place, **common)
        _refuse_quantisation(config)
        if adapter is not None and adapter.classes is not None:
            config.num_labels = adapter.classes
        classifies = adapter.classifies if adapter is not None else _classifies(config)
        kind: Any = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
        if ranks > 1:
            from scorer.sharding import shard_plan

            common["distributed_config"] = shard_plan(config, kind._model_mapping[type(config)], ranks)
        loaded: Any = kind.from_pretrained(
            **place,
            **common,
            config=config,
            dtype=_dtype(dtype, where, config),
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with the sizes
            use_safetensors=True,  # pytorch_model.bin would be taken otherwise: a pickle
        )
    except ModelError:
        raise
    except Exception as error:  # what a damaged checkpoint raises is not ours to list
        raise ModelError(f"model {source!r} does not load: {_reason(error, config)}") from error
    model, told = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    if ranks > 1:
        from scorer.sharding import as_plain

        as_plain(model)
    _refuse_mismatched(source, told["mismatched_keys"])
    _refuse_leftovers(source, model, told["unexpected_keys"])
    _refuse_unused(source, model, told["unexpected_keys"])
    return model, set(told["missing_keys"])


def _refuse_pointers(path: Path) -> None:
    """What git leaves in the place of large files that were not fetched."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []:
        if file.suffix in READ and file.is_file():
            with file.open("rb") as opened:
                if opened.read(len(POINTER)) == POINTER:
                    raise ModelError(f"{file} is a Git LFS pointer and not the file itself: fetch it by git lfs pull")


def _refuse_quantisation(config: Any) -> None:
    """transformers skips a kind of quantisation that it does not know, and would read its numbers as weights."""
    given = getattr(config, "quantization_config", None)
    kind = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    if given is not None and str(getattr(kind, "value", kind)) not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ModelError(f"its weights are quantised by {kind!r}, which transformers does not know")


def _refuse_mismatched(source: str, found: Iterable[tuple[str, Any, Any]]) -> None:
    """found: name, shape in the checkpoint and shape by the configuration of each tensor that does not fit."""
    if wrong := sorted(found):
        name, stored, expected = wrong[0]
        raise ModelError(
            f"model {source!r} does not load: {len(wrong)} tensors are of other sizes than config.json has them, such "
            f"as {name}: {list(stored)}, by config.json {list(expected)}"
        )


def _refuse_leftovers(source: str, model: PreTrainedModel, names: Iterable[str]) -> None:
    """A bias or a scale that a module of the model has no place for would be missing from every score."""
    modules = dict(model.named_modules())
    for name in sorted(names):
        owner, _, own = name.rpartition(".")
        if owner in modules and getattr(modules[owner], own, None) is None:
            raise ModelError(
                f"model {source!r} has a tensor {name}, and {type(modules[owner]).__name__} no place for it: the "
                "configuration is not that of this checkpoint"
            )


def _refuse_unused(source: str, model: PreTrainedModel, names: Iterable[str]) -> None:
    """Whole modules of the checkpoint that are not in the model. In its decoder they are a part of what was trained,
    and it would score without them; beside it they are further heads (of values, of classes, that draft), of which
    nothing is read. What transformers declares as not needed is not among the names."""
    parts = (f"{model.base_model_prefix}.", *(f"{name}." for name, _ in model.base_model.named_children()))
    inside = sorted(name for name in names if name.startswith(parts))
    if beside := sorted(set(names) - set(inside)):
        told = "model %r: %d tensors beside its decoder have no place in %s and are not used, such as %s"
        log.warning(told, source, len(beside), type(model).__name__, beside[0])
    if inside:
        told = f"{len(inside)} tensors that {type(model).__name__} has no place for, such as {', '.join(inside[:3])}"
        raise ModelError(
            f"model {source!r} has {told}: config.json does not fit the checkpoint, see {_misfit(model.config, inside)}"
        )


def _misfit(config: Any, unused: Iterable[str]) -> str:
    """The field of the configuration that likely does not fit the tensors."""
    layers = [int(number) for name in unused for number in re.findall(r"\.(\d+)\.", name)[:1]]
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    if layers and count is not None and min(layers) >= count:
        return f"num_hidden_layers {count}: the checkpoint has {max(layers) + 1}"
    return f"model_type {config.model_type!r}"


def _classifies(config: Any) -> bool:
    """Whether the checkpoint was saved with a sequence-classification head."""
    return any(str(name).endswith(CLASSIFIER) for name in getattr(config, "architectures", None) or ())


def _reason(error: Exception, config: Any) -> str:
    """config: of the checkpoint, where it was read"""
    if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
        name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
        return f"{name} has an attention of its own, outside transformers' AttentionInterface: no strategy can pack it"
    if isinstance(error, KeyError) and config is not None:
        for field, value in config.to_dict().items():
            if isinstance(value, str) and error.args == (value,):
                return f"config.json has {field} {value!r}, which transformers does not know"
    return first_line(error)


def _dtype(name: str, device: str, config: Any) -> torch.dtype:
    """'auto' is the checkpoint's own type on a GPU; float32 on a CPU, where bf16 without hardware is 4-5 x slower."""
    if name != "auto":
        return cast(torch.dtype, getattr(torch, name))
    if device == "cpu":
        return torch.float32
    stored = config.get_text_config().dtype
    return stored if isinstance(stored, torch.dtype) and stored.itemsize == 2 else torch.bfloat16
