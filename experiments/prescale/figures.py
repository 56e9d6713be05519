"""Figures of docs/prescaling.md, and the two runs behind three of them.

    python -m experiments.prescale.figures

Runs fine-tuning and pre-scaling once each on stdlib-split (two minutes on one core) and keeps what is drawn of them in
docs/results/prescale-figures.json. `experiments.pages` draws.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from rich.console import Console

from experiments.common.figures import color_ramp, label_axes, new_figure
from experiments.common.parts import RESULTS, Figure
from experiments.prescale.run import SEEDS, begin, read_inputs
from experiments.prescale.tables import WHEN, Tables
from regard.continual.diagnostics import diagnose
from regard.continual.learner import Learner
from regard.continual.network import INPUTS
from regard.continual.run import run_stream
from regard.continual.training_phase import ExampleRef
from regard.data.tokenizers import common_tokens
from regard.errors import UserError
from regard.models.pretrained import Loaded, load
from regard.report import colors
from regard.runs.intervals import t_interval
from regard.runs.output_dir import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

DATA = "prescale-figures.json"
STREAM = "stdlib-split"
DRAWN = ("finetune", "prescale")
COLORS = dict(zip(DRAWN, colors.SERIES_LIGHT, strict=False))
TASK_COLORS = (*colors.SERIES_LIGHT, colors.RAMP_LIGHT[-1])
TEXTS, WORDS = 3, (9, 18)
"""Texts that are drawn, and the fewest and most tokens of one."""
POINTS = 40
"""Test rows of each task in t-SNE."""


# -- runs -------------------------------------------------------------------------------------------


def figure_data(loaded: Loaded, seed: int = SEEDS[0]) -> dict[str, Any]:
    """Return sink degrees, scaling maps and [CLS] states in two dimensions of the two runs, as JSON."""
    check_sklearn()
    data: dict[str, Any] = {"stream": STREAM, "seed": seed, "degrees": [], "scales": [], "states": {}}
    for row in DRAWN:
        learner, degrees = run_row(row, loaded, seed)
        data["degrees"] += degrees
        data["states"][row] = project_states(learner)
        if row == "prescale":
            data["scales"] = scaling_maps(learner)
            data["tasks"] = [{"name": task.name, "classes": list(task.labels)} for task in learner.stream.tasks]
    return data


def run_row(row: str, loaded: Loaded, seed: int) -> tuple[Learner, list[dict[str, Any]]]:
    """Run a row; return its learner and the mean sink degrees by layer before and after a task."""
    (learner, method), common = begin(STREAM, row, seed, loaded), common_tokens(loaded.tokenizer)

    def measure_degrees(learner: Learner, task: int) -> list[dict[str, Any]]:
        inputs, statistics = read_inputs(learner, task), ("sink_degree",)
        degrees = diagnose(learner.network.classifier.encoder, inputs, common=common, statistics=statistics)
        by_layer = degrees[degrees["statistic"] == "sink_degree"].dropna(subset="layer")
        return [{"layer": int(line["layer"]), "value": float(line["value"])} for line in by_layer.to_dict("records")]

    table = pd.DataFrame(run_stream(learner, method, diagnose=measure_degrees).rows["diagnostics"])
    table["when"] = np.where(table["after_task"] == table["task_index"], WHEN[1], WHEN[0])
    means = table.groupby(["when", "layer"], as_index=False)["value"].mean()
    return learner, [{"row": row, **{str(k): v for k, v in line.items()}} for line in means.to_dict("records")]


def scaling_maps(learner: Learner) -> list[dict[str, Any]]:
    """Return the scaling weights of short test texts of the task published first, its classes in turn."""
    task = learner.stream.order.index(0)
    labels, part = learner.stream.tasks[task].labels, learner.encoded[task, "test"]
    lengths = part.attention_mask.sum(1).tolist()
    fitting = [row for row, length in enumerate(lengths) if WORDS[0] <= length <= WORDS[1]]
    by_class = [[row for row in fitting if int(part.labels[row]) == label] for label in range(len(labels))]
    turns = [rows[turn] for turn in range(TEXTS) for rows in by_class if turn < len(rows)]
    if len(turns) < TEXTS:
        raise UserError(f"stream: expected {TEXTS} test texts of {WORDS[0]} to {WORDS[1]} tokens, got {len(turns)}")
    return [_map(learner, task, row) for row in turns[:TEXTS]]


def _map(learner: Learner, task: int, row: int) -> dict[str, Any]:
    rows = learner.rows([ExampleRef(task, row)], split="test")
    inputs = {name: rows[name].to(learner.device) for name in INPUTS if name in rows}
    with torch.no_grad(), learner.evaluation_mode():
        scales = learner.network.classifier.scales(**inputs)[0].float()
    numbers = list(learner.stream.class_indices(task))
    return {
        "tokens": learner.tokenizer.convert_ids_to_tokens(rows["input_ids"][0].tolist()),
        "label": learner.stream.classes[int(rows["labels"][0])],
        "classes": [learner.stream.classes[number] for number in numbers],
        "weights": [[round(float(weight), 4) for weight in scales[number]] for number in numbers],
    }


def project_states(learner: Learner) -> list[dict[str, Any]]:
    """Project the [CLS] states of test rows of all tasks by t-SNE (van der Maaten and Hinton 2008)."""
    states, labels = [], []
    for task in range(len(learner.stream)):
        for rows in learner.iterate_batches(learner.sample_examples(task, "test", POINTS), "test"):
            types = rows.get("token_type_ids")
            with torch.no_grad(), learner.evaluation_mode():
                last = learner.network.classifier.states(rows["input_ids"], rows["attention_mask"].bool(), types)
            states.append(last[:, 0].float().cpu())
            labels += [learner.stream.classes[int(number)] for number in rows["labels"]]
    return [
        {"class": label, "x": round(float(x), 2), "y": round(float(y), 2)}
        for label, (x, y) in zip(labels, project(torch.cat(states).numpy()), strict=True)
    ]


def check_sklearn() -> None:
    """Raise a UserError if scikit-learn, which has t-SNE, is missing."""
    try:
        import sklearn.manifold  # noqa: F401
    except ImportError as error:
        raise UserError("t-SNE needs the package scikit-learn: pip install 'regard[tasks]'") from error


def project(states: Any) -> Any:
    """Project states (row, width) to (row, 2) by t-SNE, deterministically."""
    check_sklearn()
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(states) - 1) / 3)
    return TSNE(n_components=2, init="pca", perplexity=perplexity, random_state=0).fit_transform(states)


# -- drawings --------------------------------------------------------------------------------------------------------


def draw_layers(tables: Tables) -> Drawing:
    """Draw sink deviation and common-sink ratio by layer, a row of axes a stream."""
    drawing = new_figure(7.2, 2.1 * len(tables.streams))
    axes = drawing.subplots(len(tables.streams), 2, squeeze=False, sharex=True)
    titles = {"sink_deviation": "Sink deviation", "common_sink_ratio": "Common-sink ratio, %"}
    for stream, line in zip(tables.streams, axes, strict=True):
        for (statistic, title), panel in zip(titles.items(), line, strict=True):
            for row in DRAWN:
                for when in WHEN:
                    values = tables.layers(stream, row, statistic, "all", when).dropna(subset="layer")
                    _plot(panel, row, when, values["layer"].astype(int), values["mean"])
            label_axes(panel, f"{title}, {stream}", "Layer")
    return drawing


def draw_degrees(data: Mapping[str, Any]) -> Drawing:
    """Draw the average outer degree of sinks by layer, of the two runs."""
    drawing = new_figure(3.6, 2.4)
    axes, table = drawing.subplots(), pd.DataFrame(data["degrees"])
    for (row, when), values in table.groupby(["row", "when"], sort=False):
        values = values.sort_values("layer")
        _plot(axes, str(row), str(when), values["layer"], values["value"])
    label_axes(axes, f"Average outer degree of sinks, {data['stream']}", "Layer")
    return drawing


def _plot(axes: Axes, row: str, when: str, x: Any, y: Any) -> None:
    if len(x):
        style = "-" if when == WHEN[1] else "--"
        axes.plot(x, y, style, color=COLORS[row], linewidth=1.3, label=f"{row}, {when}")


def draw_smoothing(tables: Tables) -> Drawing:
    """Draw over-smoothing before and after a task, a group of bars a row and axes a stream."""
    drawing = new_figure(7.2, 2.4)
    for stream, axes in zip(
        tables.streams, drawing.subplots(1, len(tables.streams), squeeze=False, sharey=True)[0], strict=True
    ):
        rows = [row for row in tables.record["looked_at"] if tables.diagnosed(stream, row, "over_smoothing", "after")]
        for number, when in enumerate(WHEN):
            seeds = [list(tables.diagnosed(stream, row, "over_smoothing", when).values()) for row in rows]
            means = [t_interval(values) for values in seeds]
            halves = [mean.ci_high - mean.mean if mean.n > 1 else 0.0 for mean in means]
            at = np.arange(len(rows)) + 0.4 * (number - 0.5)
            color = colors.RAMP_LIGHT[2 + 3 * number]
            axes.bar(
                at,
                [mean.mean for mean in means],
                0.38,
                yerr=halves,
                color=color,
                ecolor="#555555",
                label=f"{when} a task",
            )
        axes.set_xticks(range(len(rows)), rows, rotation=35, ha="right")
        axes.set_title(f"Over-smoothing, {stream}", fontsize=8)
        axes.legend(fontsize=6)
    return drawing


def draw_scales(data: Mapping[str, Any]) -> Drawing:
    """Draw the weights of class by token, one map a text."""
    maps: Sequence[Mapping[str, Any]] = data["scales"]
    drawing = new_figure(7.2, 1.35 * len(maps))
    for scaling, axes in zip(maps, drawing.subplots(len(maps), 1, squeeze=False)[:, 0], strict=True):
        weights = np.array(scaling["weights"])
        mesh = axes.pcolormesh(weights, cmap=color_ramp(), vmin=0, edgecolors="white", linewidth=0.5)
        axes.set_xticks(
            np.arange(len(scaling["tokens"])) + 0.5,
            [t.replace("$", r"\$") for t in scaling["tokens"]],
            rotation=40,
            ha="right",
        )
        axes.set_yticks(np.arange(len(scaling["classes"])) + 0.5, scaling["classes"])
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.set_title(f"A text of {scaling['label']}", fontsize=8)
        drawing.colorbar(mesh, ax=axes, pad=0.01)
    return drawing


def draw_states(data: Mapping[str, Any]) -> Drawing:
    """Draw [CLS] states by t-SNE, a color a task and a mark a class."""
    drawing = new_figure(7.2, 4.0)
    for row, axes in zip(DRAWN, drawing.subplots(1, len(DRAWN), squeeze=False)[0], strict=True):
        table = pd.DataFrame(data["states"][row])
        for number, task in enumerate(data["tasks"]):
            for mark, name in zip("o^sDv", task["classes"], strict=False):
                points = table[table["class"] == name]
                color = TASK_COLORS[number % len(TASK_COLORS)]
                axes.scatter(points["x"], points["y"], s=9, marker=mark, color=color, linewidths=0, label=name)
        axes.set_title(row, fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
    handles, names = axes.get_legend_handles_labels()
    drawing.legend(handles, names, loc="outside lower center", ncols=7, fontsize=6, handletextpad=0.2)
    return drawing


def make_figures(tables: Tables, data: Mapping[str, Any] | None) -> list[Figure]:
    """Return the figures of the tables and, if there are any, of the two runs."""
    figures = [
        Figure(
            "prescale-layers",
            "Sink deviation and common-sink ratio by layer, before and after a task, of fine-tuning and pre-scaling.",
            lambda: draw_layers(tables),
        ),
        Figure(
            "prescale-smoothing",
            "Over-smoothing before and after a task, means over tasks and seeds with 95 % intervals.",
            lambda: draw_smoothing(tables),
        ),
    ]
    if data is None:
        return figures
    return [
        *figures,
        Figure(
            "prescale-degrees",
            "Average outer degree of the strongest column of each head, before and after a task, on stdlib-split.",
            lambda: draw_degrees(data),
        ),
        Figure(
            "prescale-scales",
            "Weights of a pre-scaling head on the tokens of three texts, for the classes of their task.",
            lambda: draw_scales(data),
        ),
        Figure(
            "prescale-tsne",
            "[CLS] states of test rows after the last task by t-SNE, on stdlib-split.",
            lambda: draw_states(data),
        ),
    ]


def read_data(folder: Path = RESULTS) -> dict[str, Any] | None:
    """Read what is kept of the two runs; None without it."""
    path = folder / DATA
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def main() -> int:
    """Make the two runs and keep what is drawn of them."""
    try:
        text = json.dumps(figure_data(load("minilm")), ensure_ascii=False, indent=None)
    except UserError as error:
        Console(stderr=True).print(str(error), style="bold")
        return 2
    write_file(RESULTS / DATA, text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
