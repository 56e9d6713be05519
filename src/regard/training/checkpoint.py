"""Checkpoints of a training run: folders that are there whole or not at all, of which the last few are kept."""

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
"""What wrapping puts into the names of parameters, and does not belong to them."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Whole tensors on the CPU: a model's by name, and its optimiser's by `parameter/state`.

    Of parameters that are tied the first name alone is there.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


def gather(model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: bool = True) -> Weights:
    """The weights as they are now; of sharded ones every process must take part, and those with `keep` get them.

    What is not sharded and on the CPU is not copied: write it before the next step.
    """
    named = dict(_named_tensors(model))
    moments = {
        f"{name}/{state}": value
        for name, tensor in named.items()
        for state, value in optimizer.state.get(tensor, {}).items()
    }
    return Weights(*(dict(_whole(part, keep)) for part in (named, moments)))


def _whole(tensors: Mapping[str, Tensor], keep: bool) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            yield name, whole.detach().cpu().contiguous()


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's whole tensors on the CPU by name, tied ones once; of a sharded model every process must call this."""
    return dict(_whole(dict(_named_tensors(model)), keep=True))


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, each once, and the buffers that belong to the model's state."""
    stored = {_bare(name) for name in model.state_dict(keep_vars=True)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if _bare(name) in stored:
            yield _bare(name), tensor


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# -- writing --------------------------------------------------------------------------------------------


def save(folder: Path, weights: Weights, state: Mapping[str, Any], *, keep: int) -> Path:
    """The checkpoint's folder, written under another name and renamed when all of it is on the disk.

    `state` has the `step`. The last `keep` checkpoints stay; any of later steps are of a run that was resumed before
    them, and go. A UserError if there is no place: what was there before is there still, and nothing half-written.
    """
    final = folder / f"step-{state['step']:08d}"
    place = folder / f"{_UNFINISHED}{secrets.token_hex(4)}"
    try:
        place.mkdir(parents=True)
        save_file(dict(weights.model), place / MODEL, metadata={"format": "pt"})
        save_file(dict(weights.optimizer), place / OPTIMIZER)
        sealed = {"format": FORMAT, **state, "versions": _versions()}
        sealed["sha256"] = {name: _digest(place / name) for name in (MODEL, OPTIMIZER)}
        (place / STATE).write_text(json.dumps(sealed), encoding="utf-8")
        for written in (place / MODEL, place / OPTIMIZER, place / STATE, place):
            _to_disk(written)
        if final.exists():
            final.rename(folder / f"{_UNFINISHED}{secrets.token_hex(4)}")
        place.rename(final)
        _to_disk(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(place, ignore_errors=True)
        last = latest(folder)
        raise UserError(
            f"cannot write the checkpoint of step {state['step']} to {folder}: "
            f"{getattr(error, 'strerror', None) or error}; {told_last(last)}"
        ) from error
    _prune(folder, state["step"], keep)
    return final


def told_last(checkpoint: Path | None) -> str:
    """Half a sentence about the last good checkpoint."""
    return "there is no checkpoint" if checkpoint is None else f"the last good checkpoint is {checkpoint}"


def clear_unfinished(folder: Path) -> None:
    """Remove what a process left that was killed while it wrote."""
    for place in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(place, ignore_errors=True)


def _prune(folder: Path, step: int, keep: int) -> None:
    clear_unfinished(folder)
    past = [path for path in checkpoints(folder) if _step(path) <= step]
    for path in checkpoints(folder):
        if path not in past[-keep:]:
            going = folder / f"{_UNFINISHED}{secrets.token_hex(4)}"
            path.rename(going)  # a process that is killed now leaves no half of a checkpoint under its name
            shutil.rmtree(going, ignore_errors=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    found = {"regard": regard_version(), "torch": torch.__version__, "accelerate": accelerate.__version__}
    return {**found, "python": platform.python_version()}


# -- reading --------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in the folder, earliest first, good or damaged."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def latest(folder: Path) -> Path | None:
    """The last checkpoint whose files are as they were written, or None."""
    return next((path for path in reversed(checkpoints(folder)) if _damage(path) is None), None)


def read(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The last good checkpoint and its state; None where there is none at all.

    A damaged one is passed over with a warning; if all are damaged that is a UserError.
    """
    found = checkpoints(folder)
    for path in reversed(found):
        damage = _damage(path)
        if damage is None:
            return path, json.loads((path / STATE).read_text(encoding="utf-8"))
        warnings.warn(f"{path} is damaged ({damage}); the one before it is taken", stacklevel=2)
    if found:
        raise UserError(f"{folder}: expected a good checkpoint, each of the {len(found)} is damaged; start a new run")
    return None


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            return f"{STATE} has format {state['format']}, this version of Regard reads {FORMAT}"
        wrong = [name for name, digest in state["sha256"].items() if _digest(path / name) != digest]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{', '.join(wrong)}: not what was written" if wrong else None


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give model and optimiser the checkpoint's weights; a UserError, and nothing changed, if they are of another."""
    named = dict(_named_tensors(model))
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    with safe_open(path / MODEL, framework="pt") as weights, safe_open(path / OPTIMIZER, framework="pt") as moments:
        names, states = list(weights.keys()), list(moments.keys())
        _check_fits(path, {name: tuple(weights.get_slice(name).get_shape()) for name in names}, named)
        for name in (key.rsplit("/", 1)[0] for key in states):
            if named[name] not in groups:
                raise UserError(f"{path}: expected the model of this run; {name} was trained there, and is not here")
        with torch.no_grad():
            for name, tensor in named.items():
                tensor.copy_(_placed(weights.get_tensor(name), tensor))
        for key in states:
            name, state = key.rsplit("/", 1)
            parameter = named[name]
            value = moments.get_tensor(key)
            if value.shape == parameter.shape and state != "step":
                value = _placed(value, parameter)
            elif groups[parameter]["fused"]:
                value = value.to(parameter.device)
            optimizer.state[parameter][state] = value


def _check_fits(path: Path, saved: Mapping[str, tuple[int, ...]], named: Mapping[str, Tensor]) -> None:
    here = {name: tuple(tensor.shape) for name, tensor in named.items()}
    for name in sorted(saved.keys() | here.keys()):
        then, now = saved.get(name, "none"), here.get(name, "none")
        if then != now:
            raise UserError(f"{path}: expected the model of this run; {name} is {then} there, and {now} here")


def _placed(value: Tensor, like: Tensor) -> Tensor:
    """The value where, and sharded as, another tensor is."""
    if isinstance(like, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value.to(like.device)
