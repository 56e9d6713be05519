"""The rates that methods are trained at: the budget's, or one of their own that they say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from regard.continual.methods import METHODS
from regard.continual.methods.baselines import Probe
from regard.continual.methods.ctr import Ctr, CtrConfig
from regard.continual.methods.lfpt5 import Lfpt5
from regard.continual.methods.prompts import L2p, ProgPrompt
from regard.continual.run import make_learner
from regard.continual.training_phase import TrainingBudget
from tests.continual import small_text_tasks
from tests.continual.small_tasks import BUDGET, loaded, stream
from tests.continual.together import TEXTS_ALONE, made


@pytest.mark.every_value
@pytest.mark.parametrize("name", METHODS)
def test_the_rate_that_is_said_is_that_of_the_last_stage(name: str) -> None:
    text = name in TEXTS_ALONE
    given = small_text_tasks.stream(1) if text else replace(stream(4), tasks=stream(4).tasks[:1], order=(0,))
    model, budget = (small_text_tasks.loaded(), small_text_tasks.BUDGET) if text else (loaded(), BUDGET)
    method = made(name)
    learner = make_learner(given, method, model, budget, seed=1)
    method.before_task(learner, 0)
    said = method.own_learning_rate(budget)
    assert method.phases(learner, 0)[-1].learning_rate == (budget.learning_rate if said is None else said.value)


def test_who_has_a_rate_of_its_own_and_how_it_is_set() -> None:
    budget = TrainingBudget(learning_rate=1e-4, probing_learning_rate=0.02)
    found = {
        name: said.option_text
        for name, kind in METHODS.items()
        if (said := kind().own_learning_rate(budget)) is not None
    }
    assert found == {
        "probe": "--probing-learning-rate 0.02",
        "l2p": "--set learning_rate=0.03",
        "ctr": "--set learning_rate=0.001",
        "progprompt": "--set learning_rate=0.3",
        "lfpt5": "--set learning_rate=0.5",
    }
    assert Ctr(CtrConfig(learning_rate=0.0)).own_learning_rate(budget) == Probe().own_learning_rate(budget)


@pytest.mark.parametrize("kind", [L2p, Ctr, ProgPrompt, Lfpt5])
def test_a_rate_that_is_set_is_said(kind: type[L2p]) -> None:
    found = kind(kind.Config(learning_rate=0.25)).own_learning_rate(TrainingBudget())
    assert found is not None
    assert (found.option_text, found.value) == ("--set learning_rate=0.25", 0.25)
