"""Pre-scaling: a head that weighs tokens class by class, probed before everything is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from regard.continual import method
from regard.continual.method import Method
from regard.continual.training_phase import TrainingPhase
from regard.errors import check_choice

if TYPE_CHECKING:
    from regard.continual.learner import Learner

Scaling = Literal["full", "uniform", "sink"]
Common = Literal["list", "frequent"]


@dataclass(frozen=True, kw_only=True)
class PreScaleConfig(method.MethodConfig):
    """`scaling`: which tokens are weighed, see `regard.models.heads.PreScalingHead`.

    `common`: what counts as a common token for the scaling `sink`: a `list` (special tokens and punctuation), or those
    that are `frequent`, in at least `share` of the first task's training texts.
    """

    scaling: Scaling = "full"
    common: Common = "list"
    share: float = 0.5

    def __post_init__(self) -> None:
        """Check the choices."""
        for name, allowed in (("scaling", get_args(Scaling)), ("common", get_args(Common))):
            check_choice(name, getattr(self, name), allowed)
        method.check_number("share", self.share, least=0, most=1)


class PreScale(Method):
    """Pre-scaling (arXiv 2410.05648): probe, then fine-tune, with a head that scales tokens (see its docstring).

    The key map of the head is zero before the first task and is carried on from one to the next, like its vectors.
    """

    Config = PreScaleConfig

    @property
    def head(self) -> Scaling:
        """The head that scales as the settings say."""
        scaling: Scaling = self.config.scaling
        return scaling

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        """First the head, then everything."""
        return learner.probing(), learner.fine_tuning()
