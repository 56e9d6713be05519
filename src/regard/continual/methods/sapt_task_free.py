"""Task-free SAPT: rows that are new get a new adapter, known ones that of their task."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from regard.adapters.novelty import DRAWS, check_separable, find_known_task, novelty
from regard.adapters.reflection import mean_weights, sample_rows
from regard.adapters.router_warmup import PastTask
from regard.continual import method
from regard.continual.adapter_network import KnownTask
from regard.continual.learner import Learner
from regard.continual.methods.sapt import TARGET, VECTORS, Sapt, SaptNetwork
from regard.continual.methods.sapt_config import CONDITIONS, SaptConfig
from regard.errors import UserError
from regard.models.classifier import Classifier

PORTION, SEEN = "portion/", "seen/"
"""Before the number of a portion: what was decided about it; before that of a block: how many rows it has seen."""


@dataclass(frozen=True, kw_only=True)
class SaptTaskFreeConfig(SaptConfig):
    """Settings of task-free SAPT: those of SAPT, with another default of `memory_size`, and of the novelty test.

    Args:
        novelty_samples: Rows of a portion that are compared with those of each adapter.
        false_alarm_rate: How often rows of a known kind are taken for new ones.
        reuse_threshold: Likeness (1 − the statistic of `regard.adapters.novelty`) from which new rows train a known
            adapter; 0 for never. Only values close to 1 tell tasks apart: those of Long Sequence have .76 to .996.
    """

    conditions: ClassVar[Mapping[str, tuple[method.RequiredSetting, ...]]] = {**CONDITIONS, "memory_size": ()}
    known_task: KnownTask = "router"
    memory_size: Annotated[int, method.Range(2)] = 50
    novelty_samples: Annotated[int, method.Range(2)] = 100
    false_alarm_rate: Annotated[float, method.Range(1 / (DRAWS + 1), 1)] = 0.01
    reuse_threshold: method.Fraction = 0.0

    def __post_init__(self) -> None:
        if self.memory_fraction != SaptConfig.memory_fraction:
            raise UserError("memory_fraction: expected none with sapt-task-free, which stores memory_size vectors")
        super().__post_init__()
        if self.reflection != "real":
            raise UserError(f"reflection: expected 'real', got {self.reflection!r}: stored vectors tell what is new")


class TaskFreeNetwork(SaptNetwork):
    """SAPT's network, which knows the adapter that each portion was `given` (portion,); −1: not learnt yet."""

    given: Tensor

    def __init__(self, classifier: Classifier, *, tasks: int, config: Any, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        self.register_buffer("given", torch.full((tasks,), -1))

    def adapter_of(self, task: int) -> int:
        return int(self.given[task])

    def start_adapter(self, adapter: int) -> None:
        """Train this adapter, its key, and the maps; those that came after it stay in use."""
        used = max(int(self.count), adapter + 1)
        super().start_adapter(adapter)
        self.count.fill_(used)
        self.router.use(used)


class SaptTaskFree(Sapt):
    """SAPT (arXiv 2401.08295) on portions of data of which nobody says whether they are of a task that was learnt.

    A portion is what the framework calls a task. Query vectors of its training rows are compared with those that stand
    for each adapter (`regard.adapters.novelty`). Rows that are like none of them get a new adapter and key. Otherwise
    the adapter that they are most like is trained on them, while the others are reflected on, and then stands for both:
    its target is the mean over all of its rows, and of the stored vectors each portion has the share of its rows.
    """

    Config = SaptTaskFreeConfig
    Network = TaskFreeNetwork

    def choose_adapter(self, learner: Learner, task: int) -> int:
        """Return the adapter that a portion gets, decided once."""
        name, network = f"{PORTION}{task}", learner.network_as(TaskFreeNetwork)
        if name not in self.state.values:
            self.state.values[name] = self._decide(learner, task)
        adapter = int(self.state.values[name]["block"])
        network.given[task] = adapter
        return adapter

    def count_others(self, task: int) -> int:
        return len(self._other_adapters(task))

    def past_tasks(self, learner: Learner, task: int) -> list[PastTask]:
        tensors, adapters = self.state.tensors, self._other_adapters(task)
        return [PastTask(tensors[f"{TARGET}{adapter}"], tensors[f"{VECTORS}{adapter}"]) for adapter in adapters]

    def after_task(self, learner: Learner, task: int) -> None:
        network, state = learner.network_as(TaskFreeNetwork), self.state
        adapter, vectors = network.adapter_of(task), self._training_vectors(learner, task)
        stored_vectors = state.tensors.get(f"{VECTORS}{adapter}", vectors[:0])
        num_seen = int(state.values.get(f"{SEEN}{adapter}", 0))
        with torch.no_grad():
            target = mean_weights(network.router(vectors))
            if num_seen:
                stored_target = mean_weights(network.router(stored_vectors))
                target = (len(vectors) * target + num_seen * stored_target) / (len(vectors) + num_seen)
        state.tensors[f"{TARGET}{adapter}"] = target
        state.tensors[f"{VECTORS}{adapter}"] = self._merge_vectors(learner, task, stored_vectors, num_seen, vectors)
        state.values[f"{SEEN}{adapter}"] = num_seen + len(vectors)

    def _merge_vectors(
        self, learner: Learner, task: int, stored_vectors: Tensor, num_seen: int, vectors: Tensor
    ) -> Tensor:
        """Return what stands for rows of which so many were seen before, and for those found: each by their number."""
        random = torch.Generator().manual_seed(learner.seed_for("memory", task))
        count = self.count_stored(num_seen + len(vectors))
        num_new = min(len(vectors), max(1, round(count * len(vectors) / (num_seen + len(vectors)))))
        samples = [sample_rows(vectors, num_new, random)]
        if num_seen:
            samples.insert(0, sample_rows(stored_vectors, min(len(stored_vectors), count - num_new), random))
        return torch.cat(samples)

    def _decide(self, learner: Learner, task: int) -> dict[str, Any]:
        """Return the adapter for a portion, whether it is a new one, and what each adapter's rows were to it."""
        config, adapters = self.config, self._trained_adapters()
        random = torch.Generator().manual_seed(learner.seed_for("compared", task))
        vectors = sample_rows(self._training_vectors(learner, task), int(config.novelty_samples), random)
        comparisons = []
        for adapter in adapters:
            reference = self.state.tensors[f"{VECTORS}{adapter}"]
            if not check_separable(len(vectors), len(reference), config.false_alarm_rate):
                raise UserError(
                    f"false_alarm_rate: {config.false_alarm_rate:g} is less than what {len(vectors)} rows of "
                    f"{learner.stream.tasks[task].name!r} and {len(reference)} that were kept can tell; "
                    "raise it, or learn from more rows"
                )
            comparisons.append(novelty(vectors, reference, seed=learner.seed_for("novelty", task, adapter)))
        match = find_known_task(comparisons, alarm=config.false_alarm_rate, reuse=config.reuse_threshold)
        return {
            "block": len(adapters) if match is None else adapters[match],
            "new": match is None,
            "statistic": [comparison.statistic for comparison in comparisons],
            "p": [comparison.p for comparison in comparisons],
        }

    def _trained_adapters(self) -> list[int]:
        return list(range(sum(name.startswith(TARGET) for name in self.state.tensors)))

    def _other_adapters(self, task: int) -> list[int]:
        own_adapter = self.state.values[f"{PORTION}{task}"]["block"]
        return [adapter for adapter in self._trained_adapters() if adapter != own_adapter]
