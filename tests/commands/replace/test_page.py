"""The report on replaced heads: page, figures, terminal."""

import base64
import io
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from regard.commands.replace.charts import MOST, pictures
from regard.commands.replace.page import replace_page
from regard.commands.replace.result import ReplaceResult
from regard.commands.replace.scores import ATTENTION, WIDTHS, intervals, pattern_counts, relative_drop
from regard.commands.replace.terminal import replace_summary
from regard.errors import UserError
from tests.commands.replace import replaced_run
from tests.report.parsed import Parsed, assert_accessible, assert_self_contained

TABLES = (replaced_run.scores(), replaced_run.heads(), replaced_run.cost(), replaced_run.record())
FEW = (replaced_run.scores(("average",), ("lambda",), tasks=("sst2",)), *TABLES[1:])
"""Of one task and one kind of constants, for what does not depend on the scores."""
NO_HEADS, NO_COST = replaced_run.heads().iloc[:0], replaced_run.cost().iloc[:0]


@pytest.fixture(scope="module")
def parsed() -> Parsed:
    return Parsed(replace_page(*TABLES, replaced_run.matrices()))


def ids(page: Parsed) -> set[str | None]:
    return {attributes.get("id") for _, attributes in page.tags}


def points(panels: list[dict[str, Any]], number: int, series: str) -> list[dict[str, Any]]:
    return [point for point in panels[number]["points"] if point["series"] == series]


def terminal(*tables: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(replace_summary(*tables))
    return out.getvalue()


# -- the page


def test_page_is_self_contained_and_accessible(parsed: Parsed) -> None:
    assert_self_contained(parsed)
    assert_accessible(parsed)


def test_the_page_says_which_ranking_of_heads_it_shows(parsed: Parsed) -> None:
    """A run by chance has one for each seed, of which it shows the first."""
    rank = "Rank 0 stays dynamic longest; the head of the largest rank becomes constant first."
    assert f"Ranking “lambda”. {rank}" in parsed.text
    record = {**TABLES[3], "config": {**TABLES[3]["config"], "rank_heads_by": ["random", "lambda"]}}
    drawn = Parsed(replace_page(*FEW[:3], record, replaced_run.matrices()))
    assert f"Ranking “random”. {rank} This is the order of seed 0; each seed draws its own." in drawn.text


def test_lines_are_the_intervals(parsed: Parsed) -> None:
    means = intervals(TABLES[0])
    ours = means[(means["task"] == "sst2") & (means["constants"] == "average") & (means["rank_heads_by"] == "lambda")]
    whole = means[(means["task"] == "sst2") & (means["constants"] == "none")]
    expected = pd.concat([whole, ours])
    found = points(parsed.data["panels"]["scores"], 1, "average")
    assert [point["fraction"] for point in found] == ["1", "1/2", "1/8", "0"]
    assert [point["place"] for point in found] == [0, 1, 3, 4.5]
    for column, key in (("mean", "value"), ("ci_low", "low"), ("ci_high", "high")):
        np.testing.assert_allclose([point[key] for point in found], expected[column], rtol=1e-5)


@pytest.mark.exhaustive
def test_the_page_says_what_no_seed_varies(parsed: Parsed) -> None:
    said = "They are of the probes alone: gates were trained once, with seed 0."
    assert said in parsed.text
    scores = FEW[0].replace({"rank_heads_by": {"lambda": "input-dependence"}})
    assert "trained once" not in Parsed(replace_page(scores, *TABLES[1:], replaced_run.matrices())).text
    both = replaced_run.scores(orders=("lambda",), tasks=("sst2",))
    trained = both.replace({"constants": {"identity": "average-init"}})
    assert (
        said.replace("gates", "gates and trained constants")
        in Parsed(replace_page(trained, *TABLES[1:], replaced_run.matrices())).text
    )


def test_a_line_for_each_source_and_each_order(parsed: Parsed) -> None:
    assert {point["series"] for point in parsed.data["panels"]["scores"][0]["points"]} == {"average", "identity"}
    assert {point["series"] for point in parsed.data["panels"]["orders"][0]["points"]} == {"lambda", "random"}
    assert [panel["caption"] for panel in parsed.data["panels"]["orders"]] == ["CoLA", "SST-2", "MLM"]


def test_headline_tells_scores_and_drops(parsed: Parsed) -> None:
    drops = relative_drop(TABLES[0])
    row = drops[
        (drops["task"] == "cola") & (drops["rank_heads_by"] == "lambda") & (drops["constants"] == "average")
    ].iloc[-1]
    assert row["dynamic_fraction"] == 0
    assert f"original {row['original']:.3g}, drop {row['drop']:.1f} %" in parsed.text
    assert f"{row['score']:.3g}" in parsed.text
    assert re.search(r"drop 0\.\d\d nats", parsed.text)
    assert (
        "One forward pass with all heads constant takes 80 % of the time and 80 % of the FLOPs of the original model."
        in parsed.text
    )
    assert "1.25×" in parsed.text
    assert "3 tasks · 3 seeds" in parsed.text


def test_mean_drop_leaves_nats_out(parsed: Parsed) -> None:
    drops = relative_drop(TABLES[0])
    ours = drops[(drops["constants"] == "average") & (drops["rank_heads_by"] == "lambda") & (drops["unit"] == "%")]
    mean = ours[ours["dynamic_fraction"] == 0]["drop"].mean()
    assert f"drops by {mean:.1f} % on average over 2 tasks" in parsed.text
    assert "of 2 tasks" in parsed.text


def test_pictures_are_the_matrices(parsed: Parsed) -> None:
    matrices = replaced_run.matrices()
    assert len(parsed.data["pictures"]) == 6
    for picture in parsed.data["pictures"]:
        layer, head = map(int, re.findall(r"\d+", picture["caption"]))
        matrix = matrices[f"encoder.{layer}"][head].numpy()
        shades = np.frombuffer(base64.b64decode(picture["shades"]), np.uint8).reshape(picture["size"])
        np.testing.assert_allclose((shades / 255.0) ** 2, matrix / matrix.max(), atol=1 / 255)
    assert "reduced" not in parsed.text


def test_large_matrices_are_reduced_and_the_page_says_so() -> None:
    matrices = replaced_run.matrices(length=128)
    page = Parsed(replace_page(*FEW, matrices))
    assert "Matrices of 128×128 are reduced to means of blocks, at most 64×64." in page.text
    assert page.data["pictures"][0]["size"] == [64, 64]
    one = pictures(TABLES[1], matrices)[0]
    blocks = matrices[f"encoder.{one.layer}"][one.head].double().reshape(64, 2, 64, 2).mean((1, 3))
    np.testing.assert_allclose(one.weights, blocks.numpy())


def test_the_order_is_mapped(parsed: Parsed) -> None:
    (found,) = parsed.data["maps"]
    assert {(cell["layer"], cell["x"]): cell["value"] for cell in found["cells"]} == {
        (row.layer, row.head): row.rank for row in TABLES[1].itertuples()
    }
    assert found["cells"][1]["shown"].startswith("rank 1, lambda −0.25")


def test_patterns_are_counted_over_all_heads(parsed: Parsed) -> None:
    assert pattern_counts(TABLES[1]) == [("broad", 4, 4 / 6), ("diagonal", 2, 2 / 6)]
    assert "66.7 %" in parsed.text
    assert (
        "87.5 % of the heads have a diagonal brighter than its neighborhood, 37.5 % of the heads have more "
        in parsed.text
    )
    assert "than half of their mass in the columns of special tokens (a head may do both" in parsed.text


def test_sites_get_a_map_each() -> None:
    heads = replaced_run.heads(("encoder", "cross"))
    page = Parsed(replace_page(FEW[0], heads, *TABLES[2:], replaced_run.matrices()))
    assert [found["caption"] for found in page.data["maps"]] == ["Rank, encoder", "Rank, cross-attention"]


def test_provenance_holds_the_whole_record(parsed: Parsed) -> None:
    for text in ("ab" * 32, "cd" * 32, "glue, sst2", "5.0.0", "12.345", "2025-11-20T12:00:00Z"):
        assert text in parsed.text


def test_what_is_empty_is_not_shown() -> None:
    scores = replaced_run.scores(("average",), ("lambda",), seeds=1, tasks=("sst2",))
    page = Parsed(replace_page(scores, NO_HEADS, NO_COST, {}, {}))
    assert {"scores", "drops-title"} <= ids(page)
    absent = {"orders", "maps", "pictures", "cost", "sources-title", "constants-title", "order-title", "cost-title"}
    assert not absent & ids(page)
    assert "95 % interval" not in page.text
    assert page.data["panels"]["scores"][0]["points"][0]["low"] is None
    assert " on average" not in page.text


def test_the_untouched_model_alone_can_be_told() -> None:
    scores = replaced_run.scores().query("dynamic_fraction == 1")
    page = Parsed(replace_page(scores, NO_HEADS, NO_COST, replaced_run.record(), {}))
    assert "scores" not in ids(page)
    assert "No head was replaced" in terminal(scores, NO_HEADS, NO_COST, {})


@pytest.mark.exhaustive
def test_several_models_get_panels_of_their_own() -> None:
    scores = replaced_run.scores(("average",), ("lambda",))
    scores = pd.concat([scores, scores.assign(model="other")])
    page = Parsed(replace_page(scores, *TABLES[1:], {}))
    captions = [panel["caption"] for panel in page.data["panels"]["scores"]]
    assert captions[:2] == ["CoLA, example/tiny", "SST-2, example/tiny"]
    assert len(captions) == 6


def test_hostile_texts_are_escaped() -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    scores = replaced_run.scores(orders=("lambda",), tasks=("sst2",)).replace(
        {"task": {"sst2": evil}, "constants": {"identity": evil}}
    )
    heads = TABLES[1].replace({"pattern": {"broad": evil}})
    record = replaced_run.record(**{evil: evil})
    record["model"]["name"] = evil
    page = Parsed(replace_page(scores, heads, TABLES[2], record, replaced_run.matrices()))
    assert_self_contained(page)
    assert [attributes.get("id") for attributes, _ in page.scripts] == ["regard-data", None, None]
    assert "img" not in {tag for tag, _ in page.tags}
    assert evil in page.text


def test_wrong_scores_are_the_users_mistake() -> None:
    with pytest.raises(UserError, match="empty"):
        replace_page(TABLES[0].iloc[:0], *TABLES[1:], {})
    with pytest.raises(UserError, match="missing: metric"):
        terminal(TABLES[0].drop(columns="metric"), *TABLES[1:])


# -- which heads are shown


def test_pictures_take_patterns_in_turn_and_the_first_to_become_constant() -> None:
    heads = replaced_run.heads(layers=8)
    found = pictures(heads, replaced_run.matrices(layers=8), max_images=4)
    by = {pattern: sorted(group["rank"])[-2:] for pattern, group in heads.groupby("pattern")}
    shown = {pattern: sorted(one.rank or 0 for one in found if one.pattern == pattern) for pattern in by}
    assert shown == by


def test_pictures_are_few_and_only_of_what_there_is() -> None:
    heads = replaced_run.heads(layers=20)
    assert len(pictures(heads, replaced_run.matrices(layers=20))) == MOST
    assert {one.layer for one in pictures(heads, replaced_run.matrices(layers=1))} == {0}
    unnamed = heads.assign(pattern=None, rank=pd.NA)
    assert len(pictures(unnamed, replaced_run.matrices(layers=2))) == 6
    assert pattern_counts(unnamed) == []


def test_a_matrix_of_zeros_is_drawn() -> None:
    zeros = {name: torch.zeros_like(matrix) for name, matrix in replaced_run.matrices().items()}
    page = Parsed(replace_page(*FEW, zeros))
    assert set(base64.b64decode(page.data["pictures"][0]["shades"])) == {0}


# -- the terminal


def test_summary_fits_and_tells_scores(parsed: Parsed) -> None:
    text = terminal(*TABLES)
    assert max(len(line) for line in text.splitlines()) <= 80
    means = intervals(TABLES[0]).query("task == 'sst2' and constants == 'none'")
    assert re.search(rf"SST-2 +{means['mean'].iloc[0]:.3g}", text)
    assert re.search(r"dynamic heads +1 +1/2 +1/8 +0", text)
    assert "66.7 %  broad (4 heads)" in text
    assert re.search(r"of the original +100 % +90\.0 % +85\.0 % +80\.0 %", text)


@pytest.mark.exhaustive
def test_summary_keeps_the_smallest_fraction_of_many() -> None:
    scores = replaced_run.scores(("average",), ("lambda",))
    more = [scores[scores["dynamic_fraction"] == 0.5].assign(dynamic_fraction=2.0**-k) for k in range(4, 9)]
    text = terminal(pd.concat([scores, *more]), NO_HEADS, NO_COST, {})
    assert re.search(r"dynamic heads +1 +1/2 +1/8 +1/16 +0$", text, flags=re.MULTILINE)


def test_operations_are_named_whole() -> None:
    scores = replaced_run.scores(("average",), ("lambda",))
    whole = scores[scores["dynamic_fraction"] == 1]
    names = ("softmax+window=512+prefix=1", "softmax+window=512+prefix=4")
    others = [whole.assign(constants=name, rank_heads_by=ATTENTION, dynamic_fraction=0.0) for name in names]
    text = terminal(pd.concat([whole, *others]), NO_HEADS, NO_COST, {"attention": list(names)})
    assert all(re.search(rf"^  {re.escape(name)} ", text, flags=re.MULTILINE) for name in names), text


@pytest.mark.parametrize(
    "score, cell, lede",
    [(-3.0084, "0.008 nats", "drops by 0.008 nats"), (-2.9989, "−0.001 nats", "rises by 0.001 nats")],
)
def test_a_small_drop_of_an_operation_has_its_digit_and_a_blank_before_it(score: float, cell: str, lede: str) -> None:
    metric = "negative_log_perplexity"
    rows = [("example/tiny", "lm", "none", "none", 1.0, 0, metric, -3.0, 0.2, 0.0)]
    rows += [("example/tiny", "lm", "sigmoid", ATTENTION, 0.0, 0, metric, score, 0.2, 0.0001)]
    text = terminal(pd.DataFrame(rows, columns=[*replaced_run.COLUMNS, *WIDTHS]), NO_HEADS, NO_COST, {})
    assert re.search(rf"^  sigmoid +−3\.0\d +{cell}$", text, flags=re.MULTILINE), text
    assert f"Other operations instead of softmax: with sigmoid the score {lede}." in " ".join(text.split())


# -- figures


@pytest.mark.exhaustive
def test_figures_draw_the_means() -> None:
    scores, heads, _, record = TABLES
    drawn = ReplaceResult(scores, heads, NO_COST, record).plot("fractions")
    assert len(drawn.axes) == 3
    means = intervals(scores).query("task == 'cola' and constants == 'identity'")["mean"]
    line = drawn.axes[0].lines[1]
    np.testing.assert_allclose(np.asarray(line.get_ydata(), dtype=float)[1:], means, rtol=1e-5)
    assert [label.get_text() for label in drawn.axes[0].get_xticklabels()] == ["1", "1/2", "1/8", "0"]
    orders = ReplaceResult(scores, heads, NO_COST, record).plot("orders")
    assert orders.axes[0].get_legend_handles_labels()[1] == ["lambda", "random"]
    constants = ReplaceResult(scores, heads, NO_COST, record, replaced_run.matrices()).plot("constants")
    assert len([axes for axes in constants.axes if axes.images]) == 6
    for figure in (drawn, orders, constants):
        figure.savefig(io.BytesIO(), format="png")


@pytest.mark.parametrize(
    "kind, message",
    [("map", "expected one of fractions, orders, constants"), ("constants", "no constant matrices"), ("orders", "two")],
)
def test_what_cannot_be_drawn_is_named(kind: Any, message: str) -> None:
    scores = replaced_run.scores(orders=("lambda",))
    with pytest.raises(UserError, match=message):
        ReplaceResult(scores, *TABLES[1:], {}).plot(kind)


@pytest.mark.exhaustive
def test_a_time_below_the_share_of_the_flops_is_told_with_its_spread() -> None:
    """FLOPs count neither the softmax nor the memory of scores, which constant heads do without."""
    fast = replaced_run.cost().assign(relative_time=[1.0, 0.9, 0.85, 0.41])
    tables = (*FEW[:2], fast, FEW[3])
    page = Parsed(replace_page(*tables, {})).text
    assert "takes 41 % of the time and" in page
    assert "2.44×" in page
    assert "85.0 % (83.0–87.0)" in page
    told = Parsed(replace_page(*FEW, {})).text
    assert "middle half of the rounds 1.19 to 1.28×" in told


@pytest.mark.exhaustive
def test_inputs_that_were_cut_are_said_at_the_top() -> None:
    for truncated, is_said in ((12, True), (0, False)):
        record = replaced_run.record() | {
            "data": {"task": "sst2", "train": 100, "validation": 50, "truncated": truncated}
        }
        page = Parsed(replace_page(*FEW[:3], record, {})).text
        assert ("3 seeds · 12 of 150 inputs cut to the length · run in 12.3 s" in page) == is_said


@pytest.mark.exhaustive
def test_rows_without_a_label_are_said_at_the_top() -> None:
    for left_out, is_said in ((1200, True), (0, False)):
        record = replaced_run.record() | {"data": {"task": "a.csv", "left_out": left_out}}
        page = Parsed(replace_page(*FEW[:3], record, {})).text
        assert ("3 seeds · 1,200 rows without a label or a text left out · run in 12.3 s" in page) == is_said


# -- what the intervals support


@pytest.mark.exhaustive
def test_a_drop_within_its_interval_is_not_stated() -> None:
    """The original and the replaced model of a seed are a pair: drops −2, 0 and 5 % of 0.5 have 1 ± 8.957 %."""
    keys = ("example/tiny", "cola")
    rows = [(*keys, "none", "none", 1.0, seed, "accuracy", 0.5) for seed in range(3)]
    rows += [
        (*keys, "average", "lambda", 0.0, seed, "accuracy", score) for seed, score in enumerate((0.51, 0.5, 0.475))
    ]
    tables = (pd.DataFrame(rows, columns=replaced_run.COLUMNS), NO_HEADS, NO_COST, replaced_run.record())
    told = " ".join(terminal(*tables).split())
    assert "With all heads constant no drop is shown: one of up to 10.0 % cannot be excluded over seeds." in told
    assert "drops by" not in told
    text = Parsed(replace_page(*tables, {})).text
    assert "drop 1.0 % (−8.0 to 10.0 %)" in text


@pytest.mark.parametrize(
    "by, told_as", [("lambda", "no drop is shown: "), ("attention", "on average: with average no drop is shown: ")]
)
def test_the_widest_of_several_pairs_is_told_beside_their_average(by: str, told_as: str) -> None:
    """Pairs whose averages happen to agree say nothing of each."""
    rows: list[Any] = []
    for task, scores in (("cola", (0.5, 0.4)), ("sst2", (0.4, 0.5))):
        keys = ("example/tiny", task)
        rows += [(*keys, "none", "none", 1.0, seed, "accuracy", 0.45) for seed in range(2)]
        rows += [(*keys, "average", by, 0.0, seed, "accuracy", score) for seed, score in enumerate(scores)]
    tables = (pd.DataFrame(rows, columns=replaced_run.COLUMNS), NO_HEADS, NO_COST, replaced_run.record())
    told = " ".join(terminal(*tables).split())
    assert (
        f"{told_as}one of up to 0.0 % on average, and of up to 141.2 % in CoLA, cannot be excluded over seeds" in told
    )


def test_a_drop_that_is_the_same_for_every_seed_is_told_without_an_interval() -> None:
    keys = ("example/tiny", "cola")
    rows: list[Any] = [(*keys, "none", "none", 1.0, seed, "accuracy", 0.8) for seed in range(3)]
    rows += [(*keys, "average", "lambda", 0.0, seed, "accuracy", 0.76) for seed in range(3)]
    tables = (pd.DataFrame(rows, columns=replaced_run.COLUMNS), NO_HEADS, NO_COST, replaced_run.record())
    told = " ".join(terminal(*tables).split())
    assert "With all heads constant the score drops by 5.0 %, without an interval." in told
    assert "± 95 %" not in told


def test_scores_that_are_the_same_with_another_operation_are_told_so() -> None:
    keys = ("example/tiny", "cola")
    rows: list[Any] = [(*keys, "none", "none", 1.0, seed, "accuracy", 0.45) for seed in range(2)]
    rows += [(*keys, "sigmoid", "attention", 0.0, seed, "accuracy", 0.45) for seed in range(2)]
    tables = (pd.DataFrame(rows, columns=replaced_run.COLUMNS), NO_HEADS, NO_COST, replaced_run.record())
    told = " ".join(terminal(*tables).split())
    assert "Other operations instead of softmax: with sigmoid the score is the same for every seed." in told


def test_a_small_drop_has_the_decimals_of_its_interval() -> None:
    metric = "negative_log_perplexity"
    rows = [("example/tiny", "lm", "none", "none", 1.0, 0, metric, -3.0, 0.2, 0.0)]
    rows += [("example/tiny", "lm", "average", "lambda", 0.0, 0, metric, -3.008, 0.2, 0.025)]
    table = pd.DataFrame(rows, columns=[*replaced_run.COLUMNS, *WIDTHS])
    text = Parsed(replace_page(table, NO_HEADS, NO_COST, {}, {})).text
    assert "drop 0.008 nats (−0.017 to 0.033 nats)" in text


def test_a_speed_up_whose_spread_includes_none_is_not_stated() -> None:
    cost = replaced_run.cost().assign(relative_time_high=1.0)
    page = Parsed(replace_page(FEW[0], FEW[1], cost, TABLES[3], {}))
    assert "Speed-up" not in page.text
    assert "One forward pass with all heads constant takes 80 % of the FLOPs of the original model." in page.text


@pytest.mark.exhaustive
def test_intervals_over_parts_of_a_text_stand_where_there_is_one_seed() -> None:
    """A drop of 0.03 ± 0.01 nats is stated, one of 0.03 ± 0.04 is not, and a gain is no negative drop."""
    columns = [*replaced_run.COLUMNS, *WIDTHS]

    def told(score: float, width: float) -> str:
        rows = [("example/tiny", "lm", "none", "none", 1.0, 0, "negative_log_perplexity", -3.0, 0.2, 0.0)]
        rows += [("example/tiny", "lm", "average", "lambda", 0.0, 0, "negative_log_perplexity", score, 0.2, width)]
        record = replaced_run.record() | {"data": {"validation": 40}}
        tables = (pd.DataFrame(rows, columns=columns), NO_HEADS, NO_COST, record)
        text = " ".join(terminal(*tables).split())
        assert "1 task · 40 windows" in text
        assert re.search(r"± 95 % \(text parts\) 0\.0\d nats", text)
        page = Parsed(replace_page(*tables, {}))
        assert "95 % intervals over text parts" in page.text
        points = page.data["panels"]["scores"][0]["points"]
        assert [point["high"] - point["low"] for point in points] == pytest.approx([0.4, 0.4])
        return text

    assert "With all heads constant the score drops by 0.03 nats." in told(-3.03, 0.01)
    assert "no drop is shown: one of up to 0.07 nats cannot be excluded over text parts" in told(-3.03, 0.04)
    assert "With all heads constant the score rises by 0.03 nats." in told(-2.97, 0.01)


def test_a_task_at_the_majority_shows_nothing() -> None:
    told = "this task cannot show what its heads do"
    scores = replaced_run.scores(tasks=("sst2",))
    untouched = scores[scores["dynamic_fraction"] == 1]["score"]
    for majority, is_said in ((untouched.min() - 0.2, False), (untouched.max(), True)):
        record = {**replaced_run.record(), "data": {"majority": float(majority)}}
        text = " ".join(terminal(scores, *TABLES[1:3], record).split())
        assert (told in text) == is_said
        assert "For comparison, all heads constant" in text
        assert "best single label" in text


def test_a_task_that_loses_nothing_without_attention_shows_nothing() -> None:
    """Also of one seed, whose drop has no interval, and of one among several tasks."""
    told = "Zeros in all heads are not shown to score less than the original model"
    for seeds in (1, 3):
        scores = replaced_run.scores(("average", "zeros"), tasks=("sst2",), seeds=seeds)
        assert told not in " ".join(terminal(scores, *TABLES[1:3], replaced_run.record()).split())
        scores.loc[scores["constants"] == "zeros", "score"] = 2.0
        text = " ".join(terminal(scores, *TABLES[1:3], replaced_run.record()).split())
        assert f"{told}: this task does not show what its heads do." in text
        scores["score"] = 0.0  # as Matthews' correlation of one answer alone: no drop is known
        text = " ".join(terminal(scores, *TABLES[1:3], replaced_run.record()).split())
        assert f"{told}: this task does not show what its heads do." in text
    scores = replaced_run.scores(("average", "zeros"))
    scores.loc[(scores["constants"] == "zeros") & (scores["task"] == "sst2"), "score"] = 2.0
    text = " ".join(terminal(scores, *TABLES[1:3], replaced_run.record()).split())
    assert f"{told} in 1 of {scores['task'].nunique()} cases, which do not show what heads do: SST-2." in text


def test_the_majority_stands_below_the_sources() -> None:
    record = {**replaced_run.record(), "data": {"majority": 0.625}}
    page = Parsed(replace_page(replaced_run.scores(tasks=("sst2",)), *TABLES[1:3], record, {}))
    assert re.search(r"the best single label\s*0\.625", page.text)
    assert " ± " in page.text
