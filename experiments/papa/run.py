"""PAPA's table of constants and figure of orders on MiniLM, at the scale of a laptop.

    python -m experiments.papa.run --data DIR [--tasks cola,sst2,mrpc,ner,pos] [--out docs/results]

For each task at its `laptop` scale (1,000 to 1,600 training examples of 32 to 96 tokens), three seeds, special tokens
held in place: the untouched model; averages with 1/2, 1/8, 1/16 and none of the heads dynamic, chosen by lambda, and by
every other order at 1/2 and 1/8; the other sources, and the averages of another task, with all heads constant. About
25 minutes a task on one core, so an hour on two (`--tasks` in two processes). Expected, from the paper: averages beat
every data-free source; all heads constant cost about 8 % of the score on average, half of them next to nothing; lambda
beats the orders by layer; averages of another task serve as well. What came of it is in docs/papa.md, made from the
tables that this leaves.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console

from regard import models
from regard.commands.replace.result import ReplaceResult
from regard.commands.replace.run import replace
from regard.runs.progress import ProgressEvent

TASKS = ("cola", "sst2", "mrpc", "ner", "pos")
ELSEWHERE = {"cola": "sst2", "sst2": "mrpc", "mrpc": "sst2", "ner": "sst2", "pos": "sst2"}
"""Whose averages stand in for a task's own."""
OTHERS = ("input-dependence", "output-norm", "first-layers", "last-layers", "random", "reversed")
SOURCES = ("identity", "toeplitz", "zeros", "toeplitz-init", "average-init")
FOLDER = Path("docs") / "results"


def runs(task: str, model: str, data: str, work: Path, console: Console) -> ReplaceResult:
    """Everything on one task, as one record: its scores are those of four runs."""
    loaded = models.load(model)
    began = time.perf_counter()

    def show(event: ProgressEvent) -> None:
        console.print(f"{time.perf_counter() - began:7.0f} s  {task}: {event.phase}", highlight=False)

    def run(name: str, **settings: Any) -> ReplaceResult:
        folder = work / f"{task}-{name}"
        return replace(loaded, task, data=data, work_dir=folder, resume=True, on_progress=show, **settings)

    main = run("lambda")
    others = run("orders", rank_heads_by=OTHERS, dynamic_fractions=(1 / 2, 1 / 8))
    sources = run("sources", constants=SOURCES, rank_heads_by="input-dependence", dynamic_fractions=0.0)
    elsewhere = run(
        "elsewhere", constants_from=ELSEWHERE[task], rank_heads_by="input-dependence", dynamic_fractions=0.0
    )
    elsewhere.scores["constants"] = f"average of {ELSEWHERE[task]}"
    for part in (sources, elsewhere):
        part.scores["rank_heads_by"] = "lambda"  # with no head dynamic the order does not matter
    parts = (main, others, sources, elsewhere)
    main.metadata["cost"]["seconds"] = round(sum(part.metadata["cost"]["seconds"] for part in parts), 1)
    scores = pd.concat([part.scores for part in parts], ignore_index=True)
    return ReplaceResult(scores, main.heads, main.cost, main.metadata, main.matrices, main.constants)


def _kept(record: Mapping[str, Any]) -> dict[str, Any]:
    """What of a record belongs beside the tables: nothing of the machine's folders."""
    kept = {name: dict(record[name]) for name in ("model", "data", "versions", "patterns", "cost")}
    kept["settings"] = record["config"]
    kept["data"].pop("source")
    kept["versions"].pop("platform")
    return kept


def main(arguments: list[str] | None = None) -> int:
    """Run, and keep a folder for each task and its scores and head order as small tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", required=True)
    options.add_argument("--model", default="minilm")
    options.add_argument("--tasks", default=",".join(TASKS))
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--out", type=Path, default=FOLDER)
    options.add_argument("--runs", type=Path, default=Path("runs") / "papa")
    given = options.parse_args(arguments)
    torch.set_num_threads(given.threads)
    console = Console()
    for task in given.tasks.split(","):
        found = runs(task, given.model, given.data, given.runs / "work", console)
        found.save(given.runs / task, overwrite=True)
        given.out.mkdir(parents=True, exist_ok=True)
        found.scores.to_csv(given.out / f"papa-{task}-scores.csv", index=False, float_format="%.6g")
        found.heads.to_csv(given.out / f"papa-{task}-heads.csv", index=False, float_format="%.6g")
        found.cost.to_csv(given.out / f"papa-{task}-cost.csv", index=False, float_format="%.6g")
        record = json.dumps(_kept(found.metadata), indent=1, ensure_ascii=False)
        (given.out / f"papa-{task}.json").write_text(record + "\n", encoding="utf-8")
        console.print(found.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
