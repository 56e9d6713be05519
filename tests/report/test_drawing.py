"""Figures and overviews of statistics, and of panels."""

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as tf
from matplotlib.backends.backend_agg import FigureCanvasAgg

import regard
from regard.commands.learn.result import LearnResult, make_table
from regard.commands.pretrain.result import PretrainResult, final_metrics
from regard.commands.replace.result import ReplaceResult
from regard.errors import UserError
from regard.hooks.watch import Watch
from regard.report.drawing import Map, draw_maps, draw_panels
from regard.report.panels import line, panel
from regard.runs.display import Display
from tests.commands.learn import learned
from tests.commands.pretrain import pretrain_run
from tests.commands.replace import replaced_run


def learnt() -> LearnResult:
    tasks = [{"name": name, "labels": [0, 1]} for name in learned.TASKS]
    empty = {name: make_table(name, []) for name in ("cost", "diagnostics", "interference")}
    return LearnResult(learned.matrix(), **empty, metadata={"stream": {"name": "yahoo", "tasks": tasks}})


def pretrained() -> PretrainResult:
    history = pretrain_run.history()
    return PretrainResult(history, pretrain_run.sinks(), {"final": final_metrics(history)})


def replaced() -> ReplaceResult:
    tables = replaced_run.scores(), replaced_run.heads(), replaced_run.cost()
    return ReplaceResult(*tables, {"model": {"name": "example/tiny"}})


@pytest.fixture(scope="module")
def watch() -> Watch:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = tf.BertModel(tf.BertConfig(**sizes, vocab_size=50)).eval()
    with torch.no_grad(), regard.watching(model, ["entropy", "sink_rate", "over_smoothing"]) as found:
        assert "0 finished samples" in repr(found)
        assert "<table" not in found._repr_html_()
        model(torch.randint(50, (5, 12)))
    return found


@pytest.mark.exhaustive
def test_a_watch_draws_what_a_result_draws(watch: Watch) -> None:
    result = regard.MeasureResult(watch.frame(), {})
    for one in (watch, result):
        drawn = one.plot()  # the sink rate, though it is not the first
        assert drawn.axes[0].get_title(loc="left").startswith("Sink rate")
        rows = watch.frame("sink_rate", position=0).dropna(subset=["head"])
        expected = rows.pivot(index="layer", columns="head", values="value").to_numpy(dtype=float)
        np.testing.assert_array_equal(drawn.axes[0].images[0].get_array(), expected)
    assert watch.plot("entropy").axes[0].get_title(loc="left").startswith("Entropy")
    assert drawn._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="unknown statistic 'distance'; the table has: entropy"):
        watch.plot("distance")


def test_an_overview_has_a_row_for_each_statistic(watch: Watch) -> None:
    overview = watch.overview().set_index("statistic")
    assert [*overview.index] == ["sink_rate, ε = 0.3", "entropy", "over_smoothing"]
    of_heads = watch.frame("entropy", position=None).dropna(subset=["head"])["value"]
    row = overview.loc["entropy"]
    assert row["over"] == "3 layers × 4 heads"
    shown = [float(row[name]) for name in ("mean", "smallest", "largest")]
    assert shown == pytest.approx([of_heads.mean(), of_heads.min(), of_heads.max()], rel=1e-3)
    of_layers = watch.frame("over_smoothing", position=None).dropna(subset=["layer"]).set_index("layer")["value"]
    assert -1 in of_layers.index, "the embeddings"
    assert float(overview.loc["over_smoothing", "mean"]) == pytest.approx(of_layers.drop(-1).mean(), rel=1e-3)
    assert overview.loc["over_smoothing", "over"] == f"{len(of_layers) - 1} layers"


@pytest.mark.parametrize("value, limits", [(0.0, (0, 1)), (100.0, (0, 100)), (-2.0, (-2, 0))])
def test_a_map_of_one_value_has_a_scale_of_numbers_that_can_be(value: float, limits: tuple[float, float]) -> None:
    """A share of 110 % cannot, and the page has the same scale. The long title stays within the picture."""
    title = "Sink rate, ε = 0.3, cross-attention, position 0"
    figure = draw_maps([Map(title, np.full((1, 1), value), [0], [0])])
    assert figure.axes[0].images[0].get_clim() == limits
    FigureCanvasAgg(figure).draw()
    shown = figure.axes[0].get_title(loc="left")
    assert shown.split() == title.split()
    box = figure.axes[0]._left_title.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


@pytest.mark.exhaustive
def test_every_result_shows_itself_in_one_line_a_table_and_a_picture(watch: Watch) -> None:
    results: list[Display] = [watch, regard.MeasureResult(watch.frame(), {}), learnt(), pretrained(), replaced()]
    starts = [
        "Watch(BertModel: 3 statistics, 5 finished samples)",
        "MeasureResult(A model: 3 statistics)",
        "LearnResult(yahoo: finetune 84.1, prescale 94.6, joint 96.1)",
        "PretrainResult(101 rows, loss=",
        "ReplaceResult(example/tiny: cola loses ",
    ]
    for result, start in zip(results, starts, strict=True):
        assert repr(result).startswith(start)
        assert len(repr(result).splitlines()) == 1
        shown = result._repr_html_()
        assert "<table" in shown
        assert "data:image/png" in shown


def test_learning_curves_are_means_over_runs() -> None:
    means, forgotten = learnt().plot().axes
    finetune = {line.get_label(): line for line in means.lines}["finetune"]
    expected = [96.1 - 8 * (after - 1) / 2 for after in range(1, 5)]
    np.testing.assert_allclose(np.asarray(finetune.get_ydata(), dtype=float), expected, rtol=1e-4)
    assert means.get_ylabel() == "score, %"
    assert len(means.collections) == 3  # intervals
    assert forgotten.get_title(loc="left") == "Forgotten so far"


def test_names_of_users_are_drawn_as_they_are() -> None:
    """Dollars begin no formula, and an underscore hides no line from the legend."""
    names = [f"_a${number}" for number in range(20)]
    points = [point for name in names for point in line("step", name, [1, 2], [0.5, 1.0])]
    drawn = draw_panels(panel("cost_$x_{1$", "$ a day", "step", points))
    drawn.canvas.draw()
    (axes,) = drawn.axes
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [name.replace("$", r"\$") for name in names]
    assert len(axes.lines) == 20
    draw_maps([Map("a_$b_{$", np.eye(2), ["$x_{", "y"], ["a$", "$b"])]).canvas.draw()


def test_accuracy_matrices_are_on_one_scale() -> None:
    drawn = learnt().plot("matrix")
    images = [axes.images[0] for axes in drawn.axes if axes.images]
    first = np.asarray(images[0].get_array().filled(np.nan))  # type: ignore[union-attr]
    assert first.shape == (5, 4)
    assert first[4, 0] == pytest.approx(96.1 - 24)
    assert np.isnan(first[1, 3])
    assert len({image.get_clim() for image in images}) == 1
    with pytest.raises(UserError, match=r"kind: expected one of curves, matrix|kind"):
        learnt().plot("map")  # type: ignore[arg-type]


def test_pretraining_draws_its_history_and_the_last_map() -> None:
    result = pretrained()
    loss, rate, mass = result.plot().axes
    assert loss.get_title(loc="left") == "Training and validation"
    assert float(np.asarray(rate.lines[0].get_ydata(), dtype=float)[-1]) == pytest.approx(
        result.final["sink_rate"], rel=1e-4
    )
    assert len(mass.lines) == 2
    drawn = result.plot("map").axes[0]
    assert drawn.get_title(loc="left").endswith("step 1,000")
    rows = result.frame("sinks", statistic="alpha", step=1000).dropna(subset=["head"])
    expected = rows.pivot(index="layer", columns="head", values="value").to_numpy(dtype=float)
    np.testing.assert_allclose(drawn.images[0].get_array(), expected, rtol=1e-4)
    unlogged = PretrainResult(pretrain_run.unwatched(0), pretrain_run.sinks([]), {"final": {}})
    with pytest.raises(UserError, match="no map to draw"):
        unlogged.plot("map")


def test_every_table_of_a_result_is_a_frame() -> None:
    assert len(replaced().frame("heads", layer=1)) == 3
    assert replaced().frame().equals(replaced().scores)
    found = learnt().frame("metrics", metric="average_performance", scenario="til", method="finetune")
    assert found["value"].tolist() == pytest.approx([84.0, 84.1, 84.2])
    assert pretrained().frame(step=500)["step"].tolist() == [500]
    with pytest.raises(UserError, match="unknown table 'losses'; the run has: history, sinks"):
        pretrained().frame("losses")
    with pytest.warns(UserWarning, match=r"frame\(method='ewc'\) is empty: method was measured for finetune, prescale"):
        assert learnt().frame(method="ewc").empty


def test_a_statistic_of_the_whole_model_is_not_drawn() -> None:
    table = pd.DataFrame([["share", None, None, None, None, 0.5, None, 3, "decoder"]])
    table.columns = ["statistic", "layer", "head", "position", "epsilon", "value", "standard_error", "n", "site"]
    result = regard.MeasureResult(table, {})
    with pytest.raises(UserError, match="share has one value for the whole model"):
        result.plot()
    assert result.overview()["over"].tolist() == ["model"]


def test_long_names_at_an_axis_lose_their_middle() -> None:
    names = [f"which library is documented here, of {count}" for count in ("three", "four")]
    axes = draw_maps([Map("t", np.eye(2), ["after 1", "after 2"], names)]).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "which l…d here, of three",
        "which l…ed here, of four",
    ]
