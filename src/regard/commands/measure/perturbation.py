"""The second forward of a measurement, with one token of each window replaced."""

import time
from typing import Any

from torch import Tensor

from regard import data, models
from regard.commands.measure.config import MeasureConfig
from regard.data import Windows
from regard.hooks import Watch
from regard.hooks.perturbation import PairedSpread, PerturbedForward


def describe_replacement(config: MeasureConfig) -> str:
    """Return which token of each window is replaced, and by what."""
    return f"the {config.perturb} token of each window, special ones aside, by another drawn from the vocabulary"


class Perturbation:
    """What `perturbation_spread` needs beside the forwards of the other statistics."""

    def __init__(self, loaded: models.Loaded, windows: Windows, spread: PairedSpread, config: MeasureConfig) -> None:
        self._spread = spread
        self._ids = data.replace_one_token(windows, loaded.tokenizer, place=config.perturb, seed=config.seed)
        model_config = loaded.model.config
        num_prepended = int(isinstance(model_config, models.RegardConfig) and model_config.spec.sink_token)
        self._forward = PerturbedForward(loaded.model, spread, config.layer_ids, num_prepended, config.part)

    def run(self, observer: Watch, inputs: dict[str, Any], indices: Tensor) -> None:
        """Read the windows of these indices, which the observer has just seen, with their token replaced."""
        observer.close()
        if self._spread.name not in observer.left_out:
            started, ids = time.perf_counter(), inputs["input_ids"]
            self._forward.run(inputs, self._ids[indices].to(ids.device))
            observer.seconds[self._spread.name] += time.perf_counter() - started
