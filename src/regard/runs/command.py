"""Commands that a sweep can repeat."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from regard.errors import UserError
from regard.runs.config import Config
from regard.runs.result import read_metadata

if TYPE_CHECKING:
    import pandas as pd


class Command(ABC):
    """A command that trains, as a sweep runs it: each trial is `python -m regard NAME` in a process of its own."""

    name: ClassVar[str]
    config: ClassVar[type[Config]]
    presets: ClassVar[tuple[str, ...]] = ()  # names of configurations to begin with
    flags: ClassVar[tuple[str, ...]] = ()  # options of each trial
    folder_options: ClassVar[Mapping[str, str]] = {}  # help of options that name folders and are no fields

    @abstractmethod
    def initial_fields(self, preset: str | None, file: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a preset, of a file, or the default ones, with those given. Raises UserError."""

    def complete(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return all fields of a run from some, checked, as JSON holds them. Raises UserError."""
        return self.config.from_dict(fields).to_dict()

    def check_models(self, runs: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027  # most load none
        """Check that what runs with these fields load beside their data can be had. Raises UserError."""

    def arguments(self, config: Path, out: Path) -> list[str]:
        """Return what Python runs for a trial, which goes on with what is in `out`."""
        options = ("--config", str(config), "--out", str(out), "--resume", "--overwrite")
        return ["-m", "regard", self.name, *options, *self.flags]

    def data_paths(self, fields: Mapping[str, Any]) -> list[str]:
        """Return the files and folders that fields name, data and models: with other contents it is another run."""
        return []

    def is_finished(self, folder: Path, fields: Mapping[str, Any]) -> bool:
        """Return whether a folder holds a finished run with these fields that is not damaged."""
        try:
            config = read_metadata(folder, self.name).get("config", {})
            return self.config.from_dict(config) == self.config.from_dict(fields)
        except UserError:
            return False

    @abstractmethod
    def final_metrics(self, folder: Path) -> dict[str, Any]:
        """Return the final numbers of a finished run, and what it cost."""

    @abstractmethod
    def curves(self, folder: Path) -> pd.DataFrame:
        """Return the metrics of a finished run over its steps, or over its tasks."""
