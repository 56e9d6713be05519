"""Configuration of a training run: all that its result depends on, and how it is saved."""

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
"""Fields that may differ when a run is resumed: they do not change results, except for rounding."""

_CHOICES = {"lr_scheduler_type": get_args(ScheduleName), "decay": get_args(Decay), "precision": get_args(Precision)}
_INTEGERS = {
    "max_steps": 1,
    "batch_size": 1,
    "micro_batch_size": 1,
    "warmup_steps": 0,
    "seed": 0,
    "save_steps": 1,
    "save_total_limit": 1,
    "logging_steps": 1,
}
"""Integer fields and their minimum."""
_OPTIONAL = ("micro_batch_size", "save_steps", "max_grad_norm")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Configuration of training with AdamW (arXiv 1711.05101).

    Args:
        max_steps: Number of updates.
        batch_size: Rows of an update, over all processes.
        micro_batch_size: Maximum rows of a forward pass; None for all rows of a process.
        learning_rate: Peak learning rate.
        lr_scheduler_type: See `regard.training.schedule.learning_rate`.
        warmup_steps: Steps of linear warm-up.
        final_lr_ratio: Learning rate of the last update over the peak.
        weight_decay: Decoupled weight decay.
        decay: Parameters with weight decay: "all", or "matrices" for those of two dimensions or more.
        betas: Betas of AdamW.
        adam_epsilon: Epsilon of AdamW.
        max_grad_norm: Norm to which gradients are clipped; None for no clipping.
        precision: "bfloat16" computes under autocast; weights and optimizer stay in float32.
        compile: Compile the model.
        seed: Seed of dropout.
        save_steps: Steps between checkpoints; None for one at the end.
        save_total_limit: Number of checkpoints that are kept.
        logging_steps: Steps between rows of the history.
        trackers: Trackers of Accelerate.
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
        """Check all fields."""
        for name, min_value in _INTEGERS.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                check_int(name, getattr(self, name), least=min_value)
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
        description = " and ".join(f"{kind} {bound:g}" for kind, bound in bounds.items() if bound is not None)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_inside = is_number and (
            (least is None or value >= least)
            and (above is None or value > above)
            and (most is None or value <= most)
            and (below is None or value < below)
            and abs(value) != float("inf")
        )
        if not is_inside:
            raise UserError(f"{name}: expected a number {description}, got {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as JSON has them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrainingConfig:
        """Make a configuration from the fields of `to_dict`."""
        unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise UserError(f"plan: expected the fields of a TrainingConfig, got {', '.join(unknown)} as well")
        return cls(**fields)

    def check_resumes(self, saved: Mapping[str, Any], step: int) -> None:
        """Check that a run with a saved configuration, now at `step`, can be resumed with this one.

        The fields of `FREE` may differ. `max_steps` may grow with a constant learning rate; with other schedules it
        would change the rates of past steps.
        """
        for name, current in self.to_dict().items():
            previous = saved.get(name)
            is_extended = name == "max_steps" and self.lr_scheduler_type == "constant" and self.max_steps >= step
            if current != previous and name not in FREE and not is_extended:
                raise UserError(
                    f"{name}: the run in this folder has {previous!r}, got {current!r}; to resume, expected the same "
                    f"(only {', '.join(FREE)} may differ, and max_steps if the rate is constant and they are not past)"
                )
