"""Section of docs/benchmarks.md on GPUs, from whatever gpu-*.json there are."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import ResultTable, Row, mebibytes, milliseconds, ratio_cells, wrap

TITLES = {
    "gpu_kernels": "Kernels for rows and columns",
    "attention_function": "Attention function",
    "long_sequences": "Long sequences",
    "whole_model": "Whole model",
    "statistics_cost": "Statistics of a run",
    "constant_attention": "Constant heads",
    "structured_constants": "Approximations of constant matrices",
    "decoding": "Decoding with constant heads",
    "cached_probe": "Probe on stored hidden states",
    "operators": "Training with other attentions: the operation alone",
    "loss_layer": "Loss layer",
    "attention_backend": "Regard as the attention of a model",
    "training_step": "A training step",
    "attention_steps": "A training step with other attentions",
    "learning": "Learning a task",
    "adapters": "A pool of LoRA adapters",
    "adapter_step": "A step of training of adapters",
    "gathering": "Gathering or masking adapters",
    "look": "A look at a text",
}
"""The benchmarks that run on a GPU, in order, and their headings."""
NOTES = {
    "gpu_kernels": "rows are entropy, distance and log-sum-exp of every query, columns mass and square of every key. "
    "What measuring adds to a forward is the sum of both ratios.",
    "statistics_cost": "cheap is without the dear.",
    "adapters": "reading is a forward of a Llama, with weights given and routed, with adapters everywhere and above "
    "the layers that the router reads.",
}
"""What the contestants are that no section above names."""
MOST_ROWS = 3
"""Rows of a table on the page; a CSV file has all."""
MOST_MEMORIES = 3
"""Contestants whose memory the page shows; of more it shows the reference and Regard alone."""
NONE = """
No results are committed: the kernels are tested in Triton's interpreter and compiled for two architectures. `make gpu`
runs the tests that need a GPU and every benchmark there, and makes this section.
"""
ABOUT = """
Made by `make gpu`: the benchmarks above on a GPU. The first time is that of the reference; the others are ratios to it.
The clock waits for the GPU, so that the time to launch kernels counts. Memory is what PyTorch allocates there at the
peak beyond the start, in MiB.
"""


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the results that there are, by benchmark."""
    paths = {name: folder / f"gpu-{name}.json" for name in TITLES}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def result_table(name: str, rows: Sequence[Row]) -> ResultTable:
    """Return times and memory of one benchmark; the page shows the longest inputs, if there are many rows."""
    columns = _union(row["case"] for row in rows)
    contestants = _union(row["figures"] for row in rows)
    references = {row["reference"] for row in rows}
    others = [contestant for contestant in contestants if references != {contestant}]
    measured = [
        contestant
        for contestant in contestants
        if any(row["figures"].get(contestant, {}).get("memory") is not None for row in rows)
    ]
    shown_memories = measured if len(measured) <= MOST_MEMORIES else _select_memories(measured, references)
    lengths = [row["case"].get("length", row["case"].get("tokens", 0)) for row in rows]
    on_page = [len(rows) <= MOST_ROWS or length == max(lengths) for length in lengths]
    shown = [index for index, selected in enumerate(on_page) if selected][-MOST_ROWS:]
    return ResultTable(
        f"gpu-{name}",
        (
            *columns,
            f"{' or '.join(sorted(references))}, ms",
            *others,
            *(f"{contestant}, MiB" for contestant in measured),
        ),
        [
            (
                *(row["case"].get(column, "–") for column in columns),
                milliseconds(row, row["reference"]),
                *(cell for contestant in others for cell in ratio_cells(row, contestant)),
                *(_memory(row, contestant) for contestant in measured),
            )
            for row in rows
        ],
        [index in shown for index in range(len(rows))],
        frozenset(f"{contestant}, MiB" for contestant in measured if contestant not in shown_memories),
    )


def section(results: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[ResultTable]]:
    """Return the section, and the tables of which it shows a part."""
    if not results:
        return NONE, []
    tables, parts = [], [ABOUT]
    parts.append("\n" + wrap("; ".join(dict.fromkeys(_describe(result["machine"]) for result in results.values()))))
    for name, result in results.items():
        if not result["rows"]:
            continue
        tables.append(result_table(name, result["rows"]))
        about = wrap(": ".join(part for part in (f"`benchmarks.{name}`", NOTES.get(name)) if part))
        parts.append(f"\n\n### {TITLES[name]} on a GPU\n\n{about}\n\n{tables[-1].to_markdown()}")
        if not result.get("complete", True):
            parts.append("\n\nIts time was up before all cases had run.")
    return "".join(parts) + "\n", [table for table in tables if not table.is_whole]


def _union(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return all keys, in the order in which they come."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _select_memories(measured: Sequence[str], references: Collection[str]) -> list[str]:
    """Return the references, and Regard, or the first of the others where it has another name."""
    others = [name for name in measured if name not in references]
    return [*references, *(["regard"] if "regard" in others else others[:1])]


def _memory(row: Row, name: str) -> str:
    figures = row["figures"].get(name)
    return "–" if figures is None or figures["memory"] is None else mebibytes(row, name)


def _describe(machine: Mapping[str, Any]) -> str:
    """Say where a result was measured."""
    return (
        f"{machine['date']}, {machine.get('card', 'no GPU')}, driver {machine.get('driver')}, "
        f"CUDA {machine.get('cuda')}, torch {machine['torch']}, transformers {machine['transformers']}"
    )
