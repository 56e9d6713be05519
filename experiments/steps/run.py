"""How many steps a task needs at the scale `laptop`: runs of `regard learn` that differ in their number alone.

    python -m experiments.steps.run --data DIR [--rows 40,120] [--methods sapt,replay-lora] [--work DIR]

The first six tasks of `mixed` (`experiments.routing.streams`) with 40 and with 120 training rows a task, MiniLM,
defaults otherwise but 32 tokens a text, adapters of queries and values, no diagnostics. Three epochs of them are 9 and
24 steps. Finished runs are kept in `--work` and not made again; all take half an hour on one core.

Rule, fixed before the runs: the least number of steps of a task is the smallest of these whose mean AP among the
classes of all tasks (CIL), over both methods and both numbers of rows, is within 3 points of the best of them.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import regard
from experiments.common.method_runs import earlier_settings
from experiments.common.runs import Case, describe_scores, final_scores, make_missing, origin
from experiments.routing.streams import read_mixed, take_first

METHODS = ("sapt", "replay-lora")
ROWS = (40, 120)
STEPS = (9, 24, 48, 96)
SEED, TASKS, LENGTH = 1, 6, 32
MANY = 1000
"""Epochs that no number of steps here reaches."""


def make_run(method: str, rows: int, steps: int, data: str) -> dict[str, Any]:
    """Run a method with a number of steps a task and return the content of its file."""
    stream = take_first(read_mixed(SEED, data, rows), TASKS)
    result = regard.learn(
        stream,
        method,
        model="minilm",
        length=LENGTH,
        num_epochs=MANY,
        max_steps=[f"{task.name}={steps}" for task in stream.tasks],
        diagnostic_samples=0,
        save_models=False,
        seeds=[SEED],
        set=[f"{name}={value}" for name, value in earlier_settings(method).items()],
    )
    cost = result.cost
    return {
        **{"method": method, "rows": rows, "steps": steps, "seed": SEED},
        **final_scores(result.accuracy_matrix),
        **{"trained": sorted({int(number) for number in cost["steps"]}), "seconds": float(cost["seconds"].sum())},
        **origin(),
    }


def _cases(options: Namespace) -> Iterator[Case]:
    for rows, method, steps in product(options.rows, options.methods, STEPS):
        path = options.work / f"{method}-{rows}-{steps}.json"
        yield Case(path, partial(make_run, method, rows, steps, options.data), _describe)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs."""
    make_missing(__doc__, arguments, _cases, work="steps", rows=ROWS, methods=METHODS)


def _describe(run: Mapping[str, Any]) -> str:
    name = f"{run['rows']} rows, {run['method']}, {run['steps']} steps"
    return describe_scores(name, run)


if __name__ == "__main__":
    main()
