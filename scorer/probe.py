"""What a model's layers are, found by running a few tokens through an attention that mixes nothing.

Whoever computes a model's attention outside transformers must mask as transformers would. So the masks that
transformers makes for the model are looked at too, up to the longest context, and a model whose masks are others than
the strategies compute is refused at start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from attention.plans import MaskKey
from scorer.errors import ModelError, first_line

PROBE_NAME = "prefixrank_probe"
LONGEST_MASK = 1 << 20  # positions: longer contexts are looked at up to here

Attention = Callable[..., tuple[Tensor, None]]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer told of itself when it was probed."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    mask_key: MaskKey


@dataclass(frozen=True, slots=True)
class _Mask:
    """What a layer gets for its mask while its model is probed: the rule by which transformers would have made one."""

    visible: Callable[..., Any]


def _keep_rule(*_: Any, mask_function: Callable[..., Any], **__: Any) -> _Mask:
    return _Mask(mask_function)


AttentionMaskInterface.register(PROBE_NAME, _keep_rule)


@dataclass(slots=True)
class _Seen:
    """What the layers showed: their shapes, the rules of their masks, and which modules asked for attention."""

    shapes: dict[int, LayerShape]
    masks: dict[int, object]
    modules: dict[int, nn.Module]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, key: MaskKey) -> Tensor:
        self.shapes[layer] = LayerShape(q.shape[1], k.shape[1], q.shape[2], v.shape[2], scale, key)
        return torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)


def probed(attention: Attention) -> None:
    """Registers the attention function whose layers are to be probed."""

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, **kwargs: Any) -> tuple[Tensor, None]:
        if (seen := kwargs.pop("seen", None)) is not None:
            seen.masks[cast(int, module.layer_idx)] = mask
            seen.modules[cast(int, module.layer_idx)] = module
            kwargs["attend"] = seen.attend
        return attention(module, q, k, v, None, **kwargs)

    AttentionInterface.register(PROBE_NAME, attend)


@torch.inference_mode()
def probe(
    model: PreTrainedModel, decoder: Callable[..., Any], longest: int
) -> tuple[list[LayerShape], list[nn.Module]]:
    """The attention layers in order, and their modules. longest: positions up to which their masks must hold.

    With attention silenced a row may depend on its own token only; what still depends on another one comes from a
    state-space, convolution or other layer of its own. Raises ModelError naming the architecture.
    """
    name = type(model).__name__
    seen = _Seen({}, {}, {})
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(PROBE_NAME)
        one, two = (_last(decoder, ids, model, seen) for ids in ([1, 2, 3, 4], [5, 6, 7, 4]))
    except Exception as error:
        raise ModelError(
            f"{name} cannot be run through transformers' AttentionInterface with a plan ({first_line(error)}), "
            "so no strategy here can pack it"
        ) from error
    finally:
        model.set_attn_implementation(before)
    _check_layers(name, seen, int(model.config.get_text_config().num_hidden_layers))
    if not torch.allclose(one, two, rtol=2e-2, atol=1e-3, equal_nan=True):
        raise ModelError(f"{name} mixes tokens outside its attention (state space, convolution): not packable")
    bidirectional = [n for n, m in cast(nn.Module, decoder).named_modules() if getattr(m, "is_causal", True) is False]
    if bidirectional:
        raise ModelError(f"{name}: {bidirectional[0]} is not causal, and a prefix must not see its documents")
    _check_masks(name, seen, min(longest, LONGEST_MASK))
    order = sorted(seen.shapes)
    return [seen.shapes[layer] for layer in order], [seen.modules[layer] for layer in order]


def _last(decoder: Callable[..., Any], ids: list[int], model: PreTrainedModel, seen: _Seen) -> Tensor:
    """[hidden] what the last of these tokens becomes."""
    device = next(model.parameters()).device
    row, positions = torch.tensor([ids], device=device), torch.arange(len(ids), device=device)[None]
    out = decoder(input_ids=row, position_ids=positions, use_cache=False, seen=seen)
    return cast(Tensor, out.last_hidden_state[0, -1].float())


def _check_layers(name: str, seen: _Seen, layers: int) -> None:
    if not layers:
        raise ModelError(f"{name} has no layers")
    if missing := sorted(set(range(layers)) - set(seen.shapes)):
        raise ModelError(
            f"{name}: layers {missing[:8]} of {layers} do not go through transformers' AttentionInterface, "
            "so no strategy here can pack them exactly"
        )
    if beyond := sorted(set(seen.shapes) - set(range(layers))):
        raise ModelError(f"{name}: layers {beyond[:8]} beyond the {layers} that its configuration tells of")


def _check_masks(name: str, seen: _Seen, longest: int) -> None:
    """That transformers masks each layer causally within the window that the layer told, and no other way."""
    checked: set[tuple[int, int | None]] = set()
    for layer, mask in sorted(seen.masks.items()):
        window = seen.shapes[layer].mask_key.window
        if not isinstance(mask, _Mask):
            raise ModelError(f"{name}: layer {layer} makes a mask of its own, which no strategy here computes")
        if (rule := (id(mask.visible), window)) in checked:
            continue
        checked.add(rule)
        for position in _telling(window, longest):
            if not torch.equal(_row(mask, position), _causal(position, window)):
                told = "causally" if window is None else f"within a window of {window}"
                raise ModelError(
                    f"{name}: the mask of layer {layer} at position {position} is not what its attention is told, "
                    f"{told}; no strategy here computes it"
                )


def _telling(window: int | None, longest: int) -> list[int]:
    """Positions at which a wrong window, a chunk or a gap would show."""
    edges = [] if window is None else [window - 1, window, window + 1]
    return sorted({p for p in (0, 1, longest // 2, longest - 2, longest - 1, *edges) if 0 <= p < longest})


def _row(mask: _Mask, position: int) -> Tensor:
    """[position + 1] what this position sees of those up to it."""
    row = sdpa_mask(1, 1, position + 1, position, 0, mask_function=mask.visible, allow_is_causal_skip=False)
    assert row is not None, "a mask that may not be skipped is made"
    return cast(Tensor, row[0, 0, 0])


def _causal(position: int, window: int | None) -> Tensor:
    far = position + 1 if window is None else window
    return torch.lt(torch.arange(position, -1, -1), far)
