"""Comparison of methods on a stream, task after task, and its work folder."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from regard.commands.learn import identity
from regard.commands.learn.base_model import check_named_model, check_trainable, load_model
from regard.commands.learn.config import AS_GIVEN, LearnConfig, split_methods
from regard.commands.learn.continued import CONTINUED, FinishedRun
from regard.commands.learn.heads import HEAD, OBSTACLE, choose_head, chosen_head, find_obstacle, warn_of_codes
from regard.commands.learn.idle import CLASSES
from regard.commands.learn.lengths import FITTED_TASKS, LENGTHS, choose_length
from regard.commands.learn.metrics import REFERENCES
from regard.commands.learn.one_run import TASK_END, Run, check_keys, check_method, run_method, task_hashes
from regard.commands.learn.progress import Progress, describe_progress
from regard.commands.learn.references import LORA, choose_reference_lora
from regard.commands.learn.result import MODELS, TABLES, LearnResult, make_table
from regard.continual.answer_metrics import warn_of_labels_alike
from regard.continual.learner import Row
from regard.continual.own_method import naming_own_code
from regard.continual.run_state import ProgressEvent
from regard.data.joined_streams import first_part
from regard.data.rows import add_row_hashes
from regard.data.stream import Stream, TextTask
from regard.data.streams import parse_order
from regard.data.tokenizers import tokenizer_hash, warn_of_unknown_in, warn_of_written
from regard.errors import UserError
from regard.models.pretrained import Loaded
from regard.runs import distributed as processes
from regard.runs.config import UNSET, Unset, describe_options, explicit_arguments
from regard.runs.progress import shown_in_notebook
from regard.runs.provenance import describe_run
from regard.runs.rank import is_main_process, num_processes
from regard.runs.work_dir import WorkDir, check_same_identity, find_log_dir, open_work_dir
from regard.training.placement import check_trackers
from regard.training.trackers import open_trackers

__all__ = ["DATA", "PARTS", "STATES", "TASK_END", "Progress", "learn"]

DATA = "REGARD_DATA"
"""Environment variable with the folder of published files, if the configuration has none."""
STATES = "states"
PARTS, PRODUCTS = (STATES,), (MODELS,)
"""What a comparison makes in its work folder, beside the journal: what it goes on with, and what it keeps."""
STREAM_FIELDS = (
    *("data", "protocol", "samples_per_class", "max_eval_samples"),
    *("task_type", "missing_tasks", "missing_values", "instructions"),
)
"""Fields that select the rows of a named stream; a `Stream` object has its rows."""


@shown_in_notebook(describe_progress)
@naming_own_code()
@describe_options(LearnConfig)
def learn(  # noqa: D417 - the options are described in the configuration
    stream: str | Stream | LearnConfig = "stdlib-split",
    method: str | Sequence[str] | None = None,
    model: str | Path | PreTrainedModel | Loaded | None = None,
    *,
    tokenizer: Any = None,
    seeds: Sequence[int] | None = None,
    work_dir: str | Path | None = None,
    resume: bool = False,
    after: str | Path | None = None,
    save_models: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
    adapter: str | Unset | None = UNSET,
    seed: int | Unset = UNSET,
    data: str | Unset | None = UNSET,
    order: str | Unset | None = UNSET,
    scale: str | Unset = UNSET,
    protocol: Literal["clean", "paper"] | Unset = UNSET,
    task_type: Literal["auto", "classification", "generation"] | Unset = UNSET,
    metric: str | Unset = UNSET,
    missing_tasks: Literal["refuse", "skip"] | Unset = UNSET,
    missing_values: Literal["skip", "skip-minus-one", "refuse"] | Unset = UNSET,
    instructions: bool | Unset = UNSET,
    samples_per_class: int | Unset | None = UNSET,
    max_eval_samples: int | Unset | None = UNSET,
    length: int | Unset | None = UNSET,
    target_length: int | Unset | None = UNSET,
    truncation_side: Literal["right", "middle", "left"] | Unset | None = UNSET,
    batch_size: int | Unset | None = UNSET,
    micro_batch_size: int | Unset | None = UNSET,
    num_epochs: int | Unset | None = UNSET,
    min_steps: int | Unset | None = UNSET,
    max_steps: int | str | Sequence[str] | Unset | None = UNSET,
    learning_rate: float | Unset | None = UNSET,
    lr_scheduler_type: Literal["linear", "constant"] | Unset | None = UNSET,
    warmup_ratio: float | Unset | None = UNSET,
    weight_decay: float | Unset | None = UNSET,
    search_learning_rates: str | Unset | None = UNSET,
    num_probing_epochs: int | Unset | None = UNSET,
    probing_learning_rate: float | Unset | None = UNSET,
    precision: Literal["float32", "bfloat16"] | Unset | None = UNSET,
    head: Literal["auto", "labels", "method"] | Unset = UNSET,
    lora_rank: int | Unset | None = UNSET,
    references: Literal["auto", "lora", "model"] | Unset = UNSET,
    set: str | Sequence[str] | Unset = UNSET,
    diagnostic_samples: int | Unset = UNSET,
    held_out: str | Unset | None = UNSET,
    held_out_samples: int | Unset = UNSET,
    evaluate: str | Unset | None = UNSET,
    trackers: str | Sequence[str] | Unset = UNSET,
    save_steps: int | Unset | None = UNSET,
) -> LearnResult:
    """Train methods on a stream, task after task: a run for each method and seed, all with the same budget.

    Under `accelerate launch` all processes train together, and each returns the same result.

    Args:
        stream: Name of a stream, a table or folder, a `Stream`, or a configuration. The arguments after
            `on_progress` are fields of `LearnConfig` and override it.
        method: A name from `regard.continual.methods.METHODS`, or several.
        model: A name or a model; of a `PeftModel` a copy with its adapters merged.
        tokenizer: The tokenizer of a model object.
        seeds: Seeds of sampling, task order, initialization and batches, one run each. None for the configuration's.
        work_dir: Folder of finished runs and of the state of the current one; it is kept. None for a temporary one.
        resume: Resume the comparison interrupted in `work_dir`, if any, with the same results.
        after: A finished run, its folder: its methods and seeds go on with the tasks of `stream`, which is the new
            tasks alone if it is named, and all tasks, those of the run first, as a `Stream`.
        save_models: Save the tasks' changes to the model in `work_dir`, for `regard rollback`.
        on_progress: Called with progress.

    Returns:
        Scores, cost and diagnostics of every run.

    Raises:
        UserError: An argument is invalid, or `work_dir` belongs to another run.
    """
    model = str(model) if isinstance(model, Path) else model
    arguments, finished = explicit_arguments(locals(), LearnConfig), None if after is None else FinishedRun.load(after)
    if seeds is not None and "seed" in arguments:
        raise UserError(f"seed: expected none beside seeds, got {arguments['seed']!r}")
    if finished is None:
        config = _make_config(stream, method, model, arguments)
    else:
        config, seeds = finished.configure(stream, method, seeds, arguments), finished.seeds
    by_method = split_methods(config)
    configs = [replace(run, seed=run_seed) for run_seed in _seeds(seeds, config) for run in by_method]
    own_stream = add_row_hashes(stream) if isinstance(stream, Stream) else None
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise UserError("FSDP: expected processes that each hold the whole model, learn does not shard it")
    check_trackers(config.trackers, work_dir)
    processes.join_processes()
    with (
        processes.naming_lost_rank(),
        open_work_dir(work_dir, command="learn", parts=PARTS, products=PRODUCTS, resume=resume, keep=True) as work,
    ):
        first_stream = _read_stream(configs[0], own_stream)
        config.warn_of_idle(*(() if first_stream.text else (CLASSES,)))
        check_named_model(config, model, text=first_stream.text)  # before rows are read again for other seeds
        streams = {run.seed: _read_stream(run, own_stream) for run in configs[len(by_method) :: len(by_method)]}
        streams = {configs[0].seed: first_stream, **streams}
        loaded = load_model(config, model, tokenizer, text=first_stream.text)
        warn_of_written((text for one in streams.values() for text in one.all_texts()), loaded.tokenizer)
        warn_of_unknown_in({task.name: list(task.all_texts()) for task in first_stream.tasks}, loaded.tokenizer)
        beyond = identity.hash_beyond(config)  # as it is before the first task
        tokenizer_sha256 = tokenizer_hash(loaded.tokenizer)
        if finished is not None:
            finished.check_model(loaded, tokenizer_sha256)
            finished.check_beyond(beyond)
        runs = _make_runs(configs, by_method, streams, loaded)
        check_keys(runs)
        plain = [run.config for run in runs[: len(by_method)] if run.lora is None and run.config.lora_rank is None]
        check_trainable(loaded.model, plain, text=first_stream.text)
        if finished is not None:
            runs = [finished.go_on(run) for run in runs]
        # Before `start` deletes an earlier state, and not after the hours of the methods before the last
        if not (work.resume and work.can_resume()):
            for run in runs[: len(by_method)] if len(by_method) > 1 or work.can_resume() else ():
                check_method(run, loaded)
        continued = {} if finished is None else {CONTINUED: finished.record()}
        work.start(
            {**identity.run_identity(config, loaded, runs[0].stream, beyond, tokenizer_sha256), **continued},
            identity.REASONS,
            identity.NEWER,
        )
        if work.resume and is_main_process():
            identity.warn_of_interrupted([run.key for run in runs], work.folder / STATES, work.journal)
        results = {run.key: _journaled(run, work) for run in runs if run.key in work.journal}
        with _open_trackers(config, loaded, work_dir, resume=work.resume) as log:
            report_all = _add_log(on_progress, log) if config.trackers else on_progress
            for number, run in enumerate(runs, 1):
                if run.key not in results:
                    report = _report_run(run, number, len(runs), report_all)
                    results[run.key] = _run_and_keep(run, loaded, work, save_models=save_models, report=report)
        models = work.folder / MODELS if save_models and work_dir is not None else None
        rows = {name: [run.columns | row for run in runs for row in results[run.key][name]] for name in TABLES}
        tables = {name: make_table(name, table_rows) for name, table_rows in rows.items()}
        return LearnResult(
            accuracy_matrix=tables.pop("matrix"),
            **tables,
            metadata=_describe(config, runs, loaded, results, tokenizer_sha256)
            | ({identity.BEYOND: beyond} if beyond else {})
            | continued,
            models=models if models is not None and models.is_dir() else None,
        )


def _make_runs(
    configs: Sequence[LearnConfig], by_method: Sequence[LearnConfig], streams: Mapping[int, Stream], loaded: Loaded
) -> list[Run]:
    """Return the runs, a configuration each, with the length and the head that all methods share for a seed."""
    lengths = {seed: choose_length(by_method, first_part(stream), loaded) for seed, stream in streams.items()}
    lora = choose_reference_lora(by_method, loaded.model)
    heads = {seed: choose_head(by_method, first_part(stream), loaded) for seed, stream in streams.items()}
    return [
        Run(
            replace(config, length=lengths[config.seed], head=heads[config.seed]),
            streams[config.seed],
            fitted_tasks=0 if config.length is not None else len(first_part(streams[config.seed])),
            lora=lora if config.method in REFERENCES else None,
        )
        for config in configs
    ]


def _journaled(run: Run, work: WorkDir) -> Row:
    """Return the result of a finished run. UserError if it was of other tasks, adapters, settings or another head."""
    result: Row = work.journal[run.key]
    settings, recorded = run.config.make_method().config.among(result["settings"])
    now = {"tasks": task_hashes(run.stream), LORA: run.lora, HEAD: chosen_head(run.config)}
    before = {name: result[name] for name in now}
    check_same_identity({**before, "settings": recorded}, {**now, "settings": settings})
    return result


def _report_run(
    run: Run, number: int, num_runs: int, on_progress: Callable[[Progress], None] | None
) -> Callable[[ProgressEvent], None] | None:
    if on_progress is None:
        return None
    config, num_tasks = run.config, len(run.stream)
    return lambda event: on_progress(Progress(config.label, config.seed, number, num_runs, num_tasks, event))


Log = Callable[[Mapping[str, float], int], None]


def _open_trackers(
    config: LearnConfig, loaded: Loaded, work_dir: str | Path | None, *, resume: bool
) -> AbstractContextManager[Log]:
    device = "cpu" if loaded.model.device.type == "cpu" else None
    folder = find_log_dir(work_dir, resume=resume) if config.trackers else None
    return open_trackers(config.trackers, config.to_dict(), device=device, folder=folder)


def _add_log(on_progress: Callable[[Progress], None] | None, log: Log) -> Callable[[Progress], None]:
    """Return a callback that also sends the scores after each task to trackers; a step is a task of all runs."""

    def report(progress: Progress) -> None:
        if progress.event.phase == TASK_END:
            name = f"{progress.method}-{progress.seed}"
            numbers = {f"{name}/{key}": value for key, value in progress.event.metrics.items()}
            log(numbers, progress.num_finished)
        if on_progress is not None:
            on_progress(progress)

    return report


def _run_and_keep(
    run: Run, loaded: Loaded, work: WorkDir, *, save_models: bool, report: Callable[[ProgressEvent], None] | None
) -> Row:
    """Run one method with one seed, write the result to the journal, and delete its states."""
    states, models = work.folder / STATES / run.key, work.folder / MODELS / run.key if save_models else None
    result = run_method(run, loaded, states=states, models=models, resume=work.resume, tell=report)
    with processes.raise_on_all_ranks():
        result = work.journal.add(run.key, result)
    if is_main_process():
        shutil.rmtree(states, ignore_errors=True)
    return result


def _make_config(stream: Any, method: Any, model: Any, arguments: Mapping[str, Any]) -> LearnConfig:
    changes = {name: value for name, value in arguments.items() if name not in ("stream", "method", "model")}
    if method is not None:
        changes["method"] = ",".join(map(str, method)) if isinstance(method, (list, tuple)) else method
    if isinstance(model, str):
        changes["model"] = model
    if changes.get("order") is None:
        changes.pop("order", None)
    if isinstance(stream, LearnConfig):
        return stream.replace(**changes)
    if model is not None and not isinstance(model, str):
        changes["model"] = getattr(model, "name", None) or type(model).__name__
    if not isinstance(stream, (str, Path, Stream)):
        got = f"got a {type(stream).__name__}: write it to a file first (.parquet)"
        raise UserError(f"stream: expected a name, a table, a folder or a regard.data.stream.Stream, {got}")
    if not isinstance(stream, Stream):
        return LearnConfig.from_dict({"stream": str(stream), **changes})
    for name in STREAM_FIELDS:
        if changes.get(name) is not None:
            raise UserError(f"{name.replace('_', '-')} cannot be used with a Stream object, which has its own rows")
    return LearnConfig.from_dict({"stream": stream.name, "order": AS_GIVEN, **changes})


def _seeds(seeds: Any, config: LearnConfig) -> tuple[int, ...]:
    values = (config.seed,) if seeds is None else tuple(seeds) if isinstance(seeds, (list, tuple, range)) else ()
    if not values or any(values.count(value) > 1 for value in values):
        raise UserError(f"seeds: expected a list of whole numbers, at least one and each once, got {seeds!r}")
    return values


def _read_stream(config: LearnConfig, user_stream: Stream | None) -> Stream:
    """Read the stream, or reorder the user's own."""
    if user_stream is None:
        stream = config.read(os.environ.get(DATA) or None)
    elif config.order == AS_GIVEN:
        stream = user_stream
    else:
        stream = user_stream.reorder(parse_order(config.order, len(user_stream), config.seed))
    config.check_tasks(stream)
    warn_of_labels_alike(stream)
    return stream


def _describe(
    config: LearnConfig, runs: Sequence[Run], loaded: Loaded, results: Mapping[str, Row], tokenizer: str
) -> dict[str, Any]:
    first_seed, run_results = runs[0].config.seed, [results[run.key] for run in runs]
    with_labels = config.head != "auto" or any(result[HEAD] for result in run_results)
    configs = [run.config for run in runs if run.config.seed == first_seed]
    obstacle = "" if with_labels else find_obstacle(configs, runs[0].stream, loaded)
    return describe_run(
        replace(config, seed=first_seed),
        runs=[
            _describe_one(
                run,
                result,
                [*run.config.unused_rate(), *warn_of_codes(config.head, run.config, run.stream, loaded)]
                if run.config.seed == first_seed
                else [],
            )
            | ({OBSTACLE: obstacle} if obstacle else {})
            for run, result in zip(runs, run_results, strict=True)
        ],
        stream=_describe_stream(runs[0].stream),
        model=identity.describe_model(loaded, tokenizer) | {"parameters": run_results[0]["parameters"]},
        cost={
            "seconds": round(sum(result["seconds"] for result in run_results), 1),
            "peak_memory_mib": max(result["peak_memory_mib"] for result in run_results),
            "device": run_results[0]["device"],
            "processes": num_processes(),
        },
    )


def _describe_one(run: Run, result: Row, warnings: Sequence[str]) -> dict[str, Any]:
    """Return a run's metadata, with more `warnings` than it gave itself."""
    return {
        "key": run.key,
        **{name: run.columns[name] for name in ("method", "seed", "order")},
        "tasks": [task.name for task in run.stream.tasks],
        **{name: result[name] for name in ("learning_rate", "settings", "seconds", "truncated")},
        "search": [*run.search, *result["search"]],
        **{
            name: result[name]
            for name in (*LENGTHS, "fitted", FITTED_TASKS, "truncation", "not_learnt")
            if name in result
        },
        **{name: result[name] for name in (LORA, HEAD, "own_rate", "blocks") if result.get(name)},
        "warnings": [*result["warnings"], *warnings],
    }


def _describe_stream(stream: Stream) -> dict[str, Any]:
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
