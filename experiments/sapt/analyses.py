"""Further analyses of SAPT with a small encoder, each one command that ends within half an hour on one core.

    python -m experiments.sapt.analyses NAME --data DIR [--work DIR] [--seed 42]

NAME is share, size, unseen, pair, strength, gate, prompts, noticed, rates, fifty, instructions, decoder or standing:
see the functions of `ANALYSES`. The settings are those of `experiments.sapt.run`; most are run over five tasks.
Finished cases are kept in `--work` and not run again; `python -m experiments.pages sapt --work DIR` gathers them.
"""

import dataclasses
from argparse import Namespace
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
from experiments.sapt.made_streams import hold_out_tasks, split_classes
from experiments.sapt.numbers import Number, collect_by_task, collect_numbers, collect_reflection_numbers, make_number
from experiments.sapt.run import BUDGET, ROWS, SEEDS, STORED, Row, learnt, read_tasks, run_row
from regard.continual.methods import METHODS
from regard.continual.methods.sapt import SaptNetwork
from regard.continual.run import make_learner
from regard.continual.run_state import RunState
from regard.continual.scoring import score_task
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
    "published, λ 4": learnt({**PUBLISHED, "reflection_weight": 4.0}),
    "published, λ 1, floor": learnt({**PUBLISHED, "reflection_weight": 1.0, "own_weight_floor": 0.5}),
    "published, λ 1, keys ×10": learnt({**PUBLISHED, "reflection_weight": 1.0, "key_lr_multiplier": 10.0}),
    "published, λ 1, maps ×0.1": learnt({**PUBLISHED, "reflection_weight": 1.0, "projection_lr_multiplier": 0.1}),
    "−log a only": learnt({**STORED, "router_warmup_steps": 0}),
    "−log a, floor": learnt({**STORED, "router_warmup_steps": 0, "own_weight_floor": 0.5}),
    "−log a, entropy lower": learnt({**STORED, "router_warmup_steps": 0, "entropy_weight": 0.1}),
    "−log a, entropy higher": learnt({**STORED, "router_warmup_steps": 0, "entropy_weight": -0.1}),
    "−log a, balance": learnt({**STORED, "router_warmup_steps": 0, "load_balancing_weight": 0.1}),
    "−log a, keys ×10": learnt({**STORED, "router_warmup_steps": 0, "key_lr_multiplier": 10.0}),
    "−log a, maps ×0.1": learnt({**STORED, "router_warmup_steps": 0, "projection_lr_multiplier": 0.1}),
    "ahead, held": learnt({**STORED, "freeze_router": True}),
    "ahead": learnt(STORED),
    "ahead, order paper": learnt({**STORED, "projection_order": "paper"}),
    "ahead, 4 stored": learnt({"memory_size": 4}),
    "ahead, 20 stored": learnt({"memory_size": 20}),
    "ahead, density": learnt({**STORED, "reflection": "density"}),
}
"""What opens the gate. Where nothing else is said 100 vectors are stored; all but the published have the term −log a of
the own block's weight in their loss, and each earlier task's divergence counts as it does: four tasks, λ 4."""
PROMPTS: dict[str, Row] = {
    f"prompts, rate ×{times:g}": learnt({**STORED, "adapter_type": "prompt", "adapter_lr_multiplier": times})
    for times in (1, 5, 20)
}
PROMPTS["prompts, rate ×5, no MLP"] = learnt(
    {**STORED, "adapter_type": "prompt", "adapter_lr_multiplier": 5.0, "encoder_hidden_size": 0}
)
PROMPTS |= {"low-rank": ROWS["sapt"], "progprompt": ROWS["progprompt"]}


@dataclass(frozen=True)
class AnalysisContext:
    """Data folder, model, seed and work folder of an analysis."""

    data: str
    loaded: Loaded
    seed: int
    work: Path = WORK


Cases = Iterator[tuple[str, Callable[[], list[Number]]]]
"""Cases of an analysis: name, and the function that returns its numbers (`measure`, `x`, `value`)."""


# -- analyses --------------------------------------------------------------------------------------------------------


def compare_memory_fractions(context: AnalysisContext) -> Cases:
    """Vary the memory from 2 to 100 % of a task's rows, real or from a density; ten runs of five tasks."""
    for reflects in ("real", "density"):
        for part in SHARES:
            row = learnt({"memory_fraction": part, "reflection": reflects})
            yield f"{reflects}, {part:.0%}", _case(context, row, read_few_tasks(context))


def compare_depths(context: AnalysisContext) -> Cases:
    """Compare SAPT, sequential LoRA and joint training with the first layers only; nine runs of five tasks."""
    for layers in LAYERS:
        cut = dataclasses.replace(context, loaded=cut_layers(context.loaded, layers))
        for name in ("sapt", "sequential-lora", "joint"):
            yield f"{name}, {layers} layers", _case(cut, ROWS[name], read_few_tasks(context))


def score_unseen_tasks(context: AnalysisContext) -> Cases:
    """Score the last tasks by the words of their labels after training on the ten others only; three models.

    Two runs of ten tasks, and the untrained model; `chance` beside them.
    """
    stream = read_tasks("3", context.seed, context.data)
    trained, unseen = hold_out_tasks(stream, [task.name for task in stream.tasks][-HELD_OUT:])
    tasks = dataclasses.replace(trained, tasks=(*trained.tasks, *unseen), order=tuple(range(len(stream))))
    for name in ("sapt", "sequential-lora"):
        yield name, partial(_score_unseen, context, ROWS[name], tasks, len(trained))
    yield "base model", partial(_score_unseen, context, None, tasks, len(trained))


def _score_unseen(context: AnalysisContext, row: Row | None, tasks: Stream, num_trained: int) -> list[Number]:
    """Return scores of the tasks behind the trained ones, among their own labels, and those of chance."""
    learner: Any
    if row is None:
        learner = make_learner(tasks, METHODS["finetune"](), context.loaded, BUDGET, seed=context.seed, head="labels")
    else:
        learner = run_row(row, tasks, context.seed, context.loaded, context.data, first=num_trained).learner
    numbers: list[Number] = []
    for index in range(num_trained, len(tasks)):
        task = tasks.tasks[index]
        numbers += make_number(f"score: {task.name}", score_task(learner, index, tasks_trained=len(tasks)).til)
        numbers += make_number(f"chance: {task.name}", 100 / len(task.labels))
    for name in ("score", "chance"):
        values = [number["value"] for number in numbers if number["measure"].startswith(f"{name}:")]
        numbers += make_number(name, sum(values) / len(values))
    return numbers


def compare_pairs(context: AnalysisContext) -> Cases:
    """Train two similar or dissimilar tasks, for transfer to the second and forgetting of the first; six short runs."""
    for kind, names in PAIRS.items():
        tasks = select_tasks(read_tasks("3", context.seed, context.data), names)
        for row in ("sapt", "sequential-lora", "separate"):
            yield f"{kind} ({', '.join(names)}), {row}", _case(context, ROWS[row], tasks, _pair_numbers)


def _pair_numbers(run: RunState) -> list[Number]:
    """Return the scores of both tasks when learnt and at the end, and the weights that their rows give at the end."""
    numbers: list[Number] = []
    for row in run.rows["matrix"]:
        for when, after in (("learnt", row["task_index"]), ("end", 2)):
            if row["scenario"] == "til" and row["after_task"] == after:
                numbers += make_number(f"task {row['task_index']} {when}", row["score"])
    for cell in run.rows["gate"]:
        if cell["statistic"] == "weight" and cell["after_task"] == 2:
            numbers += make_number(f"weight of block {cell['adapter']} in task {cell['task_index']}", cell["value"])
    return numbers


def compare_reflection_weights(context: AnalysisContext) -> Cases:
    """Vary λ of the published gate from 0.01 to 10, and balance it by gradients; five runs of five tasks."""
    for value in STRENGTHS:
        row = learnt({**PUBLISHED, "reflection_weight": value})
        yield f"λ {value:g}", _case(context, row, read_few_tasks(context))
    yield "balanced 1", _case(context, learnt({**PUBLISHED, "gradient_balance": 1.0}), read_few_tasks(context))


def compare_gates(context: AnalysisContext) -> Cases:
    """Compare what opens the gate (`GATES`); nineteen runs of five tasks, half an hour."""
    for name, row in GATES.items():
        yield name, _case(context, row, read_few_tasks(context))


def compare_prompts(context: AnalysisContext) -> Cases:
    """Compare soft prompts (SAPT-Prompt) at several rates with low-rank adapters; six runs of five tasks."""
    for name, row in PROMPTS.items():
        yield name, _case(context, row, read_few_tasks(context))


def compare_task_free(context: AnalysisContext) -> Cases:
    """Learn five tasks in two unannounced portions each, first halves before second ones; four runs of ten.

    `blocks`: adapters at the end. `right`: fraction of portions that got their task's adapter, or a new one if the task
    had none.
    """
    portions = split_portions(read_few_tasks(context))
    rows = {"sapt, a block a portion": ROWS["sapt"], "sapt-task-free": learnt(STORED, "sapt-task-free")}
    rows["sapt-task-free, alarm 0.001"] = learnt({**STORED, "false_alarm_rate": 0.001}, "sapt-task-free")
    for name, row in {**rows, "sequential-lora": ROWS["sequential-lora"]}.items():
        yield name, _case(context, row, portions, _portion_numbers)


def split_portions(stream: Stream) -> Stream:
    """Return each task's first half of the training rows, then each one's second half as `NAME, again`."""
    halves: list[list[Any]] = [[], []]
    for task in stream.tasks:
        assert isinstance(task, ClassificationTask)
        for half, name in enumerate((task.name, f"{task.name}, again")):
            texts, labels = task.train.texts[half::2], task.train.labels[half::2]
            halves[half].append(dataclasses.replace(task, name=name, train=Examples(texts=texts, labels=labels)))
    tasks = (*halves[0], *halves[1])
    return dataclasses.replace(stream, tasks=tasks, order=tuple(range(len(tasks))))


def _portion_numbers(run: RunState) -> list[Number]:
    """Return the numbers of a run, and with SAPT `blocks` and `right`."""
    numbers, network = collect_numbers(run), run.learner.network
    if not isinstance(network, SaptNetwork):
        return numbers
    num_tasks = len(run.learner.stream)
    adapters = [network.adapter_of(task) for task in range(num_tasks)]
    tasks = range(num_tasks // 2)
    right = sum(adapters[task] == len(set(adapters[:task])) for task in tasks)
    right += sum(adapters[task + num_tasks // 2] == adapters[task] for task in tasks)
    return numbers + make_number("blocks", len(set(adapters))) + make_number("right", right / num_tasks)


def compare_learning_rates(context: AnalysisContext) -> Cases:
    """Vary the learning rate that the rows share; eighteen runs of five tasks."""
    for name in RATED:
        for rate in RATES:
            yield (
                f"{name}, {rate:g}",
                _case(context, dataclasses.replace(ROWS[name], rate=rate), read_few_tasks(context)),
            )


def run_fifty_tasks(context: AnalysisContext) -> Cases:
    """Learn fifty tasks of two classes from Python's documentation and DBpedia, for weights and cost by task.

    Three runs with half the epochs and half the length. Compare the cost of a step with that of the first task.
    """
    streams = [
        read_stream(name, folder, samples_per_class=MANY_ROWS, max_eval_samples=MANY_ROWS // 2, seed=context.seed)
        for name, folder in (("stdlib-split", None), ("db-split", context.data))
    ]
    tasks = split_classes(streams, MANY, context.seed)
    for name in ("sapt", "sapt, gate held", "sequential-lora"):
        yield f"{name}, {MANY} tasks", partial(_run_fifty, context, ROWS[name], tasks)


def _run_fifty(context: AnalysisContext, row: Row, tasks: Stream) -> list[Number]:
    run = run_row(row, tasks, context.seed, context.loaded, context.data, MANY_BUDGET, looked_at=MANY_LOOKED_AT)
    return collect_numbers(run) + collect_by_task(run) + bound_own_weight(tasks)


def bound_own_weight(tasks: Stream) -> list[Number]:
    """Return the mean own weight, by the number of tasks, of a gate that knows only the class of each text.

    A text whose class is in u tasks gives 1/u to the adapter of each.
    """
    numbers: list[Number] = []
    for num_tasks in range(1, len(tasks) + 1):
        classes = [(task.source, label) for task in tasks.tasks[:num_tasks] for label in task.labels]
        uses = Counter(classes)
        numbers += make_number(
            "most own_adapter_weight by tasks",
            sum(1 / uses[label_key] for label_key in classes) / len(classes),
            num_tasks,
        )
    return numbers


def compare_instructions(context: AnalysisContext) -> Cases:
    """Compare texts with and without the task's instruction, which tells the gate the task; two runs."""
    for with_instructions in (True, False):
        tasks = select_tasks(read_tasks("3", context.seed, context.data, instructions=with_instructions), FEW)
        yield "with" if with_instructions else "without", _case(context, ROWS["sapt"], tasks)


def compare_on_decoder(context: AnalysisContext) -> Cases:
    """Compare methods on a small pre-trained decoder that generates answers; nine runs of five tasks."""
    for name in sapt_decoder.DECODED:
        row = dataclasses.replace(ROWS[name], rate=None)  # another model, whose rate is that of its budget
        yield name, partial(_run_on_decoder, context, row, collect_numbers)
    yield "lfpt5", partial(_run_on_decoder, context, sapt_decoder.LFPT5, collect_numbers)


def compare_reflections(context: AnalysisContext) -> Cases:
    """Compare what stands for earlier tasks on that decoder: scores, cost and privacy; four runs of five tasks.

    The decoder generates the texts itself; it is trained for that after each task.
    """
    for name, row in sapt_decoder.STANDING.items():
        yield name, partial(_run_on_decoder, context, row, collect_reflection_numbers)


def _run_on_decoder(context: AnalysisContext, row: Row, collect: Callable[[RunState], list[Number]]) -> list[Number]:
    loaded = sapt_decoder.load_decoder(context.work, context.seed)
    tasks = select_tasks(sapt_decoder.read_text_tasks(context.seed, context.data), FEW)
    return collect(run_row(row, tasks, context.seed, loaded, context.data, sapt_decoder.DECODER_BUDGET))


ANALYSES: Mapping[str, Callable[[AnalysisContext], Cases]] = {
    "share": compare_memory_fractions,
    "size": compare_depths,
    "unseen": score_unseen_tasks,
    "pair": compare_pairs,
    "strength": compare_reflection_weights,
    "gate": compare_gates,
    "prompts": compare_prompts,
    "noticed": compare_task_free,
    "rates": compare_learning_rates,
    "fifty": run_fifty_tasks,
    "instructions": compare_instructions,
    "decoder": compare_on_decoder,
    "standing": compare_reflections,
}


# -- parts -----------------------------------------------------------------------------------------------------------


def _case(
    context: AnalysisContext, row: Row, tasks: Stream, collect: Callable[[RunState], list[Number]] = collect_numbers
) -> Callable[[], list[Number]]:
    """Return the function that runs a row over tasks and collects its numbers."""
    return lambda: collect(run_row(row, tasks, context.seed, context.loaded, context.data))


def read_few_tasks(context: AnalysisContext) -> Stream:
    """Return the five tasks of most analyses."""
    return select_tasks(read_tasks("3", context.seed, context.data), FEW)


def select_tasks(stream: Stream, names: Sequence[str]) -> Stream:
    """Return some tasks of a stream in this order. Raises UserError if one is missing."""
    tasks = {task.name: task for task in stream.tasks}
    missing = [name for name in names if name not in tasks]
    if missing:
        raise UserError(f"data: expected the task {missing[0]}, there are {', '.join(tasks)}")
    ranked = sorted(names)
    return dataclasses.replace(
        stream, tasks=tuple(tasks[name] for name in names), order=tuple(ranked.index(name) for name in names)
    )


def cut_layers(loaded: Loaded, layers: int) -> Loaded:
    """Return a BERT-like model with its first layers only. Raises UserError if it has fewer."""
    model: Any = deepcopy(loaded.model)
    if not 1 <= layers <= len(model.encoder.layer):
        raise UserError(f"layers: expected a number from 1 to {len(model.encoder.layer)}, got {layers}")
    model.encoder.layer = nn.ModuleList(model.encoder.layer[:layers])
    model.config.num_hidden_layers = layers
    return dataclasses.replace(loaded, model=model)


def case_path(work: Path, analysis: str, case: str, seed: int) -> Path:
    """Return the file of a case."""
    name = "".join(letter if letter.isalnum() or letter == "." else "-" for letter in case.replace("%", " percent"))
    return work / f"analysis-{analysis}" / f"{name}-{seed}.json"


def _make_case(key: Mapping[str, Any], collect: Callable[[], Any]) -> dict[str, Any]:
    return {**key, "numbers": collect()}


def _describe_case(name: str, case: Mapping[str, Any]) -> str:
    return f"{name}: {len(case['numbers'])} numbers"


def _cases(options: Namespace) -> Iterator[Case]:
    for seed in options.seed:
        setting = AnalysisContext(options.data, load("minilm"), seed, options.work)
        for name, collect in ANALYSES[options.name](setting):
            key = {"analysis": options.name, "case": name, "seed": seed}
            make = partial(_make_case, key, collect)
            path = case_path(options.work, options.name, name, seed)
            yield Case(path, make, partial(_describe_case, f"{options.name}, {name}"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing cases of an analysis."""
    make_missing(__doc__, arguments, _cases, work="sapt", choice=("name", ANALYSES), seed=SEEDS[:1])


if __name__ == "__main__":
    main()
