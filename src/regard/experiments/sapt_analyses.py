"""Further analyses of SAPT with a small encoder, each one command that ends within 15 minutes on one core.

    python -m regard.experiments.sapt_analyses NAME --data DIR [--work DIR] [--seed 42]

NAME is share, size, unseen, pair, strength, gate, rates, fifty, instructions or decoder:
see the functions of `ANALYSES`. The settings
are those of `regard.experiments.sapt`; most are run over five tasks. A finished case is kept in `--work` and never made
twice; `python -m regard.experiments.sapt_page --work DIR` gathers them.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from regard.continual.methods import METHODS
from regard.continual.metrics import accuracy_matrix, average_performance, forgetting_from_best, learning_accuracy
from regard.continual.run import Ran, begin
from regard.continual.scoring import score
from regard.data.stream import Stream
from regard.data.streams import read_stream
from regard.data.text_streams import split_into, unseen
from regard.errors import UserError
from regard.experiments import sapt_decoder
from regard.experiments.runs import Case, make_missing
from regard.experiments.sapt import BUDGET, ROWS, SEEDS, STORED, Row, learnt, tasks_of
from regard.models.pretrained import Loaded, load

FEW = ("sst2", "agnews", "dbpedia", "amazon", "rte")
"""The tasks of most analyses, in their order."""
PAIRS = {"similar": ("yelp", "amazon"), "dissimilar": ("yelp", "dbpedia")}
SHARES = (0.02, 0.05, 0.1, 0.5, 1.0)
LAYERS = (2, 4, 6)
RATED = ("sapt", "sequential-lora", "incremental-lora", "o-lora", "replay-lora", "joint")
RATES = (5e-4, 1e-3, 2e-3)
STRENGTHS = (0.01, 0.1, 1.0, 10.0)
HELD_OUT = 4
WORK = Path("runs") / "sapt"
MANY, MANY_ROWS, MANY_LOOKED_AT = 50, 200, 8
MANY_BUDGET = dataclasses.replace(BUDGET, epochs=2, length=32)
GATES: dict[str, Row] = {
    "published": ROWS["sapt, gate published"],
    "−log a only": Row("sapt", {**STORED, "ahead": 0}),
    "floor": Row("sapt", {**STORED, "ahead": 0, "floor": 0.5}),
    "entropy lower": Row("sapt", {**STORED, "ahead": 0, "entropy": 0.1}),
    "entropy higher": Row("sapt", {**STORED, "ahead": 0, "entropy": -0.1}),
    "ahead, held": Row("sapt", {**STORED, "held": True}),
    "ahead": Row("sapt", STORED),
    "ahead, order paper": Row("sapt", {**STORED, "order": "paper"}),
    "ahead, 4 stored": Row("sapt", {"stored": 4}),
    "ahead, 20 stored": Row("sapt", {"stored": 20}),
    "ahead, density": Row("sapt", {**STORED, "reflects": "density"}),
}
"""What opens the gate. Where nothing else is said 100 vectors are stored; all but the published have the term −log a of
the own block's weight in their loss, whose strength is also that of the reflection."""


@dataclass(frozen=True)
class Setting:
    """What an analysis is given: the data's folder, the model, the seed, and the folder of what is kept."""

    data: str
    loaded: Loaded
    seed: int
    work: Path = WORK


Number = dict[str, Any]
Cases = Iterator[tuple[str, Callable[[], list[Number]]]]
"""The cases of an analysis by name, and what gives the numbers of each: `measure`, `x`, `value`."""


# -- numbers ---------------------------------------------------------------------------------------------------------


def number(measure: str, value: float | None, x: float | None = None) -> list[Number]:
    """A number, as a list; none where it is not known."""
    return [] if value is None else [{"measure": measure, "x": x, "value": float(value)}]


def numbers(ran: Ran) -> list[Number]:
    """What a run came to: scores and forgetting in both settings, its gate, and seconds of training."""
    found: list[Number] = []
    names = {"ap": average_performance, "f_ra": forgetting_from_best, "learning_accuracy": learning_accuracy}
    for setting in ("cil", "til"):
        for name, measure in names.items():
            found += number(f"{name} {setting}", _measured(ran, setting, measure))
    return found + gate_numbers(ran) + number("seconds", sum(row["seconds"] for row in ran.found["cost"]))


def _measured(ran: Ran, setting: Any, measure: Callable[[Any], float | None]) -> float | None:
    order = "-".join(map(str, range(len(ran.learner.stream))))
    rows = pd.DataFrame([row for row in ran.found["matrix"] if row["setting"] == setting])
    if rows.empty:
        return None
    return measure(accuracy_matrix(rows.assign(stream="x", method="x", seed=0, order=order), setting))


def gate_numbers(ran: Ran) -> list[Number]:
    """Means over tasks of what a run's gate did, when each was learnt and at the end; `least`: the least of a task."""
    found: list[Number] = []
    gate = pd.DataFrame(ran.found["gate"])
    if gate.empty:
        return found
    last = gate["after_task"].max()
    for statistic in ("own_weight", "entropy"):
        asked = gate[gate["statistic"] == statistic]
        for when, rows in (
            ("learning", asked[asked["after_task"] == asked["position"]]),
            ("end", asked[asked["after_task"] == last]),
        ):
            found += number(f"{statistic} {when}", rows["value"].mean())
            if statistic == "own_weight":
                found += number(f"least {statistic} {when}", rows["value"].min())
    for statistic in ("routed_score", "forced_score", "other_score"):
        scored = gate[gate["statistic"] == statistic]["value"]
        found += number(statistic, scored.mean() if len(scored) else None)
    return found


# -- analyses --------------------------------------------------------------------------------------------------------


def share(given: Setting) -> Cases:
    """How much must stand in for an earlier task: 2 to 100 % of its rows, real or from a density; ten runs of five."""
    for reflects in ("real", "density"):
        for part in SHARES:
            row = Row("sapt", {"share": part, "reflects": reflects})
            yield f"{reflects}, {part:.0%}", _over(given, row, few(given))


def size(given: Setting) -> Cases:
    """SAPT, sequential LoRA and all tasks at once with the model cut to its first layers; nine runs of five tasks."""
    for layers in LAYERS:
        cut = dataclasses.replace(given, loaded=shallow(given.loaded, layers))
        for name in ("sapt", "sequential-lora", "joint"):
            yield f"{name}, {layers} layers", _over(cut, ROWS[name], few(given))


def unseen_tasks(given: Setting) -> Cases:
    """Tasks that were never trained on, scored by the words of their labels: after ten others, with three models.

    Two runs of ten tasks, and the model as it is; `chance` beside them.
    """
    every = tasks_of("3", given.seed, given.data)
    names = [task.name for task in every.tasks][-HELD_OUT:]
    shorter, held = unseen(every, names)
    tasks = dataclasses.replace(shorter, tasks=(*shorter.tasks, *held), order=tuple(range(len(every))))

    def trained(name: str) -> Callable[[], list[Number]]:
        def found() -> list[Number]:
            ran = learnt(ROWS[name], tasks, given.seed, given.loaded, given.data, first=len(shorter))
            return _zero_shot(ran.learner, len(shorter))

        return found

    def bare() -> list[Number]:
        kind = METHODS["finetune"]
        learner = begin(tasks, kind(), given.loaded, BUDGET, seed=given.seed, head="labels")
        return _zero_shot(learner, len(shorter))

    for name in ("sapt", "sequential-lora"):
        yield name, trained(name)
    yield "base model", bare


def _zero_shot(learner: Any, first: int) -> list[Number]:
    """The scores of the tasks from a place on, among their own labels, and what chance gives."""
    found: list[Number] = []
    places = range(first, len(learner.stream))
    for task in places:
        one = learner.stream.tasks[task]
        found += number(f"score: {one.name}", score(learner, task, learnt=len(learner.stream)).til)
        found += number(f"chance: {one.name}", 100 / len(one.labels))
    means = {
        name: [one["value"] for one in found if one["measure"].startswith(f"{name}:")] for name in ("score", "chance")
    }
    return found + [each for name, values in means.items() for each in number(name, sum(values) / len(values))]


def pair(given: Setting) -> Cases:
    """Two tasks, alike or not: what the second takes of the first's block and does to it; six short runs."""
    for kind, names in PAIRS.items():
        tasks = only(tasks_of("3", given.seed, given.data), names)
        for row in ("sapt", "sequential-lora", "separate"):
            yield f"{kind} ({', '.join(names)}), {row}", _over(given, ROWS[row], tasks, _of_pair)


def _of_pair(ran: Ran) -> list[Number]:
    """The scores of both tasks, when learnt and at the end, and how the second's rows are weighed."""
    found: list[Number] = []
    for row in ran.found["matrix"]:
        for when, after in (("learnt", row["position"]), ("end", 2)):
            if row["setting"] == "til" and row["after_task"] == after:
                found += number(f"task {row['position']} {when}", row["score"])
    for one in ran.found["gate"]:
        if one["statistic"] == "weight" and one["after_task"] == 2:
            found += number(f"weight of block {one['block']} in task {one['position']}", one["value"])
    return found


def strength(given: Setting) -> Cases:
    """The published gate with λ from 0.01 to 10, and balanced by gradients; five runs of five tasks."""
    published = {**STORED, "gate": "published"}
    for value in STRENGTHS:
        yield f"λ {value:g}", _over(given, Row("sapt", {**published, "strength": value}), few(given))
    yield "balanced 1", _over(given, Row("sapt", {**published, "balanced": 1.0}), few(given))


def gate(given: Setting) -> Cases:
    """What opens the gate (`GATES`); eleven runs of five tasks."""
    for name, row in GATES.items():
        yield name, _over(given, row, few(given))


def rates(given: Setting) -> Cases:
    """Whether the learning rate that all rows have does one of them wrong; eighteen runs of five tasks."""
    for name in RATED:
        for rate in RATES:
            yield f"{name}, {rate:g}", _over(given, dataclasses.replace(ROWS[name], rate=rate), few(given))


def fifty(given: Setting) -> Cases:
    """Fifty tasks of two classes, of Python's documentation and DBpedia: how weights thin out, and what a step costs.

    Two runs with half the epochs and half the length; what a step costs is to be held against the first task's.
    """
    streams = [
        read_stream(name, folder, rows=MANY_ROWS, eval_rows=MANY_ROWS // 2, seed=given.seed)
        for name, folder in (("stdlib-split", None), ("db-split", given.data))
    ]
    tasks = split_into(streams, MANY, given.seed)
    for name in ("sapt", "sequential-lora"):
        yield f"{name}, {MANY} tasks", _many(given, ROWS[name], tasks)


def _many(given: Setting, row: Row, tasks: Stream) -> Callable[[], list[Number]]:
    def found() -> list[Number]:
        ran = learnt(row, tasks, given.seed, given.loaded, given.data, MANY_BUDGET, looked_at=MANY_LOOKED_AT)
        return numbers(ran) + by_count(ran)

    return found


def by_count(ran: Ran) -> list[Number]:
    """How a run went by the number of tasks that were learnt: seconds a step, AP, own weight and entropy."""
    found: list[Number] = []
    for row in ran.found["cost"]:
        found += number("seconds a step", row["seconds"] / row["steps"], row["position"])
        found += number("seconds in hooks", row["hook_seconds"], row["position"])
    parts = [("ap by tasks", _cells(ran, "cil"))]
    gate = pd.DataFrame(ran.found["gate"], columns=["after_task", "statistic", "value"])
    parts += [(f"{name} by tasks", gate[gate["statistic"] == name]) for name in ("own_weight", "entropy") if len(gate)]
    for name, rows in parts:
        for after, value in rows.groupby("after_task")["value"].mean().items():
            found += number(name, value, float(after))
    return found


def _cells(ran: Ran, setting: str) -> pd.DataFrame:
    """The scores after each task, of those that were learnt."""
    kept = [row for row in ran.found["matrix"] if row["setting"] == setting and row["after_task"] >= row["position"]]
    return pd.DataFrame([{"after_task": row["after_task"], "value": row["score"]} for row in kept])


def instructions(given: Setting) -> Cases:
    """With and without the task's instruction before each text, by which the gate may tell tasks apart; two runs."""
    for said in (True, False):
        tasks = only(tasks_of("3", given.seed, given.data, instructions=said), FEW)
        yield "with" if said else "without", _over(given, ROWS["sapt"], tasks)


def decoder(given: Setting) -> Cases:
    """A decoder that is pre-trained here (`sapt_decoder`) and writes its answers; six runs of five tasks."""
    for name in sapt_decoder.DECODED:
        yield name, partial(_written, given, name)


def _written(given: Setting, name: str) -> list[Number]:
    loaded = sapt_decoder.pretrained(given.work, given.seed)
    tasks = only(sapt_decoder.written_tasks(given.seed, given.data), FEW)
    row = dataclasses.replace(ROWS[name], rate=None)  # another model, whose rate is that of its budget
    return numbers(learnt(row, tasks, given.seed, loaded, given.data, sapt_decoder.TAUGHT))


ANALYSES: Mapping[str, Callable[[Setting], Cases]] = {
    "share": share,
    "size": size,
    "unseen": unseen_tasks,
    "pair": pair,
    "strength": strength,
    "gate": gate,
    "rates": rates,
    "fifty": fifty,
    "instructions": instructions,
    "decoder": decoder,
}


# -- what they are made of -------------------------------------------------------------------------------------------


def _over(
    given: Setting, row: Row, tasks: Stream, told: Callable[[Ran], list[Number]] = numbers
) -> Callable[[], list[Number]]:
    """What gives the numbers of a row run over tasks."""
    return lambda: told(learnt(row, tasks, given.seed, given.loaded, given.data))


def few(given: Setting) -> Stream:
    """The five tasks of most analyses."""
    return only(tasks_of("3", given.seed, given.data), FEW)


def only(stream: Stream, names: Sequence[str]) -> Stream:
    """Some tasks of a stream, in this order. Raises UserError where one is not there."""
    tasks = {task.name: task for task in stream.tasks}
    missing = [name for name in names if name not in tasks]
    if missing:
        raise UserError(f"data: expected the task {missing[0]}, there are {', '.join(tasks)}")
    ranked = sorted(names)
    return dataclasses.replace(
        stream, tasks=tuple(tasks[name] for name in names), order=tuple(ranked.index(name) for name in names)
    )


def shallow(loaded: Loaded, layers: int) -> Loaded:
    """A BERT-like model cut to its first layers. Raises UserError where it has fewer."""
    model: Any = deepcopy(loaded.model)
    if not 1 <= layers <= len(model.encoder.layer):
        raise UserError(f"layers: expected a number from 1 to {len(model.encoder.layer)}, got {layers}")
    model.encoder.layer = nn.ModuleList(model.encoder.layer[:layers])
    model.config.num_hidden_layers = layers
    return dataclasses.replace(loaded, model=model)


def kept(work: Path, analysis: str, case: str, seed: int) -> Path:
    """Where a case is kept."""
    name = "".join(letter if letter.isalnum() or letter == "." else "-" for letter in case.replace("%", " percent"))
    return work / f"analysis-{analysis}" / f"{name}-{seed}.json"


def _made(about: Mapping[str, Any], found: Callable[[], Any]) -> dict[str, Any]:
    return {**about, "numbers": found()}


def _said(name: str, made: Mapping[str, Any]) -> str:
    return f"{name}: {len(made['numbers'])} numbers"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the cases of an analysis that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ANALYSES)
    parser.add_argument("--data", required=True, help="folder of published files")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--seed", type=int, default=SEEDS[0])
    given = parser.parse_args(arguments)

    def cases() -> Iterator[Case]:
        setting = Setting(given.data, load("minilm"), given.seed, given.work)
        for name, found in ANALYSES[given.name](setting):
            about = {"analysis": given.name, "case": name, "seed": given.seed}
            yield Case(
                kept(given.work, given.name, name, given.seed),
                partial(_made, about, found),
                partial(_said, f"{given.name}, {name}"),
            )

    make_missing(cases)


if __name__ == "__main__":
    main()
