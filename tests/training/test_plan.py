"""Plans of training: what they refuse, the rates they give, and which may go on where another stopped."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from regard.errors import UserError
from regard.training.plan import FREE, TrainingConfig, adamw, learning_rate, set_rate

PLAN = TrainingConfig(max_steps=100, batch_size=8, learning_rate=0.5, warmup_steps=10)


@pytest.mark.parametrize(
    "field, value, told",
    [
        ("max_steps", 0, "max-steps: expected a whole number of at least 1, got 0"),
        ("max_steps", 10.0, "max-steps: expected a whole number of at least 1, got 10.0"),
        ("batch_size", True, "batch-size: expected a whole number of at least 1, got True"),
        ("micro_batch_size", 0, "micro-batch-size: expected a whole number of at least 1 or none, got 0"),
        ("save_total_limit", None, "save-total-limit: expected a whole number of at least 1, got None"),
        ("save_steps", 0, "save-steps: expected a whole number of at least 1 or none, got 0"),
        ("lr_scheduler_type", "square", "lr-scheduler-type: expected one of constant, cosine, linear, got 'square'"),
        ("precision", "float16", "precision: expected one of float32, bfloat16, got 'float16'"),
        ("decay", "none", "decay: expected one of all, matrices, got 'none'"),
        ("learning_rate", 0, "learning-rate: expected a number over 0, got 0.0"),
        ("learning_rate", float("nan"), "learning-rate: expected a number over 0, got nan"),
        ("learning_rate", float("inf"), "learning-rate: expected a number over 0, got inf"),
        ("weight_decay", -0.1, "weight-decay: expected a number of at least 0, got -0.1"),
        ("final_lr_ratio", 1.5, "final-lr-ratio: expected a number from 0 to 1, got 1.5"),
        ("betas", (0.9, 1.0), "betas: expected 2 numbers of at least 0 and below 1, got 1.0"),
        ("betas", 0.9, "betas: expected 2 numbers of at least 0 and below 1, got 0.9"),
        ("max_grad_norm", 0, "max-grad-norm: expected a number over 0 or none, got 0.0"),
        ("compile", "yes", "compile: expected true or false, got 'yes'"),
        ("trackers", [1], "trackers: expected names, got 1"),
        ("trackers", [pd.DataFrame({"text": ["a", "b"]})], "trackers: expected names, got DataFrame"),
        ("trackers", pd.DataFrame({"text": ["a", "b"]}), "trackers: expected names, got DataFrame"),
        ("trackers", Dataset.from_dict({"text": ["a", "b"]}), "trackers: expected names, got Dataset"),
        ("decay", pd.DataFrame({"text": ["a", "b"]}), "decay: expected one of all, matrices, got DataFrame"),
        ("decay", Path("none"), "decay: expected one of all, matrices, got 'none'"),
        ("warmup_steps", 101, "warmup-steps: expected at most max-steps (100), got 101"),
    ],
)
def test_a_plan_that_cannot_be_carried_out(field: str, value: Any, told: str) -> None:
    with pytest.raises(UserError) as raised:
        replace(PLAN, **{field: value})
    assert str(raised.value) == told


def test_a_plan_and_its_fields() -> None:
    plan = replace(PLAN, trackers=[Path("wandb")], betas=[0.8, 0.9])  # type: ignore[arg-type]
    assert TrainingConfig.from_dict(plan.to_dict()) == plan
    assert plan.betas == (0.8, 0.9)
    with pytest.raises(UserError, match="plan: there is no option speed; allowed are max_steps"):
        TrainingConfig.from_dict({**PLAN.to_dict(), "speed": 1})


def test_rates_by_hand() -> None:
    rates = [learning_rate(PLAN, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.05 * step for step in range(1, 11)], rel=1e-12)
    assert rates[54] == pytest.approx((0.5 + 0.05) / 2, rel=1e-12)  # halfway between step 10 and step 100
    assert rates[32] == pytest.approx(0.05 + 0.45 * (1 + math.cos(math.pi * 23 / 90)) / 2, rel=1e-12)
    assert rates[-1] == pytest.approx(0.05, rel=1e-12)
    constant = replace(PLAN, lr_scheduler_type="constant")
    assert [learning_rate(constant, step) for step in (5, 10, 11, 100)] == [0.25, 0.5, 0.5, 0.5]
    assert learning_rate(replace(PLAN, warmup_steps=100), 100) == 0.5
    linear = [
        learning_rate(replace(PLAN, lr_scheduler_type="linear", final_lr_ratio=0.0), step) for step in range(1, 101)
    ]
    assert linear[:10] == rates[:10]
    assert linear[10:] == pytest.approx([0.5 * (100 - step) / 90 for step in range(11, 101)], rel=1e-12)
    assert linear[-1] == 0.0
    assert learning_rate(replace(PLAN, lr_scheduler_type="linear"), 55) == pytest.approx((0.5 + 0.05) / 2, rel=1e-12)


@given(st.integers(1, 60), st.integers(0, 60), st.floats(0, 1), st.sampled_from(["constant", "cosine", "linear"]))
def test_rates_grow_and_then_fall(steps: int, warmup: int, final: float, schedule: Any) -> None:
    warmup = min(warmup, steps)
    plan = TrainingConfig(
        max_steps=steps,
        batch_size=1,
        warmup_steps=warmup,
        final_lr_ratio=final,
        lr_scheduler_type=schedule,
        learning_rate=1,
    )
    rates = [learning_rate(plan, step) for step in range(1, steps + 1)]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[max(warmup - 1, 0) :] == sorted(rates[max(warmup - 1, 0) :], reverse=True)
    assert all(0 <= rate <= 1 for rate in rates)


@pytest.mark.parametrize("decay, of_vectors", [("all", 0.1), ("matrices", 0.0)])
def test_what_decays(decay: Any, of_vectors: float) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2).requires_grad_(False))
    groups = adamw(model, replace(PLAN, decay=decay)).param_groups
    found = {id(one): group["weight_decay"] for group in groups for one in group["params"]}
    vectors = (model[0].bias, *model[1].parameters())
    assert found == {id(model[0].weight): 0.1, **{id(one): of_vectors for one in vectors}}


def test_some_learn_faster_than_others() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = adamw(model, replace(PLAN, decay="matrices"), {"0.weight": 3.0, "1.bias": 0.5})
    set_rate(optimizer, 0.1)
    groups = {id(one): group for group in optimizer.param_groups for one in group["params"]}
    of = {name: groups[id(parameter)] for name, parameter in model.named_parameters()}
    rates = {"0.weight": 0.3, "0.bias": 0.1, "1.weight": 0.1, "1.bias": 0.05}
    assert {name: group["lr"] for name, group in of.items()} == pytest.approx(rates)
    assert {name: group["weight_decay"] for name, group in of.items()} == {
        name: 0.1 if name.endswith("weight") else 0.0 for name in rates
    }


def test_the_optimizer_has_the_constants_of_the_plan() -> None:
    (group,) = adamw(nn.Linear(2, 2), replace(PLAN, betas=(0.8, 0.7), adam_epsilon=1e-3)).param_groups
    assert (group["betas"], group["eps"]) == ((0.8, 0.7), 1e-3)


def test_the_optimizer_is_fused() -> None:
    (group,) = adamw(nn.Linear(2, 2), PLAN).param_groups
    assert group["fused"] is True
    (elsewhere,) = adamw(nn.Linear(2, 2, device=torch.device("meta")), PLAN).param_groups
    assert elsewhere["fused"] is False


@pytest.mark.parametrize("field", FREE)
def test_fields_that_may_differ(field: str) -> None:
    other: Any = {"trackers": ("wandb",)}.get(field, 7)
    replace(PLAN, **{field: other}).check_resumes(PLAN.to_dict(), 50)


@pytest.mark.parametrize(
    "field, value",
    [
        ("seed", 1),
        ("batch_size", 4),
        ("learning_rate", 0.1),
        ("betas", (0.9, 0.999)),
        ("compile", True),
        ("max_steps", 200),
    ],
)
def test_fields_that_may_not(field: str, value: Any) -> None:
    other = replace(PLAN, **{field: value})
    with pytest.raises(UserError) as raised:
        other.check_resumes(PLAN.to_dict(), 50)
    then, now = (plan.to_dict()[field] for plan in (PLAN, other))
    assert str(raised.value).startswith(f"{field}: the run in this folder has {then!r}, got {now!r}; ")


def test_more_steps_at_a_constant_rate() -> None:
    plan = replace(PLAN, lr_scheduler_type="constant")
    for steps in (200, 60, 50):
        replace(plan, max_steps=steps).check_resumes(plan.to_dict(), 50)
    with pytest.raises(UserError, match="max_steps: the run in this folder has 100, got 49"):
        replace(plan, max_steps=49).check_resumes(plan.to_dict(), 50)


def test_rates_of_parameters_that_are_not_there_are_refused() -> None:
    with pytest.raises(UserError, match="times: expected names of parameters of the model, got 'weigth'"):
        adamw(nn.Linear(2, 1), TrainingConfig(max_steps=1, batch_size=1), {"weigth": 2.0})
