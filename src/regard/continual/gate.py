"""Whether a method's gate does what it is for: which blocks the rows of each task get, and what that costs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.adapters.reflection import divergence
from regard.continual.methods.sapt import TARGET, Sapt, SaptNetwork
from regard.continual.scoring import score_task

if TYPE_CHECKING:
    from regard.continual.learner import Learner
    from regard.continual.method import Method

Row = dict[str, Any]
SHUT = 0.5
"""A gate that gives less than this share of what all blocks alike would get, or of the whole, to a task's own block."""


def gate_rows(learner: Learner, method: Method, learnt: int, *, rows: int = 100, scored: bool = True) -> list[Row]:
    """What the gate of a model does after `learnt` tasks, on at most so many dev rows of each; none without a gate.

    Rows of `statistic`, `adapter` (its position, from 1; None where it is of none) and `value`:

    - weight: the mean weight of each block, of the task's rows;
    - own_weight: that of the task's own block, which the network knows (`block_of`);
    - entropy: the mean entropy of a row's weights, in nats;
    - strength: λ, with which the task that has just been learnt was held against the others' reflection;
    - reflection: KL(ā ‖ a), the mean over rows, of the mean ā that was kept when the task was learnt, in nats;
    - routed_score, forced_score, other_score: per cent right (TIL, test rows) with the weights as they are; with the
      task's own block alone; and with the block alone that was learnt last, or before it where that is the own one.
    """
    network = learner.network
    if not isinstance(network, SaptNetwork):
        return []
    found: list[Row] = []
    for task in range(learnt):
        place = {"after_task": learnt, "task_index": task + 1, "task": learner.stream.tasks[task].name}
        told = _weights(learner, method, task, rows)
        if isinstance(method, Sapt) and 0 < task == learnt - 1:
            told.append(("strength", None, method.strength(task)))
        if scored:
            told += score_rows(learner, task, learnt)
        found += [{**place, "statistic": name, "adapter": block, "value": value} for name, block, value in told]
    return found


def find_closed_gates(rows: Sequence[Row], learnt: int, *, fresh: bool) -> dict[str, float]:
    """The weights of the own blocks, by task, that get less than `SHUT` of an equal share after `learnt` tasks,
    which is 1 divided by the number of blocks at that time (of tasks, where the rows do not tell that of blocks).

    With `fresh` of the task that has just been learnt, otherwise of those before it.
    """
    own = {
        row["task"]: row["value"]
        for row in rows
        if row["statistic"] == "own_adapter_weight" and (row["after_task"] == row["task_index"]) is fresh
    }
    blocks = Counter((row["task"], row["after_task"]) for row in rows if row["statistic"] == "weight")
    return {task: value for task, value in own.items() if value < SHUT / max(1, blocks[task, learnt] or learnt)}


def _weights(learner: Learner, method: Method, task: int, most: int) -> list[tuple[str, int | None, float]]:
    """What the gate gives the rows of a task."""
    network = learner.network
    assert isinstance(network, SaptNetwork)
    with learner.evaluation_mode(), torch.no_grad():
        vectors = torch.cat(
            [network.vectors(one) for one in learner.iterate_batches(learner.sample_examples(task, "dev", most), "dev")]
        )
        scores = network.attention.scores(vectors)
    own = network.block_of(task)
    shares: Tensor = scores.softmax(-1)
    mean = shares.mean(0).tolist()
    entropy = float(-(shares * scores.log_softmax(-1)).sum(-1).mean())
    found = [("weight", block + 1, value) for block, value in enumerate(mean)]
    told: list[tuple[str, int | None, float]] = [
        *found,
        ("own_adapter_weight", own + 1, mean[own]),
        ("entropy", None, entropy),
    ]
    target = method.state.tensors.get(f"{TARGET}{own}")
    if target is not None:
        told.append(("reflection", None, float(divergence(target.to(scores), scores))))
    return told


def score_rows(learner: Learner, task: int, learnt: int) -> list[tuple[str, int | None, float]]:
    """How right a task's rows are with other weights than the gate's."""
    network = learner.network
    assert isinstance(network, SaptNetwork)
    own = network.block_of(task)
    others = [block for block in map(network.block_of, reversed(range(learnt))) if block != own]
    found: list[tuple[str, int | None, float]] = [("routed_score", None, score_task(learner, task, learnt=learnt).til)]
    for name, block in (("own_adapter_score", own), ("last_adapter_score", others[0] if others else None)):
        if block is not None:
            with network.use_only(block):
                found.append((name, block + 1, score_task(learner, task, learnt=learnt).til))
    return found
