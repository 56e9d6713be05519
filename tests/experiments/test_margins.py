"""Thresholds of recognition: each is put in place and back, and the page says which stand."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from experiments.hosts.catalog import find_hosts
from experiments.margins import page, run
from experiments.margins.run import SAME
from experiments.margins.thresholds import THRESHOLDS, placed, tried, value_of


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda threshold: threshold.title)
def test_a_threshold_is_put_in_place_and_back(threshold: Any) -> None:
    now = value_of(threshold)
    smaller, larger = tried(threshold, now)
    numbers = [value.values() if isinstance(value, dict) else [value] for value in (smaller, now, larger)]
    assert all(abs(low) < abs(middle) < abs(high) for low, middle, high in zip(*numbers, strict=True))
    with placed(threshold, larger):
        assert value_of(threshold) == larger
    assert value_of(threshold) is now


def test_a_threshold_is_also_in_place_where_it_was_imported() -> None:
    (entries,) = (threshold for threshold in THRESHOLDS if threshold.name == "KEY_ENTRIES")
    modules = [import_module(f"regard.hooks.{name}") for name in ("kept_calls", "sequences")]
    with placed(entries, 99):
        assert [module.KEY_ENTRIES for module in modules] == [99, 99]
    assert [module.KEY_ENTRIES for module in modules] == [4, 4]


def test_what_changed_is_told() -> None:
    usual = {"plain": {"mass": np.array([1.0, np.nan])}, "masked": "no values"}
    assert run._tell(usual, {"plain": {"mass": np.array([1.0 + 1e-12, np.nan])}, "masked": "no values"}) == SAME
    assert run._tell(usual, {"plain": {"mass": np.array([1.1, np.nan])}, "masked": "no values"}) == (
        "plain: other numbers"
    )
    assert run._tell(usual, {"plain": "refused", "masked": "no values"}) == "plain: refused"
    assert run._tell(usual, {**usual, "masked": {}}) == "masked: no longer refused: no values"


def test_a_threshold_stands_unless_a_model_changes() -> None:
    lines = [
        {"host": host, "read": "statistics, averages", "cpu_seconds": 1.0, **dict.fromkeys(page.CASES, SAME)}
        for host in ("causal/a", "masked/b")
    ]
    lines[1]["constants.ROUNDING larger"] = "averages: other numbers"
    tables = page.Tables(pd.DataFrame(lines), {})
    rows = {row[0]: row for row in page.threshold_table(tables).rows}
    assert list(rows["constants.ROUNDING"][2:]) == ["0.0001", "2.5e-05", "0.0004", "2", "0", "1", "near"]
    assert list(rows["products.RECENT_PRODUCTS"][2:]) == ["4", "2", "16", "2", "0", "0", "stands"]
    assert list(rows["layouts.TOLERANCE"][5:]) == ["0", "0", "0", "stands"]
    assert page.change_table(tables).rows == [["constants.ROUNDING", "larger", "masked/b", "averages: other numbers"]]
    stand = f"{len(THRESHOLDS) - 1} of {len(THRESHOLDS)} stand"
    assert page.describe(tables) == f"{stand}, each on 0 to 2 models; near: constants.ROUNDING."


def test_a_small_model_is_read_with_the_thresholds_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    padding, *_, layouts = THRESHOLDS[2:]
    nothing_allowed = replace(padding, name="TOLERANCE", smaller={torch.float32: 0.0}, larger={torch.float32: 1.0})
    monkeypatch.setattr(run, "THRESHOLDS", (nothing_allowed, layouts))
    found = run.make_host(find_hosts()["causal/llama"])
    assert found["read"] == "statistics, half, averages, layouts"
    assert "returns 0.0% other values" in found["fidelity.TOLERANCE smaller"]
    others = ("fidelity.TOLERANCE larger", "layouts.TOLERANCE smaller", "layouts.TOLERANCE larger")
    assert {found[case] for case in others} == {SAME}
