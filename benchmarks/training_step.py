"""A step of training (forward, backward, clipping, AdamW): Regard's decoder in Regard's loop against its peers.

Peers of the same shape: a minimal module in the manner of nanoGPT, written here (minimal), and `LlamaForCausalLM` in a
plain loop (llama), each with clipping and fused AdamW, and the latter under the `Trainer` (trainer). A row for each
size, length, precision (bfloat16 by autocast) and compilation.

2048 tokens a step, whatever the length of their sequences: memory that is linear in that length stays the same.

A round is a few steps of each contestant in turn, the first of which is not counted. Before each row the compiler
forgets what it compiled, so that nothing is compiled for several lengths, as nothing is in a run.

    python -m benchmarks.training_step [--quick] [--sizes 1M,10M] [--lengths 256,1024,2048]
                                       [--settings "float32,bfloat16 compiled"] [--threads N] [--out FILE]
                                                                                    40 minutes on one core
"""

import argparse
import gc
import itertools
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks.timing import Figures, keep, parser, prepared, race_in_rounds, row
from benchmarks.training_contestants import PEERS, SIZES, Setting, Take, llama_of, rows_of

LENGTHS = (256, 1024, 2048)
SETTINGS = [Setting(precision, compiled) for precision in ("float32", "bfloat16") for compiled in (False, True)]


def race(contestants: Mapping[str, Take], *, rounds: int, steps: int) -> dict[str, Figures]:
    """The figures of each, some steps of each in turn; memory is not among them."""
    return race_in_rounds({name: partial(take, steps) for name, take in contestants.items()}, rounds)


def check() -> None:
    """Regard's decoder and Llama with the same weights have the same loss."""
    from regard.models.llama import from_llama

    size, rows = SIZES["1M"], rows_of(SIZES["1M"], 256)
    theirs = llama_of(size).train()
    torch.testing.assert_close(from_llama(theirs).train()(**rows).loss, theirs(**rows).loss, rtol=1e-4, atol=1e-4)


def rows_of_size(
    given: argparse.Namespace, name: str, length: int, often: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """The rows of one size and length, in the settings that were asked for."""
    chosen = [setting for setting in SETTINGS if str(setting) in given.settings.split(",")]
    tried = [setting for setting in chosen if not (given.quick and setting.compiled)]
    size = SIZES[name]
    case: dict[str, Any] = {"size": name, "length": length}
    for setting in tried:
        torch.compiler.reset()
        figures = race({peer: make(size, length, setting) for peer, make in PEERS.items()}, **often)
        yield row(case | vars(setting), figures, "regard")
        gc.collect()


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result."""
    options = parser(__doc__)
    options.add_argument("--sizes", default="1M,10M")
    options.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    options.add_argument("--settings", default=",".join(map(str, SETTINGS)))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=3)
    given = prepared(options, arguments)
    torch.set_grad_enabled(True)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    check()
    sizes = ["tiny"] if given.quick else given.sizes.split(",")
    lengths = [256] if given.quick else [int(length) for length in given.lengths.split(",")]
    often = {"rounds": 1, "steps": 1} if given.quick else {"rounds": given.rounds, "steps": given.steps}
    rows: list[dict[str, Any]] = []
    for name, length in itertools.product(sizes, lengths):
        for line in rows_of_size(given, name, length, often):
            keep(line, rows, "training_step", given.out)


if __name__ == "__main__":
    main()
