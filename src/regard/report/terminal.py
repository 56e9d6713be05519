"""What the summaries for a terminal of 80 columns share."""

import textwrap
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
    """Return a bold title, sentences that wrap, blocks of lines, and sentences at the end.

    Lines of more than 80 columns go on in an indented one; in a narrower terminal they are cut.
    """
    parts: list[RenderableType] = [Text(plain(title), style="bold"), *(Text(plain(lede)) for lede in ledes if lede)]
    for block in blocks:
        if isinstance(block, Text):
            parts += [Text(), block]
        elif block:
            lines = [part for line in block for part in wrap_line(line)]
            parts += [Text(), *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines)]
    sentences = [Text(plain(note)) for note in notes if note]
    return Group(*parts, *([Text()] if sentences else []), *sentences)


def wrap_line(line: str) -> list[str]:
    """Return a line in parts of 80 columns at most, all but the first indented by four."""
    return textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False) or [line]


def shorten(text: str, width: int) -> str:
    """Return a text in a width, without its middle where it is longer: names of parts differ at the end."""
    start = (width - 1) // 3
    return text if len(text) <= width else f"{text[:start]}…{text[len(text) - (width - 1 - start) :]}"


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
