"""How often the interval of an excerpt holds the value of the whole text: over windows, and over parts of the text.

A decoder (`regard pretrain`) reads each text in consecutive windows: its loss, and how much it rises with other
attentions. Intervals of 400 excerpts, each of some consecutive windows at a random place, are compared with the
value of all windows; they should hold it in 95 %.

    python -m experiments.window_intervals MODEL TEXT [TEXT …] --out docs/results/window-intervals.csv

Three minutes a text on a core.
"""

import argparse
import itertools
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
from regard.runs.intervals import Floats, parts_half_width

LENGTHS, EXCERPTS, PARTS, REPEATS = (64, 128), (100, 300, 1000), (40, 20, intervals.PARTS), 400
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


def coverage(values: Floats, tokens: int, excerpt: int, parts: int) -> tuple[float, float]:
    """Return how often intervals of excerpts hold the mean of all, in %, and their mean half."""
    starts = np.random.default_rng(0).integers(0, len(values) - excerpt, REPEATS)
    excerpts = [values[start : start + excerpt] for start in starts]
    widths = [parts_half_width(one, np.full(excerpt, float(tokens)), parts) for one in excerpts]
    errors = [abs(one.mean() - values.mean()) / tokens for one in excerpts]
    return 100 * float(np.mean(np.array(errors) <= widths)), float(np.mean(widths))


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    loaded, rows = load(given.model, language_model=True), []
    for text, length in itertools.product(given.texts, LENGTHS):
        ids = torch.tensor(loaded.tokenizer(text.read_text(encoding="utf-8"), verbose=False)["input_ids"])
        windows = ids[: len(ids) // length * length].view(-1, length)
        for (name, values), excerpt in itertools.product(quantities(loaded.model, windows), EXCERPTS):
            for parts in (excerpt, *PARTS):
                share, width = coverage(values, length - 1, excerpt, parts)
                about = (text.stem, length, len(windows), name, excerpt)
                rows.append(
                    (*about, "windows" if parts == excerpt else f"{parts} parts", round(share, 1), round(width, 5))
                )
                print(*rows[-1], flush=True)
    columns = ["text", "length", "windows", "quantity", "excerpt_windows", "interval_over"]
    table = pd.DataFrame(rows, columns=[*columns, "holds_percent", "mean_half_width"])
    table.to_csv(given.out, index=False)


if __name__ == "__main__":
    main()
