"""A linear layer and the adapters beside it as one step of autograd, which passes fewer times over what it reads.

    out = x Wᵀ + b + (x [Aₜ; A_f]ᵀ ⊙ w) [Bₜ; B_f]ᵀ

One product has the trained and the frozen adapters where these are few, what they add goes into the layer's own output,
and what they hand back into its gradient (`benchmarks.adapter_step`).
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from regard.attention.tracing import has_tangent, has_transforms, is_traced

Gradients = tuple[Tensor | None, ...]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def can_fuse(layer: nn.Module, adapters: nn.Module, states: Tensor) -> bool:
    """Return whether nobody may see the parts of the step: no hook, mode, graph, transform, or layer of another kind.

    The layer has to be frozen, and states such that they can be saved.
    """
    if type(layer) is not nn.Linear or not torch.is_grad_enabled() or is_traced() or has_transforms():
        return False
    parts = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    is_frozen = all(type(part) is nn.Parameter and not part.requires_grad for part in parts)
    is_kept = bool(states.numel()) and not states.is_inference()
    is_plain = is_frozen and is_kept and are_alike(states, parts) and not is_autocast(states)
    return is_plain and not (_is_seen(layer, adapters) or has_tangent(states))


def are_alike(states: Tensor, parts: Iterable[Tensor | None]) -> bool:
    """Return whether states and what they are multiplied by are tensors of one type and place."""
    present = [states, *(part for part in parts if part is not None)]
    is_known = all(type(part) in (Tensor, nn.Parameter) for part in present)
    return is_known and len({(part.dtype, part.device) for part in present}) == 1


def is_autocast(states: Tensor) -> bool:
    """Return whether autocast is at work where states are."""
    device = states.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _as_forward(grad: Tensor) -> AbstractContextManager[Any]:
    """Return what a backward pass runs in: no autocast, which the forward had not."""
    return torch.autocast(grad.device.type, enabled=False) if is_autocast(grad) else nullcontext()


def _is_seen(layer: nn.Module, adapters: nn.Module) -> bool:
    """Return whether something follows calls of modules or functions."""
    own = any(getattr(module, name) for module in (layer, adapters) for name in _HOOKS)
    replaced = any("forward" in vars(module) for module in (layer, adapters))  # as accelerate off-loads
    everywhere = any(getattr(modules, f"_global{name}") for name in _HOOKS)
    has_mode = torch._C._is_torch_function_mode_enabled() or torch._C._len_torch_dispatch_stack() > 0
    return own or replaced or everywhere or has_mode


class FusedLayer(torch.autograd.Function):
    """The layer with adapters: x (token, inputs), W (outputs, inputs), b, A (hidden, inputs), Bᵀ (hidden, outputs), w.

    `frozen_down` and `frozen_up` may be None. The weights w (group, 1, hidden) of the trained ones, then the frozen
    ones, are for groups of consecutive rows; they and the frozen parts get no gradients. What it gives is no view, so
    that a model may change it in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        frozen_down: Tensor | None,
        frozen_up: Tensor | None,
        mix: Tensor,
    ) -> Tensor:
        out = nn.functional.linear(states, weight, bias)
        hidden = []
        for downs, ups, weights in _make_parts(len(states), down, up, frozen_down, frozen_up, mix):
            hidden.append(_weigh(nn.functional.linear(states, downs), weights))
            out.addmm_(hidden[-1], ups)
        trained = hidden[0][:, : len(down)] if ctx.needs_input_grad[4] else None
        ctx.save_for_backward(states, weight, down, up, frozen_down, frozen_up, mix, trained)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        with _as_forward(grads[0]):
            return FusedLayer._pass_back(ctx, grads[0])

    @staticmethod
    def _pass_back(ctx: Any, grad: Tensor) -> Gradients:
        states, weight, down, up, frozen_down, frozen_up, mix, trained = ctx.saved_tensors
        parts = _make_parts(len(states), down, up, frozen_down, frozen_up, mix)
        of_hidden = [_weigh(grad @ ups.T, weights) for _, ups, weights in parts]
        of_states = None
        if ctx.needs_input_grad[0]:
            of_states = grad @ weight
            for of_part, (downs, *_) in zip(of_hidden, parts, strict=True):
                of_states = of_states.addmm_(of_part, downs)
        if torch.is_grad_enabled() and trained is not None:  # gradients of these gradients are asked for
            trained = _weigh(nn.functional.linear(states, down), mix[..., : len(down)])
        of_down = of_hidden[0][:, : len(down)].T @ states if ctx.needs_input_grad[3] else None
        of_up = trained.T @ grad if trained is not None else None
        return of_states, None, None, of_down, of_up, None, None, None


def are_joined(frozen: int, tokens: int) -> bool:
    """Return whether one product has so many rows of frozen matrices too: to copy them takes less than to read twice.

    Those of frozen adapters are copied behind those of trained ones twice, forward and backward, 4 passes over them.
    Apart, there are 3 passes more over what the layer reads and gives.
    """
    return 4 * frozen <= 3 * tokens


def _make_parts(
    tokens: int, down: Tensor, up: Tensor, frozen_down: Tensor | None, frozen_up: Tensor | None, mix: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return A, Bᵀ and weights of each product; the trained adapters come first in the first."""
    if frozen_down is None or frozen_up is None:
        return [(down, up, mix)]
    if are_joined(len(frozen_down), tokens):
        return [(torch.cat([down, frozen_down]), torch.cat([up, frozen_up]), mix)]
    count = len(down)
    return [(down, up, mix[..., :count]), (frozen_down, frozen_up, mix[..., count:])]


def _weigh(hidden: Tensor, mix: Tensor) -> Tensor:
    """Return hidden features (token, hidden) with the weights of their groups."""
    width = hidden.shape[-1]  # reshaped, as gradients of several losses at once have no rule for flatten
    return (hidden.reshape(len(mix), -1, width) * mix.to(hidden.dtype)).reshape(-1, width)
