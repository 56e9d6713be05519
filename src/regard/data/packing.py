"""Text packed into blocks of tokens: read a document at a time, tokenised in batches, never in memory whole."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from regard.data.blocks import BLOCKS, BlocksMetadata, TokenBlocks, check_num_blocks, is_packed
from regard.data.tokenizers import tokenizer_hash
from regard.errors import UserError

Document = str | Iterable[str]
"""A text; one that is too long for memory comes as its pieces, which are read once."""

_SECTION = 1 << 15
_CHARACTERS_AT_ONCE, _SECTIONS_AT_ONCE = 1 << 20, 1 << 10
_LINE_END = re.compile(r"(?<=\S)(?=\n)")
_SPACE = re.compile(r"(?<=\S)(?=\s)")


def pack(
    documents: Iterable[Document],
    tokenizer: Any,
    length: int,
    folder: str | Path,
    *,
    source: str = "",
    identity: str = "",
    most: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> TokenBlocks:
    """The documents as blocks of `length` tokens in `folder`, packed once and used again.

    Each document ends with the tokenizer's EOS token; they stand one after another without regard to the borders of
    blocks. A tail shorter than a block is dropped. Documents of white space alone are passed over; special tokens
    written out in a text are text. Tokens are uint16 where the vocabulary has at most 65,536, else uint32.

    A `folder` packed with the same identity, tokenizer and length is used as it is and `documents` is not touched;
    any other is made anew. With `most`, no more is read than makes that many tokens. Nothing half-written is ever seen
    there: the files are made beside it and moved.

    Of several processes let one pack first and the others follow, who then find it packed:
    `with accelerator.local_main_process_first(): pack(…)`.

    Raises UserError for text too little for one block, a tokenizer without EOS, and where it cannot be written.
    """
    wanted = {"length": length, "identity": identity, "tokenizer": tokenizer_hash(tokenizer)}
    if identity and is_packed(folder, [BLOCKS], wanted):
        return TokenBlocks.load(folder)
    with Packing(folder, tokenizer, length, source=source, identity=identity) as packing:
        packing.add(documents, lambda _: BLOCKS, most=most, on_progress=on_progress)
        counted = packing.finish()
    check_num_blocks(counted.get(BLOCKS), length, source or "the text")
    return TokenBlocks.load(folder)


def sections(document: Document, size: int = _SECTION) -> Iterator[str]:
    """A document as parts of at most `size` characters, which joined are the document.

    Cut before a line end or white space that follows a letter, where byte-level tokenizers cut as well.
    """
    rest = ""
    for piece in [document] if isinstance(document, str) else document:
        rest += piece
        start = 0
        while len(rest) - start > size:
            cut = _cut(rest, start + size // 2, start + size)
            yield rest[start:cut]
            start = cut
        rest = rest[start:]
    if rest:
        yield rest


def _cut(text: str, low: int, high: int) -> int:
    """Where to cut between two places: at the first line end, at a space where there is none, else at the last."""
    for mark in (_LINE_END, _SPACE):
        if found := mark.search(text, low, high):
            return found.start()
    return high


class Packing:
    """A folder of blocks while it is made: written beside its place, moved there by `finish`, else removed."""

    def __init__(self, folder: str | Path, tokenizer: Any, length: int, *, source: str, identity: str) -> None:
        if length < 1:
            raise UserError(f"length: expected at least 1 token, got {length}")
        if tokenizer.eos_token_id is None:
            raise UserError("tokenizer: expected one with an EOS token to put between documents, this has none")
        self.folder = Path(folder)
        self.tokenizer, self.eos = tokenizer, int(tokenizer.eos_token_id)
        self.length, self.dtype = length, "uint16" if len(tokenizer) <= 1 << 16 else "uint32"
        self.about: dict[str, Any] = {
            "length": length,
            "dtype": self.dtype,
            "source": source,
            "identity": identity,
            "tokenizer": tokenizer_hash(tokenizer),
            "vocabulary": len(tokenizer),
        }
        self.writers: dict[str, _Writer] = {}
        self.temporary = self.folder.with_name(f".{self.folder.name}-{os.getpid()}-{secrets.token_hex(4)}")

    def __enter__(self) -> Packing:
        with _written(self.folder):
            self.temporary.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for writer in self.writers.values():
            with contextlib.suppress(OSError):  # of a full disk, which has been told
                writer.file.close()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def add(
        self,
        documents: Iterable[Document],
        part_of: Callable[[str], str],
        *,
        most: int | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Tokenises and writes the documents, each into the part that `part_of` names for its first section.

        Stops with the section that makes it `most` tokens. `on_progress` is told how many there are so far.
        """
        tokens = 0
        for batch in _batches(_labelled(documents, part_of)):
            for (part, _, last), ids in zip(batch, self._tokenised([text for _, text, _ in batch]), strict=True):
                self._writer(part).add([*ids, self.eos] if last else ids, last)
                tokens += len(ids) + last
                if most is not None and tokens >= most:
                    return
            if on_progress is not None:
                on_progress(tokens)

    def finish(self) -> dict[str, BlocksMetadata]:
        """What was packed, by part, once it stands in its folder."""
        with _written(self.folder):
            made = {name: BlocksMetadata(**self.about, **writer.finish()) for name, writer in self.writers.items()}
            for name, packed in made.items():
                text = json.dumps(asdict(packed), indent=1) + "\n"
                (self.temporary / f"{name}.json").write_text(text, encoding="utf-8")
            if made and all(packed.rows for packed in made.values()):
                self._move(made)
        return made

    def _move(self, parts: Iterable[str]) -> None:
        """Puts what was written in place of older blocks; of processes that packed the same at once the first stays."""
        if self.about["identity"] and is_packed(self.folder, parts, self.about):
            return
        _remove(self.folder)
        try:
            os.replace(self.temporary, self.folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def _tokenised(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self.tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        return ids

    def _writer(self, part: str) -> _Writer:
        if part not in self.writers:
            with _written(self.folder):
                file = (self.temporary / f"{part}.bin").open("wb")
            self.writers[part] = _Writer(file, self.folder, self.dtype, self.length)
        return self.writers[part]


class _Writer:
    """Writes whole blocks of one part, and keeps count."""

    def __init__(self, file: BinaryIO, folder: Path, dtype: str, length: int) -> None:
        self.file, self.folder, self.dtype, self.length = file, folder, dtype, length
        self.rest: list[int] = []
        self.rows = self.documents = 0
        self.digest = hashlib.sha256()

    def add(self, ids: list[int], last: bool) -> None:
        self.rest += ids
        self.documents += last
        rows = len(self.rest) // self.length
        if rows:
            raw = np.array(self.rest[: rows * self.length], dtype=self.dtype).tobytes()
            with _written(self.folder):
                self.file.write(raw)
            self.digest.update(raw)
            self.rows += rows
            del self.rest[: rows * self.length]

    def finish(self) -> dict[str, Any]:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {
            "rows": self.rows,
            "dropped": len(self.rest),
            "documents": self.documents,
            "sha256": self.digest.hexdigest(),
        }


def _remove(folder: Path) -> None:
    """Removes a folder of blocks; raises UserError for one that holds something else."""
    if not folder.exists():
        return
    if not folder.is_dir() or {file.suffix for file in folder.iterdir()} - {".bin", ".json"}:
        raise UserError(f"blocks: expected a new folder or one of blocks, {folder} holds something else")
    shutil.rmtree(folder)


def _labelled(documents: Iterable[Document], part_of: Callable[[str], str]) -> Iterator[tuple[str, str, bool]]:
    """Part, text, and whether the document ends with it, for each section of each document that has text."""
    for document in documents:
        part, held, text = "", "", False
        for section in sections(document):
            part = part or part_of(section)
            if text:
                yield part, held, False
            held = section
            text = text or bool(section.strip())
        if text:
            yield part, held, True


def _batches(labelled: Iterable[tuple[str, str, bool]]) -> Iterator[list[tuple[str, str, bool]]]:
    """Sections in lists of about a million characters, a thousand of them at most."""
    batch, size = [], 0
    for entry in labelled:
        batch.append(entry)
        size += len(entry[1])
        if size >= _CHARACTERS_AT_ONCE or len(batch) == _SECTIONS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Turns a failure to write, a full disk above all, into one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
