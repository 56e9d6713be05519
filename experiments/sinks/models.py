"""The models of finished runs of `experiments.sinks.run`, and the command of what is measured on them afterwards."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from experiments.sinks.run import FOLDER, folder, of_row
from regard.commands.pretrain.result import PretrainResult
from regard.commands.pretrain.run import prepare_text
from regard.errors import UserError
from regard.runs.output_dir import cache_dir


def load_run(work: Path, row: str, seed: int, samples: int | None = None) -> tuple[PretrainResult, Any, Tensor]:
    """Load a run, its model, and held-out sequences as long as those that it was trained on.

    None is for as many as its sinks were measured on.
    """
    place = folder(work, row, seed)
    result = PretrainResult.load(place)
    recipe = of_row(row, seed, result.metadata["config"]["data"])
    samples = result.metadata["watch"]["samples"] if samples is None else samples
    (ids,) = prepare_text(recipe, cache_dir(work / "cache")).held_out(recipe, samples, recipe.length).values()
    return result, AutoModelForCausalLM.from_pretrained(place / "model").eval(), ids


def measure_models(
    about: str | None,
    arguments: Sequence[str] | None,
    rows: Sequence[str],
    measure: Callable[[Path, str, int], Iterable[dict[str, Any]]],
    save: Callable[[list[dict[str, Any]], Path], None],
) -> int:
    """Measure the models that a command line names, and save the lines in its folder. Return 0, or 2 for a UserError.

    `rows` are those of `experiments.sinks.run` that are measured if none are named. `measure` returns the lines of the
    run of a row and a seed in the work folder, and `save` writes all lines into a folder.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", default=",".join(rows))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    lines: list[dict[str, Any]] = []
    try:
        for row in options.rows.split(","):
            for seed in range(options.seeds):
                lines += measure(options.work, row, seed)
    except UserError as error:
        Console(stderr=True).print(str(error), highlight=False, soft_wrap=True)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    save(lines, options.out)
    return 0
