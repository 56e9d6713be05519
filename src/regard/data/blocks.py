"""Token blocks on disk: rows of tokens of one length, mapped into memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from regard.errors import UserError

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
        """Tokens per block."""
        return self.metadata.length

    @property
    def tokens(self) -> int:
        """Tokens in all blocks."""
        return len(self) * self.length

    @property
    def sha256(self) -> str:
        """Hash of the file's tokens, and of `indices` if these are not all blocks."""
        if self.indices is None:
            return self.metadata.sha256
        return hashlib.sha256(self.metadata.sha256.encode() + self.indices.numpy().tobytes()).hexdigest()

    def rows(self, indices: Int64[Tensor, " row"]) -> Int64[Tensor, "row length"]:
        """Read blocks by index, 0 … len − 1."""
        rows = indices if self.indices is None else self.indices[indices]
        return torch.from_numpy(self.ids[rows.numpy()].astype(np.int64))

    def evenly_spaced(self, count: int) -> Int64[Tensor, "row length"]:
        """Read `count` blocks at equal distances. Raise UserError if there are fewer."""
        if not 1 <= count <= len(self):
            raise UserError(f"samples: expected 1 to {len(self)} blocks of {self.length} tokens, got {count}")
        return self.rows(torch.arange(count) * len(self) // count)

    def select(self, indices: Int64[Tensor, " row"]) -> TokenBlocks:
        """Return some of the blocks."""
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
