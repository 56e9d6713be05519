"""Learning rate schedule and optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from regard.training.plan import TrainingConfig

_FUSED = ("cpu", "cuda", "mps", "xpu")
"""Devices on which PyTorch has a fused AdamW."""


def learning_rate(plan: TrainingConfig, step: int) -> float:
    """Return the learning rate of update `step`, counted from 1.

    The rate rises linearly to the peak over `warmup_steps` updates. Then it is constant, or falls to `final_lr_ratio`
    times the peak at the last update: linearly, or along half a cosine (arXiv 1608.03983, without restarts).
    """
    if step <= plan.warmup_steps:
        return plan.learning_rate * step / plan.warmup_steps
    if plan.lr_scheduler_type == "constant":
        return plan.learning_rate
    progress = (step - plan.warmup_steps) / (plan.max_steps - plan.warmup_steps)
    progress = min(progress, 1.0)
    factor = 1 - progress if plan.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return plan.learning_rate * (plan.final_lr_ratio + (1 - plan.final_lr_ratio) * factor)


def adamw(model: nn.Module, plan: TrainingConfig, times: Mapping[str, float] | None = None) -> torch.optim.AdamW:
    """Make AdamW over the parameters that require gradients, fused if all devices support it.

    `times` multiplies the learning rates of parameters by name; others have 1.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for decays in (True, False):
        for name, parameter in trained.items():
            if (plan.decay == "all" or parameter.ndim >= 2) is decays:
                key = (plan.weight_decay if decays else 0.0, (times or {}).get(name, 1.0))
                groups.setdefault(key, []).append(parameter)
    parameter_groups = [
        {"params": parameters, "weight_decay": decay, "times": multiplier}
        for (decay, multiplier), parameters in groups.items()
    ]
    fused = all(parameter.device.type in _FUSED for parameter in trained.values())
    return torch.optim.AdamW(
        parameter_groups, lr=plan.learning_rate, betas=plan.betas, eps=plan.adam_epsilon, fused=fused
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups, times the multiplier of each."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["times"]
