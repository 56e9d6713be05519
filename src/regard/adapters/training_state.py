"""What a `Trainer` is shown of adapters: the columns that they read, and what a checkpoint holds, not the base."""

import inspect
import json
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.adapters.head import head_names

EXTRA = "_extra_state"


def like_forward_of(model: PreTrainedModel, adapters: Any) -> MethodType:
    """Return `forward` with the parameters of the model's, from which `Trainer` knows the columns that it may give."""

    def forward(self: Any, *args: Any, **inputs: Any) -> Any:
        return type(self).forward(self, *args, **inputs)

    keyword, any_name = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    parameters += [*inspect.signature(model.forward).parameters.values(), inspect.Parameter("prompt_mask", keyword)]
    parameters.sort(key=lambda parameter: parameter.kind is any_name)
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return MethodType(forward, adapters)


def keep_trained(adapters: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Take frozen weights of the base out of a `state_dict`, and copy views, which safetensors cannot write."""
    kept = _kept_names(adapters) | {f"model.{name}" for name in head_names(adapters)}
    for key in [key for key in state if key.startswith(prefix)]:
        if key.removeprefix(prefix) in kept:
            state[key] = state[key].contiguous()
        else:
            del state[key]


def expect_trained(adapters: Any, incompatible: Any) -> None:
    """Miss nothing in a `state_dict` that `keep_trained` leaves out, and no frozen head: earlier ones have none."""
    kept = _kept_names(adapters)
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name in kept]


def as_bytes(content: Mapping[str, Any]) -> Tensor:
    """Return JSON as a tensor, since safetensors hold nothing else."""
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


def from_bytes(state: Tensor) -> dict[str, Any]:
    """Return what `as_bytes` was given."""
    return dict(json.loads(bytes(state.tolist())))


def _kept_names(adapters: Any) -> set[str]:
    """Return the names of all buffers, and of the parameters of adapters and router and of others that train."""
    parts: tuple[nn.Module, ...] = (*adapters.pool.adapters, adapters.router)
    own = {id(parameter) for part in parts for parameter in part.parameters()}
    named = adapters.named_parameters()
    kept = {name for name, parameter in named if parameter.requires_grad or id(parameter) in own}
    return kept | {name for name, _ in adapters.named_buffers()} | {EXTRA}
