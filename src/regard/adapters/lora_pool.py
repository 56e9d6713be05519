"""Blocks beside the layers of a model: which layers, and what is done to all of them together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.lora import LoraAdapters, MixedLayer, Mixture, is_linear_layer, weight_shape
from regard.errors import UserError, check_int

AUTO = (
    ("q", "v"),
    ("q_proj", "v_proj"),
    ("query", "value"),
    ("query_proj", "value_proj"),
    ("q_lin", "v_lin"),
    ("c_attn",),
    ("query_key_value",),
)
"""The names of the layers that make queries and values, one family of models after the other; the last two make both
and the keys as well. SAPT adapts these (arXiv 2401.08295, appendix)."""


class LoraAdapterPool:
    """LoRA blocks in a model, in place: each adapted layer becomes a `MixedLayer`, all under one `mixture`.

    `target_modules`: "auto", or names of layers or their ends ("q_proj", "layer.0.attention.self.query"). The model's
    own weights are frozen. `by_row`: rows will be weighed each by itself. Raises UserError for names that the model
    does not have, with those it has, and for layers that cannot be weighed so.
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
        _check(r, top_k)
        names = target_layers(model, target_modules)
        if by_row:
            _check_rows(model, names)
        _check_fits(model, names, r)
        model.requires_grad_(False)
        self.model, self.rank, self.alpha, self.seed = model, r, lora_alpha, seed
        self.mixture = Mixture(top_k=top_k)
        self.layers: dict[str, MixedLayer] = {}
        for name in names:
            options = {"rank": r, "alpha": lora_alpha, "dropout": dropout, "detach_old": detach_old}
            layer = MixedLayer(model.get_submodule(name), self.mixture, **options, seed=_seed(seed, name))
            layer.train(model.training)
            _put(model, name, layer)
            self.layers[name] = layer

    def __len__(self) -> int:
        """How many blocks there are, in use or reserved."""
        return len(next(iter(self.blocks)))

    @property
    def blocks(self) -> tuple[LoraAdapters, ...]:
        """The blocks of each layer."""
        return tuple(layer.blocks for layer in self.layers.values())

    def reserve(self, blocks: int) -> None:
        """Have so many blocks."""
        for one in self.blocks:
            one.reserve(blocks)

    def open(self, *blocks: int) -> None:
        """Let these blocks be trained, and no others."""
        unknown = [number for number in blocks if number not in range(len(self))]
        if unknown:
            raise UserError(f"block: expected a number from 0 to {len(self) - 1}, got {unknown[0]}")
        for one in self.blocks:
            one.open(*blocks)

    def drop(self, block: int) -> None:
        """Take a block out of every layer; those after it move up."""
        for one in self.blocks:
            one.drop(block)

    def parameters_of(self, block: int) -> list[nn.Parameter]:
        """A and B of a block, layer by layer."""
        return [part for one in self.blocks for part in (one.A[block], one.B[block])]

    @torch.no_grad()
    def copy(self, block: int, other: int) -> None:
        """Let a block be what another is."""
        for new, old in zip(self.parameters_of(block), self.parameters_of(other), strict=True):
            new.copy_(old)

    @contextmanager
    def weighing(self, weights: Tensor | None) -> Iterator[None]:
        """While it lasts the layers mix with these weights, (row, block) or (block,); None: not at all."""
        before = self.mixture.weights
        self.mixture.weights = weights
        try:
            yield
        finally:
            self.mixture.weights = before

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While it lasts the model has its own layers."""
        self.remove()
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                _put(self.model, name, layer)

    def remove(self) -> None:
        """Give the model its own layers back."""
        for name, layer in self.layers.items():
            _put(self.model, name, layer.base_layer)


def target_layers(model: nn.Module, targets: str | Sequence[str]) -> list[str]:
    """The full names of the layers that are meant, in the model's order. Raises UserError."""
    linear = [name for name, module in model.named_modules() if is_linear_layer(module)]
    if targets == "auto":
        for names in AUTO:
            found = [name for name in linear if name.rsplit(".", 1)[-1] in names]
            if {name.rsplit(".", 1)[-1] for name in found} == set(names):
                return found
        raise UserError(
            f"target_modules: expected names, since no layer makes queries and values by name; {_has(linear)}"
        )
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if not wanted:
        raise UserError(f"target_modules: expected at least one name, got none; {_has(linear)}")
    for one in wanted:
        if not any(_is(name, one) for name in linear):
            raise UserError(f"target_modules: expected names of linear layers, got {one!r}; {_has(linear)}")
    return [name for name in linear if any(_is(name, one) for one in wanted)]


def _check_rows(model: nn.Module, names: Sequence[str]) -> None:
    """Nothing, or a UserError: a layer reads more than rows of tokens, and so cannot weigh blocks row by row.

    DeBERTa with `share_att_key` sends its table of relative positions through what makes queries and keys.
    """
    if getattr(getattr(model, "config", None), "share_att_key", False):
        both = sorted({name.rsplit(".", 1)[-1] for name in names} & {"query_proj", "key_proj"})
        if both:
            raise UserError(
                f"target_modules: expected none of {', '.join(both)}, which this model uses for relative "
                "positions as well as for tokens (share_att_key); target_modules=value_proj is possible"
            )


def _is(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith("." + wanted)


def _has(names: Sequence[str]) -> str:
    """What the model has, for a refusal."""
    ends = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))
    return f"the model has {', '.join(ends[:40]) or 'none'}"


def _check(rank: Any, top_k: Any) -> None:
    check_int("r", rank, least=1)
    if top_k is not None:
        check_int("top_k", top_k, least=1)


def _check_fits(model: nn.Module, names: Sequence[str], rank: int) -> None:
    for name in names:
        most = min(weight_shape(model.get_submodule(name)))
        if rank > most:
            raise UserError(f"r: expected at most {most}, which {name} has, got {rank}")


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one of that name."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _seed(seed: int, name: str) -> int:
    """A seed for a layer."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:5], "big")
