"""Sentences and key figures of a report on pre-training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from regard.report import labels
from regard.report.key_figure import KeyFigure
from regard.report.panels import DOMAIN, domains, last_value, numeric_column
from regard.report.words import format_count, format_duration, metadata_number


def name(metadata: Mapping[str, Any]) -> str:
    """Return the run's name, else the configuration's, or "A pre-training run"."""
    return str(metadata.get("name") or labels.section(metadata, "config").get("name") or "A pre-training run")


def attention(metadata: Mapping[str, Any]) -> str:
    """Name the configured attention; "" if unknown."""
    value = labels.section(metadata, "config").get("attention")
    if isinstance(value, Mapping):
        value = value.get("name") or value.get("weighting")
    return f"{value} attention" if value else ""


def ledes(history: pd.DataFrame, metadata: Mapping[str, Any]) -> list[str]:
    """Write what was trained, then the outcome."""
    config = labels.section(metadata, "config")
    parameters, steps = metadata_number(metadata, "model", "parameters"), last_value(history, "step")
    parts = [attention(metadata)]
    parts += [f"{format_count(parameters)} parameters"] if parameters is not None else []
    parts += [f"{steps:,.0f} steps"] if steps is not None else []
    parts += [f"seed {config['seed']}"] if config.get("seed") is not None else []
    return [" · ".join(part for part in parts if part), " ".join(_found(history, metadata))]


def _found(history: pd.DataFrame, metadata: Mapping[str, Any]) -> list[str]:
    """Describe the loss and the sink."""
    sentences = []
    valid, training, rate = (last_value(history, key) for key in ("valid_loss", "loss", "sink_rate"))
    if valid is not None:
        sentences.append(f"The validation loss ended at {labels.number(valid, 3)} nats per token.")
    elif training is not None:
        sentences.append(f"The training loss ended at {labels.number(training, 3)} nats per token.")
    if rate is None:
        return [*sentences, "Sinks were not watched."]
    emergence, ended = (
        emerged(metadata),
        f"{symbol(metadata)} ended at {labels.number(rate, 3)} %{_elsewhere(history)}.",
    )
    return [*sentences, *([emergence[1]] if emergence else []), *_late(history, metadata), ended]


def _elsewhere(history: pd.DataFrame) -> str:
    """Describe the strongest position, if it is not the first."""
    largest, position = last_value(history, "sink_rate_max"), last_value(history, "sink_position")
    if largest is None or not position:
        return ""
    return f", the strongest position ({position:.0f}) at {labels.number(largest, 3)} %"


def _late(history: pd.DataFrame, metadata: Mapping[str, Any]) -> list[str]:
    """Warn if the sink was seen only in the last measurement."""
    monitored_steps = numeric_column(history, "step")[np.isfinite(numeric_column(history, "sink_rate"))]
    step = metadata_number(metadata, "emergence", "step")
    return ["It was seen in the last measurement alone."] if step is not None and step == monitored_steps[-1] else []


def emerged(metadata: Mapping[str, Any]) -> tuple[str, str] | None:
    """Say when the sink emerged, as a figure and a sentence; None if unknown."""
    emergence = labels.section(metadata, "emergence")
    if "step" not in emergence:
        return None
    virtual_step = emergence.get("virtual_step")
    if emergence["step"] is not None:
        return f"step {int(emergence['step']):,}", f"A sink emerged at step {int(emergence['step']):,}."
    if virtual_step is not None:
        return (
            f"step {int(virtual_step):,}",
            f"No token became a sink; the virtual sink emerged at step {int(virtual_step):,}.",
        )
    return "none", "No sink emerged."


def symbol(metadata: Mapping[str, Any]) -> str:
    """Return the sink rate's symbol, as in "Sink₁ (ε = 0.3)"."""
    epsilon = threshold(metadata)
    return "Sink₁" if epsilon is None else f"Sink₁ (ε = {epsilon:g})"


def threshold(metadata: Mapping[str, Any]) -> float | None:
    """Return the threshold ε of the sink rates, the first if there are several."""
    epsilon = labels.section(metadata, "watch").get("epsilon")
    thresholds = [epsilon] if isinstance(epsilon, (int, float)) else list(epsilon or [])
    return float(thresholds[0]) if thresholds else None


def key_figures(history: pd.DataFrame, metadata: Mapping[str, Any]) -> list[KeyFigure]:
    """Make the figures of loss, sinks, size and cost, as far as known."""
    return [*_losses(history), *_sinks(history, metadata), *_size(history, metadata), *_cost(history, metadata)]


def _losses(history: pd.DataFrame) -> list[KeyFigure]:
    names = domains(history)
    overall, training = last_value(history, "valid_loss"), last_value(history, "loss")
    notes = [] if training is None else [f"training {labels.number(training, 3)}"]
    if overall is None and training is not None:
        return [KeyFigure("Training loss", labels.number(training, 3), "nats per token, at the end")]
    if len(names) > 1:
        notes.insert(0, "mean over domains, by tokens")
    figures = (
        []
        if overall is None
        else [KeyFigure("Validation loss", labels.number(overall, 3), ", ".join(["nats", *notes]))]
    )
    for domain in names if len(names) > 1 else []:
        value = last_value(history, f"{DOMAIN}{domain}")
        if value is not None:
            figures.append(KeyFigure(f"Validation loss, {domain}", labels.number(value, 3), "nats per token"))
    return figures


def _sinks(history: pd.DataFrame, metadata: Mapping[str, Any]) -> list[KeyFigure]:
    figures = []
    rate, largest, position = (last_value(history, key) for key in ("sink_rate", "sink_rate_max", "sink_position"))
    if rate is not None:
        position_note = "" if position is None else f"strongest at position {position:.0f}"
        position_note += (
            f" ({labels.number(largest, 3)} %)" if position_note and largest is not None and largest != rate else ""
        )
        length = metadata_number(metadata, "watch", "length")
        note = ", ".join(part for part in (position_note, f"T = {length:.0f}" if length is not None else "") if part)
        figures.append(KeyFigure(symbol(metadata), f"{labels.number(rate, 3)} %", note))
    virtual = last_value(history, "virtual_sink_rate")
    if virtual is not None:
        note = "heads × samples whose mass on it is above ε"
        figures.append(KeyFigure("Virtual sink rate", f"{labels.number(virtual, 3)} %", note))
    mass, uniform = last_value(history, "alpha_first"), last_value(history, "alpha_uniform")
    if mass is not None:
        note = "mean over heads"
        if uniform:
            note = f"{labels.number(mass / uniform, 3)}× uniform attention’s {labels.number(uniform, 3)}"
        figures.append(KeyFigure("Mean α₁", labels.number(mass, 3), note))
    ratio = last_value(history, "norm_ratio")
    if ratio is not None:
        figures.append(KeyFigure("|h₁| / mean |hₜ|", f"{labels.number(ratio, 3)}×", "largest of all layers"))
    return [*figures, *_emergence(metadata)] if rate is not None or mass is not None else figures


def _emergence(metadata: Mapping[str, Any]) -> list[KeyFigure]:
    emergence, details = emerged(metadata), labels.section(metadata, "emergence")
    if emergence is None:
        return []
    notes = []
    if isinstance(details.get("rate"), (int, float)):
        rate = f"{labels.number(float(details['rate']), 3)} %"
        notes.append(
            f"no position stayed at {rate}" if details["step"] is None else f"a position stays at {rate} or more"
        )
    if details.get("virtual_step") is not None:
        notes.append(f"the virtual sink from step {int(details['virtual_step']):,}")
    if details.get("alpha_step") is not None:
        notes.append(f"mean α₁ well above uniform from step {int(details['alpha_step']):,}")
    return [KeyFigure("Sink emerged", emergence[0], "; ".join(notes))]


def _size(history: pd.DataFrame, metadata: Mapping[str, Any]) -> list[KeyFigure]:
    figures = []
    parameters = metadata_number(metadata, "model", "parameters")
    if parameters is not None:
        without_embeddings = metadata_number(metadata, "model", "parameters_without_embeddings")
        note = "" if without_embeddings is None else f"{format_count(without_embeddings)} without embeddings"
        figures.append(KeyFigure("Parameters", format_count(parameters), note))
    tokens, steps = last_value(history, "tokens"), last_value(history, "step")
    if tokens is not None:
        figures.append(KeyFigure("Tokens", format_count(tokens), "" if steps is None else f"in {steps:,.0f} steps"))
    return figures


def _cost(history: pd.DataFrame, metadata: Mapping[str, Any]) -> list[KeyFigure]:
    cost, figures = labels.section(metadata, "cost"), []
    speed = metadata_number(metadata, "cost", "tokens_per_second")
    speed = last_value(history, "tokens_per_second") if speed is None else speed
    processes = int(metadata_number(metadata, "cost", "processes") or 1)
    device = " × ".join(str(part) for part in (cost.get("device"), processes if processes > 1 else "") if part)
    if speed is not None:
        figures.append(KeyFigure("Tokens per second", format_count(speed), f"on {device}" if device else ""))
    seconds, memory = metadata_number(metadata, "cost", "seconds"), metadata_number(metadata, "cost", "peak_memory_mib")
    if seconds is not None:
        note = "" if memory is None else f"peak memory {labels.number(memory, 3)} MiB"
        figures.append(KeyFigure("Time", format_duration(seconds), note))
    return figures
