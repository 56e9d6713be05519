"""Weights that accelerate off-loads: where they are kept while no forward needs them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.hooks.split_weights import whole_tensor


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """Iterate over the hooks of accelerate that off-load a module's weights, or those below it as well."""
    hook: Any = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "offload", False):
            yield one


def stored_tensor(module: nn.Module, name: str) -> Tensor:
    """Return a tensor of a module, of an off-loaded one from where accelerate keeps it. Raises UserError without.

    Of weights that FSDP has sharded it is the whole, for which all processes must ask.
    """
    value: Tensor = getattr(module, name)
    if not value.is_meta:
        return whole_tensor(value)
    for hook in hooks_of(module):
        if hook.weights_map is not None:
            return hook.weights_map[name]
    raise UserError(
        f"model: expected weights in memory, or off-loaded by accelerate layer by layer, got {name} in meta"
    )


def execution_device(module: nn.Module, name: str = "weight") -> torch.device:
    """Return the device that a module computes on: of an off-loaded one that to which its weights come."""
    value: Tensor = getattr(module, name)
    for hook in hooks_of(module):
        if value.is_meta and hook.execution_device is not None:
            return torch.device(hook.execution_device)
    return value.device


def first_device(*modules: nn.Module) -> torch.device:
    """Return the device that the first parameter in modules is on, or comes to for a forward if it is off-loaded."""
    owners = (owner for module in modules for owner in module.modules())
    named = ((owner, name) for owner in owners for name, value in owner._parameters.items() if value is not None)
    owner, name = next(named, (None, ""))
    return torch.device("cpu") if owner is None else execution_device(owner, name)
