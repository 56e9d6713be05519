"""Weights held where old tasks depend on them (EWC), or answers held as they were for old tasks (LwF)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from regard.continual import method
from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.training_phase import ExampleRef, TrainingPhase
from regard.training.placement import Rows

Labels = Literal["model", "true"]
FISHER, CENTRE, CONSTANT = "fisher.", "centre.", "constant"


@dataclass(frozen=True, kw_only=True)
class EwcConfig(method.MethodConfig):
    """Settings of EWC.

    Args:
        ewc_lambda: λ of the penalty; the paper gives 400, for games.
        fisher_samples: Training rows of a task that estimate its Fisher information; all where it has fewer.
        fisher_labels: "model" for labels drawn from the model's predictions (the Fisher information), or "true".
        online: Keep one penalty around the last weights, with earlier information weighted by `decay_factor`.
    """

    conditions: ClassVar[Mapping[str, tuple[method.RequiredSetting, ...]]] = {
        "decay_factor": (method.RequiredSetting("online", ("true",)),)
    }
    ewc_lambda: method.NonNegative = 400.0
    fisher_samples: method.PositiveInt = 256
    fisher_labels: Labels = "model"
    online: bool = False
    decay_factor: method.Fraction = 0.95


class Ewc(method.Method):
    """Elastic weight consolidation (arXiv 1612.00796, equation 3): (λ/2) Σ_t Σ_i F_ti (θ_i − θ*_ti)² beside the loss.

    F_t is the diagonal of task t's Fisher information at θ*_t, where its training ended. With A = Σ_t F_t and c = Σ_t
    F_t θ*_t / A the sum is A (θ − c)² and a constant: so two tensors for each weight are kept. The `online` variant
    (arXiv 1805.06370, section 4) has A = γ A + F_t and c = θ*_t.
    """

    can_continue = False
    Config = EwcConfig
    supports_text = True

    def before_task(self, learner: Learner, task: int) -> None:
        self.state.to(learner.device)

    def penalties(self, learner: Learner) -> Iterable[Tensor]:
        return [self.penalty(learner.network)] if self.state.tensors else []

    def penalty(self, network: nn.Module) -> Tensor:
        """(λ/2) Σ_t Σ_i F_ti (θ_i − θ*_ti)², over the tasks learnt so far; `network` is the one that nothing wraps."""
        tensors = self.state.tensors
        terms = [
            (tensors[FISHER + name] * (parameter - tensors[CENTRE + name]).square()).sum()
            for name, parameter in _trainable_parameters(network).items()
        ]
        return self.config.ewc_lambda / 2 * (torch.stack(terms).sum() + self.state.values[CONSTANT])

    def after_task(self, learner: Learner, task: int) -> None:
        items, max_samples = learner.items(task), self.config.fisher_samples
        if len(items) > max_samples:
            random = np.random.default_rng(learner.seed_for("memory", task))
            items = [items[index] for index in sorted(random.choice(len(items), max_samples, replace=False))]
        seed = learner.seed_for("labels", task)
        information = fisher_information(learner, items, labels=self.config.fisher_labels, seed=seed)
        self.remember(information, _trainable_parameters(learner.network))

    def remember(self, information: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        tensors, constant = self.state.tensors, float(self.state.values.get(CONSTANT, 0.0))
        for name, value in information.items():
            previous, current = tensors.get(FISHER + name), weights[name].detach().clone()
            if previous is None:
                tensors[FISHER + name], tensors[CENTRE + name] = value.clone(), current
            elif self.config.online:
                tensors[FISHER + name], tensors[CENTRE + name] = self.config.decay_factor * previous + value, current
            else:
                total = previous + value
                fraction = torch.where(total > 0, value / total, 1.0)
                shift = current - tensors[CENTRE + name]
                constant += float((previous * fraction * shift.square()).sum(dtype=torch.float64))
                tensors[FISHER + name], tensors[CENTRE + name] = total, tensors[CENTRE + name] + fraction * shift
        self.state.values[CONSTANT] = constant


def fisher_information(
    learner: Learner, items: Sequence[ExampleRef], *, labels: Labels, seed: int
) -> dict[str, Tensor]:
    """Return the Fisher information's diagonal by parameter: the mean squared gradient of each log p(label | text)."""
    parameters, generator = _trainable_parameters(learner.network), torch.Generator().manual_seed(seed)
    information = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in parameters.items()}
    with learner.evaluation_mode() as network, torch.enable_grad():
        for rows in learner.iterate_batches(items, size=1):
            logits = network(rows)
            if labels == "model":
                rows = {**rows, "labels": sample_labels(learner.mask_logits(logits, rows["tasks"]), generator)}
            loss = learner.cross_entropy(logits, rows)
            gradients = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True, materialize_grads=True)
            for name, gradient in zip(parameters, gradients, strict=True):
                information[name].addcmul_(gradient, gradient)
    return {name: value / len(items) for name, value in information.items()}


def sample_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Return labels drawn with the probabilities of the logits: (row,) of (row, class), (row, token) of words."""
    probabilities = logits.detach().double().softmax(-1).cpu().flatten(0, -2)
    return torch.multinomial(probabilities, 1, generator=generator).view(logits.shape[:-1]).to(logits.device)


def _trainable_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


@dataclass(frozen=True, kw_only=True)
class LwfConfig(method.MethodConfig):
    """Settings of LwF.

    Args:
        temperature: T, which logits are divided by before they are compared.
        distillation_weight: λ_o, weight of the losses of earlier tasks.
        warmup_head: Train the head of a new task alone first, as in the paper; off, to tell the method from probing.
    """

    temperature: Annotated[float, method.Range(1e-6)] = 2.0
    distillation_weight: method.NonNegative = 1.0
    warmup_head: bool = False


class Lwf(method.Method):
    """Learning without forgetting (arXiv 1606.09282, equations 1 to 5).

    Before a task the network, in evaluation, answers its training texts over the classes of each old task. In training
    the cross-entropy between these answers and the present ones, both at temperature T, is added for each old task:
    −Σ_c y'_c log ŷ'_c with y' = softmax(logits / T). A resumed run makes the answers anew, from the same weights.
    """

    Config = LwfConfig

    def before_task(self, learner: Learner, task: int) -> None:
        if not task:
            return
        with learner.evaluation_mode() as network, torch.no_grad():
            self.answers = torch.cat([network(rows).float() for rows in learner.iterate_batches(learner.items(task))])

    @property
    def probes(self) -> bool:
        return bool(self.config.warmup_head)

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        warming = (learner.probing_phase(name="warm-up"),) if self.config.warmup_head and task else ()
        return (*warming, learner.fine_tuning_phase())

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        logits = network(rows)
        loss = learner.cross_entropy(logits, rows)
        is_warmup = not any(parameter.requires_grad for parameter in learner.network.classifier.encoder.parameters())
        if not learner.task or is_warmup:  # in the warm-up the vectors of old classes are to get no gradient
            return loss
        now, earlier = logits[:, : learner.task_classes.shape[1]], self.answers[rows["rows"]]
        old_losses = sum(
            distillation_losses(now[:, task_classes], earlier[:, task_classes], self.config.temperature)
            for task_classes in learner.task_classes[: learner.task].to(logits.device)
        )
        return loss + self.config.distillation_weight * (old_losses * (rows["labels"] != IGNORE_INDEX)).sum()


def distillation_losses(logits: Tensor, earlier: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy (row,) of answers with earlier ones, of logits (row, class), at a temperature."""
    return -((earlier / temperature).softmax(-1) * (logits.float() / temperature).log_softmax(-1)).sum(-1)
