"""What a finished run knew after its last task, put into a run over more tasks."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.continual.learner import Learner, Row
from regard.continual.method import MethodState
from regard.continual.models import INDEX, LINEAGE, delta_path, read_deltas
from regard.continual.run_state import (
    LEARNT,
    collect_tensors,
    copy_to_cpu,
    load_tensors,
    make_record,
    method_state,
    open_parameters,
)
from regard.errors import UserError
from regard.runs.integrity import find_damaged_files, is_sealed, seal, sha256_of_file
from regard.runs.output_dir import read_json, readable_errors, write_file

KEPT, KEPT_TENSORS = "state.json", "state.safetensors"
"""What a method keeps, beside what the tasks have changed of the model."""


def keep_method_state(folder: Path, learner: Learner, state: MethodState, learnt: Sequence[Row]) -> None:
    """Write what a method keeps at the end of a run, and what was learnt, so that another run can go on with it."""
    with readable_errors(folder / KEPT_TENSORS, note="what the tasks have changed is kept"):
        save_file(copy_to_cpu(state.tensors), folder / KEPT_TENSORS)
    rest = {LEARNT: list(learnt), "tensors": sha256_of_file(folder / KEPT_TENSORS)}
    write_file(folder / KEPT, json.dumps(seal(make_record(learner.network, state) | rest)))


@dataclass(frozen=True, eq=False)
class EarlierTasks:
    """The tasks of a finished run.

    Attributes:
        folder: What they changed of the model, and what the method keeps.
        rows: Rows of the run's tables.
    """

    folder: Path
    rows: Mapping[str, list[Row]]

    def check(self, learner: Learner) -> int:
        """Return the number of tasks. Raises UserError if they are others than in the finished run."""
        tasks = read_json(self.folder / LINEAGE)["tasks"]
        for number, before in enumerate(tasks):
            now = learner.stream.tasks[number] if number < len(learner.stream) else None
            if now is None or now.name != before["name"]:
                got = "no task" if now is None else now.name
                raise UserError(
                    f"continue: expected the run's tasks first, {before['name']} as number {number + 1}, got {got}"
                )
            changed = [split for split, value in before["sha256"].items() if now.sha256.get(split) != value]
            if changed:
                raise UserError(
                    f"continue: the {changed[0]} rows of {now.name} are not those of the run; restore its files"
                )
        if len(tasks) == len(learner.stream):
            raise UserError("continue: expected a task more than the run has, got none")
        return len(tasks)

    def restore(self, learner: Learner) -> tuple[int, MethodState, dict[str, Any]]:
        """Load the weights into the learner's network; return the number of tasks, the method's state, and the rows."""
        count, record = self.check(learner), read_json(self.folder / KEPT)
        if not is_sealed(record) or find_damaged_files(self.folder, {KEPT_TENSORS: record["tensors"]}):
            raise UserError(f"continue: {self.folder / KEPT} is missing or damaged, or {KEPT_TENSORS} beside it")
        start = collect_tensors(learner.network)
        load_tensors(
            learner.network,
            {name: widen(start, name, value) for name, value in read_deltas(self.folder, count).items()},
        )
        open_parameters(learner.network, record["trained"])
        tensors = load_file(self.folder / KEPT_TENSORS)
        rows = {name: list(rows) for name, rows in self.rows.items()} | {LEARNT: list(record.get(LEARNT, []))}
        rows["gate"] = [row for row in rows.get("gate", []) if not _is_of_the_end(row, count)]
        return count, method_state(record, tensors), rows

    def copy_deltas(self, learner: Learner, folder: Path) -> None:
        """Write what the earlier tasks changed into the new run's folder, as its network has room for it."""
        count, start, sums = (
            self.check(learner),
            {name: value.cpu() for name, value in learner.start.items()},
            dict[str, str](),
        )
        for task in range(1, count + 1):
            path = delta_path(folder, task)
            changed = read_deltas(self.folder, task, first=task)
            with readable_errors(path):
                save_file({name: widen(start, name, value) for name, value in changed.items()}, path)
            sums[path.name] = sha256_of_file(path)
        write_file(folder / INDEX, json.dumps(seal({"files": sums})))


def _is_of_the_end(row: Row, tasks: int) -> bool:
    """Whether a row of the gate is a score that a run measures of all tasks once it ends: a longer run has it later."""
    return row["after_task"] == tasks != row["task_index"] and str(row["statistic"]).endswith("_score")


def widen(start: Mapping[str, Tensor], name: str, value: Tensor) -> Tensor:
    """Return a tensor of a network of fewer tasks as one of more has it: what is new is as at the start.

    Raises:
        UserError: It has no place there.
    """
    place = start.get(name)
    if (
        place is None
        or place.dim() != value.dim()
        or any(old > new for old, new in zip(value.shape, place.shape, strict=True))
    ):
        raise UserError(f"continue: {name} of the run has no place in a network of more tasks")
    if place.shape == value.shape:
        return value
    wide = place.clone()
    wide[tuple(slice(0, size) for size in value.shape)] = value.to(wide)
    return wide
