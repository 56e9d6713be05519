"""The runs of continual learning on one stream as one HTML file that needs nothing else."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd

from regard.commands.learn import charts as learn_charts
from regard.commands.learn import costs as learn_costs
from regard.commands.learn import diagnostics as learn_diagnostics
from regard.commands.learn import gate as learn_gate
from regard.commands.learn import matrix as learn_matrix
from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn import protocols as learn_protocols
from regard.commands.learn import pseudo as learn_pseudo
from regard.commands.learn import tables as known
from regard.commands.learn import words
from regard.commands.learn.differences import differences
from regard.commands.learn.tables import SETTINGS, Tables
from regard.report import html as markup
from regard.report import labels
from regard.report.page import assemble


def learn_page(tables: Tables, record: Mapping[str, Any]) -> str:
    """The report as one self-contained HTML file: it fetches nothing.

    `tables` holds by name the run folder's tables: "matrix", "metrics" and "summary", and, each empty or missing
    where there is nothing to show, "differences", "cost", "diagnostics", "interference", "gate" and "pseudo"; `record`
    is that of `results.json`, to which it may add `command`. Raises UserError where a table that is needed is missing
    or empty, one lacks a column, or the matrix is of several streams or tells a score twice.
    """
    known.check_tables(tables)
    matrix, title, scored = tables["matrix"], words.title(tables["matrix"], record), words.measure(record)
    data = _data(tables)
    body = "".join(
        [
            markup.header(
                "Regard · continual learning",
                title,
                words.ledes(tables, record),
                words.key_figures(tables, record),
                words.warnings(tables, record),
            ),
            "<main>",
            markup.section("matrix", f"{scored} matrix", _matrix(tables, data), _about_matrix(matrix, scored)),
            markup.section("curves", "Forgetting", _curves(data), _about_curves(matrix)),
            markup.section("metrics", "In numbers", _metrics(tables, data), _about_metrics(tables)),
            markup.section("differences", "Differences", *differences(tables)),
            markup.section("cost", "Cost", _cost(tables, data), learn_costs.ABOUT),
            markup.section("diagnostics", "Diagnostics", _diagnostics(data), _DIAGNOSTICS),
            markup.section(
                "beside", "Diagnostics and forgetting", markup.panels("beside-dots", data["beside"]), _BESIDE
            ),
            markup.section("interference", "Gradient interference", _interference(data), _INTERFERENCE),
            markup.section("gate", "Gate", _gate(tables, data), _about_gate(tables)),
            markup.section("pseudo", "Pseudo samples", _pseudo(tables, data), learn_pseudo.ABOUT),
            markup.section("stream", "Stream", _stream(record)),
            markup.section("settings", "Settings", _nested(labels.section(record, "config"))),
            markup.section("again", "How to run it again", markup.command(_command(matrix, record)), _AGAIN),
            markup.section("provenance", "Provenance", _nested(_rest(record))),
            "</main>",
            markup.footer(record),
        ]
    )
    return assemble(
        f"{title} · Regard",
        body,
        data,
        specifications=learn_charts.specifications(),
        script=markup.asset("page.js", __package__),
    )


def _data(tables: Tables) -> dict[str, Any]:
    """What the page's script reads."""
    matrix, diagnostics = tables["matrix"], known.table(tables, "diagnostics")
    setting, scores = _first(tables)
    means = {name: one.mean for name, one in scores.items()}
    totals = learn_costs.totals(known.table(tables, "cost"))
    return {
        "styles": known.styles(known.methods(matrix)),
        "matrix": learn_matrix.matrices(matrix),
        "curves": learn_charts.curve_panels(matrix),
        "metrics": learn_charts.metric_panels(tables["metrics"], matrix),
        "cost": learn_charts.cost_panels(totals, matrix, means, f"AP, {SETTINGS[setting]}") if means else [],
        "diagnostics": learn_diagnostics.by_layer(diagnostics, matrix),
        "beside": learn_diagnostics.beside_forgetting(diagnostics, matrix),
        "interference": learn_matrix.interference(known.table(tables, "interference"), matrix),
        "gate": learn_gate.gates(known.table(tables, "gate"), matrix),
        "pseudo": learn_pseudo.beside_forgetting(known.table(tables, "pseudo"), matrix),
    }


def _first(tables: Tables) -> tuple[str, dict[str, learn_metrics.Estimate]]:
    """The first setting that has an AP, and the AP by method."""
    found = {one: learn_metrics.final(tables["summary"], one) for one in SETTINGS}
    return next(((one, scores) for one, scores in found.items() if scores), ("til", {}))


def _select(key: str, title: str, options: Sequence[str], values: Sequence[str] = (), chosen: str = "") -> str:
    """A field to choose from; hidden where there is one thing to choose. `values` are what the script reads."""
    each = "".join(
        f'<option value="{escape(value)}"{" selected" if value == chosen else ""}>{escape(name)}</option>'
        for name, value in zip(options, values or options, strict=True)
    )
    hidden = "" if len(options) > 1 else " hidden"
    return f'<label for="{key}"{hidden}>{escape(title)}<select id="{key}">{each}</select></label>'


def _controls(fields: Sequence[str]) -> str:
    return f'<form class="controls" onsubmit="return false" autocomplete="off">{"".join(fields)}</form>'


def _matrix(tables: Tables, data: Mapping[str, Any]) -> str:
    """The fields that choose, and the box of two matrices: the best method's and, beside it, the first one's."""
    found, (_, scores) = data["matrix"], _first(tables)
    names = learn_metrics.ranked(found["methods"], scores)
    best = next((name for name in names if name not in learn_metrics.REFERENCES), names[0])
    other = next((name for name in found["methods"] if name != best), "")
    beside = [*found["methods"], _NONE] if len(names) > 1 else [_NONE]
    fields = [
        _select("matrix-method", "Method", found["methods"], chosen=best),
        _select("matrix-beside", "Beside it", beside, [*beside[:-1], ""], chosen=other),
        _select("matrix-run", "Run", found["runs"]),
        _select("matrix-setting", "Setting", list(found["settings"].values()), list(found["settings"])),
    ]
    return _controls(fields) + markup.panels("matrix-grids", names)


_NONE = "none"


def _about_matrix(matrix: pd.DataFrame, scored: str) -> str:
    return words.about_matrix(matrix, scored, left_out=learn_matrix.left_out(matrix))


def _curves(data: Mapping[str, Any]) -> str:
    there = list(data["curves"])
    chooser = _controls([_select("curves-setting", "Setting", [SETTINGS[one] for one in there], there)])
    return chooser + markup.panels("curves-lines", there) if there else ""


def _about_curves(matrix: pd.DataFrame) -> str:
    return words.about_curves(matrix, learn_charts.SHOWN_TASKS, known.INKS * known.STROKES)


def _metrics(tables: Tables, data: Mapping[str, Any]) -> str:
    """A table of all metrics for each setting, sorted by AP, and a dot for each run."""
    every = ((one, learn_metrics.estimates(tables["summary"], one)) for one in SETTINGS)
    parts = [f"<h3>{name}</h3>{_table(found, name)}" for one, found in every if found for name in [SETTINGS[one]]]
    return "".join(parts) + markup.panels("metrics-dots", data["metrics"])


def _table(found: Mapping[str, Mapping[str, learn_metrics.Estimate]], setting: str) -> str:
    methods = list(dict.fromkeys(method for scores in found.values() for method in scores))
    rows = []
    for method in learn_metrics.ranked(methods, found.get("average_performance", {})):
        runs = max(scores[method].n for scores in found.values() if method in scores)
        cells = [learn_metrics.shown(scores.get(method)) for scores in found.values()]
        rows.append((method, learn_metrics.REFERENCES.get(method, ""), [str(runs), *cells]))
    head = ["Method", "Runs", *(learn_metrics.metric(one).title for one in found)]
    return markup.values_table(head, rows, f"Metrics by method, {setting}")


def _about_metrics(tables: Tables) -> str:
    sure = tables["summary"][["ci_low", "ci_high"]].notna().all(axis=1).any()
    names = learn_metrics.ordered(tables["summary"]["metric"].unique())
    each = [learn_metrics.metric(name) for name in names]
    told = "; ".join(f"{one.title}: {one.about}" for one in each if one.about)
    less = [one.title for one in each if not one.rises]
    low = f" Less is better: {', '.join(less)}." if less else ""
    return f"Means over runs{', ± half of the 95 % interval' if sure else ''}, sorted by AP. {told}.{low}"


def _cost(tables: Tables, data: Mapping[str, Any]) -> str:
    totals = learn_costs.totals(known.table(tables, "cost"))
    setting, scores = _first(tables)
    methods = learn_metrics.ranked([str(name) for name in totals.index], scores)
    table = learn_costs.table(totals, methods, scores, f"AP, {SETTINGS[setting]}")
    return table + markup.panels("cost-dots", data["cost"])


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


def _diagnostics(data: Mapping[str, Any]) -> str:
    found = data["diagnostics"]
    if not found:
        return ""
    methods, every = found["methods"], "all methods, after"
    several = len(methods) > 1
    options, values = ([every] if several else []) + methods, ([""] if several else []) + methods
    fields = [_select("diagnostics-method", "Method", options, values)]
    fields.append(_select("diagnostics-task", "Task", found["tasks"]))
    return _controls(fields) + markup.panels("diagnostics-lines", methods)


def _interference(data: Mapping[str, Any]) -> str:
    found = data["interference"]
    if not found:
        return ""
    afters = [str(after) for after in found["afters"]]
    names = [words.count(int(after), "task") for after in afters]
    fields = [_select("interference-method", "Method", found["methods"])]
    fields.append(_select("interference-after", "Learnt", names, afters, chosen=afters[-1]))
    return _controls(fields) + markup.panels("interference-grids", afters)


def _gate(tables: Tables, data: Mapping[str, Any]) -> str:
    """The field that chooses, the boxes of weights and of lines, and the scores under different weights."""
    found = data["gate"]
    if not found:
        return ""
    methods = found["methods"]
    boxes = markup.panels("gate-grids", methods) + markup.panels("gate-lines", methods)
    scores = learn_gate.scores(known.table(tables, "gate"), tables["matrix"])
    return _controls([_select("gate-method", "Method", methods)]) + boxes + scores


def _about_gate(tables: Tables) -> str:
    return learn_gate.about(known.table(tables, "gate"))


def _pseudo(tables: Tables, data: Mapping[str, Any]) -> str:
    found = learn_pseudo.qualities(known.table(tables, "pseudo"), tables["matrix"])
    return found + markup.panels("pseudo-dots", data["pseudo"])


def _stream(record: Mapping[str, Any]) -> str:
    """The tasks as a table, what the protocols differ in, then all else that is known of the stream."""
    rows = [_task(one) for one in words.tasks(record)]
    head = ["Task", "Classes", "Train", "Dev", "Test", "SHA-256 of train, dev, test"]
    table = markup.values_table(head, rows, "Tasks of the stream") if rows else ""
    shown = ("tasks", learn_protocols.KEY)
    rest = {key: value for key, value in labels.section(record, "stream").items() if key not in shown}
    return table + learn_protocols.protocols(record) + _nested(rest)


def _nested(told: Mapping[str, Any]) -> str:
    return markup.provenance(told) if told else ""


def _task(one: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    rows, hashes = labels.section(one, "rows"), labels.section(one, "sha256")
    splits = ("train", "dev", "test")
    classes = [str(label) for label in one.get("labels") or []]
    named = f"{len(classes)}: {', '.join(classes)}" if len(classes) <= _NAMED else str(len(classes))
    short = ", ".join(str(hashes.get(split) or "–")[:12] for split in splits)
    return (
        str(one.get("name", "")),
        str(one.get("source") or ""),
        [
            named,
            *(markup.in_words(rows.get(split)) for split in splits),
            short,
        ],
    )


_NAMED = 4
"""The most classes of a task that are named in the table."""

_AGAIN = "results.json of this run holds every setting; the same data, seeds and versions give these runs again."


def _command(matrix: pd.DataFrame, record: Mapping[str, Any]) -> str:
    """The command line in the record, else one of stream, methods, model, seeds and protocol."""
    if record.get("command_line"):
        return str(record["command_line"])
    parts = ["regard", "learn", words.title(matrix, record), "--method", ",".join(known.methods(matrix))]
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
