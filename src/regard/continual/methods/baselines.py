"""Fine-tuning and probing task after task, a model for each task, and all at once: what others are held against."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from regard.continual import method
from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.training_phase import Batches, MethodLearningRate, TrainingBudget, TrainingPhase, probing_rate


class Finetune(Method):
    """Everything is trained on each task as it comes, from where the last one left it."""

    supports_text = True


class Probe(Method):
    """The head alone is trained, on hidden states that no task changes (arXiv 2410.05648, table 2)."""

    allows_label_head = False
    probes = True

    def own_learning_rate(self, budget: TrainingBudget) -> MethodLearningRate:
        return probing_rate(budget)

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        return (learner.probing_phase(),)


class ProbeFinetune(Method):
    """The head alone, then everything (arXiv 2202.10054; the baseline of arXiv 2410.05648)."""

    allows_label_head = False
    probes = True

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        return learner.probing_phase(), learner.fine_tuning_phase()


class Separate(Method):
    """Fine-tuning that begins anew with each task, which is scored by its own model; classes are never told apart."""

    loss_classes = "task"
    evaluation_scope = "own"
    incremental = False
    supports_text = True

    def before_task(self, learner: Learner, task: int) -> None:
        learner.network.load_state_dict(learner.start)


class Joint(Method):
    """Fine-tuning on all tasks' rows together, each over its own task's classes (with a label-text head over all)."""

    evaluation_scope = "end"
    supports_text = True

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        return (learner.fine_tuning_phase(respects_max_steps=False),) if task == len(learner.stream) - 1 else ()

    def batches(self, learner: Learner, task: int, phase: TrainingPhase) -> Batches:
        return learner.epoch_batches([item for number in range(task + 1) for item in learner.items(number)], phase)


Scaling = Literal["full", "uniform", "sink"]
Common = Literal["list", "frequent"]
_SINK = method.RequiredSetting("scaling", ("sink",))


@dataclass(frozen=True, kw_only=True)
class PreScaleConfig(method.MethodConfig):
    """Settings of PreScale.

    Args:
        scaling: Which tokens are scaled, see `regard.models.heads.PreScalingHead`.
        common_tokens: Common tokens for the scaling `sink`: a "list" (special tokens, punctuation), or the "frequent"
            ones.
        min_document_frequency: Share of the first task's training texts that a frequent token is in.
    """

    conditions: ClassVar[Mapping[str, tuple[method.RequiredSetting, ...]]] = {
        "common_tokens": (_SINK,),
        "min_document_frequency": (_SINK, method.RequiredSetting("common_tokens", ("frequent",))),
    }
    scaling: Scaling = "full"
    common_tokens: Common = "list"
    min_document_frequency: method.Fraction = 0.5


class PreScale(ProbeFinetune):
    """Pre-scaling (arXiv 2410.05648): probe, then fine-tune, with a head that scales tokens (see its docstring)."""

    Config = PreScaleConfig

    @property
    def head(self) -> Scaling:
        return self.config.scaling
