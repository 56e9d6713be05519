"""Paragraphs and tables of the pages that are made from results."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def wrapped(text: str) -> str:
    """A paragraph in lines of the width that the docs have."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def item(text: str) -> str:
    """A paragraph of a list."""
    return textwrap.fill(
        text, 120, initial_indent="* ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def listed(words: Iterable[str]) -> str:
    """Words with commas and an "and"; "none" where there are none."""
    every = list(words)
    return every[0] if len(every) == 1 else f"{', '.join(every[:-1])} and {every[-1]}" if every else "none"


def collapsed(text: str) -> str:
    """The text without empty lines that follow each other."""
    lines = text.split("\n")
    return "\n".join(line for i, line in enumerate(lines) if line or not i or lines[i - 1])


def pictures(folder: Path, captions: Mapping[str, str]) -> str:
    """The pictures of a folder that are there, by the names of their files, under a heading; nothing without any."""
    shown = [
        f"![{_first_words(said)}]({folder.name}/{name})\n\n{wrapped(said)}"
        for name, said in captions.items()
        if (folder / name).exists()
    ]
    return "\n\n".join(["## Pictures", *shown]) if shown else ""


def _first_words(said: str) -> str:
    return said.split(",")[0].split(":")[0].rstrip(".")
