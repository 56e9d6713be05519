"""Readers of documents in .txt, .jsonl and .parquet files, a piece at a time.

Each reader takes the name of the user's option ("texts", "data"), which begins its error messages.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from regard.data.tables import check_columns, decode_pieces, read_parquet, read_pieces, read_records
from regard.errors import UserError

Document = str | Iterable[str]
"""A text, or the pieces of a text too long for memory, which can be read once."""
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
