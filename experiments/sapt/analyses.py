"""Further analyses of SAPT with a small encoder, each one command that ends within half an hour on one core.

    python -m experiments.sapt.analyses NAME --data DIR [--work DIR] [--seed 42]

NAME is share, size, unseen, pair, strength, gate, prompts, noticed, rates, fifty, instructions, decoder or standing:
see the functions of `ANALYSES`. The settings are those of `experiments.sapt.run`; most are run over five tasks.
What is finished is kept in `--work` and never made twice; `python -m experiments.sapt.page --work DIR` gathers
it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from experiments.common.runs import Case, make_missing
from experiments.sapt import decoder as sapt_decoder
from experiments.sapt.numbers import Number, by_count, number, numbers, standing
from experiments.sapt.run import BUDGET, ROWS, SEEDS, STORED, Row, learnt, tasks_of
from regard.continual.methods import METHODS
from regard.continual.methods.sapt import SaptNetwork
from regard.continual.run import make_learner
from regard.continual.run_state import RunState
from regard.continual.scoring import score_task
from regard.data.derived_streams import hold_out_tasks, split_classes
from regard.data.examples import Examples
from regard.data.stream import ClassificationTask, Stream
from regard.data.streams import read_stream
from regard.errors import UserError
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
MANY_BUDGET = dataclasses.replace(BUDGET, num_epochs=2, length=32)
PUBLISHED = {**STORED, "gate": "published"}
GATES: dict[str, Row] = {
    "published": ROWS["sapt, gate published"],
    "published, λ 1": ROWS["sapt, gate published, λ 1"],
    "published, λ 4": Row("sapt", {**PUBLISHED, "reflection_weight": 4.0}),
    "published, λ 1, floor": Row("sapt", {**PUBLISHED, "reflection_weight": 1.0, "own_weight_floor": 0.5}),
    "published, λ 1, keys ×10": Row("sapt", {**PUBLISHED, "reflection_weight": 1.0, "key_lr_multiplier": 10.0}),
    "published, λ 1, maps ×0.1": Row("sapt", {**PUBLISHED, "reflection_weight": 1.0, "projection_lr_multiplier": 0.1}),
    "−log a only": Row("sapt", {**STORED, "router_warmup_steps": 0}),
    "−log a, floor": Row("sapt", {**STORED, "router_warmup_steps": 0, "own_weight_floor": 0.5}),
    "−log a, entropy lower": Row("sapt", {**STORED, "router_warmup_steps": 0, "entropy_weight": 0.1}),
    "−log a, entropy higher": Row("sapt", {**STORED, "router_warmup_steps": 0, "entropy_weight": -0.1}),
    "−log a, balance": Row("sapt", {**STORED, "router_warmup_steps": 0, "load_balancing_weight": 0.1}),
    "−log a, keys ×10": Row("sapt", {**STORED, "router_warmup_steps": 0, "key_lr_multiplier": 10.0}),
    "−log a, maps ×0.1": Row("sapt", {**STORED, "router_warmup_steps": 0, "projection_lr_multiplier": 0.1}),
    "ahead, held": Row("sapt", {**STORED, "freeze_router": True}),
    "ahead": Row("sapt", STORED),
    "ahead, order paper": Row("sapt", {**STORED, "projection_order": "paper"}),
    "ahead, 4 stored": Row("sapt", {"memory_size": 4}),
    "ahead, 20 stored": Row("sapt", {"memory_size": 20}),
    "ahead, density": Row("sapt", {**STORED, "reflection": "density"}),
}
"""What opens the gate. Where nothing else is said 100 vectors are stored; all but the published have the term −log a of
the own block's weight in their loss, and each earlier task's divergence counts as it does: four tasks, λ 4."""
PROMPTS: dict[str, Row] = {
    f"prompts, rate ×{times:g}": Row("sapt", {**STORED, "adapter_type": "prompt", "adapter_lr_multiplier": times})
    for times in (1, 5, 20)
}
PROMPTS["prompts, rate ×5, no MLP"] = Row(
    "sapt", {**STORED, "adapter_type": "prompt", "adapter_lr_multiplier": 5.0, "encoder_hidden_size": 0}
)
PROMPTS |= {"low-rank": ROWS["sapt"], "progprompt": ROWS["progprompt"]}


@dataclass(frozen=True)
class Setting:
    """What an analysis is given: the data's folder, the model, the seed, and the folder of what is kept."""

    data: str
    loaded: Loaded
    seed: int
    work: Path = WORK


Cases = Iterator[tuple[str, Callable[[], list[Number]]]]
"""The cases of an analysis by name, and what gives the numbers of each: `measure`, `x`, `value`."""


# -- analyses --------------------------------------------------------------------------------------------------------


def share(given: Setting) -> Cases:
    """How much must stand in for an earlier task: 2 to 100 % of its rows, real or from a density; ten runs of five."""
    for reflects in ("real", "density"):
        for part in SHARES:
            row = Row("sapt", {"memory_fraction": part, "reflection": reflects})
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
    shorter, held = hold_out_tasks(every, names)
    tasks = dataclasses.replace(shorter, tasks=(*shorter.tasks, *held), order=tuple(range(len(every))))

    def trained(name: str) -> Callable[[], list[Number]]:
        def found() -> list[Number]:
            ran = learnt(ROWS[name], tasks, given.seed, given.loaded, given.data, first=len(shorter))
            return _zero_shot(ran.learner, len(shorter))

        return found

    def bare() -> list[Number]:
        kind = METHODS["finetune"]
        learner = make_learner(tasks, kind(), given.loaded, BUDGET, seed=given.seed, head="labels")
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
        found += number(f"score: {one.name}", score_task(learner, task, tasks_trained=len(learner.stream)).til)
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


def _of_pair(ran: RunState) -> list[Number]:
    """The scores of both tasks, when learnt and at the end, and how the second's rows are weighed."""
    found: list[Number] = []
    for row in ran.rows["matrix"]:
        for when, after in (("learnt", row["task_index"]), ("end", 2)):
            if row["scenario"] == "til" and row["after_task"] == after:
                found += number(f"task {row['task_index']} {when}", row["score"])
    for one in ran.rows["gate"]:
        if one["statistic"] == "weight" and one["after_task"] == 2:
            found += number(f"weight of block {one['adapter']} in task {one['task_index']}", one["value"])
    return found


def strength(given: Setting) -> Cases:
    """The published gate with λ from 0.01 to 10, and balanced by gradients; five runs of five tasks."""
    for value in STRENGTHS:
        yield f"λ {value:g}", _over(given, Row("sapt", {**PUBLISHED, "reflection_weight": value}), few(given))
    yield "balanced 1", _over(given, Row("sapt", {**PUBLISHED, "gradient_balance": 1.0}), few(given))


def gate(given: Setting) -> Cases:
    """What opens the gate (`GATES`); nineteen runs of five tasks, half an hour."""
    for name, row in GATES.items():
        yield name, _over(given, row, few(given))


def prompts(given: Setting) -> Cases:
    """Soft prompts for blocks (SAPT-Prompt) at several rates, beside low-rank ones; six runs of five tasks."""
    for name, row in PROMPTS.items():
        yield name, _over(given, row, few(given))


def noticed(given: Setting) -> Cases:
    """Five tasks in two portions each, whose second comes when all have been seen: who notices; four runs of ten.

    `blocks` that there are in the end, and `right`: the share of portions that were given the block of their task where
    that has one, and a new one where it has none.
    """
    portions = in_portions(few(given))
    rows = {"sapt, a block a portion": ROWS["sapt"], "sapt-task-free": Row("sapt-task-free", STORED)}
    rows["sapt-task-free, alarm 0.001"] = Row("sapt-task-free", {**STORED, "false_alarm_rate": 0.001})
    for name, row in {**rows, "sequential-lora": ROWS["sequential-lora"]}.items():
        yield name, _over(given, row, portions, _of_portions)


def in_portions(stream: Stream) -> Stream:
    """Each task's training rows in two halves, of which the second come when all the first have: `name, again`."""
    halves: list[list[Any]] = [[], []]
    for task in stream.tasks:
        assert isinstance(task, ClassificationTask)
        for half, name in enumerate((task.name, f"{task.name}, again")):
            texts, labels = task.train.texts[half::2], task.train.labels[half::2]
            halves[half].append(dataclasses.replace(task, name=name, train=Examples(texts=texts, labels=labels)))
    tasks = (*halves[0], *halves[1])
    return dataclasses.replace(stream, tasks=tasks, order=tuple(range(len(tasks))))


def _of_portions(ran: RunState) -> list[Number]:
    """The numbers of a run, and how many blocks there are; of those that notice, how often they are right."""
    found, network = numbers(ran), ran.learner.network
    if not isinstance(network, SaptNetwork):
        return found
    many = len(ran.learner.stream)
    given = [network.adapter_of(task) for task in range(many)]
    first = range(many // 2)
    right = sum(given[task] == len(set(given[:task])) for task in first)
    right += sum(given[task + many // 2] == given[task] for task in first)
    return found + number("blocks", len(set(given))) + number("right", right / many)


def rates(given: Setting) -> Cases:
    """Whether the learning rate that all rows have does one of them wrong; eighteen runs of five tasks."""
    for name in RATED:
        for rate in RATES:
            yield f"{name}, {rate:g}", _over(given, dataclasses.replace(ROWS[name], rate=rate), few(given))


def fifty(given: Setting) -> Cases:
    """Fifty tasks of two classes, of Python's documentation and DBpedia: how weights thin out, and what a step costs.

    Three runs with half the epochs and half the length; what a step costs is to be held against the first task's.
    """
    streams = [
        read_stream(name, folder, samples_per_class=MANY_ROWS, max_eval_samples=MANY_ROWS // 2, seed=given.seed)
        for name, folder in (("stdlib-split", None), ("db-split", given.data))
    ]
    tasks = split_classes(streams, MANY, given.seed)
    for name in ("sapt", "sapt, gate held", "sequential-lora"):
        yield f"{name}, {MANY} tasks", _many(given, ROWS[name], tasks)


def _many(given: Setting, row: Row, tasks: Stream) -> Callable[[], list[Number]]:
    def found() -> list[Number]:
        ran = learnt(row, tasks, given.seed, given.loaded, given.data, MANY_BUDGET, looked_at=MANY_LOOKED_AT)
        return numbers(ran) + by_count(ran) + most_own(tasks)

    return found


def most_own(tasks: Stream) -> list[Number]:
    """The mean own weight by the number of tasks where a gate knows the class of each text and no more.

    A text of a class that is in u of the tasks gives then 1/u to each of their blocks.
    """
    found: list[Number] = []
    for many in range(1, len(tasks) + 1):
        named = [(task.source, label) for task in tasks.tasks[:many] for label in task.labels]
        uses = Counter(named)
        found += number("most own_adapter_weight by tasks", sum(1 / uses[one] for one in named) / len(named), many)
    return found


def instructions(given: Setting) -> Cases:
    """With and without the task's instruction before each text, by which the gate may tell tasks apart; two runs."""
    for said in (True, False):
        tasks = only(tasks_of("3", given.seed, given.data, instructions=said), FEW)
        yield "with" if said else "without", _over(given, ROWS["sapt"], tasks)


def decoder(given: Setting) -> Cases:
    """A decoder that is pre-trained here (`sapt_decoder`) and writes its answers; nine runs of five tasks."""
    for name in sapt_decoder.DECODED:
        row = dataclasses.replace(ROWS[name], rate=None)  # another model, whose rate is that of its budget
        yield name, partial(_written, given, row, numbers)
    yield "lfpt5", partial(_written, given, sapt_decoder.LFPT5, numbers)


def standing_for(given: Setting) -> Cases:
    """What stands for earlier tasks, with that decoder: scores, cost, and what it gives away; four runs of five tasks.

    The texts are written by the decoder itself, for which it is trained anew after each task.
    """
    for name, row in sapt_decoder.STANDING.items():
        yield name, partial(_written, given, row, standing)


def _written(given: Setting, row: Row, told: Callable[[RunState], list[Number]]) -> list[Number]:
    loaded = sapt_decoder.pretrained(given.work, given.seed)
    tasks = only(sapt_decoder.written_tasks(given.seed, given.data), FEW)
    return told(learnt(row, tasks, given.seed, loaded, given.data, sapt_decoder.TAUGHT))


ANALYSES: Mapping[str, Callable[[Setting], Cases]] = {
    "share": share,
    "size": size,
    "unseen": unseen_tasks,
    "pair": pair,
    "strength": strength,
    "gate": gate,
    "prompts": prompts,
    "noticed": noticed,
    "rates": rates,
    "fifty": fifty,
    "instructions": instructions,
    "decoder": decoder,
    "standing": standing_for,
}


# -- what they are made of -------------------------------------------------------------------------------------------


def _over(
    given: Setting, row: Row, tasks: Stream, told: Callable[[RunState], list[Number]] = numbers
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
