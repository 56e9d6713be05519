"""Tables and text of docs/sapt.md."""

from collections.abc import Sequence
from pathlib import Path

from experiments.common.claims import DASH, Verdict, format_difference, format_interval
from experiments.common.comparison import ACCURACY, format_p_value, where
from experiments.common.papers import Paper
from experiments.common.parts import Page, Table, count_verdicts, item, join_words
from experiments.sapt.analysis_tables import case_table, curve_table, describe_decoder
from experiments.sapt.claims import CLAIMS, LLAMA, T5
from experiments.sapt.figures import make_figures
from experiments.sapt.run import ROWS, list_rows
from experiments.sapt.tables import PUBLISHED, SAPT, SCORED, UNREFLECTED, WHEN, Tables

SCORES = {
    "AP": (ACCURACY, "cil"),
    "own AP": (ACCURACY, "til"),
    "F.Ra": ("forgetting_rate", "cil"),
    "BWT": ("bwt", "cil"),
    "learning": ("learning_accuracy", "cil"),
    "own learning": ("learning_accuracy", "til"),
    "FWT": ("fwt", "til"),
}
"""Columns of scores: metric and scenario."""
SHOWN = (
    *(SAPT, UNREFLECTED, PUBLISHED, "sapt, gate published, λ 1", "sequential-lora", "incremental-lora", "replay-lora"),
    *("o-lora", "slao", "gainlora", "epi", "separate", "joint"),
)
"""Rows of the table on the page."""


def make_page(tables: Tables, verdicts: Sequence[Verdict]) -> Page:
    """Return the page of the experiment."""
    scores, figures = score_table(tables), make_figures(tables)
    files = [
        ("sapt-metrics.csv", "means of all metrics"),
        ("sapt-matrix.csv", "all accuracies, run by run"),
        ("sapt-gate.csv", "the gate, run by run and task"),
        ("sapt-analyses.csv", "all numbers of the analyses"),
    ]
    return Page(
        "sapt",
        "SAPT on MiniLM",
        [
            "*SAPT* (Zhao et al. 2024, arXiv 2401.08295) used T5 and LLaMA-2; this is a small encoder: `python -m "
            "experiments.sapt.run ORDER --data DIR`.",
            scores.select(["row", "runs", "AP", "F.Ra", "own learning", "s"], SHOWN, tables.record.get("not_run", ())),
            *(figure for figure in figures if figure.name == "sapt-curves"),
            "AP: accuracy after the last task among the labels of all tasks (no task id); F.Ra: loss since each task's "
            "best; own learning: accuracy of each task just learnt, among its own labels; s: seconds of training. "
            "Means over runs (a seed with an order) ± half the 95 % interval (Student's t).",
            f"`sapt` is here `--set {describe_row(SAPT)}`, not the default of `--method sapt`, whose router is not "
            "trained ([routing.md](routing.md) compares both): with `gate=open` the router learns a task's rows before "
            "the adapter, which begins as the one before it. `sapt, gate published` has the published gate.",
            "## Verdicts",
            f"Tested claims: {count_verdicts([one for one in verdicts if one.claim.judge])}. Each with its verdict, "
            "published numbers and the rules are in [claims.md](claims.md).",
            "## Settings and cost",
            describe_settings(tables),
            "## Further analyses",
            "`python -m experiments.sapt.analyses NAME --data DIR`: five tasks (sst2, agnews, dbpedia, amazon, rte), "
            "one seed: no proof. Numbers are AP.",
            describe_analyses(tables),
            "### Soft prompts for adapters",
            describe_prompts(tables),
            "### Fifty tasks",
            describe_fifty(tables),
            "## Not run",
            describe_missing(tables),
        ],
        (
            scores,
            difference_table(tables),
            order_table(tables),
            gate_table(tables),
            task_table(tables),
            case_table(tables.analyses),
            curve_table(tables.analyses),
        ),
        figures,
        files,
    )


# -- text ------------------------------------------------------------------------------------------------------------


def describe_row(row: str) -> str:
    """Return the settings of a row as the command line takes them."""
    return " ".join(f"{name}={value}" for name, value in ROWS[row].settings.items())


def describe_settings(tables: Tables) -> str:
    """Return model, tasks, budget, exceptions, seeds and versions."""
    record, budget = tables.record, tables.record["budget"]
    orders = record["orders"]
    absent = sorted({task for order in orders.values() for task in order["missing"]})
    rates = join_words(f"`{row}` {spec['rate']:g}" for row, spec in record["rows"].items() if spec["rate"] is not None)
    named = join_words(
        sorted({f"torch {one['torch']}, transformers {one['transformers']}" for one in record["versions"]})
    )
    revision = f" Last revision {record['revision']}." if record["revision"] else ""
    hours = tables.cost["run_seconds"].sum() / 3600
    return (
        f"`{record['model']}`, frozen, with a label-text head over all labels. Tasks of {record['stream']} with their "
        f"instructions, order{'s' if len(orders) > 1 else ''} {join_words(orders)}; no data for {join_words(absent)}. "
        f"At most {record['train_rows_a_task']} training and {record['test_rows_a_task']} test rows a task, "
        f"{budget['length']} tokens, rank {record['lora']['rank']}, {budget['num_epochs']} epochs at "
        f"{budget['learning_rate']:g} in batches of {budget['batch_size']}, {budget['precision']}. Other rates: "
        f"{rates}. `sapt` reflects on {record['rows'][SAPT]['settings'].get('memory_size', 0)} vectors a task "
        "(paper: 2 % of its rows); the published gate's λ is of the mean over tasks, not of their sum. `l2p` learns a "
        f"task among its own classes. Chance among own labels: {chance(tables):.1f} %. Seeds "
        f"{join_words(map(str, record['seeds']))}. "
        f"{len(tables.cost)} runs took {hours:.1f} hours on one core each. FLOPs were counted on four rows of "
        f"the first batch, without the products of fused attention. Regard {join_words(record['regard'])}, "
        f"{named}.{revision}"
    )


def chance(tables: Tables) -> float:
    """Return the accuracy of chance among the labels of each task, mean over the tasks of the first order."""
    order = next(iter(tables.record["orders"].values()))
    counts = [len(order["classes"][task]) for task in order["tasks"] if task in order["classes"]]
    return sum(100 / count for count in counts) / len(counts) if counts else float("nan")


def _case(tables: Tables, analysis: str, case: str, measure: str = f"{ACCURACY} cil", digits: int = 1) -> str:
    """Format a number of an analysis, the mean over seeds."""
    rows = where(tables.analyses, analysis=analysis, case=case, measure=measure)["value"]
    return f"{rows.mean():.{digits}f}" if len(rows) else DASH


STRENGTHS = ("0.01", "0.1", "1", "10")


def describe_analyses(tables: Tables) -> str:
    """Return one line an analysis, with its main numbers."""

    def case(analysis: str, name: str, measure: str = f"{ACCURACY} cil") -> str:
        return _case(tables, analysis, name, measure)

    lines = (
        f"Vectors of 2, 10 and 100 % of a task's rows: {case('share', 'real, 2%')}, {case('share', 'real, 10%')}, "
        f"{case('share', 'real, 100%')}.",
        f"Cut to 2, 4 and 6 layers: {', '.join(case('size', f'sapt, {n} layers') for n in (2, 4, 6))} "
        f"(`sequential-lora`: {', '.join(case('size', f'sequential-lora, {n} layers') for n in (2, 4, 6))}).",
        f"Unseen tasks, accuracy among own labels: `sapt` {case('unseen', 'sapt', 'score')}, the base model "
        f"{case('unseen', 'base model', 'score')}; lower after training.",
        f"Published gate, λ {', '.join(STRENGTHS)}: {', '.join(case('strength', f'λ {x}') for x in STRENGTHS)}.",
        f"What opens the gate: teaching ahead {case('gate', 'ahead')}; without it −log a alone "
        f"{case('gate', '−log a only')}, with floors, other rates, balance or entropy terms {_log_variants(tables)}.",
        f"Tasks in two unannounced portions: `sapt-task-free` {case('noticed', 'sapt-task-free')}, "
        f"an adapter a portion {case('noticed', 'sapt, a block a portion')}.",
        f"Without instructions: {case('instructions', 'without')} (with: {case('instructions', 'with')}).",
        f"A decoder pre-trained here, exact match: {describe_decoder(tables.analyses)} Membership inference: "
        f"{_case(tables, 'standing', 'real', 'membership', 2)} from real vectors, "
        f"{_case(tables, 'standing', 'density', 'membership', 2)} from a density (0.5: nothing leaks).",
    )
    return "\n".join(map(item, lines))


def _log_variants(tables: Tables) -> str:
    """Format the range of the performance of the gate's variants with −log a and another term."""
    rows = where(tables.analyses, analysis="gate", measure=f"{ACCURACY} cil")
    values = rows[rows["case"].str.startswith("−log a,")]["value"]
    return f"{values.min():.1f} to {values.max():.1f}" if len(values) else DASH


def describe_prompts(tables: Tables) -> str:
    """Return the numbers of soft prompts beside low-rank adapters."""
    rates = ("1", "5", "20")
    scores = ", ".join(_case(tables, "prompts", f"prompts, rate ×{rate}") for rate in rates)
    return (
        f"Ten-token prompts at {', '.join(rates[:-1])} and {rates[-1]} times the rate: {scores}; low-rank adapters: "
        f"{_case(tables, 'prompts', 'low-rank')}."
    )


def describe_fifty(tables: Tables) -> str:
    """Return how weight, performance and cost change over fifty tasks."""
    cells = {(row[0], row[1]): (row[2], row[3]) for row in curve_table(tables.analyses).rows}
    case = "sapt, 50 tasks"
    if (case, "AP") not in cells:
        return "Not run."
    texts = [
        f"{title} {cells[case, name][0]} to {cells[case, name][1]}"
        for title, name in (("own weight", "own weight"), ("AP", "AP"), ("seconds a step", "seconds a step"))
    ]
    sequential = cells.get(("sequential-lora, 50 tasks", "AP"), (DASH, DASH))
    bound = cells.get((case, "own weight, at most"), (DASH, DASH))
    return (
        f"From the first five tasks to the last five: {join_words(texts)}. A gate "
        f"that knows every class gives at most {bound[1]}. `sequential-lora`: AP {sequential[0]} to {sequential[1]}."
    )


def describe_missing(tables: Tables) -> str:
    """Return which rows have no runs or too few, and what of the paper was not run."""
    seeds, sentences = len(tables.record["seeds"]), []
    for order in tables.orders:
        counts = where(tables.cost, order=order).groupby("row", sort=False)["seed"].nunique()
        absent = [f"`{row}`" for row in tables.record["rows"] if row in list_rows(order) and row not in counts]
        few = [f"`{row}` ({n})" for row, n in counts.items() if n < seeds]
        sentences += [f"Order {order}, without any run: {join_words(absent)}."] if absent else []
        sentences += [f"Order {order}, with fewer than {seeds} seeds: {join_words(few)}."] if few else []
    if len(tables.orders) > 1:
        sentences.append(f"Variants of `sapt` were run in order {tables.orders[0]} alone: compare them by differences.")
    return " ".join(sentences) + (" SuperNI, T5, LLaMA-2, `lfpt5`, generated texts and the paper's scale were not run.")


# -- tables ----------------------------------------------------------------------------------------------------------


def score_table(tables: Tables) -> Table:
    """Scores, cost and published numbers of all rows."""
    lines = []
    for row in tables.rows(tables.whole):
        cost = where(tables.cost, row=row)
        means = [format_interval(tables.mean(tables.whole, row, *key), 1) for key in SCORES.values()]
        flops, stored = cost["flops"].mean() / 1e12, cost["memory_bytes"].mean() / 2**20
        published = [f"{numbers[row]:.1f}" if row in numbers else DASH for numbers in (T5, LLAMA)]
        costs = (f"{tables.seconds(row):.0f}", f"{flops:.1f}", f"{stored:.2f}")
        lines.append([row, str(tables.num_runs(tables.whole, row)), *means, *costs, *published])
    head = ("row", "runs", *SCORES, "s", "TFLOP", "kept, MiB", "T5", "LLaMA")
    return Table("sapt-scores", "scores, cost and published AP of all rows", head, lines)


def difference_table(tables: Tables) -> Table:
    """All rows against SAPT, with corrected p."""
    stream, columns = tables.whole, {name: SCORES[name] for name in ("AP", "F.Ra", "learning", "own learning")}
    tests = {name: tables.against(stream, SAPT, *key).set_index("method") for name, key in columns.items()}
    lines = []
    for row in (row for row in tables.rows(stream) if row != SAPT):
        differences = {name: tables.difference(stream, row, SAPT, *key) for name, key in columns.items()}
        if any(differences.values()):
            pairs = ((format_difference(one), format_p_value(tests[name], row)) for name, one in differences.items())
            lines.append([row, *(cell for pair in pairs for cell in pair)])
    head = ["row", *(f"{name} to sapt{part}" for name in columns for part in ("", ", p"))]
    return Table("sapt-to-sapt", "paired differences to `sapt`, p of the t-test (Holm)", head, lines)


def order_table(tables: Tables) -> Table:
    """AP and forgetting by order."""
    columns = [
        (stream, name, metric)
        for stream in tables.streams[1:]
        for name, metric in (("AP", ACCURACY), ("F.Ra", "forgetting_rate"))
    ]
    lines = [
        [row, *(format_interval(tables.mean(stream, row, metric), 1) for stream, _, metric in columns)]
        for row in tables.rows(tables.whole)
    ]
    head = ["row", *(f"{name}, {stream}" for stream, name, _ in columns)]
    return Table("sapt-orders", "AP and F.Ra by order", head, lines)


def gate_table(tables: Tables) -> Table:
    """Weights, entropy, divergence and scores of the rows that have a gate."""
    lines = []
    for row in tables.gated():
        own = [
            format_interval(tables.of_gate(row, f"own_adapter_weight_{when}", over), 2)
            for when in WHEN
            for over in ("mean", "min")
        ]
        nats = ("entropy_learning", "entropy_end", "reflection_end", "drift")
        rest = [format_interval(tables.of_gate(row, name), 2) for name in nats]
        lines.append([row, *own, *rest, *(format_interval(tables.of_gate(row, name), 1) for name in SCORED)])
    head = (
        *("row", "own, learnt", "least, learnt", "own, end", "least, end", "entropy, learnt", "entropy, end"),
        *("reflection, end", "drift", "routed", "own adapter", "another"),
    )
    return Table("sapt-gates", "weights of the gate and scores by adapter", head, lines)


def task_table(tables: Tables) -> Table:
    """The weight of each task's own adapter in the first order, when learnt and at the end."""
    columns = [(row, when) for row in (SAPT, PUBLISHED, UNREFLECTED) if row in tables.gated() for when in WHEN]
    weights = [tables.own_weights(row, when, tables.orders[0]) for row, when in columns]
    tasks = list(dict.fromkeys(task for one in weights for task in one.index))
    lines = [[task, *(f"{one[task]:.2f}" if task in one.index else DASH for one in weights)] for task in tasks]
    head = ["task", *(f"{row}, {'learnt' if when == 'learning' else 'end'}" for row, when in columns)]
    return Table("sapt-own-weights", "weight of each task's own adapter, first order", head, lines)


def gather(work: Path, revision: str | None, folder: Path) -> None:
    """Make the stored tables anew from the runs in a folder."""
    Tables.gather(work, revision).save(folder)


PAPER = Paper(
    "sapt",
    "SAPT: A Shared Attention Framework (Zhao et al. 2024, arXiv 2401.08295)",
    "python -m experiments.sapt.run ORDER --data DIR",
    CLAIMS,
    Tables.load,
    make_page,
    gather,
)
