"""The runs of continual learning on one stream as one HTML file that needs nothing else."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import pandas as pd

from regard.commands.learn import charts, costs, gate, protocols, pseudo, words
from regard.commands.learn import diagnostics as learn_diagnostics
from regard.commands.learn import matrix as learn_matrix
from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn import tables as learn_tables
from regard.commands.learn.differences import differences
from regard.commands.learn.tables import SETTINGS, Tables
from regard.report import labels
from regard.report.page import (
    Box,
    Command,
    Heading,
    Page,
    Panels,
    Part,
    Record,
    Row,
    Section,
    Select,
    Table,
    read_asset,
)
from regard.report.words import format_value


def learn_page(tables: Tables, record: Mapping[str, Any]) -> str:
    """Return the report as one self-contained HTML file.

    Args:
        tables: The run folder's tables by name: "matrix", "metrics" and "summary", and, where there is something to
            show, "differences", "cost", "diagnostics", "interference", "gate" and "pseudo".
        record: The metadata in `results.json`. It may add `command`.

    Raises:
        UserError: A table that is needed is missing or empty, a table lacks a column, or the matrix is of several
            streams or has a score twice.
    """
    learn_tables.check_tables(tables)
    matrix, title, scored = tables["matrix"], words.title(tables["matrix"], record), words.measure(record)
    data = _data(tables)
    table = {name: learn_tables.table(tables, name) for name in ("diagnostics", "gate", "pseudo")}
    beside = Panels(learn_diagnostics.beside_forgetting(table["diagnostics"], matrix), "beside-dots")
    about_matrix = words.about_matrix(matrix, scored, left_out=learn_matrix.left_out(matrix))
    about_curves = words.about_curves(matrix, charts.SHOWN_TASKS, learn_tables.INKS * learn_tables.STROKES)
    return Page(
        eyebrow="Regard · continual learning",
        title=title,
        ledes=words.ledes(tables, record),
        key_figures=words.key_figures(tables, record),
        warnings=words.warnings(tables, record),
        sections=[
            Section("matrix", f"{scored} matrix", [_matrix(tables, data)], about_matrix),
            Section("curves", "Forgetting", [_curves(data)], about_curves),
            Section("metrics", "In numbers", _metrics(tables), _about_metrics(tables)),
            Section("differences", "Differences", *differences(tables)),
            Section("cost", "Cost", _cost(tables), costs.ABOUT),
            Section("diagnostics", "Diagnostics", [_diagnostics(data)], _DIAGNOSTICS),
            Section("beside", "Diagnostics and forgetting", [beside], _BESIDE),
            Section("interference", "Gradient interference", [_interference(data)], _INTERFERENCE),
            Section("gate", "Gate", [_gate(data), *gate.scores(table["gate"], matrix)], gate.about(table["gate"])),
            Section("pseudo", "Pseudo samples", _pseudo(table["pseudo"], matrix), pseudo.ABOUT),
            Section("stream", "Stream", _stream(record)),
            Section("settings", "Settings", [Record(labels.section(record, "config"))]),
            Section("again", "How to run it again", [Command(_command(matrix, record))], _AGAIN),
            Section("provenance", "Provenance", [Record(_rest(record))]),
        ],
        record=record,
        data=data,
        script=read_asset("page.js", __package__),
    ).html()


def _data(tables: Tables) -> dict[str, Any]:
    """What the command's own script draws."""
    matrix = tables["matrix"]
    return {
        "styles": learn_tables.styles(learn_tables.methods(matrix)),
        "matrix": learn_matrix.matrices(matrix),
        "curves": charts.curve_panels(matrix),
        "diagnostics": learn_diagnostics.by_layer(learn_tables.table(tables, "diagnostics"), matrix),
        "interference": learn_matrix.interference(learn_tables.table(tables, "interference"), matrix),
        "gate": gate.gates(learn_tables.table(tables, "gate"), matrix),
    }


def _first(tables: Tables) -> tuple[str, dict[str, learn_metrics.Estimate]]:
    """The first setting that has an AP, and the AP by method."""
    found = {one: learn_metrics.final(tables["summary"], one) for one in SETTINGS}
    return next(((one, scores) for one, scores in found.items() if scores), ("til", {}))


def _same(names: list[str]) -> dict[str, str]:
    """Options whose values are their names."""
    return dict(zip(names, names, strict=True))


def _matrix(tables: Tables, data: Mapping[str, Any]) -> Box:
    """The fields that choose, and the box of two matrices: the best method's and, beside it, the first one's."""
    found, (_, scores) = data["matrix"], _first(tables)
    methods = found["methods"]
    names = learn_metrics.ranked(methods, scores)
    best = next((name for name in names if name not in learn_metrics.REFERENCES), names[0])
    other = next((name for name in methods if name != best), "")
    beside = {**(_same(methods) if len(methods) > 1 else {}), "": "none"}
    fields = [
        Select("matrix-method", "Method", _same(methods), best),
        Select("matrix-beside", "Beside it", beside, other),
        Select("matrix-run", "Run", _same(found["runs"])),
        Select("matrix-setting", "Setting", found["settings"]),
    ]
    return Box(names, ["matrix-grids"], fields)


def _curves(data: Mapping[str, Any]) -> Box:
    there = {setting: SETTINGS[setting] for setting in data["curves"]}
    return Box(there, ["curves-lines"], [Select("curves-setting", "Setting", there)])


def _metrics(tables: Tables) -> list[Part]:
    """A table of all metrics for each setting, sorted by AP, and a dot for each run."""
    parts: list[Part] = []
    for setting, name in SETTINGS.items():
        found = learn_metrics.estimates(tables["summary"], setting)
        parts += [Heading(name), _table(found, name)] if found else []
    return [*parts, Panels(charts.metric_panels(tables["metrics"], tables["matrix"]), "metrics-dots")]


def _table(found: Mapping[str, Mapping[str, learn_metrics.Estimate]], setting: str) -> Table:
    methods = list(dict.fromkeys(method for scores in found.values() for method in scores))
    rows = []
    for method in learn_metrics.ranked(methods, found.get("average_performance", {})):
        runs = max(scores[method].n for scores in found.values() if method in scores)
        cells = [learn_metrics.shown(scores.get(method)) for scores in found.values()]
        rows.append((method, learn_metrics.REFERENCES.get(method, ""), [str(runs), *cells]))
    head = ["Method", "Runs", *(learn_metrics.metric(one).title for one in found)]
    return Table(rows, head, f"Metrics by method, {setting}")


def _about_metrics(tables: Tables) -> str:
    sure = tables["summary"][["ci_low", "ci_high"]].notna().all(axis=1).any()
    names = learn_metrics.ordered(tables["summary"]["metric"].unique())
    each = [learn_metrics.metric(name) for name in names]
    told = "; ".join(f"{one.title}: {one.about}" for one in each if one.about)
    less = [one.title for one in each if not one.rises]
    low = f" Less is better: {', '.join(less)}." if less else ""
    return f"Means over runs{', ± half of the 95 % interval' if sure else ''}, sorted by AP. {told}.{low}"


def _cost(tables: Tables) -> list[Part]:
    """What each method cost as a table, and as dots beside its score."""
    totals = costs.totals(learn_tables.table(tables, "cost"))
    setting, scores = _first(tables)
    score = f"AP, {SETTINGS[setting]}"
    methods = learn_metrics.ranked([str(name) for name in totals.index], scores)
    means = {name: one.mean for name, one in scores.items()}
    panels = charts.cost_panels(totals, tables["matrix"], means, score) if means else []
    return [costs.table(totals, methods, scores, score), Panels(panels, "cost-dots")]


_DIAGNOSTICS = (
    "On the dev rows of a task, before and after it was learnt; means over runs. The spectral bound is λ_max of "
    "Aᵀ(I − 11ᵀ/n)A, over-smoothing the mean cosine of two tokens of a layer’s output."
)
_BESIDE = (
    "A dot for each task of each run, but the last: what it lost by the end, over what was measured right after it "
    "was learnt (the mean over layers). A correlation is no cause."
)
_INTERFERENCE = (
    "Cosine of the loss gradients of two tasks, mean over runs. Below zero, a step that helps one task harms the other."
)


def _diagnostics(data: Mapping[str, Any]) -> Box:
    found = data["diagnostics"]
    methods = found.get("methods", [])
    every = {"": "all methods, after"} if len(methods) > 1 else {}
    fields = [
        Select("diagnostics-method", "Method", {**every, **_same(methods)}),
        Select("diagnostics-task", "Task", _same(found.get("tasks", []))),
    ]
    return Box(found, ["diagnostics-lines"], fields)


def _interference(data: Mapping[str, Any]) -> Box:
    found = data["interference"]
    afters = {str(after): words.count(int(after), "task") for after in found.get("afters", [])}
    fields = [
        Select("interference-method", "Method", _same(found.get("methods", []))),
        Select("interference-after", "Learnt", afters, list(afters)[-1] if afters else ""),
    ]
    return Box(found, ["interference-grids"], fields)


def _gate(data: Mapping[str, Any]) -> Box:
    found = data["gate"]
    fields = [Select("gate-method", "Method", _same(found.get("methods", [])))]
    return Box(found, ["gate-grids", "gate-lines"], fields)


def _pseudo(table: pd.DataFrame, matrix: pd.DataFrame) -> list[Part]:
    return [*pseudo.qualities(table, matrix), Panels(pseudo.beside_forgetting(table, matrix), "pseudo-dots")]


def _stream(record: Mapping[str, Any]) -> list[Part]:
    """The tasks as a table, what the protocols differ in, then all else that is known of the stream."""
    head = ["Task", "Classes", "Train", "Dev", "Test", "SHA-256 of train, dev, test"]
    tasks = Table([_task(one) for one in words.tasks(record)], head, "Tasks of the stream")
    shown = ("tasks", protocols.KEY)
    rest = {key: value for key, value in labels.section(record, "stream").items() if key not in shown}
    return [tasks, *protocols.protocols(record), Record(rest)]


def _task(one: Mapping[str, Any]) -> Row:
    rows, hashes = labels.section(one, "rows"), labels.section(one, "sha256")
    splits = ("train", "dev", "test")
    classes = [str(label) for label in one.get("labels") or []]
    named = f"{len(classes)}: {', '.join(classes)}" if len(classes) <= _NAMED else str(len(classes))
    short = ", ".join(str(hashes.get(split) or "–")[:12] for split in splits)
    cells = [named, *(format_value(rows.get(split)) for split in splits), short]
    return str(one.get("name", "")), str(one.get("source") or ""), cells


_NAMED = 4
"""The most classes of a task that are named in the table."""

_AGAIN = "results.json of this run holds every setting; the same data, seeds and versions give these runs again."


def _command(matrix: pd.DataFrame, record: Mapping[str, Any]) -> str:
    """The command line in the record, else one of stream, methods, model, seeds and protocol."""
    if record.get("command_line"):
        return str(record["command_line"])
    parts = ["regard", "learn", words.title(matrix, record), "--method", ",".join(learn_tables.methods(matrix))]
    model, protocol = labels.section(record, "model").get("name"), labels.section(record, "stream").get("protocol")
    parts += ["--model", str(model)] if model else []
    parts += ["--seeds", ",".join(str(int(seed)) for seed in matrix["seed"].unique())]
    parts += ["--protocol", str(protocol)] if protocol else []
    return shlex.join(parts)


_SHOWN = ("config", "stream", "command_line")


def _rest(record: Mapping[str, Any]) -> dict[str, Any]:
    """What no other section shows; of the runs what makes them and where they stand."""
    rest = {key: value for key, value in record.items() if key not in _SHOWN}
    runs = [one for one in rest.pop("runs", None) or [] if isinstance(one, Mapping)]
    told = {str(one.get("key") or number): _run(one) for number, one in enumerate(runs, 1)}
    return {**rest, "runs": told} if told else rest


def _run(one: Mapping[str, Any]) -> str:
    parts = [one.get("method"), f"seed {one.get('seed')}", f"order {one.get('order')}"]
    parts += [one["state"]] if isinstance(one.get("state"), str) else []
    return ", ".join(str(part) for part in parts)
