"""SAPT against other methods (arXiv 2401.08295) with a small encoder, at the scale of a laptop: a run for each row.

    python -m experiments.sapt.run ORDER --data DIR [--rows sapt,o-lora] [--seeds 42,1,2] [--work DIR]

ORDER is 3 or 4, of the tasks of the Long Sequence benchmark that are in DIR, each text behind its instruction, as
published. MiniLM-L6 with the label-text head: no task has a head of its own, and none is told of at test. At most 120
training rows a task, classes alike, and 40 test rows, drawn by the seed; 72 tokens a text; blocks of rank 8 on queries
and values; 4 epochs in batches of 16 at 2e-3, in bfloat16. SAPT's variants are run in order 3 alone. A run takes two
to five minutes on one core: `sapt`, `joint`, `separate` and the plain baselines with three seeds some two hours on two,
all rows twice that. Finished runs are kept in `--work` and not made again.
"""

import dataclasses
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from experiments.common.method_runs import earlier_settings
from experiments.common.runs import Case, file_name, make_missing, origin
from regard.continual.gate import measure_gate
from regard.continual.learner import Learner
from regard.continual.methods import method_named
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import RunState
from regard.continual.training_phase import TrainingBudget
from regard.data.stream import Stream
from regard.data.streams import read_stream
from regard.models.heads import HeadName
from regard.models.pretrained import Loaded, load

STREAM = "long-sequence"
ORDERS = ("3", "4")
SEEDS = (42, 1, 2)
TRAIN, EVALUATED, LOOKED_AT = 120, 40, 40
RANK, ALPHA = 8, 32
BUDGET = TrainingBudget(
    num_epochs=4, learning_rate=2e-3, batch_size=16, length=72, precision="bfloat16", weight_decay=0.0
)
SUMMED = 5e-4
"""The rate of methods that add frozen blocks up: at the others' all texts have the same state in the end."""
STORED = {"memory_size": 100}
PSEUDO = "sapt_pseudo/long_t5/Long_Sequence"
"""Where, below the folder of data, the samples are that SAPT's authors published."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        method: The method.
        settings: Its settings that differ from their defaults.
        lora: Whether to train LoRA with a method that has none of its own.
        rate: Learning rate of a method for which that of the others is too high.
    """

    method: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lora: bool = False
    rate: float | None = None


def learnt(settings: Mapping[str, Any] | None = None, method: str = "sapt") -> Row:
    """Return a row of SAPT with the router that the paper trains, and adapters that begin as the last one."""
    settings = settings or {}
    begins = {} if settings.get("gate") == "published" else {"init": "last"}
    return Row(method, {"router": "attention", "query": "embeddings", **begins, **settings})


ROWS: dict[str, Row] = {
    "sapt": learnt(STORED),
    "sapt, density": learnt({**STORED, "reflection": "density"}),
    "sapt, published samples": learnt({**STORED, "reflection": "generated", "pseudo_samples_dir": PSEUDO}),
    "sapt, without reflection": learnt({"reflection": "none"}),
    "sapt, gate published": learnt({**STORED, "gate": "published"}),
    "sapt, gate published, λ 1": learnt({**STORED, "gate": "published", "reflection_weight": 1.0}),
    "sapt, gate not opened ahead": learnt({**STORED, "router_warmup_steps": 0}),
    "sapt, begun at the best": learnt({**STORED, "init": "best"}),
    "sapt, begun at nothing": learnt({**STORED, "init": "nothing"}),
    "sapt, gate held": learnt({**STORED, "freeze_router": True}),
    "sapt, not aligned": learnt({**STORED, "joint_training": False}),
    "sapt, 3 vectors a task": learnt(),
    "sequential-lora": Row("sequential-lora"),
    "incremental-lora": Row("incremental-lora", rate=SUMMED),
    "replay-lora": Row("replay-lora"),
    "replay-lora, 1400 texts": Row("replay-lora", {"memory_size": 1400}),
    "o-lora": Row("o-lora", rate=SUMMED),
    "n-lora": Row("n-lora", {"penalized_product": "released", "sparsity_weight": 0.4}, rate=SUMMED),
    "inflora": Row("inflora", rate=SUMMED),
    "migu": Row("migu"),
    "slao": Row("slao"),
    "gainlora": Row("gainlora"),
    "seekr": Row("seekr"),
    "osf": Row("osf", rate=1e-4),
    "l2p": Row("l2p", {"learning_rate": 2e-3}),
    "epi": Row("epi", {"shrinkage": 0.0}),
    "progprompt": Row("progprompt", {"num_virtual_tokens": 5, "learning_rate": 1e-2}),
    "separate": Row("separate", lora=True),
    "joint": Row("joint", lora=True),
}


def list_rows(order: str) -> list[str]:
    """Return the rows of an order: all of the first, and no variants of the other."""
    return [row for row in ROWS if order == ORDERS[0] or ", " not in row]


def read_tasks(order: str, seed: int, data: str, *, instructions: bool = True, train: int = TRAIN) -> Stream:
    """Read the available tasks in a published order, at most `train` training rows of each sampled by the seed."""
    stream = read_stream(
        STREAM,
        data,
        samples_per_class=train,
        max_eval_samples=EVALUATED,
        order=order,
        seed=seed,
        task_type="classification",
        missing_tasks="skip",
        instructions=instructions,
    )
    return dataclasses.replace(stream, tasks=tuple(_limit_rows(task, train) for task in stream.tasks))


def _limit_rows(task: Any, train: int) -> Any:
    """Return the task with at most `train` training rows, balanced by class."""
    rows = select_balanced(task.train.labels, train // len(task.labels))
    texts, labels = (tuple(column[row] for row in rows) for column in (task.train.texts, task.train.labels))
    return dataclasses.replace(task, train=dataclasses.replace(task.train, texts=texts, labels=labels))


def select_balanced(labels: Sequence[Any], limit: int) -> list[int]:
    """Return the first rows of each label, at most `limit` and at least one each."""
    counts, rows = Counter[Any](), []
    for row, label in enumerate(labels):
        counts[label] += 1
        if counts[label] <= max(1, limit):
            rows.append(row)
    return rows


def run_row(
    of: Row,
    tasks: Stream,
    seed: int,
    loaded: Loaded,
    data: str,
    budget: TrainingBudget = BUDGET,
    *,
    first: int | None = None,
    looked_at: int = LOOKED_AT,
) -> RunState:
    """Run a row over tasks.

    Args:
        of: The row.
        tasks: Tasks of the head and of the returned learner.
        seed: Seed of the run.
        loaded: The model.
        data: Folder of published files.
        budget: Training budget.
        first: Train on the first tasks only.
        looked_at: Rows a task on which the gate is recorded; 0 for none.
    """
    method_class = method_named(of.method)
    settings = dict(of.settings)
    if "pseudo_samples_dir" in settings:
        settings["pseudo_samples_dir"] = str(Path(data) / settings["pseudo_samples_dir"])
    method = method_class(method_class.Config.parse({**earlier_settings(of.method), **settings}))
    lora = {"rank": RANK, "alpha": ALPHA} if of.lora else None
    budget = dataclasses.replace(budget, learning_rate=of.rate or budget.learning_rate)
    head: HeadName | None = "labels" if method.head == "linear" and not tasks.text else None
    learner = make_learner(tasks, method, loaded, budget, seed=seed, lora=lora, head=head)
    gate: list[dict[str, Any]] = []

    def record_gate(learner: Learner, num_tasks: int) -> None:
        scored_tasks = None if num_tasks == len(learner.stream) else ()
        gate.extend(measure_gate(learner, method, num_tasks, rows=looked_at, scored_tasks=scored_tasks))

    if first is not None:
        learner.stream = dataclasses.replace(tasks, tasks=tasks.tasks[:first], order=tuple(range(first)))
    run = run_stream(learner, method, on_task=record_gate if looked_at else None)
    learner.stream = tasks
    run.rows["gate"] = gate
    return run


def make_run(
    order: str, row: str, seed: int, loaded: Loaded, data: str, budget: TrainingBudget = BUDGET
) -> dict[str, Any]:
    """Run a row and return the content of its file."""
    start = time.perf_counter()
    tasks = read_tasks(order, seed, data)
    run = run_row(ROWS[row], tasks, seed, loaded, data, budget)
    return {
        "order": order,
        "row": row,
        "seed": seed,
        "stream": {"name": STREAM, "order": list(tasks.order), "record": dict(tasks.metadata)},
        **run.rows,
        **origin(),
        "seconds": round(time.perf_counter() - start, 1),
    }


def run_path(work: Path, order: str, row: str, seed: int) -> Path:
    """Return the file of a run."""
    return work / f"order-{order}" / file_name(row, seed)


def _cases(options: Namespace) -> Iterator[Case]:
    loaded, order = load("minilm"), options.order
    rows = list_rows(order) if options.rows == list(ROWS) else options.rows
    for seed, row in product(options.seeds, rows):
        yield Case(
            run_path(options.work, order, row, seed),
            partial(make_run, order, row, seed, loaded, options.data),
            partial(_describe_run, f"order {order}, {row}, {seed}"),
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs: of the rows of the order if none are named."""
    make_missing(__doc__, arguments, _cases, work="sapt", choice=("order", ORDERS), rows=ROWS, seeds=SEEDS)


def _describe_run(name: str, run: Mapping[str, Any]) -> str:
    return f"{name}: {run['seconds']} s, {describe_scores(run['matrix'])}"


def describe_scores(matrix: Sequence[Mapping[str, Any]]) -> str:
    """Format the mean scores after the last task in both scenarios."""
    last = max(row["after_task"] for row in matrix)
    texts = []
    for setting in ("til", "cil"):
        scores = [row["score"] for row in matrix if row["after_task"] == last and row["scenario"] == setting]
        texts.append(f"{setting} {sum(scores) / len(scores):.1f}" if scores else f"{setting} –")
    return ", ".join(texts)


if __name__ == "__main__":
    main()
