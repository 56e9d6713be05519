"""How far a run is, and what it has given so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from regard.continual.learner import Learner
from regard.continual.method import Method

Row = dict[str, Any]


TABLES = ("matrix", "cost", "diagnostics", "gate")
"""The tables that a run gives."""


@dataclass(frozen=True)
class ProgressEvent:
    """How far a run is: the place of its task, counted from 1, the phase, and the step in it."""

    task_index: int
    task: str
    phase: str
    step: int
    steps: int
    metrics: Mapping[str, float]


@dataclass(eq=False)
class RunState:
    """What a run gave: rows of the tables that `docs/design.md` describes, and its network as it is at the end.

    `peak`: MiB at the most, of all tasks and what was seen of them; see `peak_memory`.
    """

    learner: Learner
    method: Method
    peak_memory: float = 0.0
    rows: dict[str, list[Row]] = field(default_factory=lambda: {name: [] for name in TABLES})

    @property
    def network(self) -> nn.Module:
        """The network after the last task."""
        return self.learner.network
