"""SAPT with its default router, with the one it trains, and other methods on texts without instructions.

    python -m experiments.routing.run --data DIR [--streams long,mixed] [--rows "sapt;joint"] [--seeds 42,1,2]

MiniLM-L6 with the label-text head; streams are those of `experiments.routing.streams`. Blocks of rank 8 on queries and
values, 4 epochs in batches of 16 at 2e-3, 32 tokens a text, in float32. A run takes four to eight minutes on one core.
Finished runs are kept in `--work DIR` and not made again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.common.runs import Case, make_missing
from experiments.routing.streams import read_ordinary
from experiments.sapt.run import BUDGET as INSTRUCTED
from experiments.sapt.run import Row, learnt, run_row
from regard.continual.learner import Learner
from regard.continual.methods.sapt import SaptNetwork
from regard.models.pretrained import Loaded, load
from regard.runs.provenance import library_versions, regard_version

STREAMS = ("long", "mixed")
SEEDS = (42, 1, 2)
WORK = Path("runs") / "routing"
BUDGET = replace(INSTRUCTED, length=32, precision="float32")
ROWS: dict[str, Row] = {
    "sapt": Row("sapt"),
    "sapt, begun at the last": Row("sapt", {"init": "last"}),
    "sapt, begun at the best": Row("sapt", {"init": "best"}),
    "sapt, learnt router": learnt(),
    "sapt, learnt router, 50 vectors": learnt({"memory_size": 50}),
    "sapt-paper": Row("sapt-paper"),
    "epi": Row("epi"),
    "replay-lora": Row("replay-lora", {"memory_size": 50}),
    "joint": Row("joint", lora=True),
}


@torch.no_grad()
def measure_routing(learner: Learner) -> list[dict[str, Any]]:
    """Return of each task the mean weight of its own adapter, and the per cent of test rows that give it most."""
    if not isinstance(learner.network, SaptNetwork):
        return []
    network, rows = learner.network, []
    for task in range(len(learner.stream)):
        items = learner.sample_examples(task, "test", 10**6)
        with learner.evaluation_mode():
            weights = [network.router(network.vectors(batch)) for batch in learner.iterate_batches(items, "test")]
        rows.append({**learner.task_columns(task), **summarize(torch.cat(weights), network.adapter_of(task))})
    return rows


def summarize(weights: Tensor, own: int) -> dict[str, float]:
    """Summarize weights (row, adapter) of the rows of a task: `own` is the index of its adapter."""
    right = (weights.argmax(1) == own).double()
    return {"own_weight": float(weights[:, own].mean()), "right": 100 * float(right.mean())}


def make_run(stream: str, row: str, seed: int, loaded: Loaded, data: str) -> dict[str, Any]:
    """Run a row and return the content of its file."""
    start, tasks = time.perf_counter(), read_ordinary(stream, seed, data)
    run = run_row(ROWS[row], tasks, seed, loaded, data, BUDGET, looked_at=0)
    tables = {name: rows for name, rows in run.rows.items() if name != "gate"}
    return {
        "stream": stream,
        "row": row,
        "seed": seed,
        "tasks": [task.name for task in tasks.tasks],
        **tables,
        "routing": measure_routing(run.learner),
        "regard": regard_version(),
        "versions": library_versions(),
        "seconds": round(time.perf_counter() - start, 1),
    }


def run_path(work: Path, stream: str, row: str, seed: int) -> Path:
    """Return the file of a run."""
    return work / stream / f"{row.replace(', ', '-').replace(' ', '-')}-{seed}.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of published files")
    parser.add_argument("--streams", default=",".join(STREAMS), help="apart by commas (default: %(default)s)")
    parser.add_argument("--rows", default="sapt;sapt, learnt router;replay-lora;joint", help="apart by semicolons")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="apart by commas (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of finished runs (default: %(default)s)")
    options = parser.parse_args(arguments)
    seeds, streams = [int(seed) for seed in options.seeds.split(",")], options.streams.split(",")
    unknown = [row for row in options.rows.split(";") if row not in ROWS]
    if unknown:
        parser.error(f"--rows: expected some of {'; '.join(ROWS)}, got {unknown[0]}")
    torch.set_num_threads(1)

    def cases() -> Iterator[Case]:
        for seed in seeds:
            for stream in streams:
                for row in options.rows.split(";"):
                    make = partial(_make, stream, row, seed, options.data)
                    yield Case(run_path(options.work, stream, row, seed), make, describe)

    make_missing(cases)


def _make(stream: str, row: str, seed: int, data: str) -> Mapping[str, Any]:
    return make_run(stream, row, seed, load("minilm", dtype="float32"), data)


def describe(run: Mapping[str, Any]) -> str:
    """Describe a run in a line."""
    last = [cell["score"] for cell in run["matrix"] if cell["after_task"] == len(run["tasks"])]
    own = [task["own_weight"] for task in run["routing"]]
    weight = f", own weight {sum(own) / len(own):.2f}" if own else ""
    mean = sum(last) / max(1, len(last))
    return f"{run['stream']}, {run['row']}, seed {run['seed']}: mean score {mean:.1f}{weight}, {run['seconds']:.0f} s"


if __name__ == "__main__":
    main()
