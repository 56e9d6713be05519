"""Rows of the files that tasks are published in, and of a user's own tables.

Each reader takes the name of the user's option ("task", "stream"), which begins its error messages.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import pyarrow
import pyarrow.parquet

from regard.data.missing_values import MissingValues, blank_no_numbers, find_complete, is_minus_one, undo_float
from regard.data.rows import NUMBER, WHOLE
from regard.data.separators import separator_hint
from regard.errors import UserError, warn_user

NO_GOLD_LABEL = "-"  # how GLUE and MultiNLI mark examples whose annotators disagree
TASK, STREAM = "task", "stream"
CHUNK_BYTES = 1 << 20


class TableRow(NamedTuple):
    """One example as written: one label name, a tuple of them (token tasks) or None (mlm); `line` counts from 1."""

    texts: tuple[str, ...]
    label: str | tuple[str, ...] | None
    line: int


@dataclass(frozen=True)
class Table:
    """Rows of a file or split, at least one, and how messages name it, its lines and the user's option.

    `left_out` is the number of rows that were left out since they have no label or no text.
    """

    name: str
    rows: tuple[TableRow, ...]
    unit: str = "line"
    option: str = TASK
    left_out: int = 0

    def __post_init__(self) -> None:
        if not self.rows:
            raise UserError(f"{self.option}: expected examples in {self.name}, found none")

    def locate(self, row: TableRow) -> str:
        return f"{self.name}, {self.unit} {row.line}"


@dataclass(frozen=True)
class Columns:
    """Names of the columns of texts and label; `header` names all columns of a file without a header line."""

    texts: tuple[str, ...]
    label: str
    header: tuple[str, ...] | None = None


def read_sentences(path: Path, columns: Columns, option: str = TASK) -> Table:
    """Read a published classification file, .tsv as in GLUE or .jsonl, without rows labeled "-"."""
    table = read_table(path, columns, option)
    return replace(table, rows=tuple(row for row in table.rows if row.label != NO_GOLD_LABEL))


def read_table(
    path: Path, columns: Columns, option: str = TASK, *, missing_values: MissingValues | None = None
) -> Table:
    """Read .jsonl, .csv with quotes, .tsv without, or .parquet. Labels are strings or integers.

    A published file (`missing_values` None) is read as it is, with empty texts.
    """
    unit = row_unit(path)
    records = list(_read_tsv(path, option, columns.header) if columns.header else read_records(path, option))
    kept = records = records if missing_values is None else blank_no_numbers(records, columns.label, path, option)
    if missing_values in ("skip", "skip-minus-one"):
        places = [(values, f"{unit} {line}") for line, values in records]
        is_mark = missing_values == "skip-minus-one"
        marked = {at for at, (_, values) in enumerate(records) if is_mark and is_minus_one(values.get(columns.label))}
        kept = [records[index] for index in find_complete(places, columns.label, columns.texts, path, option, marked)]
    is_published = missing_values is None
    rows = (_parse_row(record, columns, f"{path}, {unit} {line}", line, option, is_published) for line, record in kept)
    return Table(str(path), tuple(rows), unit, option, left_out=len(records) - len(kept))


def list_suffixes() -> str:
    """List the suffixes of a user's table for a message."""
    return ", ".join(_READERS)


def is_table(name: str) -> bool:
    """Whether a file name has the suffix of a table."""
    return find_table_suffix(name) in _READERS


def row_unit(path: Path) -> str:
    """Return what a position in a table counts."""
    return "row" if find_table_suffix(path.name) == ".parquet" else "line"


def find_table_suffix(name: str) -> str:
    """Return the suffix of a table in lower case, packed (.gz) or not."""
    return Path(name.lower().removesuffix(".gz")).suffix


def find_json_hint(name: str) -> str:
    """Say what to do with a file whose name ends in .json or the like, which is no table; empty for others."""
    suffix = find_table_suffix(name)
    if suffix in (".ndjson", ".jsonlines"):
        return "; name it .jsonl, which has an object on each line"
    if suffix == ".ipynb":
        return "; write the text of its cells to a file, which else is read with outputs and images"
    return "; write its list as .jsonl, an object on each line" if suffix.startswith(".json") else ""


def find_file(folder: Path, *names: str) -> Path | None:
    """Find a file with one of several names, plain or packed (.gz)."""
    paths = (folder / (name + suffix) for name in names for suffix in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


def find_split_files(
    folders: Iterable[Path], train: Sequence[str], test: Sequence[str], option: str
) -> tuple[Path, Path] | None:
    """Find the training file and, beside it, the evaluation file in the first folder that has the former."""
    for folder in folders:
        if (train_file := find_file(folder, *train)) is not None:
            if (test_file := find_file(folder, *test)) is None:
                raise UserError(f"{option}: expected {' or '.join(test)} (.gz) beside {train_file}, there is none")
            return train_file, test_file
    return None


_PAIRS = ({"premise", "hypothesis"}, {"sentence1", "sentence2"}, {"question1", "question2"})
"""Usual names of columns with pairs of texts."""


def check_columns(required: Iterable[str], available: Iterable[str], location: str, option: str) -> None:
    """Raise UserError if a required column is not available."""
    names = tuple(available)
    if missing := [name for name in required if name not in names]:
        columns = ", ".join(str(name).expandtabs(1) for name in names) or "none"
        hint = "; text and label (--text, --label) name columns of your own" if option == TASK else ""
        if option == STREAM and (missing[0] == "text" or not {"label", "answer", "task"}.intersection(names)):
            hint = "; a stream has columns of the names text and label (or answer), and task if there are several"
            if any(pair.issubset(names) for pair in _PAIRS):
                hint = "; a stream of pairs has them in the columns text and text_pair"
            if find_table_suffix(location.rpartition(", ")[0]) in (".csv", ".tsv"):
                hint += ", which the first line says"
        if blank := next((name for name in names if name != missing[0] == str(name).strip()), None):
            hint = f"; take the blanks around {blank!r} out of the line of names"
        hint = separator_hint(names, find_table_suffix(location.rpartition(", ")[0])) or hint
        if {"messages", "conversations", "conversation"}.intersection(names):
            form = "text in a column 'prompt', and the answer in 'answer'" if option == STREAM else "text first"
            hint = f"; write conversations as {form}, by tokenizer.apply_chat_template(…, tokenize=False)"
        raise UserError(f"{option}: expected the column '{missing[0]}' in {location}, found {columns}{hint}")


def warn_of_labels(labels: Iterable[str], place: object, option: str) -> None:
    """Warn of labels that may not be meant as classes: decimal numbers, and several labels in one."""
    names = set(labels)
    decimal = next((name for name in sorted(names) if not WHOLE.fullmatch(name)), None)
    if decimal is not None and all(map(NUMBER.fullmatch, names)):
        reason = f"each of {len(names)} numbers is a class of its own, without an order; regression is not served"
        warn_user(f"{option}: labels of {place} are decimal numbers, such as {decimal}: {reason}")
        return
    parts = {name: {part.strip() for part in re.split(r"[|;,]", name)} for name in sorted(names)}
    if joined := next((name for name, several in parts.items() if len(several) > 1 and several <= names), None):
        reason = f"a class of its own beside {', '.join(map(repr, sorted(parts[joined])))}"
        warn_user(f"{option}: the label {joined!r} of {place} is {reason}; several labels of a row are not served")


def check_columns_once(names: Iterable[str], place: object, option: str) -> None:
    """Raise UserError if a column that has a name is there twice."""
    if twice := next((name for name, count in Counter(filter(None, names)).items() if count > 1), None):
        raise UserError(f"{option}: expected each column once in {place}, got {twice!r} twice")


def _parse_row(
    record: Mapping[str, Any], columns: Columns, location: str, line: int, option: str, may_be_blank: bool
) -> TableRow:
    check_columns((*columns.texts, columns.label), record, location, option)
    texts = tuple(record[name] for name in columns.texts)
    for name, text in zip(columns.texts, texts, strict=True):
        if not isinstance(text, str) or not (may_be_blank or text.strip()):
            raise UserError(f"{option}: expected a text in the column '{name}' of {location}, got {text!r}")
    label = record[columns.label]
    label = label.strip() if isinstance(label, str) else undo_float(label)
    if isinstance(label, bool) or not isinstance(label, (str, int)) or label == "":
        raise UserError(f"{option}: expected a string or a whole number as label in {location}, got {label!r}")
    return TableRow(texts, str(label), line)


MAX_FIELD = 2**31 - 1
"""Characters of a field of a CSV file at most; Python's own limit is an eighth of a million."""
Records = Iterator[tuple[int, dict[str, Any]]]  # line number (for .parquet the row number, from 1) and values by column


def _read_tsv(path: Path, option: str, header: tuple[str, ...] | None = None) -> Records:
    """Read tab-separated values without quotes, as those of GLUE are; warn of the first that seems to have some."""
    lines = (line.split("\t") if line else [] for line in read_text_lines(path, option))
    is_told = False
    for number, record in _name_fields(enumerate(lines, start=1), path, option, header):
        if not is_told and any(map(_is_quoted, record.values())):
            is_told = True
            warn_user(
                f"{option}: {path}, line {number}: quotes around a field of .tsv are read as its text; save the table "
                "as .csv to have them taken off"
            )
        yield number, record


def _is_quoted(field: str) -> bool:
    """Whether a field is as programs write one with quotes inside: these twice, and quotes around it."""
    inside = field[1:-1]
    return len(field) > 3 and field[0] == field[-1] == '"' and '""' in inside and '"' not in inside.replace('""', "")


def _name_fields(
    lines: Iterable[tuple[int, list[str]]], path: Path, option: str, header: Sequence[str] | None = None
) -> Records:
    """Name the fields of each line by the header, which is the first line by default.

    Columns without a name, as spreadsheets leave behind the last, are none.
    """
    for number, fields in lines:
        if header is None:
            if not fields:
                continue
            header = fields
            check_columns_once(header, path, option)
        elif fields:
            if len(fields) != len(header):
                suffix = find_table_suffix(path.name)
                has_quotes = suffix == ".tsv" and any(field.startswith('"') for field in fields)
                hint = "; .tsv is read without quotes" if has_quotes else separator_hint(header, suffix)
                expected = f"{len(header)} column{'s' * (len(header) != 1)} in {path}, line {number}"
                raise UserError(f"{option}: expected {expected}, got {len(fields)}{hint}")
            yield number, dict(zip(header, fields, strict=True))


_LONE_CR = "a CR stands alone"


def _read_jsonl(path: Path, option: str) -> Records:
    """Read one JSON object per line; blank lines are skipped."""
    for number, line in enumerate(read_text_lines(path, option), start=1):
        if not line.strip():
            continue
        try:
            record = _DECODER.decode(line)
        except _RepeatedNameError as error:
            raise UserError(
                f"{option}: expected each column once in {path}, line {number}, got {error} twice"
            ) from None
        except (ValueError, RecursionError) as error:
            problem = f"{_LONE_CR}; end lines with LF or CR LF" if "\r" in line else error
            raise UserError(f"{option}: expected JSON in {path}, line {number}: {problem}") from None
        if not isinstance(record, dict):
            raise UserError(f"{option}: expected an object in {path}, line {number}, got {type(record).__name__}")
        if broken := next((name for name in record if "\\u" in line and not is_unicode(record[name])), None):
            location = f"under '{broken}' in {path}, line {number}"
            raise UserError(f"{option}: expected Unicode {location}, got half of a surrogate pair")
        yield number, record


class _RepeatedNameError(Exception):
    """An object of JSON has a name twice, which is the argument."""


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _RepeatedNameError(repr(Counter(name for name, _ in pairs).most_common(1)[0][0]))
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_make_object)


def is_unicode(value: Any) -> bool:
    """Whether what JSON gave has no half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_parquet(path: Path, option: str, columns: Sequence[str] = ()) -> Records:
    """Read the rows of a Parquet file, a batch at a time; only some columns if the file has all of these."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_columns_once(file.schema_arrow.names, path, option)
            has_columns = columns and set(columns) <= set(file.schema_arrow.names)
            batches = file.iter_batches(batch_size=1024, columns=list(columns) if has_columns else None)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{option}: expected a Parquet file, {path} is none: {str(error).splitlines()[0]}") from None


_READERS: dict[str, Callable[[Path, str], Records]] = {
    ".jsonl": _read_jsonl,
    ".csv": lambda path, option: _name_fields(read_csv_fields(path, option), path, option),
    ".tsv": _read_tsv,
    ".parquet": read_parquet,
}


def read_records(path: Path, option: str = TASK) -> Records:
    """Iterate over line numbers and records of a table, read as its suffix says."""
    suffix = find_table_suffix(path.name)
    if suffix not in _READERS:
        hint = find_json_hint(path.name)
        raise UserError(f"{option}: expected a file with one of the suffixes {list_suffixes()}, got {path}{hint}")
    return _READERS[suffix](path, option)


def read_csv_fields(path: Path, option: str) -> Iterator[tuple[int, list[str]]]:
    """Iterate over line numbers, on which records end, and fields of comma-separated values with quotes."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_FIELD))
    reader = csv.reader((f"{line}\n" for line in read_text_lines(path, option)), strict=True)
    try:
        for fields in reader:
            yield reader.line_num, fields
    except csv.Error as error:
        lone = f"{_LONE_CR}; end lines with LF or CR LF, and put a field that has one into quotes"
        after_quotes = "expected after" in str(error)
        hint = "; fields are separated by commas, and quotes within quotes are doubled" if after_quotes else ""
        problem = lone if "new-line" in str(error) else f"{error}{hint}"
        raise UserError(f"{option}: expected CSV in {path}, line {reader.line_num}: {problem}") from None


def read_text_lines(path: Path, option: str = TASK) -> Iterator[str]:
    """Iterate over the lines of a UTF-8 file, plain or .gz, without line ends and byte order mark."""
    for piece in read_pieces(path, option, by_line=True):
        yield piece.removesuffix("\n").removesuffix("\r")


def read_pieces(path: Path, option: str, *, by_line: bool = False) -> Iterator[str]:
    """Iterate over the text of a UTF-8 file, plain or .gz, without byte order mark.

    It comes by line, with line ends as they are, or in chunks, where they are LF.
    """
    if not path.is_file():
        raise UserError(f"{option}: expected a file, there is no {path}")
    try:
        with cast(IO[bytes], gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            yield from decode_pieces(file, str(path), option, by_line=by_line)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{option}: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def decode_pieces(file: IO[bytes], name: str, option: str, *, by_line: bool = False) -> Iterator[str]:
    """Decode a UTF-8 file as `read_pieces` does; `name` names it in messages."""
    line_ends = io.IncrementalNewlineDecoder(None, translate=not by_line)
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    offset = 0
    while True:
        raw = file.readline() if by_line else file.read(CHUNK_BYTES)
        if not offset and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{option}: expected UTF-8, {name} is UTF-16; save it as UTF-8")
        if not by_line and b"\0" in raw:
            position = offset + raw.index(0)
            raise UserError(f"{option}: expected text, {name} is binary (NUL byte at offset {position})")
        pending = len(decoder.getstate()[0])
        try:
            piece = decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            position = offset - pending + error.start
            raise UserError(
                f"{option}: expected UTF-8, {name} is not: {error.reason} at offset {position}; save it as UTF-8"
            ) from None
        piece = piece if by_line else line_ends.decode(piece, final=not raw)
        if piece:
            yield piece
        if not raw:
            return
        offset += len(raw)
