"""SAPT with its router in closed form against replay and joint training, on texts without instructions.

    python -m experiments.routing.run --data DIR [--streams long,mixed] [--rows "sapt;joint"] [--seeds 42,1,2]
        [--work DIR]

The model and the settings are those of `experiments.sapt.run` (MiniLM-L6, label-text head, at most 120 training and 40
test rows a task, rank 8, 4 epochs in batches of 16 at 2e-3), but 32 tokens a text without instruction, in float32; in
`answers` a decoder that is pre-trained here on Python's documentation, with the settings of `experiments.sapt.decoder`.
A run takes four to eight minutes on one core. Finished runs are kept in `--work` and not made again.
"""

import dataclasses
import functools
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from experiments.common.runs import Case, file_name, make_missing, origin
from experiments.routing.streams import TRAINED, describe_stream, read_named
from experiments.sapt.decoder import DECODER_BUDGET, load_decoder
from experiments.sapt.run import BUDGET as LONGER
from experiments.sapt.run import SEEDS, Row, describe_scores, run_row
from regard.continual.learner import Learner
from regard.continual.methods.sapt import SaptNetwork
from regard.continual.training_phase import ExampleRef, TrainingBudget
from regard.data.stream import Stream
from regard.models.pretrained import Loaded, load

SAPT, REPLAY, JOINT = "sapt", "replay-lora", "joint"
BUDGET = dataclasses.replace(LONGER, length=32, precision="float32")
BUDGETS = {"instructed": dataclasses.replace(BUDGET, length=LONGER.length), "answers": DECODER_BUDGET}
"""Budgets of streams that need another."""
DECODER_SEED = 42
"""Of the one decoder of all runs."""
LEARNT = {"router": "attention", "query": "embeddings", "init": "last"}
"""The router that SAPT trains, with adapters that begin as the last one: the default until now."""
ROWS: dict[str, Row] = {
    SAPT: Row("sapt"),
    "sapt, begun at nothing": Row("sapt", {"init": "nothing"}),
    "sapt, begun at the last": Row("sapt", {"init": "last"}),
    "sapt, above the query": Row("sapt", {"above_query": True}),
    "sapt, learnt router": Row("sapt", LEARNT),
    REPLAY: Row("replay-lora", {"memory_size": 50}),
    "epi": Row("epi", {"shrinkage": 0.0}),
    "merge-linear": Row("merge-linear"),
    "merge-ties": Row("merge-ties"),
    "merge-dare": Row("merge-dare"),
    JOINT: Row("joint", lora=True),
}


def measure_routing(learner: Learner) -> list[dict[str, Any]]:
    """Return for each task the mean weight of its own adapter over its test rows, and where that is the largest."""
    if not isinstance(learner.network, SaptNetwork):
        return []
    network, rows = learner.network, []
    for task in range(len(learner.stream)):
        items = [ExampleRef(task, row) for row in range(len(learner.encoded[task, "test"]))]
        with learner.evaluation_mode(), torch.no_grad():
            batches = learner.iterate_batches(items, "test")
            weights = torch.cat([network.router(network.vectors(batch)) for batch in batches])
        own = network.adapter_of(task)
        largest = (weights.argmax(1) == own).float().mean()
        name = learner.stream.tasks[task].name
        rows.append({"task": name, "own_weight": float(weights[:, own].mean()), "own_largest": float(largest)})
    return rows


def make_run(
    stream: str, row: str, seed: int, tasks: Stream, loaded: Loaded, data: str, budget: TrainingBudget | None = None
) -> dict[str, Any]:
    """Run a row and return the content of its file."""
    start = time.perf_counter()
    run = run_row(ROWS[row], tasks, seed, loaded, data, budget or BUDGETS.get(stream, BUDGET), looked_at=0)
    return {
        "stream": stream,
        "row": row,
        "seed": seed,
        "tasks": describe_stream(tasks),
        "matrix": run.rows["matrix"],
        "cost": run.rows["cost"],
        "routing": measure_routing(run.learner),
        **origin(),
        "seconds": round(time.perf_counter() - start, 1),
    }


def load_named(stream: str, work: Path) -> Loaded:
    """Load the model of a stream; a decoder that is missing in the work folder is pre-trained."""
    return load_decoder(work, DECODER_SEED) if stream == "answers" else load("minilm")


def _cases(options: Namespace) -> Iterator[Case]:
    load_model = functools.cache(partial(load_named, work=options.work))
    for seed, stream in product(options.seeds, options.streams):
        tasks = read_named(stream, seed, options.data)
        for row in options.rows:
            yield Case(
                options.work / f"run-{stream}" / file_name(row, seed),
                partial(make_run, stream, row, seed, tasks, load_model(stream), options.data),
                partial(_describe_run, f"{stream}, {row}, {seed}"),
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs."""
    make_missing(__doc__, arguments, _cases, work="routing", streams=TRAINED, rows=ROWS, seeds=SEEDS)


def _describe_run(name: str, run: Mapping[str, Any]) -> str:
    weights = [task["own_weight"] for task in run["routing"]]
    own = f", own weight {sum(weights) / len(weights):.2f}" if weights else ""
    return f"{name}: {run['seconds']} s, {describe_scores(run['matrix'])}{own}"


if __name__ == "__main__":
    main()
