"""Checksums of files and records, and what tensors have for theirs."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEAL = "sha256"  # the key under which a sealed record holds its own checksum


def sha256_of_file(*paths: Path) -> str:
    """Return the SHA-256 of a file, or of several one after another, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
    return digest.hexdigest()


def sha256_of_json(value: Any) -> str:
    """Return the SHA-256 of a value as JSON writes it, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def tensor_bytes(value: Any) -> bytes:
    """Return the numbers of a tensor as they are in memory, in order."""
    import torch

    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def seal(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with a checksum over all of it."""
    content = json.loads(json.dumps(record))
    return {**content, SEAL: sha256_of_json(content)}


def is_sealed(record: Any) -> bool:
    """Return whether a record is as `seal` made it."""
    if not isinstance(record, dict) or SEAL not in record:
        return False
    return bool(record[SEAL] == sha256_of_json({name: value for name, value in record.items() if name != SEAL}))


def sha256_of_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a folder and below, by its path from there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256_of_file(path) for path in files}


def find_damaged_files(folder: Path, checksums: Mapping[str, str]) -> list[str]:
    """Return the files that are missing, or not as they were when the checksums were taken."""
    return [name for name, sha256 in checksums.items() if not _matches(folder / name, sha256)]


def _matches(path: Path, sha256: str) -> bool:
    try:
        return sha256_of_file(path) == sha256
    except OSError:
        return False
