"""Adapters on a base that accelerate off-loads: its weights come and go layer by layer, the adapters stay in memory."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from regard.errors import UserError
from regard.hooks.off_loaded import hooks_of


def check_off_loading(model: nn.Module) -> None:
    """Raise UserError if accelerate off-loads what it cannot find again.

    It looks the weights of whole blocks up by names without adapters, and those of a model with its adapters in the
    state of these, which holds no base.
    """
    for name, module in model.named_modules():
        hooks = list(hooks_of(module))
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
    off_loaded = [module for part in parts for module in part.modules() if any(hooks_of(module))]
    if off_loaded:
        from accelerate.hooks import remove_hook_from_module

        for module in off_loaded:
            device = next(hooks_of(module)).execution_device
            remove_hook_from_module(module)
            _move(module, device)


def _move(module: nn.Module, device: Any) -> None:
    for values in (module._parameters, module._buffers):
        for value in values.values():
            if value is not None and device is not None:
                value.data = value.data.to(device)
