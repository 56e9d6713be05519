"""Where text to train on comes from: Python itself, files, the hub; named on the command line by a line of text."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import importlib
import itertools
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pyarrow
import pyarrow.parquet

from regard.data.hub import network_errors
from regard.data.packing import Document, sections
from regard.data.texts import (
    check_text_column,
    decode_bytes,
    load_python_documentation,
    load_standard_library,
    parse_json_document,
)
from regard.errors import UserError

PYTHON, HUB = "python", "hub:"
SYNTAX = "[NAME][@WEIGHT]=WHERE[,valid=WHERE][,tokens=N]"
_NAMED = re.compile(r"(?P<name>[\w.-]*)(@(?P<weight>[^=]*))?=(?P<rest>.+)")
_OPTION = re.compile(r"(?P<rest>.+),(?P<key>valid|tokens)=(?P<value>[^,]*)")
_PIECE = 1 << 20


@dataclass(frozen=True)
class Source:
    """A domain of text: its name, where it comes from, its weight, and text of its own to validate on.

    `where` is one of

    * `python`: the documentation of Python's language and the docstrings of its standard library, two megabytes;
    * a file (.txt, .jsonl, .parquet; the first two also with .gz), or a folder, all such files in it and under it;
    * `hub:NAME[:CONFIG[:SPLIT]]`: the column `text` of a data set of the Hugging Face hub, streamed; of `train` where
      no split is named.

    `valid` is of the same form. `tokens`: it is read until there are this many, None for all.
    """

    name: str
    where: str = PYTHON
    weight: float = 1.0
    valid: str | None = None
    tokens: int | None = None

    @classmethod
    def parse(cls, text: str) -> Source:
        """The source that a line of text names: `[NAME][@WEIGHT]=WHERE[,valid=WHERE][,tokens=N]`.

        For example `python`, `novels.txt`, `novels=train.txt,valid=valid.txt`, `web@0.7=hub:allenai/c4:en,tokens=1e9`.
        Without a name it has that of the file or data set. A path with = or , in it needs a name before it.
        """
        named = _NAMED.fullmatch(text)
        where, options = _options(named["rest"] if named else text)
        if not where.strip():
            raise UserError(f"data: expected {SYNTAX}, got '{text}'")
        return cls(
            named["name"] if named and named["name"] else _name_of(where),
            where,
            _number(named["weight"], "weight", text) if named and named["weight"] is not None else 1.0,
            options.get("valid"),
            int(_number(options["tokens"], "tokens", text)) if "tokens" in options else None,
        )

    def __str__(self) -> str:
        weight = "" if self.weight == 1 else f"@{self.weight:g}"
        valid = "" if self.valid is None else f",valid={self.valid}"
        tokens = "" if self.tokens is None else f",tokens={self.tokens}"
        return f"{self.name}{weight}={self.where}{valid}{tokens}"


def read_documents(where: str) -> Iterator[Document]:
    """The documents of a place, one at a time, in an order that is the same in every run; see `Source` for places.

    Raises UserError for what is missing, empty or not text, some of it only when it is come to.
    """
    if where == PYTHON:
        yield from load_python_documentation().documents
        yield from load_standard_library().documents
    elif where.startswith(HUB):
        yield from _hub_documents(*_hub_name(where))
    else:
        for path in find_text_files(where):
            yield from _READERS[_kind(path)](path)


def identify_source(where: str) -> str:
    """What tells whether the text of a place is still the same: of files the sha256 over names and bytes.

    Of Python its version; of the hub its name alone, for what is streamed is not known before.
    """
    if where == PYTHON:
        return f"{PYTHON} {platform.python_implementation()} {platform.python_version()}"
    if where.startswith(HUB):
        return HUB + ":".join(map(str, _hub_name(where)))
    digest = hashlib.sha256()
    for file in find_text_files(where):
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            while raw := stream.read(_PIECE):
                digest.update(raw)
    return digest.hexdigest()


def sample_texts(sources: Iterable[Source], characters: int = 100_000_000) -> Iterator[str]:
    """Text of all sources to train a tokenizer on: of each as much as its weight says, `characters` in all at most."""
    sources = tuple(sources)
    total = sum(source.weight for source in sources)
    for source in sources:
        left = int(characters * source.weight / total)
        parts = (section for document in read_documents(source.where) for section in sections(document))
        for part in parts:
            yield part[:left]
            left -= len(part)
            if left <= 0:
                break


def find_text_files(where: str) -> list[Path]:
    """The file of this path, or all files with text in this folder and those under it, sorted by their paths."""
    path = Path(where).expanduser()
    allowed = ", ".join(_READERS)
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) in _READERS)
        if not found:
            raise UserError(f"data: expected files ({allowed}) in the folder {where}, found none")
        return found
    if _kind(path) not in _READERS:
        raise UserError(f"data: expected {PYTHON}, hub:NAME, a folder or a file ({allowed}), got {where}")
    if not path.is_file():
        raise UserError(f"data: expected a file, there is no {where}")
    return [path]


def check_source(source: Source) -> None:
    """Nothing, or a UserError: a file or folder of the source is not there. What is elsewhere is not looked for."""
    for where in (source.where, source.valid):
        if where is not None and where != PYTHON and not where.startswith(HUB):
            find_text_files(where)


def _not_empty(texts: Iterator[str], path: Path) -> Iterator[str]:
    """The same, at least one of them with more than white space in it."""
    empty = True
    for text in texts:
        empty = empty and not text.strip()
        yield text
    if empty:
        raise UserError(f"data: expected text, {path} is empty")


def _read_txt(path: Path) -> Iterator[Document]:
    """The whole file as one document, a piece at a time."""
    yield _not_empty(_pieces(path), path)


def _read_jsonl(path: Path) -> Iterator[Document]:
    """What stands under `text`, line by line."""
    return _not_empty(_lines(path), path)


def _read_parquet(path: Path) -> Iterator[Document]:
    """The column `text`, some rows at a time."""
    return _not_empty(_column(path), path)


def _pieces(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    offset = 0
    with _opened(path) as file:
        while raw := _read(file, path):
            if b"\0" in raw:
                raise UserError(f"data: expected text, {path} is binary (NUL byte at offset {offset + raw.index(0)})")
            yield _next_piece(decoder, raw, path, offset)
            offset += len(raw)
    yield _next_piece(decoder, b"", path, offset)


def _next_piece(decoder: codecs.IncrementalDecoder, raw: bytes, path: Path, offset: int) -> str:
    held = len(decoder.getstate()[0])
    try:
        return decoder.decode(raw, final=not raw)
    except UnicodeDecodeError as error:
        at = offset - held + error.start
        raise UserError(f"data: expected UTF-8, {path} is not: {error.reason} at offset {at}") from None


def _lines(path: Path) -> Iterator[str]:
    """What stands under `text`, line by line; lines of white space alone are passed over."""
    with _opened(path) as file:
        for number in itertools.count(1):
            raw = _read(file, path, line=True)
            if not raw:
                return
            place = f"{path}, line {number}"
            line = decode_bytes(raw, place)
            if line.strip():
                yield parse_json_document(line, place)


def _column(path: Path) -> Iterator[str]:
    """The column `text`; a null is an empty document."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_text_column(file.schema_arrow, path)
            for batch in file.iter_batches(batch_size=1024, columns=["text"]):
                for document in batch.column("text").to_pylist():
                    yield document or ""
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"data: expected a Parquet file, {path} is none: {str(error).splitlines()[0]}") from None


_READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    ".txt": _read_txt,
    ".txt.gz": _read_txt,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".parquet": _read_parquet,
}


def _kind(path: Path) -> str:
    """The suffix of a file, that before .gz with it."""
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


def _opened(path: Path) -> IO[bytes]:
    try:
        return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise UserError(f"data: cannot read {path}: {error.strerror or error}") from None


def _read(file: IO[bytes], path: Path, *, line: bool = False) -> bytes:
    try:
        return file.readline() if line else file.read(_PIECE)
    except (OSError, EOFError) as error:
        raise UserError(f"data: cannot read {path}: {error}") from None


def _hub_documents(repository: str, config: str | None, split: str) -> Iterator[Document]:
    """The column `text` of a split of a data set on the hub, streamed."""
    name = "/".join(part for part in (repository, config, split) if part)
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(
            f"data: expected files, or the package {error.name} for {HUB}{repository}: pip install 'regard[hub]'"
        ) from None
    try:
        for row in datasets.load_dataset(repository, config, split=split, streaming=True):
            if "text" not in row:
                raise UserError(f"data: expected the column 'text' in {name}, found {', '.join(row)}")
            yield row["text"] or ""
    except UserError:
        raise
    except (OSError, ValueError, *network_errors(), datasets.exceptions.DatasetsError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"data: expected {name} from the hub; the hub gave: {said}") from None


def _hub_name(where: str) -> tuple[str, str | None, str]:
    """Repository, configuration and split."""
    parts = where.removeprefix(HUB).split(":")
    if not parts[0] or len(parts) > 3:
        raise UserError(f"data: expected hub:NAME[:CONFIG[:SPLIT]], got '{where}'")
    repository, config, split = (*parts, "", "")[:3]
    return repository, config or None, split or "train"


def _options(text: str) -> tuple[str, dict[str, str]]:
    """What stands before the options, and these."""
    found: dict[str, str] = {}
    while option := _OPTION.fullmatch(text):
        found.setdefault(option["key"], option["value"])
        text = option["rest"]
    return text, found


def _name_of(where: str) -> str:
    """The name of a domain that was given none: the file's without its suffix, or the data set's without its owner."""
    if where.startswith(HUB):
        return _hub_name(where)[0].split("/")[-1]
    if where == PYTHON:
        return where
    return re.sub(r"[^\w-]", "_", Path(where).resolve().name.split(".")[0])


def _number(text: str, what: str, whole: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"data: expected a positive number as the {what} in '{whole}', got '{text}'")
    return number
