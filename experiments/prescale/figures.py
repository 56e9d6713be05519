"""The pictures of docs/prescaling.md: from the tables in docs/results, and from two runs of its own.

    python -m experiments.prescale.figures [--data docs/results] [--redraw]

`--data` is the folder of the tables (see `experiments.prescale.page`). Fine-tuning and pre-scaling are run once
each on stdlib-split, whose texts are Python's own documentation, as `experiments.prescale.run` runs them: about two
minutes on one core. What is drawn of them is kept beside the tables; with --redraw that is drawn, and nothing is run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from rich.console import Console

from experiments.common import drawing
from experiments.common.drawing import figure, ramp
from experiments.common.runs import FOLDER, PICTURES
from experiments.prescale.run import DIAGNOSED, EVALUATED, ROWS, SEEDS, TRAIN, budget
from experiments.prescale.tables import WHEN, Tables
from regard.continual.batches import ExampleRef
from regard.continual.diagnostics import diagnose
from regard.continual.learner import Learner
from regard.continual.methods import method_named
from regard.continual.network import INPUTS
from regard.continual.run import make_learner, run_stream
from regard.data.streams import read_stream
from regard.data.tokenizers import common_tokens
from regard.errors import UserError
from regard.models.pretrained import Loaded, load
from regard.report import colors
from regard.runs.folder import write_file
from regard.runs.intervals import t_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOUND = "prescale-figures.json"
STREAM = "stdlib-split"
DRAWN = ("finetune", "prescale")
INKS = dict(zip(DRAWN, colors.SERIES_LIGHT, strict=False))
TASK_INKS = (*colors.SERIES_LIGHT, colors.RAMP_LIGHT[-1])
TEXTS, WORDS = 3, (9, 18)
"""How many texts are drawn, and how many tokens they may have."""
POINTS = 40
"""Test rows of each task that t-SNE is made of."""


# -- what is drawn of runs -------------------------------------------------------------------------------------------


def found(loaded: Loaded, seed: int = SEEDS[0]) -> dict[str, Any]:
    """What the two runs give, as JSON holds it: sink degrees, scaling maps, and [CLS] states in two dimensions."""
    check_neighbours()
    made: dict[str, Any] = {"stream": STREAM, "seed": seed, "degrees": [], "scales": [], "states": {}}
    for row in DRAWN:
        learner, degrees = learnt(row, loaded, seed)
        made["degrees"] += degrees
        made["states"][row] = points(learner)
        if row == "prescale":
            made["scales"] = scaling_maps(learner)
            made["tasks"] = [{"name": task.name, "classes": list(task.labels)} for task in learner.stream.tasks]
    return made


def learnt(row: str, loaded: Loaded, seed: int) -> tuple[Learner, list[dict[str, Any]]]:
    """A run of a row after its last task, and its sink degrees by layer before and after a task, means over tasks."""
    name, settings = ROWS[row]
    kind = method_named(name)
    stream = read_stream(STREAM, samples_per_class=TRAIN, max_eval_samples=EVALUATED, order="random", seed=seed)
    method = kind(kind.Config.parse(settings))
    learner = make_learner(stream, method, loaded, budget(STREAM), seed=seed)
    common = common_tokens(loaded.tokenizer)

    def look(learner: Learner, task: int) -> list[dict[str, Any]]:
        rows = learner.iterate_batches(learner.items(task)[:DIAGNOSED], size=DIAGNOSED)
        seen = [{name: value for name, value in batch.items() if name in INPUTS} for batch in rows]
        degrees = diagnose(learner.network.classifier.encoder, seen, common=common, statistics=("sink_degree",))
        by_layer = degrees[degrees["statistic"] == "sink_degree"].dropna(subset="layer")
        return [{"layer": int(of["layer"]), "value": float(of["value"])} for of in by_layer.to_dict("records")]

    each = pd.DataFrame(run_stream(learner, method, diagnose=look).rows["diagnostics"])
    each["when"] = np.where(each["after_task"] == each["task_index"], WHEN[1], WHEN[0])
    means = each.groupby(["when", "layer"], as_index=False)["value"].mean()
    return learner, [{"row": row, **{str(k): v for k, v in of.items()}} for of in means.to_dict("records")]


def scaling_maps(learner: Learner) -> list[dict[str, Any]]:
    """How short test texts of the task published first are weighed for its classes, the classes taking turns."""
    task = learner.stream.order.index(0)
    of, part = learner.stream.tasks[task], learner.encoded[task, "test"]
    lengths = part.attention_mask.sum(1).tolist()
    fitting = [row for row, length in enumerate(lengths) if WORDS[0] <= length <= WORDS[1]]
    by_class = [[row for row in fitting if int(part.labels[row]) == label] for label in range(len(of.labels))]
    turns = [rows[turn] for turn in range(TEXTS) for rows in by_class if turn < len(rows)]
    if len(turns) < TEXTS:
        raise UserError(f"stream: expected {TEXTS} test texts of {WORDS[0]} to {WORDS[1]} tokens, got {len(turns)}")
    return [_map(learner, task, row) for row in turns[:TEXTS]]


def _map(learner: Learner, task: int, row: int) -> dict[str, Any]:
    rows = learner.rows([ExampleRef(task, row)], split="test")
    given = {name: rows[name].to(learner.device) for name in INPUTS if name in rows}
    with torch.no_grad(), learner.evaluation_mode():
        scales = learner.network.classifier.scales(**given)[0].float()
    numbers = list(learner.stream.class_indices(task))
    return {
        "tokens": learner.tokenizer.convert_ids_to_tokens(rows["input_ids"][0].tolist()),
        "label": learner.stream.classes[int(rows["labels"][0])],
        "classes": [learner.stream.classes[number] for number in numbers],
        "weights": [[round(float(weight), 4) for weight in scales[number]] for number in numbers],
    }


def points(learner: Learner) -> list[dict[str, Any]]:
    """The [CLS] states of test rows of all tasks in two dimensions, by t-SNE (van der Maaten and Hinton 2008)."""
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
        for label, (x, y) in zip(labels, embedded(torch.cat(states).numpy()), strict=True)
    ]


def check_neighbours() -> None:
    """Nothing, or a UserError: scikit-learn, which has t-SNE, is not there."""
    try:
        import sklearn.manifold  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise UserError("t-SNE needs the package scikit-learn: pip install 'regard[tasks]'") from error


def embedded(states: Any) -> Any:
    """The states (row, width) in two dimensions, (row, 2), the same for the same states."""
    check_neighbours()
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(states) - 1) / 3)
    return TSNE(n_components=2, init="pca", perplexity=perplexity, random_state=0).fit_transform(states)


# -- pictures --------------------------------------------------------------------------------------------------------


def layers(tables: Tables) -> Figure:
    """Sink deviation and common-sink ratio by layer, a row of axes a stream."""
    made = figure(7.2, 2.1 * len(tables.streams))
    axes = made.subplots(len(tables.streams), 2, squeeze=False, sharex=True)
    titles = {"sink_deviation": "Sink deviation", "common_sink_ratio": "Common-sink ratio, %"}
    for stream, line in zip(tables.streams, axes, strict=True):
        for (statistic, title), one in zip(titles.items(), line, strict=True):
            for row in DRAWN:
                for when in WHEN:
                    values = tables.layers(stream, row, statistic, "all", when).dropna(subset="layer")
                    _line(one, row, when, values["layer"].astype(int), values["mean"])
            _titled(one, f"{title}, {stream}")
    return made


def degrees(given: Mapping[str, Any]) -> Figure:
    """The average outer degree of sinks by layer, of the own runs."""
    made = figure(3.6, 2.4)
    one, table = made.subplots(), pd.DataFrame(given["degrees"])
    for (row, when), values in table.groupby(["row", "when"], sort=False):
        values = values.sort_values("layer")
        _line(one, str(row), str(when), values["layer"], values["value"])
    _titled(one, f"Average outer degree of sinks, {given['stream']}")
    return made


def _line(axes: Axes, row: str, when: str, x: Any, y: Any) -> None:
    style = "-" if when == WHEN[1] else "--"
    if len(x):
        axes.plot(x, y, style, color=INKS[row], linewidth=1.3, label=f"{row}, {when}")


def _titled(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=8)
    axes.set_xlabel("Layer")
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=6, handlelength=3)


def smoothing(tables: Tables) -> Figure:
    """Over-smoothing before and after a task, a group of bars a row and an axis a stream."""
    made = figure(7.2, 2.4)
    for stream, axes in zip(
        tables.streams, made.subplots(1, len(tables.streams), squeeze=False, sharey=True)[0], strict=True
    ):
        rows = [row for row in tables.record["looked_at"] if tables.diagnosed(stream, row, "over_smoothing", "after")]
        for place, when in enumerate(WHEN):
            seeds = [list(tables.diagnosed(stream, row, "over_smoothing", when).values()) for row in rows]
            means = [t_interval(values) for values in seeds]
            halves = [one.ci_high - one.mean if one.n > 1 else 0.0 for one in means]
            at = np.arange(len(rows)) + 0.4 * (place - 0.5)
            ink = colors.RAMP_LIGHT[2 + 3 * place]
            axes.bar(
                at, [one.mean for one in means], 0.38, yerr=halves, color=ink, ecolor="#555555", label=f"{when} a task"
            )
        axes.set_xticks(range(len(rows)), rows, rotation=35, ha="right")
        axes.set_title(f"Over-smoothing, {stream}", fontsize=8)
        axes.legend(fontsize=6)
    return made


def scales(given: Mapping[str, Any]) -> Figure:
    """Maps of class by token, one a text."""
    maps: Sequence[Mapping[str, Any]] = given["scales"]
    made = figure(7.2, 1.35 * len(maps))
    for one, axes in zip(maps, made.subplots(len(maps), 1, squeeze=False)[:, 0], strict=True):
        weights = np.array(one["weights"])
        shown = axes.pcolormesh(weights, cmap=ramp(), vmin=0, edgecolors="white", linewidth=0.5)
        axes.set_xticks(
            np.arange(len(one["tokens"])) + 0.5, [t.replace("$", r"\$") for t in one["tokens"]], rotation=40, ha="right"
        )
        axes.set_yticks(np.arange(len(one["classes"])) + 0.5, one["classes"])
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.set_title(f"A text of {one['label']}", fontsize=8)
        made.colorbar(shown, ax=axes, pad=0.01)
    return made


def states(given: Mapping[str, Any]) -> Figure:
    """t-SNE of [CLS] states, a colour a task and a mark a class."""
    made = figure(7.2, 4.0)
    for row, axes in zip(DRAWN, made.subplots(1, len(DRAWN), squeeze=False)[0], strict=True):
        table = pd.DataFrame(given["states"][row])
        for number, task in enumerate(given["tasks"]):
            for mark, name in zip("o^sDv", task["classes"], strict=False):
                one = table[table["class"] == name]
                ink = TASK_INKS[number % len(TASK_INKS)]
                axes.scatter(one["x"], one["y"], s=9, marker=mark, color=ink, linewidths=0, label=name)
        axes.set_title(row, fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
    handles, names = axes.get_legend_handles_labels()
    made.legend(handles, names, loc="outside lower center", ncols=7, fontsize=6, handletextpad=0.2)
    return made


def draw(tables: Tables, given: Mapping[str, Any], folder: Path = PICTURES) -> list[Path]:
    """All pictures, written into a folder; the same tables give the same bytes."""
    made = {
        "layers": lambda: layers(tables),
        "degrees": lambda: degrees(given),
        "smoothing": lambda: smoothing(tables),
        "scales": lambda: scales(given),
        "tsne": lambda: states(given),
    }
    return drawing.save({f"prescale-{name}": draw for name, draw in made.items()}, folder)


def main(arguments: list[str] | None = None) -> int:
    """Run what is not kept, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder of the tables")
    parser.add_argument("--redraw", action="store_true", help="draw what an earlier call kept there; run nothing")
    given = parser.parse_args(arguments)
    try:
        tables, kept = Tables.load(given.data), given.data / FOUND
        if not given.redraw:
            write_file(kept, json.dumps(found(load("minilm")), ensure_ascii=False, indent=None) + "\n")
        if not kept.exists():
            raise UserError(f"redraw: expected {FOUND} in {given.data}, found none; call it once without --redraw")
        draw(tables, json.loads(kept.read_text(encoding="utf-8")))
    except UserError as error:
        Console(stderr=True).print(str(error), style="bold")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
