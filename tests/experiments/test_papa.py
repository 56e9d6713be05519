"""The page of PAPA: its stored tables, and what is computed from them."""

from pathlib import Path

import pandas as pd

from experiments.common.claims import MIN_RUNS
from experiments.papa.claims import CLAIMS, Tables
from experiments.papa.page import ORDERS, describe_orders, describe_sources
from experiments.papa.run import ELSEWHERE, OTHERS, SOURCES, TASKS

ROOT = Path(__file__).parents[2]
COLUMNS = ["task", "constants", "rank_heads_by", "dynamic_fraction", "seed", "metric", "score"]


def test_the_committed_tables_are_complete() -> None:
    scores = Tables.load(ROOT / "docs" / "results").scores
    runs = scores.groupby(["task", "constants", "rank_heads_by", "dynamic_fraction"])["seed"].nunique()
    assert runs.eq(MIN_RUNS).all()
    assert set(scores["task"]) == set(TASKS)
    assert set(SOURCES) | {"average", "none"} <= set(scores["constants"])
    assert set(OTHERS) | {"lambda", "none"} == set(scores["rank_heads_by"])
    own = scores[(scores["constants"] == "average") & (scores["rank_heads_by"] == "lambda")]
    assert set(own["dynamic_fraction"]) == {1 / 2, 1 / 8, 1 / 16, 0}


def test_sentences_are_computed() -> None:
    """Hand-made scores: averages lose to zeros on one task, and lambda to a layer order in one case of four."""
    rows = []
    for task, average in (("ner", 0.8), ("pos", 0.5)):
        for constants in (*SOURCES, "average", f"average of {ELSEWHERE[task]}"):
            rows.append((task, constants, "lambda", 0.0, average if constants.startswith("average") else 0.6))
        for fraction, score in ((1 / 2, 0.9), (1 / 8, 0.7)):
            for order in ORDERS:
                is_better = task == "ner" and order == "last-layers" and fraction == 1 / 8
                value = score + (0.1 if is_better else -0.1 * (order != "lambda"))
                rows.append((task, "average", order, fraction, value))
        rows.append((task, "none", "none", 1.0, 1.0))
    scores = pd.DataFrame([(*row[:4], seed, "f1", row[4]) for row in rows for seed in range(3)], columns=COLUMNS)
    tables = Tables(scores.assign(model="m"), {}, {}, pd.DataFrame(), pd.DataFrame())
    sources = describe_sources(tables)
    assert "higher mean than every data-free source on 1 of 2 tasks" in sources
    assert "Averages of another task: +0.000" in sources
    assert "above both orders by layer in 3 of 4 cases" in describe_orders(tables)


def test_claims_without_a_judge_say_why() -> None:
    assert all(claim.judge or claim.reason or claim.figure for claim in CLAIMS)
