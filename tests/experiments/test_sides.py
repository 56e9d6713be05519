"""The rule by which a long prompt loses its middle, and the page that says so."""

from itertools import product
from typing import Any

import pandas as pd
import pytest

from experiments.sides import page
from experiments.sides.run import METHODS, SEEDS, SIDES
from regard.commands.learn.config import LearnConfig


def tables(**means: float) -> page.Tables:
    """Runs whose AP is that of their side, one method 2 points above and one below."""
    runs: list[dict[str, Any]] = []
    for (side, mean), (method, seed) in product(means.items(), product(METHODS, SEEDS)):
        score = mean + (2 if method == METHODS[0] else -2)
        about = {"side": side, "method": method, "seed": seed, "tasks": 9, "rows cut": 80.0}
        runs.append({**about, page.SCORE: score, "cpu_seconds": 1.0})
    return page.Tables(pd.DataFrame(runs), {})


@pytest.mark.parametrize(
    "scores, chosen",
    [((20, 30, 25), "middle"), ((30.9, 30, 25), "middle"), ((31.1, 30, 25), "right"), ((20, 30, 31.1), "left")],
)
def test_the_middle_is_lost_unless_another_side_is_better(scores: tuple[float, ...], chosen: str) -> None:
    found = tables(**dict(zip(SIDES, scores, strict=True)))
    assert page.choose_side(found) == chosen
    told = page.describe_choice(found)
    assert f"The rule picks {chosen}" in told
    assert ("which is the default" in told) == (chosen == LearnConfig().side)


def test_no_choice_is_made_without_all_runs() -> None:
    found = tables(right=20, middle=30)
    assert page.choose_side(found) is None
    assert page.describe_choice(found) == "The runs are not complete."


def test_differences_are_to_prompts_without_their_end() -> None:
    means = page.mean_table(tables(right=20, middle=30, left=25))
    assert [row[0] for row in means.rows] == ["its end (`right`)", "its middle (`middle`)", "its beginning (`left`)"]
    assert means.rows[0][1:3] == ["22.0 ± 0.0", "–"]
    assert means.rows[1][1:3] == ["32.0 ± 0.0", "+10.00"]  # the same for every seed: no interval
    assert "9 tasks, 80 % of" in " ".join(page.make_page(tables(right=20, middle=30, left=25)).to_markdown().split())
