"""Paragraphs and tables of the pages that are made from results."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any


def wrapped(text: str) -> str:
    """A paragraph in lines of the width that the docs have."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
