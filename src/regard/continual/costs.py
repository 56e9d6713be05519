"""What a task costs: seconds, floating-point operations, memory, and what is kept of it."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from regard.attention.flops import flop_counter
from regard.continual.learner import IGNORE_INDEX, Learner, Row
from regard.continual.method import Method
from regard.continual.network import trim_inputs
from regard.continual.training_phase import Batches, TrainingPhase
from regard.runs.intervals import Floats
from regard.runs.rank import num_processes
from regard.training import TrainResult
from regard.training.placement import Rows, micro_batches, process_share

ResultT = TypeVar("ResultT")
_COUNTED = ("input_ids", "attention_mask", "labels")
AROUND = ("hook_seconds", "scoring_seconds", "diagnostics_seconds", "saving_seconds")
"""Seconds around training: of what a method prepares and keeps, of scores, diagnostics (with the gate), and files."""


@dataclass
class TaskCost:
    """What the phases of a task have cost, and what is done around them, by name in `AROUND`."""

    micro_batch_size: int | None = None
    seconds: float = 0.0
    around: dict[str, float] = field(default_factory=lambda: dict.fromkeys(AROUND, 0.0))
    steps: int = 0
    flops: float = 0.0
    examples: int = 0
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Tokens and examples of each step of the phase under way."""

    def time(self, name: str, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """Call a function, and add the seconds that it takes to those of that name."""
        start = time.perf_counter()
        result = function(*args)
        self.around[name] += time.perf_counter() - start
        return result

    def count_batches(self, batches: Batches) -> Callable[[int], Rows]:
        """Return the batches of a phase, the tokens and examples of each noted."""
        self.counts, pieces = {}, _all_pieces(batches, self.micro_batch_size)

        def rows(step: int) -> Rows:
            batch = batches.rows(step)
            self.counts[step] = _count_batch(batch, pieces)
            return batch

        return rows

    def add(self, result: TrainResult, batches: Batches, *, token_flops: float, step_flops: float) -> None:
        """Add a phase that is done, and its FLOPs; steps taken before the run was resumed count as the others."""
        self.seconds += result.seconds
        self.steps += result.steps
        pieces = _all_pieces(batches, self.micro_batch_size)
        for step in set(range(batches.steps)) - self.counts.keys():
            self.counts[step] = _count_batch(batches.rows(step), pieces)
        tokens, examples = (sum(column) for column in zip(*self.counts.values(), strict=True))
        self.flops += token_flops * tokens + step_flops * result.steps
        self.examples += examples

    def row(self) -> Row:
        speed = self.examples / self.seconds if self.seconds else None
        row = {"seconds": self.seconds, **self.around, "flops": self.flops, "steps": self.steps}
        return {**row, "examples_per_second": speed}


def trim_padding(rows: Rows) -> Rows:
    """Return the rows without the columns that are padding in all of them, in texts and in answers."""
    trimmed = rows | trim_inputs(rows)
    if rows["labels"].dim() > 1:
        answered = (rows["labels"] != IGNORE_INDEX).any(0).nonzero()
        trimmed["labels"] = rows["labels"][:, : int(answered.max()) + 1 if len(answered) else 1]
    return trimmed


def _all_pieces(batches: Batches, micro_batch_size: int | None) -> list[slice]:
    """Return the micro-batches of a batch, of all processes."""
    shares = (process_share(batches.size, rank, num_processes()) for rank in range(num_processes()))
    return [piece for share in shares for piece in micro_batches(share, micro_batch_size)]


def _count_batch(rows: Rows, pieces: Sequence[slice]) -> tuple[int, int]:
    """Return the tokens that the model reads in a batch, with the padding that stays, and the rows that it answers."""
    parts = ({name: rows[name][piece] for name in _COUNTED} for piece in pieces)
    answered = (rows["labels"] != IGNORE_INDEX).reshape(len(rows["labels"]), -1).any(1)
    return sum(_count_tokens(trim_padding(part)) for part in parts), int(answered.sum())


def _count_tokens(rows: Rows) -> int:
    return rows["input_ids"].numel() + (rows["labels"].numel() if rows["labels"].dim() > 1 else 0)


def count_examples(rows: Rows) -> int:
    """Return how many losses there are: rows, or tokens of answers."""
    return int((rows["labels"] != IGNORE_INDEX).sum())


class FirstStep:
    """Counts the FLOPs of the first step of a phase as it is taken, by what is called in it: a loss, and what corrects.

    The least squares over its pieces tell the work of tokens from that of a piece, which a method may do once for each,
    where their lengths differ; a step has `transform_gradients` as well.
    """

    def __init__(self, learner: Learner, method: Method, phase: TrainingPhase) -> None:
        self.learner, self.method, self.transform = learner, method, phase.transform_gradients
        self._tokens, self._flops = list[float](), list[float]()
        self._counter: FlopCounterMode | None = None
        self._found: tuple[float, float] | None = None

    def loss(self, network: nn.Module, rows: Rows) -> Tensor:
        """Return the method's loss of a piece, and count its FLOPs and those of the backward pass behind it."""
        if self._found is None:
            self.end()
            self._tokens.append(_count_tokens(rows))
            self._counter = flop_counter()
            self._counter.__enter__()
        return self.method.loss(self.learner, network, rows)

    def transform_gradients(self, network: nn.Module, step: int) -> None:
        is_counted = self._counter is not None
        self.end()
        with flop_counter() if is_counted else nullcontext() as counter:
            if self.transform is not None:
                self.transform(network, step)
        if counter is not None:
            per_token, per_piece = _fit_line(np.array(self._tokens), np.array(self._flops))
            self._found = per_token, per_piece * len(self._flops) + counter.get_total_flops()

    def end(self) -> tuple[float, float] | None:
        """Count no more, and return the FLOPs for each token, and those of a step whatever its tokens are, if known."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._flops.append(self._counter.get_total_flops())
            self._counter = None
        return self._found


def measure_flops(learner: Learner, method: Method, batches: Batches, phase: TrainingPhase) -> tuple[float, float]:
    """Return what `FirstStep` finds, of a first step that is not taken now, or by several processes.

    The whole batch counts, in the pieces in which the processes train it: a method may do some work once for each, and
    read a memory in the last rows. So no more memory is taken than in training.
    """
    learner.network.train()
    first = FirstStep(learner, method, phase)
    rows, pieces = batches.rows(0), _all_pieces(batches, learner.budget.micro_batch_size)
    try:
        with torch.random.fork_rng(devices=[]):
            for piece in pieces:
                part = trim_padding({name: value[piece].to(learner.device) for name, value in rows.items()})
                with learner.autocast():
                    first.loss(learner.network, part).backward()
            first.transform_gradients(learner.network, 0)
    finally:
        found = first.end()
    learner.network.zero_grad(set_to_none=True)
    assert found is not None
    return found


def _fit_line(x: Floats, y: Floats) -> tuple[float, float]:
    """Return slope and intercept of the least squares, neither below 0, that keep the sum of y."""
    spread = x - x.mean()
    slope = float(y.sum() / x.sum())
    if len(x) > 2 and spread.any():
        slope = min(max(float(spread @ y / (spread @ spread)), 0.0), slope)
    return slope, float(y.mean() - slope * x.mean())


def measure_memory(learner: Learner, method: Method) -> Row:
    """Return what the method keeps beside its weights: bytes, and examples."""
    state = method.state
    kept = [*state.tensors.values(), *learner.network.kept_tensors()]
    tensors = sum(value.numel() * value.element_size() for value in kept)
    rows = sum(4 * learner.length(item) + 4 for item in state.examples)
    return {"memory_bytes": tensors + rows + _count_text(state.values), "memory_examples": len(state.examples)}


def _count_text(value: Any) -> int:
    """Return the bytes of the texts among values of JSON in UTF-8, without names; counters do not matter."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, Mapping):
        return _count_text(list(value.values()))
    return sum(map(_count_text, value)) if isinstance(value, Sequence) else 0
