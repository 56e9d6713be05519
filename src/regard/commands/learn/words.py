"""Sentences and key figures of a report on continual learning."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn import tables as learn_tables
from regard.commands.learn.charts import MAX_TASK_PANELS
from regard.commands.learn.heads import describe_head
from regard.commands.learn.lengths import describe_lengths
from regard.commands.learn.matrix import omits_runs
from regard.commands.learn.metrics import REFERENCES, Difference, Estimate, find_ties, format_estimate
from regard.commands.learn.references import describe_references
from regard.commands.learn.row_counts import describe_rows
from regard.commands.learn.tables import SCENARIOS, Tables, count_tasks
from regard.report import labels
from regard.report.labels import format_duration, format_fixed, format_signed, metadata_number, pluralize
from regard.report.page import KeyFigure
from regard.report.panels import INKS
from regard.runs.selection import list_some

_SCENARIO_PHRASES = {"til": "With the task known (TIL)", "cil": "Among the classes of all tasks so far (CIL)"}
SCORE_NAMES = {
    **{"accuracy": "Accuracy", "sari": "SARI", "edit-similarity": "Edit similarity"},
    **{"exact-match": "Exact match", "exact-match-unicode": "Exact match"},
    **{"rouge-l": "Rouge-L", "rouge-l-unicode": "Rouge-L"},
}
LAYERS = {"auto": "queries and values", "all-linear": "all linear layers"}
MAX_WARNINGS = 4
"""Warnings of runs that a report repeats, at most."""


def stream_name(matrix: pd.DataFrame, metadata: Mapping[str, Any]) -> str:
    """Return the stream's name from the metadata, else from the matrix."""
    return str(labels.section(metadata, "stream").get("name") or matrix["stream"].iloc[0])


def write_ledes(tables: Tables, metadata: Mapping[str, Any]) -> list[str]:
    """Write what was trained, then the outcome of each scenario."""
    matrix = tables["matrix"]
    outcomes = [_write_outcome(tables, scenario) for scenario in learn_tables.find_scenarios(matrix)]
    return [_write_run(matrix, metadata), *outcomes]


def _write_run(matrix: pd.DataFrame, metadata: Mapping[str, Any]) -> str:
    num_runs, orders = len(matrix[learn_tables.RUN_KEYS].drop_duplicates()), matrix["order"].unique()
    parts = [pluralize(count_tasks(matrix), "task"), pluralize(matrix["method"].nunique(), "method")]
    parts += [pluralize(matrix["seed"].nunique(), "seed"), pluralize(num_runs, "run")]
    parts.append(f"order {orders[0]}" if len(orders) == 1 else f"{len(orders)} orders")
    model = labels.section(metadata, "model").get("name")
    protocol = labels.section(metadata, "stream").get("protocol")
    parts += [str(model)] if model else []
    parts += [f"protocol {protocol}"] if protocol else []
    return " · ".join(parts)


def _write_outcome(tables: Tables, scenario: str) -> str:
    """Compare the methods in one scenario: AP, paired difference, forgetting, upper bound."""
    estimates = learn_metrics.make_estimates(tables["summary"], scenario)
    scores, forgetting = estimates.get("average_performance", {}), estimates.get("forgetting", {})
    competitors = rank_competitors(scores)
    if not competitors:
        return ""
    sentences = [_write_ranking(competitors, scores)]
    if len(find_ties(competitors, scores)) == 1:
        sentences += _write_difference(tables, scenario, competitors)
    clauses = _compare_forgetting(rank_competitors(forgetting), forgetting)
    if "joint" in scores:
        clauses.append(f"joint, {REFERENCES['joint']}, reaches AP {format_fixed(scores['joint'].mean)}")
    sentences += [f"{'; '.join(clauses)}."] if clauses else []
    return f"{_SCENARIO_PHRASES[scenario]}: {' '.join(sentences)}"


def rank_competitors(scores: Mapping[str, Estimate]) -> list[str]:
    """Rank the methods that learn task after task, highest mean first."""
    return learn_metrics.rank_methods([name for name in scores if name not in REFERENCES], scores)


def _write_ranking(competitors: Sequence[str], scores: Mapping[str, Estimate]) -> str:
    name, ties = competitors[0], find_ties(competitors, scores)
    if len(competitors) == 1:
        return f"{name} ends at AP {format_estimate(scores[name])}."
    following = competitors[len(ties) :]
    before = ""
    if following:
        names = join_names(find_ties(following, scores), 3)
        before = f", before {names} with {format_estimate(scores[following[0]])}"
    if len(ties) > 1:
        return f"{join_names(ties)} end with the same AP, {format_fixed(scores[name].mean)}{before}."
    overlap = describe_overlap(scores[name], scores[competitors[1]])
    return f"{name} has the highest AP, {format_estimate(scores[name])}{before}; {overlap}."


def join_names(names: Sequence[str], max_names: int = 4) -> str:
    """Join names as in "a, b and c"; names beyond `max_names` are counted."""
    rest = len(names) - max_names
    *parts, last = [*names[:max_names], f"{rest} more"] if rest > 0 else names
    return f"{', '.join(parts)} and {last}" if parts else last


def describe_overlap(estimate: Estimate, other: Estimate) -> str:
    """Say whether two 95 % intervals overlap."""
    if not (estimate.has_interval and other.has_interval):
        return "there are no intervals, so this may be chance"
    if estimate.ci_low == estimate.ci_high and other.ci_low == other.ci_high:
        return "each is the same in all runs, which gives no interval, so this may be chance"
    return "the 95 % intervals overlap" if estimate.overlaps(other) else "the 95 % intervals do not overlap"


def _write_difference(tables: Tables, scenario: str, competitors: Sequence[str]) -> list[str]:
    """Write the difference of AP between the best method and the next one, else the first one, if known."""
    differences = learn_metrics.make_differences(tables["differences"], scenario).get("average_performance", [])
    best = competitors[0]
    pairs = [{best, other} for other in (*competitors[1:2], learn_tables.method_names(tables["matrix"])[0])]
    known = [item for pair in pairs for item in differences if {item.method, item.against} == pair]
    return [_describe_difference(item, best) for item in known if item.has_interval][:1]


def _describe_difference(difference: Difference, method: str) -> str:
    """Describe the difference of `method` against the other one."""
    difference = difference if difference.method == method else difference.reverse()
    zero = "which contains 0" if difference.contains_zero else "which does not contain 0"
    interval = f"95 % interval {learn_metrics.format_difference_interval(difference)}, {zero}"
    value = format_signed(difference.mean, 2)
    return f"Paired by run, the difference to {difference.against} is {value} points ({interval})."


def _compare_forgetting(methods: Sequence[str], forgetting: Mapping[str, Estimate]) -> list[str]:
    """Name the methods that forget least and most; `methods` starts with the one that forgets most."""
    if not methods:
        return []
    most, least = find_ties(methods, forgetting), find_ties(methods[::-1], forgetting)
    if len(most) == len(methods):
        return [_say_forgetting(most, "the same" if most[1:] else "", forgetting[most[0]].mean)]
    lowest, highest = forgetting[least[0]], forgetting[most[0]]
    overlap = [describe_overlap(lowest, highest)] if lowest.has_interval and highest.has_interval else []
    return [
        *(
            _say_forgetting(names, extreme, forgetting[names[0]].mean) + (" each" if names[1:] else "")
            for names, extreme in ((least, "least"), (most, "most"))
        ),
        *overlap,
    ]


def _say_forgetting(names: Sequence[str], extreme: str, points: float) -> str:
    """Say how much methods forget; less than nothing is a gain, of which who forgets least has most."""
    gains = round(points, 2) < 0
    verb = ("gain" if gains else "forget") + ("" if names[1:] else "s")
    if extreme == "most" and not round(points, 2):
        extreme = ""  # others gain
    extreme = {"least": "most", "most": "least"}.get(extreme, extreme) if gains else extreme
    words = [verb, extreme, "on earlier tasks" if gains else ""]
    text = " ".join(word for word in words if word) + (", " if extreme else " ")
    return f"{join_names(names)} {text}{format_fixed(abs(points))} points"


def write_warnings(tables: Tables, metadata: Mapping[str, Any]) -> list[str]:
    """Write one sentence for everything that makes the numbers incomplete, uncertain or biased."""
    matrix, notes = tables["matrix"], []
    unfinished = learn_tables.find_unfinished_runs(matrix)
    if unfinished:
        names = [f"{method} with seed {seed} ({after})" for method, seed, after in unfinished]
        num_runs = pluralize(len(unfinished), "run")
        notes.append(f"{num_runs} without a score after the last task (tasks trained): {list_some(names, 3)}.")
    if _max_runs(matrix) == 1:
        notes.append("One run of each method: there are no intervals, and differences may be chance.")
    runs_by_method = matrix.groupby("method")[["seed", "order"]].apply(lambda rows: frozenset(map(tuple, rows.values)))
    if runs_by_method.nunique() > 1:
        notes.append("The methods were not run with the same seeds and orders.")
    if labels.section(metadata, "stream").get("protocol") == "paper":
        notes.append("Protocol paper: splits may share rows, and dev may be the test split: scores may be too high.")
    notes += describe_rows(labels.section(metadata, "stream"))
    runs = metadata.get("runs", [])
    by_seed = {run.get("seed"): run for run in reversed(runs)}
    lengths = describe_lengths(list(by_seed.values()))
    head = describe_head(runs, str(labels.section(metadata, "config").get("head")))
    choices = (lengths[:1].upper() + lengths[1:], describe_references(runs), head[:1].upper() + head[1:])
    notes += [f"{choice}." for choice in choices if choice]
    notes += [*_write_rates(runs), *_write_layers(runs), *_write_unlearnt(runs)]
    warnings = [
        f"{run['method']}, seed {run['seed']}: {text}"
        for run in runs
        for text in run.get("warnings", [])
        if not (run.get("not_learnt") and text.startswith("scores: "))  # named above
    ]
    rest = len(warnings) - MAX_WARNINGS
    omitted = [f"{pluralize(rest, 'warning')} more in results.json."] if rest > 0 else []
    return [*notes, *warnings[:MAX_WARNINGS], *omitted]


def _write_rates(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the learning rates of methods that had different ones."""
    used = {
        (run["learning_rate"], str(run.get("method"))): run.get("own_rate") for run in runs if run.get("learning_rate")
    }
    rates = sorted({rate for rate, _ in used})
    if len(rates) < 2:
        return []
    listed = [f"{rate:g} ({', '.join(name for other, name in used if other == rate)})" for rate in rates]
    own = list(dict.fromkeys(name for (_, name), keeps in used.items() if keeps))
    sentences = [f"Learning rates: {'; '.join(listed)}."]
    if own:
        sentences.append(f"{join_names(own)} {'keep rates of their' if len(own) > 1 else 'keeps a rate of its'} own.")
    if len({rate for (rate, _), keeps in used.items() if not keeps}) > 1:
        sentences.append(f"--learning-rate gives {'the others' if own else 'all'} the same.")
    return [" ".join(sentences)]


def _write_layers(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the layers and ranks of methods whose adapters differ in them."""
    methods: dict[tuple[str, int], list[str]] = {}
    for run in runs:
        settings = labels.section(run, "settings")
        if {"target_modules", "r"} <= settings.keys() and settings.get("adapter_type", "lora") == "lora":
            named = methods.setdefault((str(settings["target_modules"]), int(settings["r"])), [])
            named.extend([str(run.get("method"))] if str(run.get("method")) not in named else [])
    if len(methods) < 2:
        return []
    listed = [
        f"{LAYERS.get(layers, layers)}, rank {rank} ({', '.join(names)})" for (layers, rank), names in methods.items()
    ]
    return [f"Layers with adapters: {'; '.join(listed)}. --set target_modules and r, both, gives all the same."]


def _write_unlearnt(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name every method and task that was not learnt, and in how many runs of the method."""
    counts = Counter(str(run.get("method")) for run in runs)
    unlearnt: dict[str, Counter[str]] = {}
    for run in runs:
        if tasks := run.get("not_learnt"):
            unlearnt.setdefault(str(run.get("method")), Counter()).update(tasks)
    if not unlearnt:
        return []
    parts = []
    for method, tasks in unlearnt.items():
        runs_of = {task: f" ({n} of {counts[method]} runs)" if n < counts[method] else "" for task, n in tasks.items()}
        parts.append(f"{method}: {', '.join(f'{task}{text}' for task, text in runs_of.items())}")
    problem = "Not learnt, no better than the most frequent label, or 0, right after training"
    return [f"{problem}: {'; '.join(parts)}. Try more epochs or another learning rate."]


def _max_runs(matrix: pd.DataFrame) -> int:
    return int(matrix[learn_tables.RUN_KEYS].drop_duplicates().groupby("method").size().max())


def make_key_figures(tables: Tables, metadata: Mapping[str, Any]) -> list[KeyFigure]:
    """Make the highest AP and the least FGT of each scenario, then the stream's size and the time."""
    matrix, figures = tables["matrix"], []
    scenarios = learn_tables.find_scenarios(matrix)
    for scenario in scenarios:
        suffix = f", {SCENARIOS[scenario]}" if len(scenarios) > 1 else ""
        estimates = learn_metrics.make_estimates(tables["summary"], scenario)
        for name, extreme in (("average_performance", "highest"), ("forgetting", "least")):
            scores = estimates.get(name, {})
            methods = rank_competitors(scores)[:: 1 if extreme == "highest" else -1]
            title = f"{learn_metrics.get_metric(name).title}{suffix}"
            figures += [_best_figure(title, extreme, methods, scores)] if methods else []
    classes = {str(label) for task in task_records(metadata) for label in task.get("labels", [])}
    note = pluralize(len(classes), "class", "classes") if classes else ""
    return [*figures, KeyFigure("Tasks", str(count_tasks(matrix)), note), *_time_figures(metadata)]


def _best_figure(title: str, extreme: str, methods: Sequence[str], scores: Mapping[str, Estimate]) -> KeyFigure:
    """Make the figure of the first method, or of all that tie with it."""
    ties, best = find_ties(methods, scores), scores[methods[0]]
    label = f"{title}, {extreme}" if len(ties) < len(methods) else title
    if len(ties) == 1:
        return KeyFigure(label, format_estimate(best), methods[0])
    return KeyFigure(label, format_fixed(best.mean), f"the same: {join_names(ties)}")


def task_records(metadata: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the metadata of each task."""
    return list(labels.section(metadata, "stream").get("tasks", []))


def score_name(metadata: Mapping[str, Any]) -> str:
    """Return the name of the score of all tasks, "Score" where they differ."""
    names = {str(task.get("metric") or "accuracy") for task in task_records(metadata)} or {"accuracy"}
    return SCORE_NAMES.get(names.pop(), "Score") if len(names) == 1 else "Score"


def _time_figures(metadata: Mapping[str, Any]) -> list[KeyFigure]:
    seconds, memory = metadata_number(metadata, "cost", "seconds"), metadata_number(metadata, "cost", "peak_memory_mib")
    if seconds is None:
        return []
    device = labels.section(metadata, "cost").get("device")
    notes = [f"on {device}"] if device else []
    notes += [] if memory is None else [f"peak memory {labels.number(memory, 3)} MiB"]
    return [KeyFigure("Time", format_duration(seconds), ", ".join(notes))]


def describe_matrix(matrix: pd.DataFrame, score: str) -> str:
    """Describe rows, columns and shading of the matrices; `score` names their unit."""
    one_order = learn_tables.has_one_order(matrix)
    positions = "" if one_order else " Orders differ between runs: the mean is by position in the stream."
    future = " Faint cells: tasks not yet trained." if len(learn_tables.select_trained(matrix)) < len(matrix) else ""
    means = " The page holds only means, to stay small; matrix.parquet has every run." if omits_runs(matrix) else ""
    return f"{score} in per cent. Rows: tasks trained so far. Columns: the task scored.{future}{positions}{means}"


def describe_curves(matrix: pd.DataFrame) -> str:
    """Describe lines and bands of the curves, and which tasks and methods they leave out."""
    num_methods, num_old_tasks = matrix["method"].nunique(), count_tasks(matrix) - 1
    band = "; band: 95 % interval (Student’s t)" if num_methods <= INKS else ""
    parts = [f"Means over runs{band}." if _max_runs(matrix) > 1 else "One run of each method."]
    if num_old_tasks > MAX_TASK_PANELS:
        parts.append(f"{MAX_TASK_PANELS} of the {num_old_tasks} old tasks are drawn, spread evenly.")
    num_drawn = len(learn_tables.assign_styles(matrix))
    if num_methods > num_drawn:
        parts.append(f"Only the first {num_drawn} of {num_methods} methods are drawn.")
    return " ".join(parts)
