"""The fourth verb: learn task after task, and see what is kept of each."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from accelerate import PartialState

from regard.commands.learn.config import AS_GIVEN, RESUMABLE_FIELDS, LearnConfig, split_methods
from regard.commands.learn.one_run import TASK_END, Row, run_method, task_hashes
from regard.commands.learn.result import MODELS, TABLES, VERB, LearnResult, make_table
from regard.continual.models import add_model_hash
from regard.continual.run_state import ProgressEvent
from regard.data.rows import add_row_hashes
from regard.data.stream import Stream, TextTask
from regard.data.streams import parse_order
from regard.errors import UserError
from regard.models.pretrained import Loaded, as_loaded, load
from regard.runs import distributed as processes
from regard.runs.journal import ENTRIES, Journal, check_same
from regard.runs.provenance import now, regard_version, versions

__all__ = ["DATA", "JOURNAL", "STATES", "TASK_END", "Progress", "can_resume", "learn"]

DATA = "REGARD_DATA"
"""The environment variable that names the folder of published files where a course does not."""
JOURNAL, STATES = "journal", "states"
OF_THE_STREAM = (
    "data",
    "protocol",
    "samples_per_class",
    "max_eval_samples",
    "task_type",
    "missing_tasks",
    "instructions",
)
"""Fields of a course that say what rows a stream has, which one that is given has already."""


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
    model: Any = None,
    *,
    tokenizer: Any = None,
    seeds: Sequence[int] | None = None,
    work_dir: str | Path | None = None,
    resume: bool = False,
    save_models: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
    **changes: Any,
) -> LearnResult:
    """What methods make of a stream, task after task: a run for each method and seed, all with the same budget.

    `stream` is a name, a table or folder of your own, a `Stream`, or a `LearnConfig` that says everything. `method` is
    a name out of `regard.continual.methods.METHODS`, or several. `model` is a name, or a model with its `tokenizer`.
    `changes` are fields of `LearnConfig`; without `order` a `Stream` comes in the order that it has, and a stream by
    its name in one that is drawn by the seed, as both do with "random". `work_dir` is where finished runs, and the
    state of the one at hand, are kept: with `resume` a comparison that was broken off goes on there, to the same
    numbers. With `save_models` what each task has changed of the model is kept there too, for `regard rollback`.

    Under `accelerate launch` all processes train together, and each returns the same. Raises UserError.
    """
    course = _course(stream, method, model, changes)
    courses = [replace(one, seed=seed) for seed in _seeds(seeds, course) for one in split_methods(course)]
    own = add_row_hashes(stream) if isinstance(stream, Stream) else None
    _together()
    with _folder(work_dir) as place:
        streams = {seed: _stream(one, own) for seed, one in {one.seed: one for one in courses}.items()}
        text = next(iter(streams.values())).text
        loaded = _loaded(course, model, tokenizer, text=text)
        journal = _journal(place, course, loaded, streams, resume=resume)
        found = {key: journal[key] for key in map(_key, courses) if key in journal}
        for one in courses:
            if _key(one) in found:
                check_same({"tasks": found[_key(one)]["tasks"]}, {"tasks": task_hashes(streams[one.seed])})
        for number, one in enumerate(courses):
            key, tell = _key(one), _telling(one, number, len(courses), len(streams[one.seed]), on_progress)
            if key not in found:
                result = run_method(
                    one,
                    streams[one.seed],
                    loaded,
                    states=place / STATES / key,
                    models=place / MODELS / key if save_models else None,
                    resume=resume,
                    tell=tell,
                )
                with processes.raise_on_all_ranks():
                    found[key] = journal.add(key, result) if processes.is_main_process() else result
                if processes.is_main_process():
                    shutil.rmtree(place / STATES / key, ignore_errors=True)
        models = place / MODELS if save_models and work_dir is not None and (place / MODELS).is_dir() else None
        tables, record = _tables(courses, streams, found), _record(course, courses, streams, loaded, found)
        return LearnResult(accuracy_matrix=tables.pop("matrix"), **tables, metadata=record, models=models)


def _course(stream: str | Stream | LearnConfig, method: Any, model: Any, changes: Mapping[str, Any]) -> LearnConfig:
    """The course that is asked for."""
    said = dict(changes)
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


def _seeds(seeds: Any, course: LearnConfig) -> tuple[int, ...]:
    found = (course.seed,) if seeds is None else tuple(seeds) if isinstance(seeds, (list, tuple, range)) else ()
    if not found or any(found.count(one) > 1 for one in found):
        raise UserError(f"seeds: expected a list of whole numbers, at least one and each once, got {seeds!r}")
    return found


def _loaded(course: LearnConfig, model: Any, tokenizer: Any, *, text: bool) -> Loaded:
    """The model; with the head of a language model where tasks are from text to text."""
    if model is None or isinstance(model, str):
        return load(course.model, dtype="float32", language_model=text)
    call = "regard.learn(stream, method, model, tokenizer=tokenizer)"
    return add_model_hash(as_loaded(model, tokenizer, to="teach", call=call))


def _stream(course: LearnConfig, own: Stream | None) -> Stream:
    """The stream of a course; one that is given in its own order, or in that which the course says."""
    if own is None:
        found = course.read(os.environ.get(DATA) or None)
    elif course.order == AS_GIVEN:
        found = own
    else:
        found = own.reorder(parse_order(course.order, len(own), course.seed))
    course.check_tasks(found)
    return found


# -- where it is kept -----------------------------------------------------------------------------------


def _together() -> None:
    """Join the other processes, if there are any, before the first of them waits for another."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise UserError("FSDP: expected processes that each hold the whole model, learn does not shard it")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        PartialState(cpu=not torch.accelerator.is_available())


@contextlib.contextmanager
def _folder(work: str | Path | None) -> Iterator[Path]:
    if work is not None:
        yield Path(work)
        return
    with tempfile.TemporaryDirectory(prefix="regard-") as temporary:
        yield Path(temporary)


def _journal(
    place: Path, course: LearnConfig, loaded: Loaded, streams: Mapping[int, Stream], *, resume: bool
) -> Journal:
    """The finished runs of a comparison. Raises UserError if another course, stream or model began it."""
    bound = {
        name: value
        for name, value in course.to_dict().items()
        if name not in {*RESUMABLE_FIELDS, "seed", "method", "set"}
    }
    tasks = sorted(task.name for task in next(iter(streams.values())).tasks)
    about = {"course": bound, "model": loaded.sha256, "tasks": tasks}
    with processes.raise_on_all_ranks():
        if processes.is_main_process():
            for part in () if resume else (JOURNAL, STATES, MODELS):
                shutil.rmtree(place / part, ignore_errors=True)
            Journal(place / JOURNAL, about, resume=resume)
    return Journal(place / JOURNAL, about, resume=True)


def can_resume(work: Path) -> bool:
    """Whether a comparison that was broken off has left something there to go on with."""
    entries = work / JOURNAL / ENTRIES
    return entries.is_file() or any(one.is_file() for one in (work / STATES).rglob("*"))


def _key(course: LearnConfig) -> str:
    """The name of a run: letters, digits and signs that a folder may have."""
    return "-".join(
        "".join(c if c.isalnum() or c in "+=." else "-" for c in part) for part in (course.label, str(course.seed))
    )


# -- what it comes to -----------------------------------------------------------------------------------


def _telling(
    course: LearnConfig, number: int, runs: int, tasks: int, on_progress: Callable[[Progress], None] | None
) -> Callable[[ProgressEvent], None] | None:
    if on_progress is None:
        return None
    return lambda told: on_progress(Progress(course.label, course.seed, number + 1, runs, tasks, told))


def _tables(
    courses: Sequence[LearnConfig], streams: Mapping[int, Stream], found: Mapping[str, Row]
) -> dict[str, pd.DataFrame]:
    """The tables of all runs, one under the other."""
    return {
        name: make_table(
            name, [_named(one, streams[one.seed]) | row for one in courses for row in _rows(found, one, name)]
        )
        for name in TABLES
    }


def _rows(found: Mapping[str, Row], course: LearnConfig, name: str) -> list[Row]:
    """The rows of a table of a run; none where an earlier version, which had no such table, has made it."""
    rows: list[Row] = found[_key(course)].get(name, [])
    return rows


def _named(course: LearnConfig, stream: Stream) -> Row:
    """What each row of a run's tables says."""
    return {"stream": stream.name, "method": course.label, "seed": course.seed, "order": _order(stream)}


def _order(stream: Stream) -> str:
    return "-".join(map(str, stream.order))


def _record(
    course: LearnConfig,
    courses: Sequence[LearnConfig],
    streams: Mapping[int, Stream],
    loaded: Loaded,
    found: Mapping[str, Row],
) -> dict[str, Any]:
    """Where the numbers come from."""
    stream = streams[courses[0].seed]
    results = [found[_key(one)] for one in courses]
    return {
        "regard": regard_version(),
        "verb": VERB,
        "created": now(),
        "course": replace(course, seed=courses[0].seed).to_dict(),
        "runs": [
            {
                "key": _key(one),
                "method": one.label,
                "seed": one.seed,
                "order": _order(streams[one.seed]),
                "tasks": [task.name for task in streams[one.seed].tasks],
                **{name: result[name] for name in ("learning_rate", "search", "settings", "seconds", "truncated")},
                **({"blocks": result["blocks"]} if result.get("blocks") else {}),
                "warnings": [*result.get("warnings", []), *(one.unused_rate() if one.seed == courses[0].seed else [])],
            }
            for one, result in zip(courses, results, strict=True)
        ],
        "stream": {
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
        },
        "model": {"name": loaded.name, "sha256": loaded.sha256, "parameters": results[0]["parameters"]},
        "versions": versions(),
        "cost": {
            "seconds": round(sum(one["seconds"] for one in results), 1),
            "peak_memory_mib": max(one["peak_memory_mib"] for one in results),
            "device": results[0]["device"],
            "processes": int(os.environ.get("WORLD_SIZE", "1")),
        },
    }
