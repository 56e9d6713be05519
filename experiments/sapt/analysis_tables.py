"""Tables of the further analyses of SAPT (`experiments.sapt.analyses`)."""

from collections.abc import Mapping, Sequence

import pandas as pd

from experiments.common.claims import DASH
from experiments.common.comparison import where
from experiments.common.parts import Table, join_words

COMMON: Mapping[str, tuple[str, int]] = {
    "average_performance cil": ("AP", 1),
    "average_performance til": ("own AP", 1),
    "forgetting_rate cil": ("F.Ra", 1),
    "learning_accuracy cil": ("learning", 1),
    "learning_accuracy til": ("own learning", 1),
    "own_adapter_weight learning": ("own weight, learnt", 2),
    "own_adapter_weight end": ("end", 2),
    "least own_adapter_weight end": ("least", 2),
    "entropy end": ("entropy, end", 2),
    "blocks": ("adapters", 0),
    "right": ("right", 2),
    "seconds": ("s", 0),
}
"""Measures of most analyses: title and digits."""
WRITTEN: Mapping[str, tuple[str, int]] = {
    "average_performance til": ("AP", 1),
    "forgetting_rate til": ("F.Ra", 1),
    "learning_accuracy til": ("learning", 1),
    **{
        name: COMMON[name]
        for name in ("own_adapter_weight learning", "own_adapter_weight end", "least own_adapter_weight end", "seconds")
    },
    "membership": ("membership", 2),
    "told apart": ("told apart", 2),
    "near duplicates": ("near duplicates", 2),
    "copied 8-grams": ("copied 8-grams", 2),
    "kept": ("kept", 0),
}
"""Measures of analyses whose model writes its answers."""
CURVES = {
    "seconds a step": ("seconds a step", 3),
    "own_adapter_weight by tasks": ("own weight", 2),
    "entropy by tasks": ("entropy", 2),
    "average_performance by tasks": ("AP", 1),
}
"""Measures by the number of tasks: title and digits."""
BOUND = ("most own_adapter_weight by tasks", ("own weight, at most", 2))
SPAN = 5
"""Tasks at each end whose numbers are averaged."""


def case_table(analyses: pd.DataFrame) -> Table:
    """Means over seeds of all cases of all analyses, each under the titles of its measures."""
    rows: list[dict[str, str]] = []
    for name, group in analyses[analyses["x"].isna()].groupby("analysis", sort=False):
        means = group.groupby(["case", "measure"], sort=False)["value"].mean()
        titles = measure_titles(list(dict.fromkeys(group["measure"])))
        for case in sort_cases(list(dict.fromkeys(group["case"]))):
            cells = {
                title: f"{means[case, measure]:.{digits}f}"
                for measure, (title, digits) in titles.items()
                if (case, measure) in means
            }
            rows.append({"analysis": str(name), "case": case, **cells})
    head = list(dict.fromkeys(title for row in rows for title in row))
    lines = [[row.get(title, DASH) for title in head] for row in rows]
    return Table("sapt-cases", "means of all cases of the analyses", head, lines)


def curve_table(analyses: pd.DataFrame) -> Table:
    """Means over the first and the last tasks of fifty, and their ratio."""
    lines = []
    fifty = where(analyses, analysis="fifty")
    for case in dict.fromkeys(fifty["case"]):
        for measure, (title, digits) in (*CURVES.items(), BOUND):
            curve = where(fifty, case=case, measure=measure).groupby("x")["value"].mean().sort_index()
            if len(curve):
                first, last = float(curve.iloc[:SPAN].mean()), float(curve.iloc[-SPAN:].mean())
                ratio = f"{last / first:.2f}" if first else DASH
                lines.append([case, title, f"{first:.{digits}f}", f"{last:.{digits}f}", ratio])
    head = ("case", "measure", f"first {SPAN} tasks", f"last {SPAN}", "ratio")
    return Table("sapt-fifty", "fifty tasks, the first and the last five", head, lines)


def measure_titles(measures: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return the titles and digits of an analysis's measures."""
    for known in (COMMON, WRITTEN):
        if next(iter(known)) in measures:
            return {name: known[name] for name in known if name in measures}
    return {name: (name, 2 if name.startswith("weight") else 1) for name in measures}


def describe_decoder(analyses: pd.DataFrame) -> str:
    """Return how SAPT compares with other methods in the analysis of the decoder; empty without it."""
    rows = where(analyses, analysis="decoder")
    means = rows[rows["x"].isna()].groupby(["case", "measure"])["value"].mean()
    references = (
        ("joint", "average_performance til", "`joint`"),
        ("replay-lora", "average_performance til", "`replay-lora`"),
        ("separate", "learning_accuracy til", "what `separate` learns"),
    )
    cells = []
    for case, measure, name in references:
        if (case, measure) in means and ("sapt", measure) in means:
            difference = means["sapt", measure] - means[case, measure]
            cells.append(f"{abs(difference):.1f} points {'below' if difference < 0 else 'above'} {name}")
    return f"SAPT is {join_words(cells)}." if cells else ""


def sort_cases(cases: Sequence[str]) -> list[str]:
    """Sort cases by name, numbers in names by size."""
    return sorted(cases, key=_sort_key)


def _sort_key(case: str) -> list[tuple[int, float, str]]:
    key = []
    for word in case.replace(",", " ").replace("%", " ").split():
        try:
            key.append((0, float(word), ""))
        except ValueError:
            key.append((1, 0.0, word))
    return key
