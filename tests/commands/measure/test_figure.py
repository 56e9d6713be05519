import sys
from types import SimpleNamespace

import numpy as np
import pytest

from regard.commands.measure.result import MeasureResult
from regard.errors import UserError


def test_map_draws_the_tables_values(made: SimpleNamespace) -> None:
    table = made.table(3, 4, 5)
    drawn = MeasureResult(table, {}).plot("sink_rate", position=1)
    rows = table[(table["statistic"] == "sink_rate") & (table["position"] == 1) & table["head"].notna()]
    expected = rows.pivot(index="layer", columns="head", values="value").to_numpy(dtype=float)
    np.testing.assert_array_equal(drawn.axes[0].images[0].get_array(), expected)
    assert "position 1" in drawn.axes[0].get_title(loc="left")


def test_layers_draws_the_mean_over_heads(made: SimpleNamespace) -> None:
    table = made.table(3, 4, 5)
    drawn = MeasureResult(table, {}).plot("distance", kind="layers")
    expected = table[table["statistic"] == "distance"].groupby("layer")["value"].mean()
    np.testing.assert_allclose(drawn.axes[0].lines[0].get_ydata(), expected.to_numpy(dtype=float))


def test_kind_follows_the_axes(made: SimpleNamespace) -> None:
    table = made.table(3, 4, 5)
    assert MeasureResult(table, {}).plot("entropy").axes[0].images
    assert len(MeasureResult(table, {}).plot("over_smoothing").axes[0].lines) == 1
    assert len(MeasureResult(table, {}).plot("column_mass", kind="profile").axes[0].lines) == 3
    assert len(MeasureResult(table, {}).plot("sink_rate", kind="profile").axes[0].lines) == 1


def test_site_chooses(made: SimpleNamespace) -> None:
    table = made.table(2, 2, 3, ("encoder", "cross"))
    arrays = [
        MeasureResult(table, {}).plot("entropy", site=site).axes[0].images[0].get_array()
        for site in ("encoder", "cross")
    ]
    assert not np.array_equal(*arrays)
    np.testing.assert_array_equal(MeasureResult(table, {}).plot("entropy").axes[0].images[0].get_array(), arrays[0])


def test_no_global_state(made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    MeasureResult(made.table(2, 2, 3), {}).plot("entropy").savefig("/dev/null", format="png")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"statistic": "sinkrate"}, "'sinkrate'; the table has: sink_rate, column_mass"),
        ({"statistic": "entropy", "site": "cross"}, "expected one of decoder"),
        ({"statistic": "sink_rate", "epsilon": 0.2}, "expected one of 0.3"),
        ({"statistic": "over_smoothing", "kind": "map"}, "expected one of layers"),
        ({"statistic": "sink_rate", "position": 99}, "position 99 was not measured: expected one of 0 to 2"),
        ({"statistic": "distance", "position": 1}, "no values by position"),
        ({"statistic": "sink_rate", "position": 1, "kind": "profile"}, "leave position out"),
    ],
)
def test_mistakes_are_named(made: SimpleNamespace, wrong: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        MeasureResult(made.table(2, 2, 3), {}).plot(**wrong)
