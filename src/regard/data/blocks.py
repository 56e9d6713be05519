"""Token blocks on disk: packed one document at a time, tokenized in batches, and mapped into memory."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from regard.data.texts import Document, split_sections
from regard.data.tokenizers import WrittenTokens, check_eos_token, largest_id, tokenizer_hash
from regard.errors import UserError, check_int

BLOCKS = "blocks"


@dataclass(frozen=True, kw_only=True)
class BlocksMetadata:
    """Metadata of a file of blocks, stored beside it as JSON."""

    rows: int  # number of blocks
    length: int  # tokens per block
    dropped: int  # tokens after the last full block, which are not stored
    dtype: str
    sha256: str  # of the token bytes
    documents: int  # number of documents
    source: str  # where the text came from
    fingerprint: str  # changes when the text changes
    tokenizer: str  # hash of the tokenizer
    vocab_size: int  # of the tokenizer


@dataclass(frozen=True, eq=False)
class TokenBlocks:
    """All or some blocks of a memory-mapped file."""

    ids: np.ndarray  # token ids of the whole file, of shape (row, length)
    metadata: BlocksMetadata
    indices: Tensor | None = None  # rows of the file that belong to these blocks, int64; None for all

    @classmethod
    def load(cls, folder: str | Path, name: str = BLOCKS) -> TokenBlocks:
        """Open the blocks that `pack` wrote. Raise UserError if files are missing or incomplete."""
        file, note = Path(folder) / f"{name}.bin", Path(folder) / f"{name}.json"
        try:
            metadata = BlocksMetadata(**json.loads(note.read_text(encoding="utf-8")))
            shape = metadata.rows, metadata.length
            size, expected = file.stat().st_size, shape[0] * shape[1] * np.dtype(metadata.dtype).itemsize
        except OSError as error:
            raise UserError(f"blocks: expected {file} with {note.name} beside it: {error.strerror or error}") from None
        except (ValueError, TypeError) as error:
            raise UserError(f"blocks: {note} cannot be read, delete the folder to pack again: {error}") from None
        if size != expected:
            advice = "delete the folder to pack again"
            raise UserError(f"blocks: expected {expected:,} bytes in {file}, found {size:,}; {advice}")
        return cls(np.memmap(file, dtype=metadata.dtype, mode="r", shape=shape), metadata)

    def __len__(self) -> int:
        return self.metadata.rows if self.indices is None else len(self.indices)

    @property
    def length(self) -> int:
        return self.metadata.length

    @property
    def tokens(self) -> int:
        return len(self) * self.length

    @property
    def sha256(self) -> str:
        """Hash of the file's tokens, and of `indices` if these are not all blocks."""
        if self.indices is None:
            return self.metadata.sha256
        return hashlib.sha256(self.metadata.sha256.encode() + self.indices.numpy().tobytes()).hexdigest()

    def rows(self, indices: Int64[Tensor, " row"]) -> Int64[Tensor, "row length"]:
        rows = indices if self.indices is None else self.indices[indices]
        return torch.from_numpy(self.ids[rows.numpy()].astype(np.int64))

    def evenly_spaced(self, count: int) -> Int64[Tensor, "row length"]:
        """Read `count` blocks at equal distances. Raise UserError if there are fewer."""
        if not 1 <= count <= len(self):
            raise UserError(f"samples: expected 1 to {len(self)} blocks of {self.length} tokens, got {count}")
        return self.rows(torch.arange(count) * len(self) // count)

    def select(self, indices: Int64[Tensor, " row"]) -> TokenBlocks:
        return replace(self, indices=indices if self.indices is None else self.indices[indices])


def is_packed(folder: str | Path, names: Iterable[str], expected: Mapping[str, object]) -> bool:
    """Whether a folder holds complete blocks of these names with the expected metadata."""
    try:
        notes = [asdict(TokenBlocks.load(folder, name).metadata) for name in names]
    except UserError:
        return False
    return all(note[key] == value for note in notes for key, value in expected.items())


def check_num_blocks(metadata: BlocksMetadata | None, length: int, source: str, min_rows: int = 1) -> None:
    """Raise UserError if there are fewer than `min_rows` blocks."""
    rows, dropped = (metadata.rows, metadata.dropped) if metadata else (0, 0)
    if rows < min_rows:
        blocks = "a block" if min_rows == 1 else f"{min_rows} blocks"
        available = f"{source} has {rows * length + dropped} tokens; give more text or a smaller length"
        raise UserError(f"data: expected text for {blocks} of {length} tokens, {available}")


_BATCH_CHARACTERS, _BATCH_SECTIONS = 1 << 20, 1 << 10


def pack(
    documents: Iterable[Document],
    tokenizer: Any,
    length: int,
    folder: str | Path,
    *,
    source: str = "",
    fingerprint: str = "",
    max_tokens: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> TokenBlocks:
    """Pack documents into blocks of `length` tokens, or reuse those in `folder`.

    Each document ends with the tokenizer's EOS token and may span several blocks; an incomplete last block is dropped.
    Blank documents are skipped. Special tokens written out in a text are text. Tokens are uint16 where ids are below
    65,536, else uint32. Reading stops at `max_tokens`, and `on_progress` gets the number of tokens so far.

    Blocks with the same fingerprint, tokenizer and length are reused without reading `documents`; others are replaced.
    `folder` holds the blocks alone, never incomplete ones. With several processes let one pack first:
    `with accelerator.local_main_process_first(): pack(…)`.

    `fingerprint` changes when the documents change; "" always packs.
    """
    expected = {"length": length, "fingerprint": fingerprint, "tokenizer": tokenizer_hash(tokenizer)}
    if fingerprint and is_packed(folder, [BLOCKS], expected):
        return TokenBlocks.load(folder)
    with BlockPacker(folder, tokenizer, length, source=source, fingerprint=fingerprint) as packer:
        packer.add(documents, lambda _: BLOCKS, max_tokens=max_tokens, on_progress=on_progress)
        metadata = packer.finish()
    check_num_blocks(metadata.get(BLOCKS), length, source or "the text")
    return TokenBlocks.load(folder)


class _Section(NamedTuple):
    """A section of a document, the split that the document goes to, and whether the document ends here."""

    split: str
    text: str
    is_last: bool


class BlockPacker:
    """Writes blocks to a temporary folder, which `finish` moves to its place and an exception removes."""

    def __init__(self, folder: str | Path, tokenizer: Any, length: int, *, source: str, fingerprint: str) -> None:
        check_int("length", length, least=1)
        check_eos_token(tokenizer)
        self.folder = Path(folder)
        self.tokenizer, self.eos = tokenizer, int(tokenizer.eos_token_id)
        self.written = WrittenTokens(tokenizer, as_text=True)
        self.length, self.dtype = length, "uint16" if largest_id(tokenizer) < 1 << 16 else "uint32"
        self.metadata: dict[str, Any] = {
            "length": length,
            "dtype": self.dtype,
            "source": source,
            "fingerprint": fingerprint,
            "tokenizer": tokenizer_hash(tokenizer),
            "vocab_size": len(tokenizer),
        }
        self.writers: dict[str, _BlockWriter] = {}
        self.temporary = self.folder.with_name(f".{self.folder.name}-{os.getpid()}-{secrets.token_hex(4)}")

    def __enter__(self) -> BlockPacker:
        with _report_write_errors(self.folder):
            self.temporary.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.writers.values():
            with contextlib.suppress(OSError):  # a full disk has been reported before
                writer.file.close()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def add(
        self,
        documents: Iterable[Document],
        choose_split: Callable[[str], str],
        *,
        max_tokens: int | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Tokenize and write documents; `choose_split` returns the split of a document from its first section."""
        tokens = 0
        for batch in _batch_sections(_iterate_sections(documents, choose_split)):
            self.written.look(section.text for section in batch)
            for section, ids in zip(batch, self._tokenize([section.text for section in batch]), strict=True):
                self._writer(section.split).add([*ids, self.eos] if section.is_last else ids, section.is_last)
                tokens += len(ids) + section.is_last
                if max_tokens is not None and tokens >= max_tokens:
                    return
            if on_progress is not None:
                on_progress(tokens)

    def finish(self) -> dict[str, BlocksMetadata]:
        """Move the files to their folder and return the metadata by split; warn of special tokens written in texts."""
        self.written.tell()
        with _report_write_errors(self.folder):
            notes = {name: BlocksMetadata(**self.metadata, **writer.finish()) for name, writer in self.writers.items()}
            for name, note in notes.items():
                text = json.dumps(asdict(note), indent=1) + "\n"
                (self.temporary / f"{name}.json").write_text(text, encoding="utf-8")
            if notes and all(note.rows for note in notes.values()):
                self._move(notes)
        return notes

    def _move(self, splits: Iterable[str]) -> None:
        """Replace older blocks; if several processes packed the same, the first one wins."""
        if self.metadata["fingerprint"] and is_packed(self.folder, splits, self.metadata):
            return
        if self.folder.exists():
            if not self.folder.is_dir() or {file.suffix for file in self.folder.iterdir()} - {".bin", ".json"}:
                raise UserError(f"blocks: expected a new folder or one of blocks, {self.folder} holds something else")
            shutil.rmtree(self.folder)
        try:
            os.replace(self.temporary, self.folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        options = dict.fromkeys(("add_special_tokens", "padding", "truncation", "return_attention_mask"), False)
        return self.tokenizer(texts, split_special_tokens=True, verbose=False, **options)["input_ids"]

    def _writer(self, split: str) -> _BlockWriter:
        if split not in self.writers:
            with _report_write_errors(self.folder):
                file = (self.temporary / f"{split}.bin").open("wb")
            self.writers[split] = _BlockWriter(file, self.folder, self.dtype, self.length)
        return self.writers[split]


class _BlockWriter:
    def __init__(self, file: BinaryIO, folder: Path, dtype: str, length: int) -> None:
        self.file, self.folder, self.dtype, self.length = file, folder, dtype, length
        self.rest: list[int] = []
        self.rows = self.documents = 0
        self.digest = hashlib.sha256()

    def add(self, ids: list[int], is_last: bool) -> None:
        self.rest += ids
        self.documents += is_last
        rows = len(self.rest) // self.length
        if rows:
            raw = np.array(self.rest[: rows * self.length], dtype=self.dtype).tobytes()
            with _report_write_errors(self.folder):
                self.file.write(raw)
            self.digest.update(raw)
            self.rows += rows
            del self.rest[: rows * self.length]

    def finish(self) -> dict[str, Any]:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        counts = {"rows": self.rows, "dropped": len(self.rest), "documents": self.documents}
        return {**counts, "sha256": self.digest.hexdigest()}


def _iterate_sections(documents: Iterable[Document], choose_split: Callable[[str], str]) -> Iterator[_Section]:
    for document in documents:
        split, pending, has_text = "", "", False
        for section in split_sections(document):
            split = split or choose_split(section)
            if has_text:
                yield _Section(split, pending, False)
            pending = section
            has_text = has_text or bool(section.strip())
        if has_text:
            yield _Section(split, pending, True)


def _batch_sections(sections: Iterable[_Section]) -> Iterator[list[_Section]]:
    """Collect batches of about a million characters and at most a thousand sections."""
    batch, size = [], 0
    for section in sections:
        batch.append(section)
        size += len(section.text)
        if size >= _BATCH_CHARACTERS or len(batch) == _BATCH_SECTIONS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _report_write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
