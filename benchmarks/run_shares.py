"""What takes the time of finished runs of `regard learn`, as docs/learn.md says it.

python -m benchmarks.run_shares NAME=RUN [NAME=RUN …]
python -m benchmarks.run_shares learn ARGUMENTS OF regard learn

A run is the folder that `regard learn --out` wrote; of several of one name medians are taken. `learn` makes one whose
seconds are CPU time of its process, which neighbors on a shared machine hardly touch; run versions in turn.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from benchmarks.markdown import markdown_table

PURPOSES = {
    "training of the adapters": "seconds",
    "what the method prepares and keeps": "hook_seconds",
    "scores of all tasks so far": "scoring_seconds",
    "diagnostics and gate": "diagnostics_seconds",
    "saving": "saving_seconds",
}
"""Columns of cost.parquet by what they are."""
REST, BESIDE = "reading, interference of tasks, FLOPs", "beside a second of training"


def read_shares(run: Path) -> dict[str, float]:
    """Return the share of each purpose in per cent, and what is not training, in parts of it."""
    cost = pd.read_parquet(run / "cost.parquet")
    (about,) = json.loads((run / "results.json").read_text(encoding="utf-8"))["runs"]
    total = float(about["seconds"])
    shares = {name: 100 * float(cost[column].sum()) / total for name, column in PURPOSES.items()}
    training = shares["training of the adapters"]
    return {**shares, REST: 100 - sum(shares.values()), BESIDE: (100 - training) / training}


def make_table(runs: Mapping[str, Sequence[Path]]) -> str:
    """Return a table with a column of shares for each name, medians over its runs."""
    shares = {}
    for name, paths in runs.items():
        each = [read_shares(path) for path in paths]
        shares[name] = {purpose: statistics.median(one[purpose] for one in each) for purpose in each[0]}
    rows = [(purpose, *(f"{of[purpose]:.0f} %" for of in shares.values())) for purpose in (*PURPOSES, REST)]
    rows.append((BESIDE, *(f"{of[BESIDE]:.2f} s" for of in shares.values())))
    return markdown_table(("per cent of a run's time", *shares), rows)


def learn(arguments: list[str]) -> int:
    """Run `regard learn` with CPU time as its clock; return its exit code."""
    time.perf_counter = time.process_time
    from regard.cli import main

    return main(["learn", *arguments])


if __name__ == "__main__":
    if sys.argv[1:2] == ["learn"]:
        sys.exit(learn(sys.argv[2:]))
    found: dict[str, list[Path]] = {}
    for name, _, path in (argument.partition("=") for argument in sys.argv[1:]):
        found.setdefault(name, []).append(Path(path))
    print(make_table(found))
