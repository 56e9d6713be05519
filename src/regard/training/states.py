"""Hidden states of a frozen encoder, computed once and kept in a memory-mapped file."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.errors import UserError
from regard.training.probes import TokenStates

FORMAT = 1
LARGEST = 60_000.0  # float16 ends at 65,504
NAMES = {torch.float16: "float16", torch.float32: "float32"}


@dataclass(frozen=True, eq=False)
class States:
    """The states of every real token of some samples: all layers, embeddings first.

    `values`: (token, layer, width), the samples' real tokens one behind the other, on disk or in memory. `mask`:
    (sample, position), which tokens are real. `about`: what was noted when they were computed: `dtype` as stored,
    `dtype_asked`, and `largest`, the largest absolute value.
    """

    values: np.ndarray
    mask: Tensor
    about: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def layers(self) -> int:
        """How many states each token has: the embeddings and each layer's."""
        return int(self.values.shape[1])

    @property
    def length(self) -> int:
        """Positions of a sample, padding included."""
        return self.mask.shape[1]

    @property
    def width(self) -> int:
        """The model's width."""
        return int(self.values.shape[2])

    @cached_property
    def _place(self) -> Tensor:
        """(sample, position) → token; what stands at padding means nothing."""
        return self.mask.flatten().cumsum(0).reshape(self.mask.shape) - 1

    def tokens(self, rows: Tensor, chosen: Tensor | None = None) -> TokenStates:
        """The states, in float32, of the rows' real tokens, or of the `chosen` (row, position) among them."""
        wanted = self.mask[rows] if chosen is None else chosen
        assert chosen is None or not bool((chosen & ~self.mask[rows]).any()), "padding has no states"
        row, position = wanted.nonzero(as_tuple=True)
        found = torch.from_numpy(np.ascontiguousarray(self.values[self._place[rows][row, position].numpy()]))
        return TokenStates(found.float(), row, position, len(wanted))

    def rows(self, rows: Tensor) -> Tensor:
        """The states (row, layer, position, width) of whole rows in float32, 0 at padding."""
        tokens = self.tokens(rows)
        dense = tokens.states.new_zeros(len(rows), self.length, self.layers, self.width)
        dense[tokens.row, tokens.position] = tokens.states
        return dense.transpose(1, 2)

    @classmethod
    def of(cls, states: Tensor, mask: Tensor) -> States:
        """Those in memory: states (sample, layer, position, width) and the mask (sample, position)."""
        mask = mask.bool().cpu()
        kept = TokenStates.chosen(states.detach().cpu(), mask).states
        return cls(kept.numpy(), mask, {"dtype": str(kept.dtype).removeprefix("torch.")})

    @classmethod
    def open(cls, folder: str | Path, key: str) -> States | None:
        """Those kept under the key, or None where there are none, or not whole."""
        path, note = _paths(folder, key)
        try:
            about = json.loads(note.read_text(encoding="utf-8"))
            if about["format"] != FORMAT or about["key"] != key:
                return None
            shape, mask_shape = tuple(about["shape"]), (about["samples"], about["length"])
            of_states = int(np.prod(shape)) * np.dtype(about["dtype"]).itemsize
            mask = np.fromfile(path, dtype=np.uint8, offset=of_states).reshape(mask_shape)
            values = np.memmap(path, dtype=about["dtype"], mode="r", shape=shape)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(values, torch.from_numpy(mask).bool(), about)

    @staticmethod
    def remove(folder: str | Path, key: str) -> None:
        """Delete what is kept under the key, if anything."""
        path, note = _paths(folder, key)
        for each in (note, path, path.with_suffix(".part")):
            each.unlink(missing_ok=True)


def encode_states(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    folder: str | Path,
    *,
    mask: Tensor,
    key: str,
    dtype: torch.dtype = torch.float16,
    on_batch: Callable[[int, int], None] | None = None,
) -> States:
    """The states of one pass of the model, or of its encoder where it has a decoder, kept in the folder under the key.

    `batches` are the model's inputs, in order, at one length; `mask` (sample, position) names the real tokens of all of
    them, the only ones whose states are kept. float16 is stored as float32 if any value exceeds 60,000, which the
    record tells. `on_batch(done, all)` is called after each batch. Raises UserError where the disk has too little room
    and where states are not finite. Until the pass is over, `States.open` does not find it.
    """
    assert dtype in NAMES, f"states are kept in {' or '.join(NAMES.values())}"
    mask = mask.bool().cpu()
    part = _paths(folder, key)[0].with_suffix(".part")
    with _written_to(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        States.remove(folder, key)
        try:
            with part.open("w+b") as file:
                writer = _Writer(file, Path(folder), mask, dtype)
                _encode(model, batches, writer, on_batch)
                file.seek(0, 2)
                file.write(mask.numpy().astype(np.uint8).tobytes())
            _keep(part, folder, key, {**writer.about(), "model": type(model).__name__, "dtype_asked": NAMES[dtype]})
        finally:
            part.unlink(missing_ok=True)
    found = States.open(folder, key)
    assert found is not None
    return found


@contextlib.contextmanager
def _written_to(folder: str | Path) -> Iterator[None]:
    """Turns what the system raises over a folder into one line for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write hidden states to {folder}: {error.strerror or error}") from error


def _encode(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    writer: _Writer,
    on_batch: Callable[[int, int], None] | None,
) -> None:
    """Every batch once through the encoder, its real tokens' states to the writer."""
    encoder, done, samples = get_encoder(model), 0, len(writer.mask)
    with eval_mode(model), torch.no_grad():
        for batch in batches:
            states = hidden_states(encoder, {name: value.to(model.device) for name, value in batch.items()})
            real = writer.mask[done : done + len(states)]
            if real.shape != (len(states), states.shape[2]):
                raise UserError(
                    f"batches: expected {samples} samples of {writer.mask.shape[1]} tokens, "
                    f"got {tuple(states.shape[::2])} behind {done}"
                )
            writer.add(TokenStates.chosen(states, real.to(states.device)).states.float().cpu())
            done += len(states)
            if on_batch is not None:
                on_batch(done, samples)
    if done != samples:
        raise UserError(f"batches: expected {samples} samples, got {done}")


class _Writer:
    """Appends tokens' states to a file in the narrower type, and goes over to the wider where values need it."""

    def __init__(self, file: BinaryIO, folder: Path, mask: Tensor, dtype: torch.dtype) -> None:
        self.file, self.folder, self.mask, self.dtype = file, folder, mask, dtype
        self.written, self.largest = 0, 0.0
        self.shape: tuple[int, ...] = ()

    def add(self, states: Tensor) -> None:
        """Write (token, layer, width), which must be finite."""
        if not self.shape:
            self.shape = (int(self.mask.sum()), *states.shape[1:])
            self._check_room()
        if not bool(states.isfinite().all()):
            layer = int((~states.isfinite()).any(0).any(-1).nonzero()[0])
            raise UserError(f"non-finite hidden states after {layer} layers; expected finite values")
        if states.numel():
            self.largest = max(self.largest, float(states.abs().max()))
        if self.largest > LARGEST and self.dtype == torch.float16:
            self._widen()
        self.file.write(states.to(self.dtype).numpy().tobytes())
        self.written += len(states)

    def about(self) -> dict[str, Any]:
        """What a reader must know."""
        samples, length = self.mask.shape
        known = {"samples": samples, "length": length, "shape": list(self.shape), "dtype": NAMES[self.dtype]}
        return {**known, "largest": self.largest}

    def _check_room(self) -> None:
        size = self.dtype.itemsize
        needed = int(np.prod(self.shape)) * size + self.mask.numel()
        free = shutil.disk_usage(self.folder).free + self.file.tell()
        if needed > free:
            raise UserError(
                f"hidden states of {len(self.mask)} samples need {needed:,} bytes in {self.folder}, {free:,} are free; "
                "choose another folder, or fewer or shorter samples"
            )

    def _widen(self) -> None:
        """What is written so far as float32, from the end, so that no token is written over before it is read."""
        self.dtype = torch.float32
        self._check_room()
        each = int(np.prod(self.shape[1:]))
        for token in reversed(range(self.written)):
            self.file.seek(token * each * 2)
            narrow = np.frombuffer(self.file.read(each * 2), dtype=np.float16)
            self.file.seek(token * each * 4)
            self.file.write(narrow.astype(np.float32).tobytes())
        self.file.seek(self.written * each * 4)


def _keep(part: Path, folder: str | Path, key: str, about: Mapping[str, Any]) -> None:
    """Give the file its name, and write the note that makes it count last and at once."""
    path, note = _paths(folder, key)
    part.replace(path)
    draft = note.with_suffix(".json.part")
    try:
        draft.write_text(json.dumps({"format": FORMAT, "key": key, **about}) + "\n", encoding="utf-8")
        draft.replace(note)
    finally:
        draft.unlink(missing_ok=True)


def _paths(folder: str | Path, key: str) -> tuple[Path, Path]:
    """The file of states and the note beside it."""
    assert re.fullmatch(r"[A-Za-z0-9_-]+", key), "a key is part of a file's name"
    return Path(folder) / f"states-{key}.bin", Path(folder) / f"states-{key}.json"


def get_encoder(model: Any) -> Any:
    """The part of a model whose hidden states are probed: without its head, and without its decoder if it has both."""
    base = model.base_model
    return base.get_encoder() if base.config.is_encoder_decoder else base


def hidden_states(encoder: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """The states (row, layer, position, width) of one forward, embeddings first."""
    return torch.stack(encoder(**inputs, output_hidden_states=True).hidden_states, dim=1)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """While it lasts the model drops nothing out; afterwards its modes are as they were."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True
