"""The rule by which a small task gets its steps, and the page that says so."""

from itertools import product
from typing import Any

import pandas as pd
import pytest

from experiments.steps import page
from experiments.steps.run import METHODS, ROWS, STEPS
from regard.commands.learn.config import SCALES


def tables(**means: float) -> page.Tables:
    """Runs whose AP among all classes is that of their steps, one method 2 points above and one below."""
    runs: list[dict[str, Any]] = []
    for (rows, method), (steps, mean) in product(product(ROWS, METHODS), means.items()):
        score = mean + (2 if method == METHODS[0] else -2)
        about = {"rows": rows, "method": method, "steps": int(steps.removeprefix("s"))}
        runs.append({**about, "AP til": 90.0, "AP cil": score, "seconds": 1.0})
    return page.Tables(pd.DataFrame(runs), {})


@pytest.mark.parametrize(
    "scores, chosen", [((20, 50, 58, 60), STEPS[2]), ((20, 57, 59, 60), STEPS[1]), ((60, 20, 50, 62.5), STEPS[0])]
)
def test_the_fewest_steps_within_the_margin_are_chosen(scores: tuple[float, ...], chosen: int) -> None:
    found = tables(**{f"s{steps}": score for steps, score in zip(STEPS, scores, strict=True)})
    assert page.choose_steps(found) == chosen
    told = page.describe_choice(found)
    assert f"The rule picks {chosen}" in told
    assert ("which is the default" in told) == (chosen == SCALES["laptop"]["min_steps"])


def test_no_choice_is_made_without_all_runs() -> None:
    found = tables(s9=20, s24=50, s48=58)
    assert page.choose_steps(found) is None
    assert page.describe_choice(found) == "The runs are not complete."
    assert page.mean_table(found).rows[-1][1:] == ["–"] * 6
