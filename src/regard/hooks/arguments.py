"""The arguments of a forward, by name, and the tensors among what it reads or returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.tracing import is_traced
from regard.errors import UserError
from regard.hooks.caches import rename_cache

CHOICE_AXES = 3
"""Axes of the token ids of several choices, (batch, choice, token), which are rows of a model (GPT-2)."""


def bind_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward by name, those in **kwargs included; choices are rows."""
    if is_traced() or "forward" in vars(module):
        signature = inspect.signature(module.forward)
    else:
        signature, args = _signature(type(module).forward), (module, *args)
    bound = signature.bind_partial(*args, **rename_cache(kwargs, signature.parameters)).arguments
    for name, value in list(bound.items()):
        if isinstance(value, dict) and name in ("kwargs", "flash_attn_kwargs"):
            bound.update(value)
    return _join_choices(dict(bound))


@cache
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    """Return the arguments of the forward of a class, its instance first."""
    return inspect.signature(forward)


def _join_choices(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments in which ids of choices, and what is of their shape, have a row for each choice."""
    ids = arguments.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != CHOICE_AXES:
        return arguments
    of_ids = [name for name, value in arguments.items() if isinstance(value, Tensor) and value.shape == ids.shape]
    return arguments | {name: arguments[name].flatten(0, 1) for name in of_ids}


def check_inputs(name: str, values: Iterable[Any]) -> None:
    """Raise a UserError for arguments of which no number can be read: nested tensors, and those inside of vmap."""
    for value in values:
        if isinstance(value, Tensor) and value.is_nested:
            raise UserError(f"cannot observe {name}: it reads a nested tensor; expected padded rows, and their mask")
        if isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value):
            raise UserError(f"cannot observe {name} inside of torch.vmap; expected a forward of a batch in its place")


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of numbers among what a forward reads or returns."""
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else (value,)
    return (one for one in values if isinstance(one, Tensor) and one.is_floating_point())
