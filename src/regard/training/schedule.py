"""The learning rate of each step, and the optimiser that it is for."""

from __future__ import annotations

import math

import torch
from torch import nn

from regard.training.plan import Plan

_FUSED = ("cpu", "cuda", "mps", "xpu")
"""Devices on which PyTorch has a fused AdamW."""


def learning_rate(plan: Plan, step: int) -> float:
    """The rate of update number `step`, counted from 1: a function of the plan and the step alone.

    It grows linearly to the peak over the first `warmup_steps` updates; then it is constant, or falls to `final_rate`
    times the peak, which it has with the last update: along half a cosine (arXiv 1608.03983, without restarts), or in
    a straight line.
    """
    if step <= plan.warmup_steps:
        return plan.learning_rate * step / plan.warmup_steps
    if plan.schedule == "constant":
        return plan.learning_rate
    passed = (step - plan.warmup_steps) / (plan.steps - plan.warmup_steps)
    passed = min(passed, 1.0)
    share = 1 - passed if plan.schedule == "linear" else (1 + math.cos(math.pi * passed)) / 2
    return plan.learning_rate * (plan.final_rate + (1 - plan.final_rate) * share)


def adamw(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    """AdamW over the parameters that require gradients, fused where PyTorch has that for their devices."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [one for one in trained if plan.decay == "all" or one.ndim >= 2]
    others = [one for one in trained if plan.decay != "all" and one.ndim < 2]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decayed, plan.weight_decay), (others, 0.0))
        if parameters
    ]
    fused = all(parameter.device.type in _FUSED for parameter in trained)
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=plan.betas, eps=plan.adam_epsilon, fused=fused)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group of the optimiser this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
