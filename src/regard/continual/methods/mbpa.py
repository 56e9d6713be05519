"""Memory-based parameter adaptation: a model that adapts to each text's neighbors in memory before it answers."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from regard.continual import memory, method
from regard.continual.learner import Learner
from regard.continual.network import Network, as_float32, trim_inputs
from regard.continual.training_phase import Batches, TrainingPhase
from regard.errors import UserError
from regard.models.classifier import Classifier
from regard.models.heads import LinearHead, pool_states
from regard.training.placement import Rows

AdaptationScope = Literal["all", "head"]
_UNLIKELY = -1e30


@dataclass(frozen=True, kw_only=True)
class MbPAConfig(memory.MemoryConfig):
    """Settings of MbPA++: those of a memory, of sparse replay and of local adaptation.

    Args:
        replay_interval: Batches of new examples for each one from the memory.
        num_neighbors: Stored rows that a text is adapted to.
        adaptation_steps: Steps of gradient descent of the local adaptation, at the rate `adaptation_lr`.
        l2_weight: λ of the squared distance to the weights before the adaptation.
        adaptation_scope: "all" trained weights, or the "head".
    """

    conditions: ClassVar[Mapping[str, tuple[method.RequiredSetting, ...]]] = dict.fromkeys(
        ("num_neighbors", "adaptation_lr", "l2_weight", "adaptation_scope"),
        (method.RequiredSetting("adaptation_steps"),),
    )
    replay_interval: method.PositiveInt = 100
    num_neighbors: method.PositiveInt = 32
    adaptation_steps: method.NonNegativeInt = 30
    adaptation_lr: method.NonNegative = 1e-3
    l2_weight: method.NonNegative = 1e-3
    adaptation_scope: AdaptationScope = "all"


@dataclass(frozen=True, eq=False)
class ShownMemory:
    """The memory of `tasks_trained` tasks: its rows, their keys (row, width), their tasks' classes (row, class)."""

    rows: Rows
    keys: Tensor
    class_mask: Tensor
    tasks_trained: int


class AdaptingNetwork(Network):
    """A classifier beside the encoder as it was at the start, frozen, whose states are keys.

    In evaluation without gradients, rows of tasks that have been learnt are classified by weights adapted for each row.
    """

    def __init__(self, classifier: Classifier, *, tasks: int, config: Any, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        self.config: MbPAConfig = config
        if config.adaptation_scope == "head" and not isinstance(classifier.head, LinearHead):
            raise UserError(f"head: expected linear with adaptation_scope=head of mbpa++, got {classifier.config.head}")
        self.reader = deepcopy(classifier.encoder).requires_grad_(False).eval()
        self.remembered: ShownMemory | None = None

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.reader.eval()
        return self

    def forward(self, rows: Rows) -> Tensor:
        if self.training or torch.is_grad_enabled() or self.remembered is None:
            return super().forward(rows)
        is_learned = rows["tasks"] < self.remembered.tasks_trained
        if not bool(is_learned.any()):
            return super().forward(rows)
        adapt = self._adapt_all if self.config.adaptation_scope == "all" else self._adapt_head
        learned_rows = _select_rows(rows, is_learned)
        with torch.autocast(is_learned.device.type, enabled=False):
            adapted = adapt(learned_rows, self.find_neighbors(learned_rows), self.remembered)
        if bool(is_learned.all()):
            return adapted
        logits = super().forward(rows)
        logits[is_learned] = adapted.to(logits.dtype)
        return logits

    @torch.no_grad()
    def keys(self, rows: Rows) -> Tensor:
        """Return (row, width): the first encoder's state of the token that the head reads."""
        inputs = trim_inputs(rows)
        mask = inputs["attention_mask"].bool()
        states = self.reader(**inputs | {"attention_mask": mask.long()}, return_dict=True).last_hidden_state
        return pool_states(states, mask, self._head.pooling)

    def find_neighbors(self, rows: Rows) -> Tensor:
        """Return (row, neighbor): which rows of the memory have the nearest keys, by Euclidean distance."""
        assert self.remembered is not None
        keys = self.remembered.keys
        distances = (self.keys(rows)[:, None] - keys).square().sum(-1)
        return distances.topk(min(self.config.num_neighbors, len(keys)), largest=False).indices

    @property
    def _head(self) -> LinearHead:
        return cast(LinearHead, self.classifier.head)

    def _adapt_all(self, rows: Rows, near: Tensor, remembered: ShownMemory) -> Tensor:
        indices = range(len(near))
        return torch.cat([self._adapt_row(_select_rows(rows, [row]), near[row], remembered) for row in indices])

    def _adapt_row(self, row: Rows, near: Tensor, remembered: ShownMemory) -> Tensor:
        parameters = self.classifier.named_parameters()
        start = {name: parameter.detach() for name, parameter in parameters if parameter.requires_grad}
        weights = {name: weight.clone() for name, weight in start.items()}  # which change in place, as tables are large
        neighbors, class_mask = _select_rows(remembered.rows, near), remembered.class_mask[near]
        rate, decay = self.config.adaptation_lr, 2 * self.config.l2_weight
        for _ in range(self.config.adaptation_steps):
            for name, gradient in self._gradients(weights, neighbors, class_mask).items():
                weights[name].lerp_(start[name], decay * rate).sub_(gradient, alpha=rate)
        return functional_call(self.classifier, weights, (), trim_inputs(row)).logits

    def _gradients(self, weights: dict[str, Tensor], rows: Rows, class_mask: Tensor) -> dict[str, Tensor]:
        """Return the gradient of the mean cross-entropy of rows, each over its own classes, by these weights."""
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        with torch.enable_grad():
            logits = functional_call(self.classifier, leaves, (), trim_inputs(rows)).logits
            loss = nn.functional.cross_entropy(logits.masked_fill(~class_mask, _UNLIKELY), rows["labels"])
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, gradients, strict=True))

    def _adapt_head(self, rows: Rows, near: Tensor, remembered: ShownMemory) -> Tensor:
        """Return the logits of an adapted head, all rows at once: one pass of their encoder is enough."""
        features, neighbor_features = self._features(rows), self._features(remembered.rows)[near]
        start, offset = self._head.vectors.to(features.dtype), self._head.bias.to(features.dtype)
        vectors, bias = start.expand(len(near), -1, -1), offset.expand(len(near), -1)
        class_mask, labels = remembered.class_mask[near], remembered.rows["labels"][near]
        one_hot = nn.functional.one_hot(labels, class_mask.shape[-1]).to(features.dtype)
        for _ in range(self.config.adaptation_steps):
            logits = neighbor_features @ vectors.transpose(1, 2) + bias[:, None]
            errors = (logits.masked_fill(~class_mask, _UNLIKELY).softmax(-1) - one_hot) / near.shape[1]
            decay, rate = 2 * self.config.l2_weight, self.config.adaptation_lr
            vectors = vectors - rate * (errors.transpose(1, 2) @ neighbor_features + decay * (vectors - start))
            bias = bias - rate * (errors.sum(1) + decay * (bias - offset))
        return (vectors @ features[..., None]).squeeze(-1) + bias

    def _features(self, rows: Rows) -> Tensor:
        return as_float32(self.pooled_states(rows))


def _select_rows(rows: Rows, index: list[int] | Tensor) -> Rows:
    return {name: value[index] for name, value in rows.items()}


class MbPA(memory.MemoryMethod):
    """MbPA++ (arXiv 1906.01076): sparse replay in training, local adaptation before each answer.

    For a text the weights w become argmin over w̃ of λ |w̃ − w|² − (1/K) Σ log p(y_k | x_k, w̃), over its K nearest
    neighbors in the memory, by a few steps of gradient descent; the next text begins at w again. Neighbors come from
    all tasks; texts of a task that has not been learnt are classified as they are.

    A text costs K · steps passes forward and backward, about 3000 in the paper (K = 32, 30 steps, all weights); next to
    nothing with `adaptation_scope` = "head". The paper keeps every example and gives no rate: here the memory is as
    small as those of other methods. At the paper's `replay_interval`, short runs replay nothing.
    """

    allows_label_head = False
    saved_without = "the memory to which it adapts before each answer"
    answers_as_trained = False
    Config = MbPAConfig
    Network = AdaptingNetwork

    def before_task(self, learner: Learner, task: int) -> None:
        self._show_memory(learner, task)

    def batches(self, learner: Learner, task: int, phase: TrainingPhase) -> Batches:
        return self.replay_batches(learner, task, phase, interval=self.config.replay_interval)

    def after_task(self, learner: Learner, task: int) -> None:
        memory.store_with(learner, self.state, self.config, task, "keys", learner.network_as(AdaptingNetwork).keys)
        self._show_memory(learner, task + 1)

    def _show_memory(self, learner: Learner, tasks_trained: int) -> None:
        network = learner.network_as(AdaptingNetwork)
        if not self.state.examples:
            network.remembered = None
            return
        rows = {name: value.to(learner.device) for name, value in learner.rows(self.state.examples).items()}
        class_mask = learner.contrast_mask(rows["tasks"])
        network.remembered = ShownMemory(rows, self.state.tensors["keys"].to(learner.device), class_mask, tasks_trained)
