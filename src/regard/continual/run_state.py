"""How far a run is and what it has given so far, and its state on disk between two tasks."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.adapters.lora import LoraAdapters
from regard.continual.known_answers import KnownAnswers
from regard.continual.learner import Learner, Row
from regard.continual.method import Method, MethodState
from regard.continual.training_phase import ExampleRef
from regard.errors import UserError, describe_error
from regard.runs.snapshots import Snapshots
from regard.runs.work_dir import check_same_identity

STATE_NAME, NETWORK, METHOD = "after", "network.safetensors", "method.safetensors"
ANSWERS = "answers.safetensors"
TABLES = ("matrix", "cost", "diagnostics", "gate", "general")
"""The tables that a run gives."""
LEARNT = "learnt"
"""The rows beside them that say what was right just after a task was learnt (`learnt_answers`)."""
TRAINING = "training"
"""The rows beside them that say how many training rows were right just after their task was learnt."""


@dataclass(frozen=True)
class ProgressEvent:
    """How far a run is: the place of its task, counted from 1, the phase, and the step in it; or a `note` before it."""

    task_index: int
    task: str
    phase: str
    step: int
    steps: int
    metrics: Mapping[str, float]
    note: str = ""


@dataclass(eq=False)
class RunState:
    """What a run gave: rows of its tables, and its network as it is at the end; `peak_memory` is in MiB.

    `seconds_before` are those of the parts before it was resumed, each as far as its last state; `known_scores`: see
    `measure_gate`.
    """

    learner: Learner
    method: Method
    peak_memory: float = 0.0
    seconds_before: float = 0.0
    known_scores: dict[tuple[int, int, str], float] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=lambda: {name: [] for name in (*TABLES, LEARNT, TRAINING)})

    @property
    def network(self) -> nn.Module:
        return self.learner.network


def save(folder: Path, num_tasks: int, network: nn.Module, state: MethodState, rows: Mapping[str, Any]) -> None:
    """Write the state after `num_tasks` tasks; `rows`: the tables so far, and the run's `identity` under that name."""
    known: KnownAnswers | None = getattr(network, "known_answers", None)
    answers = {} if known is None else known.tensors()

    def write(path: Path) -> None:
        if answers:
            save_file(answers, path / ANSWERS)
        save_file(collect_tensors(network), path / NETWORK)
        save_file(copy_to_cpu(state.tensors), path / METHOD)

    _check_values(state.values)
    record = make_record(network, state) | {"rows": rows, "answers": [] if known is None else known.record()}
    Snapshots(folder, name=STATE_NAME).save(num_tasks, write, record)


def _check_values(values: Mapping[str, Any]) -> None:
    """Raise a UserError for values that a resumed run would not have as they are."""
    for name, value in values.items():
        try:
            json.dumps(value)
            is_kept = _has_text_keys(value)
        except (TypeError, ValueError):
            is_kept = False
        if not is_kept:
            expected = "numbers, texts, lists, and dicts with texts as keys, as JSON keeps them"
            raise UserError(f"method: state.values[{name!r}]: expected {expected}; got {str(value)[:60]}")


def _has_text_keys(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) for key in value) and all(map(_has_text_keys, value.values()))
    return all(map(_has_text_keys, value)) if isinstance(value, (list, tuple)) else True


def restore_state(
    folder: Path, network: nn.Module, identity: Mapping[str, Any]
) -> tuple[int, MethodState, dict[str, Any]] | None:
    """Load the last state into the network; return the number of trained tasks, the method's state, and the rows."""
    snapshots = Snapshots(folder, name=STATE_NAME)
    latest = snapshots.latest()
    if latest is None:
        return None
    path, record = latest
    rows = dict(record["rows"])
    check_same_identity(rows.pop("identity"), json.loads(json.dumps(identity)))
    try:
        load_tensors(network, load_file(path / NETWORK))
        tensors = load_file(path / METHOD)
        answers = load_file(path / ANSWERS) if record.get("answers") else {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot resume: {path} cannot be read: {describe_error(error)}") from error
    open_parameters(network, record["trained"])
    known: KnownAnswers | None = getattr(network, "known_answers", None)
    if known is not None:
        known.restore(record.get("answers", []), answers)
    return snapshots.index_of(path), method_state(record, tensors), rows


def open_parameters(network: nn.Module, names: Collection[str]) -> None:
    """Let these parameters train, and no others."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in names)
    for module in network.modules():
        if isinstance(module, LoraAdapters):
            module.reopen()


def make_record(network: nn.Module, state: MethodState) -> dict[str, Any]:
    """Return what a method keeps beside its tensors, and which parameters train."""
    return {
        "examples": [list(example) for example in state.examples],
        "values": state.values,
        "trained": [name for name, parameter in network.named_parameters() if parameter.requires_grad],
    }


def method_state(record: Mapping[str, Any], tensors: dict[str, Tensor]) -> MethodState:
    """Return what a method keeps, from its record and its tensors.

    These are copied: products of tensors that do not begin at a multiple of 64 bytes, as in a file, round otherwise.
    """
    own = {name: value.clone() for name, value in tensors.items()}
    return MethodState([ExampleRef(*example) for example in record["examples"]], own, record["values"])


def named_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return the network's weights and buffers, tied ones once, by their first name."""
    names: dict[Tensor, str] = {}
    for name, value in network.state_dict(keep_vars=True).items():
        names.setdefault(value, name)
    return {name: value for value, name in names.items()}


def collect_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return the network's `named_tensors` on the CPU."""
    return copy_to_cpu(named_tensors(network))


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as a file of safetensors takes them."""
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


@torch.no_grad()
def load_tensors(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give the network these weights, which are those of `collect_tensors`, or some of them."""
    tensors = network.state_dict(keep_vars=True)
    for name, value in weights.items():
        if name not in tensors or tensors[name].shape != value.shape:
            raise UserError(f"resume: expected the network of this run, {name} does not fit it")
        tensors[name].copy_(value)
