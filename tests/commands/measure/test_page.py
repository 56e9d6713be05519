import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from regard.commands.measure.compare import comparison_page
from regard.commands.measure.page import FIRST, page, payload, rounded, thinned_length
from regard.errors import UserError
from regard.report.arrays import heads, layers, measures
from regard.report.page import libraries, script_safe
from tests.report.chromium import Chromium, needs_chromium
from tests.report.parsed import Parsed, assert_accessible, assert_self_contained


@pytest.fixture(scope="module")
def parsed(made: SimpleNamespace) -> Parsed:
    table = made.table()
    return Parsed(page(table, made.record(list(table["statistic"].unique())), made.tokens()))


def of(data: dict[str, Any], statistic: str, site: str = "decoder") -> dict[str, Any]:
    (found,) = [one for one in data["measures"] if one["statistic"] == statistic and one["site"] == site]
    return found["runs"][0]


def close(stored: list[Any], expected: np.ndarray, digits: int = 5) -> None:
    got = np.array(stored, dtype=float)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=0.5 * 10.0 ** (1 - digits) * 1.01, atol=0)


def values(table: pd.DataFrame, statistic: str, *axes: str, column: str = "value") -> np.ndarray:
    rows = table[table["statistic"] == statistic]
    for axis in ("layer", "head", "position"):
        rows = rows[rows[axis].notna() if axis in axes else rows[axis].isna()]
    rows = rows.sort_values(list(axes))
    return rows[column].to_numpy().reshape([rows[axis].nunique() for axis in axes])


def test_embedded_data_equal_the_table(made: SimpleNamespace, parsed: Parsed) -> None:
    table = made.table()
    names = {"l": "layer", "h": "head", "p": "position"}
    seen = 0
    for statistic in table["statistic"].unique():
        for key, block in of(parsed.data, statistic).items():
            if key == "rest":
                continue
            axes = [names[letter] for letter in key]
            close(block["v"], values(table, statistic, *axes))
            errors = values(table, statistic, *axes, column="standard_error")
            assert ("e" in block) == (not np.isnan(errors).all())
            if "e" in block:
                close(block["e"], errors, digits=2)
            seen += np.size(block["v"])
    assert seen == len(table)


def test_mean_of_the_other_positions_is_embedded_where_layers_have_no_value(
    made: SimpleNamespace, parsed: Parsed
) -> None:
    table = made.table()
    close(of(parsed.data, "hidden_norm")["rest"]["v"], values(table, "hidden_norm", "layer", "position")[:, 1:].mean(1))
    keys = values(table, "key_norm", "layer", "head", "position")[:, :, 1:]
    close(of(parsed.data, "key_norm")["rest"]["v"], keys.mean((1, 2)))
    assert "rest" not in of(parsed.data, "entropy")
    assert "rest" not in of(parsed.data, "over_smoothing")


def test_page_is_self_contained(parsed: Parsed) -> None:
    assert_self_contained(parsed)


def test_libraries_stand_in_the_page_once(parsed: Parsed) -> None:
    assert [text for _, text in parsed.scripts].count(libraries()) == 1
    assert "</script" not in libraries().lower()
    assert "<!--" not in libraries()


def test_page_is_small(made: SimpleNamespace) -> None:
    table = made.table()
    size = len(page(table, made.record(), made.tokens()).encode())
    assert size - len(libraries().encode()) < 12 * len(table) + 60_000


def test_headline(made: SimpleNamespace, parsed: Parsed) -> None:
    table = made.table()
    rate = values(table, "sink_rate", "position")[0]
    error = values(table, "sink_rate", "position", column="standard_error")[0]
    assert "example/tiny-lm" in parsed.text
    assert f"{rate:.2f} %" in parsed.text
    assert f"± {error:.2g} (SE), position 0" in parsed.text
    smooth = values(table, "over_smoothing", "layer")
    error = values(table, "over_smoothing", "layer", column="standard_error")[smooth.argmax()]
    assert f"{error:.3f}" == f"{error:.2g}", "two digits of the error are three decimals"
    assert f"{smooth.max():.3f}± {error:.3f} (SE)" in parsed.text
    assert "12 layers × 12 heads" in parsed.text
    assert "100 samples of 64 tokens from wikitext-2" in parsed.text


def test_provenance_holds_the_whole_record(made: SimpleNamespace, parsed: Parsed) -> None:
    def leaves(part: Any) -> list[Any]:
        return [leaf for one in part.values() for leaf in leaves(one)] if isinstance(part, dict) else [part]

    table = made.table()
    record = made.record(list(table["statistic"].unique()))
    texts = [leaf for leaf in leaves(record) if isinstance(leaf, str) and leaf]
    assert len(texts) > 30
    assert [text for text in texts if text not in parsed.text] == []
    assert "12.345" in parsed.text


def test_structure_is_accessible(parsed: Parsed) -> None:
    assert_accessible(parsed)
    assert any(tag in ("input", "select") for tag, _ in parsed.tags)


def test_hostile_texts_are_escaped(made: SimpleNamespace) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u2028\"'&"
    tokens = made.tokens()
    tokens["token"] = tokens["token"].replace("<s>", evil)
    record = made.record()
    record["model"]["name"] = evil
    record["settings"] = {evil: evil}
    record["statistics"]["column_mass"] = {"title": evil, "unit": evil, "description": evil, "source": evil}
    table = made.table(2, 2, 4).replace({"site": {"decoder": evil}})
    tokens["site"] = evil
    text = page(table, record, tokens)
    found = Parsed(text)
    assert [attributes.get("id") for attributes, _ in found.scripts] == ["regard-data", None, None]
    assert not [tag for tag, _ in found.tags if tag == "img"]
    assert not [
        name for _, attributes in found.tags for name in attributes if name.startswith("on") and name != "onsubmit"
    ]
    assert found.data["sites"] == {evil: evil}
    assert [one["title"] for one in found.data["measures"] if one["statistic"] == "column_mass"] == [evil]
    assert "alert(1)" in found.text
    assert_self_contained(Parsed(comparison_page({evil: (table, record), "b": (table, record)})))


def test_blank_tokens_are_shown(parsed: Parsed) -> None:
    assert "␣the" in parsed.text
    assert "↵" in parsed.text
    assert "<s>" in parsed.text
    assert "80.0 %" in parsed.text


def test_positions_without_tokens_are_named_by_their_numbers(made: SimpleNamespace) -> None:
    """Patches of an image have no token."""
    patches = made.tokens(1, 1).assign(token=None)
    text = Parsed(page(made.table(1, 1, 8), made.record(), patches)).text
    assert "Top sink position0strongest in 80.0 %" in text.replace("\n", "")
    assert "Position Share" in text
    assert "Token Position" not in text


def test_sites_are_told_apart(made: SimpleNamespace) -> None:
    sites = ("encoder", "decoder", "cross")
    table = made.table(2, 3, 5, sites)
    found = Parsed(page(table, made.record(), made.tokens(3, 2, sites)))
    assert found.data["sites"] == {"encoder": "encoder", "decoder": "decoder", "cross": "cross-attention"}
    for site in sites:
        mine = table[table["site"] == site]
        close(of(found.data, "entropy", site)["lh"]["v"], values(mine, "entropy", "layer", "head"))
        rate = values(mine, "sink_rate", "position")[0]
        assert f"{rate:.2f}"[:4] in found.text
    assert "cross-attention, ± " in found.text


def test_one_layer_one_head_one_position(made: SimpleNamespace) -> None:
    found = Parsed(page(made.table(1, 1, 1), made.record(), None))
    assert np.shape(of(found.data, "column_mass")["lhp"]["v"]) == (1, 1, 1)
    assert "Sink tokens" not in found.text


def test_what_is_missing_is_not_shown(made: SimpleNamespace) -> None:
    table = made.table(2, 2, 4)
    only = table[table["statistic"] == "over_smoothing"]
    found = Parsed(page(only, {}, None))
    ids = {attributes.get("id") for _, attributes in found.tags}
    assert "maps" not in ids
    assert "curves" in ids
    assert "models" not in ids
    assert not {"tokens-title", "glossary-title"} & ids
    assert "Over smoothing" in found.text


def test_empty_table_is_the_users_mistake(made: SimpleNamespace) -> None:
    with pytest.raises(UserError, match="empty"):
        page(made.table(1, 1, 1).iloc[:0], made.record(), None)
    with pytest.raises(UserError, match="missing: site"):
        page(made.table(1, 1, 1).drop(columns="site"), made.record(), None)
    table = made.table(1, 1, 1)
    with pytest.raises(UserError, match="several"):
        page(pd.concat([table, table]), made.record(), None)


def test_values_that_are_not_numbers_become_null(made: SimpleNamespace) -> None:
    spoilt = np.array([[1.0, np.nan], [np.inf, -2.5]])
    table = made.rows("entropy", spoilt, ("layer", "head"))
    found = Parsed(page(table, made.record(), None))
    assert of(found.data, "entropy")["lh"]["v"] == [[1, None], [None, -2.5]]


def test_missing_rows_become_null(made: SimpleNamespace) -> None:
    table = made.rows("entropy", np.array([[1.0, 2.0], [3.0, 4.0]]), ("layer", "head")).iloc[[0, 3]]
    (measure,) = measures(table)
    assert rounded(measure.blocks["layer", "head"].values, 5) == [[1, None], [None, 4]]


@pytest.mark.exhaustive
def test_positions_are_thinned_on_long_sequences(made: SimpleNamespace) -> None:
    wide = made.rows("column_mass", np.random.default_rng(0).random((12, 16, 4096)), ("layer", "head", "position"))
    (measure,) = measures(wide)
    kept = thinned_length([measure])
    assert kept is not None
    assert list(kept[:FIRST]) == list(range(FIRST))
    assert kept[-1] == 4095
    block = payload({"a": [measure]}, {})["measures"][0]["runs"][0]
    assert block["lhp"]["p"] == kept.tolist()
    assert np.size(block["lhp"]["v"]) <= 410_000
    full = measure.blocks["layer", "head", "position"].values
    close(block["lhp"]["v"], full[:, :, kept])
    close(block["rest"]["v"], full[:, :, 1:].mean((1, 2)))


@pytest.mark.parametrize("value", [0.0, 1.0, -1.5, 123456.7, 1.23456789e-9, 9.99999e12, 1 / 3])
def test_rounding_keeps_five_digits(value: float) -> None:
    short = rounded(np.array([value]), 5)[0]
    assert math.isclose(short, value, rel_tol=5e-5)
    digits = repr(short).split("e")[0].replace(".", "").replace("-", "").strip("0")
    assert len(digits) <= 5


def test_json_holds_nothing_that_html_reads() -> None:
    data = {"a": "</script><!--&\u2028"}
    text = script_safe(data)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == data


def test_map_takes_the_whole_sequence_then_the_first_position(made: SimpleNamespace) -> None:
    table = made.table(3, 4, 5)
    found = {measure.statistic: measure for measure in measures(table)}
    whole, first, later = heads(found["entropy"]), heads(found["column_mass"]), heads(found["column_mass"], 3)
    assert whole is not None
    assert first is not None
    assert later is not None
    assert (whole.position, first.position, later.position) == (None, 0, 3)
    np.testing.assert_array_equal(whole.values, values(table, "entropy", "layer", "head"))
    cube = values(table, "column_mass", "layer", "head", "position")
    np.testing.assert_array_equal(later.values, cube[:, :, 3])
    by_layer = layers(found["column_mass"])
    assert by_layer is not None
    np.testing.assert_allclose(by_layer.values, cube[:, :, 0].mean(1))
    assert heads(found["over_smoothing"]) is None


@needs_chromium
def test_an_error_of_rounding_is_told_as_0(made: SimpleNamespace, tmp_path: Path) -> None:
    """Samples are the same where all are one prompt beside images; their sums differ in the last bits."""
    table = made.table()
    table["standard_error"] = 1e-13 * table["value"].abs()
    (tmp_path / "page.html").write_text(page(table, made.record(), None))
    with Chromium(tmp_path / "profile") as browser:
        browser.open((tmp_path / "page.html").as_uri())
        cells = (
            "[...document.querySelectorAll('#head-numbers tbody tr')].map((row) => row.lastElementChild.textContent)"
        )
        browser.wait(f"{cells}.length")
        told = browser.run(cells)
    margins = {cell.partition(" ± ")[2].removesuffix(" %") for cell in told if "±" in cell}
    assert margins == {"0"}
