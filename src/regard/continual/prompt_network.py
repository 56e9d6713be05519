"""A model with soft prompts, an adapter of them a task: what methods that train prompts train."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.adapters.prompt_pool import PromptAdapterPool, check_prompt_fits
from regard.continual import method
from regard.continual.adapter_network import FrozenModelNetwork
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


class PromptNetwork(FrozenModelNetwork):
    """Soft prompts; which of them stand before a row is for the method (`make_prefix`)."""

    no_lora_reason = "beside soft prompts, which leave the model as it is"
    pool: PromptAdapterPool

    def make_pool(self, classifier: Classifier, config: Any, seed: int) -> PromptAdapterPool:
        options = {name: getattr(config, name) for name in ("num_virtual_tokens", "encoder_hidden_size", "residual")}
        return PromptAdapterPool(classifier.encoder, **options, seed=seed)

    def make_prefix(self, rows: dict[str, Tensor]) -> PromptPrefix | None:
        """Return what stands before rows; None where there is nothing yet."""
        raise NotImplementedError

    def use_adapters(self, rows: dict[str, Tensor]) -> AbstractContextManager[None]:
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
