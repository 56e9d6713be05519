"""Which files a model's weights are of: a hash of the tensors in its safetensors, and a comparison with them."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jaxtyping import Int
from torch import Tensor

from regard.errors import UserError
from regard.models.model_files import find_weight_files
from regard.runs.integrity import is_sealed, seal, sha256_of_json
from regard.runs.output_dir import cache_dir, write_file

Rounding = Literal["bfloat16", "float16"]
"""What numbers are rounded to before they are compared; of float16 then to bfloat16 as well."""
_FLOATS = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_BLOCK = 1 << 22
"""Entries that are read, rounded and summed at once: a multiple of those in a word."""
_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""SplitMix64: what sets places apart, and its two multipliers, as signed numbers."""
_CACHE_VERSION = 2


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: its shape, whether it has floating point, and the checksum of its rounded numbers."""

    shape: tuple[int, ...]
    is_float: bool
    checksum: int


@dataclass(frozen=True)
class BaseFiles:
    """The tensors in a model's files by name, and a hash of all of them.

    `sha256` covers names, shapes and numbers, rounded to bfloat16. It says nothing of how many files there are, where
    they are, or what their headers tell beside that.
    """

    sha256: str
    tensors: Mapping[str, FileTensor]


class Checksum:
    """A sum of 64 bits over all entries and their places, computed where they are; blocks may be of any number.

    Each word of 8 bytes is mixed with its place by SplitMix64, which is a bijection: a change within one word is always
    noticed, any other but for one in 2^64.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._words = 0

    def update(self, entries: Tensor) -> None:
        """Add entries (of one axis), of bfloat16 or bytes; all but the last block must fill whole words."""
        words = _as_words(entries)
        places = torch.arange(self._words, self._words + len(words), device=words.device)
        mixed = words ^ (places * _STEP)
        mixed = (mixed ^ _shift_right(mixed, 30)) * _FIRST
        mixed = (mixed ^ _shift_right(mixed, 27)) * _SECOND
        total = (mixed ^ _shift_right(mixed, 31)).sum()
        self._total = total if self._total is None else self._total + total
        self._words += len(words)

    @property
    def total(self) -> Tensor:
        """The sum, on the device of the entries."""
        return torch.tensor(0) if self._total is None else self._total


def _shift_right(words: Int[Tensor, " word"], bits: int) -> Int[Tensor, " word"]:
    """Shift words as if they had no sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _as_words(entries: Tensor) -> Int[Tensor, " word"]:
    per_word = 8 // entries.element_size()
    if padding := -len(entries) % per_word:
        entries = torch.cat([entries, entries.new_zeros(padding)])
    elif entries.storage_offset() % per_word:
        entries = entries.clone()
    return entries.view(torch.int64)


def checksum_of(values: Tensor) -> Tensor:
    """Return the checksum of a tensor as one would be of its file, on its device: of floating point in bfloat16."""
    checksum = Checksum()
    flat = values.detach().reshape(-1)
    if not values.is_floating_point():
        flat = flat.view(torch.uint8)
    for block in flat.split(_BLOCK):
        checksum.update(block.to(torch.bfloat16) if values.is_floating_point() else block)
    return checksum.total


def find_base_files(model: Any) -> list[Path]:
    """Return the files that a model was loaded from by its name, a folder or a snapshot in the hub's cache; or none."""
    name = str(getattr(model, "name_or_path", "") or "")
    if not name:
        return []
    folder = Path(os.path.expanduser(name))
    try:
        if not folder.is_dir():
            revision = getattr(model.config, "_commit_hash", None)
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        return find_weight_files(folder, name)
    except (UserError, HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return []


def describe_files(files: Sequence[Path], rounding: Rounding) -> BaseFiles:
    """Return hash and tensors of files: as read before, if path, size, time and inode of all are the same.

    Raises:
        UserError: A file is no whole safetensors file.
    """
    stats = [(str(path.resolve()), path.stat()) for path in files]
    key = [[name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for name, stat in stats]
    name = sha256_of_json([_CACHE_VERSION, rounding, sorted(key)])[:32]
    with suppress(UserError):  # of a user without a home folder
        known = _read_record(cache_dir() / "bases" / f"{name}.json")
        if known is not None:
            return known
    described = _read_files(files, rounding)
    tensors = {name: [list(one.shape), one.is_float, one.checksum] for name, one in described.tensors.items()}
    with suppress(UserError):  # where nothing can be written, files are read again the next time
        record = json.dumps(seal({"base": described.sha256, "tensors": tensors}))
        write_file(cache_dir() / "bases" / f"{name}.json", record)
    return described


def tensor_shapes(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in files by name, read from their headers; none where one cannot be read."""
    try:
        return {name: tuple(entry["shape"]) for path in files for name, entry, _ in _read_header(path)}
    except (OSError, ValueError, KeyError):
        return {}


def _read_record(path: Path) -> BaseFiles | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not is_sealed(record):
        return None
    tensors = {name: FileTensor(tuple(shape), *rest) for name, (shape, *rest) in record["tensors"].items()}
    return BaseFiles(record["base"], tensors)


def _read_files(files: Sequence[Path], rounding: Rounding) -> BaseFiles:
    """Read all tensors in blocks, each once."""
    tensors, digests = dict[str, FileTensor](), dict[str, str]()
    for path in files:
        try:
            for name, entry, start in _read_header(path):
                tensors[name], digests[name] = _read_tensor(path, entry, start, rounding)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"model: expected a whole file of safetensors, cannot read {path} ({error})") from error
    contents = [[name, list(tensors[name].shape), digests[name]] for name in sorted(tensors)]
    return BaseFiles(sha256_of_json(contents), tensors)


def _read_header(path: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Iterate over names, entries of the header, and where the entries' offsets count from."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, entry, 8 + size


def _read_tensor(path: Path, entry: Mapping[str, Any], start: int, rounding: Rounding) -> tuple[FileTensor, str]:
    dtype = _FLOATS.get(entry["dtype"])
    digest, checksum = hashlib.sha256(), Checksum()
    begin, end = entry["data_offsets"]
    for block in read_blocks(path, start + begin, start + end, dtype or torch.uint8):
        rounded = block if dtype is None else block.to(torch.bfloat16)
        digest.update(rounded.view(torch.uint8).numpy().data)
        halves = dtype is not None and rounding == "float16"
        checksum.update(block.to(torch.float16).to(torch.bfloat16) if halves else rounded)
    return FileTensor(tuple(entry["shape"]), dtype is not None, int(checksum.total)), digest.hexdigest()


def read_blocks(path: Path, begin: int, end: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Iterate over the entries between two places of a file, so many at once that memory stays small."""
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end:
            data = bytearray(min(_BLOCK * dtype.itemsize, end - begin))
            if file.readinto(data) != len(data):
                raise ValueError("the file ends early")
            begin += len(data)
            yield torch.frombuffer(data, dtype=dtype)
