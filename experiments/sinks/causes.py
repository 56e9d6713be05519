"""What a sink is for: what it costs models with and without one to lose it (see docs/causes.md).

    python -m experiments.sinks.causes --work DIR [--rows softmax] [--seeds 3] [--out docs/results]

DIR has the runs of `experiments.sinks.run`. Each model reads held-out sequences as it is, and with something taken
away: all but the last eight keys, or the last seven and the first (StreamingLLM); the first token, or another; heads
whose output is small (dormant heads), or as many others. Nothing is trained. Seconds a model on one core.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import regard.models
from experiments.sinks.models import load_run, measure_models
from regard.constants import Head

ROWS = ("softmax", "first token free", "weight decay 0.1", "QK-norm")
"""Softmax with a sink, and without: no fixed token, less weight decay, normalized queries and keys."""
SEQUENCES, KEYS = 1000, 8
"""Held-out sequences, half to find dormant heads and half to score; keys that a window leaves."""
OTHER, DORMANT, DRAWS = 4, 0.5, 5
"""The other token that is hidden; the output norm below which a head is dormant, times the mean of its layer; draws of
as many random heads."""
TABLE, RECORD = "causes.csv", "causes.json"
COLUMNS = ("row", "seed", "intervention", "loss", "heads", "sink_rate")
WHOLE, WINDOW, KEPT = "nothing", f"window of {KEYS}", f"window of {KEYS - 1} and the first token"
FIRST, ANOTHER = "first token hidden", f"token {OTHER} hidden"
PRUNED, RANDOM = "dormant heads pruned", "as many random heads pruned"


class Hide:
    """Softmax of all keys but one, which is left to its own query."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __call__(self, scores: Tensor, keep: Tensor) -> Tensor:
        keep = keep.clone()
        keep[..., self.position + 1 :, self.position] = False
        return scores.masked_fill(~keep, float("-inf")).softmax(-1)


@torch.no_grad()
def loss(model: Any, ids: Tensor, state: AbstractContextManager[Any]) -> float:
    """Return the mean negative log-likelihood of the tokens behind the first `KEYS`, in nats."""
    with state:
        batches = [model(input_ids=rows).logits[:, KEYS - 1 : -1].float() for rows in ids.split(250)]
    logits = torch.cat(batches)
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, KEYS:].flatten()))


def find_dormant(model: Any, ids: Tensor) -> tuple[list[Head], list[Head]]:
    """Return the heads with a small output, and all heads."""
    with torch.no_grad(), regard.watching(model, ["head_output_norm"]) as watch:
        model(input_ids=ids)
    norms = watch.frame("head_output_norm", position=None)
    norms = norms[norms["head"].notna()]
    share = norms["value"] / norms.groupby("layer")["value"].transform("mean")
    names = [(str(row.site), int(row.layer), int(row.head)) for row in norms.itertuples()]
    return [name for name, value in zip(names, share, strict=True) if value < DORMANT], names


def interventions(model: Any, measured: Tensor, seed: int) -> Iterator[tuple[str, int, AbstractContextManager[Any]]]:
    """Yield what is taken away: its name, the number of heads, and the block in which it is."""
    yield WHOLE, 0, nullcontext()
    yield WINDOW, 0, regard.replacing(model, f"softmax+window={KEYS}")
    yield KEPT, 0, regard.replacing(model, f"softmax+window={KEYS - 1}+prefix=1")
    yield FIRST, 0, regard.replacing(model, Hide(0))
    yield ANOTHER, 0, regard.replacing(model, Hide(OTHER))
    dormant, every = find_dormant(model, measured)
    yield PRUNED, len(dormant), regard.replacing(model, "zeros", heads=dormant)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(DRAWS if dormant else 0):
        drawn = torch.randperm(len(every), generator=generator)[: len(dormant)].tolist()
        yield RANDOM, len(dormant), regard.replacing(model, "zeros", heads=[every[index] for index in drawn])


def score(work: Path, row: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the loss of one model under each intervention."""
    result, model, ids = load_run(work, row, seed, SEQUENCES)
    for name, heads, state in interventions(model, ids[::2], seed):
        line = {"row": row, "seed": seed, "intervention": name, "heads": heads}
        yield line | {"sink_rate": result.final["sink_rate"], "loss": loss(model, ids[1::2], state)}


def _measure(work: Path, row: str, seed: int) -> list[dict[str, Any]]:
    lines = list(score(work, row, seed))
    print(row, seed, f"{lines[-1]['loss']:.3f}", flush=True)
    return lines


def _save(lines: list[dict[str, Any]], folder: Path) -> None:
    table = pd.DataFrame(lines, columns=list(COLUMNS))
    table = table.groupby(list(COLUMNS[:3]), sort=False, as_index=False).mean()
    table.to_csv(folder / TABLE, index=False, float_format="%.6g")
    record = {"sequences": SEQUENCES, "keys": KEYS, "dormant": DORMANT, "draws": DRAWS, "versions": _versions()}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Score all models and write the table. Return 0, or 2 for invalid input."""
    return measure_models(__doc__, arguments, ROWS, _measure, _save)


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "regard": regard.__version__}


if __name__ == "__main__":
    sys.exit(main())
