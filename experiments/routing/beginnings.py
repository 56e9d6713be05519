"""How many earlier adapters, of those that the router finds likeliest, a new one must try to begin at the best.

    python -m experiments.routing.beginnings --data DIR [--streams classes] [--seeds 2] [--work DIR]

A run of `sapt` in which each new adapter tries all earlier ones, as until now: what it loses under each of them on 64
of its rows is written down, in the order of the router. Rule, fixed before the run: of 4, 8 and 16 adapters the least
number that keeps .95 of what beginning at the best gains over beginning at nothing, in tasks with more than 16 adapters
before them; else all. A run of fifty tasks takes 40 minutes on a core.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from experiments.common.runs import Case, make_missing, origin
from experiments.routing.run import BUDGET
from experiments.routing.streams import describe_stream, read_named
from regard.continual.learner import Learner
from regard.continual.methods.sapt import Sapt, SaptNetwork
from regard.continual.methods.sapt_config import SaptConfig
from regard.continual.run import make_learner, run_stream
from regard.continual.training_phase import TrainingBudget
from regard.data.stream import Stream
from regard.models.heads import HeadName
from regard.models.pretrained import Loaded, load

STREAM, SEED = "classes", 2
NUMBERS = (4, 8, 16)
"""How many adapters are tried."""
KEPT = 0.95
"""The least share of the gain that has to be kept."""


class Recorded(Sapt):
    """SAPT that tries all earlier adapters, and writes down what a new task loses under each of them."""

    def __init__(self, config: SaptConfig) -> None:
        super().__init__(config)
        self.lines: list[dict[str, Any]] = []

    def choose_beginning(self, learner: Learner, task: int, adapter: int, likely: Sequence[int]) -> int | None:
        network, losses = learner.network_as(SaptNetwork), []
        rows = learner.sample_examples(task, "train", self.config.init_samples)
        with learner.loss_mode(), torch.no_grad():
            batches = list(learner.batches_by_length(rows))
            for other in (*likely, adapter):
                with network.use_only(other):
                    loss = sum(float(learner.cross_entropy(network(batch), batch)) for batch in batches)
                losses.append(loss / len(rows))
        self.lines.append({"place": task + 1, "nothing": losses[-1], "likeliest": losses[:-1]})
        return super().choose_beginning(learner, task, adapter, likely)


def make_record(
    stream: str, seed: int, tasks: Stream, loaded: Loaded, budget: TrainingBudget = BUDGET
) -> dict[str, Any]:
    """Run the stream and return the content of its file."""
    method = Recorded(SaptConfig(init_candidates=0, target_modules="auto"))
    head: HeadName | None = "labels" if method.head == "linear" else None
    run_stream(make_learner(tasks, method, loaded, budget, seed=seed, head=head), method)
    return {"stream": stream, "seed": seed, "tasks": describe_stream(tasks), "losses": method.lines, **origin()}


def beginnings_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a line a task: its loss under nothing, under the best adapter, and under the best of the likeliest."""
    lines = []
    for task in record["losses"]:
        least = {f"likeliest {most}": min(task["nothing"], *task["likeliest"][:most]) for most in NUMBERS}
        best = min(task["nothing"], *task["likeliest"])
        place = {"stream": record["stream"], "seed": record["seed"], "place": task["place"]}
        lines.append({**place, "nothing": task["nothing"], "best": best, **least})
    return lines


def _cases(options: Namespace) -> Iterator[Case]:
    for seed in options.seeds:
        for stream in options.streams:
            tasks = read_named(stream, seed, options.data)
            path = options.work / f"beginnings-{stream}" / f"{seed}.json"
            make = partial(make_record, stream, seed, tasks, load("minilm"))
            yield Case(path, make, _describe)


def _describe(record: Mapping[str, Any]) -> str:
    return f"{record['stream']}, {record['seed']}: {len(record['losses'])} adapters were begun"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing records."""
    make_missing(__doc__, arguments, _cases, work="routing", streams=[STREAM], seeds=[SEED])


if __name__ == "__main__":
    main()
