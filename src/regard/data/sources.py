"""Domains of training text: files, folders, Python's own documentation, or data sets of the hub."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from pathlib import Path

from regard.data.files import add_file
from regard.data.hub import HubSplit
from regard.data.tables import check_columns
from regard.data.texts import (
    SUFFIXES,
    Document,
    find_document_files,
    load_python_documentation,
    load_standard_library,
    read_all_documents,
    split_sections,
)
from regard.errors import UserError

PYTHON, HUB = "python", "hub:"
_NAMED = re.compile(r"(?P<name>[\w.-]*)(@(?P<weight>[^=]*))?=(?P<rest>.+)")
_SOURCE_OPTION = re.compile(r"(?P<rest>.+),(?P<key>valid|tokens)=(?P<value>[^,]*)")


@dataclass(frozen=True)
class Source:
    """A domain of training text.

    A location is one of

    * `python`: the documentation of Python's language and the docstrings of its standard library, two megabytes;
    * a file of text, or a table (.jsonl, .csv, .tsv, .parquet) with a column `text`, all but .parquet also with .gz;
    * a folder with .txt, .jsonl and .parquet, also nested;
    * `hub:NAME[:CONFIG[:SPLIT]]`: the column `text` of a data set of the Hugging Face hub, streamed; the split is
      `train` by default.
    """

    name: str
    where: str = PYTHON  # location of the text
    weight: float = 1.0  # sampling weight
    valid: str | None = None  # location of separate validation text
    tokens: int | None = None  # maximum number of tokens to read; None for all

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parse `[NAME][@WEIGHT]=WHERE[,valid=WHERE][,tokens=N]`, such as `web@0.7=hub:allenai/c4:en,tokens=1e9`.

        The name defaults to that of the file or data set. A path that contains = or , needs a name before it.
        """
        match = _NAMED.fullmatch(text)
        where = match["rest"] if match else text
        options: dict[str, str] = {}
        while option := _SOURCE_OPTION.fullmatch(where):
            options.setdefault(option["key"], option["value"])
            where = option["rest"]
        if not where.strip():
            raise UserError(f"data: expected [NAME][@WEIGHT]=WHERE[,valid=WHERE][,tokens=N], got '{text}'")
        return cls(
            match["name"] if match and match["name"] else _default_name(where),
            where,
            _parse_positive(match["weight"], "weight", text) if match and match["weight"] is not None else 1.0,
            options.get("valid"),
            int(_parse_positive(options["tokens"], "tokens", text, least=1)) if "tokens" in options else None,
        )

    def __str__(self) -> str:
        weight = "" if self.weight == 1 else f"@{float(self.weight)!r}".removesuffix(".0")
        valid = "" if self.valid is None else f",valid={self.valid}"
        tokens = "" if self.tokens is None else f",tokens={self.tokens}"
        return f"{self.name}{weight}={self.where}{valid}{tokens}"


def read_source(where: str) -> Iterator[Document]:
    """Iterate over the documents of a location (see `Source`), in the same order in every run."""
    if where == PYTHON:
        yield from load_python_documentation().documents
        yield from load_standard_library().documents
    elif where.startswith(HUB):
        split = _parse_hub_split(where)
        with split.open("data", streaming=True) as rows:
            for row in rows:
                check_columns(["text"], row, str(split), "data")
                yield row["text"] or ""
    else:
        yield from read_all_documents(find_text_files(where), "data")


def identify_source(where: str) -> str:
    """Return the SHA-256 over names and bytes of files, the version of Python, or the name of a data set of the hub."""
    if where == PYTHON:
        return f"{PYTHON} {platform.python_implementation()} {platform.python_version()}"
    if where.startswith(HUB):
        return HUB + ":".join(map(str, _parse_hub_split(where)))
    digest = hashlib.sha256()
    for file in find_text_files(where):
        digest.update(file.name.encode() + b"\0")
        add_file(digest, file)
    return digest.hexdigest()


def sample_texts(sources: Iterable[Source], characters: int = 100_000_000) -> Iterator[str]:
    """Iterate over text to train a tokenizer on: from each source its weight's share of at most `characters`."""
    sources = tuple(sources)
    weights = [Fraction(repr(float(source.weight))) for source in sources]  # as they are written: 0.29 of 100 is 29
    total = sum(weights)
    for source, weight in zip(sources, weights, strict=True):
        remaining = floor(characters * weight / total)
        sections = (section for document in read_source(source.where) for section in split_sections(document))
        for section in sections:
            yield section[:remaining]
            remaining -= len(section)
            if remaining <= 0:
                break


def find_text_files(where: str) -> list[Path]:
    """Return the file at a path, or all text files in a folder and below, sorted by path."""
    expected = f"{PYTHON}, hub:NAME, a file of text or a table, or a folder with {', '.join(SUFFIXES)},"
    return find_document_files(Path(os.path.expanduser(where)), expected, "data")


def check_source(source: Source) -> None:
    """Raise UserError if a file or folder of the source is missing; the hub is not checked."""
    for where in (source.where, source.valid):
        if where is not None and where != PYTHON and not where.startswith(HUB):
            find_text_files(where)


def _parse_hub_split(where: str) -> HubSplit:
    parts = where.removeprefix(HUB).split(":")
    if not parts[0] or len(parts) > 3:
        raise UserError(f"data: expected hub:NAME[:CONFIG[:SPLIT]], got '{where}'")
    repository, config, split = (*parts, "", "")[:3]
    return HubSplit(repository, config or None, split or "train")


def _default_name(where: str) -> str:
    """Name a domain after its file without suffix, or after its data set without owner."""
    if where.startswith(HUB):
        return _parse_hub_split(where).repository.split("/")[-1]
    if where == PYTHON:
        return where
    return re.sub(r"[^\w-]", "_", Path(where).resolve().name.split(".")[0])


def _parse_positive(text: str, name: str, source: str, *, least: float = 0) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf") or number < least:
        raise UserError(f"data: expected a positive number as the {name} in '{source}', got '{text}'")
    return number
