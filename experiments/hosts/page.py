"""The page of the hosts, made from their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.hosts.catalog import KINDS

PAGE = Path("docs/models.md")
STATES = ("exact", "refused", "not buildable", "silent", "error")
WITHOUT_ATTENTION, NO_LAYERS = ("rwkv",), "it has no stack of attention layers"
INTRODUCTION = """\
# Models

Every model type of Transformers, tiny and with random weights: its own eager attention against a forward that Regard
watches. Made by `make hosts`.

* **exact**: outputs differ by at most 1e-4 of the largest entry. Where the model returns its attention weights, the
  mean weight of every key differs by at most 1e-4 (column *weights*: yes). Compared are a plain batch, one with padding
  and, for causal language models, a step with a cache, wherever the model itself can do it.
  Some models differ from their own eager attention when they use SDPA; those are compared with SDPA.
  Causal models must have the site `decoder`, masked ones `encoder`, encoder–decoders both.
  The verification of `watching` is run as well: an exact model that it refuses is silent.
* **refused**: Regard raises one `UserError`.
* **not buildable**: no small model could be made, or no input for it.
* **silent**: a difference without an error. **error**: an error other than `UserError`.
"""


def make_page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page: counts, then the hosts of each kind."""
    parts = [INTRODUCTION, _summary(rows), _count_causal(rows)]
    for kind in KINDS:
        selected = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["type"])
        if not selected:
            continue
        lines = [
            f"## {kind.capitalize()}",
            "",
            "| type | result | difference | weights | sites | note |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_line(row) for row in selected]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| kind | hosts | " + " | ".join(STATES) + " |", "|---|" + "---|" * (len(STATES) + 1)]
    for kind in (*KINDS, "all"):
        counts = Counter(row["state"] for row in rows if kind in (row["kind"], "all"))
        numbers = [sum(counts.values()), *(counts[state] for state in STATES)]
        lines.append(f"| {kind} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines) + "\n"


def _count_causal(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many causal models with attention are exact, of those that could be built."""
    built = [row for row in rows if row["kind"] == "causal" and row["state"] != "not buildable"]
    without = [row for row in built if row["type"] in WITHOUT_ATTENTION or NO_LAYERS in row.get("why", "")]
    exact, count = sum(row["state"] == "exact" for row in built), len(built) - len(without)
    return (
        f"Of the {count} causal types that could be built and have attention, {exact} are exact ({exact / count:.0%}). "
        f"{len(without)} have none: {', '.join(row['type'] for row in without)}.\n"
    )


def _line(row: dict[str, Any]) -> str:
    difference = f"{row['difference']:.0e}" if "difference" in row else ""
    weights = "yes" if row.get("weights") else ""
    why = str(row.get("why", "")).replace("|", "\\|").replace("<", "&lt;")
    return (
        f"| `{row['type']}` | {row['state']} | {difference} | {weights} | {', '.join(row.get('sites', []))} | {why} |"
    )
