"""Several models and tasks: each pair a run of its own, one after another or at once, and one result over all."""

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from regard.commands.replace.config import ReplaceConfig
from regard.commands.replace.page import several_page
from regard.commands.replace.result import ReplaceResult
from regard.data.files import hash_path
from regard.errors import UserError
from regard.runs.arguments import file_slug
from regard.runs.launchers import Job, JobEvent, Launcher, run_jobs
from regard.runs.output_dir import write_file
from regard.runs.progress import OnProgress, ProgressEvent
from regard.runs.provenance import describe_run
from regard.runs.result import read_metadata
from regard.runs.work_dir import open_work_dir

RUNS = "runs"
PARTS = (RUNS,)
"""What several runs make in their work folder."""


@dataclass(frozen=True)
class Pair:
    """A model and a task, and the name of their folder."""

    model: str
    task: str
    key: str


@dataclass(frozen=True, repr=False)
class SeveralResult(ReplaceResult):
    """The scores of several runs; each run with its heads, cost and page is in a folder below `runs`.

    Attributes:
        folders: The runs to be copied, by their names.
    """

    folders: Mapping[str, Path] = field(default_factory=dict)

    def page(self) -> str:
        return several_page(self.scores, self.cost, self.metadata)

    def write_artifacts(self, folder: Path) -> None:
        super().write_artifacts(folder)
        for name, run in self.folders.items():
            shutil.copytree(run, folder / RUNS / name)


def make_pairs(models: Sequence[str], tasks: Sequence[str]) -> list[Pair]:
    """Return each model with each task. Raises UserError for one that is given twice, or two files of one name."""
    for name, values in (("model", models), ("task", [Path(task).name for task in tasks])):
        if not all(values):
            raise UserError(f"{name}: expected names apart by commas, got an empty one")
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:
            raise UserError(f"{name}: expected each once, got {twice[0]} twice")
    keys = Counter[str]()
    pairs = []
    for model in models:
        for task in tasks:
            key = f"{file_slug(model)}-{file_slug(Path(task).stem)}"
            keys[key] += 1
            pairs.append(Pair(model, task, key if keys[key] == 1 else f"{key}-{keys[key]}"))
    return pairs


def replace_several(
    pairs: Sequence[Pair],
    config: ReplaceConfig,
    arguments: Sequence[str],
    engine: Launcher,
    work_dir: Path,
    *,
    resume: bool,
    on_progress: OnProgress,
) -> SeveralResult:
    """Run `regard replace` for each pair in a process of its own, and join the results.

    Args:
        pairs: What is run.
        config: The options of all runs.
        arguments: Further options of each command line.
        engine: Where they run.
        work_dir: Where the runs are kept until all are done.
        resume: Keep finished runs, and go on with the others.
        on_progress: Called as runs end.

    Raises:
        UserError: Some runs failed; the others are kept.
    """
    identity = {"pairs": [vars(pair) for pair in pairs], "config": config.to_dict(), "arguments": list(arguments)}
    identity["data"] = {pair.task: hash_path(path) for pair in pairs if (path := Path(pair.task)).is_file()}
    with open_work_dir(work_dir, command=config.command, parts=PARTS, resume=resume, keep=True) as work:
        work.start(identity)
        folder = work.folder.resolve() / RUNS
        write_file(folder / "config.json", json.dumps(config.to_dict(), indent=1) + "\n")
        by_key = {pair.key: pair for pair in pairs}
        jobs = [_job(pair, folder, arguments) for pair in pairs if not is_finished(folder / pair.key)]
        ended = len(pairs) - len(jobs)

        def report(event: JobEvent) -> None:
            nonlocal ended
            ended += event.kind == "finished"
            pair = by_key[event.key]
            note = f"{pair.task} with {pair.model}: {event.error}" if event.error else ""
            name = f"{pair.task} with {pair.model}, {event.kind}"
            on_progress(ProgressEvent(phase=name, step=ended, steps=len(pairs), note=note, milestone=True))

        errors = run_jobs(jobs, engine, finished=lambda key: is_finished(folder / key), retries=0, on_event=report)
        if errors:
            listed = "; ".join(
                f"{by_key[key].task} with {by_key[key].model} ({error})" for key, error in errors.items()
            )
            raise UserError(f"{len(errors)} of {len(pairs)} runs failed: {listed}. --resume tries them again")
        return join_results({pair.key: folder / pair.key for pair in pairs}, config)


def join_results(folders: Mapping[str, Path], config: ReplaceConfig) -> SeveralResult:
    """Return the scores of finished runs as one result, which copies their folders when it is saved."""
    runs = {key: ReplaceResult.load(folder) for key, folder in folders.items()}
    first = next(iter(runs.values()))
    models = list(dict.fromkeys(str(run.metadata["model"]["name"]) for run in runs.values()))
    tasks = list(dict.fromkeys(str(run.metadata["data"]["task"]) for run in runs.values()))
    parts = ("model", "data", "config", "cost")
    metadata = describe_run(
        config,
        model={"name": ", ".join(models)},
        data={"task": ", ".join(tasks)},
        runs=[{"folder": f"{RUNS}/{key}", **{part: run.metadata[part] for part in parts}} for key, run in runs.items()],
        cost={"seconds": round(sum(run.metadata["cost"]["seconds"] for run in runs.values()), 3)},
    )
    scores = pd.concat([run.scores for run in runs.values()], ignore_index=True)
    return SeveralResult(scores, first.heads.iloc[:0], first.cost.iloc[:0], metadata, folders=dict(folders))


def _job(pair: Pair, folder: Path, arguments: Sequence[str]) -> Job:
    options: tuple[Any, ...] = (pair.model, "--task", pair.task, "--config", folder / "config.json", *arguments)
    line = ("-m", "regard", ReplaceConfig.command, *options, "--out", folder / pair.key, "--resume", "--overwrite")
    return Job(pair.key, tuple(map(str, line)), str(Path.cwd()), str(folder / f"{pair.key}.log"))


def is_finished(folder: Path) -> bool:
    """Return whether a folder holds a finished run."""
    try:
        read_metadata(folder, ReplaceConfig.command)
    except UserError:
        return False
    return True
