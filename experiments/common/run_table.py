"""An experiment that stores one table, with a line a run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pandas as pd

from experiments.common import runs as finished
from experiments.common.parts import RESULTS

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
