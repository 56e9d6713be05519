"""`regard pretrain` as a sweep repeats it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from regard.commands.pretrain.config import PRESETS, PretrainConfig, preset_config
from regard.commands.pretrain.result import PretrainResult
from regard.data.texts import Source, check_source
from regard.runs.command import Command
from regard.runs.result import read_metadata


class PretrainCommand(Command):
    """Trials of `regard pretrain`."""

    name = "pretrain"
    config = PretrainConfig
    presets = tuple(PRESETS)
    folder_options: ClassVar[Mapping[str, str]] = {
        "cache": "where packed text is kept (default: $REGARD_CACHE, else ~/.cache/regard)"
    }

    def initial_fields(self, preset: str | None, file: Path | None) -> dict[str, Any]:
        config = PretrainConfig.from_file(file) if file is not None else preset_config(preset or "nano")
        return config.to_dict()

    def complete(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        config = PretrainConfig.from_dict(fields)
        for source in config.data:
            check_source(Source.parse(source))
        return config.to_dict()

    def final_metrics(self, folder: Path) -> dict[str, Any]:
        metadata = read_metadata(folder, self.name)
        final = {name: value for name, value in metadata["final"].items() if isinstance(value, int | float | None)}
        cost = {name: metadata["cost"].get(name) for name in ("seconds", "tokens_per_second")}
        return {**final, "emergence_step": metadata["emergence"].get("step"), **cost}

    def curves(self, folder: Path) -> pd.DataFrame:
        return pd.read_parquet(folder / f"{PretrainResult.tables['history']}.parquet")
