"""What it costs to serve inputs of other lengths than the constants were averaged at, on MiniLM.

    python -m experiments.papa.lengths --data DIR [--out docs/results]

Sentences of SST-2, joined and cut into windows of exactly 16, 32, 64 and 128 tokens (65,536 tokens at each length to
average over, 8,192 others to compare on), layout natural, all heads constant. For each length: averages over
inputs of that length ("own"); the crop of those of 128 tokens; fits of shorter ones to it
(`regard.constants.to_length`).
Fidelity is that of the last hidden states: relative error and mean cosine, against the untouched model and against the
model with the length's own averages. About 2 minutes on one core. Expected: a crop and a fit are far nearer to the own
averages than these are to the untouched model, so that one set of constants serves all lengths.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from torch import Tensor

from regard import models
from regard.constants import Constants, to_length
from regard.data import Encoded, Examples, encode, read_task
from regard.hooks import average_attention, replacing

LENGTHS = (16, 32, 64, 128)
AVERAGED, COMPARED = 1 << 16, 1 << 13
"""Tokens to average over, and to compare on."""
BATCH = 2048
COLUMNS = ("length", "constants", "against", "relative_error", "cosine")
FOLDER = Path("docs") / "results"


def make_windows(examples: Examples, tokenizer: Any, length: int, tokens: int) -> Encoded:
    """Join the texts and cut them into full windows, up to a number of tokens."""
    joined = Examples(texts=examples.texts, labels=())
    return encode("mlm", joined, tokenizer, length, "natural").rows(0, tokens // length)


@torch.no_grad()
def compute_hidden_states(model: Any, inputs: Encoded, constants: Constants | None) -> Tensor:
    """Return the last hidden states, (token, width), with all heads constant or none."""
    with nullcontext() if constants is None else replacing(model, constants):
        batches = inputs.batches(max(1, BATCH // inputs.length))
        return torch.cat([model(**batch).last_hidden_state.flatten(0, 1) for batch in batches])


def measure_fidelity(states: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return ‖h − h'‖ / ‖h'‖ over all tokens, and the mean cosine of a token's states."""
    cosine = torch.nn.functional.cosine_similarity(states, expected, dim=-1)
    return float((states - expected).norm() / expected.norm()), float(cosine.mean())


def measure_lengths(
    model: Any, tokenizer: Any, train: Examples, validation: Examples, console: Console
) -> Iterator[Any]:
    """Yield one row for each length, source of constants and reference model."""
    averages = {}
    for length in LENGTHS:
        console.print(f"averaging over windows of {length} tokens", highlight=False)
        inputs = make_windows(train, tokenizer, length, AVERAGED)
        averages[length] = average_attention(
            model, inputs.batches(max(1, BATCH // length)), length, tokenizer=tokenizer, source="sst2"
        )
    for length in LENGTHS:
        console.print(f"comparing on windows of {length} tokens", highlight=False)
        inputs = make_windows(validation, tokenizer, length, COMPARED)
        sources = {
            f"{'crop' if old > length else 'fit'} from {old}": to_length(averages[old], length) for old in LENGTHS
        }
        sources.pop(f"fit from {length}")
        untouched = compute_hidden_states(model, inputs, None)
        own_states = compute_hidden_states(model, inputs, averages[length])
        yield (length, "own", "untouched", *measure_fidelity(own_states, untouched))
        for name, constants in sources.items():
            states = compute_hidden_states(model, inputs, constants)
            yield (length, name, "untouched", *measure_fidelity(states, untouched))
            yield (length, name, "own", *measure_fidelity(states, own_states))


def main(arguments: list[str] | None = None) -> int:
    """Run, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console = Console()
    loaded = models.load(options.model)
    task = read_task("sst2", options.data, rows=(12000, 872))
    rows = measure_lengths(loaded.model.eval(), loaded.tokenizer, task.train, task.validation, console)
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    options.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out / "lengths.csv", index=False, float_format="%.4g")
    console.print(table.to_string(index=False, float_format="%.3f"), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
