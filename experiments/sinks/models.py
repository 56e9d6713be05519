"""The models of finished runs of `experiments.sinks.run`, for what is measured on them afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM

from experiments.sinks.run import folder, of_row
from regard.commands.pretrain.result import PretrainResult
from regard.commands.pretrain.run import prepare_text
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
