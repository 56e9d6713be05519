"""What every finished run leaves: its folder, written whole or not at all, and checked when it is read."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pandas as pd

from regard.errors import UserError, describe_error
from regard.runs.display import Display
from regard.runs.integrity import SEAL, find_damaged_files, is_sealed, seal, sha256_of_files
from regard.runs.output_dir import PAGE, RESULTS, SWEEP, atomic_folder, read_json
from regard.runs.provenance import SCHEMA_VERSION
from regard.runs.selection import select_rows

if TYPE_CHECKING:
    from rich.console import RenderableType

R = TypeVar("R", bound="RunResult")


class RunResult(Display):
    """The result of a command: tables, metadata, and a page.

    A folder holds `results.json` (the metadata, with the checksums of all other files), each table as Parquet,
    `report.html`, and what the command adds.
    """

    command: ClassVar[str]
    tables: ClassVar[Mapping[str, str]]  # attributes that are tables, and the name of their file NAME.parquet
    metadata: dict[str, Any]  # `describe_run`, and what the command adds

    @abstractmethod
    def page(self) -> str:
        """Return the report as one HTML file that loads nothing."""

    @abstractmethod
    def summary(self) -> RenderableType:
        """Return the few lines that a terminal shows, for rich's `print`."""

    @property
    def _all_tables(self) -> dict[str, pd.DataFrame]:
        return {file: getattr(self, name) for name, file in self.tables.items()}

    def frame(self, name: str | None = None, /, **equal: Any) -> pd.DataFrame:
        """Return rows of a table (None: the first) by column, as `result.frame("cost", dynamic_fraction=0)`.

        A value of None is null, several are any of them. Warns if no row is left. Raises UserError for an unknown
        table or column.
        """
        tables = self._all_tables
        if name is not None and name not in tables:
            raise UserError(f"unknown table {name!r}; the run has: {', '.join(tables)}")
        return select_rows(tables[next(iter(tables)) if name is None else name], equal, name)

    def overview(self) -> pd.DataFrame:
        """Return the main figures by name."""
        return pd.DataFrame(self.main_figures().items(), columns=["figure", "value"])

    def figures_by_seed(self) -> dict[str, dict[Any, float]]:
        """Return the figures by which runs are compared, by name and then by seed."""
        return {}

    def main_figures(self) -> dict[str, float]:
        """Return their means over seeds."""
        return {name: math.fsum(values.values()) / len(values) for name, values in self.figures_by_seed().items()}

    def write_artifacts(self, folder: Path) -> None:
        """Write what the folder holds beside tables, metadata and page."""

    @classmethod
    def read_artifacts(cls, folder: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `write_artifacts` wrote, as arguments of the class."""
        return {}

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the result to a folder, whole or not at all, and return it.

        `overwrite` replaces an earlier result. Raises UserError if the folder holds other files or cannot be written.
        """
        with atomic_folder(folder, overwrite=overwrite, command=self.command, option="folder") as path:
            self.write_files(path)
        return Path(folder)

    def write_files(self, folder: Path) -> None:
        """Write all files of the result into an empty folder."""
        for name, file in self.tables.items():
            getattr(self, name).to_parquet(folder / f"{file}.parquet", index=False)
        self.write_artifacts(folder)
        (folder / PAGE).write_text(self.page(), encoding="utf-8")
        kind = {"command": self.command, "schema_version": SCHEMA_VERSION}  # of numbers that no command has made, too
        metadata = seal({**kind, **self.metadata, "files": sha256_of_files(folder)})
        text = json.dumps(metadata, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / RESULTS).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls: type[R], folder: str | Path) -> R:
        """Read a result that `save` wrote. Raises UserError if it is missing, damaged, or of another command."""
        folder = Path(folder)
        metadata = read_metadata(folder, cls.command)
        try:
            tables = {name: pd.read_parquet(folder / f"{file}.parquet") for name, file in cls.tables.items()}
            artifacts = cls.read_artifacts(folder, metadata)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"the run in {folder} cannot be read: {describe_error(error)}") from error
        metadata = {name: value for name, value in metadata.items() if name not in ("files", SEAL)}
        make: Callable[..., R] = cls
        return make(**tables, **artifacts, metadata=metadata)


def read_metadata(folder: str | Path, command: str) -> dict[str, Any]:
    """Return the metadata of a finished run of a command, with the checksums of its files under `files`.

    The files are checked, except the page and those in folders below. Raises UserError if one is damaged.
    """
    path = Path(folder) / RESULTS
    if not path.is_file():
        work = path.parent.with_name(f"{path.parent.name}.work")
        hint = f"; {work} is an unfinished one: its command with --resume goes on" if work.is_dir() else ""
        if path.with_name(SWEEP).is_file():
            hint = f"; this one is of a sweep, whose runs are in {path.with_name('trials')}"
        raise UserError(
            f"no run in {folder}: expected a folder with {RESULTS}, as `regard {command} --out` writes it{hint}"
        )
    metadata = read_json(path)
    if metadata.get("command") != command:
        other = metadata.get("command")
        kind = f"is one of `regard {other}`" if other else f"has no command in its {RESULTS}, or it cannot be read"
        raise UserError(f"the run in {folder} {kind}: expected one of `regard {command}`")
    version = metadata.get("schema_version")
    if version != SCHEMA_VERSION:
        reason = f"has schema version {version}, this version of Regard reads {SCHEMA_VERSION}"
        raise UserError(f"the run in {folder} {reason}")
    if not is_sealed(metadata):
        raise UserError(f"the run in {folder} is damaged: {RESULTS} is not as written")
    tables = {name: sha256 for name, sha256 in metadata["files"].items() if "/" not in name and name != PAGE}
    damaged = find_damaged_files(Path(folder), tables)
    if damaged:
        raise UserError(f"the run in {folder} is damaged: {', '.join(damaged)} missing, or not as written")
    return metadata
