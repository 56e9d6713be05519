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
from regard.runs.folder import atomic_folder
from regard.runs.journal import check_same

NETWORK, METHOD_STATE, STATE = "network.safetensors", "kept.safetensors", "state.json"
FORMAT = 1


def state_path(folder: Path, tasks_trained: int) -> Path:
    """Return where the state after so many tasks lies."""
    return folder / f"after-{tasks_trained:04d}"


def save_state(
    folder: Path, tasks_trained: int, network: nn.Module, state: MethodState, tables: Mapping[str, Any]
) -> None:
    """Write the state after `tasks_trained` tasks, and remove the one before it."""
    with atomic_folder(state_path(folder, tasks_trained), overwrite=False) as target:
        save_file(collect_tensors(network), target / NETWORK)
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in state.tensors.items()}, target / METHOD_STATE
        )
        trainable = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
        content = {
            "format": FORMAT,
            "items": [list(item) for item in state.examples],
            "values": state.values,
            "found": tables,
        }
        content["trained"] = trainable
        (target / STATE).write_text(json.dumps(content), encoding="utf-8")
    for task in range(tasks_trained):
        shutil.rmtree(state_path(folder, task), ignore_errors=True)


def find_latest(folder: Path, tasks: int) -> int:
    """Return after how many tasks the last state in the folder is; 0 where there is none."""
    numbers = (
        tasks_trained for tasks_trained in range(tasks, 0, -1) if (state_path(folder, tasks_trained) / STATE).is_file()
    )
    return next(numbers, 0)


def restore_state(
    folder: Path, tasks_trained: int, network: nn.Module, fingerprint: Mapping[str, Any]
) -> tuple[MethodState, dict[str, Any]]:
    """Restore the network, and return the method's state and the tables, after `tasks_trained` tasks.

    The network trains the same parameters as then.

    Raises:
        UserError: The state cannot be read, or belongs to another run (`fingerprint`).
    """
    source = state_path(folder, tasks_trained)
    try:
        content = json.loads((source / STATE).read_text(encoding="utf-8"))
        weights, tensors = load_file(source / NETWORK), load_file(source / METHOD_STATE)
        examples, values, tables = [ExampleRef(*item) for item in content["items"]], content["values"], content["found"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(
            f"resume: {source} cannot be read: {' '.join(str(error).split())}; run without resume"
        ) from error
    check_same(tables["about"], json.loads(json.dumps(fingerprint)))
    load_tensors(network, weights)
    if "trained" in content:  # states that earlier versions wrote do not say
        _restore_trainable(network, content["trained"])
    return MethodState(examples, tensors, values), tables


def _restore_trainable(network: nn.Module, trainable: Sequence[str]) -> None:
    """Let the parameters of these names be trained, and no others."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in trainable)
    for module in network.modules():
        if isinstance(module, LoraAdapters):
            module.reopen()


def collect_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return the network's weights and buffers on the CPU, tied ones once."""
    tensors: dict[str, Tensor] = {}
    ids: set[int] = set()
    for name, value in network.state_dict(keep_vars=True).items():
        if id(value) not in ids:
            ids.add(id(value))
            tensors[name] = value.detach().cpu().contiguous()
    return tensors


@torch.no_grad()
def load_tensors(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give the network these weights, which are those of `collect_tensors`, or some of them."""
    current = network.state_dict(keep_vars=True)
    for name, value in weights.items():
        if name not in current or current[name].shape != value.shape:
            raise UserError(f"resume: expected the network of this run, {name} does not fit it")
        current[name].copy_(value)
