"""The hand-fused path of the Llama and Qwen family: the loaded model's own weights, fewer and wider operators.

q, k and v are one matrix, gate and up another; norms take the residual along. The modules' weights become views of the
fused ones, so nothing is held twice and the general path still runs. Of a model that is shared out over ranks these are
the local shards: each rank has some heads and some columns of the MLP, and what it adds to the residual is summed over
all of them, where transformers' own plan sums it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from attention.plans import MaskKey
from scorer.fused_ops import add_rms_norm, quantize, rms_norm, rotate, silu_mul, swiglu, swiglu_rows
from scorer.model import ScoringModel
from scorer.quantized import FP8, FP8_MAX, Quantized, Rows, in_fp8

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MLP_ROWS = 16_384  # rows that the wide middle of the MLP exists for at a time
PLAIN = (MaskKey(None, 0.0),)

PROJECTIONS = ("qkv", "out", "gate_up", "down")
# (layer, one of PROJECTIONS) -> whether it is computed in FP8
InFp8 = Callable[[int, str], bool]
# Sums a tensor over the ranks, in place: on each of them the result.
Summed = Callable[[Tensor], None]
# (layer, q [n, heads, head_dim], k and v [n, kv_heads, head_dim]) -> [n, heads, head_dim]
FusedAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Projection(Protocol):
    """Rows times a weight matrix: [n, in] -> [n, out]. quantized: whether it takes its rows in FP8."""

    quantized: bool

    def __call__(self, x: Any) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class FusedLayer:
    """One layer's weights. norms: of query and key heads, where the family has them."""

    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection
    before_attention: Tensor
    before_mlp: Tensor
    norms: tuple[Tensor, Tensor] | None


def refusal(model: ScoringModel) -> str:
    """Why a model has no hand-fused path; empty where it has one."""
    if model.architecture not in FAMILY:
        return f"{model.architecture} is not of the hand-fused family ({', '.join(FAMILY)})"
    if model.mask_keys != PLAIN:
        return f"{model.architecture} has sliding windows or soft caps"
    if model.head_shape is None:
        return "its layers differ in their heads"
    if model.context_note:
        return model.context_note
    head_dim = model.head_shape.head_dim
    config = model.hf.config
    if head_dim & (head_dim - 1) or head_dim < 16:
        return f"head_dim {head_dim} is no power of two"
    if config.hidden_act not in ("silu", "swish"):
        return f"its MLP uses {config.hidden_act}"
    layer = cast(Any, model.decoder).layers[0]
    if layer.mlp.gate_proj.bias is not None or layer.self_attn.o_proj.bias is not None:
        return "its MLP or output projection has a bias"
    return ""


class FusedModel:
    """Rows in, final hidden states out. Final.

    heads, kv_heads, head_dim, scale, layers  of the model; of several ranks, each has its heads
    over_ranks  whether it is one of several
    chunk_rows  that the wide middle of the MLP exists for at a time
    swiglu_rows  of a pass, from which on gate, up and their product are one kernel; None: never
    """

    def __init__(
        self, model: ScoringModel, positions: int, fp8: InFp8 | bool = False, summed: Summed | None = None
    ) -> None:
        """positions: the longest path that will be asked for. fp8: which projections are in FP8, True: the usual
        ones; weights by output channel, activations by row, as they come; embeddings, norms, attention and head stay
        as they are. summed: over the ranks, where the model is one's shard. The model must have no `refusal`."""
        assert not refusal(model), "a refused model has no fused path"
        assert model.head_shape is not None, "checked by refusal"
        self.heads, self.kv_heads, self.head_dim, self.scale, self.dtype = model.head_shape
        decoder = cast(Any, model.decoder)
        self._embed = cast(nn.Embedding, decoder.embed_tokens)
        self._norm = cast(Tensor, decoder.norm.weight)
        self._eps = float(model.hf.config.rms_norm_eps)
        self._table = _rotary_table(decoder.rotary_emb, positions, model.device)
        chosen = fp8 if callable(fp8) else in_fp8 if fp8 else lambda layer, name: False
        self._layers = tuple(_fuse(number, layer, chosen) for number, layer in enumerate(decoder.layers))
        self.layers = len(self._layers)
        self.device = model.device
        self.chunk_rows = MLP_ROWS
        self.swiglu_rows = _swiglu_rows(self._layers)
        self.over_ranks = summed is not None
        self._summed: Summed = summed or _whole

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, reads: Tensor | None, attend: FusedAttend) -> Tensor:
        """[len(reads), hidden], normed; reads None: of every row. ids, positions: [n] int32.

        The last layer computes queries, keys and values for all rows, and the rest for the rows that are read.
        """
        x = self._embed(ids)
        before, quantized = self._into(0)
        y = rms_norm(x, before, self._eps, quantized)
        for number, layer in enumerate(self._layers):
            last = number == self.layers - 1
            attended = self._attention(number, layer, y, positions, reads if last else None, attend)
            if last and reads is not None:
                x = x.index_select(0, reads)
            self._summed(attended)
            y = add_rms_norm(x, attended, layer.before_mlp, self._eps, layer.gate_up.quantized)
            del attended  # memory of the rows' width that the MLP may have
            after, quantized = (self._norm, False) if last else self._into(number + 1)
            added = self._mlp(layer, y)
            self._summed(added)
            y = add_rms_norm(x, added, after, self._eps, quantized)
            del added
        return cast(Tensor, y)

    def _into(self, number: int) -> tuple[Tensor, bool]:
        """The norm before a layer, and whether the layer takes its rows in FP8."""
        layer = self._layers[number]
        return layer.before_attention, layer.qkv.quantized

    def _mlp(self, layer: FusedLayer, y: Rows) -> Tensor:
        """In parts, so that its wide middle stays small."""
        first, *others = _parts(y, self.chunk_rows)
        fused = self.swiglu_rows is not None and _rows(y) >= self.swiglu_rows  # the same for all parts of a pass
        done = layer.down(_middle(layer, first, fused))
        if not others:
            return done
        out, begin = done.new_empty((_rows(y), done.shape[1])), len(done)
        out[:begin] = done
        del done
        for part in others:
            end = begin + _rows(part)
            out[begin:end] = layer.down(_middle(layer, part, fused))
            begin = end
        return out

    def _attention(
        self, number: int, layer: FusedLayer, y: Rows, positions: Tensor, reads: Tensor | None, attend: FusedAttend
    ) -> Tensor:
        """[len(reads), hidden] what attention adds to the rows that are read; reads None: to every row."""
        qkv = layer.qkv(y)
        rotate(qkv, self.heads, self.kv_heads, self._table, positions, layer.norms, self._eps)
        sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (part.view(len(qkv), -1, self.head_dim) for part in torch.split(qkv, sizes, dim=1))
        mixed = attend(number, q, k, v).flatten(1)
        del qkv, q, k, v
        if reads is not None:
            mixed = mixed.index_select(0, reads)
        return layer.out(quantize(mixed) if layer.out.quantized else mixed)


def _middle(layer: FusedLayer, y: Rows, fused: bool) -> Rows:
    """[n, ffn] silu of gate, times up. fused: by one kernel, where the layer's projections let it."""
    if fused and (weight := _plain_gate_up(layer)) is not None:
        return swiglu(cast(Tensor, y), weight)
    return silu_mul(layer.gate_up(y), layer.down.quantized)


def _plain_gate_up(layer: FusedLayer) -> Tensor | None:
    """[2 ffn, hidden] the weight that `swiglu` takes; None where the layer is in FP8 there."""
    return layer.gate_up.weight if isinstance(layer.gate_up, PlainLinear) and not layer.down.quantized else None


def _swiglu_rows(layers: tuple[FusedLayer, ...]) -> int | None:
    """See `FusedModel`. The layers' shapes are alike."""
    weights = [weight for layer in layers if (weight := _plain_gate_up(layer)) is not None]
    return swiglu_rows(weights[0]) if weights else None


def _rows(y: Rows) -> int:
    return len(y.values if isinstance(y, Quantized) else y)


def _parts(y: Rows, rows: int) -> list[Rows]:
    """At most so many rows each."""
    if isinstance(y, Quantized):
        halves = (torch.split(part, rows) for part in y)
        return [Quantized(*pair) for pair in zip(*halves, strict=True)]
    return list(torch.split(y, rows))


def _fuse(number: int, layer: Any, fp8: InFp8) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = hasattr(attention, "q_norm")

    def made(name: str, linear: nn.Linear) -> Projection:
        return Fp8Linear(linear) if fp8(number, name) else PlainLinear(linear)

    return FusedLayer(
        qkv=made("qkv", _joined([attention.q_proj, attention.k_proj, attention.v_proj])),
        out=made("out", attention.o_proj),
        gate_up=made("gate_up", _joined([mlp.gate_proj, mlp.up_proj])),
        down=made("down", mlp.down_proj),
        before_attention=layer.input_layernorm.weight,
        before_mlp=layer.post_attention_layernorm.weight,
        norms=(attention.q_norm.weight, attention.k_norm.weight) if has_norms else None,
    )


def _whole(tensor: Tensor) -> None:
    """One process has all of the model: nothing is to be added."""


class PlainLinear:
    """A weight matrix as the model has it. The module itself is not called: transformers has some sum over the ranks.

    weight  [out, in]
    """

    quantized = False

    def __init__(self, linear: nn.Linear) -> None:
        self.weight: Tensor = linear.weight
        self._bias = linear.bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self._bias)


class Fp8Linear:
    """A weight matrix in FP8, scaled by output channel. Takes Quantized rows.

    On a GPU it needs compute capability 8.9; elsewhere the same numbers are multiplied in fp32, to try its quality.
    """

    quantized = True

    def __init__(self, linear: nn.Linear) -> None:
        wide = linear.weight.detach().float()
        scales = wide.abs().amax(1, keepdim=True).clamp(min=1e-12) / FP8_MAX
        self._weight = (wide / scales).to(FP8)
        self._scales = scales.T.contiguous()
        self._bias = linear.bias
        self._dtype = linear.weight.dtype

    def __call__(self, x: Quantized) -> Tensor:
        if not x.values.is_cuda:
            out = (x.values.float() @ self._weight.float().T) * x.scales * self._scales
            return (out if self._bias is None else out + self._bias.float()).to(self._dtype)
        return torch._scaled_mm(
            x.values,
            self._weight.T,
            scale_a=x.scales,
            scale_b=self._scales,
            bias=self._bias,
            out_dtype=self._dtype,
            use_fast_accum=True,
        )


def _joined(parts: list[nn.Linear]) -> nn.Linear:
    """One product for several over the same input; the parts become views of it."""
    joined = nn.Linear(1, 1, bias=parts[0].bias is not None, device="meta")
    names = ("weight", "bias") if parts[0].bias is not None else ("weight",)
    for name in names:
        whole = torch.cat([getattr(part, name).data for part in parts])
        setattr(joined, name, nn.Parameter(whole, requires_grad=False))
        for part, view in zip(parts, torch.split(whole, [len(getattr(p, name)) for p in parts]), strict=True):
            getattr(part, name).data = view
    joined.out_features, joined.in_features = joined.weight.shape
    return joined


@torch.inference_mode()
def _rotary_table(rotary: nn.Module, positions: int, device: torch.device) -> Tensor:
    """[positions, head_dim] fp32: cosines, then sines, of the first half of the head's dimensions."""
    place = torch.arange(positions, device=device)[None]
    cos, sin = rotary(torch.zeros(1, device=device), place)
    half = cos.shape[-1] // 2
    assert torch.equal(cos[..., :half], cos[..., half:]), "both halves of a head turn alike"
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1).float().contiguous()
