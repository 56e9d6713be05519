"""Hidden states of a frozen encoder, computed once and stored in a memory-mapped file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from regard.errors import UserError
from regard.models.model_files import eval_mode
from regard.runs.output_dir import read_json, readable_errors, write_file
from regard.training.probes import TokenStates

FORMAT = 1
MAX_FLOAT16 = 60_000.0  # float16 ends at 65,504
DTYPE_NAMES = {torch.float16: "float16", torch.float32: "float32"}


@dataclass(frozen=True, eq=False)
class States:
    """Hidden states of the tokens of some samples, in all layers, embeddings first."""

    values: np.ndarray  # (token, layer, width) of all tokens that are no padding, on disk or in memory
    mask: Tensor  # (sample, position) of these tokens
    metadata: Mapping[str, Any]  # `dtype` as stored, `dtype_asked`, and `largest`, the largest absolute value

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def layers(self) -> int:
        """Number of states of a token: embeddings and layers."""
        return int(self.values.shape[1])

    @property
    def length(self) -> int:
        return self.mask.shape[1]

    @property
    def width(self) -> int:
        return int(self.values.shape[2])

    @cached_property
    def _index_of(self) -> Tensor:
        """Index of the token at (sample, position), undefined at padding."""
        return self.mask.flatten().cumsum(0).reshape(self.mask.shape) - 1

    def tokens(self, rows: Tensor, token_mask: Tensor | None = None) -> TokenStates:
        """Return states, in float32, of the tokens of rows, or of those in `token_mask` (row, position)."""
        selected = self.mask[rows] if token_mask is None else token_mask
        assert token_mask is None or not bool((token_mask & ~self.mask[rows]).any()), "padding has no states"
        row, position = selected.nonzero(as_tuple=True)
        values = torch.from_numpy(np.ascontiguousarray(self.values[self._index_of[rows][row, position].numpy()]))
        return TokenStates(values.float(), row, position, len(selected))

    @classmethod
    def of(cls, states: Tensor, mask: Tensor) -> States:
        """Make them from states (sample, layer, position, width) in memory and a mask (sample, position)."""
        mask = mask.bool().cpu()
        values = TokenStates.select(states.detach().cpu(), mask).states
        return cls(values.numpy(), mask, {"dtype": str(values.dtype).removeprefix("torch.")})

    @classmethod
    def open(cls, folder: str | Path, key: str) -> States | None:
        """Open the states stored under a key; None if there are none or they are incomplete."""
        path, metadata_file = _paths(folder, key)
        try:
            metadata = read_json(metadata_file)
            if metadata["format"] != FORMAT or metadata["key"] != key:
                return None
            shape, mask_shape = tuple(metadata["shape"]), (metadata["samples"], metadata["length"])
            offset = int(np.prod(shape)) * np.dtype(metadata["dtype"]).itemsize
            mask = np.fromfile(path, dtype=np.uint8, offset=offset).reshape(mask_shape)
            values = np.memmap(path, dtype=metadata["dtype"], mode="r", shape=shape)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(values, torch.from_numpy(mask).bool(), metadata)

    @staticmethod
    def remove(folder: str | Path, key: str) -> None:
        path, metadata_file = _paths(folder, key)
        for file in (metadata_file, path, path.with_suffix(".part")):
            file.unlink(missing_ok=True)


def encode_states(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    folder: str | Path,
    *,
    mask: Tensor,
    key: str,
    dtype: torch.dtype = torch.float16,
) -> States:
    """Run a model, or its encoder if it has a decoder, and store the hidden states under a key for `States.open`.

    The metadata is written last: without it the states do not count. The batches are inputs of the model, in order and
    at one length. `mask` (sample, position) marks the tokens whose states are stored, in `dtype`; float16 becomes
    float32 if a value exceeds 60,000.

    Raises:
        UserError: The disk is too small, or a state is not finite.
    """
    assert dtype in DTYPE_NAMES, f"states are kept in {' or '.join(DTYPE_NAMES.values())}"
    mask = mask.bool().cpu()
    path, metadata_file = _paths(folder, key)
    partial = path.with_suffix(".part")
    with readable_errors(f"hidden states to {folder}"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        States.remove(folder, key)
        try:
            with partial.open("w+b") as file:
                writer = _Writer(file, Path(folder), mask, dtype)
                _encode(model, batches, writer)
                file.seek(0, 2)
                file.write(mask.numpy().astype(np.uint8).tobytes())
            metadata = {**writer.metadata(), "model": type(model).__name__, "dtype_asked": DTYPE_NAMES[dtype]}
            partial.replace(path)
            write_file(metadata_file, json.dumps({"format": FORMAT, "key": key, **metadata}) + "\n")
        finally:
            partial.unlink(missing_ok=True)
    states = States.open(folder, key)
    assert states is not None
    return states


def _encode(model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]], writer: _Writer) -> None:
    encoder, num_done, samples = get_encoder(model), 0, len(writer.mask)
    with eval_mode(model), torch.no_grad():
        for batch in batches:
            states = hidden_states(encoder, {name: value.to(model.device) for name, value in batch.items()})
            token_mask = writer.mask[num_done : num_done + len(states)]
            if token_mask.shape != (len(states), states.shape[2]):
                expected = f"{samples} samples of {writer.mask.shape[1]} tokens"
                raise UserError(f"batches: expected {expected}, got {tuple(states.shape[::2])} behind {num_done}")
            writer.add(TokenStates.select(states, token_mask.to(states.device)).states.float().cpu())
            num_done += len(states)
    if num_done != samples:
        raise UserError(f"batches: expected {samples} samples, got {num_done}")


class _Writer:
    """Appends states to a file, and widens float16 to float32 if values need it."""

    def __init__(self, file: BinaryIO, folder: Path, mask: Tensor, dtype: torch.dtype) -> None:
        self.file, self.folder, self.mask, self.dtype = file, folder, mask, dtype
        self.written, self.largest = 0, 0.0
        self.shape: tuple[int, ...] = ()

    def add(self, states: Tensor) -> None:
        """Write finite states (token, layer, width)."""
        if not self.shape:
            self.shape = (int(self.mask.sum()), *states.shape[1:])
            self._check_disk_space()
        if not bool(states.isfinite().all()):
            layer = int((~states.isfinite()).any(0).any(-1).nonzero()[0])
            raise UserError(f"non-finite hidden states after {layer} layers; expected finite values")
        if states.numel():
            self.largest = max(self.largest, float(states.abs().max()))
        if self.largest > MAX_FLOAT16 and self.dtype == torch.float16:
            self._widen()
        self.file.write(states.to(self.dtype).numpy().tobytes())
        self.written += len(states)

    def metadata(self) -> dict[str, Any]:
        samples, length = self.mask.shape
        metadata = {"samples": samples, "length": length, "shape": list(self.shape), "dtype": DTYPE_NAMES[self.dtype]}
        return {**metadata, "largest": self.largest}

    def _check_disk_space(self) -> None:
        size = self.dtype.itemsize
        needed = int(np.prod(self.shape)) * size + self.mask.numel()
        free = shutil.disk_usage(self.folder).free + self.file.tell()
        if needed > free:
            space = f"{needed:,} bytes in {self.folder}, {free:,} are free"
            advice = "choose another folder, or fewer or shorter samples"
            raise UserError(f"hidden states of {len(self.mask)} samples need {space}; {advice}")

    def _widen(self) -> None:
        """Convert the file to float32, from its end, so that no token is overwritten before it is read."""
        self.dtype = torch.float32
        self._check_disk_space()
        size = int(np.prod(self.shape[1:]))
        for token in reversed(range(self.written)):
            self.file.seek(token * size * 2)
            narrow = np.frombuffer(self.file.read(size * 2), dtype=np.float16)
            self.file.seek(token * size * 4)
            self.file.write(narrow.astype(np.float32).tobytes())
        self.file.seek(self.written * size * 4)


def _paths(folder: str | Path, key: str) -> tuple[Path, Path]:
    assert re.fullmatch(r"[A-Za-z0-9_-]+", key), "a key is part of a file's name"
    return Path(folder) / f"states-{key}.bin", Path(folder) / f"states-{key}.json"


def get_encoder(model: Any) -> Any:
    """Return the base model, or the encoder of an encoder–decoder."""
    base = model.base_model
    return base.get_encoder() if base.config.is_encoder_decoder else base


def hidden_states(encoder: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the hidden states (row, layer, position, width) of a forward pass, embeddings first."""
    return torch.stack(encoder(**inputs, output_hidden_states=True).hidden_states, dim=1)
