"""Which learning rate and head suit adapters at the scale `laptop`: runs of `regard learn` that differ in them alone.

    python -m experiments.rates.run --data DIR [--heads linear,labels] [--work DIR]

`stdlib-split` and the first six tasks of `mixed` (`experiments.routing.streams`), MiniLM, defaults otherwise (three
epochs) but 48 tokens a text, adapters of queries and values, no diagnostics. Finished runs are kept in `--work` and not
made again; all take an hour on one core.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import regard
from experiments.common.method_runs import earlier_settings
from experiments.common.runs import Case, describe_scores, final_scores, make_missing, origin
from experiments.routing.streams import read_mixed, take_first
from regard.data.stream import Stream

LINEAR, LABELS = "linear", "labels"
RATES = {"sapt": (3e-4, 1e-3, 2e-3, 5e-3), "replay-lora": (3e-4, 1e-3, 2e-3, 5e-3), "incremental-lora": (2.5e-4, 1e-3)}
"""Learning rates by method."""
STREAMS = ("mixed", "stdlib-split")
HEADS = (LINEAR, LABELS)
AT_LABELS = (1e-3, 2e-3)
"""The rates with the label-text head."""
SEED, TASKS, LENGTH = 1, 6, 48


def read_tasks(name: str, data: str) -> str | Stream:
    """Return a stream of `STREAMS`: a name, or its tasks."""
    if name != "mixed":
        return name
    return take_first(read_mixed(SEED, data), TASKS)


def make_run(stream: str, method: str, rate: float, head: str, data: str) -> dict[str, Any]:
    """Run a method at a rate and return the content of its file."""
    options: dict[str, Any] = {
        "head": None if head == LINEAR else head,
        "diagnostic_samples": 0,
        "save_models": False,
        "seeds": [SEED],
        "set": [f"{name}={value}" for name, value in earlier_settings(method).items()],
    }
    result = regard.learn(
        read_tasks(stream, data), method, model="minilm", learning_rate=rate, length=LENGTH, **options
    )
    return {
        **{"stream": stream, "method": method, "rate": rate, "head": head, "seed": SEED},
        **final_scores(result.accuracy_matrix),
        "tasks": int(result.accuracy_matrix["task"].nunique()),
        **origin(),
    }


def run_path(work: Path, stream: str, method: str, rate: float, head: str) -> Path:
    """Return the file of a run."""
    return work / stream / f"{method}-{head}-{rate:g}.json"


def _cases(options: Namespace) -> Iterator[Case]:
    for head, stream in product(options.heads, STREAMS):
        for method, rates in RATES.items():
            for rate in (rate for rate in rates if head == LINEAR or rate in AT_LABELS):
                path = run_path(options.work, stream, method, rate, head)
                yield Case(path, partial(make_run, stream, method, rate, head, options.data), _describe)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs."""
    make_missing(__doc__, arguments, _cases, work="rates", heads=HEADS)


def _describe(run: Mapping[str, Any]) -> str:
    name = f"{run['stream']}, {run['method']}, {run['head']}, {run['rate']:g}"
    return describe_scores(name, run)


if __name__ == "__main__":
    main()
