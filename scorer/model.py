"""A transformers checkpoint as the engine needs it: rows in, hidden states of the read rows out, and its head.

Attention goes through transformers' AttentionInterface under the name `prefixrank`; whoever calls the model hands the
pass's `attend` along as an argument. A model any of whose layers mixes tokens in another way is refused at load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from attention.plans import HeadShape, MaskKey
from attention.strategy import Attend
from batching.types import Floats, Ints
from scorer.chunks import Chunks
from scorer.errors import ModelError
from scorer.probe import LayerShape, probe, probed

log = logging.getLogger(__name__)

ATTENTION_NAME = "prefixrank"
CLASSIFIER = "ForSequenceClassification"  # ends the name of an architecture with such a head
HEAD_ROWS = 256  # hidden states that one block of the vocabulary product takes
# Arguments that change nothing here: what transformers passes along, and dropout, which is off.
HARMLESS = frozenset(
    {"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"}
)
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
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' signature: query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim].

    Returns [1, rows, heads, head_dim].
    """
    if attend is None:
        raise ModelError(f"{type(module).__name__} was called without a plan: score through the engine")
    if s_aux is not None:
        raise ModelError(f"{type(module).__name__} uses attention sinks, which no strategy here computes")
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} makes a mask of its own, which no strategy here computes")
    if unknown := sorted(name for name in others.keys() - HARMLESS if others[name] is not None):
        raise ModelError(f"{type(module).__name__} asks for attention by {unknown[0]}, which no strategy here computes")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask_key = MaskKey(sliding_window, softcap or 0.0)
    return attend(cast(int, module.layer_idx), q, k, v, scale, mask_key).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)
probed(_attention)


class ScoringModel:
    """A decoder-only model that the engine may call. Final.

    layers       one LayerShape an attention layer
    head_shape   what all layers have in common, None if they differ, or their values from their keys
    mask_keys    the distinct (window, soft cap) pairs: a pass needs one plan for each
    decoder      the model without its head
    chunks       of rows in which its position-wise layers run
    vocabulary   token ids that it takes, and has logits for where it has a language-model head
    classes      names of the classes of a sequence-classification head, by index; empty for a language-model head
    max_context  positions that the model was made for
    tell_alone   called before `alone` runs: other ranks that hold a shard must run the same
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        """Raises ModelError where a layer mixes tokens outside the AttentionInterface."""
        self.hf = model
        self.tell_alone: Callable[[Ints, int], None] = _tell_nobody
        model.requires_grad_(False)
        model.train(False)
        self.name = name
        self.architecture = type(model).__name__
        self.classes = _classes(model)
        self.decoder = model.base_model if self.classes else _untyped(model, "get_decoder")()
        head = _linear_head(model, self.classes)
        self._weight, self._bias = head.weight, head.bias
        self._finish = _as_it_is if self.classes else _logit_transform(model.config.get_text_config())
        self.max_context, self.context_note = _max_context(model.config.get_text_config())
        layers, attentions = probe(model, self.decoder, self.max_context)
        self.layers = tuple(layers)
        self.chunks = Chunks(attentions, self.decoder)
        self.head_shape = _common_shape(self.layers, self.dtype)
        self.mask_keys = tuple(dict.fromkeys(layer.mask_key for layer in self.layers))
        embedded = len(_untyped(model, "get_input_embeddings")().weight)
        self.vocabulary = embedded if self.classes else min(embedded, len(self._weight))

    @property
    def pad_token_id(self) -> int | None:
        """What transformers skips at the end of a sequence when it reads classes."""
        return cast("int | None", self.hf.config.get_text_config().pad_token_id)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends a sequence that the checkpoint generates."""
        generation = getattr(self.hf, "generation_config", None)  # a checkpoint with classes has none
        given: Any = getattr(generation, "eos_token_id", None)
        if given is None:
            given = getattr(self.hf.config.get_text_config(), "eos_token_id", None)
        return tuple(given) if isinstance(given, list | tuple) else () if given is None else (int(given),)

    @property
    def head_rows(self) -> int:
        """Tokens, or classes, of the head."""
        return len(self._weight)

    @property
    def width(self) -> int:
        """Of a hidden state."""
        return int(self._weight.shape[1])

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
        for token in range(0, len(self._weight), HEAD_TOKENS):
            total = torch.logaddexp(total, self.head(hidden, slice(token, token + HEAD_TOKENS)).logsumexp(dim=-1))
        return total

    def head(self, hidden: Tensor, tokens: Tensor | slice) -> Tensor:
        """[n, tokens] fp32 logits as the model defines them."""
        raw = hidden.float() @ self._weight[tokens].float().T
        if self._bias is not None:
            raw = raw + self._bias[tokens].float()
        return self._finish(raw)

    @torch.inference_mode()
    def every_logit(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[n, vocabulary] fp32, in `out` if given. On a GPU products of the weights' own type, summed in fp32: as
        exact, and many times as fast, which counts where the whole vocabulary is wanted for many rows."""
        if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
            raw = torch.mm(hidden, self._weight[: self.vocabulary].T, out_dtype=torch.float32, out=out)
            found = self._finish(raw if self._bias is None else raw + self._bias[: self.vocabulary].float())
        else:
            found = self.head(hidden, slice(self.vocabulary))
        return found if out is None or found is out else out.copy_(found)

    @torch.inference_mode()
    def alone(self, ids: Ints, keep: int) -> Tensor:
        """[keep, vocabulary] logits of the last positions of one sequence, by transformers' own forward, attention and
        mask; [1, classes] where there are classes, which transformers reads at the last position alone.

        For checks while nothing else runs: it switches the model's attention for the duration of the call.
        """
        self.tell_alone(ids, keep)
        softcapped = any(key.soft_cap for key in self.mask_keys)
        self.hf.set_attn_implementation("eager" if softcapped else "sdpa")
        try:
            out = self.hf(input_ids=_tensor(ids, self.device)[None], use_cache=False, **self._keep_logits(keep))
        finally:
            self.hf.set_attn_implementation(ATTENTION_NAME)
        return cast(Tensor, out.logits if self.classes else out.logits[0, -keep:])

    def _keep_logits(self, keep: int) -> dict[str, int]:
        """Spares the head the positions that no one reads, where the model can."""
        return {"logits_to_keep": keep} if "logits_to_keep" in signature(self.hf.forward).parameters else {}


def _classes(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of a sequence-classification head's classes, by index; empty where the head is another."""
    if not type(model).__name__.endswith(CLASSIFIER):
        return ()
    config: Any = model.config
    names = config.id2label or {}
    return tuple(str(names.get(index, f"LABEL_{index}")) for index in range(int(config.num_labels)))


def _linear_head(model: PreTrainedModel, classes: Sequence[str]) -> nn.Linear:
    """Raises ModelError where there is none at the end of a decoder."""
    head = getattr(model, "score", None) if classes else _untyped(model, "get_output_embeddings")()
    if not isinstance(head, nn.Linear):
        kind = "classification head on its last token" if classes else "language-model head"
        raise ModelError(f"{type(model).__name__} has no linear {kind}")
    return head


def _common_shape(layers: Sequence[LayerShape], dtype: torch.dtype) -> HeadShape | None:
    shapes = {(layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim, layer.scale) for layer in layers}
    heads, kv_heads, head_dim, value_dim, scale = shapes.pop()
    return None if shapes or value_dim != head_dim else HeadShape(heads, kv_heads, head_dim, scale, dtype)


def _tell_nobody(ids: Ints, keep: int) -> None:
    """One process holds all of the model."""


def _as_it_is(raw: Tensor) -> Tensor:
    return raw


def _hidden(decoder: Callable[..., Any], ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """[T, hidden] final hidden states."""
    out = decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, attend=attend)
    return cast(Tensor, out.last_hidden_state[0])


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
    changing = [kind for kind in kinds if kind.get("rope_type") in ("dynamic", "longrope")]
    if not changing:
        return longest, ""
    otherwise = getattr(config, "original_max_position_embeddings", None) or longest
    limits = [int(kind.get("original_max_position_embeddings") or otherwise) for kind in changing]
    limit = min(*limits, longest)
    told = changing[limits.index(min(limits))]["rope_type"]
    return limit, f"{told} rotary: exact up to {limit} tokens, so longer items are refused"


def _untyped(owner: Any, method: str) -> Callable[..., Any]:
    """A method that transformers leaves without annotations."""
    return cast(Callable[..., Any], getattr(owner, method))


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).astype(np.int64)).to(device)
