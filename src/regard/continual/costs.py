"""What a task costs: seconds, floating-point operations, memory, and what is kept of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.attention.flops import flop_counter
from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.method import Method
from regard.continual.network import trim_inputs
from regard.continual.training_phase import Batches, TrainingPhase
from regard.runs.rank import num_processes
from regard.training import TrainResult
from regard.training.placement import micro_batches, process_share

Row = dict[str, Any]
Rows = dict[str, Tensor]
ResultT = TypeVar("ResultT")
AROUND = ("hook_seconds", "scoring_seconds", "diagnostics_seconds", "saving_seconds")
"""Seconds around training: of what a method prepares and keeps, of scores, diagnostics (with the gate), and files."""


@dataclass
class TaskCost:
    """What the phases of a task have cost, and what is done around them, by name in `AROUND`."""

    seconds: float = 0.0
    around: dict[str, float] = field(default_factory=lambda: dict.fromkeys(AROUND, 0.0))
    steps: int = 0
    flops: float = 0.0
    examples: int = 0
    tokens: dict[int, int] = field(default_factory=dict)

    def time(self, name: str, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """Call a function, and add the seconds that it takes to those of that name."""
        start = time.perf_counter()
        result = function(*args)
        self.around[name] += time.perf_counter() - start
        return result

    def count_batches(self, batches: Batches) -> Callable[[int], Rows]:
        """Return the batches of a phase, the tokens of each noted."""
        self.tokens = {}

        def rows(step: int) -> Rows:
            batch = batches.rows(step)
            self.tokens[step] = _count_tokens(batch)
            return batch

        return rows

    def add(self, result: TrainResult, batches: Batches, *, token_flops: float, step_flops: float) -> None:
        """Add a phase that is done, and its FLOPs; steps taken before the run was resumed count as the others."""
        self.seconds += result.seconds
        self.steps += result.steps
        for step in set(range(batches.steps)) - self.tokens.keys():
            self.tokens[step] = _count_tokens(batches.rows(step))
        self.flops += token_flops * sum(self.tokens.values()) + step_flops * result.steps
        self.examples += sum(int(row["items"]) for row in result.history[-1:])

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


def _count_tokens(rows: Rows) -> int:
    """Return the tokens of the rows, padding included, in texts and in answers."""
    return rows["input_ids"].numel() + (rows["labels"].numel() if rows["labels"].dim() > 1 else 0)


def count_examples(rows: Rows) -> int:
    """Return how many losses there are: rows, or tokens of answers."""
    return int((rows["labels"] != IGNORE_INDEX).sum())


def measure_flops(learner: Learner, method: Method, batches: Batches, phase: TrainingPhase) -> tuple[float, float]:
    """Return the FLOPs of loss and gradient for a token, and of `transform_gradients`, measured on the first batch.

    The whole batch counts, in the pieces in which the processes train it: a method may do some work once for each, and
    read a memory in the last rows. So no more memory is taken than in training.
    """
    learner.network.train()
    rows = batches.rows(0)
    shares = (process_share(batches.size, rank, num_processes()) for rank in range(num_processes()))
    pieces = [piece for share in shares for piece in micro_batches(share, learner.budget.micro_batch_size)]
    autocast = torch.autocast(learner.device.type, torch.bfloat16, enabled=learner.budget.precision == "bfloat16")
    with torch.random.fork_rng(devices=[]):
        with flop_counter() as loss_counter, autocast:
            for piece in pieces:
                part = trim_padding({name: value[piece].to(learner.device) for name, value in rows.items()})
                method.loss(learner, learner.network, part).backward()
        with flop_counter() as transform_counter:
            if phase.transform_gradients is not None:
                phase.transform_gradients(learner.network, 0)
    learner.network.zero_grad(set_to_none=True)
    return loss_counter.get_total_flops() / _count_tokens(rows), float(transform_counter.get_total_flops())


def measure_memory(learner: Learner, method: Method) -> Row:
    """Return what the method keeps beside its weights: bytes, and examples."""
    state = method.state
    kept = [*state.tensors.values(), *learner.network.kept_tensors()]
    tensors = sum(value.numel() * value.element_size() for value in kept)
    texts = sum(4 * learner.length(item) + 4 for item in state.examples)
    return {"memory_bytes": tensors + texts, "memory_examples": len(state.examples)}
