"""A task that fails: its adapter stays if it was trained, and else leaves nothing behind."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from tests.adapters.model_families import LEARNT, made
from tests.adapters.test_task_training import batches


def pairs(family: str) -> Any:
    """Batches that are lists of tensors, as a `TensorDataset` makes them."""
    return [list(batch.values()) for batch in batches(family, 1)]


def without_labels(family: str) -> Any:
    return [{name: value for name, value in batch.items() if name != "labels"} for batch in batches(family, 1)]


def interrupted(_batch: Any) -> Tensor:
    raise KeyboardInterrupt


FAILURES: dict[str, tuple[Any, dict[str, Any], type[BaseException], str | None]] = {
    "not by name": (pairs, {}, UserError, "batches: expected the model's inputs by name in each, as a dict, got list"),
    "no labels": (without_labels, {}, UserError, "loss: expected batches with labels"),
    "interrupted": (without_labels, {"loss": interrupted}, KeyboardInterrupt, None),
}


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.usefixtures("short_warm_up")
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("kind", [{}, LEARNT, {"adapter_type": "prompt"}])
def test_a_task_that_fails_before_its_first_step_leaves_no_adapter(failure: str, kind: dict[str, Any]) -> None:
    wrong, options, error, problem = FAILURES[failure]
    failed, other = (SharedAdapters(made("llama"), **kind) for _ in range(2))
    for adapters in (failed, other):
        adapters.fit_task("one", batches("llama", 0), epochs=1)
    with pytest.raises(error, match=problem):
        failed.fit_task("two", wrong("llama"), **options)
    assert failed.adapter_names == ("one",)
    assert failed.active_adapter == "one"
    failed.set_adapter("one")
    other.set_adapter("one")
    for adapters in (failed, other):
        adapters.fit_task("two", batches("llama", 1), epochs=1)
    assert failed.provenance == other.provenance
    for (name, value), again in zip(other.state_dict().items(), failed.state_dict().values(), strict=True):
        assert torch.equal(value, again), name


def test_an_adapter_that_was_trained_so_far_stays() -> None:
    adapters, steps = SharedAdapters(made("llama"), r=4), []

    def stopped(batch: Any) -> Any:
        steps.append(1)
        if len(steps) == 2:
            raise KeyboardInterrupt
        return adapters(**batch).loss

    with pytest.raises(KeyboardInterrupt):
        adapters.fit_task("one", batches("llama", 0), loss=stopped)
    assert adapters.adapter_names == ("one",)
    adapters.add_adapter("two")
    with pytest.raises(KeyboardInterrupt):
        adapters.fit_task("two", batches("llama", 1), loss=interrupted)
    assert adapters.adapter_names == ("one", "two")


def test_batches_that_are_no_inputs_by_name_are_refused() -> None:
    adapters = SharedAdapters(made("llama"), r=4)
    adapters.add_adapter("one")
    adapters.fit_router("one", batches("llama", 0))
    for call in (lambda: adapters.fit_router("one", pairs("llama")), lambda: adapters.usage(pairs("llama"))):
        with pytest.raises(
            UserError, match="batches: expected the model's inputs by name in each, as a dict, got list"
        ):
            call()
