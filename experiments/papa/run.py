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


def run_task(task: str, model: str, data: str, work: Path, console: Console) -> ReplaceResult:
    """Run all settings of one task; the scores of the four runs are in one result."""
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


def _select_metadata(record: Mapping[str, Any]) -> dict[str, Any]:
    """Select the metadata that is stored beside the tables, without paths."""
    selected = {name: dict(record[name]) for name in ("model", "data", "versions", "patterns", "cost")}
    selected["settings"] = record["config"]
    selected["data"].pop("source")
    selected["versions"].pop("platform")
    return selected


def main(arguments: list[str] | None = None) -> int:
    """Run, and write the tables of each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "papa")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console = Console()
    for task in options.tasks.split(","):
        result = run_task(task, options.model, options.data, options.runs / "work", console)
        result.save(options.runs / task, overwrite=True)
        options.out.mkdir(parents=True, exist_ok=True)
        result.scores.to_csv(options.out / f"papa-{task}-scores.csv", index=False, float_format="%.6g")
        result.heads.to_csv(options.out / f"papa-{task}-heads.csv", index=False, float_format="%.6g")
        record = json.dumps(_select_metadata(result.metadata), indent=1, ensure_ascii=False)
        (options.out / f"papa-{task}.json").write_text(record + "\n", encoding="utf-8")
        console.print(result.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
