"""`regard compare` with runs of learn, replace and pretrain: what differs in settings, and the main figures."""

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from regard.commands.compare.comparison import (
    compare_figures,
    compare_settings,
    list_notes,
    make_page,
)
from regard.commands.compare.curves import compare_tasks, make_curves
from regard.commands.compare.terminal import split_columns, terminal_table
from regard.commands.convert.result import ConvertResult
from regard.commands.learn.result import LearnResult
from regard.commands.learn.run import learn
from regard.commands.pretrain.result import PretrainResult, final_metrics
from regard.commands.replace.result import ReplaceResult
from regard.data.user_tasks import read_user_tasks
from regard.report.labels import number
from tests.commands.learn.learn_runs import FIELDS
from tests.commands.pretrain import pretrain_run
from tests.commands.replace import replaced_run
from tests.continual.small_tasks import loaded, stream

Regard = Callable[..., Any]


def notes_of(runs: Any, settings: pd.DataFrame | None = None) -> list[str]:
    """The notes on runs, without settings that differ if none are given."""
    return list_notes(runs, pd.DataFrame(columns=["setting"]) if settings is None else settings, compare_figures(runs))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of probing, and one with twice the epochs and more rows, and their figures."""
    folder = tmp_path_factory.mktemp("runs")
    fields = {**FIELDS, "diagnostic_samples": 0, "probing_learning_rate": 5e-2}
    for name, options in {"short": {}, "long": {"num_probing_epochs": 4}}.items():
        result = learn(stream(), ["probe"], loaded(), seeds=[1, 2], **{**fields, **options})
        if name == "long":  # the toy model answers alike after one epoch and after four
            result.accuracy_matrix["score"] += 2.0 * result.accuracy_matrix["seed"]
        result.save(folder / name)
    return folder


def test_settings_that_differ_and_main_figures_are_shown(runs: Path, regard: Regard, tmp_path: Path) -> None:
    ended = regard("compare", runs / "short", runs / "long", "--out", "page.html")
    assert (ended.code, ended.err) == (0, "")
    found = {name: LearnResult.load(runs / name) for name in ("short", "long")}
    table = compare_settings(found)
    epochs = [str(run.metadata["config"]["num_probing_epochs"]) for run in found.values()]
    assert table.to_dict("records") == [{"setting": "num_probing_epochs", "short": epochs[0], "long": epochs[1]}]
    figures = compare_figures(found).set_index("figure")
    name = "probe, average_performance til"
    last = [
        run.accuracy_matrix.query("after_task == 3 and scenario == 'til'")["score"].mean() for run in found.values()
    ]
    assert figures.loc[name, ["short", "long"]].tolist() == pytest.approx(last)
    assert figures.loc[name, "difference"] == pytest.approx(last[1] - last[0])
    assert last[1] - last[0] == pytest.approx(3.0)
    assert figures.loc[name, "±"] > 0
    (line,) = [line for line in ended.out.splitlines() if line.startswith(name)]
    numbers = [float(word) for word in line.removeprefix(name).split()]
    assert numbers == pytest.approx([*last, last[1] - last[0], figures.loc[name, "±"]], rel=1e-3)
    assert "num_probing_epochs" in ended.out
    assert "note: difference is long − short" in ended.out
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "short against long" in page
    assert "num_probing_epochs" in page
    assert "Curves" in page
    assert "short: probe" in page
    assert "Figures are means over seeds" in page
    assert "Difference is long − short." in page
    assert f"<td>{number(figures.loc[name, 'difference'])}</td>" in page


def test_each_of_many_runs_differs_from_the_first() -> None:
    scores = replaced_run.scores()
    by_seed = 1 + 1e-6 * scores["seed"].rank(method="dense")  # equal differences would have no interval
    runs = {
        name: ReplaceResult(
            scores.assign(score=scores["score"] + plus * by_seed), replaced_run.heads(), pd.DataFrame(), {}
        )
        for name, plus in (("a", 0.0), ("b", 0.25), ("c", -1.0))
    }
    table = compare_figures(runs).set_index("figure")
    assert list(table.columns) == ["a", "b", "c", "b − a", "± b", "c − a", "± c"]
    assert table["b − a"].to_list() == pytest.approx([0.25] * len(table), rel=1e-5)
    assert table["c − a"].to_list() == pytest.approx([-1.0] * len(table), rel=1e-5)
    assert table["± b"].dropna().to_list() == pytest.approx([0.0] * table["± b"].notna().sum(), abs=1e-5)


def test_a_checksum_is_shown_where_nothing_else_says_what_differs() -> None:
    def run(**stream: Any) -> Any:
        return ReplaceResult(replaced_run.scores(), replaced_run.heads(), pd.DataFrame(), {"stream": stream})

    first, second = {"sha256": "a" * 64}, {"sha256": "b" * 64}
    assert compare_settings({"a": run(rows=3, **first), "b": run(rows=3, **second)})["setting"].to_list() == [
        "stream.sha256"
    ]
    assert compare_settings({"a": run(rows=3, **first), "b": run(rows=4, **second)})["setting"].to_list() == [
        "stream.rows"
    ]


def test_curves_of_pre_training_stand_over_each_other(regard: Regard, tmp_path: Path) -> None:
    history = pretrain_run.history()
    for name in ("one", "two"):
        metadata = pretrain_run.record() | {"final": final_metrics(history)}
        PretrainResult(history, pretrain_run.sinks(), metadata).save(tmp_path / name)
    ended = regard("compare", tmp_path / "one", tmp_path / "two", "--out", "page.html")
    assert (ended.code, ended.err) == (0, "")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(caption in page for caption in ("Validation loss", "Sink rate", "Attention on the first token"))


def test_scores_by_fraction_stand_over_each_other_for_shared_tasks() -> None:
    """A line a run, constants and order; of tasks that two runs have."""
    one = ReplaceResult(replaced_run.scores(tasks=("cola", "sst2")), replaced_run.heads(), pd.DataFrame(), {})
    two = ReplaceResult(
        replaced_run.scores(sources=("average",), orders=("lambda",), tasks=("cola",)),
        replaced_run.heads(),
        pd.DataFrame(),
        {},
    )
    (panel,) = make_curves({"one": one, "two": two})
    assert panel["caption"] == "cola"
    lines = {point["series"] for point in panel["points"]}
    assert lines == {"one: average, lambda", "one: average, random", "one: identity, lambda", "two: average, lambda"}
    expected = two.scores.query("constants == 'average' and dynamic_fraction == 0.5")["score"].mean()
    assert any(point["value"] == pytest.approx(expected, abs=1e-3) for point in panel["points"])
    assert make_curves({"one": one, "trained": PretrainResult(pd.DataFrame(), pd.DataFrame(), {})}) == []


def test_the_last_scores_of_tasks_stand_beside_each_other(runs: Path) -> None:
    found = {name: LearnResult.load(runs / name) for name in ("short", "long")}
    table = compare_tasks(found)
    assert list(table["task"]) == list(dict.fromkeys(found["short"].accuracy_matrix["task"]))
    scenario = "cil"
    for index, (name, run) in enumerate(found.items()):
        matrix = run.accuracy_matrix[run.accuracy_matrix["scenario"] == scenario]
        last = matrix[matrix["after_task"] == matrix["after_task"].max()]
        assert table.iloc[:, index + 1].to_list() == pytest.approx(last.groupby("task", sort=False)["score"].mean())
        assert table.columns[index + 1].startswith(f"{name}: ")
    assert table["difference"].to_list() == pytest.approx((table.iloc[:, 2] - table.iloc[:, 1]).to_list())
    assert compare_tasks({"a": PretrainResult(pd.DataFrame(), pd.DataFrame(), {})}).empty


def test_tasks_are_compared_in_a_scenario_that_all_runs_have(runs: Path) -> None:
    """A run that has been scored with its tasks known alone is not set against the classes of all tasks."""
    both = {name: LearnResult.load(runs / name) for name in ("short", "long")}
    matrix = both["long"].accuracy_matrix
    til = replace(both["long"], accuracy_matrix=matrix[matrix["scenario"] == "til"])
    table = compare_tasks({"short": both["short"], "long": til})
    assert all(column.endswith("(TIL)") for column in table.columns[1:3])
    named = matrix[matrix["scenario"] == "til"].assign(method="named")
    table = compare_tasks({"a": both["short"], "b": replace(both["long"], accuracy_matrix=pd.concat([matrix, named]))})
    assert "b: named (TIL)" in table.columns, "a method that answers with the task named alone is not left out"


def test_conversions_are_compared_stage_by_stage() -> None:
    history = pd.DataFrame({"stage": ["layers", "model"], "step": [1, 1], "loss": [0.5, 3.0], "valid_loss": [4.0, 3.5]})
    stages = pd.DataFrame({"stage": ["untouched", "model"], "loss": [3.0, 3.5]})
    run = ConvertResult(stages, pd.DataFrame(), history, {"config": {"seed": 2}})
    panels = make_curves({"a": run, "b": run})
    assert [panel["caption"] for panel in panels] == [
        *("layers: training", "layers: validation loss", "model: training", "model: validation loss"),
    ]
    assert run.main_figures() == {"loss, untouched": 3.0, "loss, model": 3.5}
    assert "one seed each" in notes_of({"a": run, "b": run})[-1]


def test_runs_of_another_command_are_refused(runs: Path, regard: Regard, tmp_path: Path) -> None:
    scores, heads = replaced_run.scores(), replaced_run.heads()
    config = {"config": {"rank_heads_by": ["lambda"]}, "command": "replace", "schema_version": 0}
    other = ReplaceResult(scores, heads, pd.DataFrame(), config)
    assert "none, none, 1.0" in " ".join(other.main_figures())
    assert regard("compare", runs / "short", tmp_path / "nothing").complaint.startswith("regard compare: no run in ")
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "sweep.json").write_text("{}")
    complaint = regard("compare", runs / "short", tmp_path / "swept").complaint
    assert complaint.endswith(f"; this one is of a sweep, whose runs are in {tmp_path / 'swept' / 'trials'}")
    complaint = regard("compare", tmp_path / "swept").complaint
    assert complaint.startswith("regard compare: expected at least two runs to compare, got 1: ")
    assert complaint.endswith(
        f"swept is a sweep; {tmp_path / 'swept' / 'trials'}/*/ are its runs, and its report.html compares them"
    )  # beside them are files of each


def test_figures_of_other_commands_are_their_means_or_last_values() -> None:
    scores = replaced_run.scores()
    result = ReplaceResult(scores, replaced_run.heads(), pd.DataFrame(), {})
    expected = scores.query("task == 'cola' and constants == 'identity' and dynamic_fraction == 0.5")["score"].mean()
    assert result.main_figures()["cola, mcc, identity, lambda, 0.5"] == pytest.approx(expected)
    history = pretrain_run.history()
    trained = PretrainResult(history, pd.DataFrame(), {"final": final_metrics(history)})
    assert trained.main_figures()["valid_loss"] == history["valid_loss"].iloc[-1]
    assert "one seed each" in notes_of({"a": trained, "b": trained})[-1]
    assert "means over seeds" in notes_of({"a": result, "b": result})[-1]
    assert "±: half" in notes_of({"a": result, "b": result})[-1]
    one_seed = ReplaceResult(scores[scores["seed"] == scores["seed"].iloc[0]], replaced_run.heads(), pd.DataFrame(), {})
    assert "±" not in notes_of({"a": one_seed, "b": one_seed})[-1]


def test_orders_of_heads_do_not_part_scores_without_dynamic_heads() -> None:
    """All heads are constant: two runs with other rankings have the same model there, which was not compared."""
    runs = {
        order: ReplaceResult(replaced_run.scores(orders=(order,)), replaced_run.heads(), pd.DataFrame(), {})
        for order in ("lambda", "random")
    }
    table = compare_figures(runs).set_index("figure")
    means = {
        name: run.scores.groupby(["task", "constants", "dynamic_fraction"])["score"].mean()
        for name, run in runs.items()
    }
    row = table.loc["cola, mcc, average, any order, 0.0"]
    assert row["lambda"] == pytest.approx(means["lambda"]["cola", "average", 0.0])
    assert row["random"] == pytest.approx(means["random"]["cola", "average", 0.0])
    assert row["difference"] == pytest.approx(row["random"] - row["lambda"])
    assert math.isnan(table.loc["cola, mcc, average, lambda, 0.5", "random"])


def test_a_run_with_a_task_more_is_said_to_have_other_tasks(runs: Path) -> None:
    """As a run that goes on with another: the difference of their means is of other tasks, not of learning."""
    found = LearnResult.load(runs / "short")
    fewer = {**found.metadata, "stream": {**found.metadata["stream"], "tasks": found.metadata["stream"]["tasks"][:2]}}
    longer = {"a": replace(found, metadata=fewer), "b": found}
    assert any("of different tasks" in note for note in notes_of(longer))
    assert not any("of different tasks" in note for note in notes_of({"a": found, "b": found}))
    turned = {
        **found.metadata,
        "stream": {**found.metadata["stream"], "tasks": found.metadata["stream"]["tasks"][::-1]},
    }
    other_order = {"a": replace(found, metadata=turned), "b": found}
    assert not any("of different tasks" in note for note in notes_of(other_order))
    first, second, third = (task["name"] for task in found.metadata["stream"]["tasks"])
    (row,) = compare_settings(longer).to_dict("records")
    assert row == {"setting": "stream.tasks", "a": f"{first}, {second}", "b": f"{first}, {second}, {third}"}


def test_runs_of_one_method_each_are_compared(runs: Path) -> None:
    """The method is a setting that differs; with two methods in a run figures are told apart by it."""
    found = LearnResult.load(runs / "short")
    other = replace(found, accuracy_matrix=found.accuracy_matrix.assign(method="other"))
    figures = compare_figures({"a": found, "b": other}).set_index("figure")
    assert figures.loc["average_performance til", "difference"] == 0
    both = replace(found, accuracy_matrix=pd.concat([found.accuracy_matrix, other.accuracy_matrix]))
    figures = compare_figures({"a": both, "b": other}).set_index("figure")
    assert figures.loc["other, average_performance til", "difference"] == 0
    assert pd.isna(figures.loc["probe, average_performance til", "difference"])
    third = replace(found, accuracy_matrix=found.accuracy_matrix.assign(method="third"))
    assert "nothing is compared" in notes_of({"a": both, "b": third})[-1]
    assert "nothing is compared" not in notes_of({"a": found, "b": other})[-1]
    assert notes_of({"a": both, "b": other, "c": third})[-1].startswith("figures are means over seeds")


@pytest.mark.exhaustive
def test_runs_that_are_alike_say_so(runs: Path, regard: Regard, tmp_path: Path) -> None:
    result = LearnResult.load(runs / "short")
    replace(result).save(tmp_path / "copy")
    ended = regard("compare", runs / "short", tmp_path / "copy", runs / "long")
    assert ended.code == 0
    assert "no setting differs" not in ended.out
    alike = regard("compare", runs / "short", tmp_path / "copy")
    assert "note: no setting differs\n" in alike.out
    assert "difference is copy − short" in alike.out


def _learnt(
    seeds: tuple[int, ...], task: str = "a task of some words", *, methods: tuple[str, ...] = ("probe",)
) -> Any:
    """A run over one task of a table that the first seed divides; with two figures of each method."""
    source = f"rows.csv, 10% (dev) and 20% (test) of each class drawn with seed {seeds[0]}"
    split = {"name": task, "source": source, "sha256": {"train": f"{seeds[0]}" * 64}}
    record = {"runs": [{"seed": seed} for seed in seeds], "config": {"seed": seeds[0]}, "stream": {"tasks": [split]}}
    figures = {f"{method}, {name}": dict.fromkeys(seeds, 0.5) for method in methods for name in ("one", "two")}
    return SimpleNamespace(metadata=record, command="learn", figures_by_seed=lambda: figures)


def test_rows_that_another_seed_draws_are_told_by_the_seed_alone() -> None:
    table = compare_settings({"a": _learnt((1,)), "b": _learnt((2,))})
    assert table.to_dict("records") == [{"setting": "seed", "a": "1", "b": "2"}]
    other = _learnt((1,))
    other.metadata["stream"]["tasks"][0]["sha256"]["train"] = "f" * 64
    assert len(compare_settings({"a": _learnt((1,)), "b": other})) == 1, "the same seed draws other rows: another file"


def test_a_text_held_out_that_was_edited_is_told() -> None:
    runs = {name: _learnt((1,)) for name in "ab"}
    for digit, run in zip("12", runs.values(), strict=True):
        run.metadata["beyond_stream"] = {"held.txt": digit * 64}
    assert compare_settings(runs)["setting"].tolist() == ["beyond_stream.held.txt"]


def test_a_table_that_was_edited_is_told_beside_another_seed(tmp_path: Path) -> None:
    path, runs = tmp_path / "rows.csv", {}
    for seed, word in ((1, "red"), (2, "blue")):
        path.write_text(
            "task,text,label\n" + "".join(f"rows,{word} {row},{row % 2}\n" for row in range(12)), encoding="utf-8"
        )
        (task,) = read_user_tasks(path, seed)
        record = {"tasks": [{"name": task.name, "source": task.source}]}
        runs[word] = SimpleNamespace(metadata={"runs": [{"seed": seed}], "stream": record}, command="learn")
    assert set(compare_settings(runs)["setting"]) == {"seed", "stream.tasks.rows.source"}
    runs["blue"].metadata["stream"] = {"tasks": [{"name": "rows", "source": read_user_tasks(path, 3)[0].source}]}
    runs["red"].metadata["stream"] = {"tasks": [{"name": "rows", "source": read_user_tasks(path, 4)[0].source}]}
    assert compare_settings(runs)["setting"].tolist() == ["seed"]


def test_a_task_may_be_called_as_a_hash() -> None:
    runs = {"a": _learnt((1,)), "b": _learnt((1,))}
    for rows, run in enumerate(runs.values()):
        run.metadata["stream"]["tasks"] = [{"name": name, "rows": rows} for name in ("news", "news digest")]
    assert compare_settings(runs)["setting"].tolist() == ["stream.tasks.news.rows", "stream.tasks.news digest.rows"]


def test_all_seeds_are_told() -> None:
    table = compare_settings({"a": _learnt((1, 2, 3)), "b": _learnt((1,))})
    assert table.to_dict("records") == [{"setting": "seed", "a": "1, 2, 3", "b": "1"}]


def test_a_method_that_a_run_lacks_is_named_once() -> None:
    runs = {"a": _learnt((1,), methods=("probe", "prescale")), "b": _learnt((1,))}
    assert "b has no prescale" in notes_of(runs, compare_settings(runs))


def test_long_names_lose_their_middle_in_a_narrow_terminal() -> None:
    names = ["stream.tasks.which library is documented here.sha256.train", "seed", "model.class"]
    texts = {
        "a": ["9d96db2f7884", "1", "SmolLM3ForSequenceClassification"],
        "b": ["93489da1e47e", "12345678901234", "Llama"],
    }
    table = pd.DataFrame({"setting": names, **texts})
    console = Console(width=60)
    with console.capture() as told:
        console.print(terminal_table(table, width=60))
    lines = told.get().splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"stream.*….*\.sha256\.train +9d96db2f7884 +93489da1e47e", lines[1].rstrip())
    assert lines[2].split() == ["seed", "1", "12345678901234"], "numbers stay whole"
    assert lines[3].split() == ["model.class", "SmolLM3…Classification", "Llama"]


@pytest.mark.parametrize("width", [66, 72, 80])
def test_numbers_stay_whole_beside_wide_heads(width: int) -> None:
    """Heads of differences are wider than their numbers: they wrap, the numbers do not."""
    differences = {"second − first": [-2.604, -7.292], "± second − first": [190.9, 39.71]}
    more = {"third − first": [-2.604, 12.24], "± third − first": [190.9, 33.09]}
    values = {"first": [47.92, 53.12], "second": [45.31, 3.125], "third": [45.31, 78.12]}
    table = pd.DataFrame({"figure": ["sapt, average_performance cil", "replay, forgetting til"]})
    table = table.assign(**values, **differences, **more)
    console = Console(width=width)
    with console.capture() as told:
        console.print(terminal_table(table, width=width))
    *_, one, other = told.get().splitlines()
    assert one.split()[-7:] == ["47.92", "45.31", "45.31", "-2.604", "190.9", "-2.604", "190.9"]
    assert other.split()[-7:] == ["53.12", "3.125", "78.12", "-7.292", "39.71", "12.24", "33.09"]


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize("name", ["run", "sapt-with-a-long-name-"])
def test_numbers_with_many_digits_are_neither_folded_nor_cut_off(name: str, width: int) -> None:
    """A narrow column beside wide ones, and numbers with an exponent, whose letter makes them no word."""
    values = [-0.08003, -126.2, 194.8, -7.5e12, 1.234e-05, 510.4, -0.001234]
    table = pd.DataFrame(
        {"figure": ["replay, forgetting til"], **{f"{name}{at} − b": [v] for at, v in enumerate(values)}}
    )
    console, told = Console(width=width), []
    for part in split_columns(table, width):
        with console.capture() as shown:
            console.print(terminal_table(part, width=width))
        told += shown.get().split()
    assert [word for word in told if word in map("{:.4g}".format, values)] == [f"{value:.4g}" for value in values]


def test_columns_that_do_not_fit_beside_each_other_follow_below() -> None:
    values = {f"run {at}": [-10.25 - at, 53.12] for at in range(20)}
    table = pd.DataFrame({"figure": ["sapt, average_performance cil", "replay, forgetting til"], **values})
    parts = [*split_columns(table, 80)]
    assert [name for part in parts for name in part.columns[1:]] == [*values]
    assert {part.columns[0] for part in parts} == {"figure"}
    console, shown = Console(width=80), ""
    for part in parts:
        with console.capture() as told:
            console.print(terminal_table(part, width=80))
        shown += told.get()
    assert all(f" {-10.25 - at}" in shown for at in range(20))
    assert [part.shape for part in split_columns(table.iloc[:, :4])] == [(2, 4)]
    assert [part.shape for part in split_columns(table.iloc[:0])] == [(0, 21)]


def test_rounding_is_no_difference() -> None:
    def run(values: tuple[float, ...]) -> Any:
        return PretrainResult(
            pd.DataFrame(), pd.DataFrame(), {"final": {"sink_rate": sum(values)}, "config": {"seed": 1}}
        )

    figures = compare_figures({"a": run((0.1, 0.2)), "b": run((0.3,))}).set_index("figure")
    assert figures.loc["sink_rate", "difference"] == 0
    figures = compare_figures({"a": run((0.0,)), "b": run((0.1 + 0.2, -0.3))}).set_index("figure")
    assert [figures.loc["sink_rate", name] for name in ("a", "b", "difference")] == [0, 0, 0]


def test_trained_weights_and_places_are_no_differences() -> None:
    """Weights that a run has trained are its outcome; of two positions of the strongest sink no difference is meant."""
    runs = {}
    for name, place in (("one", 0), ("other", 6)):
        metadata = {
            "model": {"sha256": name * 20, "type": "regard"},
            "final": {"sink_position": place, "sink_rate": 5.0},
        }
        runs[name] = PretrainResult(pd.DataFrame(), pd.DataFrame(), {**metadata, "config": {"seed": 1}})
    assert compare_settings(runs).empty
    figures = compare_figures(runs).set_index("figure")
    assert figures.loc["sink_position", ["one", "other"]].tolist() == [0, 6]
    assert math.isnan(figures.loc["sink_position", "difference"])
    assert figures.loc["sink_rate", "difference"] == 0


def test_models_of_several_are_told_apart() -> None:
    rows = [
        {"model": model, "task": "t", "metric": "accuracy", "constants": "none", "rank_heads_by": "", "seed": seed}
        | {"dynamic_fraction": 1.0, "score": score + seed / 100}
        for model, score in (("a", 0.9), ("b", 0.6))
        for seed in (0, 1)
    ]
    both = ReplaceResult(pd.DataFrame(rows), pd.DataFrame(), pd.DataFrame(), {}, {})
    assert both.figures_by_seed()["a, t, accuracy, none, , 1.0"] == {0: 0.9, 1: 0.91}
    alone = ReplaceResult(pd.DataFrame(rows[2:]), pd.DataFrame(), pd.DataFrame(), {}, {})
    assert alone.figures_by_seed() == {"t, accuracy, none, , 1.0": {0: 0.6, 1: 0.61}}


def test_conversions_that_train_nothing_have_no_curves() -> None:
    """As windows with kept first tokens are compared: their histories are empty."""
    run = ConvertResult(pd.DataFrame(), pd.DataFrame(), pd.DataFrame(), {}, None, None)
    assert make_curves({"a": run, "b": run}) == []


def test_folders_called_as_columns_are_refused(runs: Path, regard: Regard, tmp_path: Path) -> None:
    shutil.copytree(runs / "short", tmp_path / "difference")
    complaint = regard("compare", runs / "short", tmp_path / "difference").complaint
    assert "expected other names of folders than those of columns (figure, setting, difference, task)" in complaint


def test_all_figures_are_shown_however_many() -> None:
    run = SimpleNamespace(
        command="replace", metadata={}, figures_by_seed=lambda: {f"t{n}": {0: 1.0} for n in range(96)}
    )
    table = compare_figures({"a": run, "b": run})
    assert terminal_table(table).row_count == 96
    assert terminal_table(table, 60).row_count == 60


def test_a_score_that_is_no_number_is_told() -> None:
    """A dash in a table may be a figure that is NaN, or one that a run does not have."""
    scores = replaced_run.scores()
    figures = list(ReplaceResult(scores, replaced_run.heads(), pd.DataFrame(), {}).figures_by_seed())
    bad = scores.assign(score=math.nan)
    runs = {
        name: ReplaceResult(table, replaced_run.heads(), pd.DataFrame(), {})
        for name, table in (("good", scores), ("bad", bad))
    }
    notes = notes_of(runs, compare_settings(runs))
    (note,) = [note for note in notes if note.startswith("bad: ")]
    assert figures[0] in note
    assert "is not a finite number for at least one seed" in note
    assert not any(note.startswith("good") for note in notes)
    assert "is not a finite number" in make_page(runs, compare_settings(runs), compare_figures(runs))
    runs["bad"] = ReplaceResult(scores[scores["task"] == "cola"], replaced_run.heads(), pd.DataFrame(), {})
    lacking = next(name for name in figures if not name.startswith("cola"))
    missing = lacking.partition(", ")[0]
    assert any(note.startswith(f"bad has no {missing}") for note in notes_of(runs, compare_settings(runs)))
