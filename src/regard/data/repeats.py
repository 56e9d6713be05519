"""How much of a held-out text is also in the text to train on, whatever its place there."""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from regard.data.blocks import TokenBlocks

PIECE = 32
"""Tokens of a piece, which counts as repeated if the training text has it at any place."""
_CHUNK = 1 << 22
_FACTOR, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(31)
_FILTER_SHIFT = np.uint64(40)
Hashes = npt.NDArray[np.uint64]


def repeated_shares(
    train: Sequence[TokenBlocks], valid: Sequence[TokenBlocks], folder: Path | None = None
) -> list[float | None]:
    """Return the share of each held-out text whose pieces are also in one of the training texts.

    Held-out text is cut into pieces of `PIECE` tokens, training text is read from every token on: so a text that is
    there twice is found although the blocks of both do not begin at the same word. None where there is no piece.

    What has been counted, a minute for 10⁹ tokens, is kept in `folder`, if it can be written to.
    """
    if folder is None:
        return _count(train, valid)
    about = json.dumps([PIECE, sorted({blocks.sha256 for blocks in train}), [blocks.sha256 for blocks in valid]])
    path = folder / f"repeats-{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept, list) and len(kept) == len(valid):
            return kept
    shares = _count(train, valid)
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(shares) + "\n", encoding="utf-8")
        temporary.replace(path)
    return shares


def _count(train: Sequence[TokenBlocks], valid: Sequence[TokenBlocks]) -> list[float | None]:
    pieces = [_hash_pieces(blocks) for blocks in valid]
    known = np.unique(np.concatenate(pieces))
    is_there = np.zeros(len(known), dtype=bool)
    may_be_known = np.zeros(1 << (64 - int(_FILTER_SHIFT)), dtype=bool)
    may_be_known[known >> _FILTER_SHIFT] = True
    for blocks in train if len(known) else ():
        rest = np.empty(0, dtype=blocks.ids.dtype)
        for ids in _read_chunks(blocks):
            joined = np.concatenate([rest, ids])
            hashes = _hash_windows(joined)
            hashes = hashes[may_be_known.take((hashes >> _FILTER_SHIFT).view(np.int64))]
            places = np.searchsorted(known, hashes).clip(max=len(known) - 1)
            is_there[places[known[places] == hashes]] = True
            rest = joined[-(PIECE - 1) :]
    return [float(is_there[np.searchsorted(known, one)].mean()) if len(one) else None for one in pieces]


def _hash_pieces(blocks: TokenBlocks) -> Hashes:
    hashes = [
        _hash_windows(ids[: len(ids) // PIECE * PIECE].reshape(-1, PIECE)).ravel() for ids in _read_chunks(blocks)
    ]
    return np.concatenate([np.empty(0, dtype=np.uint64), *hashes])


def _hash_windows(ids: npt.NDArray[np.unsignedinteger]) -> Hashes:
    """Hash every run of `PIECE` tokens of the last axis: of two halves at a time, from single tokens on."""
    hashes, width = (ids.astype(np.uint64) + np.uint64(1)) * _FACTOR, 1
    while width < PIECE:
        hashes ^= hashes >> _SHIFT
        hashes = hashes[..., :-width] * _FACTOR + hashes[..., width:]
        width *= 2
    return hashes


def _read_chunks(blocks: TokenBlocks) -> Iterator[npt.NDArray[np.unsignedinteger]]:
    """Iterate over the tokens of all blocks, some millions at a time."""
    rows = max(1, _CHUNK // blocks.length)
    for start in range(0, len(blocks), rows):
        stop = min(start + rows, len(blocks))
        part = slice(start, stop) if blocks.indices is None else blocks.indices[start:stop].numpy()
        yield np.asarray(blocks.ids[part]).reshape(-1)
