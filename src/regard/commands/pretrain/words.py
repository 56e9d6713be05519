"""Sentences and key figures of a report on pre-training."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from regard.commands.pretrain.charts import symbol
from regard.report import labels
from regard.report.labels import format_count, format_duration, join, metadata_number
from regard.report.page import KeyFigure
from regard.report.panels import DOMAIN, domains, last_value
from regard.report.repeats import describe_repeats

Last = Mapping[str, float]


def last_values(history: pd.DataFrame) -> Last:
    """Return the last finite number of each column, without the columns that have none."""
    values = {str(name): last_value(history, str(name)) for name in history.columns}
    return {name: value for name, value in values.items() if value is not None}


def name(metadata: Mapping[str, Any]) -> str:
    """Return the run's name, that of its preset; a configuration of one's own is named by its attention and size."""
    parameters = metadata_number(metadata, "model", "parameters")
    attention = labels.section(metadata, "config").get("attention") or "some"
    size = "A decoder" if parameters is None else f"A decoder of {format_count(parameters)} parameters"
    return str(metadata.get("name") or f"{size} with {attention} attention")


def ledes(history: pd.DataFrame, metadata: Mapping[str, Any]) -> list[str]:
    """Write what was trained, then the outcome."""
    config, last = labels.section(metadata, "config"), last_values(history)
    attention, parameters = config.get("attention"), metadata_number(metadata, "model", "parameters")
    parts = [
        f"{attention} attention" if attention else "",
        "" if parameters is None else f"{format_count(parameters)} parameters",
        labels.pluralize(int(last["step"]), "step") if "step" in last else "",
        _write_passes(metadata),
        "" if config.get("seed") is None else f"seed {config['seed']}",
    ]
    outcome = [_write_loss(last), describe_repeats(metadata), _write_sink(last, metadata)]
    return [join(parts, " · "), join(outcome, " ")]


def _write_passes(metadata: Mapping[str, Any]) -> str:
    """Say how often the training text was read: of several domains, the fewest and the most."""
    domains = labels.section(metadata, "data").get("domains") or []
    known = [domain.get("passes") for domain in domains if isinstance(domain, Mapping)]
    passes = sorted(float(count) for count in known if isinstance(count, (int, float)))
    if not passes:
        return ""
    extremes = dict.fromkeys(labels.number(count, 3) for count in (passes[0], passes[-1]))
    return f"{' to '.join(extremes)} passes over the training text"


def _write_loss(last: Last) -> str:
    for key, title in (("valid_loss", "validation"), ("loss", "training")):
        if key in last:
            return f"The {title} loss ended at {labels.number(last[key], 3)} nats per token."
    return ""


def _write_sink(last: Last, metadata: Mapping[str, Any]) -> str:
    """Say whether a sink emerged, whether the last measurement alone reached the threshold, and the last rates."""
    if "sink_rate" not in last:
        return "Sinks were not watched."
    _, sentence = emerged(metadata) or ("", "")
    rate = metadata_number(metadata, "emergence", "rate")
    is_none = labels.section(metadata, "emergence").get("step", 0) is None
    is_late = is_none and rate is not None and last.get("sink_rate_max", 0.0) >= rate
    position = last.get("sink_position")
    strongest = ""
    if position and "sink_rate_max" in last:
        strongest = f", the strongest position ({position:.0f}) at {labels.number(last['sink_rate_max'], 3)} %"
    ended = f"{symbol(metadata)} ended at {labels.number(last['sink_rate'], 3)} %{strongest}."
    return join(
        [
            sentence,
            "The last measurement alone reached the threshold, which does not tell a sink." if is_late else "",
            ended,
        ],
        " ",
    )


def emerged(metadata: Mapping[str, Any]) -> tuple[str, str] | None:
    """Say when the sink emerged, as a figure and a sentence; None if unknown."""
    emergence = labels.section(metadata, "emergence")
    if "step" not in emergence:
        return None
    sentences = {
        "step": "A sink emerged at step {:,}.",
        "virtual_step": "No token became a sink; the virtual sink emerged at step {:,}.",
    }
    for key, sentence in sentences.items():
        if emergence.get(key) is not None:
            return f"step {int(emergence[key]):,}", sentence.format(int(emergence[key]))
    return "none", "No sink emerged."


def key_figures(history: pd.DataFrame, metadata: Mapping[str, Any]) -> list[KeyFigure]:
    """Make the figures of loss, sinks, size and cost, as far as known."""
    last = last_values(history)
    return [*_losses(history, last), *_sinks(last, metadata), *_size(last, metadata), *_cost(last, metadata)]


def _losses(history: pd.DataFrame, last: Last) -> list[KeyFigure]:
    names = domains(history)
    training = labels.number(last["loss"], 3) if "loss" in last else ""
    if "valid_loss" not in last and training:
        return [KeyFigure("Training loss", training, "nats per token, at the end")]
    notes = join(["nats", "mean over domains, by tokens" if names else "", f"training {training}" if training else ""])
    overall = {"valid_loss": ("Validation loss", notes)}
    by_domain = {f"{DOMAIN}{domain}": (f"Validation loss, {domain}", "nats per token") for domain in names}
    figures = {**overall, **by_domain}.items()
    return [KeyFigure(label, labels.number(last[key], 3), note) for key, (label, note) in figures if key in last]


def _sinks(last: Last, metadata: Mapping[str, Any]) -> list[KeyFigure]:
    figures = []
    if "sink_rate" in last:
        strongest, largest = "", last.get("sink_rate_max")
        if "sink_position" in last:
            rate = "" if largest in (None, last["sink_rate"]) else f" ({labels.number(last['sink_rate_max'], 3)} %)"
            strongest = f"strongest at position {last['sink_position']:.0f}{rate}"
        length = metadata_number(metadata, "watch", "length")
        note = join([strongest, "" if length is None else f"T = {length:.0f}"])
        figures.append(KeyFigure(symbol(metadata), f"{labels.number(last['sink_rate'], 3)} %", note))
    if "virtual_sink_rate" in last:
        note = "heads × samples whose mass on it is above ε"
        figures.append(KeyFigure("Virtual sink rate", f"{labels.number(last['virtual_sink_rate'], 3)} %", note))
    if "alpha_first" in last:
        mass, uniform, note = last["alpha_first"], last.get("alpha_uniform"), "mean over heads"
        if uniform:
            note = f"{labels.number(mass / uniform, 3)}× uniform attention’s {labels.number(uniform, 3)}"
        figures.append(KeyFigure("Mean α₀", labels.number(mass, 3), note))
    if "norm_ratio" in last:
        ratio = f"{labels.number(last['norm_ratio'], 3)}×"
        figures.append(KeyFigure("|h₀| / mean |hₜ|", ratio, "largest of all layers"))
    return [*figures, *_emergence(metadata)] if {"sink_rate", "alpha_first"} & set(last) else figures


def _emergence(metadata: Mapping[str, Any]) -> list[KeyFigure]:
    emergence, details = emerged(metadata), labels.section(metadata, "emergence")
    if emergence is None:
        return []
    notes = []
    if isinstance(details.get("rate"), (int, float)):
        rate = f"{labels.number(float(details['rate']), 3)} %"
        is_none = details["step"] is None
        notes.append(f"no position stayed at {rate}" if is_none else f"a position stays at {rate} or more")
    steps = {"virtual_step": "the virtual sink", "alpha_step": "mean α₀ well above uniform"}
    notes += [f"{text} from step {int(details[key]):,}" for key, text in steps.items() if details.get(key) is not None]
    return [KeyFigure("Sink emerged", emergence[0], "; ".join(notes))]


def _size(last: Last, metadata: Mapping[str, Any]) -> list[KeyFigure]:
    figures = []
    names = ("parameters", "parameters_without_embeddings")
    parameters, without_embeddings = (metadata_number(metadata, "model", name) for name in names)
    if parameters is not None:
        note = "" if without_embeddings is None else f"{format_count(without_embeddings)} without embeddings"
        figures.append(KeyFigure("Parameters", format_count(parameters), note))
    if "tokens" in last:
        note = f"in {labels.pluralize(int(last['step']), 'step')}" if "step" in last else ""
        figures.append(KeyFigure("Tokens", format_count(last["tokens"]), note))
    return figures


def _cost(last: Last, metadata: Mapping[str, Any]) -> list[KeyFigure]:
    figures = []
    names = ("tokens_per_second", "processes", "seconds", "peak_memory_mib")
    speed, processes, seconds, memory = (metadata_number(metadata, "cost", name) for name in names)
    speed = last.get("tokens_per_second") if speed is None else speed
    device = str(labels.section(metadata, "cost").get("device") or "")
    device = join([device, f"{processes:.0f}" if processes and processes > 1 else ""], " × ")
    if speed is not None:
        figures.append(KeyFigure("Tokens per second", format_count(speed), f"on {device}" if device else ""))
    if seconds is not None:
        note = "" if memory is None else f"peak memory {labels.number(memory, 3)} MiB"
        figures.append(KeyFigure("Time", format_duration(seconds), note))
    return figures
