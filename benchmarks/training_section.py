"""Sections of docs/benchmarks.md on training: attention operations, a step, the loss layer."""

from benchmarks.markdown import (
    ResultTable,
    Row,
    case_cells,
    format_verdict,
    markdown_table,
    mebibytes,
    milliseconds,
    ratio,
    ratio_cells,
)
from benchmarks.training_contestants import TOKENS, Setting

SHOWN = (
    "softmax",
    "sigmoid",
    "elu",
    "linear",
    "elu-kernel",
    "kv-bias",
    "off-by-one",
    "softpick",
    "top-8",
    "alibi",
    "window-256",
)
"""Operations that the page shows."""
STEP_PEERS = ("minimal", "llama", "trainer")
OPERATORS = """
## Training with other attentions: the operation alone

Forward and backward pass of each attention in its training backend (Regard), and with its matrix written out (eager),
against PyTorch's fused softmax attention. 12 heads of width 64, float32. Memory in MiB.

{operators}

Aim: at most 1. {verdict}
"""
STEPS = """
## A training step

Forward, backward, clipping and AdamW of 2048 tokens: Regard's decoder in its loop; a minimal module in the style of
nanoGPT and `LlamaForCausalLM` in a plain loop; the latter under the Trainer. Each at the best of float32 and bfloat16,
compiled or not. Speed is in tokens per second; ratios are of times, above 1 where a peer is slower.

{best}

Aim: no peer below 1. {verdict}
"""
SETTING_STEPS = """
The same in each setting: milliseconds a step of Regard, and ratios of times, above 1 where a peer is slower.

{settings}

Aim: no peer below 1. {verdict}
"""
ATTENTION_STEPS = """
### With other attentions

A step of Regard's decoder with each attention against one with softmax, uncompiled, in float32; *matrix*: with its
matrix written out. Projections, gates and norms of an attention are part of its step. Memory is what PyTorch allocates
in forward and backward, in MiB.

{attentions}

Aim: at most 1. {verdict}
"""
FREED_MEMORY = """
### Freed memory is kept

Commands let the C library keep the memory that tensors free, unless `MALLOC_…` or `GLIBC_TUNABLES` tunes it. A step of
training of Regard's decoder, and an observed forward, in float32 with its own habits (default), and so (kept); the
fastest and the slowest beside the median, since these habits change from process to process. Processes take turns.
Memory is the peak of the process. Scripts and notebooks do so where `MALLOC_TRIM_THRESHOLD_=1073741824
MALLOC_MMAP_THRESHOLD_=33554432` is set before Python starts.

{freed_memory}
"""
LOSS = """
## Loss layer

Cross-entropy of the output layer, forward and backward: from all logits at once (whole), PyTorch's chunked form, and
Regard's. Memory in MiB, beside the size of float32 logits.

{loss}

{verdict}
"""

BACKEND = """
## Regard as the attention of a model

A step of training (forward and backward) of `GptOssForCausalLM`, `Gemma2ForCausalLM`, `MistralForCausalLM` and
`LlamaForCausalLM` with `attn_implementation="regard"`, against eager attention; four layers of width 256, one sequence,
float32. Every other layer of the first two, and all of the third, have a window of 128 tokens. Memory is what PyTorch
allocates at the peak.

{backend}
"""


def operators_table(rows: list[Row]) -> ResultTable:
    """Times and memory of operations; the page shows some of them at 2048 tokens."""
    names = ("sdpa", "regard", "eager")
    return ResultTable(
        "benchmark-operators",
        (
            *("attention", "backend", "batch", "tokens", "SDPA, ms", "Regard", "eager"),
            *("SDPA, MiB", "Regard, MiB", "eager, MiB"),
        ),
        [
            (
                *case_cells(row),
                milliseconds(row, "sdpa"),
                *ratio_cells(row, "regard", "eager"),
                *(mebibytes(row, name) for name in names),
            )
            for row in rows
        ],
        [row["case"]["length"] == 2048 and row["case"]["attention"] in SHOWN for row in rows],
    )


def operators(rows: list[Row]) -> str:
    """Return the section on operations."""
    verdict = format_verdict(rows, {"time": lambda row: ratio(row, "regard") <= 1})
    return OPERATORS.format(operators=operators_table(rows).to_markdown(), verdict=verdict)


def steps(rows: list[Row]) -> str:
    """Return the section on training steps: each contestant at its best, and in each setting."""
    best = [
        _at_their_best([row for row in rows if (row["case"]["size"], row["case"]["length"]) == case])
        for case in dict.fromkeys((row["case"]["size"], row["case"]["length"]) for row in rows)
    ]

    def cells(row: Row) -> list[str]:
        speeds = (
            f"{TOKENS / row['figures'][name]['seconds']:.0f} ({row['settings'][name]})"
            for name in ("regard", *STEP_PEERS)
        )
        return [*case_cells(row), *speeds, *ratio_cells(row, *STEP_PEERS)]

    head = ("size", "tokens", "Regard", *STEP_PEERS, *(f"{name} ÷ Regard" for name in STEP_PEERS))
    text = STEPS.format(best=markdown_table(head, map(cells, best)), verdict=_no_peer_is_faster(best))
    return text + _setting_steps(rows)


def _at_their_best(rows: list[Row]) -> Row:
    """Return one row of a size and length, with each contestant in the setting in which it is fastest."""
    case = {name: rows[0]["case"][name] for name in ("size", "length")}
    best = {name: min(rows, key=lambda row: row["figures"][name]["seconds"]) for name in ("regard", *STEP_PEERS)}
    seconds = {name: row["figures"][name]["seconds"] for name, row in best.items()}
    return {
        "case": case,
        "settings": {name: Setting(row["case"]["precision"], row["case"]["compiled"]) for name, row in best.items()},
        "figures": {
            name: {"seconds": value, "time_ratio": value / seconds["regard"]} for name, value in seconds.items()
        },
    }


def _no_peer_is_faster(rows: list[Row]) -> str:
    return format_verdict(rows, {"time": lambda row: min(ratio(row, name) for name in STEP_PEERS) >= 1})


def settings_table(rows: list[Row]) -> ResultTable:
    """Times of steps in each precision, compiled and not; the page shows 1024 tokens, compiled."""
    head = ("size", "tokens", "precision", "compiled", "Regard, ms", *(f"{name} ÷ Regard" for name in STEP_PEERS))
    cells = [
        (
            *(row["case"][name] for name in ("size", "length", "precision")),
            "yes" if row["case"]["compiled"] else "no",
            milliseconds(row, "regard"),
            *ratio_cells(row, *STEP_PEERS),
        )
        for row in rows
    ]
    return ResultTable(
        "benchmark-step", head, cells, [row["case"]["length"] == 1024 and row["case"]["compiled"] for row in rows]
    )


def _setting_steps(rows: list[Row]) -> str:
    """Return the part on steps in each precision, compiled and not."""
    return SETTING_STEPS.format(settings=settings_table(rows).to_markdown(), verdict=_no_peer_is_faster(rows))


def attention_steps_table(rows: list[Row]) -> ResultTable:
    """Times and memory of steps with each attention; the page shows some of them at 256 tokens."""
    head = ("size", "tokens", "precision", "compiled", "attention", "backend", "softmax, ms", "Regard", "matrix")
    cells = [
        (
            *(row["case"][name] for name in ("size", "length", "precision")),
            "yes" if row["case"]["compiled"] else "no",
            *(row["case"][name] for name in ("attention", "backend")),
            milliseconds(row, "softmax"),
            *ratio_cells(row, "regard", "materialised"),
            *(mebibytes(row, name) for name in ("softmax", "regard", "materialised")),
        )
        for row in rows
    ]
    return ResultTable(
        "benchmark-attention-steps",
        (*head, "softmax, MiB", "Regard, MiB", "matrix, MiB"),
        cells,
        [row["case"]["attention"] in SHOWN and row["case"]["length"] == 256 for row in rows],
        frozenset(("precision", "compiled")),
    )


def attention_steps(rows: list[Row]) -> str:
    """Return the part on a step with each attention."""
    return ATTENTION_STEPS.format(
        attentions=attention_steps_table(rows).to_markdown(),
        verdict=format_verdict(rows, {"time": lambda row: ratio(row, "regard") <= 1}),
    )


def backend(rows: list[Row]) -> str:
    """Return the section on Regard as an attention of Transformers."""
    names = ("eager", "regard", "sdpa")
    return BACKEND.format(
        backend=markdown_table(
            ("model", "tokens", "eager, ms", "Regard", "SDPA", "eager, MiB", "Regard, MiB", "SDPA, MiB"),
            [
                (
                    *case_cells(row),
                    milliseconds(row, "eager"),
                    *ratio_cells(row, "regard", "sdpa"),
                    *(mebibytes(row, name) if name in row["figures"] else "–" for name in names),
                )
                for row in rows
            ],
        )
    )


def freed_memory(rows: list[Row]) -> str:
    """Return the part on a step with freed memory kept."""

    def cells(row: Row) -> tuple[str, ...]:
        default, kept = (row["figures"][name] for name in ("default", "kept"))
        spreads = (f"{1e3 * one['fastest']:.0f} to {1e3 * one['slowest']:.0f}" for one in (default, kept))
        peaks = (f"{row['peak_mib'][name]:.0f}" for name in ("default", "kept"))
        return (*case_cells(row), milliseconds(row, "default"), *ratio_cells(row, "kept"), *spreads, *peaks)

    head = ("work", "model", "tokens", "default, ms", "kept")
    head += ("default, from to", "kept, from to", "default, MiB", "kept, MiB")
    return FREED_MEMORY.format(freed_memory=markdown_table(head, map(cells, rows)))


def loss(rows: list[Row]) -> str:
    """Return the section on the loss layer."""
    head = ("tokens", "vocabulary", "width", "precision", "logits, MiB", "whole, ms", "torch", "Regard")
    return LOSS.format(
        loss=markdown_table(
            (*head, "whole, MiB", "torch, MiB", "Regard, MiB"),
            [
                (
                    *case_cells(row),
                    milliseconds(row, "whole"),
                    *ratio_cells(row, "torch", "regard"),
                    *(mebibytes(row, name) for name in ("whole", "torch", "regard")),
                )
                for row in rows
            ],
        ),
        verdict=format_verdict(rows, {"time": lambda row: ratio(row, "regard") <= 1}),
    )
