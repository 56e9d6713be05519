"""The report on a pre-training run: page and terminal."""

import io
import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from regard.commands.pretrain.page import pretrain_page
from regard.commands.pretrain.terminal import pretrain_summary
from regard.report.labels import format_count, format_duration
from regard.report.panels import MOST, line, thin_indices
from tests.commands.pretrain import pretrain_run
from tests.report.parsed import Parsed, assert_accessible, assert_self_contained

RUN = (pretrain_run.history(), pretrain_run.sinks(), pretrain_run.record())
NO_SINKS = pretrain_run.sinks().iloc[:0]


@pytest.fixture(scope="module")
def parsed() -> Parsed:
    return Parsed(pretrain_page(*RUN))


def ids(page: Parsed) -> set[str | None]:
    return {attributes.get("id") for _, attributes in page.tags}


def points(page: Parsed, section: str, number: int, series: str) -> list[dict[str, Any]]:
    return [point for point in page.data["panels"][section][number]["points"] if point["series"] == series]


def terminal(*tables: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(pretrain_summary(*tables))
    return out.getvalue()


def by_hand(**columns: list[float | None]) -> pd.DataFrame:
    """A history of three rows, watched at the first and the last."""
    base: dict[str, list[Any]] = {"step": [0, 10, 20], "tokens": [0, 640, 1280], "loss": [None, 5.0, 4.0]}
    return pd.DataFrame({**base, "valid_loss": [6.0, None, 4.5], **columns})


# -- the page


def test_page_is_self_contained_and_accessible(parsed: Parsed) -> None:
    assert_self_contained(parsed)
    assert_accessible(parsed)


def test_every_part_is_there(parsed: Parsed) -> None:
    wanted = {"loss", "sinks", "maps", "positions", "norms", "recipe-title", "data-title", "again-title"}
    assert wanted <= ids(parsed)


def test_the_first_position_is_0_in_words_symbols_and_numbers(parsed: Parsed) -> None:
    explained = "Gu et al. 2025, who count from 1, write α₁ and Sink₁."
    assert "the first token, at position 0; Sink₀ is" in parsed.text
    assert "mean of |hₜ|, t > 0:" in parsed.text
    assert explained in parsed.text
    elsewhere = parsed.text.replace(explained, "") + json.dumps(parsed.data, ensure_ascii=False)
    assert not set(elsewhere) & {"₁"}
    assert "layer −1 is the input of layer 0" in elsewhere


def test_every_chart_says_its_unit(parsed: Parsed) -> None:
    notes = {panel["caption"]: panel["note"] for panels in parsed.data["panels"].values() for panel in panels}
    assert [caption for caption, note in notes.items() if not note] == []


def test_figures_are_the_last_watched_values() -> None:
    columns = {
        **{"sink_rate": [0.0, None, 37.456], "sink_rate_max": [1.0, None, 40.0], "sink_position": [5, None, 2]},
        **{"alpha_first": [0.1, None, 0.2], "alpha_uniform": [0.08, None, 0.08], "norm_ratio": [1.0, None, 7.25]},
    }
    told = Parsed(pretrain_page(by_hand(**columns), NO_SINKS, pretrain_run.record())).text
    assert "The validation loss ended at 4.50 nats per token. A sink emerged at step 600." in told
    assert "Sink₀ (ε = 0.3) ended at 37.5 %, the strongest position (2) at 40.0 %." in told
    assert "strongest at position 2 (40.0 %), T = 64" in told
    assert "2.50× uniform attention’s 0.08" in told
    assert "training 4.00" in told
    assert "7.25×" in told
    assert "a position stays at 10.0 % or more; mean α₀ well above uniform from step 400" in told
    assert "1.05M786k without embeddings" in told
    assert "1.28kin 20 steps" in told
    assert "Tokens per second12.3kon cpu" in told
    assert "4 min 12 speak memory 812 MiB" in told


def test_no_emergence_is_said() -> None:
    record = pretrain_run.record(emergence={"step": None, "rate": 10.0, "alpha_step": None})
    page = Parsed(pretrain_page(*RUN[:2], record))
    assert "No sink emerged." in page.text
    assert "no position stayed at 10.0 %" in page.text
    assert "emerged" not in Parsed(pretrain_page(*RUN[:2], pretrain_run.record(emergence={}))).text


def test_a_sink_seen_only_once_at_the_end_is_said() -> None:
    emergence = {"step": None, "rate": 5.0, "alpha_step": None}
    once = "No sink emerged. The last measurement alone reached the threshold, which does not tell a sink."
    for last, is_said in ((4.9, False), (5.0, True)):
        columns = {"sink_rate": [0.0, None, 2.0], "sink_rate_max": [1.0, None, last], "sink_position": [5, None, 2]}
        page = pretrain_page(by_hand(**columns), NO_SINKS, pretrain_run.record(emergence=emergence))
        assert (once in Parsed(page).text) == is_said


def test_a_virtual_sink_that_took_over_is_said() -> None:
    record = pretrain_run.record(emergence={"step": None, "virtual_step": 1200, "alpha_step": None, "rate": 5.0})
    page = Parsed(pretrain_page(*RUN[:2], record))
    assert "No token became a sink; the virtual sink emerged at step 1,200." in page.text
    assert "Sink emergedstep 1,200no position stayed at 5.00 %; the virtual sink from step 1,200" in page.text


def test_lines_are_the_history(parsed: Parsed) -> None:
    history = RUN[0]
    for section, number, series, name in (
        ("loss", 0, "training", "loss"),
        ("loss", 0, "validation", "valid_loss"),
        ("sinks", 0, "Sink₀ (ε = 0.3)", "sink_rate"),
        ("sinks", 1, "mean α₀", "alpha_first"),
        ("sinks", 1, "uniform attention", "alpha_uniform"),
        ("norms", 1, "largest of all layers", "norm_ratio"),
    ):
        rows = history.dropna(subset=name)
        found = points(parsed, section, number, series)
        assert [point["step"] for point in found] == rows["step"].tolist()
        np.testing.assert_allclose([point["value"] for point in found], rows[name], rtol=1e-4)
    assert ["uniform attention", 4, 1] in parsed.data["panels"]["sinks"][1]["lines"]


def test_norms_and_positions_are_those_of_the_last_step(parsed: Parsed) -> None:
    profile = points(parsed, "norms", 0, "step 1,000")
    assert [(point["layer"], point["value"]) for point in profile] == [(-1, 1), (0, 2), (1, 3), (2, 4), (3, 5)]
    rates = points(parsed, "positions", 0, "ε = 0.3")
    np.testing.assert_allclose([point["value"] for point in rates], 40 / np.arange(1, 65), rtol=1e-4)
    assert parsed.data["panels"]["positions"][0]["note"] == "% of heads × samples, step 1,000"


def test_maps_turn_over_the_watched_steps(parsed: Parsed) -> None:
    (found,) = parsed.data["maps"]
    assert found["steps"] == [0, 500, 1000]
    expected = 0.01 * np.outer(np.arange(1, 5), np.arange(1, 4))
    np.testing.assert_allclose(found["values"], [0 * expected, 0.5 * expected, expected])
    assert found["top"] == pytest.approx(0.12)
    slider = next(attributes for _, attributes in parsed.tags if attributes.get("id") == "step")
    assert (slider["max"], slider["value"]) == ("2", "2")


def test_a_virtual_sink_gets_its_line_figure_and_map() -> None:
    page = Parsed(pretrain_page(pretrain_run.history(virtual=True), pretrain_run.sinks(virtual=True), RUN[2]))
    assert points(page, "sinks", 0, "virtual sink")
    assert "Virtual sink rate20.0 %" in page.text
    assert [found["caption"] for found in page.data["maps"]] == ["Mean α₀", "Mass on the virtual sink"]


def test_without_a_virtual_sink_nothing_is_said_of_it(parsed: Parsed) -> None:
    assert "irtual" not in parsed.text
    assert [panel["caption"] for panel in parsed.data["panels"]["sinks"]] == [
        "Sink rate",
        "Attention on the first token",
    ]


def test_domains_get_a_panel_and_a_figure_each() -> None:
    page = Parsed(pretrain_page(pretrain_run.history(domains=("python", "wiki")), *RUN[1:]))
    last = page.data["panels"]["loss"][1]["points"][-1]
    assert (last["series"], last["step"]) == ("wiki", 1000)
    assert last["value"] == pytest.approx(3.9 + 4.7 * np.exp(-5), rel=1e-4)
    assert "Validation loss, wiki3.93" in page.text


@pytest.mark.parametrize(
    "passes, said",
    [([1234.5], "1,234 passes"), ([0.25, 3], "0.25 to 3.00 passes"), ([2, 2], "2.00 passes"), (["?"], None)],
)
def test_how_often_the_text_was_read(passes: list[Any], said: str | None) -> None:
    domains = [{"name": str(index), "passes": count} for index, count in enumerate(passes)]
    page = Parsed(pretrain_page(*RUN[:2], pretrain_run.record(data={"domains": domains})))
    assert (f"{said} over the training text" in page.text) if said else ("over the training text" not in page.text)


def test_held_out_text_that_is_trained_on_is_told() -> None:
    record = pretrain_run.record(data={"domains": [{"name": "python", "repeated": 0.125}]})
    page, told = Parsed(pretrain_page(*RUN[:2], record)), "Of the held-out text, 12 % is also in the training text"
    assert told in page.text
    assert "12 %" in page.text.partition("Of them in training")[2]
    assert told in " ".join(terminal(*RUN[:2], record).split())
    assert "also in the training text" not in terminal(*RUN)


def test_differing_fields_stand_before_the_others(parsed: Parsed) -> None:
    assert "weight decay 0.5 0.1" in parsed.text
    assert "fixed token 0, 7 –" in parsed.text
    assert parsed.text.index("fixed token") < parsed.text.index("As in the base recipe")
    assert parsed.text.index("As in the base recipe") < parsed.text.index("hidden size")
    same = pretrain_run.record()
    page = Parsed(pretrain_page(*RUN[:2], {**same, "config": same["config_defaults"]}))
    assert "Every field is the base recipe’s." in page.text


def test_data_versions_and_command_are_told(parsed: Parsed) -> None:
    for text in ("2.35M", "123k", "cdcdcdcdcdcd", "trained here", "2.9.0", "ab" * 32, "2025-11-20T12:00:00Z"):
        assert text in parsed.text
    assert "regard pretrain nano --weight-decay 0.5 --fixed-token 0" in parsed.text


# -- what may be missing


def test_without_watching_only_the_loss_is_shown() -> None:
    page = Parsed(pretrain_page(pretrain_run.unwatched(), NO_SINKS, {}))
    assert_self_contained(page)
    assert not {"sinks", "maps", "positions", "norms", "recipe-title", "data-title"} & ids(page)
    assert "Sinks were not watched." in page.text
    assert set(page.data["panels"]) == {"loss"}
    assert "regard pretrain --config results.json" in page.text


@pytest.mark.parametrize("frame", [by_hand().iloc[:1], by_hand()[["step", "loss"]].iloc[:1], by_hand().iloc[1:2]])
def test_one_row_is_enough(frame: pd.DataFrame) -> None:
    assert_self_contained(Parsed(pretrain_page(frame, pd.DataFrame(), {})))
    assert terminal(frame, pd.DataFrame(), {}).startswith("A decoder with some attention")


def test_a_configuration_of_ones_own_is_named_by_size_and_attention() -> None:
    metadata = {"config": {"attention": "sigmoid"}, "model": {"parameters": 1_234_567}}
    assert terminal(*RUN[:1], pd.DataFrame(), metadata).startswith(
        "A decoder of 1.23M parameters with sigmoid attention"
    )


def test_one_watched_step_needs_no_slider() -> None:
    page = Parsed(pretrain_page(RUN[0], pretrain_run.sinks((0,)), RUN[2]))
    labels = [attributes for tag, attributes in page.tags if tag == "label" and attributes["for"] == "step"]
    assert "hidden" in labels[0]
    assert page.data["maps"][0]["top"] == 1


def test_long_curves_are_thinned_and_the_page_says_so(parsed: Parsed) -> None:
    page = Parsed(pretrain_page(pretrain_run.history(20_000, 10, 20), *RUN[1:]))
    found = points(page, "loss", 0, "training")
    assert len(found) == MOST
    assert (found[0]["step"], found[-1]["step"]) == (10, 20_000)
    assert "Longer curves are thinned to 500 points; history.parquet has all." in page.text
    assert "thinned" not in parsed.text


def test_thinning_keeps_the_ends_and_no_point_twice() -> None:
    for count in (0, 1, 499, 500, 501, 999, 12_345):
        kept = thin_indices(count)
        assert len(kept) == len(set(kept.tolist())) == min(count, MOST)
        assert count == 0 or (kept[0], kept[-1]) == (0, count - 1)


def test_what_is_not_finite_is_not_drawn() -> None:
    values = [1.0, float("nan"), float("inf"), -float("inf"), 2.0]
    assert [point["step"] for point in line("step", "loss", list(range(5)), values)] == [0, 4]


def test_hostile_texts_are_escaped() -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    record = pretrain_run.record(name=evil, command=f"regard pretrain --data {evil}")
    record["config"][evil] = evil
    record["data"]["domains"][0] |= {"name": evil, "source": evil, "sha256": evil}
    record["cost"]["device"] = evil
    page = Parsed(pretrain_page(pretrain_run.history(domains=(evil, "python")), RUN[1], record))
    assert_self_contained(page)
    assert [attributes.get("id") for attributes, _ in page.scripts] == ["regard-data", None, None]
    assert "img" not in {tag for tag, _ in page.tags}
    assert page.text.count(evil) >= 5


# -- numbers and the terminal


@pytest.mark.parametrize(
    "count, shown",
    [(0, "0"), (999, "999"), (1000, "1k"), (1049, "1.05k"), (999_600, "1M"), (60e6, "60M"), (1.234e9, "1.23B")],
)
def test_amounts(count: float, shown: str) -> None:
    assert format_count(count) == shown


@pytest.mark.parametrize(
    "seconds, shown",
    [
        (0.51, "0.51 s"),
        (59.96, "60.0 s"),
        (60, "1 min"),
        (252.4, "4 min 12 s"),
        (7_260, "2 h 1 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


def test_summary_fits_and_tells_what_matters() -> None:
    text = terminal(*RUN)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.startswith("nano\nsoftmax attention · 1.05M parameters · 1,000 steps · seed 0\n")
    assert "No sink" not in text
    assert "A sink emerged at step 600." in text
    assert "layer 3, head 2" in text
    assert "█" in text
    assert "█" not in terminal(by_hand().iloc[:1], NO_SINKS, {})
