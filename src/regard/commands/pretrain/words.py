"""What a report of a pre-training run says in words and key figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from regard.report import labels
from regard.report.key_figure import KeyFigure
from regard.report.panels import DOMAIN, domains, last_value, numeric_column
from regard.report.words import format_count, format_duration, metadata_number


def name(record: Mapping[str, Any]) -> str:
    """The run's name in the record, else the recipe's, or "A pre-training run"."""
    return str(record.get("name") or labels.section(record, "config").get("name") or "A pre-training run")


def attention(record: Mapping[str, Any]) -> str:
    """The attention of the recipe in a word or two; "" where the record does not say."""
    told = labels.section(record, "config").get("attention")
    if isinstance(told, Mapping):
        told = told.get("name") or told.get("weighting")
    return f"{told} attention" if told else ""


def ledes(history: pd.DataFrame, record: Mapping[str, Any]) -> list[str]:
    """What was trained, and what came of it, a line each."""
    recipe = labels.section(record, "config")
    parameters, steps = metadata_number(record, "model", "parameters"), last_value(history, "step")
    run = [attention(record)]
    run += [f"{format_count(parameters)} parameters"] if parameters is not None else []
    run += [f"{steps:,.0f} steps"] if steps is not None else []
    run += [f"seed {recipe['seed']}"] if recipe.get("seed") is not None else []
    return [" · ".join(part for part in run if part), " ".join(_found(history, record))]


def _found(history: pd.DataFrame, record: Mapping[str, Any]) -> list[str]:
    """Sentences on the loss and on the sink."""
    told = []
    valid, training, rate = (last_value(history, key) for key in ("valid_loss", "loss", "sink_rate"))
    if valid is not None:
        told.append(f"The validation loss ended at {labels.number(valid, 3)} nats per token.")
    elif training is not None:
        told.append(f"The training loss ended at {labels.number(training, 3)} nats per token.")
    if rate is None:
        return [*told, "Sinks were not watched."]
    emergence, ended = emerged(record), f"{symbol(record)} ended at {labels.number(rate, 3)} %{_elsewhere(history)}."
    return [*told, *([emergence[1]] if emergence else []), *_late(history, record), ended]


def _elsewhere(history: pd.DataFrame) -> str:
    """Where the strongest sink is and how strong, if not on the first token."""
    most, position = last_value(history, "sink_rate_max"), last_value(history, "sink_position")
    if most is None or not position:
        return ""
    return f", the strongest position ({position:.0f}) at {labels.number(most, 3)} %"


def _late(history: pd.DataFrame, record: Mapping[str, Any]) -> list[str]:
    """A warning where the sink was seen in the last measurement alone."""
    watched = numeric_column(history, "step")[np.isfinite(numeric_column(history, "sink_rate"))]
    step = metadata_number(record, "emergence", "step")
    return ["It was seen in the last measurement alone."] if step is not None and step == watched[-1] else []


def emerged(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """When the sink emerged: a figure and a sentence; None where the record does not say."""
    told = labels.section(record, "emergence")
    if "step" not in told:
        return None
    virtual = told.get("virtual_step")
    if told["step"] is not None:
        return f"step {int(told['step']):,}", f"A sink emerged at step {int(told['step']):,}."
    if virtual is not None:
        return f"step {int(virtual):,}", f"No token became a sink; the virtual sink emerged at step {int(virtual):,}."
    return "none", "No sink emerged."


def symbol(record: Mapping[str, Any]) -> str:
    """The sink rate's symbol, as in "Sink₁ (ε = 0.3)"."""
    epsilon = threshold(record)
    return "Sink₁" if epsilon is None else f"Sink₁ (ε = {epsilon:g})"


def threshold(record: Mapping[str, Any]) -> float | None:
    """The threshold ε of the sink rates in the tables, the first where there are several."""
    told = labels.section(record, "watch").get("epsilon")
    every = [told] if isinstance(told, (int, float)) else list(told or [])
    return float(every[0]) if every else None


def key_figures(history: pd.DataFrame, record: Mapping[str, Any]) -> list[KeyFigure]:
    """Losses, sinks, then size and cost; what is not known is left out."""
    return [*_losses(history), *_sinks(history, record), *_size(history, record), *_cost(history, record)]


def _losses(history: pd.DataFrame) -> list[KeyFigure]:
    names = domains(history)
    whole, training = last_value(history, "valid_loss"), last_value(history, "loss")
    told = [] if training is None else [f"training {labels.number(training, 3)}"]
    if whole is None and training is not None:
        return [KeyFigure("Training loss", labels.number(training, 3), "nats per token, at the end")]
    if len(names) > 1:
        told.insert(0, "mean over domains, by tokens")
    figures = (
        [] if whole is None else [KeyFigure("Validation loss", labels.number(whole, 3), ", ".join(["nats", *told]))]
    )
    for one in names if len(names) > 1 else []:
        value = last_value(history, f"{DOMAIN}{one}")
        if value is not None:
            figures.append(KeyFigure(f"Validation loss, {one}", labels.number(value, 3), "nats per token"))
    return figures


def _sinks(history: pd.DataFrame, record: Mapping[str, Any]) -> list[KeyFigure]:
    figures = []
    rate, most, position = (last_value(history, key) for key in ("sink_rate", "sink_rate_max", "sink_position"))
    if rate is not None:
        where = "" if position is None else f"strongest at position {position:.0f}"
        where += f" ({labels.number(most, 3)} %)" if where and most is not None and most != rate else ""
        length = metadata_number(record, "watch", "length")
        note = ", ".join(part for part in (where, f"T = {length:.0f}" if length is not None else "") if part)
        figures.append(KeyFigure(symbol(record), f"{labels.number(rate, 3)} %", note))
    virtual = last_value(history, "virtual_sink_rate")
    if virtual is not None:
        note = "heads × samples whose mass on it is above ε"
        figures.append(KeyFigure("Virtual sink rate", f"{labels.number(virtual, 3)} %", note))
    mass, uniform = last_value(history, "alpha_first"), last_value(history, "alpha_uniform")
    if mass is not None:
        against = "mean over heads"
        if uniform:
            against = f"{labels.number(mass / uniform, 3)}× uniform attention’s {labels.number(uniform, 3)}"
        figures.append(KeyFigure("Mean α₁", labels.number(mass, 3), against))
    ratio = last_value(history, "norm_ratio")
    if ratio is not None:
        figures.append(KeyFigure("|h₁| / mean |hₜ|", f"{labels.number(ratio, 3)}×", "largest of all layers"))
    return [*figures, *_emergence(record)] if rate is not None or mass is not None else figures


def _emergence(record: Mapping[str, Any]) -> list[KeyFigure]:
    emergence, told = emerged(record), labels.section(record, "emergence")
    if emergence is None:
        return []
    notes = []
    if isinstance(told.get("rate"), (int, float)):
        rate = f"{labels.number(float(told['rate']), 3)} %"
        notes.append(f"no position stayed at {rate}" if told["step"] is None else f"a position stays at {rate} or more")
    if told.get("virtual_step") is not None:
        notes.append(f"the virtual sink from step {int(told['virtual_step']):,}")
    if told.get("alpha_step") is not None:
        notes.append(f"mean α₁ well above uniform from step {int(told['alpha_step']):,}")
    return [KeyFigure("Sink emerged", emergence[0], "; ".join(notes))]


def _size(history: pd.DataFrame, record: Mapping[str, Any]) -> list[KeyFigure]:
    figures = []
    parameters = metadata_number(record, "model", "parameters")
    if parameters is not None:
        inner = metadata_number(record, "model", "parameters_without_embeddings")
        note = "" if inner is None else f"{format_count(inner)} without embeddings"
        figures.append(KeyFigure("Parameters", format_count(parameters), note))
    tokens, steps = last_value(history, "tokens"), last_value(history, "step")
    if tokens is not None:
        figures.append(KeyFigure("Tokens", format_count(tokens), "" if steps is None else f"in {steps:,.0f} steps"))
    return figures


def _cost(history: pd.DataFrame, record: Mapping[str, Any]) -> list[KeyFigure]:
    cost, figures = labels.section(record, "cost"), []
    speed = metadata_number(record, "cost", "tokens_per_second")
    speed = last_value(history, "tokens_per_second") if speed is None else speed
    processes = int(metadata_number(record, "cost", "processes") or 1)
    device = " × ".join(str(part) for part in (cost.get("device"), processes if processes > 1 else "") if part)
    if speed is not None:
        figures.append(KeyFigure("Tokens per second", format_count(speed), f"on {device}" if device else ""))
    seconds, memory = metadata_number(record, "cost", "seconds"), metadata_number(record, "cost", "peak_memory_mib")
    if seconds is not None:
        note = "" if memory is None else f"peak memory {labels.number(memory, 3)} MiB"
        figures.append(KeyFigure("Time", format_duration(seconds), note))
    return figures
