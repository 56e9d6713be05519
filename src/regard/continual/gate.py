"""Whether a method's gate does what it is for: which adapters the rows of each task get, and what that costs them."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from regard.adapters.reflection import divergence
from regard.continual.learner import Learner, Row
from regard.continual.method import Method
from regard.continual.methods.sapt import TARGET, Sapt, SaptNetwork
from regard.continual.scoring import score_task

GateValue = tuple[str, int | None, float]
KnownScore = tuple[int, int, str]
"""A task, an adapter, and hashes of what answers the task's rows under it."""
CLOSED_FRACTION = 0.5
"""A gate is closed that gives a task's own adapter less than this share of what all adapters alike would get."""


def measure_gate(
    learner: Learner,
    method: Method,
    tasks_trained: int,
    *,
    rows: int = 100,
    scored_tasks: Collection[int] | None = None,
    routed_scores: Mapping[int, float] | None = None,
    known_scores: dict[KnownScore, float] | None = None,
) -> list[Row]:
    """Return what the gate gives after `tasks_trained` tasks, on at most `rows` dev rows of each.

    Rows have `statistic`, `adapter` (its position, from 1, or None) and `value`:

    - weight: mean weight of each adapter over the task's rows; own_adapter_weight: of the task's own (`adapter_of`);
    - entropy: mean entropy of a row's weights, in nats;
    - strength: λ in the training of the newest task;
    - reflection: KL(ā ‖ a), mean over rows, with ā the mean weights when the task was learned, in nats;
    - routed_score, own_adapter_score, last_adapter_score: test accuracy (TIL, per cent) with the gate's weights, with
      the task's own adapter alone, and with the newest adapter of another task; of `scored_tasks`, None: of all.
      `routed_scores` are those with the gate's weights, by task, where they are known. `known_scores` keeps scores of
      single adapters, which are not computed again as long as the adapter and the head are the same.
    """
    if not isinstance(learner.network, SaptNetwork):
        return []
    table: list[Row] = []
    for task in range(tasks_trained):
        values = _measure_weights(learner, method, task, rows)
        if isinstance(method, Sapt) and 0 < task == tasks_trained - 1:
            values.append(("strength", None, method.reflection_strength(task)))
        if scored_tasks is None or task in scored_tasks:
            known = {} if known_scores is None else known_scores
            values += _score_adapters(learner, task, tasks_trained, (routed_scores or {}).get(task), known)
        columns = {"after_task": tasks_trained, **learner.task_columns(task)}
        table += [{**columns, "statistic": name, "adapter": index, "value": value} for name, index, value in values]
    return table


def find_closed_gates(rows: Sequence[Row], tasks_trained: int, *, newest_only: bool) -> dict[str, float]:
    """Return the mean weight of a task's own adapter by task name, where it is below `CLOSED_FRACTION / num_adapters`.

    `rows` are those of `gate.parquet` recorded after `tasks_trained` tasks, which stand in for the number of adapters
    if there are no rows of it. With `newest_only` the task trained last is checked, otherwise the earlier ones.
    """
    own_weights = {
        row["task"]: row["value"]
        for row in rows
        if row["statistic"] == "own_adapter_weight" and (row["after_task"] == row["task_index"]) is newest_only
    }
    adapters = Counter((row["task"], row["after_task"]) for row in rows if row["statistic"] == "weight")
    return {
        task: value
        for task, value in own_weights.items()
        if value < CLOSED_FRACTION / max(1, adapters[task, tasks_trained] or tasks_trained)
    }


def _measure_weights(learner: Learner, method: Method, task: int, max_rows: int) -> list[GateValue]:
    network, items = learner.network_as(SaptNetwork), learner.sample_examples(task, "dev", max_rows)
    with learner.evaluation_mode(), torch.no_grad():
        vectors = torch.cat([network.vectors(batch) for batch in learner.batches_by_length(items, "dev")])
        scores = network.router.scores(vectors)
    own_adapter, shares = network.adapter_of(task), scores.softmax(-1)
    mean = shares.mean(0).tolist()
    values: list[GateValue] = [("weight", adapter + 1, value) for adapter, value in enumerate(mean)]
    values.append(("own_adapter_weight", own_adapter + 1, mean[own_adapter]))
    values.append(("entropy", None, 0.0 - float((shares * scores.log_softmax(-1)).sum(-1).mean())))  # never -0.0
    target = method.state.tensors.get(f"{TARGET}{own_adapter}")
    if target is not None:
        values.append(("reflection", None, float(divergence(target.to(scores), scores))))
    return values


def _score_adapters(
    learner: Learner, task: int, tasks_trained: int, routed: float | None, known: dict[KnownScore, float]
) -> list[GateValue]:
    network = learner.network_as(SaptNetwork)
    own_adapter = network.adapter_of(task)
    others = [adapter for adapter in map(network.adapter_of, reversed(range(tasks_trained))) if adapter != own_adapter]
    if routed is None:
        routed = score_task(learner, task, tasks_trained=tasks_trained, known_task=False).til
    scores: list[GateValue] = [("routed_score", None, routed)]
    alone = [("own_adapter_score", own_adapter)]
    alone += [("last_adapter_score", adapter) for adapter in others[:1]]
    if int(network.count) == 1:  # it has all of the weight
        return [*scores, ("own_adapter_score", own_adapter + 1, routed)]
    for name, adapter in alone:
        of_adapter, of_rest = network.digests([adapter])
        key = task, adapter, of_adapter[adapter] + of_rest
        if key not in known:
            with network.use_only(adapter):
                known[key] = score_task(learner, task, tasks_trained=tasks_trained, known_task=False).til
        scores.append((name, adapter + 1, known[key]))
    return scores
