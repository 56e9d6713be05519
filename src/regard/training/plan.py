"""What a training run is to do: every number that its result depends on, and how it is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from regard.errors import UserError, check_choice, check_int

ScheduleName = Literal["constant", "cosine", "linear"]
Decay = Literal["all", "matrices"]
Precision = Literal["float32", "bfloat16"]

FREE = ("micro_batch_size", "save_steps", "save_total_limit", "logging_steps", "trackers")
"""Fields that may differ when a run is resumed: what they change is not what is computed, but for rounding."""

_CHOICES = {"lr_scheduler_type": get_args(ScheduleName), "decay": get_args(Decay), "precision": get_args(Precision)}
_WHOLE = {
    "max_steps": 1,
    "batch_size": 1,
    "micro_batch_size": 1,
    "warmup_steps": 0,
    "seed": 0,
    "save_steps": 1,
    "save_total_limit": 1,
    "logging_steps": 1,
}
"""Whole numbers, and the least that each may be."""
_OPTIONAL = ("micro_batch_size", "save_steps", "max_grad_norm")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained: AdamW (arXiv 1711.05101) over `max_steps` batches of `batch_size` rows.

    `batch_size`: rows of a step, over all processes; `micro_batch_size`: rows of one forward, None for the whole share
    of a process. `learning_rate`: the peak; `lr_scheduler_type`, `warmup_steps`, `final_lr_ratio`: see
    `regard.training.schedule.learning_rate`. `decay`: which parameters `weight_decay` is for, all of them or those of
    two dimensions and more. `max_grad_norm`: largest norm of the gradient, None for any. `precision`: bfloat16 computes
    under autocast, with weights and optimiser in float32. `save_steps`: between checkpoints, None for the end alone;
    `save_total_limit`: how many checkpoints stay. `trackers`: names that Accelerate knows.
    """

    max_steps: int
    batch_size: int
    micro_batch_size: int | None = None
    learning_rate: float = 1e-3
    lr_scheduler_type: ScheduleName = "cosine"
    warmup_steps: int = 0
    final_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    decay: Decay = "all"
    betas: tuple[float, float] = (0.9, 0.95)
    adam_epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0
    precision: Precision = "float32"
    compile: bool = False
    seed: int = 0
    save_steps: int | None = None
    save_total_limit: int = 2
    logging_steps: int = 10
    trackers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check each field: a plan that exists can be carried out."""
        for name, least in _WHOLE.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                check_int(name, getattr(self, name), least=least)
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise UserError(f"betas: expected two numbers from 0 to below 1, got {self.betas!r}")
        if not isinstance(self.trackers, (tuple, list)):
            raise UserError(f"trackers: expected a list of names, got {self.trackers!r}")
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "trackers", tuple(self.trackers))
        self._check_range("learning_rate", self.learning_rate, above=0)
        self._check_range("adam_epsilon", self.adam_epsilon, above=0)
        self._check_range("weight_decay", self.weight_decay, least=0)
        self._check_range("final_lr_ratio", self.final_lr_ratio, least=0, most=1)
        for beta in self.betas:
            self._check_range("betas", beta, least=0, below=1)
        if self.max_grad_norm is not None:
            self._check_range("max_grad_norm", self.max_grad_norm, above=0)
        if self.warmup_steps > self.max_steps:
            raise UserError(f"warmup_steps: expected at most max_steps ({self.max_steps}), got {self.warmup_steps}")
        if not isinstance(self.compile, bool):
            raise UserError(f"compile: expected True or False, got {self.compile!r}")

    @staticmethod
    def _check_range(
        name: str,
        value: Any,
        *,
        least: float | None = None,
        above: float | None = None,
        most: float | None = None,
        below: float | None = None,
    ) -> None:
        bounds = {"at least": least, "above": above, "at most": most, "below": below}
        told = " and ".join(f"{kind} {bound:g}" for kind, bound in bounds.items() if bound is not None)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        inside = number and (
            (least is None or value >= least)
            and (above is None or value > above)
            and (most is None or value <= most)
            and (below is None or value < below)
            and abs(value) != float("inf")
        )
        if not inside:
            raise UserError(f"{name}: expected a number {told}, got {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON has them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrainingConfig:
        """The plan with these fields."""
        unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise UserError(f"plan: expected the fields of a TrainingConfig, got {', '.join(unknown)} as well")
        return cls(**fields)

    def check_resumes(self, saved: Mapping[str, Any], step: int) -> None:
        """Nothing, or a UserError: a run of the saved plan, now at this step, cannot go on with this plan.

        The fields of `FREE` may differ. More steps are allowed where the schedule is constant: under any other they
        would change the rates of the steps that were taken.
        """
        for name, now in self.to_dict().items():
            then = saved.get(name)
            grows = name == "max_steps" and self.lr_scheduler_type == "constant" and self.max_steps >= step
            if now != then and name not in FREE and not grows:
                raise UserError(
                    f"{name}: the run in this folder has {then!r}, got {now!r}; to resume, expected the same "
                    f"(only {', '.join(FREE)} may differ, and max_steps if the rate is constant and they are not past)"
                )
