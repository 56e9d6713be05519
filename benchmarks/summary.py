"""The first table of docs/benchmarks.md: what users ask first, as ranges over the cases of the tables below it."""

import json
from typing import NamedTuple

from benchmarks.markdown import markdown_table, ratio
from benchmarks.timing import RESULTS

REGARD_IN_TRAINING = '`attn_implementation="regard"` in training'


class Question(NamedTuple):
    """What is done instead of what, the section that has all cases, and where its ratios are.

    `reference` is a contestant to compare with in place of the section's reference, in the cases that have it; cases
    that have the contestant `without` are left out.
    """

    what: str
    over: str
    section: str
    result: str
    contestant: str
    reference: str = ""
    without: str = ""

    def ratios(self) -> list[float]:
        """Return times over those of the reference."""
        rows = json.loads((RESULTS / f"{self.result}.json").read_text(encoding="utf-8"))["rows"]
        needed = {self.contestant, self.reference} - {""}
        rows = [row for row in rows if needed <= set(row["figures"]) and self.without not in row["figures"]]
        return [ratio(row, self.contestant) / (ratio(row, self.reference) if self.reference else 1) for row in rows]


QUESTIONS = (
    Question(
        "observe a forward, default statistics", "the forward", "Statistics of a run", "statistics_cost", "default"
    ),
    Question("observe a forward, all statistics", "the forward", "Statistics of a run", "statistics_cost", "all"),
    Question(
        "observe a forward on a GPU, default statistics",
        "the forward",
        "Statistics of a run on a GPU",
        "gpu-statistics_cost",
        "default",
    ),
    Question("a forward, all heads constant", "with attention", "Constant heads", "constant_attention", "regard"),
    Question("a token with a cache, all heads constant", "with attention", "Decoding", "decoding", "all"),
    Question(
        f"{REGARD_IN_TRAINING} of models without SDPA",
        "eager attention",
        "Regard as the attention of a model",
        "attention_backend",
        "regard",
        without="sdpa",
    ),
    Question(
        f"{REGARD_IN_TRAINING} of others",
        "SDPA",
        "Regard as the attention of a model",
        "attention_backend",
        "regard",
        reference="sdpa",
    ),
    Question(
        f"{REGARD_IN_TRAINING} on a GPU, of models without SDPA",
        "eager attention",
        "Regard as the attention of a model on a GPU",
        "gpu-attention_backend",
        "regard",
        without="sdpa",
    ),
)


def in_short() -> str:
    """Return a table of how many times as long each takes, from the least to the most of its cases."""
    lines = []
    for one in QUESTIONS:
        ratios = one.ratios()
        link = f"[{len(ratios)} cases](#{one.section.lower().replace(' ', '-')})"
        lines.append((one.what, one.over, f"{min(ratios):.2f} to {max(ratios):.2f}", link))
    return markdown_table(("what", "instead of", "times as long", "all"), lines)
