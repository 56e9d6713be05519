"""A step of training (forward, backward, clipping, AdamW): Regard's decoder in Regard's loop against its peers.

Peers of the same shape: a minimal module in the manner of nanoGPT, written here (minimal), and `LlamaForCausalLM` in a
plain loop (llama), each with clipping and fused AdamW, and the latter under the `Trainer` (trainer). Parts:

* settings: each in float32 and bfloat16 (autocast), compiled and not: a row a size, length, precision and compilation;
* attentions: Regard's other attentions against its softmax, each also with its matrix written out (materialised).

2048 tokens a step, whatever the length of their sequences: memory that is linear in that length stays the same.

A round is a few steps of each contestant in turn, the first of which is not counted. Before each row the compiler
forgets what it compiled, so that nothing is compiled for several lengths, as nothing is in a run.

    python -m benchmarks.training_step [--quick] [--sizes 1M,10M] [--lengths 256,1024,2048]
                                       [--parts settings,attentions] [--settings "float32,bfloat16 compiled"]
                                       [--threads N] [--out FILE]     40 minutes on one core without the attentions
"""

import argparse
import gc
import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks.timing import Figures, allocated, keep, parser, prepared, race_in_rounds, row
from benchmarks.training_contestants import PEERS, SIZES, Setting, Size, Take, llama_of, regard, regard_of, rows_of
from regard.attention.spec import ATTENTIONS, AttentionSpec

WINDOW, PREFIX = 128, 5
LENGTHS = (256, 1024, 2048)
SETTINGS = [Setting(precision, compiled) for precision in ("float32", "bfloat16") for compiled in (False, True)]
MORE = {
    "alibi": AttentionSpec(positions="alibi"),
    "t5": AttentionSpec(positions="t5"),
    f"window {WINDOW}": AttentionSpec(window=WINDOW),
    f"prefix {PREFIX}": AttentionSpec(prefix=PREFIX),
}
OPERATIONS = {name: spec for name, spec in (ATTENTIONS | MORE).items() if name != "softmax"}


def race(contestants: Mapping[str, Take], *, rounds: int, steps: int) -> dict[str, Figures]:
    """The figures of each, some steps of each in turn; memory is not among them."""
    return race_in_rounds({name: partial(take, steps) for name, take in contestants.items()}, rounds)


def memory(size: Size, length: int, setting: Setting, spec: AttentionSpec | str) -> float:
    """MiB that PyTorch holds at the most during forward and backward, beyond the weights."""
    model, rows = regard_of(size, spec), rows_of(size, length)

    def both() -> None:
        with torch.enable_grad():
            with setting.autocast():
                loss = model(**rows, num_items_in_batch=1).loss
            loss.backward()

    return allocated(both)


def attentions(
    size: Size, length: int, setting: Setting, *, rounds: int, steps: int
) -> Iterator[tuple[str, AttentionSpec, dict[str, Figures]]]:
    """Each attention beside softmax, and with its matrix written out."""
    plain = regard(size, length, setting)
    plain_memory = memory(size, length, setting, "softmax")
    for name, spec in OPERATIONS.items():
        whole = spec.changed(backend="materialised")
        takes = {"softmax": plain, "regard": regard(size, length, setting, spec)}
        figures = race(takes, rounds=rounds, steps=steps)
        figures |= race({"materialised": regard(size, length, setting, whole)}, rounds=1, steps=steps)
        held = {
            "softmax": plain_memory,
            "regard": memory(size, length, setting, spec),
            "materialised": memory(size, length, setting, whole),
        }
        yield name, spec, {one: replace(figures[one], memory=held[one]) for one in figures}
        gc.collect()


def check() -> None:
    """Regard's decoder and Llama with the same weights have the same loss."""
    from regard.models.llama import from_llama

    size, rows = SIZES["1M"], rows_of(SIZES["1M"], 256)
    theirs = llama_of(size).train()
    torch.testing.assert_close(from_llama(theirs).train()(**rows).loss, theirs(**rows).loss, rtol=1e-4, atol=1e-4)


def rows_of_size(
    given: argparse.Namespace, name: str, length: int, often: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """The rows of one size and length, of the parts and settings that were asked for."""
    chosen = [setting for setting in SETTINGS if str(setting) in given.settings.split(",")]
    tried = [setting for setting in chosen if not (given.quick and setting.compiled)]
    size, parts = SIZES[name], given.parts.split(",")
    case: dict[str, Any] = {"size": name, "length": length}
    if "settings" in parts:
        for setting in tried:
            torch.compiler.reset()
            figures = race({peer: make(size, length, setting) for peer, make in PEERS.items()}, **often)
            yield row(case | {"part": "settings", **vars(setting)}, figures, "regard")
            gc.collect()
    if "attentions" in parts:
        for precision in ("float32",) if given.quick else ("float32", "bfloat16"):
            for attention, spec, figures in attentions(size, length, Setting(precision), **often):
                about = {"part": "attentions", "precision": precision, "attention": attention, "form": spec.resolved}
                yield row(case | about, figures, "softmax")


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result."""
    options = parser(__doc__)
    options.add_argument("--sizes", default="1M,10M")
    options.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    options.add_argument("--parts", default="settings,attentions")
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
