"""Query vectors of rows that are read time and again while nothing changes that they depend on."""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from regard.adapters.mixture import hold
from regard.adapters.queries import StateReader
from regard.attention.call import num_writes
from regard.attention.tracing import is_traced
from regard.runs.integrity import tensor_bytes
from regard.runs.rank import num_processes

MOST_BYTES = 64 * 2**20
"""What is kept at most; further rows are read each time."""
_BY_TOKEN = ("input_ids", "attention_mask", "token_type_ids")
"""Inputs of which a row's own part is all that its query vector depends on."""
_ANSWER_FORM = {"use_cache", "output_attentions", "output_hidden_states", "return_dict"}
"""Inputs that its query vector does not depend on."""


def knowing_vectors(owner: Any) -> AbstractContextManager[None]:
    """Let the `query_reader` of an object read each row once in a block; embeddings cost no more than to know them."""
    reader = owner.query_reader
    return hold(owner, query_reader=KnownVectors(reader)) if isinstance(reader, StateReader) else nullcontext()


class KnownVectors:
    """A reader of query vectors that reads each row once, for as long as the model below its adapters stays as it is.

    A row is known by its inputs, padding and all. A batch is read if one of its rows is new, if it has inputs that are
    not known by row, such as images, in several processes, which read together, and while it is traced.
    """

    def __init__(self, reader: StateReader, max_bytes: int = MOST_BYTES) -> None:
        self.reader, self.width, self.max_bytes = reader, reader.width, max_bytes
        self._buffers = list(reader.reader.buffers())  # as of layers that normalize by what they have read in training
        self._versions: list[int | None] = []
        self._vectors: dict[bytes, Tensor] = {}
        self._num_bytes = 0

    def __call__(self, inputs: Mapping[str, Any], valid: Tensor) -> Tensor:
        keys = None if is_traced() or num_processes() > 1 else self._row_keys(inputs, valid)
        if keys is None:
            return self.reader(inputs, valid)
        versions = [num_writes(buffer) for buffer in self._buffers]
        if versions != self._versions:
            self._versions, self._vectors, self._num_bytes = versions, {}, 0
        known = [self._vectors.get(key) for key in keys]
        if any(vector is None for vector in known):
            vectors = self.reader(inputs, valid)
            self._keep(keys, vectors)
            return vectors
        return torch.stack([vector for vector in known if vector is not None])

    def read_along(
        self, inputs: Mapping[str, Any], valid: Tensor, use: Callable[[Tensor], None]
    ) -> Callable[[], None] | None:
        """Do as `StateReader.read_along`."""
        return self.reader.read_along(inputs, valid, use)

    def _keep(self, keys: list[bytes], vectors: Tensor) -> None:
        size = vectors.shape[1] * vectors.element_size()
        for key, vector in zip(keys, vectors.detach().clone(), strict=True):
            if key not in self._vectors and self._num_bytes + size <= self.max_bytes:
                self._vectors[key] = vector
                self._num_bytes += size

    def _row_keys(self, inputs: Mapping[str, Any], valid: Tensor) -> list[bytes] | None:
        """Return a hash of each row's inputs; None if they are not those of a text, token by token."""
        accepted = self.reader.accepted
        arguments = {name: value for name, value in inputs.items() if name in accepted and value is not None}
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        if "input_ids" not in tensors or arguments.keys() - tensors.keys() - _ANSWER_FORM:
            return None
        if any(name not in _BY_TOKEN or value.shape != valid.shape for name, value in tensors.items()):
            return None
        parts = [tensors.get(name, torch.full_like(valid, True)).long().to(valid.device) for name in _BY_TOKEN]
        table = torch.stack([*parts, valid.long()], 1).cpu()
        marks = f"{sorted(tensors)} {table.shape[-1]}".encode()
        return [hashlib.sha256(marks + tensor_bytes(row)).digest() for row in table]
