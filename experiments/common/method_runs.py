"""Runs of methods of continual learning on streams, a file each: what it holds, its place, and the table of all."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from experiments.common.claims import format_interval
from experiments.common.parts import Table
from experiments.common.run_table import RunTable
from experiments.common.runs import describe_scores, final_scores, origin
from regard.continual.methods import method_named
from regard.runs.intervals import t_interval

EARLIER = {"target_modules": "auto", "known_task": "router"}
"""Settings of methods whose defaults were others when most pages were made: these keep them."""


def earlier_settings(method: str) -> dict[str, str]:
    """Return the settings among `EARLIER` that a method has: of adapters, or of those that a router weighs."""
    known = {setting.name for setting in fields(method_named(method).Config)}
    return {name: value for name, value in EARLIER.items() if name in known}


def make_record(stream: str, method: str, seed: int, matrix: pd.DataFrame, start: float) -> dict[str, Any]:
    """Return the content of the file of a run that began at a time of this process."""
    return {
        **{"stream": stream, "method": method, "seed": seed},
        **final_scores(matrix),
        "cpu_seconds": time.process_time() - start,
        **origin(),
    }


def run_path(work: Path, stream: str, method: str, seed: int) -> Path:
    """Return the file of a run."""
    return work / stream / f"{method}-{seed}.json"


def describe_run(run: Mapping[str, Any]) -> str:
    """Return what a run came to, in one line."""
    name = f"{run['stream']}, {run['method']}, seed {run['seed']}"
    return describe_scores(name, run)


class MethodTable(RunTable):
    """Runs of methods of continual learning on streams, by seed."""

    columns = ("stream", "method", "seed", "AP til", "AP cil", "cpu_seconds")
    floats = ("AP til", "AP cil", "cpu_seconds")
    streams: ClassVar[Sequence[str]]
    methods: ClassVar[Sequence[str]]
    seeds: ClassVar[Sequence[int]]

    @classmethod
    def place(cls, run: Mapping[str, Any]) -> tuple[Any, ...]:
        return cls.streams.index(run["stream"]), cls.methods.index(run["method"]), cls.seeds.index(run["seed"])

    def of(self, stream: str, method: str, column: str) -> dict[int, float]:
        """Return a column of the runs of a method on a stream, by seed."""
        rows = self.runs[(self.runs["stream"] == stream) & (self.runs["method"] == method)]
        return dict(zip(rows["seed"].astype(int), rows[column].astype(float), strict=True))

    def gains(self, stream: str, method: str, reference: str, column: str) -> list[float]:
        """Return a method's values minus those of another, by seed; nothing unless all seeds were run."""
        new, old = self.of(stream, method, column), self.of(stream, reference, column)
        return [new[seed] - old[seed] for seed in self.seeds] if set(new) == set(old) == set(self.seeds) else []

    def score_table(self, name: str) -> Table:
        """Scores and time, by stream and method."""
        lines = []
        for stream, method in product(self.streams, self.methods):
            til, cil, seconds = (t_interval([*self.of(stream, method, column).values()]) for column in self.floats)
            if til.n:
                scores = [format_interval(score, 1) for score in (cil, til)]
                lines.append([f"`{stream}`", f"`{method}`", *scores, format_interval(seconds, 0)])
        return Table(name, "means by stream and method", ("stream", "method", "AP CIL", "AP TIL", "s"), lines)
