"""Learn task after task, and see what is kept of each: a comparison of methods, and its work folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import PreTrainedModel

from regard.commands.learn.config import AS_GIVEN, LearnConfig, split_methods
from regard.commands.learn.one_run import TASK_END, Row, check_method, run_method, task_hashes
from regard.commands.learn.result import MODELS, TABLES, LearnResult, make_table
from regard.continual.models import add_model_hash
from regard.continual.run_state import ProgressEvent
from regard.data.rows import add_row_hashes
from regard.data.stream import Stream, TextTask
from regard.data.streams import parse_order
from regard.errors import UserError
from regard.models.pretrained import Loaded, as_loaded, load
from regard.runs import distributed as processes
from regard.runs.config import UNSET, Unset, explicit_arguments
from regard.runs.provenance import describe_run
from regard.runs.rank import is_main_process, num_processes
from regard.runs.work_dir import WorkDir, check_same_identity, open_work_dir

__all__ = ["DATA", "PARTS", "STATES", "TASK_END", "Progress", "learn"]

DATA = "REGARD_DATA"
"""The environment variable that names the folder of published files where a configuration does not."""
STATES = "states"
PARTS, PRODUCTS = (STATES,), (MODELS,)
"""What a comparison makes in its work folder, beside the journal: what it goes on with, and what it keeps."""
OF_THE_STREAM = (
    "data",
    "protocol",
    "samples_per_class",
    "max_eval_samples",
    "task_type",
    "missing_tasks",
    "instructions",
)
"""Fields that choose the rows of a stream by its name; a `Stream` has its rows."""


@dataclass(frozen=True)
class Progress:
    """How far a comparison is: the run at hand among all, how many tasks it has, and how far it is.

    Once a task is learnt and scored, `told` has the phase `TASK_END`.
    """

    method: str
    seed: int
    run: int
    runs: int
    tasks: int
    told: ProgressEvent


def learn(
    stream: str | Stream | LearnConfig = "stdlib-split",
    method: str | Sequence[str] | None = None,
    model: str | PreTrainedModel | Loaded | None = None,
    *,
    tokenizer: Any = None,
    seeds: Sequence[int] | None = None,
    work_dir: str | Path | None = None,
    resume: bool = False,
    save_models: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
    seed: int | Unset = UNSET,
    data: str | Unset | None = UNSET,
    order: str | Unset | None = UNSET,
    scale: str | Unset = UNSET,
    protocol: Literal["clean", "paper"] | Unset = UNSET,
    task_type: Literal["auto", "classification", "generation"] | Unset = UNSET,
    missing_tasks: Literal["refuse", "skip"] | Unset = UNSET,
    instructions: bool | Unset = UNSET,
    samples_per_class: int | Unset | None = UNSET,
    max_eval_samples: int | Unset | None = UNSET,
    length: int | Unset | None = UNSET,
    target_length: int | Unset | None = UNSET,
    batch_size: int | Unset | None = UNSET,
    micro_batch_size: int | Unset | None = UNSET,
    num_epochs: int | Unset | None = UNSET,
    max_steps: str | Sequence[str] | Unset | None = UNSET,
    learning_rate: float | Unset | None = UNSET,
    lr_scheduler_type: Literal["linear", "constant"] | Unset | None = UNSET,
    warmup_ratio: float | Unset | None = UNSET,
    weight_decay: float | Unset | None = UNSET,
    search_learning_rates: str | Unset | None = UNSET,
    num_probing_epochs: int | Unset | None = UNSET,
    probing_learning_rate: float | Unset | None = UNSET,
    precision: Literal["float32", "bfloat16"] | Unset | None = UNSET,
    head: Literal["labels"] | Unset | None = UNSET,
    lora_rank: int | Unset | None = UNSET,
    set: str | Sequence[str] | Unset = UNSET,
    diagnostic_samples: int | Unset = UNSET,
    save_steps: int | Unset | None = UNSET,
) -> LearnResult:
    """Run methods over a stream, task after task: a run for each method and seed, all with the same budget.

    Under `accelerate launch` all processes train together, and each returns the same.

    Args:
        stream: A stream by its name, a table or folder of your own, a `Stream`, or a configuration of everything. The
            arguments after `on_progress` are fields of `LearnConfig`, which change it.
        method: A name out of `regard.continual.methods.METHODS`, or several.
        model: A name, or a model.
        tokenizer: The tokenizer of a model.
        seeds: Seeds of rows, order, weights and batches, a run for each. None for that of the configuration.
        work_dir: Folder of finished runs and of the state of the current one, new or of an earlier comparison. It
            stays. None for a temporary one.
        resume: Go on with the comparison that was interrupted in `work_dir`, if there is one, to the same numbers.
        save_models: Keep in `work_dir` what each task has changed of the model, for `regard rollback`.
        on_progress: Called as tasks are trained.
        seed: The seed, if it is one.
        data: Folder of published files (default: $REGARD_DATA, else the hub).
        order: Paper (or 1), a number the stream knows it by, random (by the seed; default), or tasks as 2-0-1.
        scale: What rows, lengths, epochs and rates are, one of `SCALES`.
        protocol: Clean, or paper: nothing in common between splits is dropped.
        task_type: What is learnt: classification, generation (of answers), or auto (the first that the stream has).
        missing_tasks: Tasks whose files are not there: refuse, or skip.
        instructions: Put the task's definition before each text, in classification.
        samples_per_class: Training rows a class, at most.
        max_eval_samples: Test rows a task, at most, and as many dev rows.
        length: Tokens of a text, at most.
        target_length: Tokens of an answer that is written, at most.
        batch_size: Rows an update.
        micro_batch_size: Rows a forward (default: all).
        num_epochs: Epochs of training everything.
        max_steps: Steps of a stage on a task's own rows, at most, each TASK=STEPS; none.
        learning_rate: Of training everything, at its peak.
        lr_scheduler_type: Of the learning rate after the warm-up: linear (to 0), or constant.
        warmup_ratio: Share of a stage's steps in which the learning rate grows.
        weight_decay: AdamW's, of matrices.
        search_learning_rates: Learning rates apart by commas, of which the first task's dev rows choose.
        num_probing_epochs: Epochs of training the head alone.
        probing_learning_rate: Learning rate of the head alone.
        precision: Float32, or bfloat16 (autocast).
        head: Labels (a text's state against those of the labels' words), or none: the method's.
        lora_rank: Rank of low-rank adapters that are trained in place of the model.
        set: Settings of the method, each NAME=VALUE.
        diagnostic_samples: Dev rows a task for sinks, interference and gates; 0: nothing is diagnosed.
        save_steps: Steps between two checkpoints within a task (default: none).

    Returns:
        The accuracy matrix of every run, its cost, and its diagnostics.

    Raises:
        UserError: An argument cannot be, or `work_dir` holds something else.
    """
    config = _make_config(stream, method, model, explicit_arguments(locals(), LearnConfig))
    configs = [replace(one, seed=number) for number in _seeds(seeds, config) for one in split_methods(config)]
    own_stream = add_row_hashes(stream) if isinstance(stream, Stream) else None
    _join_processes()
    with open_work_dir(work_dir, command="learn", parts=PARTS, products=PRODUCTS, resume=resume, keep=True) as work:
        streams = {number: _read_stream(one, own_stream) for number, one in {one.seed: one for one in configs}.items()}
        text = next(iter(streams.values())).text
        loaded = _load_model(config, model, tokenizer, text=text)
        if work.can_resume() and not work.resume:  # which `start` deletes: first look for mistakes
            for one in configs[: len(split_methods(config))]:
                check_method(one, streams[one.seed], loaded)
        work.start(_identity(config, loaded, streams))
        results = {key: work.journal[key] for key in map(_key, configs) if key in work.journal}
        for one in configs:
            if _key(one) in results:
                check_same_identity({"tasks": results[_key(one)]["tasks"]}, {"tasks": task_hashes(streams[one.seed])})
        for number, one in enumerate(configs):
            if _key(one) not in results:
                report = _report_run(one, number, len(configs), len(streams[one.seed]), on_progress)
                results[_key(one)] = _run_and_keep(
                    one, streams[one.seed], loaded, work, save_models=save_models, report=report
                )
        models = work.folder / MODELS if save_models and work_dir is not None else None
        tables, metadata = _tables(configs, streams, results), _metadata(config, configs, streams, loaded, results)
        return LearnResult(
            accuracy_matrix=tables.pop("matrix"),
            **tables,
            metadata=metadata,
            models=models if models is not None and models.is_dir() else None,
        )


def _run_and_keep(
    config: LearnConfig,
    stream: Stream,
    loaded: Loaded,
    work: WorkDir,
    *,
    save_models: bool,
    report: Callable[[ProgressEvent], None] | None,
) -> Row:
    """Run one method with one seed, and write the result to the journal; its states are no longer needed then."""
    key = _key(config)
    result = run_method(
        config,
        stream,
        loaded,
        states=work.folder / STATES / key,
        models=work.folder / MODELS / key if save_models else None,
        resume=work.resume,
        tell=report,
    )
    with processes.raise_on_all_ranks():
        result = work.journal.add(key, result)
    if is_main_process():
        shutil.rmtree(work.folder / STATES / key, ignore_errors=True)
    return result


def _make_config(
    stream: str | Stream | LearnConfig, method: Any, model: Any, arguments: Mapping[str, Any]
) -> LearnConfig:
    """Return the configuration that the arguments of `learn` make."""
    said = {name: value for name, value in arguments.items() if name not in ("stream", "method", "model")}
    if method is not None:
        said["method"] = ",".join(map(str, method)) if isinstance(method, (list, tuple)) else method
    refused = [name for name in OF_THE_STREAM if isinstance(stream, Stream) and said.get(name) is not None]
    if refused:
        option = refused[0].replace("_", "-")
        raise UserError(f"{option}: expected none with a stream that is given, which has its rows")
    if isinstance(model, str):
        said["model"] = model
    if said.get("order") is None:
        said.pop("order", None)
        said |= {"order": AS_GIVEN} if isinstance(stream, Stream) else {}
    if isinstance(stream, LearnConfig):
        return stream.replace(**said)
    named = stream.name if isinstance(stream, Stream) else str(stream)
    if model is not None and not isinstance(model, str):
        said["model"] = getattr(model, "name", None) or type(model).__name__
    return LearnConfig.from_dict({"stream": named, **said})


def _seeds(seeds: Any, config: LearnConfig) -> tuple[int, ...]:
    found = (config.seed,) if seeds is None else tuple(seeds) if isinstance(seeds, (list, tuple, range)) else ()
    if not found or any(found.count(one) > 1 for one in found):
        raise UserError(f"seeds: expected a list of whole numbers, at least one and each once, got {seeds!r}")
    return found


def _load_model(config: LearnConfig, model: Any, tokenizer: Any, *, text: bool) -> Loaded:
    """The model; with the head of a language model where tasks are from text to text."""
    if model is None or isinstance(model, str):
        return load(config.model, dtype="float32", language_model=text)
    call = "regard.learn(stream, method, model, tokenizer=tokenizer)"
    return add_model_hash(as_loaded(model, tokenizer, to="teach", call=call))


def _read_stream(config: LearnConfig, own: Stream | None) -> Stream:
    """Return the stream of a configuration; one of the user's in its own order, or in that of the configuration."""
    if own is None:
        stream = config.read(os.environ.get(DATA) or None)
    elif config.order == AS_GIVEN:
        stream = own
    else:
        stream = own.reorder(parse_order(config.order, len(own), config.seed))
    config.check_tasks(stream)
    return stream


# -- where it is kept -----------------------------------------------------------------------------------


def _join_processes() -> None:
    """Join the other processes, if there are any, before the first of them waits for another."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise UserError("FSDP: expected processes that each hold the whole model, learn does not shard it")
    if num_processes() > 1 and not dist.is_initialized():
        PartialState(cpu=not torch.accelerator.is_available())


def _identity(config: LearnConfig, loaded: Loaded, streams: Mapping[int, Stream]) -> dict[str, Any]:
    """Return what every run of a comparison depends on. Methods and seeds may be added to it later."""
    fields = {name: value for name, value in config.identity().items() if name not in ("seed", "method", "set")}
    tasks = sorted(task.name for task in next(iter(streams.values())).tasks)
    return {"config": fields, "model": loaded.sha256, "tasks": tasks}


def _key(config: LearnConfig) -> str:
    """Return the name of a run: letters, digits and signs that a folder may have."""
    return "-".join(
        "".join(c if c.isalnum() or c in "+=." else "-" for c in part) for part in (config.label, str(config.seed))
    )


# -- what it comes to -----------------------------------------------------------------------------------


def _report_run(
    config: LearnConfig, number: int, runs: int, tasks: int, on_progress: Callable[[Progress], None] | None
) -> Callable[[ProgressEvent], None] | None:
    if on_progress is None:
        return None
    return lambda event: on_progress(Progress(config.label, config.seed, number + 1, runs, tasks, event))


def _tables(
    configs: Sequence[LearnConfig], streams: Mapping[int, Stream], results: Mapping[str, Row]
) -> dict[str, pd.DataFrame]:
    """Return the tables of all runs, one under the other."""
    return {
        name: make_table(
            name,
            [
                _run_columns(config, streams[config.seed]) | row
                for config in configs
                for row in results[_key(config)][name]
            ],
        )
        for name in TABLES
    }


def _run_columns(config: LearnConfig, stream: Stream) -> Row:
    """Return the columns that are the same in each row of a run."""
    return {"stream": stream.name, "method": config.label, "seed": config.seed, "order": _order(stream)}


def _order(stream: Stream) -> str:
    return "-".join(map(str, stream.order))


def _metadata(
    config: LearnConfig,
    configs: Sequence[LearnConfig],
    streams: Mapping[int, Stream],
    loaded: Loaded,
    results: Mapping[str, Row],
) -> dict[str, Any]:
    """Return where the numbers come from."""
    first = configs[0].seed
    rows = [results[_key(one)] for one in configs]
    return describe_run(
        replace(config, seed=first),
        runs=[
            _describe_one(one, streams[one.seed], row, is_first=one.seed == first)
            for one, row in zip(configs, rows, strict=True)
        ],
        stream=_describe_stream(streams[first]),
        model={"name": loaded.name, "sha256": loaded.sha256, "parameters": rows[0]["parameters"]},
        cost={
            "seconds": round(sum(row["seconds"] for row in rows), 1),
            "peak_memory_mib": max(row["peak_memory_mib"] for row in rows),
            "device": rows[0]["device"],
            "processes": num_processes(),
        },
    )


def _describe_one(config: LearnConfig, stream: Stream, result: Row, *, is_first: bool) -> dict[str, Any]:
    """Return what the metadata say of a run; what is the same for all seeds only of the first."""
    return {
        "key": _key(config),
        "method": config.label,
        "seed": config.seed,
        "order": _order(stream),
        "tasks": [task.name for task in stream.tasks],
        **{name: result[name] for name in ("learning_rate", "search", "settings", "seconds", "truncated")},
        **({"blocks": result["blocks"]} if result["blocks"] else {}),
        "warnings": [*result["warnings"], *(config.unused_rate() if is_first else [])],
    }


def _describe_stream(stream: Stream) -> dict[str, Any]:
    """Return what the metadata say of the stream."""
    return {
        "name": stream.name,
        "protocol": stream.protocol,
        "tasks": [
            {
                "name": task.name,
                "labels": list(task.labels),
                "rows": {split: len(task.split(split)) for split in ("train", "dev", "test")},
                "sha256": dict(task.sha256),
                "source": task.source,
                **({"metric": task.metric} if isinstance(task, TextTask) else {}),
            }
            for task in stream.tasks
        ],
        **{name: value for name, value in stream.metadata.items() if name != "tasks"},
    }
