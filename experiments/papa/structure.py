"""What cheaper forms of constant matrices still score: low rank, columns and band, top-k, Toeplitz, on MiniLM.

    python -m experiments.papa.structure --data DIR [--tasks sst2,ner] [--out docs/results]

SST-2 and NER at their `laptop` scale, special tokens held in place, all heads constant, three seeds: the untouched
model, the averages as they are, no attention at all (zeros), and each form at three sizes (see
`regard.constants.approximate`). About 6 minutes a task on one core. Expected: a rank far below the length, or few
columns and a narrow band, keep what averages score above zeros, for many heads put their mass on a few fixed places.
Found: true of NER for columns and band of size 4, top-4 and Toeplitz of size 4, not for low rank, which is nearest in
norm and loses the neighbourhood; on SST-2 at this scale averages score no more than zeros, so nothing can be told
apart. What the forms cost in time is measured by benchmarks/structured_constants.py.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console

from regard import models
from regard.commands.replace.run import replace
from regard.constants import Constants, Form, approximate, approximation_error, count_multiply_adds

TASKS = ("sst2", "ner")
SIZES: dict[Form, tuple[int, ...]] = {
    "low-rank": (1, 4, 16),
    "columns+band": (1, 4, 8),
    "top-k": (1, 4, 16),
    "toeplitz": (4, 16, 48),
}
COLUMNS = ("task", "form", "size", "error", "multiply_adds", "seed", "metric", "score")
FOLDER = Path("docs") / "results"


def run_forms(task: str, model: models.Loaded, data: str, work: Path, console: Console) -> Iterator[dict[str, Any]]:
    """Yield one row for each form, size and seed; `multiply_adds` is relative to the dense form."""
    began = time.perf_counter()

    def run(name: str, **settings: Any) -> Any:
        console.print(f"{time.perf_counter() - began:7.0f} s  {task}: {name}", highlight=False)
        return replace(
            model,
            task,
            data=data,
            work_dir=work / f"{task}-{name}",
            resume=True,
            rank_heads_by="first-layers",
            **settings,
        )

    def rows(result: Any, form: str, size: int | None, error: float | None, cost_ratio: float | None) -> Iterator[Any]:
        for row in result.scores.to_dict("records"):
            labels = (form, size, error, cost_ratio)
            if row["constants"] != "average":
                labels = ("untouched" if row["constants"] == "none" else row["constants"], None, None, None)
            yield dict(zip(COLUMNS, (task, *labels, row["seed"], row["metric"], row["score"]), strict=True))

    dense = run("dense", constants=("average", "zeros"), dynamic_fractions=(1.0, 0.0))
    yield from rows(dense, "dense", None, 0.0, 1.0)
    path = work / f"{task}-average.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dense.constants)
    averages = Constants.load(path)
    for form, sizes in SIZES.items():
        for size in sizes:
            approximated = approximate(averages, form, size)
            error = float(torch.cat(list(approximation_error(averages, approximated).values())).nanmean())
            cost_ratio = count_multiply_adds(form, size, averages.length) / count_multiply_adds(
                "dense", 1, averages.length
            )
            result = run(f"{form}-{size}", constants_from=approximated, dynamic_fractions=0.0)
            yield from rows(result, form, size, error, cost_ratio)
    path.unlink()


def main(arguments: list[str] | None = None) -> int:
    """Run, and write a table for each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--work", type=Path, default=Path("runs") / "structure.work")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console = Console()
    model = models.load(options.model)
    options.out.mkdir(parents=True, exist_ok=True)
    for task in options.tasks.split(","):
        table = pd.DataFrame(run_forms(task, model, options.data, options.work, console), columns=list(COLUMNS))
        table.to_csv(options.out / f"structure-{task}.csv", index=False, float_format="%.6g")
        means = table.groupby(["form", "size"], sort=False, dropna=False)["score"].mean()
        console.print(means.to_string(), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
