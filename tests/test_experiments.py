"""The page of results is what the committed tables make, and what it says is computed from their rows."""

from pathlib import Path

import pandas as pd
import pytest

from regard.experiments import papa_page

ROOT = Path(__file__).parents[1]


def test_the_page_is_made_from_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert (ROOT / papa_page.PAGE).read_text(encoding="utf-8") == papa_page.page()


def test_the_committed_tables_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for task in papa_page.TASKS:
        scores = pd.read_csv(papa_page.FOLDER / f"papa-{task}-scores.csv")
        assert scores.groupby(["constants", "select", "fraction_dynamic"])["seed"].nunique().eq(3).all()
        assert set(papa_page.SOURCES) | {"average", "none"} <= set(scores["constants"])
        assert set(papa_page.OTHERS) | {"lambda", "none"} == set(scores["select"])
        own = scores[(scores["constants"] == "average") & (scores["select"] == "lambda")]
        assert set(own["fraction_dynamic"]) == {1 / 2, 1 / 8, 1 / 16, 0}


def test_what_is_said_is_computed() -> None:
    """Hand-made scores: averages lose to zeros on one task, and lambda to a layer order in one case of two."""
    rows = []
    for task, average in (("ner", 0.8), ("pos", 0.5)):
        for constants in (*papa_page.SOURCES, "average", f"average of {papa_page.ELSEWHERE[task]}"):
            rows.append((task, constants, "lambda", 0.0, average if constants.startswith("average") else 0.6))
        for fraction, score in ((1 / 2, 0.9), (1 / 8, 0.7)):
            for select in ("lambda", *papa_page.OTHERS):
                better = task == "ner" and select == "last-layers" and fraction == 1 / 8
                rows.append(
                    (task, "average", select, fraction, score + (0.1 if better else -0.1 * (select != "lambda")))
                )
        rows.append((task, "none", "none", 1.0, 1.0))
    columns = ["task", "constants", "select", "fraction_dynamic", "mean"]
    points = pd.DataFrame(rows, columns=columns)
    said = papa_page._sources_said(points, ["ner", "pos"]).replace("\n", " ")
    assert "on 1 of 2 tasks (POS: identity, toeplitz, zeros no worse)" in said
    assert "score +0.000 against the task's own" in said
    assert "Lambda beats both orders by layer in 3 of 4 cases" in papa_page._orders_said(points, ["ner", "pos"])
