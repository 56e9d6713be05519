"""The part of docs/sapt.md that tells of the further analyses, one table for each that was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from experiments.common.comparison import where
from experiments.common.markdown import listed, table, wrapped
from experiments.common.results_page import DASH

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
    "blocks": ("blocks", 0),
    "right": ("right", 2),
    "seconds": ("s", 0),
}
"""The measures that most analyses tell: titles and digits."""
WRITTEN: Mapping[str, tuple[str, int]] = {
    "average_performance til": ("AP", 1),
    "forgetting_rate til": ("F.Ra", 1),
    "learning_accuracy til": ("learning", 1),
    **{
        one: COMMON[one]
        for one in ("own_adapter_weight learning", "own_adapter_weight end", "least own_adapter_weight end", "seconds")
    },
    "membership": ("membership", 2),
    "told apart": ("told apart", 2),
    "near duplicates": ("near duplicates", 2),
    "copied 8-grams": ("copied 8-grams", 2),
    "kept": ("kept", 0),
}
"""The measures of answers that are written, of which none is chosen among classes."""
ABOUT: Mapping[str, tuple[str, str]] = {
    "share": (
        "How much must stand in for earlier tasks",
        "Query vectors of this share of a task's rows, or as many drawn from a density over them, hold the gate.",
    ),
    "size": ("Size of the model", "The encoder cut to its first layers."),
    "unseen": (
        "Tasks that were never trained on",
        "Ten tasks of an order were learnt, four others scored by the words of their labels alone: accuracy among a "
        "task's own labels.",
    ),
    "pair": (
        "Two tasks",
        "Accuracy among the own labels when learnt and at the end, and the weights of both blocks at the end.",
    ),
    "strength": (
        "Strength of the published reflection",
        "The published gate with different λ, and with one that balances the gradients of both losses.",
    ),
    "gate": (
        "What opens the gate",
        "*published*: with λ of the mean over earlier tasks of their divergence; all that are not published have −log "
        "of the own block's weight in their loss, in which each earlier task counts as the one at hand: with four of "
        "them, λ 4. *ahead*: the attention is taught the task's rows before its block is trained; *held*: then it is "
        "not trained any more; *floor*: a floor under the own weight that falls to 0 in the first half; *keys ×10*, "
        "*maps ×0.1*: their learning rates; *entropy*, *balance*: terms that make a row's weights choose, or spread.",
    ),
    "prompts": (
        "Soft prompts for blocks",
        "SAPT-Prompt: each block is a soft prompt of ten tokens, mixed by the same attention, at a learning rate of so "
        "many times that of the attention, with an MLP while it is trained or without; beside low-rank blocks, and "
        "progressive prompts, which are told the task (own AP alone).",
    ),
    "noticed": (
        "Tasks that nobody announces",
        "Each task comes in two portions, the second when all tasks have been seen. *blocks*: how many there are in "
        "the end, of five tasks; *right*: the share of portions that were given a new block where their task had none, "
        "and their task's where it had one. Rows of a task count once for each of its portions.",
    ),
    "rates": (
        "Learning rates",
        "Each method at a quarter of the rate that most have above, at half of it, and at that rate.",
    ),
    "fifty": (
        "Fifty tasks",
        "The first and the last tasks that were learnt; a step's seconds are means over five tasks. Each task tells "
        "two classes apart, and each class is in several tasks, so that nothing in a text says which of these it is "
        "of: *at most* is the mean own weight of a gate that knows the class of every text.",
    ),
    "decoder": (
        "A decoder that was pre-trained here",
        "The model is `regard pretrain nano`, wider and with longer texts, trained on Python's documentation; the five "
        "tasks are from text to text, and what it writes must match the answer. Blocks on queries and values.",
    ),
    "standing": (
        "What stands for earlier tasks, with that decoder",
        "Query vectors of 100 real rows, of a density over them, nothing, or texts that the decoder has written. "
        "*membership*: how likely a training row is nearer to what is kept of it than a dev row is, 0.5 where nothing "
        "is given away; *told apart*: how often a classifier tells the texts from real ones, 0.5 where it cannot; "
        "means over the tasks but the last, of which nothing need be kept.",
    ),
    "instructions": (
        "Without instructions",
        "Whether the task's instruction stands before each text; without it texts of several tasks look alike.",
    ),
}
"""The analyses in the order of the page: title, and what was changed."""
SETTING = (
    "Of `python -m experiments.sapt.analyses`. Where nothing else is said, five tasks (sst2, agnews, dbpedia, "
    "amazon, rte) were learnt by SAPT with the settings above; columns as there, means over tasks. Seeds: {seeds}. "
    "With so few runs these numbers show where to look, they prove nothing."
)
FIFTY = {
    "seconds a step": ("seconds a step", 3),
    "own_adapter_weight by tasks": ("own weight", 2),
    "entropy by tasks": ("entropy", 2),
    "average_performance by tasks": ("AP", 1),
}
MOST = ("most own_adapter_weight by tasks", ("own weight, at most", 2))
SPAN = 5
"""Tasks at the beginning and at the end whose numbers are averaged."""


def analyses(found: pd.DataFrame) -> str:
    """The section of all analyses that were made; empty without any."""
    there = [name for name in ABOUT if name in set(found["analysis"])]
    if not there:
        return ""
    seeds = listed(str(seed) for seed in sorted(set(found["seed"])))
    parts = ["## Further analyses", wrapped(SETTING.format(seeds=seeds))]
    for name in there:
        title, said = ABOUT[name]
        of = where(found, analysis=name)
        parts += [f"### {title}", wrapped(said), _table(name, of)]
        parts += [wrapped(decoded(of))] if name == "decoder" else []
    return "\n\n".join(parts)


def _table(name: str, found: pd.DataFrame) -> str:
    if name == "fifty":
        return _fifty(found)
    means = found[found["x"].isna()].groupby(["case", "measure"], sort=False)["value"].mean()
    named = list(dict.fromkeys(found.loc[found["x"].isna(), "measure"]))
    told = _titles(named)
    cases = list(dict.fromkeys(found["case"]))
    lines = [
        [case, *(_cell(means.get((case, one)), digits) for one, (_, digits) in told.items())]
        for case in sorted_as(cases)
    ]
    return table(["case", *(title for title, _ in told.values())], lines)


def decoded(found: pd.DataFrame) -> str:
    """What the decoder's runs say to what is asked of SAPT: means over seeds, which prove nothing."""
    means = found[found["x"].isna()].groupby(["case", "measure"])["value"].mean()
    asked = [
        ("joint", "average_performance til", "`joint`"),
        ("replay-lora", "average_performance til", "`replay-lora`"),
    ]
    asked.append(("separate", "learning_accuracy til", "what `separate` learns"))
    said = []
    for case, measure, name in asked:
        if (case, measure) in means and ("sapt", measure) in means:
            apart = means["sapt", measure] - means[case, measure]
            said.append(f"{abs(apart):.1f} points {'below' if apart < 0 else 'above'} {name}")
    return f"SAPT is {listed(said)}." if said else ""


def _titles(named: Sequence[str]) -> dict[str, tuple[str, int]]:
    """The measures to tell, with titles and digits: those of most analyses, of writing, or all by their names."""
    for known in (COMMON, WRITTEN):
        if next(iter(known)) in named:
            return {one: known[one] for one in known if one in named}
    return _own(named)


def _own(named: Sequence[str]) -> dict[str, tuple[str, int]]:
    """All measures under their own names, weights with two digits."""
    return {one: (one, 2 if one.startswith("weight") else 1) for one in named}


def sorted_as(cases: Sequence[str]) -> list[str]:
    """Cases whose names begin alike together, numbers in them by size; else in the order of their names."""
    return sorted(cases, key=_parts)


def _parts(case: str) -> list[tuple[int, float, str]]:
    """The words of a name, numbers as such."""
    found = []
    for word in case.replace(",", " ").replace("%", " ").split():
        try:
            found.append((0, float(word), ""))
        except ValueError:
            found.append((1, 0.0, word))
    return found


def _cell(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def _fifty(found: pd.DataFrame) -> str:
    """What the first and the last tasks came to, and the ratio of their steps."""
    lines = []
    for case in dict.fromkeys(found["case"]):
        for measure, (title, digits) in (*FIFTY.items(), MOST):
            rows = where(found, case=case, measure=measure)
            curve = rows.groupby("x")["value"].mean().sort_index()
            if len(curve):
                ends = (float(curve.iloc[:SPAN].mean()), float(curve.iloc[-SPAN:].mean()))
                ratio = f"{ends[1] / ends[0]:.2f}" if ends[0] else DASH
                lines.append([case, title, *(f"{end:.{digits}f}" for end in ends), ratio])
    return table(("case", "measure", f"first {SPAN} tasks", f"last {SPAN}", "ratio"), lines)
