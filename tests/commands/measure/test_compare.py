import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from regard.commands.measure.compare import caveats, comparison, comparison_page
from regard.commands.measure.page import page
from regard.errors import UserError
from regard.report import labels
from tests.report.browser import draw, needs_node
from tests.report.parsed import Parsed


def row(frame: pd.DataFrame, statistic: str) -> pd.Series:
    (found,) = [one for _, one in frame.iterrows() if one["statistic"] == statistic]
    return found


def test_values_differences_and_their_errors(made: SimpleNamespace) -> None:
    a, b = made.table(), made.table(seed=1)
    frame = comparison({"a": (a, made.record()), "b": (b, made.record())})
    assert list(frame.columns) == [
        *("statistic", "site", "epsilon", "scope", "position", "a", "b", "difference", "standard_error")
    ]
    model = [
        one[(one["statistic"] == "sink_rate") & one["head"].isna() & (one["position"] == 0)].iloc[0] for one in (a, b)
    ]
    found = row(frame, "sink_rate")
    assert (found["scope"], found["position"], found["epsilon"]) == ("model", 0, 0.3)
    assert (found["a"], found["b"]) == (model[0]["value"], model[1]["value"])
    assert found["difference"] == model[1]["value"] - model[0]["value"]
    assert found["standard_error"] == pytest.approx(np.hypot(*(one["standard_error"] for one in model)))


def test_means_over_layers_and_heads(made: SimpleNamespace) -> None:
    table = made.table()
    frame = comparison({"a": (table, {})})
    by_statistic = table.groupby("statistic")
    distance = row(frame, "distance")
    assert distance["scope"] == "mean over layers and heads"
    assert pd.isna(distance["position"])
    assert distance["a"] == pytest.approx(by_statistic.get_group("distance")["value"].mean())
    mass = by_statistic.get_group("column_mass")
    assert row(frame, "column_mass")["a"] == pytest.approx(mass[mass["position"] == 0]["value"].mean())
    assert row(frame, "column_mass")["position"] == 0
    norm = by_statistic.get_group("hidden_norm")
    blocks = norm[(norm["position"] == 0) & (norm["layer"] >= 0)]
    assert row(frame, "hidden_norm")["a"] == pytest.approx(blocks["value"].mean())
    assert "difference" not in frame.columns


def test_whole_model_rows_come_first(made: SimpleNamespace) -> None:
    scalar = made.rows("distance", np.array(7.0), ())
    table = pd.concat([scalar, made.rows("distance", np.ones((2, 2)), ("layer", "head"))])
    found = row(comparison({"a": (table, {})}), "distance")
    assert (found["scope"], found["a"]) == ("model", 7.0)


def test_what_one_run_lacks_is_null(made: SimpleNamespace) -> None:
    a = made.table(2, 2, 3)
    b = a[a["statistic"] != "distance"]
    found = row(comparison({"a": (a, {}), "b": (b, {})}), "distance")
    assert np.isnan(found["b"])
    assert np.isnan(found["difference"])


def test_three_runs_have_no_difference(made: SimpleNamespace) -> None:
    run = (made.table(1, 1, 2), {})
    assert list(comparison({"a": run, "b": run, "c": run}).columns)[-3:] == ["a", "b", "c"]


@pytest.mark.exhaustive
def test_notes_say_which_rows_have_no_counterpart_and_why(made: SimpleNamespace) -> None:
    def notes(**tables: pd.DataFrame) -> list[str]:
        found: list[str] = comparison({name: (table, {}) for name, table in tables.items()}).attrs["notes"]
        return found

    decoder, encoder = made.table(2, 2, 3), made.table(2, 2, 3, sites=("encoder",))
    assert notes(a=decoder, b=decoder) == []
    sites = "Rows of sites that not every run has are not compared"
    assert notes(gpt=decoder, bert=encoder) == [f"{sites} (gpt: decoder; bert: encoder)."]
    both = made.table(2, 2, 3, sites=("encoder", "cross"))
    assert notes(t5=both, bert=encoder) == [f"{sites} (t5: encoder, cross-attention; bert: encoder)."]
    few = decoder[~decoder["statistic"].isin(["distance", "over_smoothing"])]
    lacks = "few has no rows of distance, over_smoothing, which are not compared."
    assert notes(a=decoder, few=few, c=decoder) == [lacks]
    other = decoder.assign(epsilon=decoder["epsilon"].replace(0.3, 0.2))
    thresholds = "Rows of sink_rate at thresholds that not every run has are not compared (a: 0.3; b: 0.2)."
    assert notes(a=decoder, b=other) == [thresholds]
    assert thresholds in Parsed(comparison_page({"a": (decoder, {}), "b": (other, {})})).text
    assert notes(a=decoder, b=pd.concat([decoder, other[other["epsilon"] == 0.2]])) == [
        thresholds.replace("b: 0.2", "b: 0.2, 0.3")
    ]
    rest = decoder[(decoder["statistic"] != "key_norm") | (decoder["position"] > 0)]
    expected = "Rows of key_norm are not compared: they are of other positions in the runs, or other means."
    assert notes(a=decoder, b=rest) == [expected]


def test_notes_tell_what_differs(made: SimpleNamespace) -> None:
    table = made.table(1, 1, 2)
    a, b = made.record(), made.record(length=128, input="random")
    assert comparison({"a": (table, a), "b": (table, a)}).attrs["notes"] == []
    notes = comparison({"a": (table, a), "b": (table, b)}).attrs["notes"]
    assert len(notes) == 2
    assert "sequence length (a: 64, b: 128); sink rates depend on it" in notes[0]
    assert "input (a: natural, b: random)" in notes[1]
    assert len(caveats({"a": a, "b": made.record(source="c4", sha256="e" * 64)})) == 2
    days = {name: made.record(chat_template_date=f"2026-11-{name}") for name in ("29", "30")}
    (note,) = caveats(days)
    assert "date that the chat template writes (29: 2026-11-29, 30: 2026-11-30); values are of different texts" in note


def test_notes_tell_of_other_layers_windows_and_types(made: SimpleNamespace) -> None:
    a, b = made.record(), made.record()
    a["config"], b["config"] = (
        {**a["config"], "layer_ids": None, "seed": 0},
        {**b["config"], "layer_ids": [1], "seed": 3},
    )
    a["model"], b["model"] = {**a["model"], "dtype": "float32"}, {**b["model"], "dtype": "bfloat16"}
    notes = caveats({"a": a, "b": b})
    assert "The runs differ in layers (a: all, b: [1]); means over layers are of other layers." in notes
    assert "The runs differ in seed (a: 0, b: 3); what is measured is drawn by it." in notes
    assert any("type of the weights (a: float32, b: bfloat16)" in note for note in notes)
    for of_all, told in ((4, False), (3, True)):
        for record in (a, b):
            record["data"] = {**record["data"], "input": "images", "samples": 3}
            record["config"] = {**record["config"], "samples": of_all}
        assert any("differ in seed" in note for note in caveats({"a": a, "b": b})) == told


@pytest.mark.parametrize("name", ["difference", "statistic"])
def test_run_names_that_columns_have(made: SimpleNamespace, name: str) -> None:
    with pytest.raises(UserError, match=name):
        comparison({name: (made.table(1, 1, 1), {})})


def test_no_run_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="at least one"):
        comparison({})


def test_page_puts_runs_side_by_side(made: SimpleNamespace) -> None:
    a, b = made.table(2, 3, 4), made.table(2, 3, 4, seed=1)
    text = comparison_page({"first": (a, made.record()), "second": (b, made.record(length=128))})
    assert text.startswith("<!doctype html>")
    assert "sequence length (first: 64, second: 128)" in text
    frame = comparison({"first": (a, {}), "second": (b, {})})
    distance = row(frame, "distance")
    assert f"<td>{distance['first']:.4g}" in text
    assert f"{distance['difference']:.3g}</td>".replace("-", "−") in text
    assert '"runs":["first","second"]' in text
    error = "Difference: second − first; SE: its standard error"
    runs = {name: (a, made.record()) for name in ("first", "second", "third")}
    assert error in text
    assert "SE: its" not in comparison_page(runs)


@needs_node
def test_a_series_has_one_ink_in_all_panels(made: SimpleNamespace) -> None:
    """Also where a site lacks a statistic, as cross-attention lacks hidden norms."""
    both = made.table(2, 3, 4, sites=("cross", "decoder", "encoder"))
    both = both[(both["statistic"] != "over_smoothing") | (both["site"] != "cross")]
    drawn = [figure for figure in draw(page(both, made.record(), None))["start"] if figure["place"] == "curves"]
    inks = {}
    for figure in drawn:
        for name, look in figure["keys"]:
            inks.setdefault(name.partition(",")[0], set()).add(re.search(r"series-\d", look)[0])
    assert {name: len(found) for name, found in inks.items()} == dict.fromkeys(
        ("cross-attention", "decoder", "encoder"), 1
    )


@needs_node
def test_dots_at_one_layer_alone_differ_in_ink(made: SimpleNamespace) -> None:
    """A dot shows no stroke."""
    drawn = draw(page(made.table(1, 2, 4), made.record(), None))["start"]
    keys = next(figure["keys"] for figure in drawn if figure["place"] == "curves" and figure["keys"])
    assert [name for name, _ in keys] == ["position 0", "mean of the others"]
    assert len({re.search(r"series-\d", look)[0] for _, look in keys}) == 2


def test_the_page_has_the_units_of_values_and_of_differences(made: SimpleNamespace) -> None:
    first, second = made.record(), made.record()
    first["statistics"]["distance"] = {"unit": "tokens"}
    runs = {"first": (made.table(2, 3, 4), first), "second": (made.table(2, 3, 4, seed=1), second)}
    rate = row(comparison(runs), "sink_rate")
    text = Parsed(comparison_page(runs)).text
    assert f"{labels.number(rate['difference'], 3)} points" in text
    assert "mean over layers and heads, in tokens" in text


def test_other_settings_are_noted_where_both_runs_have_them() -> None:
    records: dict[str, Any] = {"a": {"config": {"perturb": "first", "minimum_queries": 1}}, "b": {"config": {}}}
    assert caveats(records) == []
    records["b"] = {"config": {"perturb": "middle", "minimum_queries": 8}}
    assert [note.partition(" (")[0] for note in caveats(records)] == [
        "The runs differ in queries that must see a sink",
        "The runs differ in replaced token",
    ]


def test_notes_tell_of_other_versions_and_parts(made: SimpleNamespace) -> None:
    a, b = made.record(), made.record()
    a["config"], b["config"] = {**a["config"], "part": "model.text"}, {**b["config"], "part": "model.vision"}
    b["version"] = "0.0.1"
    notes = caveats({"a": a, "b": b})
    assert any(
        "part of the model (a: model.text, b: model.vision); its layers are other ones" in note for note in notes
    )
    assert f"The runs are of different versions of Regard (a: {a.get('version')}, b: 0.0.1)." in notes
