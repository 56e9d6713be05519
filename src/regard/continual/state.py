"""The state of a run between two tasks: its network, the state of its method, and the rows of its tables so far."""

from __future__ import annotations

import json
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
from regard.runs.snapshots import Snapshots
from regard.runs.work_dir import check_same_identity

NETWORK, METHOD = "network.safetensors", "method.safetensors"


def snapshots_in(folder: Path) -> Snapshots:
    """Return the states of a run, by the number of tasks trained."""
    return Snapshots(folder, name="after")


def save(folder: Path, num_tasks: int, network: nn.Module, state: MethodState, rows: Mapping[str, Any]) -> None:
    """Write the state after `num_tasks` tasks.

    Args:
        folder: Where the states of the run are.
        num_tasks: Tasks trained so far.
        network: The network.
        state: What the method keeps.
        rows: The rows of the tables so far by table, and the identity of the run under `identity`.
    """

    def write(place: Path) -> None:
        save_file(collect_tensors(network), place / NETWORK)
        tensors = {name: value.detach().cpu().contiguous() for name, value in state.tensors.items()}
        save_file(tensors, place / METHOD)

    record = {
        "examples": [list(example) for example in state.examples],
        "values": state.values,
        "rows": rows,
        "trained": [name for name, parameter in network.named_parameters() if parameter.requires_grad],
    }
    snapshots_in(folder).save(num_tasks, write, record)


def restore_state(
    folder: Path, network: nn.Module, identity: Mapping[str, Any]
) -> tuple[int, MethodState, dict[str, Any]] | None:
    """Load the last good state into the network.

    Args:
        folder: Where the states of the run are.
        network: The network, which gets its weights of then, and trains what it trained then.
        identity: What the numbers of the run depend on.

    Returns:
        How many tasks were trained, what the method kept, and the rows so far; None where there is no state.

    Raises:
        UserError: All states are damaged, or they are of a run of another identity.
    """
    latest = snapshots_in(folder).latest()
    if latest is None:
        return None
    path, record = latest
    rows = dict(record["rows"])
    check_same_identity(rows.pop("identity"), json.loads(json.dumps(identity)))
    try:
        load_tensors(network, load_file(path / NETWORK))
        tensors = load_file(path / METHOD)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot resume: {path} cannot be read: {' '.join(str(error).split())}") from error
    _reopen(network, record["trained"])
    state = MethodState([ExampleRef(*example) for example in record["examples"]], tensors, record["values"])
    return snapshots_in(folder).index_of(path), state, rows


def _reopen(network: nn.Module, trained: Sequence[str]) -> None:
    """Let the parameters of these names be trained, and no others."""
    for name, one in network.named_parameters():
        one.requires_grad_(name in trained)
    for module in network.modules():
        if isinstance(module, LoraAdapters):
            module.reopen()


def collect_tensors(network: nn.Module) -> dict[str, Tensor]:
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
    """Give the network these weights, which are those of `collect_tensors`, or some of them."""
    there = network.state_dict(keep_vars=True)
    for name, value in weights.items():
        if name not in there or there[name].shape != value.shape:
            raise UserError(f"resume: expected the network of this run, {name} does not fit it")
        there[name].copy_(value)
