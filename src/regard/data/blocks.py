"""Token blocks on disk: text tokenised once, cut into rows of one length, and mapped into memory."""

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
    """What is known of a file of blocks; stands beside it as JSON.

    `rows` blocks of `length` tokens; `dropped`: the tokens after the last whole block, which are left out; `sha256`:
    of the token bytes. `source` and `identity` say what was packed, `tokenizer` is its digest (`hash_of`).
    """

    rows: int
    length: int
    dropped: int
    dtype: str
    sha256: str
    documents: int
    source: str
    identity: str
    tokenizer: str
    vocabulary: int


@dataclass(frozen=True, eq=False)
class TokenBlocks:
    """Blocks of tokens, (row, length), in a file that is mapped into memory, not read; some of them or all.

    `chosen`: int64, the rows of the file that these blocks are; None for all.
    """

    ids: np.ndarray
    packed: BlocksMetadata
    chosen: Tensor | None = None

    @classmethod
    def load(cls, folder: str | Path, name: str = BLOCKS) -> TokenBlocks:
        """The blocks that `pack` left in `folder`. Raises UserError where they are missing or not whole."""
        file, about = Path(folder) / f"{name}.bin", Path(folder) / f"{name}.json"
        try:
            packed = BlocksMetadata(**json.loads(about.read_text(encoding="utf-8")))
            size, wanted = file.stat().st_size, packed.rows * packed.length * np.dtype(packed.dtype).itemsize
        except OSError as error:
            raise UserError(f"blocks: expected {file} with {about.name} beside it: {error.strerror or error}") from None
        except (ValueError, TypeError) as error:
            raise UserError(f"blocks: {about} cannot be read, delete the folder to pack again: {error}") from None
        if size != wanted:
            raise UserError(
                f"blocks: expected {wanted:,} bytes in {file}, found {size:,}; delete the folder to pack again"
            )
        return cls(np.memmap(file, dtype=packed.dtype, mode="r", shape=(packed.rows, packed.length)), packed)

    def __len__(self) -> int:
        return self.packed.rows if self.chosen is None else len(self.chosen)

    @property
    def length(self) -> int:
        """How many tokens a block has."""
        return self.packed.length

    @property
    def tokens(self) -> int:
        """How many tokens there are in all blocks."""
        return len(self) * self.length

    @property
    def vocabulary(self) -> int:
        """How many tokens the tokenizer knows."""
        return self.packed.vocabulary

    @property
    def sha256(self) -> str:
        """The digest of the tokens, of the whole file where all are chosen; else with the numbers of the chosen."""
        if self.chosen is None:
            return self.packed.sha256
        return hashlib.sha256(self.packed.sha256.encode() + self.chosen.numpy().tobytes()).hexdigest()

    def rows(self, indices: Int64[Tensor, " row"]) -> Int64[Tensor, "row length"]:
        """The blocks of these numbers, 0 … len − 1, read from the file."""
        at = indices if self.chosen is None else self.chosen[indices]
        return torch.from_numpy(self.ids[at.numpy()].astype(np.int64))

    def first(self, count: int) -> Int64[Tensor, "row length"]:
        """The first `count` blocks, the same in every run. Raises UserError where there are fewer."""
        self._check(count)
        return self.rows(torch.arange(count))

    def spread(self, count: int) -> Int64[Tensor, "row length"]:
        """`count` blocks at equal distances over all of them, the same in every run. Raises UserError for fewer."""
        self._check(count)
        return self.rows(torch.arange(count) * len(self) // max(count, 1))

    def only(self, indices: Int64[Tensor, " row"]) -> TokenBlocks:
        """The blocks of these numbers alone."""
        return replace(self, chosen=indices if self.chosen is None else self.chosen[indices])

    def _check(self, count: int) -> None:
        if not 1 <= count <= len(self):
            raise UserError(f"samples: expected 1 to {len(self)} blocks of {self.length} tokens, got {count}")


def is_packed(folder: str | Path, names: Iterable[str], wanted: Mapping[str, object]) -> bool:
    """Whether `folder` holds whole blocks of these names, made of what is `wanted`."""
    try:
        found = [asdict(TokenBlocks.load(folder, name).packed) for name in names]
    except UserError:
        return False
    return all(packed[key] == value for packed in found for key, value in wanted.items())


def check_num_blocks(packed: BlocksMetadata | None, length: int, source: str, least: int = 1) -> None:
    """Raises UserError where there are fewer than `least` blocks."""
    rows, dropped = (packed.rows, packed.dropped) if packed else (0, 0)
    if rows < least:
        blocks = "a block" if least == 1 else f"{least} blocks"
        raise UserError(
            f"data: expected text for {blocks} of {length} tokens, {source} has {rows * length + dropped} tokens; "
            "give more text or a smaller length"
        )
