"""What makes a sink: keys and values of the first token against those of the others (see docs/sinks.md).

    python -m experiments.sinks.activations --work DIR [--rows softmax,sigmoid] [--seeds 3] [--out docs/results]

DIR has the runs of `experiments.sinks.run`. Each model reads the held-out sequences on which its sinks were measured.
Heads whose first token is a sink are told from the others. Nothing is trained. Seconds a model on one core.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import regard
from experiments.sinks.models import load_run, measure_models
from experiments.sinks.tables import ACTIVATIONS, SINK, SINKING, SINKLESS

ROWS = ("softmax", "sigmoid")
RATIOS = ("key_norm", "value_norm", "qk_norm")
"""Statistics of positions whose first is divided by the mean of the others."""
STATISTICS = ("sink_rate", *RATIOS, "qk_cosine")
COLUMNS = ("row", "seed", "sink_rate", "heads", "count", *RATIOS, "cosine_first", "cosine_others")
OVER_QUERIES = ("qk_norm", "qk_cosine")
"""Statistics of a key that are means over the queries that see it."""


@torch.no_grad()
def measure_heads(model: Any, ids: Tensor, *, epsilon: float) -> pd.DataFrame:
    """Return a line for each head: its sink rate in per cent, ratios, and cosines with the first and the other keys.

    The mean of the other keys counts each as often as queries see it for what is of pairs, and once else.
    """
    with regard.watching(model, STATISTICS) as watch:
        model(input_ids=ids)
    table = pd.DataFrame({"sink_rate": _by_head(watch.frame("sink_rate", position=0, epsilon=epsilon))[0]})
    for name in (*RATIOS, "qk_cosine"):
        positions = _by_head(watch.frame(name))
        queries = np.arange(positions.shape[1], 0, -1)[1:]
        others = np.average(positions.iloc[:, 1:], axis=1, weights=queries if name in OVER_QUERIES else None)
        if name in RATIOS:
            table[name] = positions[0] / others
        else:
            table["cosine_first"], table["cosine_others"] = positions[0], others
    return table


def _by_head(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the values of a statistic, a line for each head and a column for each position."""
    rows = rows[rows["head"].notna() & rows["position"].notna()]
    return rows.pivot(index=["layer", "head"], columns="position", values="value").astype(float)


def measure_model(work: Path, row: str, seed: int) -> pd.DataFrame:
    """Return a line for each head of the model of a run, as `measure_heads` does."""
    result, model, ids = load_run(work, row, seed)
    watch = result.metadata["watch"]
    return measure_heads(model, ids[:, : watch["length"]], epsilon=watch["epsilon"])


def average_heads(heads: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the means over the heads with a sink and over those without, with the sink rate of all."""
    rate = heads["sink_rate"].mean()
    for name, some in heads.groupby(np.where(heads["sink_rate"] >= SINK, SINKING, SINKLESS)):
        yield {"sink_rate": rate, "heads": name, "count": len(some)} | some.drop(columns="sink_rate").mean().to_dict()


def _measure(work: Path, row: str, seed: int) -> Iterator[dict[str, Any]]:
    for line in average_heads(measure_model(work, row, seed)):
        yield {"row": row, "seed": seed, **line}


def _save(lines: list[dict[str, Any]], folder: Path) -> None:
    pd.DataFrame(lines, columns=list(COLUMNS)).to_csv(folder / ACTIVATIONS, index=False, float_format="%.6g")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all models and write the table. Return 0, or 2 for invalid input."""
    return measure_models(__doc__, arguments, ROWS, _measure, _save)


if __name__ == "__main__":
    sys.exit(main())
