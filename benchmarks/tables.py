"""Makes docs/benchmarks.md from the committed results. No figure in it is typed.

python -m benchmarks.tables [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import adapters_section
from benchmarks.learning_section import section
from benchmarks.timing import RESULTS
from experiments.common.markdown import table

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
Line = Mapping[str, Any]
NAMES = (
    "attention_function",
    "whole_model",
    "long_sequences",
    "constant_attention",
    "structured_constants",
    "cached_probe",
)
"""The results that the page is made from."""

TEXT = """# Benchmarks

Ratios of medians, measured side by side in one run: contestants take turns, so that a slow moment hits all alike. The
reference is what would run anyway: PyTorch's fused attention, or the model's plain SDPA forward. Memory is what
resident memory peaks at beyond its level before the run. `make bench` makes these figures anew.

{machine}

## The attention function alone

Output, column mass, its square, entropy and the first four keys' mass in one pass (Regard), against
`scaled_dot_product_attention`, which gives the output alone; the same from the whole matrix (eager, where two matrices
fit); and the first four keys' mass alone. 12 heads of width 64, float32.

{attention_function}

The aim is at most 1.5 up to 2048 tokens and 1.8 at 8192, and 1.05 for the first keys alone.
{attention_verdict}

## A whole model

Twelve layers of width 768 with random weights: a Llama (causal) and BERT-base (padded), watched for the same four
reductions, against the same model left alone. "Norms" watches norms of keys, which need no weights. Eager is
Transformers' `output_attentions=True` with the reductions taken from its matrices; TransformerLens and nnsight are
asked for each layer's weights, reduced as they come. TransformerLens was run on the causal model only.

{whole_model}

Extra peak memory over that of the plain forward:

{whole_model_memory}

The aim from 128 tokens on is at most 1.10 in time and 1.35 in memory, and 1.05 for the first keys alone.
{model_verdict}

## Long sequences

Memory of the attention function in MiB, one layer's heads, causal, batch 1:

{long_sequences}

## Constant heads

The same model with constant matrices in the place of attention, forward pass end to end: MiniLM's shape, and two layers
of BERT-base's. All heads constant (Regard), and with a sixteenth, an eighth and half of the heads dynamic, spread over
all layers; *plain* is what one writes first: whole projections, and C times the values of each sample. *floor* is what
the matrix products that remain leave of the model's.

{constant_attention}

Memory: what PyTorch allocates at the most during a forward, over that of the same model under SDPA. (Peaks of resident
memory, as in the tables above, scatter here by what the C library's allocator keeps; they are in the results.)

{constant_attention_memory}

The aim is 0.885 with all heads constant from 128 tokens on (1.13 times as fast), 0.952 at 64, and never slower at half.
{constant_verdict}

### Cheaper forms of the matrices

{structured}

## A probe on hidden states that are kept

A probe of 15 epochs on states computed once and kept on disk (Regard: the pass and the fit), against running the frozen
encoder in each epoch; *fit* is what each further probe on the same states costs.

{cached_probe}
{training}
## GPU

`benchmarks/gpu_kernels.py` measures the GPU kernels where there is a GPU. None was at hand so far: the kernels are
tested in Triton's interpreter and compiled for two architectures, and their speed is not known.
"""


OPERATORS = """
## Training with other attentions: the operation alone

Forward and backward of each attention in the form that training takes (Regard), and with its matrix written out
(eager), against PyTorch's fused softmax attention. 12 heads of width 64, float32.

{operators}

The aim is at most 1. {verdict}
"""
TRAINING = """
## A step of training

Forward, backward, clipping and AdamW of 2048 tokens: Regard's decoder in its loop, a minimal module in the manner of
nanoGPT and `LlamaForCausalLM` in a plain loop, and that under the Trainer, each at the best of float32 and bfloat16,
compiled or not. Speed is in tokens a second; ratios are of times, above 1 where a peer is slower.

{peers}

The aim is that no peer is below 1. {peers_verdict}

Each attention's step against that of softmax, and with the matrix written out; memory is what PyTorch allocates in
forward and backward, and stays the same from length to length where it is linear in that.

{attentions}

The aim is at most 1. {attentions_verdict}
"""
LOSS = """
## The loss layer

Cross-entropy of a head's output, forward and backward: from all logits at once (whole), PyTorch's chunked form, and
Regard's. Memory in MiB, beside what the logits in float32 would take once.

{loss}

{verdict}
"""


def _training() -> str:
    """What was measured of training so far: a section for each result that is there."""
    parts = {"operators": _operators, "training_step": _steps, "loss_layer": _loss, "learning": section}
    parts |= {"adapters": adapters_section.section, "gathering": adapters_section.gathering}
    return "".join(make(_read(name)["rows"]) for name, make in parts.items() if (RESULTS / f"{name}.json").exists())


def _operators(rows: list[Line]) -> str:
    head = ("attention", "form", "batch", "tokens", "SDPA", "Regard", "eager", "SDPA, MiB", "Regard, MiB", "eager, MiB")
    names = ("sdpa", "regard", "eager")
    lines = [
        (*_case(one), _seconds(one, "sdpa"), *_ratios(one, *names[1:]), *(_memory(one, name) for name in names))
        for one in rows
    ]
    return OPERATORS.format(
        operators=table(head, lines), verdict=_verdict(rows, {"time": lambda one: _ratio(one, "regard") <= 1})
    )


def _steps(rows: list[Line]) -> str:
    raced = [one for one in rows if one["case"]["part"] == "peers"]
    others = [one for one in rows if one["case"]["part"] == "attentions"]
    names = ("minimal", "llama", "trainer")

    def told(one: Line) -> tuple[Any, ...]:
        case, everybody = one["case"], ("regard", *names)
        speeds = (f"{2048 / one['figures'][name]['seconds']:,.0f} ({case[name]})" for name in everybody)
        return (case["size"], case["length"], *speeds, *_ratios(one, *names))

    text = TRAINING if others else TRAINING.partition("\nEach attention's step")[0]
    return text.format(
        peers=table(("size", "tokens", "Regard", *names, *(f"{name} ÷ Regard" for name in names)), map(told, raced)),
        peers_verdict=_verdict(raced, {"time": lambda one: min(_ratio(one, name) for name in names) >= 1}),
        attentions=table(
            (
                *("size", "tokens", "precision", "attention", "softmax", "Regard", "matrix"),
                *("softmax, MiB", "Regard", "matrix"),
            ),
            [
                (
                    *(one["case"][name] for name in ("size", "length", "precision", "attention")),
                    _seconds(one, "softmax"),
                    *_ratios(one, "regard", "materialised"),
                    *(_memory(one, name) for name in ("softmax", "regard", "materialised")),
                )
                for one in others
            ],
        ),
        attentions_verdict=_verdict(others, {"time": lambda one: _ratio(one, "regard") <= 1}),
    )


def _loss(rows: list[Line]) -> str:
    head = ("tokens", "vocabulary", "width", "precision", "logits, MiB", "whole", "torch", "Regard")
    names = ("whole", "torch", "regard")
    return LOSS.format(
        loss=table(
            (*head, "whole, MiB", "torch, MiB", "Regard, MiB"),
            [
                (
                    *_case(one),
                    _seconds(one, "whole"),
                    *_ratios(one, "torch", "regard"),
                    *(_memory(one, name) if name in one["figures"] else "–" for name in names),
                )
                for one in rows
            ],
        ),
        verdict=_verdict(rows, {"time": lambda one: _ratio(one, "regard") <= 1}),
    )


def page() -> str:
    """The whole page, from the results."""
    alone, whole, long = (_read(name) for name in ("attention_function", "whole_model", "long_sequences"))
    return TEXT.format(
        machine=_machine(*(_read(name)["machine"] for name in NAMES)),
        attention_function=table(
            ("mask", "batch", "tokens", "SDPA", "Regard", "first keys", "eager"),
            [(*_case(one), _seconds(one, "sdpa"), *_ratios(one, "regard", "first", "eager")) for one in alone["rows"]],
        ),
        attention_verdict=_verdict(
            alone["rows"],
            {
                "one pass": lambda one: _ratio(one, "regard") <= (1.5 if one["case"]["length"] <= 2048 else 1.8),
                "first keys": lambda one: _ratio(one, "first") <= 1.05,
            },
        ),
        whole_model=table(
            ("model", "batch", "tokens", "plain", "Regard", "first keys", "norms", "eager", "Lens", "nnsight"),
            [
                (*_case(one), _seconds(one, "plain"), *_ratios(one, "regard", "first", "norms", *PEERS))
                for one in whole["rows"]
            ],
        ),
        whole_model_memory=table(
            ("model", "batch", "tokens", "plain, MiB", "Regard", "first keys", "eager", "Lens", "nnsight"),
            [
                (*_case(one), _memory(one, "plain"), *_ratios(one, "regard", "first", *PEERS, of="memory_ratio"))
                for one in whole["rows"]
            ],
        ),
        model_verdict=_verdict(
            [one for one in whole["rows"] if one["case"]["length"] >= 128],
            {
                "time": lambda one: _ratio(one, "regard") <= 1.10,
                "memory": lambda one: _ratio(one, "regard", "memory_ratio") <= 1.35,
                "first keys": lambda one: _ratio(one, "first") <= 1.05,
            },
        ),
        **_constant(_read("constant_attention")["rows"]),
        structured=_structured(_read("structured_constants")["rows"]),
        training=_training(),
        cached_probe=table(
            ("samples", "tokens", "real", "epochs", "recomputed", "Regard", "fit"),
            [
                (*_case(one), _seconds(one, "recomputed"), *_ratios(one, "regard", "fit"))
                for one in _read("cached_probe")["rows"]
            ],
        ),
        long_sequences=table(
            ("tokens", "SDPA", "Regard", "one matrix would be"),
            [
                (
                    one["case"]["length"],
                    _memory(one, "sdpa"),
                    _memory(one, "regard"),
                    f"{one['case']['matrix_mib']:,.0f}",
                )
                for one in long["rows"]
            ],
        ),
    )


def _constant(rows: list[Line]) -> dict[str, str]:
    """What constant heads cost, by the name in the text."""
    names = ("regard", "sixteenth", "eighth", "half", "plain")

    def cells(one: Line) -> tuple[Any, ...]:
        case = one["case"]
        return (case["shape"], case["batch"], case["length"], "yes" if case["padded"] else "no")

    head = ("model", "batch", "tokens", "padded", "SDPA")
    told = ("Regard", "1/16", "1/8", "1/2", "plain")
    return {
        "constant_attention": table(
            (*head, "floor", *told),
            [(*cells(one), _seconds(one, "sdpa"), one["case"]["floor"], *_ratios(one, *names)) for one in rows],
        ),
        "constant_attention_memory": table(
            (*head[:-1], "SDPA, MiB", *told),
            [
                (
                    *cells(one),
                    f"{one['figures']['sdpa']['allocated']:,.0f}",
                    *(f"{_allocated(one, name):.2f}" for name in names),
                )
                for one in rows
            ],
        ),
        "constant_verdict": _verdict(
            rows,
            {
                "all constant": lambda one: _ratio(one, "regard") <= (0.885 if one["case"]["length"] >= 128 else 0.952),
                "half": lambda one: _ratio(one, "half") <= 1,
                "memory": lambda one: max(_allocated(one, name) for name in names if name != "plain") <= 1,
            },
        ),
    }


def _allocated(one: Line, name: str) -> float:
    """What PyTorch allocates at the most, over that under SDPA."""
    return float(one["figures"][name]["allocated"]) / float(one["figures"]["sdpa"]["allocated"])


def _structured(rows: list[Line]) -> str:
    names = [name for name in rows[0]["figures"] if name != "sdpa"]
    return table(
        (*rows[0]["case"], "SDPA", *names),
        [(*_case(one), _seconds(one, "sdpa"), *_ratios(one, *names)) for one in rows],
    )


PEERS = ("eager", "lens", "nnsight")


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _machine(*told: Mapping[str, Any]) -> str:
    lines = {
        f"{one['date']}, {one['cpu']}, {one['threads']} thread{'s' if one['threads'] > 1 else ''}, "
        f"torch {one['torch']}, transformers {one['transformers']}"
        for one in told
    }
    clock = "With one thread the clock is the thread's CPU time."
    return f"{'; '.join(sorted(lines))}. {clock}"


def _case(one: Line) -> tuple[Any, ...]:
    return tuple(one["case"].values())


def _ratio(one: Line, name: str, of: str = "time_ratio") -> float:
    return float(one["figures"][name][of])


def _ratios(one: Line, *names: str, of: str = "time_ratio") -> list[str]:
    return [f"{_ratio(one, name, of):.2f}" if name in one["figures"] else "–" for name in names]


def _seconds(one: Line, name: str) -> str:
    return f"{one['figures'][name]['seconds'] * 1e3:,.1f} ms"


def _memory(one: Line, name: str) -> str:
    return f"{one['figures'][name]['memory']:,.0f}"


def _verdict(rows: list[Line], aims: Mapping[str, Callable[[Line], bool]]) -> str:
    """How many cases meet each aim, and which do not."""
    told = []
    for name, meets in aims.items():
        missed = [one for one in rows if not meets(one)]
        cases = ", ".join(" ".join(str(part) for part in _case(one)) for one in missed)
        told.append(f"{name}: {len(rows) - len(missed)} of {len(rows)} cases" + (f" (not {cases})" if missed else ""))
    return f"Met: {'; '.join(told)}."


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or say whether it is what the results make."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page is out of date")
    given = parser.parse_args(arguments)
    made = page()
    if given.check:
        return int(PAGE.read_text(encoding="utf-8") != made)
    PAGE.write_text(made, encoding="utf-8")
    print(f"written {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
