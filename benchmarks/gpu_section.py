"""The section of docs/benchmarks.md on GPUs: one table a result of `make gpu`, of whichever there are."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.markdown import Row, case_cells, markdown_table, mebibytes, milliseconds, ratio_cells
from benchmarks.timing import RESULTS

PREFIX = "gpu-"
ABSENT = """## On a GPU

No figures yet: `make gpu` has not run on a card. Its parts have run with the device swapped for the CPU, the kernels in
Triton's interpreter; kernels are compiled for two architectures.
"""


def section(folder: Path = RESULTS) -> str:
    """Return the section; without results it says that there are none."""
    paths = sorted(folder.glob(f"{PREFIX}*.json"))
    if not paths:
        return ABSENT
    results = {path.stem.removeprefix(PREFIX): json.loads(path.read_text(encoding="utf-8")) for path in paths}
    machines = sorted({describe_card(result["machine"]) for result in results.values()})
    parts = ["## On a GPU", "; ".join(machines) + ". Times are of the wall, with the GPU's work done; memory is what"
             " PyTorch allocates there. Ratios are to the first contestant."]  # fmt: skip
    parts += [f"### {name.replace('_', ' ')}\n\n{table(result['rows'])}" for name, result in results.items()]
    return "\n\n".join(parts) + "\n"


def describe_card(machine: dict[str, str]) -> str:
    """Return card, driver, versions and date."""
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
    return f"{machine['date']}, {machine['card']}{driver}, {versions}"


def table(rows: list[Row]) -> str:
    """Return the table of one benchmark: cases, the reference in ms and MiB, and the others' ratios to it."""
    keys = list(dict.fromkeys(key for row in rows for key in row["case"]))
    names = list(dict.fromkeys(name for row in rows for name in row["figures"]))
    reference, *others = names
    head = [*keys, f"{reference} (ms)", f"{reference} (MiB)", *others, *(f"{name} (memory)" for name in others)]
    cells = []
    for row in rows:
        case = dict(zip(row["case"], case_cells(row), strict=True))
        memory = [ratio_cells(row, name, of="memory_ratio")[0] if has_memory(row, name) else "–" for name in others]
        base = mebibytes(row, reference) if row["figures"][reference]["memory"] is not None else "–"
        known = [case.get(key, "") for key in keys]
        cells.append([*known, milliseconds(row, reference), base, *ratio_cells(row, *others), *memory])
    return markdown_table(head, cells)


def has_memory(row: Row, name: str) -> bool:
    """Return whether the memory of a contestant is known as a ratio."""
    return name in row["figures"] and row["figures"][name]["memory_ratio"] is not None
