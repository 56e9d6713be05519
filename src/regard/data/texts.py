"""Documents, from files, standard input or Python's own documentation."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from regard.errors import UserError

STANDARD_INPUT = "-"
_NO_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "idlelib", "turtledemo"}
)


@dataclass(frozen=True)
class Texts:
    """Documents, where they came from, and the sha256 over them (UTF-8, each followed by a NUL byte)."""

    documents: tuple[str, ...]
    source: str
    sha256: str

    @classmethod
    def of(cls, documents: Sequence[str], source: str) -> Texts:
        """The documents with the sha256 over them."""
        digest = hashlib.sha256()
        for document in documents:
            digest.update(document.encode("utf-8") + b"\0")
        return cls(tuple(documents), source, digest.hexdigest())


def read_texts(paths: Sequence[str | Path]) -> Texts:
    """The documents of all files, in order.

    `.txt`: the whole file is one document. `.jsonl`: each line an object with the document under `text`. `.parquet`:
    one document a row, in the column `text`; a null is an empty document. `-`: standard input, one document.

    Raises UserError for a file that is missing, empty, not UTF-8, or not of the form its suffix says.
    """
    if not paths:
        raise UserError(f"texts: expected at least one file ({', '.join(_READERS)}) or -, got none")
    documents = [document for path in paths for document in _read(path)]
    return Texts.of(
        documents, ", ".join("standard input" if str(path) == STANDARD_INPUT else str(path) for path in paths)
    )


def load_python_documentation() -> Texts:
    """Python's own documentation: each topic of `pydoc_data.topics` a document, sorted by its title.

    Lines without a letter or a digit, the underlines and rules of the markup, are left out.
    A Python that ships without them has the docstrings of its standard library instead, one document a module. Either
    differs between versions of Python, which the sha256 shows.
    """
    version = platform.python_version()
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return Texts.of(_docstrings(Path(sysconfig.get_path("stdlib"))), f"docstrings of Python {version}")
    documents = [_without_rules(topics[title]) for title in sorted(topics)]
    return Texts.of(documents, f"documentation of Python {version} (pydoc_data.topics)")


def load_standard_library() -> Texts:
    """The docstrings of Python's whole standard library, one document a module, sorted by their paths.

    Packages are entered; tests and the applications that come with Python (`_NO_LIBRARY`) are left out. Nothing is
    imported. 1.6 million characters in Python 3.11; they differ between versions, which the sha256 shows.
    """
    found = _docstrings(Path(sysconfig.get_path("stdlib")), "**/*.py")
    return Texts.of(found, f"docstrings of the standard library of Python {platform.python_version()}")


def _read(path: str | Path) -> list[str]:
    """The documents of one file, at least one of them with more than white space in it."""
    if str(path) == STANDARD_INPUT:
        documents, name = [decode_bytes(sys.stdin.buffer.read(), "standard input")], "standard input"
    else:
        documents, name = _read_file(Path(path)), str(path)
    if not any(document.strip() for document in documents):
        raise UserError(f"texts: expected text, {name} is empty")
    return documents


def _read_file(path: Path) -> list[str]:
    """The documents of a file, read as its suffix says."""
    allowed = ", ".join(_READERS)
    if path.is_dir():
        raise UserError(f"texts: expected files ({allowed}), {path} is a folder")
    if path.suffix not in _READERS:
        raise UserError(f"texts: expected a file with one of the suffixes {allowed}, or -; got {path}")
    if not path.is_file():
        raise UserError(f"texts: expected a file, there is no {path}")
    return _READERS[path.suffix](path)


def _read_txt(path: Path) -> list[str]:
    """The whole file as one document."""
    return [decode_bytes(path.read_bytes(), str(path))]


def _read_jsonl(path: Path) -> list[str]:
    """What stands under `text`, line by line; lines of white space alone are passed over."""
    lines = decode_bytes(path.read_bytes(), str(path)).split("\n")
    return [
        parse_json_document(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def parse_json_document(line: str, place: str) -> str:
    """The document in one line of JSON."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"texts: expected JSON in {place}: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"texts: expected an object with the key 'text' in {place}, got {type(row).__name__}")
    if "text" not in row:
        raise UserError(f"texts: expected the key 'text' in {place}, got {_some(row) or 'none'}")
    text = row["text"]
    if not isinstance(text, str):
        raise UserError(f"texts: expected a string under 'text' in {place}, got {type(text).__name__}")
    return text


def _read_parquet(path: Path) -> list[str]:
    """The column `text`; a null is an empty document."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_text_column(file.schema_arrow, path)
            column = file.read(columns=["text"]).column("text")
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"texts: expected a Parquet file, {path} is none: {str(error).splitlines()[0]}") from None
    return [document or "" for document in column.to_pylist()]


def check_text_column(schema: pyarrow.Schema, path: Path) -> None:
    """Raises UserError where a Parquet file of this schema has no column `text` of strings."""
    if "text" not in schema.names:
        raise UserError(f"texts: expected a column 'text' in {path}, found {_some(schema.names) or 'none'}")
    kind = schema.field("text").type
    strings = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    if not any(holds(kind) for holds in strings):
        raise UserError(f"texts: expected strings in the column 'text' of {path}, found {kind}")


_READERS: dict[str, Callable[[Path], list[str]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def decode_bytes(raw: bytes, name: str) -> str:
    """The bytes as UTF-8 text, without a byte order mark."""
    if b"\0" in raw:
        raise UserError(f"texts: expected text, {name} is binary (NUL byte at offset {raw.index(0)})")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"texts: expected UTF-8, {name} is not: {error.reason} at offset {error.start}") from None


def _some(names: Iterable[object]) -> str:
    """Up to six names, for a message."""
    listed = [str(name) for name in names]
    return ", ".join(listed[:6]) + (", …" if len(listed) > 6 else "")


def _without_rules(text: str) -> str:
    """The text without its lines of punctuation alone."""
    lines = text.splitlines()
    return "\n".join(line for line in lines if not line.strip() or any(map(str.isalnum, line)))


def _docstrings(library: Path, pattern: str = "*.py") -> list[str]:
    """The docstrings in a folder of modules, one document a module, without importing any of them."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documents = []
    for path in sorted(library.glob(pattern)):
        if _NO_LIBRARY.isdisjoint(path.relative_to(library).parts):
            nodes = ast.walk(_parsed(path))
            found = [ast.get_docstring(node) for node in nodes if isinstance(node, kinds)]
            documents.append("\n\n".join(docstring for docstring in found if docstring))
    return [document for document in documents if document]


def _parsed(path: Path) -> ast.Module:
    """The syntax tree of a module, without what the parser would warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(path.read_bytes())
