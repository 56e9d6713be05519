"""What a run is after a task: its network, what its method keeps, and what was found; on disk whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.adapters.lora import LoraAdapters
from regard.continual.batches import ExampleRef
from regard.continual.method import MethodState
from regard.errors import UserError
from regard.runs.output_dir import atomic_folder
from regard.runs.journal import check_same

NETWORK, KEPT, STATE = "network.safetensors", "kept.safetensors", "state.json"
FORMAT = 1


def place_of(folder: Path, learnt: int) -> Path:
    """Where the state after so many tasks lies."""
    return folder / f"after-{learnt:04d}"


def save(folder: Path, learnt: int, network: nn.Module, kept: MethodState, found: Mapping[str, Any]) -> None:
    """Write the state after `learnt` tasks, and remove that before it."""
    with atomic_folder(place_of(folder, learnt), overwrite=False) as place:
        save_file(tensors_of(network), place / NETWORK)
        save_file({name: value.detach().cpu().contiguous() for name, value in kept.tensors.items()}, place / KEPT)
        trained = [name for name, one in network.named_parameters() if one.requires_grad]
        said = {
            "format": FORMAT,
            "items": [list(item) for item in kept.examples],
            "values": kept.values,
            "found": found,
        }
        said["trained"] = trained
        (place / STATE).write_text(json.dumps(said), encoding="utf-8")
    for earlier in range(learnt):
        shutil.rmtree(place_of(folder, earlier), ignore_errors=True)


def latest(folder: Path, tasks: int) -> int:
    """After how many tasks the last state in the folder is; 0 where there is none."""
    there = (learnt for learnt in range(tasks, 0, -1) if (place_of(folder, learnt) / STATE).is_file())
    return next(there, 0)


def restore_state(
    folder: Path, learnt: int, network: nn.Module, about: Mapping[str, Any]
) -> tuple[MethodState, dict[str, Any]]:
    """What was kept and found after `learnt` tasks; the network has its weights of then, and trains what it did then.

    Raises UserError where the files are damaged, or of a run of other settings (`about`, which `found` has as well).
    """
    place = place_of(folder, learnt)
    try:
        said = json.loads((place / STATE).read_text(encoding="utf-8"))
        weights, tensors = load_file(place / NETWORK), load_file(place / KEPT)
        items, values, found = [ExampleRef(*item) for item in said["items"]], said["values"], said["found"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(
            f"resume: {place} cannot be read: {' '.join(str(error).split())}; run without resume"
        ) from error
    check_same(found["about"], json.loads(json.dumps(about)))
    load_tensors(network, weights)
    if "trained" in said:  # states that earlier versions wrote do not say
        _reopen(network, said["trained"])
    return MethodState(items, tensors, values), found


def _reopen(network: nn.Module, trained: Sequence[str]) -> None:
    """Let the parameters of these names be trained, and no others."""
    for name, one in network.named_parameters():
        one.requires_grad_(name in trained)
    for module in network.modules():
        if isinstance(module, LoraAdapters):
            module.reopen()


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """The network's weights and buffers on the CPU, tied ones once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in network.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            found[name] = value.detach().cpu().contiguous()
    return found


@torch.no_grad()
def load_tensors(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give the network these weights, which are those of `tensors_of`, or some of them."""
    there = network.state_dict(keep_vars=True)
    for name, value in weights.items():
        if name not in there or there[name].shape != value.shape:
            raise UserError(f"resume: expected the network of this run, {name} does not fit it")
        there[name].copy_(value)
