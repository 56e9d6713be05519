"""The page of the tour: four papers, what each measured, and what came out here."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from regard.commands.learn.charts import average_seen_tasks
from regard.commands.learn.result import LearnResult
from regard.commands.measure.result import MeasureResult
from regard.commands.pretrain.result import PretrainResult
from regard.commands.replace.charts import score_panels
from regard.commands.replace.result import ReplaceResult
from regard.commands.replace.scores import Outcome, drop_interval, fewest_dynamic
from regard.report.labels import format_duration, number
from regard.report.page import Links, Page, Panels, Row, Section, Table
from regard.report.panels import Panel, assign_styles, line, panel
from regard.runs.output_dir import read_json
from regard.runs.provenance import library_versions
from regard.runs.version import VERSION

HEAD = ("", "here", "published")
PAPERS = {
    "sinks": "Gu et al. 2025, arXiv 2410.10781; 60M parameters",
    "papa": "Hassid et al. 2022, arXiv 2211.03495; six tasks, base and large encoders",
    "prescale": "Bai et al. 2024; BERT on DBpedia in seven tasks",
    "sapt": "Zhao et al. 2024, arXiv 2401.08295; T5-large on fifteen tasks",
}
PUBLISHED = {
    "softmax": "18.2 %",
    "sigmoid": "0.4 %",
    "half": "no loss to speak of",
    "none": "8 % on average",
    "finetune": "66.2 %, 39.2 points",
    "prescale": "99.7 %, 0.1 points",
    "sequential-lora": "46.0 %",
    "sapt": "82.0 %",
}
"""Figures of the papers' tables; see `docs/claims.md`."""


def make_page(folder: Path, seconds: Mapping[str, float], total: float) -> str:
    """Return the page over the finished steps in a folder, with `seconds` by step, and what all together took."""
    sections = [_sinks(folder), _papa(folder), _prescale(folder), _sapt(folder)]
    versions = library_versions()
    record = {"version": VERSION, "seconds": {**seconds, "all": total}, "versions": versions}
    return Page(
        eyebrow="Regard · tour",
        title="Four papers about attention, on this machine",
        ledes=[
            f"Each verb of Regard once, on MiniLM, a decoder of 0.3M parameters and Python’s documentation: "
            f"{format_duration(total)} in all. Models and texts are far smaller than the papers’, and one or two seeds "
            "decide little: the tables say what came out, not what is so.",
        ],
        sections=[*sections, Section("pages", "Pages", [_pages()], "Each step has a page of its own beside this one.")],
        record=record,
    ).html()


def _pages() -> Links:
    names = {
        "measure/report.html": "MiniLM’s attention: where it goes, sinks, norms",
        "look.html": "One sentence, token by token, and any head’s attention",
        "replace/report.html": "MiniLM with constant attention",
        "pretrain/report.html": "Softmax and sigmoid while they are trained",
        "prescale/report.html": "Fine-tuning and pre-scaling",
        "sapt/report.html": "One adapter, and SAPT",
    }
    return Links(list(names.items()))


# -- attention sinks -------------------------------------------------------------------------------------------------


def _sinks(folder: Path) -> Section:
    measured = MeasureResult.load(folder / "measure").frame("sink_rate", position=0)
    rate = float(measured["value"].mean())
    trials = pd.read_parquet(folder / "pretrain" / "trials.parquet").set_index("attention")
    keys = {trial["key"]: trial["values"]["attention"] for trial in read_json(folder / "pretrain/sweep.json")["trials"]}
    histories = {
        name: PretrainResult.load(folder / "pretrain" / "trials" / key).history.dropna(subset="sink_rate")
        for key, name in keys.items()
    }
    points = [
        point
        for name, history in histories.items()
        for point in line("step", name, history["step"].tolist(), history["sink_rate"].tolist(), "%")
    ]
    curves: list[Panel] = panel(
        "Sink on the first token", "% of heads × samples", "step", points, assign_styles(list(histories))
    )
    rows: list[Row] = [("MiniLM, its first token", "", [f"{number(rate, 3)} %", "–"])]
    rows += [
        (f"trained with {name}", "", [f"{number(float(trials.loc[name, 'sink_rate']), 3)} %", PUBLISHED[name]])
        for name in ("softmax", "sigmoid")
    ]
    softmax, sigmoid = (float(trials.loc[name, "sink_rate"]) for name in ("softmax", "sigmoid"))
    verdict = compare_sinks(softmax, sigmoid)
    about = f"Do heads give the first token more than 30 % of their attention, and is softmax why? {verdict}"
    table = Table(rows, [HEAD[0], *HEAD[1:]], "Sink rates", caption=PAPERS["sinks"])
    return Section("sinks", "Attention sinks", [Panels(curves, "sinks", fit=True), table], _source(about, "sinks"))


def compare_sinks(softmax: float, sigmoid: float) -> str:
    """Say what two sink rates in per cent show."""
    if softmax >= 5 > sigmoid:
        return "Softmax grew a sink, sigmoid did not, as published."
    if sigmoid >= 5:
        return "Sigmoid has a sink here, which is not as published."
    return "Softmax has no sink here either, so this run says nothing about sigmoid."


# -- constant attention ----------------------------------------------------------------------------------------------


def _papa(folder: Path) -> Section:
    result = ReplaceResult.load(folder / "replace")
    outcome = Outcome(result.scores, result.metadata)
    rows: list[Row] = []
    for key, fraction, name in (("half", 0.5, "half of the heads constant"), ("none", 0.0, "all heads constant")):
        drops = outcome.main[outcome.main["dynamic_fraction"] == fraction]
        interval = drop_interval(result.scores, drops)
        here = f"{number(round(interval.mean, 6), 2)} %" + _spread(interval.ci_low, interval.ci_high)
        rows.append((f"score lost with {name}", "", [here, PUBLISHED[key]]))
    fewest = drop_interval(result.scores, fewest_dynamic(outcome.main))
    verdict = describe_loss(fewest.ci_low, fewest.ci_high)
    about = f"What does a task lose when every head gives its average attention, whatever the text? {verdict}"
    panels = Panels(score_panels(outcome), "papa", fit=True)
    table = Table(rows, HEAD, "Drop of the score, 95 % intervals over three probes")
    return Section("papa", "Attention replaced by constants", [panels, table], _source(about, "papa"))


def describe_loss(low: float, high: float) -> str:
    """Say what the interval of a drop shows."""
    if low > 0:
        return "It loses something here, too."
    if low == high == 0:
        return "Here the score is the same with every probe."
    return f"No loss is shown here; up to {number(high, 2)} % cannot be excluded."


# -- continual learning ----------------------------------------------------------------------------------------------


def _prescale(folder: Path) -> Section:
    result = LearnResult.load(folder / "prescale")
    names = ("finetune", "prescale")
    rows: list[Row] = []
    for name in names:
        score, loss = (_mean(result, name, "til", metric) for metric in ("average_performance", "forgetting"))
        rows.append(
            (
                name,
                "accuracy, points forgotten",
                [f"{number(score, 3)} %, {loss:.1f} points".replace("-", "−"), PUBLISHED[name]],
            )
        )
    about = "Does a head that looks past sink tokens, and is trained before the model, score more after the last task?"
    parts = [Panels(_curves(result, "til"), "prescale-curves", fit=True), Table(rows, HEAD, "Task known")]
    return Section(
        "prescale", "Pre-scaling", parts, _source(f"{about} {_difference(result, names, 'til')}", "prescale")
    )


def _sapt(folder: Path) -> Section:
    result = LearnResult.load(folder / "sapt")
    names = ("sequential-lora", "sapt")
    rows: list[Row] = [
        (name, "accuracy", [f"{number(_mean(result, name, 'cil', 'average_performance'), 3)} %", PUBLISHED[name]])
        for name in names
    ]
    about = "Does a pool of adapters, one a task, chosen by what a text says, score more in the end than one adapter?"
    parts = [Panels(_curves(result, "cil"), "sapt-curves", fit=True), Table(rows, HEAD, "Task not known")]
    return Section("sapt", "SAPT", parts, _source(f"{about} {_difference(result, names, 'cil')}", "sapt"))


def _mean(result: LearnResult, method: str, scenario: str, metric: str) -> float:
    table = result.summary_table
    rows = table[(table["method"] == method) & (table["scenario"] == scenario) & (table["metric"] == metric)]
    return float(rows["mean"].iloc[0]) if len(rows) else math.nan


def _curves(result: LearnResult, scenario: str) -> list[Panel]:
    """Plot the mean score of the tasks learnt so far, a line a method."""
    matrix = result.accuracy_matrix
    seen = average_seen_tasks(matrix[(matrix["scenario"] == scenario) & (matrix["task_index"] <= matrix["after_task"])])
    points = []
    for name in seen["method"].unique():
        means = seen[seen["method"] == name].groupby("after_task")["value"].mean()
        points += line("after", str(name), [*means.index], [*means], "%")
    styles = assign_styles([str(name) for name in seen["method"].unique()])
    return panel("Mean score of the tasks learnt so far", "%", "after", points, styles)


def _difference(result: LearnResult, names: Sequence[str], scenario: str) -> str:
    """Say whether the second method scores more than the first, with the interval over seeds."""
    table = result.differences
    rows = table[
        table["method"].isin(names)
        & table["against"].isin(names)
        & (table["scenario"] == scenario)
        & (table["metric"] == "average_performance")
    ]
    if rows.empty:
        return "Two seeds are needed to compare them."
    row: Any = rows.iloc[0]
    sign = 1 if row["method"] == names[1] else -1
    low, high = sorted((sign * row["ci_low"], sign * row["ci_high"]))
    points = f"{names[1]} is {sign * row['difference']:+.1f} points from {names[0]}{_spread(low, high)}"
    if math.isnan(low) or low <= 0 <= high:
        return f"Here that cannot be told: {points}."
    return f"Here {'it does, as published' if low > 0 else 'it does not, against the paper'}: {points}."


def _spread(low: float, high: float) -> str:
    return "" if math.isnan(low) else f" (95 % interval {number(low, 2)} to {number(high, 2)})"


def _source(about: str, paper: str) -> str:
    return f"{about} Published: {PAPERS[paper]}."
