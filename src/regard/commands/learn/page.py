"""Report on continual-learning runs as one self-contained HTML file."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.learn import charts, diagnostics, gate, general, words
from regard.commands.learn import matrix as learn_matrix
from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn import tables as learn_tables
from regard.commands.learn.tables import SCENARIOS, Tables
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
    Text,
    read_asset,
)


def learn_page(tables: Tables, metadata: Mapping[str, Any]) -> str:
    """Return the report on the tables and metadata of a run as one self-contained HTML file."""
    tables = learn_tables.drop_unknown(tables)
    matrix, diagnosed, gates, samples = (tables[name] for name in ("matrix", "diagnostics", "gate", "pseudo"))
    score = words.score_name(metadata)
    data: dict[str, Any] = {
        "styles": learn_tables.assign_styles(matrix),
        "matrix": learn_matrix.make_matrix_data(matrix),
        "curves": charts.make_curve_panels(matrix),
        "diagnostics": diagnostics.average_by_layer(diagnosed, matrix),
        "interference": learn_matrix.make_interference_data(tables["interference"], matrix),
        "gate": gate.make_gate_data(gates, matrix),
    }
    boxes = _boxes(data)
    matrices = _matrix(tables, data["matrix"])
    beside = Panels(diagnostics.make_diagnostic_panels(diagnosed, matrix), "beside-dots")
    gate_parts = [boxes["gate"], *gate.make_score_tables(gates, matrix)]
    sample_dots = diagnostics.make_forgetting_panels(samples, matrix, diagnostics.PSEUDO_PLOTTED)
    sample_parts = [*diagnostics.make_pseudo_tables(samples, matrix), Panels(sample_dots, "pseudo-dots")]
    return Page(
        eyebrow="Regard · continual learning",
        title=words.stream_name(matrix, metadata),
        ledes=words.write_ledes(tables, metadata),
        key_figures=words.make_key_figures(tables, metadata),
        warnings=words.write_warnings(tables, metadata),
        sections=[
            Section("matrix", f"{score} matrix", [matrices], words.describe_matrix(matrix, score)),
            Section("curves", "Forgetting", [boxes["curves"]], words.describe_curves(matrix)),
            Section("metrics", "Metrics", _metrics(tables), _about_metrics(tables["summary"])),
            Section("differences", "Differences", *learn_metrics.make_difference_tables(tables["differences"], matrix)),
            Section("cost", "Cost", _cost(tables), learn_metrics.COST_ABOUT),
            Section("diagnostics", "Diagnostics", [boxes["diagnostics"]], _DIAGNOSTICS),
            Section("beside", "Diagnostics and forgetting", [beside], _BESIDE),
            Section("interference", "Gradient interference", [boxes["interference"]], _INTERFERENCE),
            Section("gate", "Gate", gate_parts, gate.describe_gates(gates)),
            Section("pseudo", "Pseudo samples", sample_parts, diagnostics.PSEUDO_ABOUT),
            Section("general", "Beyond the stream", general.make_general_tables(tables), general.ABOUT),
            Section("stream", "Stream", _stream(metadata), _about_stream(matrix)),
            Section("settings", "Settings", [Record(labels.section(metadata, "config"))]),
            Section("again", "Command", [Command(_command(matrix, metadata))], _AGAIN),
            Section("provenance", "Provenance", [Record(_rest(metadata))]),
        ],
        record=metadata,
        data=data,
        script=read_asset("page.js", __package__),
    ).html()


def _first(tables: Tables) -> tuple[str, dict[str, learn_metrics.Estimate]]:
    """Return the first scenario with an AP, and the AP by method."""
    estimates = {scenario: learn_metrics.make_estimates(tables["summary"], scenario) for scenario in SCENARIOS}
    scenario = next((scenario for scenario in SCENARIOS if "average_performance" in estimates[scenario]), "til")
    return scenario, estimates[scenario].get("average_performance", {})


def _same(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


def _matrix(tables: Tables, matrices: Mapping[str, Any]) -> Box:
    """Make the box of two matrices and its fields: the best method beside the first one."""
    methods = matrices["methods"]
    names = learn_metrics.rank_methods(methods, _first(tables)[1])
    best = next((name for name in names if name not in learn_metrics.REFERENCES), names[0])
    other = next((name for name in methods if name != best), "")
    beside = {**(_same(methods) if len(methods) > 1 else {}), "": "none"}
    fields = [
        Select("matrix-method", "Method", _same(methods), best),
        Select("matrix-beside", "Compare with", beside, other),
        Select("matrix-run", "Run", _same(matrices["runs"])),
        Select("matrix-setting", "Scenario", matrices["settings"]),
    ]
    return Box(names, ["matrix-grids"], fields)


def _boxes(data: Mapping[str, Any]) -> dict[str, Box]:
    """Make the boxes of curves, diagnostics, interference and gates, with their fields."""
    scenarios = {scenario: SCENARIOS[scenario] for scenario in data["curves"]}
    by_layer, interference, gates = (data[name] for name in ("diagnostics", "interference", "gate"))
    methods = by_layer.get("methods", [])
    all_methods = {"": "all methods, after"} if len(methods) > 1 else {}
    afters = {str(after): labels.pluralize(after, "task") for after in interference.get("afters", [])}
    fields = {
        "curves": [Select("curves-setting", "Scenario", scenarios)],
        "diagnostics": [
            Select("diagnostics-method", "Method", {**all_methods, **_same(methods)}),
            Select("diagnostics-task", "Task", _same(by_layer.get("tasks", []))),
        ],
        "interference": [
            Select("interference-method", "Method", _same(interference.get("methods", []))),
            Select("interference-after", "Tasks trained", afters, list(afters)[-1] if afters else ""),
        ],
        "gate": [Select("gate-method", "Method", _same(gates.get("methods", [])))],
    }
    ids = {"interference": ["interference-grids"], "gate": ["gate-grids", "gate-lines"]}
    return {name: Box(data[name], ids.get(name, [f"{name}-lines"]), fields[name]) for name in fields}


def _metrics(tables: Tables) -> list[Part]:
    """Make a table of all metrics per scenario, sorted by AP, and a dot per run."""
    parts: list[Part] = []
    for scenario, name in SCENARIOS.items():
        estimates = learn_metrics.make_estimates(tables["summary"], scenario)
        parts += [Heading(name), _table(estimates, name)] if estimates else []
    return [*parts, Panels(charts.make_metric_panels(tables["metrics"], tables["matrix"]), "metrics-dots")]


def _table(estimates: Mapping[str, Mapping[str, learn_metrics.Estimate]], scenario: str) -> Table:
    methods = list(dict.fromkeys(method for scores in estimates.values() for method in scores))
    rows = []
    for method in learn_metrics.rank_methods(methods, estimates.get("average_performance", {})):
        runs = max(scores[method].n for scores in estimates.values() if method in scores)
        cells = [learn_metrics.format_estimate(scores.get(method)) for scores in estimates.values()]
        rows.append((method, learn_metrics.REFERENCES.get(method, ""), [str(runs), *cells]))
    head = ["Method", "Runs", *(learn_metrics.get_metric(metric).title for metric in estimates)]
    return Table(rows, head, f"Metrics by method, {scenario}")


def _about_metrics(summary: pd.DataFrame) -> str:
    has_intervals = summary[["ci_low", "ci_high"]].notna().all(axis=1).any()
    metrics = [learn_metrics.get_metric(name) for name in learn_metrics.order_metrics(summary["metric"])]
    descriptions = "; ".join(f"{metric.title}: {metric.description}" for metric in metrics if metric.description)
    decreasing = [metric.title for metric in metrics if not metric.higher_is_better]
    direction = f" Lower is better: {', '.join(decreasing)}." if decreasing else ""
    intervals = ", ± half of the 95 % interval" if has_intervals else ""
    units = "Scores are in %, their differences in points."
    return f"Means over runs{intervals}, sorted by AP. {units} {descriptions}.{direction}"


def _cost(tables: Tables) -> list[Part]:
    """Make the table of costs, and dots of score over cost."""
    costs_by_method = learn_metrics.sum_costs(tables["cost"])
    scenario, scores = _first(tables)
    score = f"AP, {SCENARIOS[scenario]}"
    methods = learn_metrics.rank_methods(list(costs_by_method.index), scores)
    means = {name: estimate.mean for name, estimate in scores.items()}
    panels = charts.make_cost_panels(costs_by_method, tables["matrix"], means, score) if means else []
    return [learn_metrics.make_cost_table(costs_by_method, methods, scores, score), Panels(panels, "cost-dots")]


_DIAGNOSTICS = (
    "Measured on dev rows of a task before and after its training; means over runs. Spectral bound: λ_max of "
    "Aᵀ(I − 11ᵀ/n)A. Over-smoothing: mean cosine of two tokens in a layer’s output."
)
_BESIDE = (
    "A dot per task and run, except the last task: points lost by the end, over the value right after its training "
    "(mean over layers). Correlation is not causation."
)
_INTERFERENCE = (
    "Cosine of the loss gradients of two tasks, mean over runs. Below zero, a step that improves one task degrades the "
    "other. Gradients are of the encoder’s weights, or of adapters, which are there only at the end; there are none "
    "where these do not answer (slao and merges)."
)


def _stream(metadata: Mapping[str, Any]) -> list[Part]:
    """Make the table of tasks, the differences between protocols, and the other metadata of the stream."""
    head = ["Task", "Classes", "Train", "Dev", "Test", "SHA-256 of train, dev, test"]
    tasks = Table([_task(one) for one in words.task_records(metadata)], head, "Tasks of the stream")
    excluded = ("tasks", _KEY)
    rest = {key: value for key, value in labels.section(metadata, "stream").items() if key not in excluded}
    return [tasks, *_protocol_parts(metadata), Record(rest)]


def _about_stream(matrix: pd.DataFrame) -> str:
    """Say of which run the rows are, where there are several seeds."""
    first, *others = matrix["seed"].unique()
    if not others:
        return ""
    return f"Rows, hashes and overlaps of the runs with seed {first}; each seed draws its own where rows are drawn."


def _task(task: Mapping[str, Any]) -> Row:
    rows, hashes = labels.section(task, "rows"), labels.section(task, "sha256")
    classes = [str(label) for label in task.get("labels") or []]
    classes_text = f"{len(classes)}: {', '.join(classes)}" if len(classes) <= _MAX_NAMED_CLASSES else str(len(classes))
    short_hashes = ", ".join(str(hashes.get(split) or "–")[:12] for split in _SPLITS)
    cells = [classes_text, *(labels.format_value(rows.get(split)) for split in _SPLITS), short_hashes]
    return str(task.get("name", "")), str(task.get("source") or ""), cells


_MAX_NAMED_CLASSES = 4
"""Classes of a task named in the table, at most."""

_AGAIN = "results.json holds the full configuration; the same data, seeds and versions reproduce these runs."


def _command(matrix: pd.DataFrame, metadata: Mapping[str, Any]) -> str:
    """Return the recorded command line, else one made of the metadata."""
    if metadata.get("command_line"):
        return str(metadata["command_line"])
    parts = ["regard", "learn", words.stream_name(matrix, metadata)]
    parts += ["--method", ",".join(learn_tables.method_names(matrix))]
    model, protocol = labels.section(metadata, "model").get("name"), labels.section(metadata, "stream").get("protocol")
    parts += ["--model", str(model)] if model else []
    parts += ["--seeds", ",".join(str(int(seed)) for seed in matrix["seed"].unique())]
    parts += ["--protocol", str(protocol)] if protocol else []
    return shlex.join(parts)


def _rest(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that no other section shows, with one line per run."""
    rest = {key: value for key, value in metadata.items() if key not in ("config", "stream", "command_line", "runs")}
    runs = {
        run.get("key", str(index)): f"{run.get('method')}, seed {run.get('seed')}, order {run.get('order')}"
        for index, run in enumerate(metadata.get("runs", []), 1)
    }
    return {**rest, "runs": runs} if runs else rest


_KEY = "protocols"
"""Key of the differences in the stream's metadata."""
_PROTOCOLS, _SPLITS = ("paper", "clean"), ("train", "dev", "test")
_SHARED = ("dev_in_test", "train_in_test", "train_in_dev")
_PROTOCOL_HEAD = (
    *("Task", "Dev and test", "Dev in test", "Train in test", "Train in dev"),
    *("Paper: train, dev, test", "Clean: train, dev, test", "Dropped by clean"),
)
_PROTOCOL_ABOUT = (
    "Rows of the published files that occur in two splits, and the rows of each protocol before sampling. Paper keeps "
    "the files as published; dev is the test split if there is no other. Clean drops rows that a later split has, and "
    "takes dev from train where dev was test."
)
_REFUSED = " Clean refuses this stream: a split or a class would have no rows left."
_FILES = {True: "identical files", False: "two files", None: "incomplete"}


def _protocol_parts(metadata: Mapping[str, Any]) -> list[Part]:
    """Make heading, description and table; nothing if the protocols are equal or unknown."""
    entries = labels.section(labels.section(metadata, "stream"), _KEY)
    by_task = {str(name): entry for name, entry in entries.items() if isinstance(entry, Mapping)}
    different = {name: entry for name, entry in by_task.items() if entry.get("paper") != entry.get("clean")}
    if not different:
        return []
    rows = [
        (name, f"tested on {entry.get('evaluated')}", _protocol_cells(entry, _FILES.get(entry.get("identical"), "–")))
        for name, entry in different.items()
    ]
    if len(by_task) > 1:
        rows.append((f"all {len(by_task)} tasks", "", _sum_protocols(list(by_task.values()))))
    refused = any(entry.get("clean") is None for entry in different.values())
    description = _PROTOCOL_ABOUT + (_REFUSED if refused else "")
    return [Heading("Protocols"), Text(description), Table(rows, _PROTOCOL_HEAD, "Differences between protocols")]


def _protocol_cells(entry: Mapping[str, Any], identical: str) -> list[str]:
    sizes = ([labels.section(entry, name).get(split) for split in _SPLITS] for name in _PROTOCOLS)
    texts = ["–" if None in counts else labels.format_value(counts) for counts in sizes]
    shared = [labels.format_value(entry.get(name)) for name in _SHARED]
    return [identical, *shared, *texts, labels.format_value(entry.get("dropped"))]


def _sum_protocols(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sum over all tasks, including those without a difference."""
    known = [entry["identical"] for entry in entries if entry.get("identical") is not None]
    total: dict[str, Any] = {name: _sum([entry.get(name) for entry in entries]) for name in (*_SHARED, "dropped")}
    for name in _PROTOCOLS:
        total[name] = {split: _sum([labels.section(entry, name).get(split) for entry in entries]) for split in _SPLITS}
    return _protocol_cells(total, f"{known.count(True)} of {len(known)} the same")


def _sum(numbers: Sequence[Any]) -> int | None:
    """Sum numbers; None if one is unknown."""
    return None if any(number is None for number in numbers) else sum(numbers)
