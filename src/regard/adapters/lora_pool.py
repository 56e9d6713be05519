"""A pool of LoRA adapters beside the layers of a model."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from regard.adapters.layouts import find_layouts
from regard.adapters.lora import LoraAdapters, MixedLayer, is_linear_layer, weight_shape
from regard.adapters.mixture import Mixture
from regard.adapters.off_loading import check_in_memory
from regard.adapters.pool import AdapterPool
from regard.attention.quantized import is_quantized_linear, multiplies_by_its_weight
from regard.errors import UserError, check_int
from regard.models.lora_targets import find_shared_layers, query_value_layers

ALL_LINEAR = "all-linear"
"""All linear layers, but for a language model's head."""


class LoraAdapterPool(AdapterPool):
    """LoRA adapters in a model, in place: each adapted layer becomes a `MixedLayer`, and one `mixture` weights all.

    The weights of the model are frozen. See `LoraAdapters` and `Mixture` for the other arguments.

    Args:
        target_modules: "auto" (queries and values), "all-linear" (but for a language model's head), or names of layers
            or their ends ("q_proj", "0.attention.self.query"), commas between.
        by_row: Whether each row will have its own weights.

    Raises:
        UserError: The model has no such layer, or one that cannot have weights by row.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        r: int = 8,
        lora_alpha: float = 32,
        target_modules: str | Sequence[str] = "auto",
        dropout: float = 0.0,
        detach_old: bool = False,
        top_k: int | None = None,
        by_row: bool = False,
        seed: int = 0,
    ) -> None:
        check_int("r", r, least=1)
        if top_k is not None:
            check_int("top_k", top_k, least=1)
        names = target_layers(model, target_modules, by_row=by_row)
        if by_row:
            _check_only_tokens(model, names)
        for name in names:
            max_rank = min(weight_shape(model.get_submodule(name)))
            if r > max_rank:
                raise UserError(f"r: expected at most {max_rank}, which {name} has, got {r}")
        super().__init__(model, Mixture(top_k=top_k))
        layouts = find_layouts(model, names)
        if by_row and target_modules in ("auto", ALL_LINEAR):
            names = [name for name in names if layouts.get(name) != "other"] or names
        self.rank, self.alpha, self.seed = r, lora_alpha, seed
        self.layers: dict[str, MixedLayer] = {}
        for name in names:
            layer_seed = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:5], "big")
            options: dict[str, Any] = {"rank": r, "alpha": lora_alpha, "dropout": dropout, "detach_old": detach_old}
            options["layout"] = layouts.get(name)
            layer = MixedLayer(model.get_submodule(name), self.mixture, **options, seed=layer_seed)
            layer.train(model.training)
            model.set_submodule(name, layer)
            self.layers[name] = layer
        self.adapters: tuple[LoraAdapters, ...] = tuple(layer.adapters for layer in self.layers.values())

    def check_in_memory(self) -> None:
        for layer in self.layers.values():
            if layer.execution_device.type != "meta":
                check_in_memory(layer.adapters)

    def set_trainable(self, *blocks: int) -> None:
        super().set_trainable(*blocks)
        self.mixture.trained = blocks

    def delete(self, block: int) -> None:
        super().delete(block)
        self.mixture.trained = object()

    def parameters_of(self, block: int) -> list[nn.Parameter]:
        return [parameter for adapters in self.adapters for parameter in (adapters.A[block], adapters.B[block])]

    @torch.no_grad()
    def copy(self, block: int, other: int) -> None:
        for target, source in zip(self.parameters_of(block), self.parameters_of(other), strict=True):
            target.copy_(source)

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Give the model its original layers for a while."""
        self.remove()
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                self.model.set_submodule(name, layer)

    def remove(self) -> None:
        self.mixture.trained = object()
        for name, layer in self.layers.items():
            self.model.set_submodule(name, layer.base_layer)


def tied_layers(model: nn.Module, layers: Mapping[str, MixedLayer]) -> list[str]:
    """Return the names of adapted layers whose weight other layers of the model have too."""
    return find_shared_layers(model, {name: layer.base_layer for name, layer in layers.items()})


def check_base_weight(name: str, layer: Any) -> None:
    """Raise a UserError if what is added to the weight of a layer is not added to what it multiplies by."""
    if is_quantized_linear(layer):
        stored: Any = getattr(layer, "weight", layer)
        kind = stored.dtype if type(stored) is nn.Parameter else type(stored).__name__
        expected = "expected weights of floating point to merge into"
        raise UserError(f"model: {expected}, got {kind} in {name}; load it without quantization")
    if layer.weight.is_meta:
        raise UserError(f"model: expected weights in memory to merge into, got off-loaded ones in {name}")
    if not multiplies_by_its_weight(layer):
        expected = "expected layers that multiply by their weights as they are, to merge into"
        raise UserError(f"model: {expected}; the {type(layer).__name__} {name} rounds or scales them")


def target_layers(model: nn.Module, targets: str | Sequence[str], *, by_row: bool = False) -> list[str]:
    """Return the full names of the targeted layers, in the order of the model.

    With `by_row` "auto" and "all-linear" leave out those that read other things than rows, such as DeBERTa's relative
    positions.
    """
    linear = [name for name, module in model.named_modules() if is_linear_layer(module)]
    types = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear))
    present = f"the model has {', '.join(types[:40]) or 'none'}"
    if targets in ("auto", ALL_LINEAR):
        layers = query_value_layers(model, linear) if targets == "auto" else _without_head(model, linear)
        if layers:
            shared = _reading_positions(model, layers) if by_row else []
            return [name for name in layers if name not in shared]
        if targets == ALL_LINEAR:
            raise UserError("target_modules: expected a model with linear layers, got none")
        raise UserError(f"target_modules: expected names, since no layer makes queries and values by name; {present}")
    requested = [name.strip() for name in targets.split(",")] if isinstance(targets, str) else list(targets)
    if not requested:
        raise UserError(f"target_modules: expected at least one name, got none; {present}")
    for target in requested:
        if not any(_matches(name, target) for name in linear):
            raise UserError(f"target_modules: expected names of linear layers, got {target!r}; {present}")
    return [name for name in linear if any(_matches(name, target) for target in requested)]


def _without_head(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the names of layers but for that which makes logits of a language model's words."""
    output_embeddings = getattr(model, "get_output_embeddings", lambda: None)()
    return [name for name in names if model.get_submodule(name) is not output_embeddings]


def _check_only_tokens(model: nn.Module, names: Sequence[str]) -> None:
    """Check that no layer reads relative positions, which are no rows to weight."""
    if shared := sorted({name.rsplit(".", 1)[-1] for name in _reading_positions(model, names)}):
        raise UserError(
            f"target_modules: expected none of {', '.join(shared)}, which this model uses for relative positions "
            "as well as for tokens (share_att_key); target_modules=value_proj is possible"
        )


def _reading_positions(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the layers that read DeBERTa's relative positions as well as tokens (`share_att_key`)."""
    if not getattr(getattr(model, "config", None), "share_att_key", False):
        return []
    return [name for name in names if name.rsplit(".", 1)[-1] in ("query_proj", "key_proj")]


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)
