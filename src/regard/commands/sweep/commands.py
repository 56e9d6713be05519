"""`regard learn` and `regard pretrain` as a sweep repeats them: one method, one recipe a trial."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from regard.commands.learn.config import LearnConfig, split_methods
from regard.commands.learn.result import LearnResult
from regard.commands.pretrain.config import PRESETS, TRAIN_TOKENIZER, PretrainConfig, preset_config
from regard.commands.pretrain.result import PretrainResult
from regard.continual.evaluation_files import find_task_files
from regard.data.sources import HUB, PYTHON, Source, check_source
from regard.data.stream_catalog import STREAMS
from regard.data.tokenizers import read_tokenizer
from regard.errors import UserError
from regard.models.pretrained import check_model
from regard.runs.command import Command
from regard.runs.result import read_metadata


class LearnCommand(Command):
    """Trials of `regard learn`. What each task has changed of the model is not kept."""

    name = "learn"
    config = LearnConfig
    presets = tuple(STREAMS)
    flags = ("--no-save-models",)

    def __init__(self) -> None:
        self._writes_text: dict[LearnConfig, bool] = {}

    def initial_fields(self, preset: str | None, file: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
        if file is not None:
            return LearnConfig.from_options(file, {}).explicit_fields() | dict(given)
        return ({} if preset is None else {"stream": preset}) | dict(given)

    def complete(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return all fields, after a look at whether the user's stream can be read."""
        config = LearnConfig.from_dict(fields)
        if len(split_methods(config)) > 1:
            raise UserError(f"method: expected one in each trial, got {config.method}; vary method={config.method}")
        self._writes(config)
        return config.to_dict()

    def check_models(self, runs: Sequence[Mapping[str, Any]]) -> None:
        configs = map(LearnConfig.from_dict, runs)
        models = {(config.model, config.adapter, self._writes(config)): None for config in configs}
        for model, adapter, writes_text in models:
            check_model(model, adapter, language_model=writes_text)

    def _writes(self, config: LearnConfig) -> bool:
        """Whether the tasks of a stream are answered in texts: a published one is not read to know it, others once."""
        if config.stream not in STREAMS:
            stream = replace(config, method="finetune", set=())
            if stream not in self._writes_text:
                self._writes_text[stream] = stream.read().text
            return self._writes_text[stream]
        benchmark = STREAMS[config.stream].benchmark
        first = "classification" if benchmark is None else benchmark.task_types[0]
        return (first if config.task_type == "auto" else config.task_type) == "generation"

    def data_paths(self, fields: Mapping[str, Any]) -> list[str]:
        config = LearnConfig.from_dict(fields)
        code = config.method.rpartition(":")[0]  # of FILE.py:CLASS
        named = (
            config.model,
            config.adapter,
            config.held_out,
            code or None,
            *map(str, find_task_files(config.evaluated)),
        )
        return [part for part in (*config.parts, *named) if part is not None and part not in STREAMS]

    def final_metrics(self, folder: Path) -> dict[str, Any]:
        """Return the metrics of continual learning by scenario, as `average_performance_til`, and the seconds."""
        result = LearnResult.load(folder)
        rows = result.metrics.dropna(subset="value")
        metrics = {f"{row.metric}_{row.scenario}": float(row.value) for row in rows.itertuples()}
        return {**metrics, "seconds": result.metadata["cost"]["seconds"]}

    def curves(self, folder: Path) -> pd.DataFrame:
        """Return the mean score of the tasks learnt so far, over `tasks`: `average_performance_til`, `…_cil`."""
        scores = LearnResult.load(folder).accuracy_matrix
        seen = scores[scores["task_index"] <= scores["after_task"]]
        means = seen.groupby(["after_task", "scenario"])["score"].mean().unstack()
        return means.add_prefix("average_performance_").rename_axis("tasks").reset_index()


class PretrainCommand(Command):
    """Trials of `regard pretrain`."""

    name = "pretrain"
    config = PretrainConfig
    presets = tuple(PRESETS)
    folder_options: ClassVar[Mapping[str, str]] = {
        "cache": "where packed text is kept (default: $REGARD_CACHE, else ~/.cache/regard)"
    }

    def initial_fields(self, preset: str | None, file: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
        config = PretrainConfig.from_file(file) if file is not None else preset or "nano"
        return preset_config(config, **given).to_dict()

    def complete(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        config = PretrainConfig.from_dict(fields)
        for source in config.data:
            check_source(Source.parse(source))
        return config.to_dict()

    def check_models(self, runs: Sequence[Mapping[str, Any]]) -> None:
        for tokenizer in dict.fromkeys(fields["tokenizer"] for fields in runs):
            if tokenizer != TRAIN_TOKENIZER:
                read_tokenizer(tokenizer)

    def data_paths(self, fields: Mapping[str, Any]) -> list[str]:
        sources = map(Source.parse, fields["data"])
        places = [where for source in sources for where in (source.where, source.valid) if where is not None]
        named = [fields["tokenizer"]] if fields["tokenizer"] != TRAIN_TOKENIZER else []
        return [*(where for where in places if where != PYTHON and not where.startswith(HUB)), *named]

    def final_metrics(self, folder: Path) -> dict[str, Any]:
        metadata = read_metadata(folder, self.name)
        final = {name: value for name, value in metadata["final"].items() if isinstance(value, int | float | None)}
        cost = {name: metadata["cost"].get(name) for name in ("seconds", "tokens_per_second")}
        return {**final, "emergence_step": metadata["emergence"].get("step"), **cost}

    def curves(self, folder: Path) -> pd.DataFrame:
        return pd.read_parquet(folder / f"{PretrainResult.tables['history']}.parquet")
