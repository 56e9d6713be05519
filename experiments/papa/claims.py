"""Claims of PAPA (Hassid et al. 2022, arXiv 2211.03495), judged from the scores of five tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.common.claims import (
    Claim,
    Judgment,
    Part,
    above,
    at_least,
    describe_difference,
    format_interval,
    near,
)
from experiments.common.comparison import paired, where
from experiments.common.parts import RESULTS, join_words
from experiments.papa.run import ELSEWHERE, TASKS
from regard.commands.replace.scores import intervals, relative_drop

NAMES = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "ner": "NER", "pos": "POS"}
DATA_FREE = ("identity", "toeplitz", "zeros")
MAX_DROP = 20.0
"""Per cent of the score that no published model loses with all heads constant."""
POINT = 0.01


@dataclass(frozen=True, eq=False)
class Tables:
    """The scores of all tasks, the orders of their heads, and the records of how they were made."""

    scores: pd.DataFrame
    heads: Mapping[str, pd.DataFrame]
    records: Mapping[str, Mapping[str, Any]]
    lengths: pd.DataFrame
    forms: pd.DataFrame
    judged_streams: Sequence[str] = ("five tasks",)

    @classmethod
    def load(cls, folder: Path = RESULTS) -> Tables:
        """Read the tables of a folder."""
        scores = pd.concat([pd.read_csv(folder / f"papa-{task}-scores.csv") for task in TASKS], ignore_index=True)
        heads = {task: pd.read_csv(folder / f"papa-{task}-heads.csv") for task in TASKS}
        forms = [pd.read_csv(path) for task in TASKS if (path := folder / f"structure-{task}.csv").exists()]
        records = {task: json.loads((folder / f"papa-{task}.json").read_text(encoding="utf-8")) for task in TASKS}
        return cls(scores, heads, records, pd.read_csv(folder / "lengths.csv"), pd.concat(forms, ignore_index=True))

    def has_row(self, stream: str, row: str) -> bool:
        """Whether there are scores with these constants."""
        return row in set(self.scores["constants"])

    @cached_property
    def points(self) -> pd.DataFrame:
        """Means over seeds with intervals."""
        return intervals(self.scores)

    @cached_property
    def drops(self) -> pd.DataFrame:
        """Relative drops of the mean scores, in per cent."""
        return relative_drop(self.scores)

    def point(self, task: str, constants: str = "average", fraction: float = 0.0, order: str = "lambda") -> pd.Series:
        """Return the mean score of one setting with its interval."""
        key = {"constants": constants, "rank_heads_by": order} if fraction < 1 else {}
        rows = where(self.points, task=task, dynamic_fraction=fraction, **key)
        if len(rows) != 1:
            raise ValueError(f"expected one mean of {task}, {constants}, {fraction}, {order}, got {len(rows)}")
        return rows.iloc[0]

    def by_seed(
        self, task: str, constants: str = "average", fraction: float = 0.0, order: str = "lambda"
    ) -> dict[int, float]:
        """Return the scores of one setting by seed."""
        key = {"constants": constants, "rank_heads_by": order} if fraction < 1 else {}
        rows = where(self.scores, task=task, dynamic_fraction=fraction, **key)
        return dict(zip(rows["seed"], rows["score"], strict=True))


# -- judges ----------------------------------------------------------------------------------------------------------


def all_constant(tables: Tables, _: str) -> Judgment:
    """Judge whether no task surely loses more than `MAX_DROP` per cent with all heads constant."""
    parts: list[Part] = []
    sentences = []
    for task in TASKS:
        untouched, constant = tables.by_seed(task, fraction=1.0), tables.by_seed(task)
        bounds = {seed: untouched[seed] * (1 - MAX_DROP / 100) for seed in untouched}
        parts.append(at_least(paired(constant, bounds), 0.0))
        drop = where(tables.drops, task=task, dynamic_fraction=0.0, constants="average", rank_heads_by="lambda")["drop"]
        sentences.append(f"{NAMES[task]} {drop.iloc[0]:.1f} %")
    return parts, [f"Relative drop: {join_words(sentences)}."]


def half_constant(tables: Tables, _: str) -> Judgment:
    """Judge for each task whether half of the heads constant are within a point of none."""
    return _each_task(lambda task: (tables.by_seed(task, fraction=0.5), tables.by_seed(task, fraction=1.0)), near_point)


def near_point(difference: Any) -> Part:
    """Decide whether a difference of scores is within ±1 point."""
    return near(difference, POINT)


def _each_task(values: Callable[[str], Any], decide: Callable[[Any], Part]) -> Judgment:
    """Decide the paired difference of two settings on each task."""
    differences = {task: paired(*values(task)) for task in TASKS}
    return (
        [decide(difference) for difference in differences.values()],
        [f"{NAMES[task]}: {describe_difference(difference, 3)}" for task, difference in differences.items()],
    )


def beats_data_free(tables: Tables, _: str) -> Judgment:
    """Judge for each task and data-free source whether averages score higher."""
    parts: list[Part] = []
    sentences = []
    for task in TASKS:
        differences = {name: paired(tables.by_seed(task), tables.by_seed(task, name)) for name in DATA_FREE}
        parts += [above(difference) for difference in differences.values()]
        cells = (f"{name} {format_interval(one, 3, signed=True)}" for name, one in differences.items())
        sentences.append(f"{NAMES[task]}: {', '.join(cells)}.")
    return parts, ["Averages less the source.", *sentences]


def elsewhere(tables: Tables, _: str) -> Judgment:
    """Judge for each task whether averages of another task are within a point of its own."""
    return _each_task(
        lambda task: (tables.by_seed(task, f"average of {ELSEWHERE[task]}"), tables.by_seed(task)), near_point
    )


def trained(tables: Tables, _: str) -> Judgment:
    """Judge for each task whether training the averages on labels changes less than a point."""
    return _each_task(lambda task: (tables.by_seed(task, "average-init"), tables.by_seed(task)), near_point)


def orders(*others: str) -> Callable[[Tables, str], Judgment]:
    """Return the judge of whether heads selected by lambda score above other orders, over all tasks and fractions."""

    def judge(tables: Tables, _: str) -> Judgment:
        cases = [(task, fraction) for task in TASKS for fraction in (1 / 2, 1 / 8)]
        means = {order: _mean_by_seed(tables, cases, order) for order in ("lambda", *others)}
        differences = {other: paired(means["lambda"], means[other]) for other in others}
        cells = (f"{other} {format_interval(one, 3, signed=True)}" for other, one in differences.items())
        return [above(one) for one in differences.values()], [
            f"Lambda less the other, mean over {len(cases)} cases of task and fraction: {', '.join(cells)}."
        ]

    return judge


def _mean_by_seed(tables: Tables, cases: Sequence[tuple[str, float]], order: str) -> dict[int, float]:
    """Return the mean score over cases by seed, with heads selected by an order."""
    scores = [tables.by_seed(task, fraction=fraction, order=order) for task, fraction in cases]
    return {seed: sum(values[seed] for values in scores) / len(scores) for seed in scores[0]}


def pattern(column: str, published: int) -> Callable[[Tables, str], Judgment]:
    """Return the judge of a share of heads that the paper counted by eye: always undecided."""

    def judge(tables: Tables, _: str) -> Judgment:
        shares = [100 * record["patterns"][column] for record in tables.records.values()]
        return [None], [f"{min(shares):.0f} to {max(shares):.0f} % by a rule here; {published} % by eye in the paper."]

    return judge


# -- claims ----------------------------------------------------------------------------------------------------------

LARGE = "Needs encoders of 110M parameters and more; `regard replace --scale paper` has the published settings."
CLAIMS: tuple[Claim[Tables], ...] = (
    Claim(
        "Figure 2, all heads constant",
        f"With all heads constant no task loses more than {MAX_DROP:g} % of its score.",
        all_constant,
        published="mean drop 8 %, at most 20 %",
    ),
    Claim(
        "Figure 2, half constant",
        "With half of the heads constant scores stay within ±1 point.",
        half_constant,
        published="no loss",
    ),
    Claim(
        "Figure 2, models",
        "Better models lose more.",
        published="six encoders, base and large",
        reason="One encoder was run. " + LARGE,
    ),
    Claim(
        "Section 5.2, data-free sources",
        "Averages score above identity, Toeplitz and zeros.",
        beats_data_free,
        published="RoBERTa-base, CoLA: .31 against .04, .08, .09; NER: .89 against .55, .77, .57",
    ),
    Claim(
        "Section 5.2, trained constants",
        "Training the averages on labels changes the score by less than ±1 point.",
        trained,
        published="RoBERTa-base, CoLA .34, SST-2 .87, NER .89 against .31, .87, .89",
    ),
    Claim(
        "Section 5.2, other data",
        "Averages of another task serve as well, within ±1 point.",
        elsewhere,
        published="RoBERTa-base, MNLI's averages: CoLA .32, NER .89, POS .93 against .31, .89, .93",
    ),
    Claim(
        "Section 5.2, large",
        "The same with RoBERTa-large.",
        published="CoLA .53 untouched, .34 with averages; POS .93, .92",
        reason=LARGE,
    ),
    Claim(
        "Figure 5",
        "Heads selected by lambda score above first-layers, last-layers, random and reversed orders.",
        orders("first-layers", "last-layers", "random", "reversed"),
    ),
    Claim("Patterns", "About 90 % of the averages have a diagonal.", pattern("has_diagonal", 90), published="90 %"),
    Claim(
        "Patterns",
        "About 40 % of the averages put most of their mass on special tokens.",
        pattern("on_special", 40),
        published="40 %",
    ),
    Claim(
        "Masked language modeling",
        "ELECTRA loses less than the other encoders.",
        published="ELECTRA −3.51, loses 0.44; others about −2, lose 1 to 1.5",
        command="regard replace MODEL --task mlm",
        reason="Needs ELECTRA and WikiText-103, which were not at hand.",
    ),
    Claim("Task MNLI", "MNLI-mm as the other tasks.", published="RoBERTa-base .78, .69", reason="No MNLI data here."),
    Claim(
        "Table 3",
        "Settings of each task.",
        published="T 64 to 256, batch 8 to 32, 4 to 15 epochs",
        command="regard replace MODEL --scale paper",
        reason="Smaller settings were run (`laptop`).",
    ),
    Claim(
        "Cost per head",
        "A constant head costs n²d' + nd'² instead of 2n²d' + 3nd'².",
        command="python -m benchmarks.constant_attention",
        reason="A formula; measured speed is in benchmarks.md.",
    ),
    Claim(
        "Appendix A",
        "Special tokens are held in fixed positions.",
        reason="A protocol, not a result; `layout=paper` applies it.",
    ),
)
