"""A linear layer and the adapters beside it as one step of autograd, which passes fewer times over what it reads.

    out = x Wᵀ + b + (x [Aₜ; A_f]ᵀ ⊙ w) [Bₜ; B_f]ᵀ

One product has the trained and the frozen adapters, what they add goes into the layer's own output, and what they hand
back into its gradient. Adapters in all layers of a model then take half of their time in a step of training
(`benchmarks.adapters`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from regard.attention.tracing import has_tangent, has_transforms, is_traced

Gradients = tuple[Tensor | None, ...]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def can_fuse(layer: nn.Module, adapters: nn.Module, states: Tensor) -> bool:
    """Return whether nobody may see the parts of the step: no hook, mode, graph, transform, or layer of another kind.

    The layer has to be frozen, and the states of its type.
    """
    if type(layer) is not nn.Linear or not torch.is_grad_enabled() or is_traced() or has_transforms():
        return False
    parts = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    is_plain = type(states) is Tensor and bool(states.numel()) and all(type(part) is nn.Parameter for part in parts)
    is_frozen = not any(part.requires_grad for part in parts)
    is_alike = states.dtype == layer.weight.dtype == adapters.like.dtype and not _is_autocast(states)
    return is_plain and is_frozen and is_alike and not (_is_seen(layer, adapters) or has_tangent(states))


def _is_autocast(states: Tensor) -> bool:
    device = states.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _is_seen(layer: nn.Module, adapters: nn.Module) -> bool:
    """Return whether something follows calls of modules or functions."""
    own = any(getattr(module, name) for module in (layer, adapters) for name in _HOOKS)
    replaced = any("forward" in vars(module) for module in (layer, adapters))  # as accelerate off-loads
    everywhere = any(getattr(modules, f"_global{name}") for name in _HOOKS)
    return own or replaced or everywhere or torch._C._is_torch_function_mode_enabled()


class FusedLayer(torch.autograd.Function):
    """The layer with adapters: x (…, inputs), W (outputs, inputs), b, A (hidden, inputs), Bᵀ (hidden, outputs), w.

    `frozen_down` and `frozen_up` may be None. The weights w (group, 1, hidden) of the trained ones, then the frozen
    ones, are for groups of consecutive rows; they and the frozen parts get no gradients.
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
        rows = states.flatten(0, -2)
        hidden = _hidden(rows, _stack(down, frozen_down), mix)
        out = nn.functional.linear(rows, weight, bias).addmm_(hidden, _stack(up, frozen_up))
        trained = hidden[:, : len(down)] if ctx.needs_input_grad[4] else None
        ctx.save_for_backward(states, weight, down, up, frozen_down, frozen_up, mix, trained)
        return out.view(*states.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        states, weight, down, up, frozen_down, frozen_up, mix, trained = ctx.saved_tensors
        grad, rows, count = grads[0].flatten(0, -2), states.flatten(0, -2), len(down)
        whole = _stack(down, frozen_down)
        if torch.is_grad_enabled() and trained is not None:  # gradients of these gradients are asked for
            trained = _hidden(rows, whole, mix)[:, :count]
        of_hidden = _weigh(grad @ _stack(up, frozen_up).T, mix)
        of_states = torch.addmm(grad @ weight, of_hidden, whole).view(states.shape) if ctx.needs_input_grad[0] else None
        of_down = of_hidden[:, :count].T @ rows if ctx.needs_input_grad[3] else None
        of_up = trained.T @ grad if trained is not None else None
        return of_states, None, None, of_down, of_up, None, None, None


def _stack(trained: Tensor, frozen: Tensor | None) -> Tensor:
    return trained if frozen is None else torch.cat([trained, frozen])


def _hidden(rows: Tensor, down: Tensor, mix: Tensor) -> Tensor:
    """Return the weighed hidden features of all tokens, (token, hidden)."""
    return _weigh(nn.functional.linear(rows, down), mix)


def _weigh(hidden: Tensor, mix: Tensor) -> Tensor:
    return (hidden.unflatten(0, (len(mix), -1)) * mix.to(hidden.dtype)).flatten(0, 1)
