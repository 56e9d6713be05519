"""Numbers, times and amounts as a page words them."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from regard.report import labels

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
        return f"{labels.number(seconds, 3)} s"
    whole = round(seconds)
    for unit, name, below, of_below in ((86_400, "d", "h", 3_600), (3_600, "h", "min", 60), (60, "min", "s", 1)):
        if whole >= unit:
            rest = whole % unit // of_below
            return f"{whole // unit} {name}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"


def metadata_number(record: Mapping[str, Any], part: str, key: str) -> float | None:
    """The number in a part of the record, None where there is none."""
    found = labels.section(record, part).get(key)
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None


def run_time(record: Mapping[str, Any], verb: str) -> str:
    """How long the run took, as in "measured in 12.3 s"; "" where the record does not say."""
    seconds = metadata_number(record, "cost", "seconds")
    return "" if seconds is None else f"{verb} {labels.number(seconds, 3)} s"


def join(parts: Iterable[str], separator: str = ", ") -> str:
    """Join the parts that are not empty."""
    return separator.join(part for part in parts if part)


def pluralize(number: int, name: str, plural: str = "") -> str:
    """The number and the word, as in "3 tasks"."""
    return f"{number:,} {name if number == 1 else plural or name + 's'}"


def format_signed(value: float, places: int | None = None) -> str:
    """Write a number with its sign, as in "−0.012"; to three digits where no decimals are given."""
    rounded = places is not None and math.isfinite(value)
    text = f"{abs(value):,.{places}f}" if rounded else labels.number(abs(value), 3)
    zero = math.isnan(value) or not any(digit in "123456789∞" for digit in text)
    return text if zero else f"{'−' if value < 0 else '+'}{text}"


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
        return ", ".join(f"{key.replace('_', ' ')} {format_value(part)}" for key, part in value.items()) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(format_value(part) for part in value) or "–"
    if isinstance(value, float):
        return f"{value:.10g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
