"""Tables, figure and text of docs/sinks.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.common.claims import DASH, MIN_RUNS, Verdict, format_interval
from experiments.common.comparison import mean_of, where
from experiments.common.figures import label_axes, new_figure
from experiments.common.papers import Paper
from experiments.common.parts import Figure, Page, Table, count_verdicts, join_words
from experiments.sinks.claims import ARCHITECTURE, CLAIMS, MARGIN, rate
from experiments.sinks.tables import ACTIVATIONS, BASELINE, SINK, STAR, Tables, format_mean, format_positions
from regard.report import colors

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

CURVES = ("softmax", "sigmoid", "elu", "K bias", "weight decay 0.1", "sigmoid, normalised")
"""Rows whose curves are drawn."""
SHOWN = (
    *("softmax", "sigmoid", "elu", "sigmoid, normalised", "K bias", "KV bias", "V bias", "weight decay 0"),
    *("weight decay 0.1", "weight decay 1", "weight decay 5", "window 16", "prefix 5", "first token free"),
    *("fixed token at 1", "learning rate 0.001", "batch 8", "1 % of the text", "linear", "mlp kernel"),
    *("no positions", "sinusoidal positions", "learned positions", "ALiBi", "T5", "post-norm", "ReLU", "one head"),
)
"""Rows of the table on the page."""
MEASURED = {
    "‖k₁‖ / ‖kₜ‖": "key_norm",
    "‖v₁‖ / ‖vₜ‖": "value_norm",
    "‖q‖‖k₁‖ / ‖q‖‖kₜ‖": "qk_norm",
    "cos(q, k₁)": "cosine_first",
    "cos(q, kₜ)": "cosine_others",
}
"""Columns of the table of activations."""
PUBLISHED_RECIPE = {"fixed_token": None, "weight_decay": 0.1}
"""Fields of the paper's recipe that a small model may need to change to grow a sink."""
BIASES, DECAY, INPUT, RATE = "K/V biases", "weight decay", "window, prefix, first token", "learning rate"
OPERATION, REST, AMOUNT = "operation", "positions, norm, feed-forward, heads", "batch, text"
AXES = (OPERATION, BIASES, DECAY, INPUT, RATE, AMOUNT, REST)
NUMBERS = {DECAY: "weight_decay", RATE: "learning_rate"}
"""Axes of numbers, with the field."""
UNPUBLISHED = (
    *("sigmoid, by log-length", "softpick", "gated", "gated, per head", "QK-norm", "sink logit", "off-by-one"),
    *("StableMask", "differential", "value residual", "top 8"),
)
"""Rows of operations that the paper does not have."""


def make_page(tables: Tables, verdicts: Sequence[Verdict]) -> Page:
    """Return the page of the experiment."""
    rows = row_table(tables)
    figure = Figure(
        "sinks-curves",
        f"Mean α₁ and Sink₁ during training, means over seeds; dotted: uniform attention, dashed: the virtual sink. "
        f"Drawn: {join_words(row for row in CURVES if row in set(tables.curves['row']))}.",
        lambda: draw_curves(tables),
    )
    shown = rows.select(
        ["row", "seeds", "Sink₁ %", "virtual sink %", "strongest", "validation loss", "to softmax"],
        SHOWN,
        tables.record.get("not_run", ()),
    )
    paired = any("†" in str(cell) for line in shown.rows for cell in line)
    return Page(
        "sinks",
        "Attention sinks in a small decoder",
        [
            "*When Attention Sink Emerges in Language Models* (Gu et al. 2025, arXiv 2410.10781) used 60M parameters "
            f"and more. This is a decoder of {tables.record['model']['parameters'] / 1e6:.1f}M parameters, of which "
            "each row changes one thing: `python -m experiments.sinks.run --data TEXT`.",
            shown,
            figure,
            "Means over seeds ± half the 95 % interval (Student's t). Sink₁ and virtual sink: per cent of heads × "
            f"samples that give the first token, or what is beside the tokens, more than ε = {tables.epsilon:g} of "
            f"their attention. Strongest: the position from 0 with the highest rate, in seeds where it is at least "
            f"{SINK:g} %. {STAR}: measured on |A| / Σ|A|.{' †: against the row with the same sequences.' * paired} "
            "‡: other tokens or sequences, losses not comparable.",
            "## Verdicts",
            f"Tested claims: {count_verdicts([one for one in verdicts if one.claim.judge])}. Each with its verdict, "
            f"published numbers and the rules are in [claims.md](claims.md). A loss counts as no higher if its whole "
            f"interval is below {MARGIN:g} nats.",
            "## Settings and cost",
            describe_settings(tables),
            describe_recipe(tables),
            "## Operations that the paper does not have",
            unpublished_table(tables, rows) or "Not run.",
            "## Keys, values and angles",
            *(describe_activations(tables) or ["Not run."]),
            "## Not run",
            describe_missing(tables),
        ],
        (rows,),
        (figure,),
        [
            ("sinks.csv", "all numbers, run by run"),
            ("sinks-curves.csv", "curves of all rows"),
            *([] if tables.activations is None else [(ACTIVATIONS, "keys, values and angles, run by run")]),
        ],
    )


# -- text ------------------------------------------------------------------------------------------------------------


def describe_settings(tables: Tables) -> str:
    """Return the model, its training and how sinks are measured."""
    recipe, record = tables.record["recipe"], tables.record
    tokens = recipe["max_steps"] * recipe["batch_size"] * recipe["length"]
    text = sum(domain["train_tokens"] for domain in record["data"]["domains"])
    position = recipe.get("fixed_token")
    fixed = "no fixed token" if position is None else f"a fixed token at position {position}"
    several = [f"`{row}`" for row in tables.rows if len(tables.changes.get(row, {})) > 1]
    return (
        f"A decoder of {record['model']['parameters']:,} parameters ({recipe['num_layers']} layers, width "
        f"{recipe['hidden_size']}, {recipe['num_heads']} heads, feed-forward {recipe['intermediate_size']}), "
        f"{recipe['max_steps']:,} steps of {recipe['batch_size']} × {recipe['length']} tokens: {tokens / 1e6:.2f}M "
        f"tokens, {tokens / text:.2g} times a text of {text / 1e6:.2f}M. Learning rate {recipe['learning_rate']:g}, "
        f"weight decay {recipe['weight_decay']:g}, {fixed}. Every row changes one thing"
        f"{f' ({join_words(several)}: more)' if several else ''}; {tables.seeds} seeds from weights to text order; "
        f"{tables.ends['seconds'].median() / 60:.1f} minutes a run. Sinks are measured on "
        f"{record['watch']['samples']} held-out sequences of {tables.length} tokens; uniform attention has a mean α₁ "
        f"of {record['watch']['uniform']:.3f} without window, prefix and virtual sink. "
        f"torch {record['versions']['torch']}."
    )


def describe_recipe(tables: Tables) -> str:
    """Return in what the base differs from the paper's, and the sink rate of softmax without that."""
    fields = {field: value for field, value in PUBLISHED_RECIPE.items() if tables.base(field) != value}
    if not fields:
        return "Weight decay and first token of the base are those of the paper."
    rows = [row for field, value in fields.items() for row in tables.rows if tables.changes.get(row) == {field: value}]
    names = {"weight_decay": f"a weight decay of {PUBLISHED_RECIPE['weight_decay']:g}", "fixed_token": "no fixed token"}
    rates = " ".join(rate(tables, row) for row in rows) or "No run of that."
    return f"The paper's base has {join_words(names[field] for field in fields)}. Changed to one of these: {rates}"


def unpublished_table(tables: Tables, rows: Table) -> Table | None:
    """Return what became of operations that the paper does not have; None without runs."""
    columns = ["row", "seeds", "Sink₁ %", "virtual sink %", "|h₁|/|hₜ|", "validation loss", "to softmax"]
    names = [row for row in UNPUBLISHED if row in tables.rows]
    return rows.select(columns, ["softmax", *names]) if names else None


def describe_activations(tables: Tables) -> list[Table | str]:
    """Return the table of keys, values and angles, and how they were measured; nothing without runs."""
    if tables.activations is None:
        return []
    kinds = list(dict.fromkeys(zip(tables.activations["row"], tables.activations["heads"], strict=True)))
    lines = []
    for row, heads in kinds:
        rates, counts = (tables.activation(row, heads, column).values() for column in ("sink_rate", "count"))
        means = [format_interval(mean_of(tables.activation(row, heads, column)), 2) for column in MEASURED.values()]
        cells = (", ".join(f"{rate:.1f}" for rate in rates), ", ".join(f"{count:.0f}" for count in counts))
        lines.append([f"{row}, heads {heads}", *cells, *means])
    head = ("row", "Sink₁ % by seed", "heads by seed", *MEASURED)
    table = Table("sinks-activations", "keys, values and angles", head, lines)
    return [
        table,
        "Norms of the first token over the mean of the others, and the cosine of queries and keys (rotary positions "
        "applied), means over heads and then over the seeds that have such heads, ± half the 95 % interval. The models "
        "are those of the first table, trained again, and read the sequences of Sink₁. A head has a sink if its own "
        f"rate is at least {SINK:g} %. What is of pairs counts each query that sees a key. Rule, fixed before the runs:"
        f" a difference counts if its interval over at least {MIN_RUNS} seeds excludes 0, a ratio if it excludes 1.",
    ]


def describe_missing(tables: Tables) -> str:
    """Return the rows without runs or with too few seeds."""
    few = [row for row in tables.rows if len(tables.of(row)) < tables.seeds]
    absent = [f"`{row}`" for row in tables.absent]
    sentences = [f"Without any run: {join_words(absent)}."] if absent else []
    sentences += [f"Rows with fewer than {tables.seeds} seeds: {len(few)}, as the tables say."] if few else []
    return " ".join(sentences or [f"Every row has its {tables.seeds} seeds."]) + (
        " 1B parameters and open models were not run."
    )


# -- table -----------------------------------------------------------------------------------------------------------


def axis_of(tables: Tables, row: str) -> str:
    """Return the axis on which a row differs from the base."""
    change = tables.changes.get(row, {})
    if "attention" in change:
        spec = tables.spec(row)
        has_bias = spec.sink_token or spec.extra != "none"
        return BIASES if has_bias else REST if spec.qk_norm else OPERATION
    axes = {DECAY: ("weight_decay",), INPUT: ("window", "prefix", "fixed_token", "random_tokens")}
    axes |= {RATE: ("learning_rate",), AMOUNT: ("batch_size", "data_fraction"), REST: ARCHITECTURE}
    return next((axis for axis, fields in axes.items() if set(fields) & set(change)), REST)


def rows_by_axis(tables: Tables) -> dict[str, list[str]]:
    """Group the rows by axis; those on an axis of numbers are in its order."""
    groups: dict[str, list[str]] = {axis: [] for axis in AXES}
    for row in tables.rows:
        groups[OPERATION if row == BASELINE else axis_of(tables, row)].append(row)
    for axis, name in NUMBERS.items():
        groups[axis].sort(key=lambda row: float(tables.changes.get(row, {}).get(name, tables.base(name))))
    return {axis: rows for axis, rows in groups.items() if rows}


def row_table(tables: Tables) -> Table:
    """All numbers of all rows, means over seeds."""
    head = (
        *("row", "axis", "seeds", "Sink₁ %", "virtual sink %", "strongest", "mean α₁", "|h₁|/|hₜ|"),
        *("validation loss", "to softmax", "emerged"),
    )
    lines = [_cells(tables, axis, row) for axis, rows in rows_by_axis(tables).items() for row in rows]
    return Table("sinks-rows", "means of all rows, with loss differences and steps of emergence", head, lines)


def _cells(tables: Tables, axis: str, row: str) -> tuple[Any, ...]:
    return (
        row,
        axis,
        f"{len(tables.of(row))} of {tables.seeds}",
        format_mean(tables, row, "sink_rate", 1),
        format_mean(tables, row, "virtual_sink_rate", 1),
        _strongest(tables, row),
        format_mean(tables, row, "alpha_first", 3),
        format_mean(tables, row, "norm_ratio", 2),
        format_mean(tables, row, "valid_loss", 3),
        _to_reference(tables, row),
        ", ".join(DASH if step != step else f"{step:.0f}" for step in tables.of(row)["emergence_step"].astype(float)),
    )


def _strongest(tables: Tables, row: str) -> str:
    positions = tables.sink_positions(row)
    if set(positions) <= {0}:
        return "0" if positions else DASH
    return f"{format_positions(positions)} ({format_mean(tables, row, 'sink_rate_max', 1)} %)"


def _to_reference(tables: Tables, row: str) -> str:
    """Format the difference in validation loss to the row that it is compared with."""
    reference = tables.reference(row)
    difference = tables.difference(row, reference, "valid_loss") if row != BASELINE else None
    if difference is None:
        return DASH
    mark = "‡" if not tables.is_comparable(row) else "†" if reference != BASELINE else ""
    return format_interval(difference, 3, signed=True) + mark


# -- figure ----------------------------------------------------------------------------------------------------------


def draw_curves(tables: Tables) -> Drawing:
    """Draw mean α₁ and the sink rate by step, a line a row."""
    drawing = new_figure(7.2, 2.8)
    left, right = drawing.subplots(1, 2)
    for row, color in zip(CURVES, colors.SERIES_LIGHT, strict=False):
        curve = where(tables.curves, row=row).sort_values("step")
        if curve.empty:
            continue
        left.plot(curve["step"], curve["alpha_first"], color=color, linewidth=1.3, label=row)
        right.plot(curve["step"], curve["sink_rate"], color=color, linewidth=1.3, label=row)
        if curve["virtual_sink_rate"].notna().any():
            virtual = f"{row}: virtual"
            right.plot(curve["step"], curve["virtual_sink_rate"], "--", color=color, linewidth=1.1, label=virtual)
    left.axhline(tables.record["watch"]["uniform"], linestyle=":", color=colors.RAMP_LIGHT[-1], linewidth=1)
    label_axes(left, "Mean α₁", "Step")
    label_axes(right, f"Sink rate, % of heads × samples (ε = {tables.epsilon:g})", "Step")
    return drawing


PAPER = Paper(
    "sinks",
    "When Attention Sink Emerges in Language Models (Gu et al. 2025, arXiv 2410.10781)",
    "python -m experiments.sinks.run --data TEXT",
    CLAIMS,
    Tables.load,
    make_page,
)
