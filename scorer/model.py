"""A transformers checkpoint as the engine needs it: rows in, hidden states of the read rows out, and its head.

Attention goes through transformers' AttentionInterface under the name `prefixrank`; whoever calls the model hands the
pass's `attend` along as an argument. A model any of whose layers mixes tokens in another way is refused at load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from attention.plans import HeadShape, MaskKey
from attention.strategy import Attend
from batching.types import Floats, Ints
from scorer.errors import ModelError

log = logging.getLogger(__name__)

ATTENTION_NAME = "prefixrank"
HEAD_ROWS = 256  # hidden states that one block of the vocabulary product takes
HEAD_TOKENS = 32_768  # vocabulary rows of such a block: bounds it to 32 MiB of fp32


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    attend: Attend | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' signature: query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim].

    Returns [1, rows, heads, head_dim].
    """
    if attend is None:
        raise ModelError(f"{type(module).__name__} was called without a plan: score through the engine")
    if s_aux is not None:
        raise ModelError(f"{type(module).__name__} uses attention sinks, which no strategy here computes")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask_key = MaskKey(sliding_window, softcap or 0.0)
    return attend(cast(int, module.layer_idx), q, k, v, scale, mask_key).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer told of itself when it was probed."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    mask_key: MaskKey


class ScoringModel:
    """A decoder-only model that the engine may call. Final.

    layers       one LayerShape an attention layer
    head_shape   what all layers have in common, None if they differ
    mask_keys    the distinct (window, soft cap) pairs: a pass needs one plan for each
    decoder      the model without its head
    vocabulary   rows of the head
    max_context  positions that the model was made for
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        """Raises ModelError where a layer mixes tokens outside the AttentionInterface."""
        self.hf = model
        model.requires_grad_(False)
        model.train(False)
        self.name = name
        self.architecture = type(model).__name__
        self.decoder = _untyped(model, "get_decoder")()
        head = _untyped(model, "get_output_embeddings")()
        if not isinstance(head, nn.Linear):
            raise ModelError(f"{self.architecture} has no linear language-model head")
        self._weight, self._bias = head.weight, head.bias
        self._finish = _logit_transform(model.config.get_text_config())
        self.layers = tuple(_probe(self.decoder, self.architecture, model))
        shapes = {(layer.heads, layer.kv_heads, layer.head_dim, layer.scale) for layer in self.layers}
        self.head_shape = HeadShape(*shapes.pop(), self.dtype) if len(shapes) == 1 else None
        self.mask_keys = tuple(dict.fromkeys(layer.mask_key for layer in self.layers))
        self.vocabulary = self._weight.shape[0]
        self.max_context, self.context_note = _max_context(model.config.get_text_config())

    @property
    def device(self) -> torch.device:
        return self._weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @torch.inference_mode()
    def forward(self, input_ids: Ints, position_ids: Ints, read_rows: Ints, attend: Attend) -> Tensor:
        """[R, hidden] final hidden states of the read rows. input_ids, position_ids: [T]; read_rows: [R]."""
        ids, positions, reads = (_tensor(a, self.device) for a in (input_ids, position_ids, read_rows))
        return _hidden(self.decoder, ids, positions, attend)[reads]

    @torch.inference_mode()
    def logits(self, hidden: Tensor, read_indptr: Ints, read_ids: Ints) -> Floats:
        """[len(read_ids)] fp32 logits: ids read_ids[read_indptr[r]:read_indptr[r + 1]] at hidden[r].

        Only the wanted rows of the head are multiplied, in fp32. hidden: [R, hidden].
        """
        wanted, column = np.unique(read_ids, return_inverse=True)
        rows = np.repeat(np.arange(len(read_indptr) - 1), np.diff(read_indptr))
        out = np.empty(len(read_ids), np.float32)
        for begin in range(0, len(hidden), HEAD_ROWS):
            here = (rows >= begin) & (rows < begin + HEAD_ROWS)
            block = self.head(hidden[begin : begin + HEAD_ROWS], _tensor(wanted, self.device))
            out[here] = block.cpu().numpy()[rows[here] - begin, column[here]]
        return out

    @torch.inference_mode()
    def log_sum_exp(self, hidden: Tensor, wanted: NDArray[np.bool_]) -> Floats:
        """[R] fp32 log-sum-exp over the vocabulary, NaN where not wanted. hidden: [R, hidden]; wanted: [R]."""
        out = np.full(len(wanted), np.nan, np.float32)
        places = np.flatnonzero(wanted)
        for begin in range(0, len(places), HEAD_ROWS):
            chosen = places[begin : begin + HEAD_ROWS]
            out[chosen] = self.lse(hidden[_tensor(chosen, self.device)]).cpu().numpy()
        return out

    @torch.inference_mode()
    def pair_logits(self, hidden: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """[n] fp32 logits of tokens[i] at hidden[rows[i]]; nothing waits."""
        raw = (hidden[rows].float() * self._weight[tokens].float()).sum(-1)
        return self._finish(raw if self._bias is None else raw + self._bias[tokens].float())

    @torch.inference_mode()
    def lse(self, hidden: Tensor) -> Tensor:
        """[n] fp32 log-sum-exp over the vocabulary; nothing waits."""
        total = torch.full((len(hidden),), -torch.inf, device=hidden.device)
        for token in range(0, self.vocabulary, HEAD_TOKENS):
            total = torch.logaddexp(total, self.head(hidden, slice(token, token + HEAD_TOKENS)).logsumexp(dim=-1))
        return total

    def head(self, hidden: Tensor, tokens: Tensor | slice) -> Tensor:
        """[n, tokens] fp32 logits as the model defines them."""
        raw = hidden.float() @ self._weight[tokens].float().T
        if self._bias is not None:
            raw = raw + self._bias[tokens].float()
        return self._finish(raw)

    @torch.inference_mode()
    def alone(self, ids: Ints, keep: int) -> Tensor:
        """[keep, vocabulary] logits of the last positions of one sequence, by transformers' own forward, attention and
        mask.

        For checks while nothing else runs: it switches the model's attention for the duration of the call.
        """
        softcapped = any(key.soft_cap for key in self.mask_keys)
        self.hf.set_attn_implementation("eager" if softcapped else "sdpa")
        try:
            out = self.hf(input_ids=_tensor(ids, self.device)[None], use_cache=False, **self._keep_logits(keep))
        finally:
            self.hf.set_attn_implementation(ATTENTION_NAME)
        return cast(Tensor, out.logits[0, -keep:])

    def _keep_logits(self, keep: int) -> dict[str, int]:
        """Spares the head the positions that no one reads, where the model can."""
        return {"logits_to_keep": keep} if "logits_to_keep" in signature(self.hf.forward).parameters else {}


def find(source: str, allow_download: bool) -> Path:
    """Where a checkpoint should lie. Raises ModelError where nothing is there and nothing may be fetched."""
    path = Path(source).expanduser()
    if not path.exists() and not allow_download:
        raise ModelError(f"model {source!r}: no such directory or file (--allow-download fetches from the hub)")
    return path


def load_model(source: str, dtype: str, device: str, allow_download: bool) -> ScoringModel:
    """Loads a safetensors directory, a .gguf file or, if allowed, a repository of the hub.

    dtype and device may be 'auto'. Raises ModelError.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    where = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device
    path = find(source, allow_download)
    place: dict[str, Any] = {"pretrained_model_name_or_path": source}
    if path.is_file():
        place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    elif path.is_dir():
        place = {"pretrained_model_name_or_path": str(path)}
    common: dict[str, Any] = {"local_files_only": not allow_download, "trust_remote_code": False}
    config: Any = None
    try:
        config = AutoConfig.from_pretrained(**place, **common)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **place,
            **common,
            dtype=_dtype(dtype, where, config),
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    except Exception as error:  # what a damaged checkpoint raises is not ours to list
        raise ModelError(f"model {source!r} does not load: {_reason(error, config)}") from error
    model, told = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    if missing := sorted(told["missing_keys"]):
        raise ModelError(f"model {source!r} lacks {len(missing)} tensors, such as {missing[0]}: scores would be random")
    if unused := sorted(told["unexpected_keys"]):  # some checkpoints bring more, such as heads that draft
        log.warning(
            "model %r: %d tensors have no place in it and are not used, such as %s", source, len(unused), unused[0]
        )
    try:
        model = _untyped(model, "to")(where)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"model {source!r} cannot go to {where}: {_reason(error)}") from None
    return ScoringModel(model, path.name if path.exists() else source)


def _reason(error: Exception, config: Any = None) -> str:
    """The first line of what a library says, with the kind of error where that alone says nothing.

    config: of the checkpoint, where it was read
    """
    if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
        name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
        return f"{name} has an attention of its own, outside transformers' AttentionInterface: no strategy can pack it"
    line = (str(error).strip().splitlines() or [""])[0][:300]
    return line if len(line.split()) > 2 else f"{type(error).__name__} {line}".strip()


def _dtype(name: str, device: str, config: Any) -> torch.dtype:
    """'auto' is the checkpoint's own type on a GPU; float32 on a CPU, where bf16 without hardware is 4-5 x slower."""
    if name != "auto":
        return cast(torch.dtype, getattr(torch, name))
    if device == "cpu":
        return torch.float32
    stored = config.get_text_config().dtype
    return stored if isinstance(stored, torch.dtype) and stored.itemsize == 2 else torch.bfloat16


def _hidden(decoder: Callable[..., Any], ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """[T, hidden] final hidden states."""
    out = decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, attend=attend)
    return cast(Tensor, out.last_hidden_state[0])


@torch.inference_mode()
def _probe(decoder: Callable[..., Any], architecture: str, model: PreTrainedModel) -> list[LayerShape]:
    """Runs a few tokens through an attention that mixes nothing, and looks who else did.

    With attention silenced, a row may depend on its own token only; what still depends on another one comes from a
    state-space, convolution or other layer of its own.
    """
    seen: dict[int, LayerShape] = {}

    def silent(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, key: MaskKey) -> Tensor:
        seen[layer] = LayerShape(q.shape[1], k.shape[1], q.shape[2], scale, key)
        return torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)

    device = next(model.parameters()).device
    positions = torch.arange(4, device=device)
    try:
        one = _hidden(decoder, torch.tensor([1, 2, 3, 4], device=device), positions, silent)
        two = _hidden(decoder, torch.tensor([5, 6, 7, 4], device=device), positions, silent)
    except Exception as error:
        raise ModelError(
            f"{architecture} cannot be run through transformers' AttentionInterface with a plan ({_reason(error)}), "
            "so no strategy here can pack it"
        ) from error
    layers = int(model.config.get_text_config().num_hidden_layers)
    if not layers:
        raise ModelError(f"{architecture} has no layers")
    if len(seen) != layers:
        missing = sorted(set(range(layers)) - set(seen))
        raise ModelError(
            f"{architecture}: layers {missing[:8]} of {layers} do not go through transformers' AttentionInterface, "
            "so no strategy here can pack them exactly"
        )
    if not torch.allclose(one[3].float(), two[3].float(), rtol=2e-2, atol=1e-3, equal_nan=True):
        raise ModelError(f"{architecture} mixes tokens outside its attention (state space, convolution): not packable")
    bidirectional = [name for name, m in model.named_modules() if getattr(m, "is_causal", True) is False]
    if bidirectional:
        raise ModelError(f"{architecture}: {bidirectional[0]} is not causal, and a prefix must not see its documents")
    return [seen[layer] for layer in sorted(seen)]


def _logit_transform(config: Any) -> Callable[[Tensor], Tensor]:
    """What some families do to their logits; the start's check against transformers' forward catches any other."""
    cap = getattr(config, "final_logit_softcapping", None)
    factor = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)

    def finish(raw: Tensor) -> Tensor:
        scaled = raw if factor == 1.0 else raw * factor
        return scaled if cap is None else cap * torch.tanh(scaled / cap)

    return finish


def _max_context(config: Any) -> tuple[int, str]:
    """Longest prefix + item, and why it is shorter than the model's own, if so.

    Frequencies that depend on the longest position of a pass would let one long document change all others: such
    models are served up to the length at which the frequencies are constant.
    """
    longest = int(getattr(config, "max_position_embeddings", 0) or 32_768)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    for kind in kinds:
        name = kind.get("rope_type", "default")
        if name in ("dynamic", "longrope"):
            original = kind.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = int(original or longest)
            return min(limit, longest), f"{name} rotary: exact up to {limit} tokens, so longer items are refused"
    return longest, ""


def _untyped(owner: Any, method: str) -> Callable[..., Any]:
    """A method that transformers leaves without annotations."""
    return cast(Callable[..., Any], getattr(owner, method))


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).astype(np.int64)).to(device)
