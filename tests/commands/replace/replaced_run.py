"""A made-up run with replaced heads that follows the schema of docs/files.md."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

TASKS = {"cola": ("mcc", 0.5), "sst2": ("accuracy", 0.9), "mlm": ("negative_log_perplexity", -3.5)}
FRACTIONS = (0.5, 0.125, 0.0)
COLUMNS = ["model", "task", "constants", "rank_heads_by", "dynamic_fraction", "seed", "metric", "score"]


def scores(
    sources: tuple[str, ...] = ("average", "identity"),
    orders: tuple[str, ...] = ("lambda", "random"),
    seeds: int = 3,
    tasks: tuple[str, ...] = tuple(TASKS),
) -> pd.DataFrame:
    """Scores that fall as heads become constant; the first source in every order, the others in the first one."""
    random = np.random.default_rng(0)
    rows = []
    for task in tasks:
        metric, top = TASKS[task]
        for seed in range(seeds):
            rows.append(("example/tiny", task, "none", "none", 1.0, seed, metric, top + random.normal(0, 0.01)))
            for i, source in enumerate(sources):
                for j, order in enumerate(orders if i == 0 else orders[:1]):
                    for fraction in FRACTIONS:
                        score = top - (1 - fraction) * (0.1 + 0.05 * i + 0.02 * j) + random.normal(0, 0.01)
                        rows.append(("example/tiny", task, source, order, fraction, seed, metric, score))
    return pd.DataFrame(rows, columns=COLUMNS)


def heads(sites: tuple[str, ...] = ("encoder",), layers: int = 2, count: int = 3) -> pd.DataFrame:
    """Heads in a shuffled order, every third "diagonal", the others "broad"."""
    places = [(site, layer, head) for site in sites for layer in range(layers) for head in range(count)]
    order = np.random.default_rng(1).permutation(len(places))
    rows = [
        (*place, int(rank), -0.25 * int(rank), "diagonal" if i % 3 == 0 else "broad")
        for i, (place, rank) in enumerate(zip(places, order, strict=True))
    ]
    table = pd.DataFrame(rows, columns=["site", "layer", "head", "rank", "value", "pattern"])
    return table.sort_values("rank", ignore_index=True)


def matrices(length: int = 8, layers: int = 2, count: int = 3) -> dict[str, Tensor]:
    """Constants by "site.layer", rows that sum to one."""
    random = torch.Generator().manual_seed(0)
    return {f"encoder.{i}": torch.rand(count, length, length, generator=random).softmax(-1) for i in range(layers)}


def cost() -> pd.DataFrame:
    """One forward at each fraction."""
    table = {"dynamic_fraction": [1.0, *FRACTIONS], "latency_ms": [20.0, 18.0, 17.0, 16.0]}
    times = {"relative_time": [1.0, 0.9, 0.85, 0.8], "relative_time_low": [1.0, 0.88, 0.83, 0.78]}
    times["relative_time_high"] = [1.0, 0.93, 0.87, 0.84]
    return pd.DataFrame({**table, **times, "flops": [2e9, 1.8e9, 1.7e9, 1.6e9]})


def record(**settings: Any) -> dict[str, Any]:
    """A record of such a run; `settings` overrides."""
    return {
        "command": "replace",
        "schema_version": 1,
        "version": "0.2.0",
        "created": "2025-11-20T12:00:00Z",
        "model": {"name": "example/tiny", "class": "BertModel", "sha256": "ab" * 32, "layers": 2, "heads": 3},
        "data": {"sst2": {"source": "glue, sst2", "sha256": "cd" * 32, "train": 100, "validation": 50}},
        "config": {"constants": ["average"], "rank_heads_by": ["lambda"], "num_seeds": 3, "length": 8, **settings},
        "patterns": {"has_diagonal": 0.875, "on_special": 0.375},
        "versions": {"python": "3.11.2", "torch": "2.9.0", "transformers": "5.0.0", "platform": "Linux"},
        "cost": {"seconds": 12.345, "batch_size": 8, "length": 64, "device": "cpu"},
    }
