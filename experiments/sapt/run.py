"""SAPT against other methods (arXiv 2401.08295) with a small encoder, at the scale of a laptop: a run for each row.

    python -m experiments.sapt.run ORDER --data DIR [--rows sapt,o-lora] [--seeds 42,1,2] [--work DIR]

ORDER is 3 or 4, of the tasks of the Long Sequence benchmark that are in DIR, each text behind its instruction, as
published. MiniLM-L6 with the label-text head: no task has a head of its own, and none is told of at test. At most 120
training rows a task, classes alike, and 40 test rows, drawn by the seed; 72 tokens a text; blocks of rank 8 on queries
and values; 4 epochs in batches of 16 at 2e-3, in bfloat16. SAPT's variants are run in order 3 alone. A run takes two
to five minutes on one core: `sapt`, `joint`, `separate` and the plain baselines with three seeds some two hours on two,
all rows twice that. Finished runs are kept in `--work` and never made twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common.runs import Case, make_missing
from regard.continual.gate import gate_rows
from regard.continual.learner import Learner
from regard.continual.methods import method_named
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import RunState
from regard.continual.training_phase import TrainingBudget
from regard.data.stream import Stream
from regard.data.streams import read_stream
from regard.models.heads import HeadName
from regard.models.pretrained import Loaded, load
from regard.runs.provenance import library_versions, regard_version

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
    """What a row of the table runs: a method, its settings, and whether it trains LoRA that is none of its own.

    `rate`: the learning rate of a method for which the others' is too high.
    """

    method: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lora: bool = False
    rate: float | None = None


ROWS: dict[str, Row] = {
    "sapt": Row("sapt", STORED),
    "sapt, density": Row("sapt", {**STORED, "reflection": "density"}),
    "sapt, published samples": Row("sapt", {**STORED, "reflection": "generated", "pseudo_samples_dir": PSEUDO}),
    "sapt, without reflection": Row("sapt", {"reflection": "none"}),
    "sapt, gate published": Row("sapt", {**STORED, "gate": "published"}),
    "sapt, gate published, λ 1": Row("sapt", {**STORED, "gate": "published", "reflection_weight": 1.0}),
    "sapt, gate not opened ahead": Row("sapt", {**STORED, "router_warmup_steps": 0}),
    "sapt, begun at the best": Row("sapt", {**STORED, "init": "best"}),
    "sapt, begun at nothing": Row("sapt", {**STORED, "init": "nothing"}),
    "sapt, gate held": Row("sapt", {**STORED, "freeze_router": True}),
    "sapt, not aligned": Row("sapt", {**STORED, "joint_training": False}),
    "sapt, 3 vectors a task": Row("sapt"),
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
    "epi": Row("epi"),
    "progprompt": Row("progprompt", {"num_virtual_tokens": 5, "learning_rate": 1e-2}),
    "separate": Row("separate", lora=True),
    "joint": Row("joint", lora=True),
}


def rows_of(order: str) -> list[str]:
    """The rows that are run in an order: all in the first, in the other all but variants."""
    return [row for row in ROWS if order == ORDERS[0] or ", " not in row]


def tasks_of(order: str, seed: int, data: str, *, instructions: bool = True) -> Stream:
    """The tasks that are there, in a published order, their rows drawn by the seed."""
    found = read_stream(
        STREAM,
        data,
        samples_per_class=TRAIN,
        max_eval_samples=EVALUATED,
        order=order,
        seed=seed,
        task_type="classification",
        missing_tasks="skip",
        instructions=instructions,
    )
    return dataclasses.replace(found, tasks=tuple(_fewer(task) for task in found.tasks))


def _fewer(task: Any) -> Any:
    """The task with `TRAIN` rows, or as many a class as that comes to."""
    most, seen = max(1, TRAIN // len(task.labels)), dict[int, int]()
    kept = []
    for number, label in enumerate(task.train.labels):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] <= most:
            kept.append(number)
    train = dataclasses.replace(
        task.train,
        texts=tuple(task.train.texts[number] for number in kept),
        labels=tuple(task.train.labels[number] for number in kept),
    )
    return dataclasses.replace(task, train=train)


def learnt(
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
    """A row run over tasks, with what its gate did on so many rows a task; over the `first` tasks alone, if so said.

    The head has the classes of all tasks even so, and the learner that is left knows them all.
    """
    kind = method_named(of.method)
    settings = dict(of.settings)
    if "pseudo_samples_dir" in settings:
        settings["pseudo_samples_dir"] = str(Path(data) / settings["pseudo_samples_dir"])
    method = kind(kind.Config.parsed(settings))
    lora = {"rank": RANK, "alpha": ALPHA} if of.lora else None
    budget = dataclasses.replace(budget, learning_rate=of.rate or budget.learning_rate)
    head: HeadName | None = "labels" if method.head == "linear" and not tasks.text else None
    learner = make_learner(tasks, method, loaded, budget, seed=seed, lora=lora, head=head)
    gate: list[dict[str, Any]] = []

    def look(learner: Learner, many: int) -> None:
        gate.extend(gate_rows(learner, method, many, rows=looked_at, scored=many == len(learner.stream)))

    if first is not None:
        learner.stream = dataclasses.replace(tasks, tasks=tasks.tasks[:first], order=tuple(range(first)))
    ran = run_stream(learner, method, on_task=look)
    learner.stream = tasks
    ran.rows["gate"] = gate
    return ran


def made(order: str, row: str, seed: int, loaded: Loaded, data: str, budget: TrainingBudget = BUDGET) -> dict[str, Any]:
    """What one run gave, as JSON holds it."""
    began = time.perf_counter()
    tasks = tasks_of(order, seed, data)
    ran = learnt(ROWS[row], tasks, seed, loaded, data, budget)
    return {
        "order": order,
        "row": row,
        "seed": seed,
        "stream": {"name": STREAM, "order": list(tasks.order), "record": dict(tasks.metadata)},
        **ran.rows,
        "regard": regard_version(),
        "versions": library_versions(),
        "seconds": round(time.perf_counter() - began, 1),
    }


def kept(work: Path, order: str, row: str, seed: int) -> Path:
    """Where a run is kept."""
    return work / f"order-{order}" / f"{row.replace(', ', '-').replace(' ', '-')}-{seed}.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the runs that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("order", choices=ORDERS)
    parser.add_argument("--data", required=True, help="folder of published files")
    parser.add_argument("--rows", help="rows, apart by semicolons (default: all of the order)")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--work", type=Path, default=Path("runs") / "sapt")
    given = parser.parse_args(arguments)

    def cases() -> Iterator[Case]:
        loaded = load("minilm")
        for seed in map(int, given.seeds.split(",")):
            for row in given.rows.split(";") if given.rows else rows_of(given.order):
                name = f"order {given.order}, {row}, {seed}"
                yield Case(
                    kept(given.work, given.order, row, seed),
                    partial(made, given.order, row, seed, loaded, given.data),
                    partial(_said, name),
                )

    make_missing(cases)


def _said(name: str, found: Mapping[str, Any]) -> str:
    return f"{name}: {found['seconds']} s, {told(found['matrix'])}"


def told(matrix: Sequence[Mapping[str, Any]]) -> str:
    """The mean scores at the end, of both settings."""
    last = max(row["after_task"] for row in matrix)
    found = []
    for setting in ("til", "cil"):
        scores = [row["score"] for row in matrix if row["after_task"] == last and row["scenario"] == setting]
        found.append(f"{setting} {sum(scores) / len(scores):.1f}" if scores else f"{setting} –")
    return ", ".join(found)


if __name__ == "__main__":
    main()
