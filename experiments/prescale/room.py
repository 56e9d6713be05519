"""Pre-scaling where accuracy has room to rise: fewer rows, and a stream whose labels are alike.

    python -m experiments.prescale.room --data DIR [--streams stdlib-split,db-split] [--work DIR]

On the streams of `experiments.prescale.run` probing first reaches what learning all tasks at once reaches, and scaling
can add nothing. Here `stdlib-split` has 8 and `db-split` 4 training rows a class, in as many steps a task as 60 have
there, and `sentiment` is the four tasks of Long Sequence that ask for the mood of a text, whose labels are alike, with
60 rows a class and 64 tokens a text. At most 200 test rows a task; all else as there. The seed draws rows, and but for
`sentiment` the order. Finished runs are kept in `--work` and not made again; all take two hours on one core.

Rule, fixed before the runs, for each stream: with D the 95 % interval (Student's t, paired by seed) of accuracy after
the last task, each text among the classes of its own task (TIL), with pre-scaling minus that of probing first, the
first that is true: pre-scaling *adds* if all of D is above 0, *takes* if all of D is below 0, *adds less than a point*
if all of D is below 1; else it *cannot be told*. A stream where probing reaches 97 or more on average has no room and
decides nothing.
"""

import dataclasses
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import pandas as pd

from experiments.common.method_runs import describe_run, make_record, run_path
from experiments.common.runs import Case, make_missing
from experiments.methods.run import SENTIMENT, take_moods
from experiments.prescale.run import TRAIN, budget
from experiments.sapt import run as sapt
from regard.continual.methods import method_named
from regard.continual.run import make_learner, run_stream
from regard.continual.training_phase import TrainingBudget
from regard.data.stream import Stream
from regard.data.streams import read_stream
from regard.models.pretrained import Loaded, load

METHODS = ("finetune", "probe-finetune", "prescale")
ROWS: Mapping[str, int] = {"stdlib-split": 8, "db-split": 4, SENTIMENT: TRAIN}
"""Training rows a class, by stream."""
SEEDS = (508, 39, 123, 4536, 67, 1)
EVALUATED, STEPS = 200, 24


def read_rows(stream: str, seed: int, data: str) -> Stream:
    """Read a stream with its number of rows."""
    rows: dict[str, Any] = {"samples_per_class": ROWS[stream], "max_eval_samples": EVALUATED, "seed": seed}
    if stream != SENTIMENT:
        return read_stream(stream, data, order="random", **rows)
    what: dict[str, Any] = {"task_type": "classification", "missing_tasks": "skip", "instructions": False}
    return take_moods(read_stream(sapt.STREAM, data, order=sapt.ORDERS[0], **what, **rows))


def choose_budget(stream: str) -> TrainingBudget:
    """Return the training budget; where a batch holds all rows of a task, an epoch is one step."""
    if stream == SENTIMENT:
        return dataclasses.replace(budget(stream), length=64)
    return dataclasses.replace(budget(stream), num_epochs=STEPS, num_probing_epochs=STEPS)


def make_run(stream: str, name: str, seed: int, loaded: Loaded, data: str) -> dict[str, Any]:
    """Run a method and return the content of its file."""
    start = time.process_time()
    method_class = method_named(name)
    method = method_class(method_class.Config.parse({}))
    tasks = read_rows(stream, seed, data)
    run = run_stream(make_learner(tasks, method, loaded, choose_budget(stream), seed=seed), method)
    return make_record(stream, name, seed, pd.DataFrame(run.rows["matrix"]), start)


def _cases(options: Namespace) -> Iterator[Case]:
    loaded = load("minilm")
    for seed, stream, method in product(SEEDS, options.streams, METHODS):
        path = run_path(options.work, stream, method, seed)
        yield Case(path, partial(make_run, stream, method, seed, loaded, options.data), describe_run)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs."""
    make_missing(__doc__, arguments, _cases, work="room", streams=ROWS)


if __name__ == "__main__":
    main()
