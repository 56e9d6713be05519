"""How statistics, tokens, numbers, times and amounts are written for people."""

import math
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from regard.report.arrays import Measure

_VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
_RATES = (
    *("sink_rate", "common_sink_ratio", "sink_tokens", "massive_activations_rate"),
    *(f"sinks_by_token_class_{name}_share" for name in ("first", "special", "delimiter", "other")),
)
_PERCENT = ("%", "percent", "percentage", "per cent")
_SITES = {"decoder": "decoder", "encoder": "encoder", "cross": "cross-attention"}


def title(statistic: str, record: Mapping[str, Any]) -> str:
    """The statistic's title in the record, else its name in words."""
    own_title = info(statistic, record).get("title")
    return str(own_title) if own_title else statistic.replace("_", " ").capitalize()


def description(statistic: str, record: Mapping[str, Any]) -> str:
    """What the record says of the statistic, or of that of which it is one number, as perturbation_spread_own is."""
    names = [name for name in section(record, "statistics") if f"{statistic}_".startswith(f"{name}_")]
    entry = info(max(names, key=len, default=statistic), record)
    replaced = f" Replaced: {entry['replaced']}." if entry.get("replaced") else ""
    return str(entry.get("description") or "") + replaced


def unit(statistic: str, record: Mapping[str, Any]) -> str:
    """The statistic's unit in the record, "" where it has none; a rate is "%" even where the record is silent."""
    own_unit = str(info(statistic, record).get("unit") or "")
    return "%" if own_unit.lower() in _PERCENT or (not own_unit and statistic in _RATES) else own_unit


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
    """The number to `digits` significant digits, thousands grouped, with a true minus; "–" for NaN."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    whole = 0 if value == 0 else math.floor(math.log10(abs(value))) + 1
    if value != 0 and not 1e-4 <= abs(value) < 1e7:
        text = f"{value:.{digits - 1}e}"
    elif whole > 0:
        text = f"{value:,.{max(0, digits - whole)}f}"
    else:
        text = f"{value + 0.0:.{digits}g}"  # −0 is 0
    return text.replace("-", "−")


def with_margin(value: float, margin: float, of: str = "", digits: int = 4) -> str:
    """The number ± its margin, and the unit, in the decimals of `number_and_margin`."""
    text = " ± ".join(part for part in number_and_margin(value, margin, digits) if part)
    return f"{text} %" if of == "%" and not math.isnan(value) else text


def number_and_margin(value: float, margin: float, digits: int = 4) -> tuple[str, str]:
    """A number and its margin in equal decimals: two digits of the margin, at most five of the number.

    Without a margin (NaN) the number to `digits` digits, and "".
    """
    if math.isnan(margin) or not math.isfinite(value):
        return number(value, digits), ""
    is_exact, largest = margin <= ROUNDING * abs(value), max(abs(value), margin)
    if is_exact or not 1e-4 <= largest < 1e7:
        return number(value, digits), "0" if is_exact else number(margin, 2)
    places = min(decimals(margin), max(0, 4 - power(value)))
    is_shown = round(margin, places) > 0
    return format_fixed(value, places), format_fixed(margin, places) if is_shown else number(margin, 2)


ROUNDING = 1e-9
"""Relative errors below this are those of floating-point sums."""


def decimals(error: float) -> int:
    """How many decimals show two digits of an error; at most 6."""
    return min(6, max(0, 1 - power(error)))


def interval_decimals(half: float, low: float, high: float, least: int = 0) -> int:
    """How many decimals show two digits of half an interval, and no end that is not 0 as 0; at most 6."""
    places = decimals(half) if ROUNDING < half < math.inf else 3
    ends = [end for end in (low, high) if ROUNDING < abs(end) < math.inf]
    return max([least, places, *(min(6, -power(end)) for end in ends)])


def power(value: float) -> int:
    """The power of ten of a number's first digit; 0 for 0."""
    return math.floor(math.log10(abs(value))) if value else 0


def with_unit(value: float, of: str) -> str:
    """The number and its unit; a unit in words is left to the caption."""
    return f"{number(value)} %" if of == "%" and not math.isnan(value) else number(value)


def visible(token: str) -> str:
    """The token with every blank, control and invisible character shown; "∅" for the empty string."""
    return "".join(_character(character) for character in token) or "∅"


def samples(record: Mapping[str, Any]) -> str:
    """What was read, as in "100 samples of 64 tokens from wikitext"; "" where the record does not say."""
    data = section(record, "data")
    counts = {"samples": ("", "sample"), "length": ("of ", "token")}
    parts = [f"{before}{pluralize(data[key], name)}" for key, (before, name) in counts.items() if data.get(key)]
    return join([*parts, f"from {data['source']}" if data.get("source") else ""], " ")


def model_name(record: Mapping[str, Any]) -> str:
    """The model's name in the record, or "A model", with the adapter that it was loaded with."""
    model = section(record, "model")
    adapter = f" with the adapter {model['adapter']}" if model.get("adapter") else ""
    return f"{model.get('name') or 'A model'}{adapter}"


def model_size(record: Mapping[str, Any]) -> str:
    """The model's layers and heads, as in "12 layers × 12 heads"; "" where the record does not say."""
    model = section(record, "model")
    known = model.get("layers") is not None and model.get("heads") is not None
    return f"{pluralize(model['layers'], 'layer')} × {pluralize(model['heads'], 'head')}" if known else ""


def section(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The part of the record under `key`; empty where there is none."""
    part = record.get(key)
    return part if isinstance(part, Mapping) else {}


def info(statistic: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the record says about the statistic; empty where nothing."""
    return section(section(record, "statistics"), statistic)


def _character(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    hidden = unicodedata.category(character)[0] == "C" or unicodedata.category(character) in ("Zs", "Zl", "Zp")
    return f"⟨U+{ord(character):04X}⟩" if hidden else character


_SIZES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def format_count(count: float) -> str:
    """A large count to three digits, as in "1.05M"; below a thousand the whole number."""
    for index, (size, letter) in enumerate(_SIZES):
        if count >= size * 0.9995:
            shown = f"{count / size:.3g}"
            return f"1{_SIZES[index - 1][1]}" if shown == "1e+03" and index else f"{shown}{letter}"
    return f"{count:.0f}"


def format_duration(seconds: float) -> str:
    """A time in the two units that matter, as in "4 min 12 s"."""
    if seconds < 60:
        return f"{number(seconds, 3)} s"
    whole = round(seconds)
    for unit, name, below, of_below in ((86_400, "d", "h", 3_600), (3_600, "h", "min", 60), (60, "min", "s", 1)):
        if whole >= unit:
            rest = whole % unit // of_below
            return f"{whole // unit} {name}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"


def metadata_number(record: Mapping[str, Any], part: str, key: str) -> float | None:
    """The number in a part of the record, None where there is none."""
    value = section(record, part).get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def run_time(record: Mapping[str, Any], verb: str) -> str:
    """How long the run took, as in "measured in 12.3 s"; "" where the record does not say."""
    seconds = metadata_number(record, "cost", "seconds")
    return "" if seconds is None else f"{verb} {number(seconds, 3)} s"


def join(parts: Iterable[str], separator: str = ", ") -> str:
    """Join the parts that are not empty."""
    return separator.join(part for part in parts if part)


def pluralize(number: int, name: str, plural: str = "") -> str:
    """The number and the word, as in "3 tasks"."""
    return f"{number:,} {name if number == 1 else plural or name + 's'}"


def format_signed(value: float, places: int | None = None) -> str:
    """Write a number with its sign, as in "−0.012"; to three digits where no decimals are given."""
    rounded = places is not None and math.isfinite(value)
    text = f"{abs(value):,.{places}f}" if rounded else number(abs(value), 3)
    zero = math.isnan(value) or not any(digit in "123456789∞" for digit in text)
    return text if zero else f"{'−' if value < 0 else '+'}{text}"


def format_fixed(value: float, places: int = 2) -> str:
    """Format a number with fixed decimals; "–" if not finite."""
    if not math.isfinite(value):
        return "–"
    text = f"{abs(value):,.{places}f}"
    return f"−{text}" if value < 0 and text.strip("0.,") else text


def verdict(difference: float, overlaps: bool | None) -> str:
    """Say what an interval around a difference says; `overlaps` tells whether it holds 0, None that there is none."""
    if overlaps is None:
        return "no interval"
    return "overlaps 0" if overlaps else "higher" if difference > 0 else "lower"


def format_value(value: Any) -> str:
    """Write a field's value as text: "–" for None, yes or no, lists with commas."""
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{str(key).replace('_', ' ')} {format_value(part)}" for key, part in value.items()) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(format_value(part) for part in value) or "–"
    if isinstance(value, float):
        return f"{value:.10g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
