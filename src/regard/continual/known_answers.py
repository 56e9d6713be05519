"""Answers that rows had under the same weights of the same adapters, which need not be computed again."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.data.stream import Split
from regard.runs.integrity import tensor_bytes

TOLERANCE = torch.finfo(torch.float32).eps
"""Weights are the same if they differ by no more than the rounding of a weight of 1."""
MOST_BYTES = 32 * 2**20
"""What is kept at most; the oldest answers are forgotten."""


class Answering(NamedTuple):
    """What answers rows: weights (row, adapter), a hash of each adapter in use, and one of all else that trains."""

    weights: Tensor
    digests: Mapping[int, str]
    rest: str


@dataclass(frozen=True)
class _Part:
    """Logits (row, class), or tokens of answers (row, token), of rows of a split of a task, and what answered them."""

    task: int
    split: Split
    rows: Tensor
    answers: Tensor
    by: Answering

    @property
    def num_bytes(self) -> int:
        return sum(value.numel() * value.element_size() for value in (self.rows, self.answers, self.by.weights))


@dataclass(eq=False)
class KnownAnswers:
    """Logits, or answers, of rows under the weights of adapters, for as long as these adapters stay as they are."""

    max_bytes: int = MOST_BYTES
    _parts: list[_Part] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    def has(self, task: int, split: Split) -> bool:
        return any((part.task, part.split) == (task, split) for part in self._parts)

    def keep(self, task: int, split: Split, rows: Sequence[int], answers: Tensor, by: Answering) -> None:
        """Keep what some rows of a split were answered (row, …), and forget those that are of no use any more."""
        values = (answers, by.weights)
        copied, weights = (value.detach().to("cpu", copy=True) for value in values)
        self._parts = [
            part for part in self._parts if (part.task, part.split) != (task, split) or part.by.rest == by.rest
        ]
        self._parts.append(_Part(task, split, torch.tensor(rows), copied, by._replace(weights=weights)))
        while self._parts and self.num_bytes > self.max_bytes:
            del self._parts[0]

    def recall(self, task: int, split: Split, rows: Sequence[int], by: Answering) -> dict[int, Tensor]:
        """Return what those of the rows were answered that the same adapters have answered, by row."""
        known: dict[int, Tensor] = {}
        numbers, weights = torch.tensor(rows), by.weights.detach().cpu()
        for part in reversed(self._parts):
            if (part.task, part.split, part.by.rest) != (task, split, by.rest):
                continue
            source_of = torch.full((int(torch.cat([numbers, part.rows]).max()) + 1,), -1)
            source_of[part.rows] = torch.arange(len(part.rows))
            places = (source_of[numbers] >= 0).nonzero().flatten()
            sources = source_of[numbers[places]]
            width = max(weights.shape[1], part.by.weights.shape[1])
            now, then = _pad(weights, width)[places], _pad(part.by.weights, width)[sources]
            changed = [one for one in range(width) if part.by.digests.get(one) != by.digests.get(one, "")]
            same = ((now - then).abs() <= TOLERANCE).all(1) & (now[:, changed].abs() <= TOLERANCE).all(1)
            for place, source in zip(places[same].tolist(), sources[same].tolist(), strict=True):
                known.setdefault(rows[place], part.answers[source])
        return known

    def record(self) -> list[dict[str, Any]]:
        """Return what JSON holds of the answers; `tensors` has the rest."""
        return [
            {"task": part.task, "split": part.split, "digests": list(part.by.digests.items()), "rest": part.by.rest}
            for part in self._parts
        ]

    def tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for number, part in enumerate(self._parts):
            values = {"rows": part.rows, "answers": part.answers, "weights": part.by.weights}
            tensors |= {f"{number}/{name}": value.contiguous() for name, value in values.items()}
        return tensors

    def restore(self, record: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> None:
        """Know what `record` and `tensors` gave, and nothing else."""
        self._parts = []
        for number, about in enumerate(record):
            rows, answers, weights = (tensors[f"{number}/{name}"] for name in ("rows", "answers", "weights"))
            by = Answering(weights, dict(about["digests"]), about["rest"])
            self._parts.append(_Part(about["task"], about["split"], rows, answers, by))


def used_adapters(weights: Tensor) -> list[int]:
    """Return the positions of the adapters that some row (row, adapter) gives more than a rounding error."""
    used: list[int] = (weights.abs() > TOLERANCE).any(0).nonzero().flatten().tolist()
    return used


def digest(values: Iterable[Tensor]) -> str:
    """Return a hash of the numbers of tensors."""
    sha256 = hashlib.sha256()
    for value in values:
        sha256.update(tensor_bytes(value))
    return sha256.hexdigest()


def _pad(weights: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(weights, (0, width - weights.shape[1]))
