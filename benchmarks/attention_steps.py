"""A step of training with each attention, beside one with softmax: Regard's decoder in Regard's loop.

Forward, backward, clipping and AdamW of 2048 tokens, whatever the length of their sequences; by default in float32. The
attention also with its matrix written out (materialised). What PyTorch allocates in forward and backward is the memory.

    python -m benchmarks.attention_steps [--quick] [--sizes 1M,10M] [--lengths 256] [--settings "bfloat16 compiled"]
                                         [--attentions sigmoid,softpick] [--threads N] [--out FILE]
                                                                                    25 minutes on one core
"""

import gc
import itertools
import warnings
from dataclasses import replace
from typing import Any

import torch

from benchmarks.timing import allocated, keep, parser, prepared, row
from benchmarks.training_contestants import SIZES, Setting, Size, regard, regard_of, rows_of
from benchmarks.training_step import SETTINGS, race
from regard.attention.spec import ATTENTIONS, AttentionSpec

WINDOW, PREFIX = 128, 5
MORE = {
    "alibi": AttentionSpec(positions="alibi"),
    "t5": AttentionSpec(positions="t5"),
    f"window {WINDOW}": AttentionSpec(window=WINDOW),
    f"prefix {PREFIX}": AttentionSpec(prefix=PREFIX),
}
ATTENTIONS_BESIDE = {name: spec for name, spec in (ATTENTIONS | MORE).items() if name != "softmax"}
QUICK = ("sigmoid", "top-8")


def memory(size: Size, length: int, setting: Setting, spec: AttentionSpec | str) -> float:
    """MiB that PyTorch holds at the most during forward and backward, beyond the weights."""
    model, rows = regard_of(size, spec), rows_of(size, length)

    def both() -> None:
        with torch.enable_grad():
            with setting.autocast():
                loss = model(**rows, num_items_in_batch=1).loss
            loss.backward()

    return allocated(both)


def measured(size: Size, length: int, setting: Setting, name: str, *, rounds: int, steps: int) -> dict[str, Any]:
    """The figures of an attention, of softmax beside it, and of its matrix written out."""
    torch.compiler.reset()
    spec = ATTENTIONS_BESIDE[name]
    forms = {"softmax": "softmax", "regard": spec, "materialised": spec.changed(backend="materialised")}
    takes = {form: regard(size, length, setting, of) for form, of in forms.items()}
    figures = race(takes, rounds=rounds, steps=steps)
    gc.collect()
    return {form: replace(one, memory=memory(size, length, setting, forms[form])) for form, one in figures.items()}


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result."""
    options = parser(__doc__)
    options.add_argument("--sizes", default="1M,10M")
    options.add_argument("--lengths", default="256")
    options.add_argument("--settings", default="float32", help=f"some of {', '.join(map(str, SETTINGS))}")
    options.add_argument("--attentions", default=",".join(ATTENTIONS_BESIDE))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=3)
    given = prepared(options, arguments)
    torch.set_grad_enabled(True)
    warnings.simplefilter("ignore")
    sizes = ["tiny"] if given.quick else given.sizes.split(",")
    settings = [setting for setting in SETTINGS if str(setting) in given.settings.split(",")]
    names = QUICK if given.quick else given.attentions.split(",")
    often = {"rounds": 1, "steps": 1} if given.quick else {"rounds": given.rounds, "steps": given.steps}
    rows: list[dict[str, Any]] = []
    for size, length, setting, name in itertools.product(sizes, given.lengths.split(","), settings, names):
        figures = measured(SIZES[size], int(length), setting, name, **often)
        about = {"attention": name, "backend": ATTENTIONS_BESIDE[name].resolved}
        keep(
            row({"size": size, "length": int(length)} | vars(setting) | about, figures, "softmax"),
            rows,
            "attention_steps",
            given.out,
        )


if __name__ == "__main__":
    main()
