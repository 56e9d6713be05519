"""What a notebook shows of a result without being asked."""

import base64
import re
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from regard.errors import UserError
from regard.runs.display import Display
from regard.runs.selection import select_rows


class Shown(Display):
    """A headline of two lines, as many rows as wanted, and a figure if wanted."""

    def __init__(self, rows: int, *, drawn: bool) -> None:
        self.rows, self.drawn = rows, drawn

    def headline(self) -> str:
        return "two\nlines <b>"

    def overview(self) -> pd.DataFrame:
        return pd.DataFrame({"name": [f"<i>{row}" for row in range(self.rows)], "value": 0.123456})

    def plot(self) -> Figure:
        if not self.drawn:
            raise UserError("there is nothing to draw")
        return Figure(figsize=(1, 1))


def test_a_repr_is_one_line() -> None:
    assert repr(Shown(1, drawn=False)) == "Shown(two lines <b>)"


def test_a_notebook_shows_headline_rows_and_picture() -> None:
    shown = Shown(14, drawn=True)._repr_html_()
    assert "Shown(two lines &lt;b&gt;)" in shown
    assert "&lt;i&gt;11" in shown
    assert "<i>" not in shown
    assert "&lt;i&gt;12" not in shown
    assert "and 2 more rows" in shown
    assert "0.1235" in shown
    found = re.search(r'src="data:image/png;base64,([^"]+)"', shown)
    assert found is not None
    assert base64.b64decode(found[1]).startswith(b"\x89PNG")


def test_without_rows_or_picture_the_headline_is_left() -> None:
    assert Shown(0, drawn=False)._repr_html_() == "<p><b>Shown(two lines &lt;b&gt;)</b></p>"


@pytest.mark.parametrize("equal", [{"layer": 3}, {"layer": None}])
def test_an_empty_table_was_not_measured(equal: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="is empty: nothing was measured"):
        assert select_rows(pd.DataFrame({"layer": []}), equal).empty


def test_a_selection_that_finds_rows_is_silent(recwarn: pytest.WarningsRecorder) -> None:
    table = pd.DataFrame({"layer": pd.array([0, 1, None], dtype="Int64"), "head": [5, 6, 7]})
    assert select_rows(table, {"layer": [1, 2]})["head"].tolist() == [6]
    assert select_rows(table, {"layer": None})["head"].tolist() == [7]
    assert select_rows(table, {}).equals(table)
    assert not recwarn.list


def test_null_is_one_of_several_values() -> None:
    table = pd.DataFrame({"layer": [0.0, 1.0, float("nan")], "name": ["a", None, "b"], "value": [1, 2, 3]})
    assert list(select_rows(table, {"layer": [None, 1]})["value"]) == [2, 3]
    assert list(select_rows(table, {"layer": [1, 0]})["value"]) == [1, 2]
    assert list(select_rows(table, {"name": ("b", None)})["value"]) == [2, 3]
