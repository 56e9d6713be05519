"""LoRA adapters of a layer: one product with all A, the weights of a mixture on the hidden, one product with all B."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.fused_layer import FusedLayer, are_alike, are_joined, can_fuse, is_autocast
from regard.adapters.layouts import Layout
from regard.adapters.mixture import AdapterWeights, Mixture
from regard.adapters.off_loading import check_in_memory
from regard.attention.quantized import first_name, is_quantized_linear
from regard.attention.tracing import is_traced
from regard.errors import UserError
from regard.hooks.by_thread import is_in_backward
from regard.hooks.off_loaded import execution_device


class LoraAdapters(nn.Module):
    """LoRA adapters of one layer: y = Σ_i a_i (α/r) B_i A_i x (SAPT, arXiv 2401.08295, equation 7).

    `A[i]` (rank, inputs) is initialized as the weight of a linear layer, `B[i]` (outputs, rank) with zeros. Frozen
    adapters are contiguous in memory, so that mixing them takes two products whatever their number.

    Args:
        detach_old: Stop gradients through frozen adapters to the inputs of the layer, as in SAPT's code.
        like: Tensor whose device new parameters get.
    """

    like: Tensor

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        detach_old: bool = False,
        like: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.rank, self.seed = inputs, outputs, rank, seed
        self.scale, self.detach_old = alpha / rank, detach_old
        self.dropout = nn.Dropout(dropout)
        self.A, self.B = nn.ParameterList(), nn.ParameterList()
        self.trained: tuple[int, ...] = ()
        self.register_buffer("like", torch.empty(0, device=None if like is None else like.device), persistent=False)
        self._stack: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.A)

    def reserve(self, blocks: int) -> None:
        """Add adapters until there are `blocks`, initialized with the seed and their index."""
        for block in range(len(self), blocks):
            generator = torch.Generator().manual_seed(self.seed + 104729 * (block + 1))
            values = (2 * torch.rand(self.rank, self.inputs, generator=generator) - 1) / math.sqrt(self.inputs)
            self.A.append(nn.Parameter(values.to(self.like), requires_grad=False))
            self.B.append(nn.Parameter(self.like.new_zeros(self.outputs, self.rank), requires_grad=False))
            self._stack = None

    def set_trainable(self, *blocks: int) -> None:
        self.trained = tuple(sorted(blocks))
        for index in range(len(self)):
            for parameter in (self.A[index], self.B[index]):
                parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)
                parameter.requires_grad_(index in self.trained)
        self._stack = None

    def reopen(self) -> None:
        """Train what requires gradients of the adapters (of InfLoRA B alone), after a caller has set that."""
        open_parts = [(down.requires_grad, up.requires_grad) for down, up in zip(self.A, self.B, strict=True)]
        self.set_trainable(*(index for index, parts in enumerate(open_parts) if any(parts)))
        for down, up, parts in zip(self.A, self.B, open_parts, strict=True):
            down.requires_grad_(parts[0])
            up.requires_grad_(parts[1])

    def delete(self, block: int) -> None:
        """Remove an adapter; later ones move up."""
        self.A = nn.ParameterList(parameter for index, parameter in enumerate(self.A) if index != block)
        self.B = nn.ParameterList(parameter for index, parameter in enumerate(self.B) if index != block)
        self.set_trainable(*(index - (index > block) for index in self.trained if index != block))

    def delta(self, block: int) -> Tensor:
        """Return what an adapter with weight 1 adds to the weight of the layer, (outputs, inputs)."""
        return self.scale * self.B[block].detach() @ self.A[block].detach()

    def forward(self, states: Tensor, out: Tensor, mixture: Mixture) -> Tensor:
        """Return `out`, (row, token, outputs) or (row, outputs), with the mix of the adapters added."""
        weights = mixture.weights
        if weights is None:
            if not (mixture.in_call or is_traced()) and is_in_backward():
                expected = 'that of Transformers, model.gradient_checkpointing_enable({"use_reentrant": False})'
                raise UserError(
                    f"gradient checkpointing: expected {expected}; got a layer that is computed again without weights"
                )
            return out
        if weights.shape[-1] > len(self):
            raise UserError(f"weights: expected one for each of at most {len(self)} adapters, got {weights.shape[-1]}")
        if len(self) and self.A[0].is_meta and not states.is_meta:  # would give any numbers
            check_in_memory(self)
        mix = self._weigh(states, mixture)
        groups = 1 if weights.dim() == 1 else len(weights)
        inputs = (self.dropout(states) if self.training else states).reshape(groups, -1, self.inputs)
        result = out.reshape(groups, -1, self.outputs)
        if (whole := self._join(mix, states.numel() // self.inputs)) is not None:
            return _add(inputs, result, *whole).reshape(out.shape)
        if mix.trained_weights is not None:
            result = _add(inputs, result, *self._stack_trained(mix.trained), mix.trained_weights)
        if mix.frozen_weights is not None:
            inputs = inputs.detach() if self.detach_old else inputs
            if mix.gathered is None:
                result = _add(inputs, result, *self._stack_frozen(mix.frozen), mix.frozen_weights)
            else:
                down, up = self.stacked()
                down, up = (part.unflatten(0, (-1, self.rank))[mix.gathered].flatten(1, 2) for part in (down, up))
                result = _add(inputs, result, down, up, mix.frozen_weights)
        return result.reshape(out.shape)

    def fuse(self, layer: nn.Module, states: Tensor, mixture: Mixture) -> Tensor | None:
        """Return the output of a layer with the mix of the adapters, if one step of autograd may make both."""
        weights = mixture.weights
        is_fixed = weights is not None and not weights.requires_grad and weights.shape[-1] <= len(self)
        if not is_fixed or (self.training and self.dropout.p) or not can_fuse(layer, self, states):
            return None
        mix = self._weigh(states, mixture)
        if mix.trained_weights is None or mix.gathered is not None or (self.detach_old and mix.frozen):
            return None
        frozen: tuple[Tensor | None, Tensor | None] = (None, None)
        mixed = mix.trained_weights
        if mix.frozen_weights is not None:
            frozen = self._stack_frozen(mix.frozen)
            mixed = torch.cat([mixed, mix.frozen_weights], -1)
        parts = (*self._stack_trained(mix.trained), *frozen)
        if not are_alike(states, parts):
            return None
        rows = states.reshape(-1, states.shape[-1])
        out: Tensor = FusedLayer.apply(rows, layer.weight, layer.bias, *parts, mixed)
        return out.view(*states.shape[:-1], -1)

    def _weigh(self, states: Tensor, mixture: Mixture) -> AdapterWeights:
        """Return the weights of the adapters for these states."""
        sizes = len(states), states.numel() // self.inputs, self.rank, self.scale, self.trained
        return mixture.layer_weights(*sizes, training=self.training, device=states.device)

    def _join(self, mix: AdapterWeights, tokens: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return A, Bᵀ and weights of trained, then frozen adapters, where one product has all, as in `FusedLayer`."""
        if mix.trained_weights is None or mix.frozen_weights is None or mix.gathered is not None:
            return None
        if torch.is_grad_enabled() or not are_joined(mix.frozen * self.rank, tokens):
            return None
        parts = zip(self._stack_trained(mix.trained), self._stack_frozen(mix.frozen), strict=True)
        down, up = (torch.cat(part) for part in parts)
        return down, up, torch.cat([mix.trained_weights, mix.frozen_weights], -1)

    def _stack_frozen(self, count: int) -> tuple[Tensor, Tensor]:
        down, up = self.stacked()
        return down[: count * self.rank], up[: count * self.rank]

    def _stack_trained(self, trained: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if len(trained) == 1:
            return self.A[trained[0]], self.B[trained[0]].T
        return torch.cat([self.A[index] for index in trained]), torch.cat([self.B[index].T for index in trained])

    def stacked(self) -> tuple[Tensor, Tensor]:
        """Return A (adapter · rank, inputs) and Bᵀ of the frozen adapters, in order; parameters become their views."""
        if self._stack is None:
            frozen = [index for index in range(len(self)) if index not in self.trained]
            with torch.inference_mode(False):  # parameters made in inference mode can never be trained
                down = torch.cat([self.A[index].detach() for index in frozen])
                up = torch.cat([self.B[index].detach().T for index in frozen])
                for position, index in enumerate(frozen):
                    rows = slice(position * self.rank, (position + 1) * self.rank)
                    self.A[index].data, self.B[index].data = down[rows], up[rows].T
            self._stack = down, up
        return self._stack

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._stack = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._stack = None
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stack": None}


class MixedLayer(nn.Module):
    """A linear layer with LoRA adapters that `mixture` mixes.

    It is an `nn.Linear`, GPT-2's `Conv1D`, or a quantized layer of a class of its own.

    `layout` says where it reads rows, None that nothing does: with "tokens" states are (token, row, inputs), which have
    their rows' weights all the same. Where rows are not known to be, states (row, token, inputs) of all of them pass.
    """

    def __init__(self, layer: Any, mixture: Mixture, *, layout: Layout | None = "rows", **options: Any) -> None:
        super().__init__()
        self.layout = layout
        inputs, outputs = weight_shape(layer)
        self.base_layer = layer
        like = torch.empty(0, device=self.execution_device)
        self.adapters = LoraAdapters(inputs, outputs, like=like, **options)
        self.mixture = mixture

    @property
    def execution_device(self) -> torch.device:
        return execution_device(self.base_layer, first_name(self.base_layer))

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, states: Tensor) -> Tensor:
        if self.layout == "rows" and (fused := self.adapters.fuse(self.base_layer, states, self.mixture)) is not None:
            return fused
        out = self.base_layer(states)
        if not isinstance(out, Tensor):
            kind = type(self.base_layer).__name__
            raise UserError(f"target_modules: expected layers that return one tensor, got a {kind}, which does not")
        if self.layout in ("other", None):
            self._check_rows(states)
        return self.by_row(self.adapters(self.by_row(states), self.by_row(out), self.mixture))

    def by_row(self, states: Tensor) -> Tensor:
        """Return states with rows first, or those with rows first as the layer has them."""
        return states.transpose(0, 1) if self.layout == "tokens" else states

    def _check_rows(self, states: Tensor) -> None:
        """Raise UserError if rows have weights of their own and these are no states of them, as far as that is seen."""
        weights = self.mixture.weights
        own = 1 if weights is None or weights.dim() == 1 else len(weights)
        rows = self.mixture.rows or own
        is_exact = states.dim() > 2 and len(states) == rows
        is_swapped = states.dim() > 2 and states.shape[1] == rows
        if own > 1 and self.layout == "other" and is_exact and not (is_each := self.mixture.has_one_each()):
            got = "but not one each" if is_each is False else "without input_ids, which say of which row they are"
            raise UserError(
                f"target_modules: expected an image, or sound, for each of {rows} rows, as each row has weights of its "
                f"own; got as many of them, {got} ({self.base_layer})"
            )
        if own > 1 and not is_exact and (is_swapped or self.layout == "other" or states.dim() == 1):
            raise UserError(
                f"target_modules: expected layers that read {rows} rows one after the other, as each row has weights "
                f"of its own; got one that reads {tuple(states.shape)} ({self.base_layer})"
            )


def is_linear_layer(module: nn.Module) -> bool:
    """Return whether a module can have LoRA adapters."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" or is_quantized_linear(module)


def weight_shape(layer: Any) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer."""
    if isinstance(layer, nn.Linear) or is_quantized_linear(layer):
        return layer.in_features, layer.out_features  # quantized weights have other shapes
    rows, columns = layer.weight.shape
    return rows, columns


def _cast(states: Tensor, like: Tensor) -> Tensor:
    """Cast states to the dtype of the adapters; leave them alone under autocast."""
    return states if is_autocast(states) else states.to(like.dtype)


def _add(inputs: Tensor, out: Tensor, down: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    """Add adapters to `out` (group, token, outputs): A (hidden, inputs), Bᵀ (hidden, outputs), also by group."""
    by_group, states = down.dim() == 3, _cast(inputs, down)
    hidden = states @ down.transpose(1, 2) if by_group else nn.functional.linear(states, down)
    mixed = hidden * weights.to(hidden.dtype)
    if not out.dtype == mixed.dtype == up.dtype:
        return out + (mixed @ _cast(up, mixed)).to(out.dtype)
    if by_group:
        return torch.baddbmm(out, mixed, up)
    return torch.addmm(out.flatten(0, 1), mixed.flatten(0, 1), up).view(out.shape)
