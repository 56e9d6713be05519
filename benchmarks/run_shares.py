"""What takes the time of finished runs of `regard learn`, as docs/learn.md says it.

python -m benchmarks.run_shares NAME=RUN [NAME=RUN …]

A run is the folder that `regard learn --out` wrote; run both on one machine, and nothing beside them.
"""

import json
import sys
from collections.abc import Mapping
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


def make_table(runs: Mapping[str, Path]) -> str:
    """Return a table with a column of shares for each run."""
    shares = {name: read_shares(run) for name, run in runs.items()}
    rows = [(purpose, *(f"{of[purpose]:.0f} %" for of in shares.values())) for purpose in (*PURPOSES, REST)]
    rows.append((BESIDE, *(f"{of[BESIDE]:.2f} s" for of in shares.values())))
    return markdown_table(("per cent of a run's time", *shares), rows)


if __name__ == "__main__":
    print(make_table({name: Path(run) for name, _, run in (argument.partition("=") for argument in sys.argv[1:])}))
