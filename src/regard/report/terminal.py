"""What the summaries for a terminal of 80 columns share."""

from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from regard.report import labels

WIDTH = 80
BARS = "▁▂▃▄▅▆▇█"


def plain(text: str) -> str:
    """Return the text with control and invisible characters shown, but blanks as they are."""
    return labels.visible(text).replace("␣", " ") if text else ""


def summary(
    title: str, ledes: Iterable[str], blocks: Iterable[Sequence[str] | Text], notes: Iterable[str] = ()
) -> Group:
    """Return a bold title, sentences that wrap, blocks of lines that are cut, and sentences at the end."""
    parts: list[RenderableType] = [Text(plain(title), style="bold"), *(Text(plain(lede)) for lede in ledes if lede)]
    for block in blocks:
        if isinstance(block, Text):
            parts += [Text(), block]
        elif block:
            parts += [Text(), *(Text(line, no_wrap=True, overflow="ellipsis") for line in block)]
    sentences = [Text(plain(note)) for note in notes if note]
    return Group(*parts, *([Text()] if sentences else []), *sentences)


def sparkline(values: Sequence[float] | np.ndarray, most: int = 48) -> str:
    """Return the values as blocks between their smallest and their largest; a blank for what is not finite."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = np.where(np.isfinite(numbers), numbers, np.nan)
    if np.isnan(numbers).all():
        return " " * min(most, len(numbers))
    shown = numbers[np.linspace(0, len(numbers) - 1, min(most, len(numbers))).round().astype(int)]
    low, high = np.nanmin(numbers), np.nanmax(numbers)
    if low == high:
        return "".join(" " if np.isnan(value) else BARS[3] for value in shown)
    places = (shown - low) / (high - low) * (len(BARS) - 1)
    return "".join(" " if np.isnan(place) else BARS[round(float(place))] for place in places)
