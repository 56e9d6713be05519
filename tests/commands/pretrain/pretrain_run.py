"""A made-up pre-training run that follows the schema of its run folder."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

LENGTH = 64
UNIFORM = float(sum(1 / i for i in range(1, LENGTH + 1)) / LENGTH)
WATCHED = (
    *("valid_loss", "sink_rate", "sink_rate_max", "sink_position", "alpha_first"),
    *("alpha_uniform", "virtual_sink_rate", "norm_ratio"),
)


def history(
    steps: int = 1000, log: int = 10, watch: int = 100, domains: Sequence[str] = ("python",), *, virtual: bool = False
) -> pd.DataFrame:
    """A falling loss and, from step 400 on, a sink; the watched columns have values every `watch` steps."""
    random = np.random.default_rng(0)
    step = np.arange(0, steps + 1, log)
    share = step / max(steps, 1)
    loss = 3.5 + 4.8 * np.exp(-5 * share) + random.normal(0, 0.04, len(step))
    grown = 1 / (1 + np.exp(-14 * (share - 0.55)))
    frame = pd.DataFrame(
        {
            "step": step,
            "tokens": step * 1024,
            "loss": np.where(step > 0, loss, np.nan),
            "learning_rate": 1e-3 * np.minimum(1, step / 50),
            "gradient_norm": np.where(step > 0, 1.0, np.nan),
            "tokens_per_second": np.where(step > 0, 12_345.6, np.nan),
            "valid_loss": 3.6 + 4.7 * np.exp(-5 * share),
            **{f"valid_loss.{name}": 3.6 + 0.3 * i + 4.7 * np.exp(-5 * share) for i, name in enumerate(domains)},
            "sink_rate": 41.25 * grown,
            "sink_rate_max": 41.25 * grown,
            "sink_position": 0,
            "alpha_first": UNIFORM * (1 + 3 * grown),
            "alpha_uniform": UNIFORM,
            "virtual_sink_rate": 20 * grown if virtual else np.nan,
            "norm_ratio": 1 + 12 * grown,
        }
    )
    named = [name for name in frame.columns if name in WATCHED or name.startswith("valid_loss")]
    frame[named] = frame[named].astype("float64").where(pd.Series(step % watch == 0), axis=0)
    return frame


def unwatched(steps: int = 100) -> pd.DataFrame:
    """A history whose watched columns are all null."""
    frame = history(steps)
    named = [name for name in frame.columns if name in WATCHED or name.startswith("valid_loss")]
    return frame.assign(**dict.fromkeys(named, np.nan))


def sinks(
    steps: Sequence[int] = (0, 500, 1000), layers: int = 4, heads: int = 3, *, virtual: bool = False
) -> pd.DataFrame:
    """What was watched at `steps`: α_1 of a head is step · (layer + 1) · (head + 1) / 100000."""
    rows: list[tuple[Any, ...]] = []
    for step in steps:
        grown = step / max(*steps, 1)
        for layer in range(layers):
            for head in range(heads):
                mass = step * (layer + 1) * (head + 1) / 100_000
                rows.append((step, "alpha", layer, head, 0, None, mass))
                rows.append((step, "sink_rate", layer, head, 0, 0.3, 100 * mass))
                if virtual:
                    rows.append((step, "virtual_alpha", layer, head, None, None, mass / 2))
        rows += [(step, "norm_ratio", layer, None, None, None, 1 + grown * (layer + 1)) for layer in range(-1, layers)]
        rows += [(step, "sink_rate", None, None, k, 0.3, 40 * grown / (k + 1)) for k in range(LENGTH)]
    table = pd.DataFrame(rows, columns=["step", "statistic", "layer", "head", "position", "epsilon", "value"])
    kinds = {"layer": "Int64", "head": "Int64", "position": "Int64", "epsilon": "float64", "value": "float64"}
    return table.astype(kinds)


def record(**changed: Any) -> dict[str, Any]:
    """The record of such a run; `changed` overrides its parts."""
    defaults = {
        **{"attention": "softmax", "hidden_size": 128, "layers": 4, "heads": 3, "positions": "rotary"},
        **{"learning_rate": 0.001, "weight_decay": 0.1, "batch_size": 16, "steps": 1000, "seed": 0},
    }
    return {
        "command": "pretrain",
        "schema_version": 1,
        "version": "0.3.0",
        "created": "2025-11-20T12:00:00Z",
        "name": "nano",
        "config": {**defaults, "weight_decay": 0.5, "fixed_token": [0, 7]},
        "config_defaults": {**defaults, "fixed_token": None},
        "command_line": "regard pretrain nano --weight-decay 0.5 --fixed-token 0",
        "model": {"parameters": 1_050_624, "parameters_without_embeddings": 786_432, "sha256": "ab" * 32},
        "data": {
            "domains": [
                {
                    **{"name": "python", "weight": 1.0, "source": "python", "sha256": "cd" * 32},
                    **{"train_tokens": 2_345_678, "valid_tokens": 123_456},
                }
            ],
            "tokenizer": {"name": "trained here", "size": 2048, "sha256": "ef" * 32},
        },
        "watch": {"samples": 100, "length": LENGTH, "epsilon": 0.3, "uniform": UNIFORM},
        "final": {"valid_loss": 3.63, "sink_rate": 41.2},
        "emergence": {"step": 600, "rate": 10.0, "alpha_step": 400},
        "versions": {"python": "3.11.2", "torch": "2.9.0", "transformers": "5.0.0", "platform": "Linux"},
        "cost": {
            **{"seconds": 252.4, "tokens_per_second": 12_345.6, "peak_memory_mib": 812.3},
            **{"device": "cpu", "processes": 1},
        },
        **changed,
    }
