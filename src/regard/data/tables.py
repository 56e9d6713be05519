"""Readers of the files that tasks are published in, and of a user's own tables."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from regard.errors import UserError

NO_GOLD_LABEL = "-"
TASK, STREAM = "task", "stream"
"""What messages call the place where files were asked for: what a probe is of, or what is learnt."""


class TableRow(NamedTuple):
    """One example as it is written: its label by name, names for token tasks, None for mlm; `line` counts from 1."""

    texts: tuple[str, ...]
    label: str | tuple[str, ...] | None
    line: int


@dataclass(frozen=True)
class Table:
    """The rows of one file or split, what it is called in messages, and what its lines are called.

    `asked`: the name under which the user asked for it.
    """

    name: str
    rows: tuple[TableRow, ...]
    unit: str = "line"
    asked: str = TASK

    def __post_init__(self) -> None:
        if not self.rows:
            raise UserError(f"{self.asked}: expected examples in {self.name}, found none")

    def place(self, row: TableRow) -> str:
        """Where a row stands, for a message."""
        return f"{self.name}, {self.unit} {row.line}"


@dataclass(frozen=True)
class Columns:
    """Where a table has its texts and its label; `header` where the file has no line of names itself."""

    texts: tuple[str, ...]
    label: str
    header: tuple[str, ...] | None = None


def read_sentences(path: Path, columns: Columns, asked: str = TASK) -> Table:
    """The rows of a published classification file: .tsv as GLUE has it, or .jsonl; rows labelled '-' are left out.

    The .tsv of GLUE knows no quotes: a quotation mark is text, and every tab begins a column. `asked`: the name under
    which the user asked for it.
    """
    packed = path.name.removesuffix(".gz")
    records = _tsv(path, asked, columns.header) if packed.endswith(".tsv") else read_records(path, asked)
    rows = (_row(record, columns, f"{path}, line {line}", line, asked) for line, record in records)
    return Table(str(path), tuple(row for row in rows if row.label != NO_GOLD_LABEL), asked=asked)


def read_table(path: Path, columns: Columns) -> Table:
    """The rows of a user's table: .jsonl, .csv with the usual quotes, .tsv without any, or .parquet.

    Labels are strings or whole numbers.
    """
    records = read_records(path)
    unit = "row" if path.suffix == ".parquet" else "line"
    rows = (_row(record, columns, f"{path}, {unit} {line}", line, TASK) for line, record in records)
    return Table(str(path), tuple(rows), unit)


def read_conll(path: Path, task: str) -> Table:
    """The sentences of a CoNLL-2003 file, with the tags of the task: 'pos' or 'ner', the latter as BIO2.

    A line is a word and its tags apart by white space; blank lines end sentences, and lines of -DOCSTART- are passed
    over. Four columns are word, part of speech, chunk, entity; three are word, part of speech, entity; two are a word
    and the tag asked for.
    """
    rows: list[TableRow] = []
    words: list[str] = []
    tags: list[str] = []
    width = begun = 0
    for number, line in enumerate([*read_text_lines(path), ""], start=1):
        fields = line.split()
        if fields and fields[0] != "-DOCSTART-":
            width = width or _conll_width(fields, f"{path}, line {number}")
            if len(fields) != width:
                raise UserError(f"task: expected {width} columns in {path}, line {number}, got {len(fields)}")
            begun = begun or number
            words.append(fields[0])
            tags.append(fields[1] if task == "pos" else fields[-1])
        elif words:
            rows.append(TableRow(tuple(words), convert_to_bio2(tags) if task == "ner" else tuple(tags), begun))
            words, tags, begun = [], [], 0
    return Table(str(path), tuple(rows))


def read_running_text(path: Path) -> Table:
    """The lines of running text, without the space around them; empty ones are left out."""
    lines = ((number, line.strip()) for number, line in enumerate(read_text_lines(path), start=1))
    return Table(str(path), tuple(TableRow((line,), None, number) for number, line in lines if line))


def convert_to_bio2(tags: Sequence[str]) -> tuple[str, ...]:
    """The tags with B- at the first word of every entity; IOB1 has it only between neighbours of one kind."""
    made, before = [], "O"
    for tag in tags:
        inside = tag.startswith("I-") and before[1:] == tag[1:]
        made.append(f"B-{tag[2:]}" if tag.startswith("I-") and not inside else tag)
        before = tag
    return tuple(made)


def suffixes() -> str:
    """The suffixes of a user's table, for a message."""
    return ", ".join(_READERS)


def is_table(name: str) -> bool:
    """Whether a name is that of a table, by its suffix."""
    return name.removesuffix(".gz").endswith(tuple(_READERS))


def _conll_width(fields: Sequence[str], place: str) -> int:
    """How many columns the first line has."""
    if not 2 <= len(fields) <= 4:
        raise UserError(f"task: expected two to four columns (word pos chunk ner) in {place}, got {len(fields)}")
    return len(fields)


def _row(record: Mapping[str, Any], columns: Columns, place: str, line: int, asked: str) -> TableRow:
    """The texts and the label of one record."""
    missing = [name for name in (*columns.texts, columns.label) if name not in record]
    if missing:
        found = ", ".join(map(str, record)) or "none"
        raise UserError(f"{asked}: expected the column '{missing[0]}' in {place}, found {found}")
    texts = tuple(record[name] for name in columns.texts)
    for name, text in zip(columns.texts, texts, strict=True):
        if not isinstance(text, str):
            raise UserError(f"{asked}: expected a string in the column '{name}' of {place}, got {text!r}")
    label = record[columns.label]
    if isinstance(label, bool) or not isinstance(label, (str, int)) or label == "":
        raise UserError(f"{asked}: expected a string or a whole number as label in {place}, got {label!r}")
    return TableRow(texts, str(label), line)


def _tsv(path: Path, asked: str, header: tuple[str, ...] | None = None) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and fields by name; no quotes."""
    for number, line in enumerate(read_text_lines(path, asked), start=1):
        fields = tuple(line.split("\t"))
        if header is None:
            header = fields
        elif line:
            if len(fields) != len(header):
                raise UserError(f"{asked}: expected {len(header)} columns in {path}, line {number}, got {len(fields)}")
            yield number, dict(zip(header, fields, strict=True))


def _csv(path: Path, asked: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and fields by name, with the usual quotes; the line is the one that the record ends on."""
    reader = csv.reader(io.StringIO("\n".join(read_text_lines(path, asked))), strict=True)
    header: list[str] | None = None
    try:
        for fields in reader:
            if header is None:
                header = fields
            elif fields:
                if len(fields) != len(header):
                    place = f"{path}, line {reader.line_num}"
                    raise UserError(f"{asked}: expected {len(header)} columns in {place}, got {len(fields)}")
                yield reader.line_num, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise UserError(f"{asked}: expected CSV in {path}, line {reader.line_num}: {error}") from None


def _jsonl(path: Path, asked: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object."""
    for number, line in enumerate(read_text_lines(path, asked), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{asked}: expected JSON in {path}, line {number}: {error}") from None
        if not isinstance(record, dict):
            raise UserError(f"{asked}: expected an object in {path}, line {number}, got {type(record).__name__}")
        yield number, record


def _parquet(path: Path, asked: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row number, from 1, and fields by name."""
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{asked}: expected a Parquet file, {path} is none: {str(error).splitlines()[0]}") from None
    yield from enumerate(rows, start=1)


_READERS: dict[str, Callable[[Path, str], Iterator[tuple[int, dict[str, Any]]]]] = {
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
}


def read_records(path: Path, asked: str = TASK) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a table with their numbers, by the reader that its suffix says."""
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in _READERS:
        raise UserError(f"{asked}: expected a file with one of the suffixes {suffixes()}, got {path}")
    return _READERS[suffix](path, asked)


def read_text_lines(path: Path, asked: str = TASK) -> list[str]:
    """The lines of a UTF-8 file, unpacked if it ends in .gz, without line ends and byte order mark."""
    if not path.is_file():
        raise UserError(f"{asked}: expected a file, there is no {path}")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{asked}: expected a gzip file, {path} is none: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{asked}: expected UTF-8, {path} is not: {error.reason} at offset {error.start}") from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
