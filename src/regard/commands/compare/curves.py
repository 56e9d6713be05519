"""What several runs of a command gave step by step, task by task or fraction by fraction, over each other."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.convert.result import ConvertResult
from regard.commands.learn.charts import make_curve_panels
from regard.commands.learn.result import LearnResult
from regard.commands.pretrain.result import PretrainResult
from regard.commands.replace.charts import fraction_panels
from regard.commands.replace.result import ReplaceResult
from regard.commands.replace.scores import constant_rows, curves
from regard.report.panels import Panel, assign_styles, curve, panel
from regard.runs.result import RunResult

_PRETRAIN = {
    "valid_loss": ("Validation loss", "nats a token", ""),
    "sink_rate": ("Sink rate", "% of heads × samples", "%"),
    "alpha_first": ("Attention on the first token", "mean of α₀ over heads and samples", ""),
    "virtual_sink_rate": ("Virtual sink", "% of heads × samples", "%"),
}
_CONVERT = {
    "relative_error": ("{stage}: training", "relative error, mean over layers", ""),
    "loss": ("{stage}: training", "nats a token", ""),
    "valid_loss": ("{stage}: validation loss", "nats a token", ""),
}
TASK_NOTE = "After the last task, in %, means over seeds; of two columns, the difference is the second less the first."


def make_curves(runs: Mapping[str, RunResult]) -> list[Panel]:
    """Plot the runs over each other, a line a run, or a method, attention or constants of one; nothing if they differ.

    Of pretrain and convert by step, of learn by task, of replace by the fraction of heads that stay dynamic.
    """
    if pretrained := _of_kind(runs, PretrainResult):
        return _by_step({name: run.history for name, run in pretrained.items()}, _PRETRAIN)
    if converted := _of_kind(runs, ConvertResult):
        converted = {name: run for name, run in converted.items() if len(run.history)}
        return [
            part
            for stage in dict.fromkeys(stage for run in converted.values() for stage in run.history["stage"])
            for part in _by_step(
                {name: run.history[run.history["stage"] == stage] for name, run in converted.items()},
                {column: (title.format(stage=stage), *rest) for column, (title, *rest) in _CONVERT.items()},
            )
        ]
    if replaced := _of_kind(runs, ReplaceResult):
        return _by_fraction(replaced)
    learnt = _of_kind(runs, LearnResult)
    return _by_task(learnt) if learnt and _have_same_tasks(learnt) else []


def compare_tasks(runs: Mapping[str, RunResult]) -> pd.DataFrame:
    """Return the last score of each task, a column a method of a run of learn; no rows of other commands or tasks.

    With two columns a third has their difference.
    """
    learnt = _of_kind(runs, LearnResult)
    if not learnt or not _have_same_tasks(learnt):
        return pd.DataFrame(columns=["task"])
    rows, matrices = [], {name: run.accuracy_matrix for name, run in learnt.items()}
    every_has_cil = all(
        (of_method["scenario"] == "cil").any()
        for matrix in matrices.values()
        for _, of_method in matrix.groupby("method")
    )
    scenario = "cil" if every_has_cil else "til"  # some methods answer with the task named alone
    for name, matrix in matrices.items():
        last = matrix[(matrix["scenario"] == scenario) & (matrix["after_task"] == matrix["after_task"].max())]
        last = last[last["task_index"] <= last["after_task"]]
        rows.append(last.assign(column=f"{name}: " + last["method"] + f" ({scenario.upper()})"))
    every = pd.concat(rows, ignore_index=True)
    table = every.pivot_table(index="task", columns="column", values="score", aggfunc="mean", sort=False)
    table = table[list(dict.fromkeys(every["column"]))].reset_index()
    table.columns.name = None
    if len(table.columns) == 3:
        table["difference"] = table.iloc[:, 2] - table.iloc[:, 1]
    return table


def _of_kind(runs: Mapping[str, RunResult], kind: type[Any]) -> dict[str, Any]:
    """Return the runs if all are of a kind, else none."""
    return dict(runs) if all(isinstance(run, kind) for run in runs.values()) else {}


def _by_step(histories: Mapping[str, pd.DataFrame], columns: Mapping[str, Sequence[str]]) -> list[Panel]:
    panels = []
    for column, (caption, note, unit) in columns.items():
        points = [point for name, history in histories.items() for point in curve(name, history, column, unit)]
        panels += panel(caption, note, "step", points, assign_styles(list(histories), repeat=True))
    return panels


def _by_fraction(runs: Mapping[str, ReplaceResult]) -> list[Panel]:
    """Plot each task that several runs have, a line a run, constants and order of heads."""
    parts = []
    for name, run in runs.items():
        points = curves(constant_rows(run.scores))
        models = points["model"] + ", " if points["model"].nunique() > 1 else ""
        lines = f"{name}: " + models + points["constants"] + ", " + points["rank_heads_by"]
        parts.append(points.assign(run=name, model="", constants=lines))
    every = pd.concat(parts, ignore_index=True)
    shared = every[every.groupby("task")["run"].transform("nunique") > 1]
    return fraction_panels(shared, "constants", lambda _, task: task)


def _have_same_tasks(runs: Mapping[str, LearnResult]) -> bool:
    names = [list(dict.fromkeys(run.accuracy_matrix["task"])) for run in runs.values()]
    return all(other == names[0] for other in names)


def _by_task(runs: Mapping[str, LearnResult]) -> list[Panel]:
    matrices = [
        run.accuracy_matrix.assign(method=f"{name}: " + run.accuracy_matrix["method"]) for name, run in runs.items()
    ]
    scenarios = make_curve_panels(pd.concat(matrices, ignore_index=True))
    return [
        part | {"caption": f"{part['caption']} ({scenario})"}
        for scenario, parts in scenarios.items()
        for part in parts[:2]
    ]
