"""The report on runs of continual learning: page and terminal, held against scores that follow a formula."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import vl_convert

from regard.commands.learn.charts import MAX_TASK_PANELS
from regard.commands.learn.gate import TIMES
from regard.commands.learn.matrix import MAX_NUMBERS, MEAN, make_matrix_data
from regard.commands.learn.metrics import METRICS, Estimate, find_baseline, sum_costs
from regard.commands.learn.page import learn_page
from regard.commands.learn.row_counts import describe_rows
from regard.commands.learn.tables import find_unfinished_runs, has_one_order, task_names
from regard.commands.learn.words import MAX_WARNINGS, join_names, write_warnings
from regard.commands.learn.words import _compare_forgetting as compare_forgetting
from regard.continual.metrics import metrics_table
from regard.report.labels import format_fixed
from regard.report.page import libraries
from tests.commands.learn import learned
from tests.report.browser import draw, needs_node
from tests.report.parsed import Parsed, assert_accessible, assert_self_contained

TABLES = learned.tables()
FEW = learned.tables(learned.matrix(("finetune", "prescale"), (39, 123), learned.TASKS[:2], ("til",)))
"""Of two methods, tasks and runs, for what does not depend on the scores."""


@pytest.fixture(scope="module")
def parsed() -> Parsed:
    return Parsed(learn_page(TABLES, learned.record()))


def ids(page: Parsed) -> set[str | None]:
    return {attributes.get("id") for _, attributes in page.tags}


def line(page: Parsed, setting: str, number: int, series: str) -> dict[int, float]:
    points = page.data["curves"][setting][number]["points"]
    return {point["after"]: point["value"] for point in points if point["series"] == series}


def options(page: Parsed, key: str) -> list[str | None]:
    """The values that a field offers, in their order."""
    at = next(i for i, (_, attributes) in enumerate(page.tags) if attributes.get("id") == key)
    found = []
    for tag, attributes in page.tags[at + 1 :]:
        if tag != "option":
            break
        found.append(attributes["value"])
    return found


def half(*values: float) -> float:
    return float(learned.QUANTILE * np.std(values, ddof=1) / np.sqrt(len(values)))


# -- the page


def test_page_is_self_contained_and_accessible(parsed: Parsed) -> None:
    assert_self_contained(parsed)
    assert_accessible(parsed)


def test_every_part_is_there(parsed: Parsed) -> None:
    parts = (
        "matrix",
        "curves",
        "metrics",
        "differences",
        "cost",
        "diagnostics",
        "beside",
        "interference",
        "gate",
        "pseudo",
    )
    rest = ("stream", "settings", "again", "provenance")
    assert {f"{part}-title" for part in (*parts, *rest)} <= ids(parsed)
    boxes = {"matrix-grids", "curves-lines", "metrics-dots", "cost-dots", "diagnostics-lines", "beside-dots"}
    assert {*boxes, "interference-grids", "gate-grids", "gate-lines", "pseudo-dots"} <= ids(parsed)


@pytest.mark.exhaustive
def test_size_is_that_of_the_libraries_and_little_more(parsed: Parsed) -> None:
    own = len(learn_page(TABLES, learned.record())) - len(libraries())
    assert own < 150_000


def test_ledes_say_who_keeps_most_and_whether_intervals_overlap(parsed: Parsed) -> None:
    width = format_fixed(half(0, 0.1, 0.2))
    told = f"prescale has the highest AP, 94.60 ± {width}, before finetune with 84.10 ± {width}"
    assert f"With the task known (TIL): {told}; the 95 % intervals do not overlap." in parsed.text
    run_by_run = "Paired by run, the difference to finetune is +10.50 points (95 % interval +10.00 to +11.00"
    assert f"{run_by_run}, which does not contain 0)." in parsed.text
    assert "prescale forgets least, 2.00 points; finetune forgets most, 16.00 points; each is" in parsed.text
    assert "joint, all tasks at once, reaches AP 96.10." in parsed.text
    assert f"(CIL): prescale has the highest AP, 74.60 ± {width}" in parsed.text
    assert "4 tasks · 3 methods · 3 seeds · 9 runs · order 2-0-1-3 · minilm · protocol clean" in parsed.text


@pytest.mark.exhaustive
def test_overlapping_intervals_are_called_so() -> None:
    scores = TABLES["matrix"].copy()
    scores.loc[scores["method"] == "prescale", "score"] -= 10.4 * (scores["after_task"] == 4)
    page = Parsed(learn_page(learned.tables(scores), learned.record()))
    assert "prescale has the highest AP, 84.20" in page.text
    assert "the 95 % intervals overlap." in page.text
    assert "the difference to finetune is +0.10 points (95 % interval −0.40 to +0.60, which contains 0)." in page.text
    assert "prescale +0.10 −0.40 to +0.60 0.500 overlaps 0" in page.text


def test_the_bound_is_no_competitor(parsed: Parsed) -> None:
    assert "joint has the highest AP" not in parsed.text
    assert "AP, TIL, highest94.60" in parsed.text
    assert "joint all tasks at once" in parsed.text


def alike(methods: dict[str, float]) -> Parsed:
    """The page of methods whose tasks lose so many points each for each later one, in one run."""
    scores = pd.concat([learned.matrix((name,), (39,), settings=("til",)) for name in methods])
    lost = scores["method"].map(methods) * (scores["after_task"] - scores["task_index"])
    scores["score"] = scores["score"].where(scores["task_index"] > scores["after_task"], 96 - lost)
    return Parsed(learn_page(learned.tables(scores), learned.record()))


@pytest.mark.exhaustive
def test_methods_that_end_alike_are_called_so() -> None:
    """A difference that is not printed is none; the tiles crown nobody."""
    page = alike({"sapt": 0.0, "replay-lora": 0.0005})
    assert "sapt and replay-lora end with the same AP, 96.00." in page.text
    assert "sapt and replay-lora forget the same, 0.00 points." in page.text
    for told in ("has the highest AP", "forgets least", "forgets most", "highest", "may be chance.", "Paired by run"):
        assert told not in page.text.replace("differences may be chance.", "")
    assert "AP, TIL" in page.text
    assert "AP96.00the same: sapt and replay-loraFGT0.00the same:" in page.text


@pytest.mark.exhaustive
def test_some_that_end_alike_stand_before_the_others() -> None:
    page = alike({"finetune": 8.0, "sapt": 0.0, "ewc": 1.0, "replay-lora": 0.0, "lwf": 8.0})
    assert "sapt and replay-lora end with the same AP, 96.00, before ewc with 94.50." in page.text
    least, most = "sapt and replay-lora forget least, 0.00 points each", "forget most, 16.00 points each."
    assert f"{least}; finetune and lwf {most}" in page.text
    assert "AP, highest96.00the same: sapt and replay-lora" in page.text
    assert "FGT, least0.00the same: sapt and replay-lora" in page.text


@pytest.mark.exhaustive
def test_one_that_is_ahead_as_printed_is_still_crowned() -> None:
    page = alike({"sapt": 0.0, "replay-lora": 0.01})
    assert "sapt has the highest AP, 96.00, before replay-lora with 95.98;" in page.text
    assert "sapt forgets least, 0.00 points; replay-lora forgets most, 0.02 points." in page.text
    assert "AP, highest96.00sapt" in page.text


def test_long_lists_of_methods_are_cut() -> None:
    assert join_names(["a"]) == "a"
    assert join_names(["a", "b", "c"]) == "a, b and c"
    assert join_names(list("abcdefg")) == "a, b, c, d and 3 more"


@pytest.mark.exhaustive
def test_a_single_method_is_told_alone() -> None:
    page = Parsed(learn_page(learned.tables(learned.matrix(("ewc",))), learned.record()))
    assert "highest" not in page.text
    assert "ewc ends at AP 91.60 ±" in page.text
    assert "has the highest AP" not in page.text
    assert "differences-title" not in ids(page)
    assert options(page, "matrix-beside") == [""]


# -- gates


def test_the_weights_are_those_of_each_time(parsed: Parsed) -> None:
    """Half of it is the own block's, a tenth less with each task since, and the others share what is left."""
    found = parsed.data["gate"]
    assert (found["methods"], found["tasks"]) == (["prescale"], list(learned.TASKS))
    cells = found["cells"]["prescale"]
    assert cells["learning"][0] == [1.0, None, None, None]
    assert cells["learning"][2] == [0.25, 0.25, 0.5, None]
    assert cells["inference"][0] == pytest.approx([0.2, 0.8 / 3, 0.8 / 3, 0.8 / 3], abs=1e-5)
    assert cells["inference"][3] == pytest.approx([0.5 / 3, 0.5 / 3, 0.5 / 3, 0.5], abs=1e-5)


def test_the_lines_of_a_gate_are_by_task(parsed: Parsed) -> None:
    panels = parsed.data["gate"]["lines"]["prescale"]
    assert [panel["caption"].split()[0] for panel in panels] == ["Weight", "Entropy", "Divergence"]
    first = {time: [p["value"] for p in panels[0]["points"] if p["series"] == time] for time in TIMES.values()}
    assert first == {TIMES["learning"]: [1.0, 0.5, 0.5, 0.5], TIMES["inference"]: [0.2, 0.3, 0.4, 0.5]}
    assert [point["task_index"] for point in panels[1]["points"]] == [1, 2, 3, 4] * 2


@pytest.mark.exhaustive
def test_the_scores_under_other_weights_are_a_table(parsed: Parsed) -> None:
    """Those with another block too, at both times: there was none yet when the first task was learnt."""
    head = "Task Routed, after Own adapter, after Other adapter, after Routed, end Own adapter, end Other adapter, end"
    assert f"{head} Politics 80.0 90.0 – 80.0 90.0 60.0 \nScience 80.0 90.0 55.0 80.0 90.0 60.0" in parsed.text
    rows = TABLES["gate"]
    without = rows[~rows["statistic"].isin(["own_adapter_score", "last_adapter_score"])]
    page = Parsed(learn_page({**TABLES, "gate": without}, learned.record()))
    assert "Politics 80.0 – – 80.0 – –" in page.text


def test_blocks_are_called_by_their_tasks_where_each_has_its_own(parsed: Parsed) -> None:
    assert parsed.data["gate"]["blocks"] == {"prescale": [f"adapter of {name}" for name in learned.TASKS]}
    assert "Each task has its own adapter: adapter 2 belongs to the second task." in parsed.text
    assert "Task Adapter" not in parsed.text
    assert "blocks[j]" in parsed.scripts[-1][1]


@pytest.mark.exhaustive
def test_blocks_that_tasks_share_are_called_by_their_numbers() -> None:
    """Three blocks for four tasks: the third task was given that of the first."""
    shared = learned.gate(TABLES["matrix"], given=(1, 2, 1, 3))
    page = Parsed(learn_page({**TABLES, "gate": shared}, learned.record()))
    found = page.data["gate"]
    assert found["blocks"] == {"prescale": ["adapter 1", "adapter 2", "adapter 3"]}
    assert found["cells"]["prescale"]["learning"][2] == [0.5, 0.5, None]
    assert found["cells"]["prescale"]["inference"][3] == [0.25, 0.25, 0.5]
    assert "may be shared by tasks (prescale): adapter 2 need not belong to the second task" in page.text
    assert "Task Adapter Routed, after" in page.text
    assert "Science 2 80.0" in page.text
    assert "Sports 1 80.0" in page.text
    assert "other methods" not in page.text


@pytest.mark.exhaustive
def test_a_block_for_each_task_need_not_be_its_own() -> None:
    """As many blocks as tasks, but of two runs one has them in another order; the other method has no such thing."""
    one, other = (learned.gate(TABLES["matrix"], given=given) for given in ((), (1, 3, 2, 4)))
    table = pd.concat([one[one["seed"] == 39], other[other["seed"] != 39], one.assign(method="finetune")])
    page = Parsed(learn_page({**TABLES, "gate": table}, learned.record()))
    assert page.data["gate"]["blocks"]["prescale"] == [f"adapter {number}" for number in (1, 2, 3, 4)]
    assert page.data["gate"]["blocks"]["finetune"][1] == "adapter of Science"
    assert "Science 2 or 3 80.0" in page.text
    assert "(prescale): adapter 2 need not belong" in page.text
    assert "With the other methods adapter 2 belongs to the second task." in page.text


def test_without_a_gate_there_is_no_such_section() -> None:
    page = Parsed(learn_page({**FEW, "gate": FEW["gate"].iloc[:0]}, learned.record()))
    assert "gate-title" not in ids(page)
    assert page.data["gate"] == {}


def test_pseudo_samples_are_a_table_and_dots_beside_forgetting(parsed: Parsed) -> None:
    """`prescale` loses a point with each later task: most of the first, whose samples are told apart the least."""
    assert "Politics 100 60.0 – – – – 0.010 – – 0.75 – 3.0" in parsed.text
    panels = parsed.data["panels"]["pseudo-dots"]
    assert [panel["caption"] for panel in panels] == [
        "Classifier accuracy against real texts",
        "Fréchet distance of query vectors",
    ]
    points = [(round(point["x"], 2), point["value"]) for point in panels[0]["points"]]
    assert points == [(0.6, 3.0), (0.7, 2.0), (0.8, 1.0)] * 3
    assert "r = −1.00" in panels[0]["note"]


@pytest.mark.exhaustive
def test_without_pseudo_samples_there_is_no_such_section(tmp_path: Path) -> None:
    """Nor where the table was saved without rows, and its columns have no type."""
    pd.DataFrame([], columns=TABLES["pseudo"].columns).to_parquet(tmp_path / "pseudo.parquet")
    saved = pd.read_parquet(tmp_path / "pseudo.parquet")
    for table in (TABLES["pseudo"].iloc[:0], saved, TABLES["pseudo"].assign(value=np.nan)):
        page = Parsed(learn_page({**TABLES, "pseudo": table}, learned.record()))
        assert not {"pseudo-title", "pseudo-dots"} & ids(page)
        assert "seudo samples" not in page.text
        assert "pseudo-dots" not in page.data["panels"]


@pytest.mark.exhaustive
def test_what_runs_warn_of_is_on_the_page_and_the_terminal() -> None:
    """All of it, or the first few."""
    one = {"method": "sapt", "seed": 39, "warnings": ["gate: the adapter of A got 0.01 of its rows' weight"]}
    record = learned.record(runs=[one, {"method": "sapt", "seed": 123}])
    told = "sapt, seed 39: gate: the adapter of A got 0.01 of its rows' weight"
    assert told in Parsed(learn_page(FEW, record)).text
    assert write_warnings(TABLES, record)[-1] == told
    many = [{**one, "warnings": [f"gate: {number}" for number in range(MAX_WARNINGS + 2)]}]
    assert write_warnings(TABLES, learned.record(runs=many))[-2:] == [
        f"sapt, seed 39: gate: {MAX_WARNINGS - 1}",
        "2 warnings more in results.json.",
    ]


@pytest.mark.parametrize(
    "rates, advice",
    [
        ({"finetune": 1e-3, "sapt": 3e-3}, "--learning-rate gives all the same."),
        ({"finetune": 3e-3, "sapt": 3e-3, "probe": 1e-2}, "probe keeps a rate of its own."),
        (
            {"finetune": 1e-3, "sapt": 3e-3, "probe": 1e-2, "ctr": 1e-2},
            "probe and ctr keep rates of their own. --learning-rate gives the others the same.",
        ),
    ],
)
def test_who_keeps_a_rate_of_its_own_is_named(rates: dict[str, float], advice: str) -> None:
    own = {name: {"own_rate": True} for name in ("probe", "ctr")}
    runs = [
        {"method": name, "seed": 39, "learning_rate": rate, "warnings": [], **own.get(name, {})}
        for name, rate in rates.items()
    ]
    note = next(note for note in write_warnings(TABLES, learned.record(runs=runs)) if "Learning rates" in note)
    assert note.endswith(f"). {advice}")


def test_methods_whose_adapters_are_in_other_layers_are_named() -> None:
    own: dict[str, dict[str, Any]] = {
        "sapt": {"target_modules": "all-linear", "r": 8},
        "epi": {"target_modules": "auto", "r": 8},
        "replay-lora": {"target_modules": "all-linear", "r": 8},
        "o-lora": {"target_modules": "q_proj", "r": 4},
        "osf": {"target_modules": "auto"},  # has no adapters
        "sapt-paper": {"target_modules": "auto", "r": 2, "adapter_type": "prompt"},
    }
    runs = [
        {"method": name, "seed": seed, "settings": of, "warnings": []} for name, of in own.items() for seed in (1, 2)
    ]
    (note,) = (note for note in write_warnings(TABLES, learned.record(runs=runs)) if "Layers" in note)
    assert note == (
        "Layers with adapters: all linear layers, rank 8 (sapt, replay-lora); queries and values, rank 8 (epi); "
        "q_proj, rank 4 (o-lora). --set target_modules and r, both, gives all the same."
    )
    alike = [run for run in runs if run["method"] in ("sapt", "replay-lora", "osf")]
    assert not any("Layers" in note for note in write_warnings(TABLES, learned.record(runs=alike)))


def test_every_method_and_task_that_was_not_learnt_is_named_once() -> None:
    names = [f"t{number}" for number in range(8)]

    def run(method: str, seed: int, *tasks: str) -> dict[str, Any]:
        said = ["scores: no better than chance"] if tasks else []
        return {"method": method, "seed": seed, "not_learnt": list(tasks), "warnings": [*said, "gate: closed"]}

    runs = [run("finetune", 39, *names), run("finetune", 123, *names[1:]), run("joint", 39, "t3"), run("sapt", 39)]
    notes = write_warnings(TABLES, learned.record(runs=runs))
    assert notes[-5:] == [
        "Not learnt, no better than the most frequent label, or 0, right after training: finetune: t0 (1 of 2 runs), "
        f"{', '.join(names[1:])}; joint: t3. Try more epochs or another learning rate.",
        "finetune, seed 39: gate: closed",
        "finetune, seed 123: gate: closed",
        "joint, seed 39: gate: closed",
        "sapt, seed 39: gate: closed",
    ]


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "metrics, told",
    [((None,), "Accuracy"), (("rouge-l",), "Rouge-L"), (("exact-match",), "Exact match"), (("rouge-l", None), "Score")],
)
def test_the_matrix_says_what_tasks_are_scored_by(metrics: tuple[str | None, ...], told: str) -> None:
    stream = {"name": "said", "tasks": [{"name": str(n), "metric": one} for n, one in enumerate(metrics)]}
    page = Parsed(learn_page(FEW, learned.record(stream=stream)))
    assert f"{told} matrix{told} in per cent" in page.text


# -- matrix and curves


def test_matrices_are_the_scores_and_their_means(parsed: Parsed) -> None:
    found = parsed.data["matrix"]
    assert (found["afters"]["til"], found["afters"]["cil"]) == ([0, 1, 2, 3, 4], [1, 2, 3, 4])
    assert found["cells"]["til"]["finetune"][MEAN][3] == [pytest.approx(v) for v in (80.1, 88.1, 96.1, 50.0)]
    assert found["cells"]["til"]["finetune"]["seed 508"][4] == [pytest.approx(v) for v in (72.2, 80.2, 88.2, 96.2)]
    assert found["cells"]["cil"]["prescale"]["seed 39"][0] == [76.0, None, None, None]
    assert found["cells"]["til"]["joint"][MEAN][:4] == [[None] * 4] * 4
    assert found["low"] == {"til": 50, "cil": 50}
    assert found["tasks"][MEAN] == list(learned.TASKS)


def test_fields_offer_methods_runs_and_settings(parsed: Parsed) -> None:
    assert options(parsed, "matrix-method") == list(learned.METHODS)
    assert options(parsed, "matrix-run") == [MEAN, "seed 39", "seed 123", "seed 508"]
    assert options(parsed, "matrix-setting") == ["til", "cil"]
    chosen = [attributes["value"] for tag, attributes in parsed.tags if tag == "option" and "selected" in attributes]
    assert chosen[:2] == ["prescale", "finetune"]


@pytest.mark.exhaustive
def test_where_orders_differ_means_are_by_place() -> None:
    scores = learned.matrix(orders=True)
    page = Parsed(learn_page(learned.tables(scores), learned.record()))
    found = page.data["matrix"]["tasks"]
    assert found[MEAN] == ["Task 1", "Task 2", "Task 3", "Task 4"]
    assert found["seed 123, order 1-2-3-0"] == ["Science", "Sports", "Health", "Politics"]
    assert "Orders differ between runs: the mean is by position in the stream." in page.text
    assert "3 orders" in page.text
    assert [panel["caption"] for panel in page.data["curves"]["til"]][2:] == ["Task 1", "Task 2", "Task 3"]
    assert not has_one_order(scores)
    assert task_names(scores[scores["seed"] == 508]) == ["Sports", "Health", "Politics", "Science"]


def test_bands_end_where_scores_do() -> None:
    """With two seeds an interval is often wider than all scores that there are."""
    scores = learned.matrix(("finetune",), (39, 123), settings=("til",))
    scores["score"] += 20 * (scores["seed"] == 39) - 10
    panels = Parsed(learn_page(learned.tables(scores), learned.record())).data["curves"]["til"]
    for panel, least in zip(panels, (0, -100, *[0] * 9), strict=False):
        assert all(least <= point["low"] <= point["value"] <= point["high"] <= 100 for point in panel["points"])
    assert {(point["low"], point["high"]) for point in panels[2]["points"]} == {(0, 100)}


def test_curves_are_means_over_runs(parsed: Parsed) -> None:
    captions = [panel["caption"] for panel in parsed.data["curves"]["til"]]
    assert captions == ["Mean over tasks trained so far", "Forgotten so far", *learned.TASKS[:-1]]
    assert line(parsed, "til", 0, "finetune") == pytest.approx({1: 96.1, 2: 92.1, 3: 88.1, 4: 84.1})
    assert line(parsed, "til", 1, "finetune") == pytest.approx({2: 8, 3: 12, 4: 16})
    assert line(parsed, "til", 3, "prescale") == pytest.approx({2: 96.1, 3: 95.1, 4: 94.1})
    assert line(parsed, "cil", 0, "joint") == pytest.approx({4: 76.1})
    first = parsed.data["curves"]["til"][0]["points"][0]
    assert first["high"] - first["value"] == pytest.approx(half(0, 0.1, 0.2), rel=5e-3)


@pytest.mark.exhaustive
def test_unfinished_runs_are_warned_of() -> None:
    scores = TABLES["matrix"].query("not (method == 'prescale' and seed == 123 and after_task > 2)")
    assert find_unfinished_runs(scores) == [("prescale", 123, 2)]
    page = Parsed(learn_page({**TABLES, "matrix": scores}, learned.record()))
    assert "1 run without a score after the last task (tasks trained): prescale with seed 123 (2)." in page.text


@pytest.mark.exhaustive
def test_other_seeds_and_kept_overlaps_are_warned_of(parsed: Parsed) -> None:
    scores = TABLES["matrix"].query("not (method == 'prescale' and seed == 123)")
    record = learned.record()
    record["stream"]["protocol"] = "paper"
    record["stream"]["overlaps"] = {"mood": {"texts_with_several_labels": 3}, "topics": {"train_near_test": 4}}
    five = {"a": 1, "b": 2, "c": 0, "d": 3, "e": 4, "f": 5}
    record["stream"] |= {"left_out": five, "minus_one": {"mood": 5}}
    page = Parsed(learn_page({**TABLES, "matrix": scores}, record))
    assert (
        "Rows without a label or a text, which were left out: 1 of a, 2 of b, 3 of d and 9 of 2 other tasks."
        in page.text
    )
    assert "Rows with the label -1, taken as a class, which may mark rows without a label: 5 of mood." in page.text
    assert "Texts with several labels, of which one at most is right: 3 of mood." in page.text
    assert "Training rows that differ from a test row in punctuation or signs alone: 4 of topics." in page.text
    assert "The methods were not run with the same seeds and orders." in page.text
    assert "Protocol paper: splits may share rows, and dev may be the test split" in page.text
    assert "warning" not in {attributes.get("class") for _, attributes in parsed.tags}


def test_rows_that_are_also_held_out_are_told_where_they_are_dropped() -> None:
    counts = {"mood": {"dropped_from_train": 12, "dropped_from_dev": 0}, "topics": {"dropped_from_dev": 1}}
    assert describe_rows({"protocol": "clean", "overlaps": counts}) == [
        "Training rows left out, whose text is there twice, or in dev or test of a task: 12 of mood.",
        "Dev rows left out, whose text is there twice, or in test of a task: 1 of topics.",
    ]


def test_rows_that_a_scale_leaves_unused_are_told() -> None:
    available = {"mood": {"train": {"calm": 70, "loud": 9}, "dev": {"calm": 500}, "test": {"calm": 300}}}
    drawn = {"mood": {"train": {"calm": 60, "loud": 9}, "dev": {"calm": 100}, "test": {"calm": 100}}}
    stream = {"available": available, "drawn": drawn, "rows": {"mood": 60}, "eval_rows": 100}
    assert describe_rows(stream) == [
        "Training rows beyond --samples-per-class 60, not used: 10 of mood.",
        "Test rows beyond --max-eval-samples 100, not scored: 200 of mood.",
    ]
    assert describe_rows({**stream, "drawn": available}) == []
    had = {"train": {"x": 9}, "test": {"x": 9}}
    several = {
        "available": {"a": had, "b": had, "c": had},
        "drawn": {"a": {"train": {"x": 3}, "test": {"x": 5}}, "b": {"train": {"x": 4}, "test": {"x": 6}}, "c": had},
        **{"rows": {"a": 3, "b": 4, "c": None}, "eval_rows": None},  # that of the first of several streams
    }
    assert describe_rows(several) == [
        "Training rows beyond --samples-per-class, not used: 6 of a, 5 of b.",
        "Test rows beyond --max-eval-samples, not scored: 4 of a, 3 of b.",
    ]


@pytest.mark.exhaustive
def test_many_methods_have_no_bands_and_many_tasks_not_all_panels() -> None:
    many = learned.matrix([f"m{i}" for i in range(20)], (1, 2, 3), [f"t{i}" for i in range(16)], ("til",))
    page = Parsed(learn_page(learned.tables(many), {}))
    panels = page.data["curves"]["til"]
    assert len(panels) == 2 + MAX_TASK_PANELS
    assert (panels[2]["caption"], panels[-1]["caption"]) == ("t0", "t14")
    assert {point["low"] for panel in panels for point in panel["points"]} == {None}
    assert "12 of the 15 old tasks are drawn" in page.text
    assert "Only the first 18 of 20 methods are drawn." in page.text
    assert len(page.data["matrix"]["cells"]["til"]) == 20


@pytest.mark.exhaustive
def test_a_large_comparison_keeps_the_means_only() -> None:
    tasks = 40
    runs = MAX_NUMBERS // (tasks * (tasks + 1)) + 1
    places = [(seed, place) for seed in range(runs) for place in range(1, tasks + 1)]
    rows = [("s", "m", seed, "0", tasks, place, str(place), "til", 90.0, 10) for seed, place in places]
    found = make_matrix_data(pd.DataFrame(rows, columns=TABLES["matrix"].columns))
    assert found["runs"] == [MEAN]
    assert list(found["cells"]["til"]["m"]) == [MEAN]
    assert make_matrix_data(TABLES["matrix"])["runs"][1:] == ["seed 39", "seed 123", "seed 508"]


# -- numbers


def test_tables_are_sorted_by_ap_with_intervals(parsed: Parsed) -> None:
    width = format_fixed(half(0, 0.1, 0.2))
    order = [f"joint all tasks at once 3 96.10 ± {width} –", f"prescale 3 94.60 ± {width} 2.00 ± 0.00"]
    places = [parsed.text.index(row) for row in [*order, f"finetune 3 84.10 ± {width} 16.00 ± 0.00"]]
    assert places == sorted(places)
    assert "Method Runs AP FGT Learning accuracy" in parsed.text
    assert "Lower is better: FGT." in parsed.text


def test_differences_stand_against_the_first_method(parsed: Parsed) -> None:
    assert "Method Difference 95 % interval p" in parsed.text
    assert "prescale +10.50 +10.00 to +11.00 0.010 higher" in parsed.text
    assert "prescale −14.00 −14.50 to −13.50 0.010 lower" in parsed.text
    assert (
        "Difference from finetune in points, paired by run (same seed and order). 95 % intervals from 3 pairs"
        in parsed.text
    )
    assert "Learning accuracy, TIL" in parsed.text[parsed.text.index("FGT, CIL") :]


@pytest.mark.exhaustive
def test_corrected_tests_are_told_where_there_are_some() -> None:
    table = TABLES["differences"].assign(t_test_holm=0.0321)
    page = Parsed(learn_page({**TABLES, "differences": table}, learned.record()))
    assert "95 % interval p, t-test, Holm" in page.text
    assert "0.032 higher" in page.text
    uncertain = Parsed(learn_page({**TABLES, "differences": table.assign(t_test_holm=0.0521)}, learned.record()))
    assert "0.052 higher before correction" in uncertain.text
    more = pd.concat([TABLES["differences"], TABLES["differences"].assign(against="prescale")])
    assert find_baseline(more, learned.METHODS) == "finetune"


@pytest.mark.exhaustive
def test_one_run_has_no_intervals() -> None:
    scores = learned.matrix(seeds=(7,))
    table = TABLES["differences"].assign(n=1, ci_low=np.nan, ci_high=np.nan, t_test_holm=np.nan, overlaps=None)
    page = Parsed(learn_page({**learned.tables(scores), "differences": table}, learned.record()))
    assert "One run of each method: there are no intervals" in page.text
    assert "there are no intervals, so this may be chance" in page.text
    assert "prescale +10.50 – – no interval" in page.text
    assert page.data["curves"]["til"][0]["points"][0]["low"] is None
    assert options(page, "matrix-run") == ["seed 7"]


def test_runs_are_dots_of_ap_over_fgt(parsed: Parsed) -> None:
    panel = parsed.data["panels"]["metrics-dots"][0]
    found = {(point["series"], point["what"]): (point["x"], point["value"]) for point in panel["points"]}
    assert found["prescale", "seed 508"] == (2.0, pytest.approx(94.7))
    assert len(found) == 6
    assert "TIL" in panel["note"]


def test_examples_a_second_are_those_of_the_whole_run() -> None:
    """Not the mean of its tasks, of which a short one may be slow."""
    cost = TABLES["cost"].query("method == 'finetune' and seed == 39").head(2)
    cost = cost.assign(seconds=[1.0, 100.0], examples_per_second=[10.0, 1000.0])
    assert sum_costs(cost)["examples_per_second"].item() == pytest.approx((10 + 100_000) / 101)


def test_cost_stands_beside_the_score(parsed: Parsed) -> None:
    found = sum_costs(TABLES["cost"])
    assert found.loc["prescale"].tolist() == [80, 16, 4, 2, 1, 8e12, 840, 4 * 2**20, 0, 32, 96]
    assert found.loc["finetune"].tolist() == [40, 8, 4, 2, 1, 8e12, 840, 0, 0, 64, 48]
    assert "1 min 36 s 16.0 s 4.00 s 2.00 s 1.00 s 8.00 840 4.00 MiB 0 32.0" in parsed.text
    assert "48.0 s 8.00 s 4.00 s 2.00 s 1.00 s 8.00 840 0 B 0 64.0" in parsed.text
    times, kept = parsed.data["panels"]["cost-dots"]
    assert {point["series"]: point["x"] for point in times["points"]} == {"finetune": 48, "prescale": 96, "joint": 48}
    assert {point["series"]: point["x"] for point in kept["points"]}["prescale"] == 4


@pytest.mark.exhaustive
def test_unknown_costs_stay_unknown() -> None:
    found = sum_costs(TABLES["cost"].assign(flops=None))
    assert found["flops"].isna().all()
    page = Parsed(learn_page({**TABLES, "cost": TABLES["cost"].assign(flops=None)}, learned.record()))
    assert "1 min 36 s 16.0 s 4.00 s 2.00 s 1.00 s – 840" in page.text
    page = Parsed(learn_page({**TABLES, "cost": TABLES["cost"].drop(columns="hook_seconds")}, learned.record()))
    assert "1 min 20 s – 4.00 s 2.00 s 1.00 s 8.00 840" in page.text


def test_the_note_on_costs_says_what_they_leave_out(parsed: Parsed) -> None:
    assert "FLOPs and examples/s cover training steps, including gradient correction." in parsed.text
    assert "Computation before an answer (mbpa++ adapts itself to each text) is in no column." in parsed.text
    assert "On the CPU it is the peak of the process so far" in parsed.text
    assert "so methods of one process inherit it" in parsed.text
    assert "Time covers training and the method’s work before and after it" in parsed.text
    assert "vectors, densities and texts made of rows count as Stored only" in parsed.text


@pytest.mark.exhaustive
def test_zero_shot_is_told_as_it_is_computed() -> None:
    """Of two tasks the second one alone counts, less 50 for its two classes."""
    scores = learned.matrix(("prescale",), (39,), ("first", "second"), ("til",))
    found = metrics_table(scores.assign(order="0-1"), initial={"first": 50.0, "second": 50.0})
    before = scores.query("after_task == 1 and task_index == 2")["score"].item()
    assert found.set_index("metric").loc["zero_shot_transfer", "value"] == before - 50
    about = METRICS["zero_shot_transfer"].description
    assert about.startswith("mean score of all tasks but the first, each just before its training, minus chance")
    assert "100 divided by the number of its classes, or 0 for generated answers" in about
    summary = pd.concat([TABLES["summary"], TABLES["summary"].assign(metric="zero_shot_transfer")])
    assert about in Parsed(learn_page({**TABLES, "summary": summary}, learned.record())).text


# -- diagnostics and interference


def test_diagnostics_are_means_before_and_after(parsed: Parsed) -> None:
    found = parsed.data["diagnostics"]
    assert found["tasks"] == ["mean over tasks", *learned.TASKS]
    assert found["layers"] == [0, 1, 2]
    assert found["values"]["over_smoothing"]["finetune"]["Sports"] == {"before": [1, 2, 3], "after": [3, 6, 9]}
    assert list(found["statistics"].values()) == ["Sink deviation", "Over-smoothing"]
    assert options(parsed, "diagnostics-method") == ["", *learned.METHODS]


def test_forgetting_stands_over_what_was_measured_when_learnt(parsed: Parsed) -> None:
    smooth = parsed.data["panels"]["beside-dots"][1]
    found = {(point["series"], point["what"]): (point["x"], point["value"]) for point in smooth["points"]}
    assert found["finetune", "Politics, seed 39"] == (25, 24)
    assert found["prescale", "Sports, seed 508"] == (2, 1)
    assert len(found) == 2 * 3 * 3
    assert smooth["note"] == "points forgotten by the end, r = 1.00 over 18 dots, 1.00 within methods"


def test_interference_is_symmetric(parsed: Parsed) -> None:
    found = parsed.data["interference"]
    square = found["cells"]["prescale"]["4"]
    assert square[0][3] == square[3][0] == [pytest.approx(-0.3), pytest.approx(-2.1)]
    assert square[1][1] == [1, 7]
    assert found["top"] == 0.3
    assert options(parsed, "interference-after") == ["4"]


# -- the record


@pytest.mark.exhaustive
def test_stream_settings_and_command_are_told(parsed: Parsed) -> None:
    wanted = ("train0ababab", "name minilm\n", "22,713,216", "finetune, seed 39, order 2-0-1-3\n")
    for text in wanted:
        assert text in parsed.text
    line = (
        "regard learn yahoo-split --method finetune,prescale,joint --model minilm --seeds 39,123,508 --protocol clean"
    )
    assert line in parsed.text
    page = Parsed(learn_page(FEW, learned.record(command_line="regard learn x --order 1")))
    assert "regard learn x --order 1" in page.text
    assert line not in page.text


SIZES = {"train": 41, "dev": 10, "test": 10}
APART = {
    **{"identical": True, "dev_in_test": 10, "train_in_test": 1, "train_in_dev": 1, "published": SIZES, "paper": SIZES},
    **{"clean": {"train": 36, "dev": 4, "test": 10}, "dropped": 1, "evaluated": "the test file"},
}
ALIKE = {**APART, "identical": None, "dev_in_test": 0, "train_in_test": 0, "clean": SIZES, "dropped": 0}


def with_protocols(**told: Any) -> dict[str, Any]:
    record = learned.record()
    record["stream"]["protocols"] = told
    return record


@pytest.mark.exhaustive
def test_what_the_protocols_differ_in_is_a_table_of_the_tasks_in_which_they_do() -> None:
    text = Parsed(learn_page(FEW, with_protocols(one=APART, two=ALIKE, three=APART))).text
    same = "tested on the test file identical files 10 1 1 41, 10, 10 36, 4, 10 1 \n"
    assert f"one {same}" in text
    assert f"three {same}" in text
    assert "two tested" not in text
    assert "all 3 tasks 2 of 2 the same 20 2 3 123, 30, 30 113, 18, 30 2 \n" in text
    assert_self_contained(Parsed(learn_page(FEW, with_protocols(one=APART))))
    assert_accessible(Parsed(learn_page(FEW, with_protocols(one=APART))))


@pytest.mark.exhaustive
def test_protocols_that_are_alike_or_not_known_are_no_table() -> None:
    for record in (learned.record(), with_protocols(), with_protocols(two=ALIKE), with_protocols(two=None)):
        assert "Protocols" not in Parsed(learn_page(FEW, record)).text


@pytest.mark.exhaustive
def test_what_clean_refuses_has_no_numbers() -> None:
    refused = {**APART, "identical": False, "clean": None, "dropped": None}
    text = Parsed(learn_page(FEW, with_protocols(one=refused))).text
    assert "tested on the test file two files 10 1 1 41, 10, 10 – –" in text
    assert "Clean refuses this stream" in text


def test_settings_and_stream_read_as_text_alone(parsed: Parsed) -> None:
    """Names, values and cells do not run together."""
    task = "Politics published files 2: Politics 0, Politics 1 2,490 200 1,000 train0ababab"
    assert task in parsed.text
    assert "\nname yahoo-split\nprotocol clean\noverlaps \ntrain, test 17\n" in parsed.text
    assert "epochs 3\nbatch size 32\nlearning rate 2e-05\nmax length 128\n" in parsed.text


def test_hostile_texts_are_escaped() -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    scores = learned.matrix((evil, "prescale"), tasks=(evil, "other"))
    record = learned.record(command=f"regard learn {evil}", course={evil: evil})
    record["stream"]["tasks"][0] |= {"name": evil, "labels": [evil], "source": evil, "sha256": {"train": evil}}
    record["stream"]["name"] = evil
    tables = learned.tables(scores)
    tables["summary"] = pd.concat([tables["summary"], tables["summary"].assign(metric=evil)])
    page = Parsed(learn_page(tables, record))
    assert_self_contained(page)
    assert [attributes.get("id") for attributes, _ in page.scripts] == ["regard-data", None, None]
    assert "img" not in {tag for tag, _ in page.tags}
    assert options(page, "matrix-method") == [evil, "prescale"]
    assert page.text.count(evil) >= 10


# -- what may be missing


@pytest.mark.exhaustive
def test_scores_and_their_means_are_enough() -> None:
    needed = ("matrix", "metrics", "summary")
    tables = {name: table if name in needed else table.iloc[:0] for name, table in TABLES.items()}
    page = Parsed(learn_page(tables, {}))
    assert_self_contained(page)
    parts = ("differences", "cost", "diagnostics", "beside", "interference", "stream", "settings")
    assert not {f"{part}-title" for part in parts} & ids(page)
    assert "regard learn yahoo-split --method finetune,prescale,joint --seeds 39,123,508" in page.text


@pytest.mark.parametrize(
    "points, told",
    [
        ((-14.93, 16.0), ["a gains most on earlier tasks, 14.93 points", "b forgets most, 16.00 points"]),
        (
            (-14.93, -1.0),
            ["a gains most on earlier tasks, 14.93 points", "b gains least on earlier tasks, 1.00 points"],
        ),
        ((-6.25, 0.0), ["a gains most on earlier tasks, 6.25 points", "b forgets 0.00 points"]),
        ((2.0, 16.0), ["a forgets least, 2.00 points", "b forgets most, 16.00 points"]),
        ((-0.001, 0.5), ["a forgets least, 0.00 points", "b forgets most, 0.50 points"]),
    ],
)
def test_forgetting_of_less_than_nothing_is_a_gain(points: tuple[float, float], told: list[str]) -> None:
    estimates = {name: Estimate(1, mean, math.nan, math.nan) for name, mean in zip("ab", points, strict=True)}
    assert compare_forgetting(["b", "a"], estimates) == told


@pytest.mark.parametrize("half, told", [(2.0, "do not overlap"), (7.0, "overlap")])
def test_forgetting_says_whether_intervals_overlap(half: float, told: str) -> None:
    estimates = {name: Estimate(3, mean, mean - half, mean + half) for name, mean in (("a", -6.0), ("b", 5.0))}
    assert compare_forgetting(["b", "a"], estimates)[-1] == f"the 95 % intervals {told}"


def test_what_is_the_same_in_all_runs_has_no_interval_that_could_not_overlap() -> None:
    estimates = {name: Estimate(2, mean, mean, mean) for name, mean in (("a", -6.0), ("b", 5.0))}
    assert "may be chance" in compare_forgetting(["b", "a"], estimates)[-1]


@pytest.mark.exhaustive
def test_one_task_forgets_nothing() -> None:
    scores = learned.matrix(tasks=("only",), settings=("til",))
    page = Parsed(learn_page(learned.tables(scores), {}))
    assert [panel["caption"] for panel in page.data["curves"]["til"]] == ["Mean over tasks trained so far"]
    assert "beside-dots" not in page.data["panels"]
    assert "forgets" not in page.text
    assert "1 task ·" in page.text


@needs_node
def test_labels_of_long_names_lose_their_middle() -> None:
    """Names of tasks often differ at their ends alone, which Vega would cut."""
    tasks = tuple(f"which library is documented here, of {count}" for count in ("three", "four"))
    tables = learned.tables(learned.matrix(("finetune",), (39,), tasks, ("til",)))
    figures = draw(learn_page(tables, learned.record()))["start"]
    spec = next(figure["spec"] for figure in figures if figure["place"] == "matrix-grids")
    drawn = vl_convert.vegalite_to_svg({**spec, "config": {}})
    assert all(label in drawn for label in (">which…re, of three<", ">which…ere, of four<"))


def test_rows_of_several_seeds_are_told_to_be_those_of_the_first(parsed: Parsed) -> None:
    first = TABLES["matrix"]["seed"].iloc[0]
    told = "Rows, hashes and overlaps of the runs with seed"
    assert f"{told} {first};" in parsed.text
    alone = learned.tables(learned.matrix(("finetune",), (39,), learned.TASKS[:2], ("til",)))
    assert told not in Parsed(learn_page(alone, learned.record())).text
