import io
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from regard.commands.measure.key_figures import key_figures
from regard.commands.measure.terminal import measure_summary as summary
from regard.errors import UserError
from regard.report.arrays import measures


def shown(table: pd.DataFrame, record: dict, tokens: pd.DataFrame | None = None, *, colour: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=colour, color_system="truecolor" if colour else None)
    console.print(summary(table, record, tokens))
    return out.getvalue()


def sink_rates(table: pd.DataFrame, position: int = 0) -> np.ndarray:
    rows = table[(table["statistic"] == "sink_rate") & (table["position"] == position) & table["head"].notna()]
    return rows.pivot(index="layer", columns="head", values="value").to_numpy(dtype=float)


def test_map_shows_the_tables_numbers(made: SimpleNamespace) -> None:
    table = made.table()
    lines = shown(table, made.record(), made.tokens()).splitlines()
    start = next(i for i, line in enumerate(lines) if line.split() == [str(head) for head in range(12)])
    cells = [[int(text) for text in line.split()] for line in lines[start + 1 : start + 13]]
    assert [row[0] for row in cells] == list(range(12))
    np.testing.assert_array_equal([row[1:] for row in cells], np.round(sink_rates(table)))


def test_map_stands_at_the_strongest_position(made: SimpleNamespace) -> None:
    cube = np.zeros((2, 3, 4))
    cube[:, :, 2] = [[10, 20, 30], [40, 50, 60]]
    text = shown(made.rows("sink_rate", cube, ("layer", "head", "position"), epsilon=0.3), {})
    assert "at position 2" in text
    assert re.search(r"1\s+40\s+50\s+60", text)


def test_sites_that_differ_at_the_end_of_long_names_are_told_apart(made: SimpleNamespace) -> None:
    """Lines and names of norms were cut at the end."""
    sites = [f"encoder@model.vision_language_model.{part}_tower.layers" for part in ("first", "second")]
    axes, rates = ("layer", "head", "position"), np.ones((2, 3, 4))
    tables = [made.rows("key_norm", rates + np.arange(4), axes, site=site) for site in sites]
    tables += [made.rows("sink_rate", rates[0, 0], ("position",), epsilon=0.3, site=site) for site in sites]
    token = {"layer": None, "head": None, "position": 0, "token": "a" * 30, "count": 3, "share": 0.5}
    text = shown(pd.concat(tables), {}, pd.DataFrame([{"site": site, **token} for site in sites]))
    for part in ("first", "second"):
        assert text.count(f"{part}_tower.layers at position") == 1
        assert re.search(rf"^  Key norm,…\S*{part}_tower.layers +\d", text, re.MULTILINE)
        assert re.search(rf"{part}_tower.layers: .* \(whole model\)", text.replace("\n    ", " "))
        assert text.count(f"{part}_tower.layers\n") >= 1
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("site, position", [("decoder", 2), ("encoder", 6)])
def test_late_positions_of_causal_models_are_not_the_strongest(made: SimpleNamespace, site: str, position: int) -> None:
    """Position 6 of 8 is an average over two queries there, and over all of them in an encoder."""
    rates = np.array([1.0, 0.0, 3.0, 0.0, 0.0, 2.0, 9.0, 4.0])
    table = made.rows("sink_rate", rates, ("position",), epsilon=0.3, site=site)
    axes = ("layer", "head", "position")
    heads = made.rows("sink_rate", np.tile(rates, (2, 3, 1)), axes, epsilon=0.3, site=site)
    assert f"at position {position} (whole model)" in shown(pd.concat([table, heads]), {})
    assert f"at position {position}, layers × heads" in shown(heads, {})
    for rows in (table, heads):
        (figure,) = key_figures(measures(rows), {}, None)
        assert (float(figure.value.split()[0]), f"position {position}" in figure.note) == (rates[position], True)


def test_the_strongest_position_counts_queries_behind_the_last_rate_and_norms_have_none(made: SimpleNamespace) -> None:
    """Of 12 tokens the first 5 have a rate, each seen by 8 queries or more."""
    rates, record = np.array([1.0, 0.0, 3.0, 0.0, 9.0]), {"config": {"minimum_queries": 8}}
    table = made.rows("sink_rate", rates, ("position",), epsilon=0.3, site="decoder")
    assert "at position 4 (whole model)" in shown(table, record)
    norms = made.rows("key_norm", np.tile(rates, (2, 3, 1)), ("layer", "head", "position"), site="decoder")
    assert "at position 4, layers × heads" in shown(norms, record)


def test_whole_model_tokens_smoothing_and_norms(made: SimpleNamespace) -> None:
    table = made.table()
    text = shown(table, made.record(), made.tokens())
    model = table[(table["statistic"] == "sink_rate") & table["head"].isna() & (table["position"] == 0)].iloc[0]
    assert f"{model['value']:.2f} ± {model['standard_error']:.2g} % (SE) at position 0" in text
    assert re.search(r"80\.0 %\s+position 0\s+<s>", text)
    assert "␣the" in text
    smooth = table[table["statistic"] == "over_smoothing"]["value"]
    assert f"layer 0: {smooth.iloc[0]:.4g}" in text
    assert f"max. {smooth.max():.4g} in layer {smooth.to_numpy().argmax()}" in text
    norm = table[table["statistic"] == "hidden_norm"].pivot(index="layer", columns="position", values="value")
    ratio = norm[0] / norm.drop(columns=0).mean(axis=1)
    (line,) = [line for line in text.splitlines() if line.startswith("  Hidden norm")]
    layer, position, there, elsewhere = line.split()[2:]
    assert (int(layer), int(position)) == (ratio.idxmax(), 0)
    assert float(there) == pytest.approx(norm[0][ratio.idxmax()], rel=1e-3)
    assert float(elsewhere) == pytest.approx(norm.drop(columns=0).mean(axis=1)[ratio.idxmax()], rel=1e-3)
    assert "100 samples of 64 tokens from wikitext-2, in 12.3 s" in text


@pytest.mark.parametrize("heads", [1, 12, 18, 19, 32, 64, 75, 76, 128])
@pytest.mark.parametrize("colour", [False, True])
def test_fits_eighty_columns(made: SimpleNamespace, heads: int, colour: bool) -> None:
    text = shown(made.table(3, heads, 4), made.record(), made.tokens(heads, 3), colour=colour)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(len(line) for line in plain.splitlines()) <= 80
    assert ("\x1b[" in text) == colour


def test_many_heads_show_every_head(made: SimpleNamespace) -> None:
    table = made.table(3, 40, 4)
    digits = re.findall(r"^ +\d+ (\d{40})$", shown(table, {}), flags=re.MULTILINE)
    got = np.array([[int(digit) for digit in line] for line in digits])
    np.testing.assert_array_equal(got, np.minimum(sink_rates(table) // 10, 9))


def test_a_full_cell_reads_100(made: SimpleNamespace) -> None:
    for heads, full in ((4, "100"), (30, "██")):
        text = shown(made.rows("sink_rate", np.full((1, heads), 100.0), ("layer", "head"), epsilon=0.3), {})
        assert text.count(full) == heads


def test_another_map_without_sink_rates(made: SimpleNamespace) -> None:
    table = made.rows("distance", np.array([[1.0, 2.0], [3.0, 4.0]]), ("layer", "head"))
    text = shown(table, {})
    assert "% of the largest, 4.000" in text
    assert re.search(r"1\s+75\s+100", text)


def test_sites_get_a_map_each(made: SimpleNamespace) -> None:
    sites = ("encoder", "decoder", "cross")
    text = shown(made.table(2, 3, 4, sites), made.record(), made.tokens(3, 2, sites))
    for site in ("encoder", "decoder", "cross-attention"):
        assert f"Sink rate, ε = 0.3, {site} at position" in text


def test_smallest_table_and_empty_table(made: SimpleNamespace) -> None:
    table = made.table(1, 1, 1)
    assert "Sink rate" in shown(table, {})
    with pytest.raises(UserError, match="empty"):
        summary(table.iloc[:0], {}, None)


def test_markup_in_names_is_shown_as_it_is(made: SimpleNamespace) -> None:
    record = made.record()
    record["model"]["name"] = "[red]evil[/red]"
    tokens = made.tokens(1, 1)
    tokens["token"] = tokens["token"].replace("<s>", "[bold]\x1b[31m")
    text = shown(made.table(1, 1, 4), record, tokens)
    assert "[red]evil[/red]" in text
    assert "[bold]⟨U+001B⟩[31m" in text
