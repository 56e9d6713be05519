"""Which method `regard learn` has by default: `prescale` and `sapt` with default settings on three streams.

    python -m experiments.methods.run --data DIR [--streams stdlib-split,news-series] [--methods prescale,sapt]
        [--work DIR]

`stdlib-split`; `news-series`, of the paper on pre-scaling; and `sentiment`, the four tasks of Long Sequence that ask
for the mood of a text, whose labels are alike. MiniLM, defaults of the scale `laptop` but 32 tokens a text and no
diagnostics. Finished runs are kept in `--work` and not made again; all take an hour and a half on one core.

Rule, fixed before the runs: `sapt` takes the place of `prescale` if on each stream the whole 95 % interval (Student's
t, paired by seed) of its AP among the classes of all tasks (CIL) minus that of `prescale` is above 0, and the mean of
its AP with the task known (TIL) is at most 2 points below. `replay` stands beside them and decides nothing.

A second rule, fixed when one run of `stdlib-split` with other lengths had been seen: with the task known its adapter
alone answers (`known_task=adapter`) if the mean over streams of AP TIL minus that of `sapt-routed` is above 0, and on
no stream the mean is more than a point below.
"""

import dataclasses
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import regard
from experiments.common.method_runs import describe_run, make_record, run_path
from experiments.common.runs import Case, make_missing
from experiments.routing.streams import read_long
from regard.data.stream import Stream

PRESENT, CANDIDATE, ROUTED, BESIDE = "prescale", "sapt", "sapt-routed", "replay"
METHODS = (PRESENT, CANDIDATE, ROUTED, BESIDE)
ROUTER: Mapping[str, str] = {"known_task": "router"}
"""Settings of `ROUTED`: the router weighs adapters also where the task is known."""
SENTIMENT = "sentiment"
STREAMS = ("stdlib-split", "news-series", SENTIMENT)
MOODS = ("yelp", "amazon", "imdb", "sst2")
"""The tasks of `sentiment`."""
SEEDS = (508, 39, 123)
LENGTH = 32


def take_moods(stream: Stream) -> Stream:
    """Return the tasks of Long Sequence that ask for the mood of a text."""
    tasks = tuple(task for task in stream.tasks if task.name in MOODS)
    return dataclasses.replace(stream, name=SENTIMENT, tasks=tasks, order=tuple(range(len(tasks))))


def make_run(stream: str, method: str, seed: int, data: str) -> dict[str, Any]:
    """Run a method and return the content of its file."""
    start = time.process_time()
    rows = {"stream": take_moods(read_long(seed, data))} if stream == SENTIMENT else {"stream": stream, "data": data}
    result = regard.learn(
        **rows,
        method=CANDIDATE if method == ROUTED else method,
        set=[f"{name}={value}" for name, value in ROUTER.items()] if method == ROUTED else [],
        model="minilm",
        length=LENGTH,
        diagnostic_samples=0,
        save_models=False,
        seeds=[seed],
    )
    return make_record(stream, method, seed, result.accuracy_matrix, start)


def _cases(options: Namespace) -> Iterator[Case]:
    for seed, stream, method in product(SEEDS, options.streams, options.methods):
        path = run_path(options.work, stream, method, seed)
        yield Case(path, partial(make_run, stream, method, seed, options.data), describe_run)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs."""
    make_missing(__doc__, arguments, _cases, work="methods", streams=STREAMS, methods=METHODS)


if __name__ == "__main__":
    main()
