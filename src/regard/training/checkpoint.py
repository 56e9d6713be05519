"""What a checkpoint of the training loop holds: the weights of model and optimizer, and the state of the loop."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from regard.errors import UserError
from regard.runs.snapshots import Snapshots

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Prefixes that wrappers add to the names of parameters."""


Weights = dict[str, dict[str, Tensor]]
"""Full tensors on the CPU by file: of a model by name, tied ones once, and of its optimizer by `parameter/state`."""


def gather(model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: bool = True) -> Weights:
    """Gather the weights of a model and its optimizer; with sharding all processes must call this.

    Processes without `keep` get nothing. Tensors on the CPU are not copied, so write them before the next step.
    """
    tensors = dict(_named_tensors(model))
    moments = {
        f"{name}/{state}": value
        for name, tensor in tensors.items()
        for state, value in optimizer.state.get(tensor, {}).items()
    }
    return {file: dict(_full_tensors(part, keep)) for file, part in {MODEL: tensors, OPTIMIZER: moments}.items()}


def _full_tensors(tensors: Mapping[str, Tensor], keep: bool) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            yield name, full.detach().cpu().contiguous()


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's full tensors on the CPU by name, tied ones once.

    With sharding all processes call this.
    """
    tensors = dict(_named_tensors(model))
    full = _full_tensors(tensors, keep=True)
    return {name: copied.clone() if copied.data_ptr() == tensors[name].data_ptr() else copied for name, copied in full}


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    stored = {_unwrap_name(name) for name in model.state_dict(keep_vars=True)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if _unwrap_name(name) in stored:
            yield _unwrap_name(name), tensor


def _unwrap_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def save(snapshots: Snapshots, weights: Weights, state: Mapping[str, Any]) -> Path:
    """Write a checkpoint of weights and the JSON state of the loop, whose `step` is its index. Raises UserError."""

    def write(folder: Path) -> None:
        save_file(weights[MODEL], folder / MODEL, metadata={"format": "pt"})
        save_file(weights[OPTIMIZER], folder / OPTIMIZER)

    return snapshots.save(state["step"], write, state)


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the weights of a checkpoint into model and optimizer. Raises UserError if they are of another model."""
    tensors = dict(_named_tensors(model))
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    with safe_open(path / MODEL, framework="pt") as weights, safe_open(path / OPTIMIZER, framework="pt") as moments:
        names, states = list(weights.keys()), list(moments.keys())
        _check_fits(path, {name: tuple(weights.get_slice(name).get_shape()) for name in names}, tensors)
        for name in (key.rsplit("/", 1)[0] for key in states):
            if tensors[name] not in groups:
                raise UserError(f"{path}: expected the model of this run; {name} was trained there, and is not here")
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(_place_like(weights.get_tensor(name), tensor))
        for key in states:
            name, state = key.rsplit("/", 1)
            parameter = tensors[name]
            value = moments.get_tensor(key)
            if value.shape == parameter.shape and state != "step":
                value = _place_like(value, parameter)
            elif groups[parameter]["fused"]:
                value = value.to(parameter.device)
            optimizer.state[parameter][state] = value


def _check_fits(path: Path, saved: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(saved.keys() | shapes.keys()):
        expected, actual = saved.get(name, "none"), shapes.get(name, "none")
        if expected != actual:
            raise UserError(f"{path}: expected the model of this run; {name} is {expected} there, and {actual} here")


def _place_like(value: Tensor, like: Tensor) -> Tensor:
    if isinstance(like, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value.to(like.device)
