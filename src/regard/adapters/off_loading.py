"""Adapters on a base that accelerate off-loads: its weights come and go layer by layer, the adapters stay in memory."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.errors import UserError


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Iterate over the hooks of accelerate that off-load a module's weights, or those below it as well."""
    hook: Any = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "offload", False):
            yield one


def stored_tensor(module: nn.Module, name: str) -> Tensor:
    """Return a tensor of a module, of an off-loaded one from where accelerate keeps it. Raises UserError without."""
    value: Tensor = getattr(module, name)
    if not value.is_meta:
        return value
    for hook in _hooks(module):
        if hook.weights_map is not None:
            return hook.weights_map[name]
    raise UserError(
        f"model: expected weights in memory, or off-loaded by accelerate layer by layer, got {name} in meta"
    )


def execution_device(module: nn.Module, name: str = "weight") -> torch.device:
    """Return the device that a module computes on: of an off-loaded one that to which its weights come."""
    value: Tensor = getattr(module, name)
    for hook in _hooks(module):
        if value.is_meta and hook.execution_device is not None:
            return torch.device(hook.execution_device)
    return value.device


def check_off_loading(model: nn.Module) -> None:
    """Raise UserError if accelerate off-loads what it cannot find again.

    It looks the weights of whole blocks up by names without adapters, and those of a model with its adapters in the
    state of these, which holds no base.
    """
    for name, module in model.named_modules():
        hooks = list(_hooks(module))
        if hooks and not isinstance(model, PreTrainedModel):
            expected = (
                "adapters: expected that accelerate off-loads `adapters.model`, before or after adapters are added"
            )
            raise UserError(f"{expected}, got all of {type(model).__name__}, whose state holds no base: it is lost")
        if any(hook.place_submodules for hook in hooks):
            expected = "model: expected weights that accelerate off-loads layer by layer"
            raise UserError(
                f"{expected}, got {name or type(model).__name__} as a whole; leave preload_module_classes out"
            )


def check_in_memory(adapters: nn.Module) -> None:
    """Raise UserError if adapters are in meta, where values are lost."""
    if any(value.is_meta for value in adapters.parameters()):
        raise UserError("adapters: expected tensors in memory, got ones in meta, where their values are lost")


def bring_back(parts: Iterable[nn.Module]) -> None:
    """Take adapters that accelerate has off-loaded with their base back for good.

    Their parameters are new objects then, as they have been since accelerate moved them.
    """
    off_loaded = [module for part in parts for module in part.modules() if any(_hooks(module))]
    if off_loaded:
        from accelerate.hooks import remove_hook_from_module

        for module in off_loaded:
            device = next(_hooks(module)).execution_device
            remove_hook_from_module(module)
            _move(module, device)


def _move(module: nn.Module, device: Any) -> None:
    for values in (module._parameters, module._buffers):
        for value in values.values():
            if value is not None and device is not None:
                value.data = value.data.to(device)
