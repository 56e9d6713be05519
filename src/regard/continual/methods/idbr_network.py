"""What IDBR trains: an encoder whose state is read in two spaces, one of all tasks and one of each."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.continual.network import Network
from regard.errors import UserError
from regard.models.classifier import Classifier
from regard.models.heads import LinearHead, Pooling, pool_states

ORDERS = 2
"""Two halves of a text stand as they were written, or exchanged."""


class IdbrOutputs(NamedTuple):
    """What the network says of rows: logits (row, class), of tasks (row, task), of orders (row, 2), and both spaces."""

    logits: Tensor
    tasks: Tensor
    orders: Tensor
    spaces: Tensor


class SpacesHead(nn.Module):
    """A generic and a specific space of the state, a linear map and tanh each, and a layer that reads classes."""

    def __init__(self, width: int, classes: int, *, size: int, pooling: Pooling) -> None:
        super().__init__()
        self.pooling: Pooling = pooling
        self.generic = nn.Sequential(nn.Linear(width, size), nn.Tanh())
        self.specific = nn.Sequential(nn.Linear(width, size), nn.Tanh())
        self.vectors = nn.Parameter(torch.empty(classes, 2 * size))
        self.bias = nn.Parameter(torch.zeros(classes))
        nn.init.uniform_(self.vectors, -1 / math.sqrt(2 * size), 1 / math.sqrt(2 * size))

    def forward(self, states: Tensor, mask: Tensor, common: Tensor | None = None) -> Tensor:
        """Return the logits (row, class) of states (row, token, width), of which `mask` (row, token) are no padding."""
        return self.classes(self.spaces(pool_states(states, mask, self.pooling)))

    def classes(self, spaces: Tensor) -> Tensor:
        return spaces @ self.vectors.T + self.bias

    def spaces(self, states: Tensor) -> Tensor:
        """Return the generic space of states (row, width) and, behind it, the specific one: (row, 2 × size)."""
        return torch.cat([self.generic(states), self.specific(states)], 1)


class IdbrNetwork(Network):
    """A classifier with a `SpacesHead`, from whose generic space it predicts the order of halves, else the task."""

    needs_wrapper = True

    def __init__(self, classifier: Classifier, *, tasks: int, config: Any, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        linear_head, size = classifier.head, config.hidden_size
        if not isinstance(linear_head, LinearHead):
            raise UserError(f"head: expected linear with idbr, whose own it becomes, got {classifier.config.head}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = SpacesHead(
                linear_head.vectors.shape[1], len(classifier.config.classes), size=size, pooling=linear_head.pooling
            )
            self.tasks, self.orders = nn.Linear(size, tasks), nn.Linear(size, ORDERS)
        for module in (head, self.tasks, self.orders):
            module.to(linear_head.vectors)
        classifier.head = head
        self.size = size

    @property
    def head(self) -> SpacesHead:
        return cast(SpacesHead, self.classifier.head)

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the logits (row, class) of rows; of rows with `halves` everything, for `parts` to take apart."""
        if "halves" not in rows:
            return super().forward(rows)
        spaces = self.spaces(rows)
        logits = self.head.classes(spaces)
        generic, specific = spaces.split(self.size, 1)
        return torch.cat([logits, self.tasks(specific), self.orders(generic), spaces], 1)

    def spaces(self, rows: dict[str, Tensor]) -> Tensor:
        return self.head.spaces(self.pooled_states(rows))

    def split_outputs(self, outputs: Tensor) -> IdbrOutputs:
        sizes = [len(self.head.bias), self.tasks.out_features, ORDERS, 2 * self.size]
        return IdbrOutputs(*outputs.float().split(sizes, 1))
