"""The learning rate of each step, and the optimiser that it is for."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from regard.training.plan import TrainingConfig

_FUSED = ("cpu", "cuda", "mps", "xpu")
"""Devices on which PyTorch has a fused AdamW."""


def learning_rate(plan: TrainingConfig, step: int) -> float:
    """The rate of update number `step`, counted from 1: a function of the plan and the step alone.

    It grows linearly to the peak over the first `warmup_steps` updates; then it is constant, or falls to
    `final_lr_ratio` times the peak, which it has with the last update: along half a cosine (arXiv 1608.03983, without
    restarts), or in a straight line.
    """
    if step <= plan.warmup_steps:
        return plan.learning_rate * step / plan.warmup_steps
    if plan.lr_scheduler_type == "constant":
        return plan.learning_rate
    passed = (step - plan.warmup_steps) / (plan.max_steps - plan.warmup_steps)
    passed = min(passed, 1.0)
    share = 1 - passed if plan.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * passed)) / 2
    return plan.learning_rate * (plan.final_lr_ratio + (1 - plan.final_lr_ratio) * share)


def adamw(model: nn.Module, plan: TrainingConfig, times: Mapping[str, float] | None = None) -> torch.optim.AdamW:
    """AdamW over the parameters that require gradients, fused where PyTorch has that for their devices.

    `times`: by how much the rate of a parameter of that name is multiplied; 1 for all others.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for decays in (True, False):
        for name, parameter in trained.items():
            if (plan.decay == "all" or parameter.ndim >= 2) is decays:
                key = (plan.weight_decay if decays else 0.0, (times or {}).get(name, 1.0))
                groups.setdefault(key, []).append(parameter)
    made = [{"params": those, "weight_decay": decay, "times": each} for (decay, each), those in groups.items()]
    fused = all(parameter.device.type in _FUSED for parameter in trained.values())
    return torch.optim.AdamW(made, lr=plan.learning_rate, betas=plan.betas, eps=plan.adam_epsilon, fused=fused)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group of the optimiser this learning rate, multiplied by what its group says."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["times"]
