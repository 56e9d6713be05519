"""How far EPI's covariance is to be shrunk: the share of texts that get their own task's adapter, for several shares.

    python -m experiments.routing.shrinkage --data DIR [--out docs/results/epi-shrinkage.csv]

Four streams, three seeds each: tasks of the Long Sequence benchmark behind their instructions, and classes of DBpedia,
of the standard library's documentation and of news, reviews and pairs of sentences without any. Nothing is trained: EPI
tells tasks apart by states of the frozen model alone. 50 texts a class (30 with instructions) are learnt, 60 a task are
scored after each task. 0 is the paper's pseudo-inverse; the default, .1, was picked after these runs, in which more
brings less than two points on any stream. Ten minutes on one core.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from regard.continual.methods.epi import Epi, EpiConfig, EpiNetwork
from regard.continual.run import make_learner
from regard.continual.training_phase import TrainingBudget
from regard.data.stream import Stream
from regard.data.streams import read_stream
from regard.models.pretrained import Loaded, load

SHRINKAGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
SEEDS = (1, 2, 3)
TEXTS, SCORED = 50, 60
BUDGET = TrainingBudget(length=72, batch_size=16)


def streams(data: str, seed: int) -> Mapping[str, Callable[[], Stream]]:
    """Return how to read each stream."""
    options: dict[str, Any] = {"max_eval_samples": SCORED, "seed": seed, "missing_tasks": "skip"}
    instructed: dict[str, Any] = {"order": "3", "task_type": "classification", "instructions": True}
    return {
        "long-sequence": lambda: read_stream("long-sequence", data, samples_per_class=30, **instructed, **options),
        "db-split": lambda: read_stream("db-split", data, samples_per_class=TEXTS, **options),
        "stdlib-split": lambda: read_stream("stdlib-split", samples_per_class=TEXTS, **options),
        "news-series": lambda: read_stream("news-series", data, samples_per_class=TEXTS, **options),
    }


@torch.no_grad()
def identify(stream: Stream, loaded: Loaded, seed: int) -> Iterator[tuple[float, int, float]]:
    """Yield a share, the number of tasks learnt, and the percentage of their texts that find their task."""
    networks = {}
    for shrinkage in SHRINKAGES:
        method = Epi(EpiConfig(r=1, shrinkage=shrinkage))
        learner = make_learner(stream, method, loaded, BUDGET, seed=seed)
        networks[shrinkage] = learner.network_as(EpiNetwork)
    scored = []
    for task in range(len(stream)):
        learner.task = task
        with learner.evaluation_mode():
            batches = learner.iterate_batches(learner.items(task))
            learnt = [(networks[0.0].states(rows), rows["labels"]) for rows in batches]
            examples = learner.sample_examples(task, "test", SCORED)
            scored.append(torch.cat([networks[0.0].states(one) for one in learner.batches_by_length(examples, "test")]))
        states, labels = (torch.cat(parts) for parts in zip(*learnt, strict=True))
        for shrinkage, network in networks.items():
            network.learn(states, labels, task)
            right = [(network.distances(texts).argmin(-1) == number).double() for number, texts in enumerate(scored)]
            yield shrinkage, task + 1, 100 * float(torch.cat(right).mean())


def main() -> None:
    """Make the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=Path("docs/results/epi-shrinkage.csv"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    loaded, rows = load("minilm"), []
    for seed in SEEDS:
        for name, read in streams(given.data, seed).items():
            for shrinkage, tasks, right in identify(read(), loaded, seed):
                rows.append((name, seed, shrinkage, tasks, round(right, 2)))
            print(name, seed, flush=True)
    table = pd.DataFrame(rows, columns=["stream", "seed", "shrinkage", "tasks_learnt", "own_task_percent"])
    table.to_csv(given.out, index=False)
    print(table.groupby(["stream", "shrinkage"])["own_task_percent"].mean().unstack().round(1).to_string())


if __name__ == "__main__":
    main()
