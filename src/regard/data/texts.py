"""Documents of text: .txt, .jsonl and .parquet files, standard input, or Python's own documentation.

Readers of files take the name of the user's option ("texts", "data"), which begins their error messages.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from regard.data.tables import check_columns, decode_pieces, read_parquet, read_pieces, read_records
from regard.errors import UserError

Document = str | Iterable[str]  # a text, or the pieces of a text too long for memory, which can be read once
SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")


def read_documents(path: Path, option: str) -> Iterator[Document]:
    """Iterate over the documents of a file whose suffix is one of `SUFFIXES`.

    `.txt` is one document, in pieces. `.jsonl` has the document under `text` in each line; blank lines are skipped.
    `.parquet` has the documents in the column `text`; null is an empty document. Errors are raised while iterating.
    """
    if find_suffix(path).startswith(".txt"):
        return iter([_require_text(read_pieces(path, option), str(path), option)])
    return _require_text(_read_text_column(path, option), str(path), option)


def read_stream(file: IO[bytes], name: str, option: str) -> Iterator[str]:
    """Iterate over the pieces of a UTF-8 text; `name` names it in messages."""
    return _require_text(decode_pieces(file, name, option), name, option)


def find_suffix(path: Path) -> str:
    """Return the suffix of a file, including the one before .gz."""
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


def _read_text_column(path: Path, option: str) -> Iterator[str]:
    """Read the column `text` of a table."""
    is_parquet = path.suffix == ".parquet"
    for number, record in read_parquet(path, option, ["text"]) if is_parquet else read_records(path, option):
        location = f"{path}, {'row' if is_parquet else 'line'} {number}"
        check_columns(["text"], record, location, option)
        text = "" if is_parquet and record["text"] is None else record["text"]
        if not isinstance(text, str):
            raise UserError(f"{option}: expected a string under 'text' in {location}, got {type(text).__name__}")
        yield text


def _require_text(texts: Iterator[str], name: str, option: str) -> Iterator[str]:
    """Pass texts on, and raise UserError after the last one if all were blank."""
    is_blank = True
    for text in texts:
        is_blank = is_blank and not text.strip()
        yield text
    if is_blank:
        raise UserError(f"{option}: expected text, {name} is empty")


STANDARD_INPUT = "-"
_OPTION = "texts"
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "idlelib", "turtledemo"}
)


@dataclass(frozen=True)
class Texts:
    """Documents, their source, and their SHA-256 (UTF-8, a NUL byte after each document)."""

    documents: tuple[str, ...]
    source: str
    sha256: str

    @classmethod
    def of(cls, documents: Sequence[str], source: str) -> Texts:
        """Hash documents."""
        digest = hashlib.sha256()
        for document in documents:
            digest.update(document.encode("utf-8") + b"\0")
        return cls(tuple(documents), source, digest.hexdigest())


def read_texts(paths: Sequence[str | Path]) -> Texts:
    """Read the documents of all files, in order; "-" is standard input, one document."""
    if not paths:
        raise UserError(f"texts: expected at least one file ({', '.join(SUFFIXES)}) or -, got none")
    texts = [document for path in paths for document in _read(path)]
    names = ("standard input" if str(path) == STANDARD_INPUT else str(path) for path in paths)
    return Texts.of(texts, ", ".join(names))


def load_python_documentation() -> Texts:
    """Load Python's own documentation: each topic of `pydoc_data.topics` is a document, sorted by title.

    Lines without a letter or digit (rules and underlines of the markup) are dropped. A Python without these topics has
    the docstrings of its standard library instead, one document per module. Both differ between versions of Python.
    """
    version = platform.python_version()
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return Texts.of(_read_docstrings(Path(sysconfig.get_path("stdlib"))), f"docstrings of Python {version}")
    texts = [_remove_rules(topics[title]) for title in sorted(topics)]
    return Texts.of(texts, f"documentation of Python {version} (pydoc_data.topics)")


def load_standard_library() -> Texts:
    """Load the docstrings of Python's whole standard library, one document per module, sorted by path.

    Packages are included; tests and the applications that come with Python are not. Nothing is imported. The texts have
    1.6 million characters in Python 3.11 and differ between versions.
    """
    docstrings = _read_docstrings(Path(sysconfig.get_path("stdlib")), "**/*.py")
    return Texts.of(docstrings, f"docstrings of the standard library of Python {platform.python_version()}")


def _read(path: str | Path) -> list[str]:
    """Read the documents of one file, or of standard input."""
    if str(path) == STANDARD_INPUT:
        return ["".join(read_stream(sys.stdin.buffer, "standard input", _OPTION))]
    path = Path(path)
    allowed = ", ".join(SUFFIXES)
    if path.is_dir():
        raise UserError(f"texts: expected files ({allowed}), {path} is a folder")
    if find_suffix(path) not in SUFFIXES:
        raise UserError(f"texts: expected a file with one of the suffixes {allowed}, or -; got {path}")
    if not path.is_file():
        raise UserError(f"texts: expected a file, there is no {path}")
    return ["".join(document) for document in read_documents(path, _OPTION)]


def _remove_rules(text: str) -> str:
    """Remove lines of punctuation."""
    return "\n".join(line for line in text.splitlines() if not line.strip() or any(map(str.isalnum, line)))


def _read_docstrings(library: Path, pattern: str = "*.py") -> list[str]:
    """Read the docstrings of modules without importing them, one document per module."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = []
    for path in sorted(library.glob(pattern)):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts):
            with warnings.catch_warnings():  # of the parser
                warnings.simplefilter("ignore")
                module = ast.parse(path.read_bytes())
            docstrings = [ast.get_docstring(node) for node in ast.walk(module) if isinstance(node, kinds)]
            texts.append("\n\n".join(docstring for docstring in docstrings if docstring))
    return [text for text in texts if text]
