"""Checkpoints of a training run: folders that are complete or absent, of which the last few are kept."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from regard.errors import UserError
from regard.runs.provenance import regard_version

FORMAT = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Prefixes that wrappers add to the names of parameters."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Full tensors on the CPU: those of a model by name, and of its optimizer by `parameter/state`.

    Tied parameters have their first name only.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


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
    return Weights(*(dict(_full_tensors(part, keep)) for part in (tensors, moments)))


def _full_tensors(tensors: Mapping[str, Tensor], keep: bool) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            yield name, full.detach().cpu().contiguous()


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the full tensors of a model on the CPU by name, tied ones once; with sharding all processes call this."""
    return dict(_full_tensors(dict(_named_tensors(model)), keep=True))


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over parameters, each once, and over persistent buffers."""
    stored = {_unwrap_name(name) for name in model.state_dict(keep_vars=True)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if _unwrap_name(name) in stored:
            yield _unwrap_name(name), tensor


def _unwrap_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# -- writing --------------------------------------------------------------------------------------------


def save(folder: Path, weights: Weights, state: Mapping[str, Any], *, keep: int) -> Path:
    """Write a checkpoint completely or not at all, delete old ones, and return its folder.

    Args:
        folder: Folder of the checkpoints.
        weights: Weights.
        state: State as JSON, with the `step`.
        keep: Number of checkpoints to keep. Those of later steps, before a run was resumed, are deleted.

    Raises:
        UserError: The checkpoint cannot be written; earlier ones remain.
    """
    final = folder / f"step-{state['step']:08d}"
    target = folder / f"{_UNFINISHED}{secrets.token_hex(4)}"
    try:
        target.mkdir(parents=True)
        save_file(dict(weights.model), target / MODEL, metadata={"format": "pt"})
        save_file(dict(weights.optimizer), target / OPTIMIZER)
        content = {"format": FORMAT, **state, "versions": _versions()}
        content["sha256"] = {name: _digest(target / name) for name in (MODEL, OPTIMIZER)}
        (target / STATE).write_text(json.dumps(content), encoding="utf-8")
        for path in (target / MODEL, target / OPTIMIZER, target / STATE, target):
            _fsync(path)
        if final.exists():
            final.rename(folder / f"{_UNFINISHED}{secrets.token_hex(4)}")
        target.rename(final)
        _fsync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(target, ignore_errors=True)
        last = latest(folder)
        raise UserError(
            f"cannot write the checkpoint of step {state['step']} to {folder}: "
            f"{getattr(error, 'strerror', None) or error}; {describe_latest(last)}"
        ) from error
    _prune(folder, state["step"], keep)
    return final


def describe_latest(checkpoint: Path | None) -> str:
    """Describe the last good checkpoint, for messages."""
    return "there is no checkpoint" if checkpoint is None else f"the last good checkpoint is {checkpoint}"


def clear_unfinished(folder: Path) -> None:
    """Remove folders of writers that were killed."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def _prune(folder: Path, step: int, keep: int) -> None:
    clear_unfinished(folder)
    past = [path for path in checkpoints(folder) if _step(path) <= step]
    for path in checkpoints(folder):
        if path not in past[-keep:]:
            doomed = folder / f"{_UNFINISHED}{secrets.token_hex(4)}"
            path.rename(doomed)  # so that a killed process leaves no partial checkpoint
            shutil.rmtree(doomed, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    versions = {"regard": regard_version(), "torch": torch.__version__, "accelerate": accelerate.__version__}
    return {**versions, "python": platform.python_version()}


# -- reading --------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, earliest first, good or damaged."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def latest(folder: Path) -> Path | None:
    """Return the last good checkpoint, or None."""
    return next((path for path in reversed(checkpoints(folder)) if _find_damage(path) is None), None)


def read(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Read the state of the last good checkpoint; None if there is no checkpoint.

    Damaged ones are skipped with a warning.

    Raises:
        UserError: All checkpoints are damaged.
    """
    paths = checkpoints(folder)
    for path in reversed(paths):
        damage = _find_damage(path)
        if damage is None:
            return path, json.loads((path / STATE).read_text(encoding="utf-8"))
        warnings.warn(f"{path} is damaged ({damage}); the one before it is taken", stacklevel=2)
    if paths:
        raise UserError(f"{folder}: expected a good checkpoint, each of the {len(paths)} is damaged; start a new run")
    return None


def _find_damage(path: Path) -> str | None:
    """Describe what is wrong with a checkpoint; None if it is good."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            return f"{STATE} has format {state['format']}, this version of Regard reads {FORMAT}"
        damaged = [name for name, digest in state["sha256"].items() if _digest(path / name) != digest]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{', '.join(damaged)}: not what was written" if damaged else None


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint into a model and its optimizer.

    Raises:
        UserError: The checkpoint is of another model; nothing is changed then.
    """
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
    """Move a value to the device and sharding of another tensor."""
    if isinstance(like, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value.to(like.device)
