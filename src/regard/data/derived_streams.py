"""A stream of tasks sampled from a folder."""

from pathlib import Path

from regard.data.benchmarks import SUPER_NI
from regard.data.instructions import candidate_folders, find_task_files, read_instruction_task
from regard.data.rows import RawTask, hash_rank
from regard.data.stream import Protocol, Stream
from regard.data.streams import assemble_stream, check_seed
from regard.errors import UserError, check_int

MIN_ROWS = 20  # tasks of a folder with fewer rows are skipped


def sample_instruction_tasks(
    folder: str | Path,
    count: int,
    seed: int = 0,
    *,
    samples_per_task: int | None = 1000,
    max_eval_samples: int | None = 100,
    protocol: Protocol = "clean",
) -> Stream:
    """Sample text-to-text tasks from a folder of SuperNI files; a larger sample starts with the same tasks.

    Tasks with fewer than `MIN_ROWS` rows are skipped, and `metadata["passed_over"]` names them. The folder has one file
    per task (task*.json, with a Definition and Instances), or a folder of train, dev and test per task.
    """
    check_seed(seed)
    check_int("tasks", count, least=1)
    names = _list_tasks(Path(folder))
    raw: list[RawTask] = []
    skipped: list[str] = []
    for name in sorted(names, key=lambda name: hash_rank("tasks", seed, name)):
        if len(raw) == count:
            break
        task = read_instruction_task(name, find_task_files(Path(folder), SUPER_NI, name), SUPER_NI)
        if sum(map(len, task.by_split().values())) < MIN_ROWS:
            skipped.append(name)
        else:
            raw.append(task)
    if len(raw) < count:
        available = f"{len(names)} of which {len(raw)} have at least {MIN_ROWS} rows" if skipped else len(raw)
        raise UserError(f"tasks: expected {count} tasks in {folder}, there are {available}")
    return assemble_stream(
        f"superni-{count}",
        raw,
        metric=SUPER_NI.metric,
        samples_per_class=[samples_per_task] * count,
        max_eval_samples=max_eval_samples,
        seed=seed,
        protocol=protocol,
        dev_is_test=True,
        metadata={"published": None, "task_type": "generation", "passed_over": tuple(skipped)},
    )


def _list_tasks(folder: Path) -> list[str]:
    for root in candidate_folders(folder, SUPER_NI):
        if not root.is_dir():
            continue
        files = {path.name.removesuffix(".gz").removesuffix(".json") for path in root.glob("task*.json*")}
        folders = {path.name for path in root.iterdir() if path.is_dir()}
        if names := sorted(name for name in files | folders if find_task_files(folder, SUPER_NI, name)):
            return names
    raise UserError(f"tasks: expected files task*.json, or a folder of train.json for each task, in {folder}; none is")
