"""Documents of text: of files, standard input, or Python's own documentation.

Readers of files take the name of the user's option ("texts", "data"), which begins their error messages.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import re
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from regard.data.conversations import MESSAGES, TOOLS, Conversation, has_messages, is_conversation, take_conversation
from regard.data.files import list_files
from regard.data.tables import (
    check_columns,
    decode_pieces,
    find_json_hint,
    find_table_suffix,
    is_table,
    read_parquet,
    read_pieces,
    read_records,
    row_unit,
)
from regard.errors import UserError, warn_user

Document = str | Iterable[str]  # a text, or the pieces of a text too long for memory, which can be read once
_SECTION_SIZE = 1 << 15
_LINE_END = re.compile(r"(?<=\S)(?=\n)")
_SPACE = re.compile(r"(?<=\S)(?=\s)")
SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
"""Suffixes of files that are read of a folder."""


def split_sections(document: Document, size: int = _SECTION_SIZE) -> Iterator[str]:
    """Split a document before line ends, or else spaces, as byte-level tokenizers do, in at most `size` characters."""
    rest = ""
    for piece in [document] if isinstance(document, str) else document:
        rest += piece
        start = 0
        while len(rest) - start > size:
            middle, end = start + size // 2, start + size
            match = _LINE_END.search(rest, middle, end) or _SPACE.search(rest, middle, end)
            cut = match.start() if match else end
            yield rest[start:cut]
            start = cut
        rest = rest[start:]
    if rest:
        yield rest


def read_documents(path: Path, option: str) -> Iterator[Document]:
    """Iterate over the documents of a file.

    A table (`.jsonl`, `.csv`, `.tsv`, `.parquet`) has them under `text`, where null is an empty document; any other
    file, such as `.txt`, is one document, in pieces.
    """
    if not is_table(path.name):
        return iter([_require_text(read_pieces(path, option), str(path), option)])
    texts = (_take_text(record, location, option) for location, record in _read_rows(path, option))
    return _require_text(texts, str(path), option)


def read_all_documents(files: Sequence[Path], option: str) -> Iterator[Document]:
    """Iterate over the documents of files; of several, those without text are left out, with a warning.

    Raises UserError if none has text.
    """
    for file in find_full_files(files, option):
        yield from read_documents(file, option)


def find_full_files(files: Sequence[Path], option: str) -> list[Path]:
    """Return the files of several that have text or a conversation, and warn of others. UserError if none has any."""
    full = [file for file in files if _has_text(file, option)] if len(files) > 1 else list(files)
    if not full:
        raise UserError(f"{option}: expected text, all of {len(files)} files are empty, as {files[0]}")
    if without := sorted({*files}.difference(full)):
        warn_user(f"{option}: {len(without)} of {len(files)} files are empty, and left out, as {without[0]}")
    return full


def _has_text(path: Path, option: str) -> bool:
    if not is_table(path.name):
        return any(piece.strip() for piece in read_pieces(path, option))
    rows = _read_rows(path, option)
    return any(has_messages(record) or _take_text(record, place, option).strip() for place, record in rows)


def find_suffix(path: Path) -> str:
    """Return the suffix of a file in lower case, including the one before .gz."""
    return find_table_suffix(path.name) + (".gz" if path.name.lower().endswith(".gz") else "")


def _read_rows(path: Path, option: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Iterate over the rows of a table, each with its place."""
    is_parquet = find_suffix(path) == ".parquet"
    for number, record in read_parquet(path, option, ["text"]) if is_parquet else read_records(path, option):
        yield f"{path}, {row_unit(path)} {number}", record


def _take_text(record: Mapping[str, Any], location: str, option: str) -> str:
    check_columns(["text"], record, location, option)
    text = "" if record["text"] is None else record["text"]
    if not isinstance(text, str):
        raise UserError(f"{option}: expected a string under 'text' in {location}, got {type(text).__name__}")
    return text


def _require_text(texts: Iterator[str], name: str, option: str) -> Iterator[str]:
    """Pass texts on, and raise UserError after the last one if all were blank."""
    is_blank = True
    for text in texts:
        is_blank = is_blank and not text.strip()
        yield text
    if is_blank:
        raise UserError(f"{option}: expected text, {name} is empty")


STANDARD_INPUT = "-"
_OTHER_NAMES = frozenset({"conversation", "conversations"})
"""Other names of the column of conversations, which are often of other fields than role and content."""
_OPTION, _ALLOWED = "texts", ", ".join(SUFFIXES)
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "idlelib", "turtledemo"}
)


@dataclass(frozen=True)
class Texts:
    """Documents, their source, and their SHA-256 (UTF-8, a NUL byte after each document).

    `conversations` are there in the place of documents, and their JSON in the place of text.
    """

    documents: tuple[str, ...]
    source: str
    sha256: str
    conversations: tuple[Conversation, ...] = ()

    @classmethod
    def of(cls, documents: Sequence[str | Conversation], source: str) -> Texts:
        """Return documents or conversations with their hash. Raises UserError if there are both."""
        digest = hashlib.sha256()
        texts = tuple(document for document in documents if isinstance(document, str))
        conversations = tuple(document for document in documents if isinstance(document, Conversation))
        if texts and conversations:
            raise UserError(f"texts: expected either texts or conversations, got both in {source}")
        for number, document in enumerate(chain(texts, map(Conversation.to_json, conversations))):
            try:
                digest.update(document.encode("utf-8") + b"\0")
            except UnicodeEncodeError:
                place = f"{'conversation' if conversations else 'document'} {number}"
                raise UserError(f"texts: expected Unicode in {place}, got half of a surrogate pair") from None
        return cls(texts, source, digest.hexdigest(), conversations)

    def __repr__(self) -> str:
        """Say how many documents there are, without their text."""
        kind = "conversations" if self.conversations else "documents"
        return f"Texts({len(self.conversations or self.documents)} {kind}, {self.source})"


def read_texts(paths: Sequence[str | Path], *, conversations: bool = False) -> Texts:
    """Read the documents of all files, in order, and of those in folders; "-" is standard input, one document.

    With `conversations` rows may have these in the place of text, in a column `messages`.
    """
    if not paths:
        raise UserError("texts: expected at least one file or -, got none")
    if twice := [path for path, count in Counter(map(str, paths)).items() if count > 1]:
        raise UserError(f"texts: expected each file once, got {twice[0]} twice")
    texts = [document for path in paths for document in _read(path, conversations)]
    names = ("standard input" if str(path) == STANDARD_INPUT else str(path) for path in paths)
    return Texts.of(texts, ", ".join(names))


def load_python_documentation() -> Texts:
    """Load Python's own documentation: each topic of `pydoc_data.topics` is a document, sorted by title.

    Lines without a letter or digit are dropped. A Python without these topics has the docstrings of its standard
    library instead, one document per module. Both differ between versions of Python.
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

    Tests and the applications that come with Python are left out. The texts differ between versions of Python.
    """
    docstrings = _read_docstrings(Path(sysconfig.get_path("stdlib")), "**/*.py")
    return Texts.of(docstrings, f"docstrings of the standard library of Python {platform.python_version()}")


def _read(path: str | Path, conversations: bool) -> list[str | Conversation]:
    if str(path) == STANDARD_INPUT:
        pieces = decode_pieces(sys.stdin.buffer, "standard input", _OPTION)
        return ["".join(_require_text(pieces, "standard input", _OPTION))]
    expected = f"a file of text, a table (.jsonl, .csv, .tsv, .parquet), a folder with {_ALLOWED}, or -;"
    files = find_document_files(Path(path), expected, _OPTION)
    documents: list[str | Conversation] = []
    for file in find_full_files(files, _OPTION):
        talks = list(_read_conversations(file)) if conversations and is_table(file.name) else []
        documents += talks or ["".join(document) for document in read_documents(file, _OPTION)]
    return documents


def _read_conversations(path: Path) -> Iterator[Conversation]:
    """Iterate over the conversations of a table; there are none if its first row has none, or has text."""
    for number, (location, record) in enumerate(_read_rows(path, _OPTION)):
        if not has_messages(record):
            is_named_otherwise = "text" not in record and not _OTHER_NAMES.isdisjoint(record)
            if number or is_named_otherwise:
                hint = "; give each message its role and content there" if is_named_otherwise else ""
                found = f"{', '.join(record)}{hint}"
                raise UserError(f"texts: expected the column '{MESSAGES}' in {location}, found {found}")
            return
        yield take_conversation(record, location, _OPTION)


def find_document_files(path: Path, expected: str, option: str) -> list[Path]:
    """Return the file at a path, or all files of `SUFFIXES` in a folder and below, sorted by path.

    Raises UserError for what is neither, which says what was `expected`, and for a folder without any.
    """
    if path.is_dir():
        files = [file for file in list_files(path) if find_suffix(file) in SUFFIXES]
        if not files:
            raise UserError(f"{option}: expected files ({_ALLOWED}) in the folder {path}, found none")
        return files
    if not path.exists():
        raise UserError(f"{option}: expected a file, there is no {path}")
    if ((hint := find_json_hint(path.name)) and not is_table(path.name)) or not path.is_file():
        raise UserError(f"{option}: expected {expected} got {path}{hint}")
    return [path]


def _remove_rules(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.strip() or any(map(str.isalnum, line)))


def _read_docstrings(library: Path, pattern: str = "*.py") -> list[str]:
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


def take_texts(texts: Texts | Sequence[Any]) -> Texts:
    """Return documents, or conversations, that were given in Python. Raises UserError for what is no list of them."""
    if isinstance(texts, Texts):
        return texts
    names = getattr(texts, "column_names", getattr(texts, "columns", texts if isinstance(texts, Mapping) else None))
    documents = () if isinstance(texts, str) or names is not None else tuple(texts)
    if documents and all(map(is_conversation, documents)):
        places = (f"conversation {number}" for number in range(len(documents)))
        talks = [take_conversation(*of, "texts") for of in zip(documents, places, strict=False)]
        return Texts.of(talks, "given in Python")
    if not documents or not all(isinstance(document, str) for document in documents):
        types = sorted({type(document).__name__ for document in documents} - {"str"})
        got = "one string" if isinstance(texts, str) else ", ".join(types) or "none"
        if names is not None:
            is_split = isinstance(getattr(texts, "column_names", None), Mapping)  # a DatasetDict
            splits = list(names) if is_split else []
            columns, where = (names[splits[0]], f"texts[{splits[0]!r}]") if splits else (names, "texts")
            got = f"a {type(texts).__name__}; pass one of its columns, as {where}[{_text_column(columns)!r}]"
            if where == "texts" and {MESSAGES, TOOLS} <= {*columns} and "text" not in columns:
                rows = "list(texts)" if hasattr(texts, "column_names") else "texts.to_dict('records')"
                got = f"a {type(texts).__name__}; pass its rows, as {rows}"
        elif documents and isinstance(documents[0], Mapping) and {"role", "content"} <= documents[0].keys():
            got = "one conversation; pass a list of conversations, as [texts]"
        elif documents and isinstance(documents[0], Mapping):
            got += f"; pass one entry of each, as [row[{_text_column(documents[0])!r}] for row in texts]"
        expected = "a list of at least one document, each a string, or a list of messages (a conversation)"
        raise UserError(f"texts: expected {expected}; got {got}")
    return Texts.of(documents, "given in Python")


def _text_column(names: Iterable[Any]) -> Any:
    """Return the name of the column that holds texts, as far as names say it: a string, a number or a tuple."""
    known = [name.item() if hasattr(name, "item") else name for name in names]
    return next((name for name in ("text", MESSAGES) if name in known), known[0] if known else "text")
