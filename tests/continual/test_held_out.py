"""How far a taught language model is from what it was, on text of no task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from regard.continual import held_out
from regard.continual.held_out import KL, make_held_out
from regard.continual.methods import METHODS
from regard.continual.run import make_learner, run_stream
from regard.continual.text_learner import TextLearner
from regard.continual.training_phase import TrainingBudget
from regard.errors import UserError
from tests.continual import small_tasks
from tests.continual.small_text_tasks import BUDGET, lively, stream

TEXT = "the cat . the dog on red , it is slow . say blue run sit the cat of dog red " * 8
SMALL: dict[str, dict[str, Any]] = {"sapt": {"r": 2}, "o-lora": {"r": 2}, "sequential-lora": {"r": 2}}


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "held.txt").write_text(TEXT, encoding="utf-8")
    return str(tmp_path / "held.txt")


def taught(name: str, kind: Any, text: str, **changes: Any) -> tuple[TextLearner, list[dict[str, Any]]]:
    """Return a run of two tasks, and the rows that were measured."""
    method_class = METHODS[name]
    method = method_class(method_class.Config.parse(SMALL.get(name, {})))
    tasks = replace(stream(), tasks=stream().tasks[:2], order=(0, 1))
    learner = cast(
        TextLearner, make_learner(tasks, method, lively(kind), replace(BUDGET, num_epochs=1), seed=1, **changes)
    )
    measure = make_held_out(learner, text, samples=6)
    return learner, run_stream(learner, method, evaluate=measure).rows["general"]


def defined(before: Any, after: Any, windows: torch.Tensor) -> float:
    """The mean of Σ p log(p / q) over the second halves, in float64, token for token, each from a pass of its own."""
    total, count = 0.0, 0
    for window in windows:
        for place in range(len(window) // 2, len(window)):
            p, q = (
                torch.softmax(model.double()(window[None, :place]).logits[0, -1].double(), -1)
                for model in (before, after)
            )
            total += float((p * (p.log() - q.log())).sum())
            count += 1
    return total / count


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@torch.no_grad()
def test_the_divergence_is_that_of_the_definition(kind: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    from regard.continual import held_out

    made = held_out.make_text_windows
    monkeypatch.setattr(
        held_out, "make_text_windows", lambda *given, **named: seen.append((w := made(*given, **named)).input_ids) or w
    )
    with torch.enable_grad():
        learner, rows = taught("finetune", kind, text)
    assert [(row["after_task"], row["statistic"], row["n"]) for row in rows] == [(1, KL, 6), (2, KL, 6)]
    assert rows[-1]["value"] > 1e-4
    expected = defined(lively(kind).model.eval(), learner.generator.encoder.eval(), seen[0])
    assert rows[-1]["value"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sorted(name for name, method in METHODS.items() if method.supports_text))
def test_each_method_is_compared_with_the_untaught_model(name: str, text: str) -> None:
    """A method whose untaught model cannot be put back would be refused."""
    _, rows = taught(name, "t5" if name == "lfpt5" else "gpt2", text)
    assert [row["after_task"] for row in rows] == [1, 2]
    assert rows[-1]["value"] > 0
    assert rows[-1]["standard_error"] >= 0


def test_the_standard_error_is_over_windows(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS["finetune"]()
    learner = make_learner(stream(2, 2), method, lively("t5"), BUDGET, seed=1)
    measure = make_held_out(learner, text, samples=4)
    values = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)  # of variance 14/3
    for many, error in ((4, (14 / 3 / 4) ** 0.5), (1, None)):
        monkeypatch.setattr(held_out, "measure_kl", lambda *_, many=many: values[:many])
        (row,) = measure(learner, 1)
        assert (row["value"], row["n"]) == (float(values[:many].mean()), many)
        assert row["standard_error"] == (None if error is None else pytest.approx(error))


def test_adapters_of_peft_are_switched_off(text: str) -> None:
    _, rows = taught("finetune", "gpt2", text, lora={"rank": 2})
    assert rows[0]["value"] > 0


def test_a_classifier_has_no_distribution_over_words(text: str) -> None:
    budget = TrainingBudget(num_epochs=1, batch_size=4, length=10)
    learner = make_learner(small_tasks.stream(), METHODS["finetune"](), small_tasks.loaded(), budget, seed=1)
    with pytest.raises(UserError, match="held-out: expected tasks from text to text"):
        make_held_out(learner, text, samples=2)


def test_state_outside_of_the_network_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.continual import held_out

    monkeypatch.setattr(held_out, "_find_changed", lambda learner: iter(()))
    with pytest.raises(UserError, match="held-out: expected a method whose state is in its network's weights"):
        taught("finetune", "gpt2", text)
