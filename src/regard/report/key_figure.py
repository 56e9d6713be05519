"""The headline number of a page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KeyFigure:
    """One number worth a headline: what it is, the number, where or how sure it is, the site if there are several."""

    label: str
    value: str
    note: str
    site: str = ""
