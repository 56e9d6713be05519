"""The page of the hosts, made from their rows."""

import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.parts import item
from experiments.hosts.catalog import KINDS

PAGE, TABLE = Path("docs/models.md"), Path("docs/results/models.csv")
STATES = ("exact", "refused", "not buildable", "silent", "error")
WITHOUT_ATTENTION, NO_LAYERS = ("rwkv",), "it has no stack of attention layers"
SAME = {
    r"fold windows or groups": "its layers work on different numbers of rows, as models do that fold windows or groups "
    "of tokens into the batch",
    r"so positions differ$": "its layers have different numbers of tokens, so positions differ",
    r"keys that are not these tokens$": "its tokens attend to keys that are not these tokens",
    r"has several attention layers$": "a block has several attention layers",
    r"^its softmax over \d dimensions": "its softmax is not of one product of queries and keys",
    r"in the cache of another part": "it attends to keys in the cache of another part",
    r"is in none of its \d+ blocks$": "it attends outside of its blocks",
}
"""Reasons that are the same but for their numbers and names, by what they are recognized by."""
INTRODUCTION = """\
# Models

Every model type of Transformers, tiny and with random weights: its own eager attention against a forward that Regard
watches. Made by `make hosts`. [The table](results/models.csv) has each type's class, largest difference, sites, checks
and notes.

* **exact**: outputs differ by at most 1e-4 of the largest entry; so does the mean weight of every key, where the model
  returns its weights (*weights*: yes), and `watching`'s own verification passes. Compared are a plain batch and,
  wherever the model can do it, one with padding, a step with a cache, and images or sounds (*checks*): with its own
  eager attention, or with SDPA where the two differ. Causal models must have the site `decoder`, masked ones `encoder`,
  encoder–decoders both.
* **refused**: Regard raises one `UserError`.
* **not buildable**: no small model could be made, or no input for it, for the reason given.
* **silent**: a difference without an error. **error**: an error other than `UserError`.
"""


def make_files(rows: Sequence[dict[str, Any]]) -> dict[Path, str]:
    """Return the page and the table of all hosts, by path."""
    rows = sorted(rows, key=lambda row: (KINDS.index(row["kind"]), row["type"]))
    return {PAGE: _make_page(rows), TABLE: _make_table(rows)}


def _make_page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page: counts, then by reason the types that are not exact, or in part alone, and the exact by kind."""
    exact = [row for row in rows if row["state"] == "exact"]
    outside = [(row, re.search(r"not observed: ([^;]+)", row.get("why", ""))) for row in exact]
    limits = {
        "refused with padding": [f"`{row['type']}`" for row in exact if "padded: cannot " in row.get("why", "")],
        "refused with images or sounds, but for `--part` with what stands behind it": [
            _with_parts(row) for row in exact if _is_refused_with_more(row)
        ],
        "with attention in no stack of layers, which is not observed and of which `measure` warns": [
            f"`{row['type']}` (`{found[1].replace(', ', '`, `')}`)" for row, found in outside if found is not None
        ],
    }
    parts = [INTRODUCTION, _summary(rows), _count_causal(rows)]
    for state in STATES[1:]:
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row["state"] == state:
                reasons.setdefault(_shorten(str(row.get("why", ""))), []).append(f"`{row['type']}`")
        parts += _list_types(state.capitalize(), reasons)
    by_kind = {kind.capitalize(): [f"`{row['type']}`" for row in exact if row["kind"] == kind] for kind in KINDS}
    return "\n".join([*parts, *_list_types("Exact in part", limits), *_list_types("Exact", by_kind)])


def _list_types(title: str, reasons: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a section with an item for each reason, the most frequent first; nothing without types."""
    frequent = sorted(reasons.items(), key=lambda reason: -len(reason[1]))
    lines = [item(f"{reason}: {', '.join(dict.fromkeys(names))}.") for reason, names in frequent if names]
    return [f"## {title}\n", *lines, ""] if lines else []


def _is_refused_with_more(row: dict[str, Any]) -> bool:
    return re.search(r"(^|; )(images|sounds): cannot ", str(row.get("why", ""))) is not None


def _with_parts(row: dict[str, Any]) -> str:
    """Return a type with the parts that are exact alone, if others are refused."""
    found = (re.fullmatch(r"(?:images|sounds) in (.+)", check) for check in row["checks"])
    parts = [f"`{match[1]}`" for match in found if match is not None]
    return f"`{row['type']}`" + (f" ({' and '.join(parts)})" if parts else "")


def _shorten(reason: str) -> str:
    """Return a reason without the model's class, its numbers and the error behind it: the same of all of a kind."""
    reason = re.sub(r"^cannot observe \w+( \([\w.]+\))?(?=:| )", "", reason)
    reason = reason.strip(" :").replace("<", "&lt;")
    reason = re.sub(r" \((no input fits: )?\w+Error: .*", "", reason)  # the reason that precedes the error says it
    return next((said for form, said in SAME.items() if re.search(form, reason)), reason)


def _make_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return all hosts as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("kind", "type", "class", "result", "difference", "weights", "sites", "checks", "note"))
    for row in rows:
        weights = "" if "weights" not in row else "yes" if row["weights"] else "no"
        lists = (" ".join(row.get(name, [])) for name in ("sites", "checks"))
        difference, note = row.get("difference", ""), row.get("why", "")
        writer.writerow((row["kind"], row["type"], row["class"], row["state"], difference, weights, *lists, note))
    return buffer.getvalue()


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
