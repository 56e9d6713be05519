"""How a statistic, a number and a token are written for people."""

import math
import unicodedata
from collections.abc import Mapping
from typing import Any

from regard.report.arrays import Measure

_VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
_RATES = ("sink_rate", "common_sink_ratio", "sink_tokens")
_PERCENT = ("%", "percent", "percentage", "per cent")
_SITES = {"decoder": "decoder", "encoder": "encoder", "cross": "cross-attention"}


def title(statistic: str, record: Mapping[str, Any]) -> str:
    """The statistic's title in the record, else its name in words."""
    told = info(statistic, record).get("title")
    return str(told) if told else statistic.replace("_", " ").capitalize()


def unit(statistic: str, record: Mapping[str, Any]) -> str:
    """The statistic's unit in the record, "" where it has none; a rate is "%" even where the record is silent."""
    told = str(info(statistic, record).get("unit") or "")
    return "%" if told.lower() in _PERCENT or (not told and statistic in _RATES) else told


def name(measure: Measure, record: Mapping[str, Any], *, with_site: bool) -> str:
    """The title with threshold and, if wished, site, as in "Sink rate, ε = 0.3, encoder"."""
    parts = [title(measure.statistic, record)]
    if measure.epsilon is not None:
        parts.append(f"ε = {measure.epsilon:g}")
    if with_site and measure.site:
        parts.append(site(measure.site))
    return ", ".join(parts)


def site(code: str) -> str:
    """The site's name in words."""
    return _SITES.get(code, code)


def number(value: float, digits: int = 4) -> str:
    """The number to `digits` significant digits, thousands grouped; "–" for NaN."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value != 0 and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}"
    whole = 0 if value == 0 else math.floor(math.log10(abs(value))) + 1
    return f"{value:,.{max(0, digits - max(whole, 0))}f}" if whole > 0 else f"{value:.{digits}g}"


def with_unit(value: float, of: str, digits: int = 4) -> str:
    """The number and its unit; a unit in words is left to the caption."""
    return f"{number(value, digits)} %" if of == "%" else number(value, digits)


def visible(token: str) -> str:
    """The token with every blank, control and invisible character shown; "∅" for the empty string."""
    return "".join(_character(character) for character in token) or "∅"


def samples(record: Mapping[str, Any]) -> str:
    """What was read, as in "100 samples of 64 tokens from wikitext"; "" where the record does not say."""
    data = section(record, "data")
    texts = {"samples": "{} samples", "length": "of {} tokens", "source": "from {}"}
    return " ".join(text.format(data[key]) for key, text in texts.items() if data.get(key) not in (None, ""))


def model_name(record: Mapping[str, Any]) -> str:
    """The model's name in the record, or "A model"."""
    return str(section(record, "model").get("name") or "A model")


def model_size(record: Mapping[str, Any]) -> str:
    """The model's layers and heads, as in "12 layers × 12 heads"; "" where the record does not say."""
    model = section(record, "model")
    known = model.get("layers") is not None and model.get("heads") is not None
    return f"{model['layers']} layers × {model['heads']} heads" if known else ""


def section(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The part of the record under `key`; empty where there is none."""
    found = record.get(key)
    return found if isinstance(found, Mapping) else {}


def info(statistic: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the record says about the statistic; empty where nothing."""
    return section(section(record, "statistics"), statistic)


def _character(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    hidden = unicodedata.category(character)[0] == "C" or unicodedata.category(character) in ("Zs", "Zl", "Zp")
    return f"⟨U+{ord(character):04X}⟩" if hidden else character
