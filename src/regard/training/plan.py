"""Configuration of a training run, and the optimizer and learning rates that it states."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from regard.errors import UserError
from regard.runs.config import Config, config_field

FREE = ("micro_batch_size", "save_steps", "save_total_limit", "logging_steps", "trackers")
"""Fields that may differ when a run is resumed: they do not change results, except for rounding."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """Configuration of training with AdamW (arXiv 1711.05101)."""

    command: ClassVar[str] = "plan"

    max_steps: int = config_field(dataclasses.MISSING, "Number of updates.")
    batch_size: int = config_field(dataclasses.MISSING, "Rows of an update, over all processes.")
    micro_batch_size: int | None = config_field(None, "Maximum rows of a forward pass; None for all of a process.")
    learning_rate: float = config_field(1e-3, "Peak learning rate.", exclusive_minimum=0)
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = config_field(
        "cosine", "See `regard.training.plan.learning_rate`."
    )
    warmup_steps: int = config_field(0, "Steps of linear warm-up.", minimum=0)
    final_lr_ratio: float = config_field(0.1, "Rate of the last update over the peak.", minimum=0, maximum=1)
    weight_decay: float = config_field(0.1, "Decoupled weight decay.", minimum=0)
    decay: Literal["all", "matrices"] = config_field(
        "all", "Parameters with weight decay; `matrices` have two dimensions or more."
    )
    betas: tuple[float, float] = config_field((0.9, 0.95), "Betas of AdamW.", minimum=0, exclusive_maximum=1)
    adam_epsilon: float = config_field(1e-8, "Epsilon of AdamW.", exclusive_minimum=0)
    max_grad_norm: float | None = config_field(1.0, "Norm to which gradients are clipped.", exclusive_minimum=0)
    precision: Literal["float32", "bfloat16"] = config_field(
        "float32", "`bfloat16` is autocast; weights and optimizer stay in float32."
    )
    compile: bool = config_field(False, "Compile the model.")
    seed: int = config_field(0, "Seed of dropout.", minimum=0)
    save_steps: int | None = config_field(None, "Steps between checkpoints; None for one at the end.")
    save_total_limit: int = config_field(2, "Number of checkpoints that are kept.")
    logging_steps: int = config_field(10, "Steps between rows of the history.")
    trackers: tuple[str, ...] = config_field((), "Trackers of Accelerate.")

    @classmethod
    def of(cls, config: Config, **values: Any) -> "TrainingConfig":
        """Return the plan of a run whose config has fields of these names; `values` are those of other fields."""
        names = set(cls.field_names()) & set(config.field_names())
        return cls(**{name: getattr(config, name) for name in names} | values)

    def check(self) -> None:
        if self.warmup_steps > self.max_steps:
            raise UserError(f"warmup-steps: expected at most max-steps ({self.max_steps}), got {self.warmup_steps}")

    def check_resumes(self, saved: Mapping[str, Any], step: int) -> None:
        """Check that a run with a saved configuration, now at `step`, can be resumed with this one.

        The fields of `FREE` may differ. `max_steps` may change if the learning rate is constant.
        """
        for name, current in self.to_dict().items():
            previous = saved.get(name)
            is_extended = name == "max_steps" and self.lr_scheduler_type == "constant" and self.max_steps >= step
            if current != previous and name not in FREE and not is_extended:
                difference = f"the run in this folder has {previous!r}, got {current!r}; to resume, expected the same"
                free = f"only {', '.join(FREE)} may differ, and max_steps if the rate is constant and they are not past"
                raise UserError(f"{name}: {difference} ({free})")


_FUSED = ("cpu", "cuda", "mps", "xpu")  # devices on which PyTorch has a fused AdamW


def learning_rate(plan: TrainingConfig, step: int) -> float:
    """Return the learning rate of update `step`, counted from 1.

    The rate rises linearly to the peak over `warmup_steps` updates. Then it is constant, or falls to `final_lr_ratio`
    times the peak at the last update: linearly, or along half a cosine (arXiv 1608.03983, without restarts).
    """
    if step <= plan.warmup_steps:
        return plan.learning_rate * step / plan.warmup_steps
    if plan.lr_scheduler_type == "constant":
        return plan.learning_rate
    progress = min((step - plan.warmup_steps) / (plan.max_steps - plan.warmup_steps), 1.0)
    factor = 1 - progress if plan.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return plan.learning_rate * (plan.final_lr_ratio + (1 - plan.final_lr_ratio) * factor)


def adamw(model: nn.Module, plan: TrainingConfig, times: Mapping[str, float] | None = None) -> torch.optim.AdamW:
    """Make AdamW over the parameters that require gradients, fused if all devices support it.

    `times` multiplies the learning rates of parameters by name; others have 1.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if unknown := sorted(set(times or {}) - {name for name, _ in model.named_parameters()}):
        raise UserError(f"times: expected names of parameters of the model, got {unknown[0]!r}")
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for decays in (True, False):
        for name, parameter in trained.items():
            if (plan.decay == "all" or parameter.ndim >= 2) is decays:
                key = (plan.weight_decay if decays else 0.0, (times or {}).get(name, 1.0))
                groups.setdefault(key, []).append(parameter)
    param_groups = [
        {"params": parameters, "weight_decay": decay, "times": factor} for (decay, factor), parameters in groups.items()
    ]
    fused = all(parameter.device.type in _FUSED for parameter in trained.values())
    return torch.optim.AdamW(param_groups, lr=plan.learning_rate, betas=plan.betas, eps=plan.adam_epsilon, fused=fused)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups, times the multiplier of each."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["times"]
