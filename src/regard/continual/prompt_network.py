"""A model with soft prompts, an adapter of them a task: what methods that train prompts train."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from regard.adapters.prompt_pool import PromptAdapterPool, check_prompt_fits
from regard.continual import method
from regard.continual.network import Network
from regard.errors import UserError
from regard.models.classifier import Classifier

if TYPE_CHECKING:
    from regard.continual.learner import Learner


@dataclass(frozen=True, kw_only=True)
class PromptConfig(method.MethodConfig):
    """Settings of soft prompts.

    Args:
        num_virtual_tokens: Tokens of a prompt.
        encoder_hidden_size: Hidden size of the MLP that reparametrizes a prompt in training; 0 for none.
        residual: Add the prompt to the MLP's output.
        learning_rate: Used in place of the budget's, which is meant for models.
    """

    num_virtual_tokens: method.PositiveInt = 10
    encoder_hidden_size: method.NonNegativeInt = 800
    residual: bool = True
    learning_rate: method.NonNegative = 0.3


class PromptPrefix(NamedTuple):
    """What stands before the texts of a batch: `prompts` (row or 1, token, width), and which are `real`, None: all."""

    prompts: Tensor
    real: Tensor | None = None


class PromptNetwork(Network):
    """A frozen model with soft prompts, and a head that is trained where it has anything to train.

    `count` adapters are in use. Which of them stand before a row is for the method: `before`.
    """

    needs_wrapper: ClassVar[bool] = True
    count: Tensor

    def __init__(self, classifier: Classifier, *, tasks: int, config: Any, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        if classifier.config.lora:
            raise UserError("lora: expected none beside soft prompts, which leave the model as it is")
        options = {
            "num_virtual_tokens": config.num_virtual_tokens,
            "encoder_hidden_size": config.encoder_hidden_size,
            "residual": config.residual,
        }
        self.pool = PromptAdapterPool(classifier.encoder, **options, seed=seed)
        self.pool.reserve(self.count_adapters(tasks))
        self.register_buffer("count", torch.tensor(0))

    def count_adapters(self, tasks: int) -> int:
        """Return how many adapters so many tasks need."""
        return tasks

    def start_adapter(self, adapter: int) -> None:
        """Train this adapter from now on, and no other; it and those before it are in use."""
        self.pool.set_trainable(adapter)
        self.count.fill_(adapter + 1)

    def make_prefix(self, rows: dict[str, Tensor]) -> PromptPrefix | None:
        """Return what stands before rows; None where there is nothing yet."""
        raise NotImplementedError

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the logits, with the prompts before the texts."""
        with self._prompted(rows):
            return super().forward(rows)

    def generate(self, rows: dict[str, Tensor], new_tokens: int) -> Tensor:
        """Return the answers, with the prompts before what they answer."""
        with self._prompted(rows):
            return super().generate(rows, new_tokens)

    def _prompted(self, rows: dict[str, Tensor]) -> AbstractContextManager[None]:
        prefix = self.make_prefix(rows)
        return self.pool.use_weights(None) if prefix is None else self.pool.prepend(prefix.prompts, prefix.real)


def check_prompt_room(learner: Learner, prompts: int) -> None:
    """Raise UserError if a text of the stream has no room behind so many tokens of prompts."""
    pool: PromptAdapterPool = learner.network.pool  # type: ignore[assignment]  # of a network with prompts
    longest = max(int(encoded.attention_mask.sum(1).max()) for encoded in learner.encoded.values())
    if pool.limit is not None and longest + prompts > pool.limit:
        raise check_prompt_fits(longest, pool.limit - prompts, prompts)


# -- class vectors ----------------------------------------------------------------------------------------


def copy_class_vectors(learner: Learner) -> dict[str, Tensor]:
    """Return copies of what the head has of each class, by name; nothing where there is no head, or none to train."""
    return {name: parameter.detach().clone() for name, parameter in _class_parameters(learner)}


@torch.no_grad()
def restore_class_vectors(learner: Learner, vectors: Mapping[str, Tensor], task: int) -> None:
    """Give all classes but those of a task what the head had of them: weight decay has moved them as well."""
    other_classes = ~learner.task_classes[task]
    for name, parameter in _class_parameters(learner):
        rows = other_classes.to(parameter.device)
        parameter[rows] = vectors[name].to(parameter)[rows]


def _class_parameters(learner: Learner) -> list[tuple[str, nn.Parameter]]:
    head = getattr(learner.network.classifier, "head", None)
    parameters = head.named_parameters() if isinstance(head, nn.Module) else ()
    return [(name, parameter) for name, parameter in parameters if len(parameter) == learner.task_classes.shape[1]]
