"""An experiment that stores one table, with a line a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pandas as pd

from experiments.common import runs as finished
from experiments.common.claims import format_interval
from experiments.common.parts import RESULTS, Table
from regard.runs.intervals import t_interval

TablesOfRuns = TypeVar("TablesOfRuns", bound="RunTable")


@dataclass(frozen=True, eq=False)
class RunTable:
    """The runs, a line each, and the record of versions; stored as NAME-runs.csv and NAME.json.

    An experiment names its tables, the module that makes its runs, and the columns of a run with those that are floats.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    columns: ClassVar[Sequence[str]]
    floats: ClassVar[Sequence[str]]

    runs: pd.DataFrame
    record: Mapping[str, Any]

    @classmethod
    def paths(cls, work: Path) -> Iterable[Path]:
        """Return the files of runs in a folder."""
        return work.glob("*/*.json")

    @classmethod
    def place(cls, run: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return where a run stands among the others."""
        raise NotImplementedError

    @classmethod
    def gather(cls: type[TablesOfRuns], work: Path, revision: str | None) -> TablesOfRuns:
        """Make the table from the runs in a folder. Raises UserError."""
        with finished.reading(f"runs of {cls.module}", work):
            runs = finished.read_files(cls.paths(work))
            runs.sort(key=cls.place)
        table = finished.make_table(runs, cls.columns, cls.floats)
        return cls(table, {"revision": revision, "versions": finished.distinct(run["versions"] for run in runs)})

    @classmethod
    def load(cls: type[TablesOfRuns], folder: Path = RESULTS) -> TablesOfRuns:
        """Load the table of a folder. Raises UserError if it is missing."""
        tables, record = finished.load_tables(folder, cls.name, f"{cls.name}.json", {"runs": cls.columns}, cls.floats)
        return cls(tables["runs"], record)

    @classmethod
    def store(cls, work: Path, revision: str | None, folder: Path) -> None:
        """Make the stored table anew from the runs in a folder."""
        tables = cls.gather(work, revision)
        finished.save_tables(folder, cls.name, f"{cls.name}.json", {"runs": tables.runs}, tables.record)


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
