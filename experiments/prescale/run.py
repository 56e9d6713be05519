"""Pre-scaling against other methods (arXiv 2410.05648, tables 1 to 3), at the scale of a laptop: a run for each row.

    python -m experiments.prescale.run STREAM [--data DIR] [--rows finetune,prescale] [--seeds 508,39] [--work DIR]

STREAM is db-split, news-series or stdlib-split. MiniLM-L6, 60 training rows a class, at most 100 test rows a task,
texts of 32 tokens (64 for news-series, whose texts are pairs), batches of 16, 3 epochs of probing at 1e-2 and 3 of
everything at 1e-4, computing in bfloat16. The seed draws rows and order. These are fewer rows and larger rates than the
paper's, so that a run takes one to three minutes on one core, and a stream with all rows and five seeds a few hours;
the rows of the paper's own methods about one. Finished runs are kept in `--work` and never made twice.
"""

import json
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from experiments.common.runs import Case, file_name, make_missing, origin
from regard.continual.diagnostics import diagnose
from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.methods import method_named
from regard.continual.network import INPUTS
from regard.continual.run import make_learner, run_stream
from regard.continual.training_phase import TrainingBudget
from regard.data.streams import read_stream
from regard.data.tokenizers import common_tokens
from regard.models.pretrained import Loaded, load

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "finetune": ("finetune", {}),
    "probe": ("probe", {}),
    "probe-finetune": ("probe-finetune", {}),
    "prescale": ("prescale", {}),
    "prescale uniform": ("prescale", {"scaling": "uniform"}),
    "prescale sink": ("prescale", {"scaling": "sink"}),
    "separate": ("separate", {}),
    "joint": ("joint", {}),
    "replay": ("replay", {}),
    "agem": ("agem", {}),
    "ewc": ("ewc", {}),
    "lwf": ("lwf", {}),
    "der++": ("der++", {}),
    "mbpa++": (
        "mbpa++",
        {"replay_interval": 10, "adaptation_scope": "head", "num_neighbors": 8, "adaptation_steps": 10},
    ),
    "idbr": ("idbr", {}),
    "idbr without replay": ("idbr", {"replay": False}),
    "l2p": ("l2p", {}),
    "ctr": ("ctr", {}),
}
"""What each row runs: a method, and what its settings differ in from their defaults."""
STREAMS = ("db-split", "news-series", "stdlib-split")
SEEDS = (508, 39, 123, 4536, 67)
TRAIN, EVALUATED, DIAGNOSED = 60, 100, 32


def budget(stream: str) -> TrainingBudget:
    """Return the training budget of a stream."""
    return TrainingBudget(
        num_epochs=3,
        learning_rate=1e-4,
        num_probing_epochs=3,
        probing_learning_rate=1e-2,
        batch_size=16,
        length=64 if stream == "news-series" else 32,
        precision="bfloat16",
    )


def begin(stream: str, row: str, seed: int, loaded: Loaded, data: str | None = None) -> tuple[Learner, Method]:
    """Return what runs a row on a stream, and its method."""
    name, settings = ROWS[row]
    method_class = method_named(name)
    method = method_class(method_class.Config.parse(settings))
    tasks = read_stream(stream, data, samples_per_class=TRAIN, max_eval_samples=EVALUATED, order="random", seed=seed)
    return make_learner(tasks, method, loaded, budget(stream), seed=seed), method


def read_inputs(learner: Learner, task: int) -> list[dict[str, Any]]:
    """Return what an encoder reads of the rows of a task that are diagnosed."""
    batches = learner.iterate_batches(learner.items(task)[:DIAGNOSED], size=DIAGNOSED)
    return [{name: value for name, value in batch.items() if name in INPUTS} for batch in batches]


def make_run(stream: str, row: str, seed: int, loaded: Loaded, data: str | None) -> dict[str, Any]:
    """Run a row and return the content of its file."""
    start = time.perf_counter()
    learner, method = begin(stream, row, seed, loaded, data)
    tasks, common = learner.stream, common_tokens(loaded.tokenizer)

    def diagnose_task(learner: Learner, task: int) -> list[dict[str, Any]]:
        table = diagnose(learner.network.classifier.encoder, read_inputs(learner, task), common=common)
        return [dict(one) for one in json.loads(table.to_json(orient="records"))]

    run = run_stream(learner, method, diagnose=diagnose_task if row in LOOKED_AT else None)
    return {
        "stream": {"name": stream, "order": list(tasks.order), "record": dict(tasks.metadata)},
        "row": row,
        "seed": seed,
        **run.rows,
        **origin(),
        "seconds": round(time.perf_counter() - start, 1),
    }


LOOKED_AT = ("finetune", "probe-finetune", "prescale", "prescale uniform", "prescale sink")


def _cases(options: Namespace) -> Iterator[Case]:
    loaded, stream = load("minilm"), options.stream
    for seed, row in product(options.seeds, options.rows):
        yield Case(
            options.work / stream / file_name(row, seed),
            partial(make_run, stream, row, seed, loaded, options.data),
            partial(_describe_run, f"{stream} {row} {seed}"),
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs."""
    lists: dict[str, Any] = {"rows": ROWS, "seeds": SEEDS}
    make_missing(__doc__, arguments, _cases, work="prescale", choice=("stream", STREAMS), needs_data=False, **lists)


def _describe_run(name: str, run: Mapping[str, Any]) -> str:
    return f"{name}: {run['seconds']} s, {_mean_score(run['matrix'])}"


def _mean_score(matrix: Sequence[Mapping[str, Any]]) -> str:
    """Format the mean score after the last task."""
    last = max(row["after_task"] for row in matrix)
    scores = [row["score"] for row in matrix if row["after_task"] == last and row["scenario"] == "til"]
    return f"{sum(scores) / len(scores):.1f}"


if __name__ == "__main__":
    main()
