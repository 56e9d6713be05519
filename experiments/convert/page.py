"""Tables and text of docs/conversions.md, from docs/results/conversions-runs.csv."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.common.claims import DASH, format_interval
from experiments.common.papers import Paper
from experiments.common.parts import Page, Table
from experiments.common.run_table import RunTable
from experiments.convert.run import (
    ATTENTIONS,
    BASES,
    CONTROL,
    DEFAULT,
    FIRST_MODEL_RATE,
    LAYER_RATES,
    MODEL_RATES,
    SEEDS,
    STAGES,
    TRAINING,
    Conversion,
)
from regard.runs.intervals import t_interval

RECORD = "conversions.json"
FLOATS = (
    *("layer_rate", "model_rate", "untouched", "replaced", "matched", "final", "error_before", "error_after"),
    "seconds",
)
COLUMNS = {"runs": ("base", "attention", "stages", "seed", *FLOATS)}
NEAR_ERROR, NEAR_LOSS = 0.1, 0.02
"""How near to the best a rate must be to be preferred for being lower: of the error, and in nats a token."""
COMMAND = "python -m experiments.convert.run --data DIR"
CAUTION = (
    "it changes all weights, windows want no more, and a rate that wide models can bear was not measured here. Where "
    "much is lost by replacing, as with `sigmoid` and `linear`, a higher one gives more."
)
TITLE = "Conversions of small models"


class Tables(RunTable):
    """The runs, a line each, and the record of versions."""

    name, module, columns, floats = "conversions", "experiments.convert.run", COLUMNS["runs"], FLOATS

    @classmethod
    def paths(cls, work: Path) -> Iterable[Path]:
        return (path for base in BASES for path in (work / base).glob("*.json"))

    @classmethod
    def place(cls, run: Mapping[str, Any]) -> tuple[Any, ...]:
        attentions = (CONTROL, *ATTENTIONS)
        place = (list(BASES).index(run["base"]), attentions.index(run["attention"]), list(STAGES).index(run["stages"]))
        return (*place, run["layer_rate"], run["model_rate"], run["seed"])

    def select(self, run: Conversion) -> pd.DataFrame:
        """Return the line of a run, or none."""
        keep = pd.Series(True, index=self.runs.index)
        for column, value in run._asdict().items():
            keep &= self.runs[column] == value
        return self.runs[keep]

    def values(self, column: str, **fields: Any) -> list[float]:
        """Return a column of both-stage runs at the default rates and seed 0, but for `fields`, over all cells."""
        usual: dict[str, Any] = {"stages": "both", "layer_rate": DEFAULT.layer_learning_rate, "seed": 0}
        usual |= {"model_rate": DEFAULT.model_learning_rate, **fields}
        cells = [Conversion(base, attention, **usual) for base in BASES for attention in ATTENTIONS]
        return [float(value) for cell in cells for value in self.select(cell)[column]]


def choose_rate(means: Mapping[float, float], near: float) -> float:
    """Return the lowest rate whose mean is at most `near` above the lowest mean."""
    return min(rate for rate, mean in means.items() if mean <= min(means.values()) + near)


def mean_errors(tables: Tables) -> dict[float, float]:
    """Return the mean over bases and attentions of the logarithm of the relative error, by rate of the layers."""
    usual: dict[str, Any] = {"model_rate": FIRST_MODEL_RATE}
    found = {rate: tables.values("error_after", layer_rate=rate, **usual) for rate in LAYER_RATES}
    return {rate: sum(map(math.log, errors)) / len(errors) for rate, errors in found.items() if errors}


def mean_losses(tables: Tables) -> dict[float, float]:
    """Return the mean over bases and attentions of the loss at the end, by rate of the model."""
    found = {rate: tables.values("final", model_rate=rate) for rate in MODEL_RATES}
    return {rate: sum(losses) / len(losses) for rate, losses in found.items() if losses}


def make_page(tables: Tables, _verdicts: Sequence[Any] = ()) -> Page:
    """Return the page."""
    layer, model, stages = layer_table(tables), model_table(tables), stage_table(tables)
    errors, losses = mean_errors(tables), mean_losses(tables)
    layer_rate, model_rate = choose_rate(errors, math.log1p(NEAR_ERROR)), choose_rate(losses, NEAR_LOSS)
    return Page(
        "conversions",
        TITLE,
        [
            "What `regard convert` ([convert.md](convert.md)) costs and gives on two decoders that were pre-trained "
            f"here ({describe_bases()}), and where its learning rates come from. Command: `{COMMAND}`.",
            "## What each stage gives",
            stages,
            "Loss on held-out text in nats a token, above the untouched model with as many updates end to end, whose "
            "own line is below its start by what the further text gives; means ± half the 95 % interval over "
            f"{len(SEEDS)} seeds, which draw the batches. Every column has {sum(STAGES['both'])} updates: half and "
            "half, end to end alone, or layers alone. `replaced` is before any training.",
            describe_stages(tables),
            "## Rates, and the rules that choose them",
            f"* **Layers**: the lowest of {_rates(LAYER_RATES)} whose relative error, as a geometric mean over bases "
            f"and attentions, is at most {NEAR_ERROR:.0%} above the lowest. It is {layer_rate:g}; "
            f"{_compare_default(layer_rate, DEFAULT.layer_learning_rate)}\n"
            f"* **Model**: with that, the lowest of {_rates(MODEL_RATES)} whose loss at the end, as a mean, is at most "
            f"{NEAR_LOSS:g} nats above the lowest. It is {model_rate:g}; "
            f"{_compare_default(model_rate, DEFAULT.model_learning_rate, CAUTION)}",
            "The rules were written after the runs of the first base at four rates of the layers, before those of the "
            "second.",
            _show_means(layer),
            f"Relative error after {DEFAULT.layer_steps} updates of the first stage: squared difference from the "
            "untouched layer’s output over its mean square, mean over layers.",
            _show_means(model),
            f"Loss on held-out text at the end, in nats a token; the rate of the layers is "
            f"{DEFAULT.layer_learning_rate:g}. The files below have each base and attention.",
            "These are models of width "
            + " and ".join(str(base["hidden_size"]) for base in BASES.values())
            + ", trained for minutes. Wide models usually want lower rates: look at the history of the run, and halve "
            "the rate if its error jumps.",
        ],
        (stages, layer, model),
        (),
        [("conversions-runs.csv", "all runs"), (RECORD, "versions")],
    )


def _rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _compare_default(chosen: float, default: float, why: str = "") -> str:
    return "so is the default." if math.isclose(chosen, default) else f"the default departs from it, {default:g}: {why}"


def describe_bases() -> str:
    """Return what the bases are."""
    parts = [
        f"`{name}`: {base['num_layers']} layers of width {base['hidden_size']}, {base['length']} tokens"
        for name, base in BASES.items()
    ]
    return f"{'; '.join(parts)}; {TRAINING['max_steps']:,} updates of {TRAINING['batch_size']} sequences"


def stage_table(tables: Tables) -> Table:
    """What is left of the damage, by the stages, above the untouched model that was trained end to end as long."""
    lines = []
    for base in BASES:
        gains = [_mean(list(_above(tables, base, CONTROL, stages, "untouched").values())) for stages in STAGES]
        if gains[0] == DASH:
            continue
        lines.append([base, f"`{CONTROL}` (untouched)", DASH, *gains])
        for attention in ATTENTIONS:
            cells = [_mean(list(_above_control(tables, base, attention, stages).values())) for stages in STAGES]
            first = next(iter(tables.select(_default(base, attention, "both", seed)) for seed in SEEDS))
            damage = DASH if first.empty else f"{float((first['replaced'] - first['untouched']).iloc[0]):+.3f}"
            lines.append([base, f"`{attention}`", damage, *cells])
    head = ("base", "attention", "replaced", "both stages", "model alone", "layers alone")
    return Table("conversions-stages", "loss above the untouched model that was trained as long", head, lines)


def _default(base: str, attention: str, stages: str, seed: int) -> Conversion:
    return Conversion(base, attention, stages, DEFAULT.layer_learning_rate, DEFAULT.model_learning_rate, seed)


def _above(tables: Tables, base: str, attention: str, stages: str, column: str) -> dict[int, float]:
    """Return the loss at the end of the runs less that of a column, by seed."""
    runs = {seed: tables.select(_default(base, attention, stages, seed)) for seed in SEEDS}
    return {seed: float((run["final"] - run[column]).iloc[0]) for seed, run in runs.items() if len(run)}


def _above_control(tables: Tables, base: str, attention: str, stages: str) -> dict[int, float]:
    """Return the loss at the end above the untouched model with as many updates end to end, by seed."""
    above = _above(tables, base, attention, stages, "untouched")
    control = _above(tables, base, CONTROL, stages, "untouched") if STAGES[stages][1] else dict.fromkeys(above, 0.0)
    return {seed: value - control[seed] for seed, value in above.items() if seed in control}


def describe_stages(tables: Tables) -> str:
    """Say with which attentions the first stage pays: both stages against as many updates end to end."""
    better: dict[str, list[str]] = {"less": [], "more": [], "what cannot be told apart": []}
    for attention in ATTENTIONS:
        signs = []
        for base in BASES:
            both, alone = (_above_control(tables, base, attention, stages) for stages in ("both", "model only"))
            interval = t_interval([both[seed] - alone[seed] for seed in both if seed in alone])
            signs.append(-1 if interval.ci_high < 0 else 1 if interval.ci_low > 0 else 0)
        word = {-len(BASES): "less", len(BASES): "more"}.get(sum(signs), "what cannot be told apart")
        better[word].append(f"`{attention}`")
    parts = [f"{word} with {', '.join(names)}" for word, names in better.items() if names]
    return (
        "Does the first stage pay? Half of the updates for layers and half end to end leave, against all end to end, "
        f"on both bases and by intervals over seeds, {'; '.join(parts)}."
    )


def _mean(values: Sequence[float]) -> str:
    return format_interval(t_interval(values), 3, signed=True)


def layer_table(tables: Tables) -> Table:
    """Relative error after the first stage, by its rate."""
    return _rate_table(tables, "conversions-layers", "relative error by the rate of the first stage", "layer_rate")


def model_table(tables: Tables) -> Table:
    """Loss at the end, by the rate of the second stage."""
    return _rate_table(tables, "conversions-models", "loss at the end by the rate of the second stage", "model_rate")


def _show_means(rates: Table) -> Table:
    """Return the means over all bases and attentions by rate, which the page shows."""
    means = [[line[1], *line[3:]] for line in rates.rows if line[0] not in BASES]
    return replace(rates, head=("over all", *rates.head[3:]), rows=means)


def _rate_table(tables: Tables, name: str, about: str, varied: str) -> Table:
    of_layers = varied == "layer_rate"
    rates, column = (LAYER_RATES, "error_after") if of_layers else (MODEL_RATES, "final")
    usual: dict[str, Any] = {"stages": "both", "seed": 0, "layer_rate": DEFAULT.layer_learning_rate}
    usual["model_rate"] = FIRST_MODEL_RATE if of_layers else DEFAULT.model_learning_rate
    lines = []
    for base in BASES:
        for attention in ATTENTIONS:
            runs = [tables.select(Conversion(base, attention, **{**usual, varied: rate})) for rate in rates]
            first = next((run for run in runs if len(run)), None)
            before = (
                "–" if first is None else f"{float(first['error_before' if of_layers else 'untouched'].iloc[0]):.3g}"
            )
            cells = [f"{float(run[column].iloc[0]):.3f}" if len(run) else DASH for run in runs]
            lines.append([base, f"`{attention}`", before, *cells])
    means = mean_errors(tables) if of_layers else mean_losses(tables)
    overall = [math.exp(means[rate]) if of_layers else means[rate] for rate in rates if rate in means]
    if len(overall) == len(rates):
        lines.append(["both", "geometric mean" if of_layers else "mean", "", *(f"{value:.3f}" for value in overall)])
    head = ("base", "attention", "before" if of_layers else "untouched", *(f"{rate:g}" for rate in rates))
    return Table(name, about, head, lines)


PAPER = Paper("convert", TITLE, COMMAND, (), Tables.load, make_page, Tables.store)
