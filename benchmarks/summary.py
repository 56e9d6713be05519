"""The first table of docs/benchmarks.md: what users ask first, as ranges over the cases of the tables below it."""

import json
from typing import NamedTuple

from benchmarks.markdown import markdown_table, ratio
from benchmarks.timing import RESULTS


class Question(NamedTuple):
    """What is done instead of what, the section that has all cases, and where its ratios are."""

    what: str
    over: str
    section: str
    result: str
    contestant: str


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
        '`attn_implementation="regard"` in training',
        "eager attention",
        "Regard as the attention of a model",
        "attention_backend",
        "regard",
    ),
)


def in_short() -> str:
    """Return a table of how many times as long each takes, from the least to the most of its cases."""
    lines = []
    for one in QUESTIONS:
        rows = json.loads((RESULTS / f"{one.result}.json").read_text(encoding="utf-8"))["rows"]
        ratios = [ratio(row, one.contestant) for row in rows if one.contestant in row["figures"]]
        link = f"[{len(ratios)} cases](#{one.section.lower().replace(' ', '-')})"
        lines.append((one.what, one.over, f"{min(ratios):.2f} to {max(ratios):.2f}", link))
    return markdown_table(("what", "instead of", "times as long", "all"), lines)
