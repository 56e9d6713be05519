"""How often the interval of an excerpt holds the value of the whole text: over windows, and over parts of the text.

A decoder (`regard pretrain`) reads a text of articles in consecutive windows: its loss, and how much it rises with
other attentions. Intervals of 400 excerpts, each of some consecutive windows at a random place, are compared with the
value of all windows; they should hold it in 95 %.

    python -m experiments.window_intervals MODEL TEXT --out docs/results/window-intervals.csv     3 minutes on a core
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import cross_entropy

import regard
from regard.models.pretrained import load
from regard.runs import intervals
from regard.runs.intervals import Floats, ratio_half_width

LENGTHS, EXCERPTS, UNITS, REPEATS = (64, 128), (100, 300, 1000), (40, 20, 10), 400
ATTENTIONS = ("softmax+window=8", "sigmoid-normalised")


@torch.no_grad()
def losses(model: Any, windows: torch.Tensor) -> Floats:
    """Return the sum of losses of each window."""
    parts = []
    for ids in windows.split(64):
        logits = model(ids).logits[:, :-1].float()
        parts.append(cross_entropy(logits.mT, ids[:, 1:], reduction="none").sum(1).double())
    found: Floats = torch.cat(parts).numpy()
    return found


def quantities(model: Any, windows: torch.Tensor) -> Iterator[tuple[str, Floats]]:
    """Yield the loss of each window, and its rise with each attention."""
    untouched = losses(model, windows)
    yield "loss", untouched
    for attention in ATTENTIONS:
        with regard.replacing(model, attention):
            yield f"rise with {attention}", losses(model, windows) - untouched


def coverage(values: Floats, tokens: int, excerpt: int, units: int, random: np.random.Generator) -> tuple[float, float]:
    """Return how often intervals of excerpts hold the mean of all, in %, and their mean half."""
    held, widths = 0, []
    unit = np.arange(excerpt) * units // excerpt
    for start in random.integers(0, len(values) - excerpt, REPEATS):
        part = values[start : start + excerpt]
        sums, counts = (np.bincount(unit, numbers).astype(np.float64) for numbers in (part, np.full(excerpt, tokens)))
        widths.append(ratio_half_width(sums, counts))
        held += abs(part.mean() - values.mean()) / tokens <= widths[-1]
    return 100 * held / REPEATS, float(np.mean(widths))


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    loaded = load(given.model, language_model=True)
    ids = torch.tensor(loaded.tokenizer(given.text.read_text(encoding="utf-8"), verbose=False)["input_ids"])
    rows = []
    for length in LENGTHS:
        windows = ids[: len(ids) // length * length].view(-1, length)
        for name, values in quantities(loaded.model, windows):
            for excerpt in EXCERPTS:
                for units in (excerpt, *UNITS):
                    random = np.random.default_rng(0)
                    share, width = coverage(values, length - 1, excerpt, units, random)
                    kind = "windows" if units == excerpt else f"{units} parts"
                    row = {"length": length, "quantity": name, "excerpt_windows": excerpt, "interval_over": kind}
                    rows.append(row | {"holds_percent": round(share, 1), "mean_half_width": round(width, 5)})
                    print(*rows[-1].values(), flush=True)
    assert intervals.PARTS in UNITS
    pd.DataFrame(rows).to_csv(given.out, index=False)


if __name__ == "__main__":
    main()
