"""The next batch of a run on a GPU is copied while a step is computed; a stand-in for the GPU sees in which order."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.errors import UserError
from regard.training import batches
from regard.training.loop import TrainResult, train
from regard.training.placement import micro_batches
from regard.training.plan import TrainingConfig
from tests.hooks.test_synchronizations import READS, name_function
from tests.training.small import batch, count, loss, net

PLAN = TrainingConfig(max_steps=4, batch_size=8, learning_rate=0.02, logging_steps=1, max_grad_norm=0.5)


class Device(TorchFunctionMode):
    """Stands for a GPU: `events` has copies from pinned memory, other copies, losses, and reads of results, in order.

    A tensor in pinned memory is one that `pin_memory` has returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.pinned: dict[int, Tensor] = {}
        self.on_host = False

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = name_function(function)
        if name == "pin_memory":
            result = args[0].clone()
            self.pinned[id(result)] = result
            return result
        if name == "to" and "non_blocking" in (kwargs or {}):
            self.events.append("copy" if id(args[0]) in self.pinned else "slow copy")
        elif name in READS and not self.on_host:
            self.events.append("read")
        return function(*args, **(kwargs or {}))

    def run(self, plan: TrainingConfig = PLAN, **options: Any) -> TrainResult:
        """Train with this device; what the caller computes from rows on the host is no read of it."""
        given = {"batch": self._host("batch", batch), "count": self._host("", count), "loss": self._loss} | options
        with self:
            return train(net(0.3), plan, **{"device": "cpu", **given})

    def _loss(self, model: nn.Module, rows: Mapping[str, Tensor]) -> Tensor:
        self.events.append("loss")
        return loss(model, rows)

    def _host(self, event: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.on_host = True
            result = function(*args)
            self.on_host = False
            self.events += [f"{event} {args[0]}"] * bool(event)
            return result

        return call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(batches, "copies_ahead", lambda device: True)
    return Device()


def values(result: TrainResult) -> list[dict[str, float]]:
    return [{name: row[name] for name in ("step", "items", "loss", "gradient_norm")} for row in result.history]


def test_the_next_batch_is_copied_before_a_result_is_read(gpu: Device) -> None:
    gpu.run(replace(PLAN, micro_batch_size=4))
    copies = ["copy"] * 4  # of two tensors in two micro-batches
    for step in range(4):
        begins = gpu.events.index("loss")
        before, gpu.events = gpu.events[:begins], gpu.events[begins:]
        assert [event for event in before if event != "read"] == (["batch 0", *copies] if not step else [])
        ahead = [f"batch {step + 1}", *copies] if step < 3 else []
        expected = ["loss", "loss", *ahead]
        assert gpu.events[: len(expected)] == expected, "no read stands between"
        assert gpu.events[len(expected)] == "read"
        gpu.events = gpu.events[len(expected) :]
    assert set(gpu.events) == {"read"}, "no batch behind the last step"


def test_on_a_cpu_a_batch_is_made_when_its_step_begins() -> None:
    cpu = Device()
    cpu.run(replace(PLAN, micro_batch_size=4))
    order = [event for event in cpu.events if event not in ("read", "slow copy")]
    assert order == [event for step in range(4) for event in (f"batch {step}", "loss", "loss")]
    assert not cpu.pinned


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_numbers_are_those_of_batches_made_one_by_one(
    gpu: Device, micro_batch_size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(PLAN, micro_batch_size=micro_batch_size, save_steps=1)
    ahead = gpu.run(plan, folder=tmp_path / "ahead")

    def stop(step: int, steps: int, numbers: Mapping[str, float]) -> None:
        if step == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        Device().run(plan, folder=tmp_path / "resumed", on_progress=stop)
    resumed = Device().run(plan, folder=tmp_path / "resumed", resume=True)
    monkeypatch.setattr(batches, "copies_ahead", lambda device: False)
    plain = Device().run(plan)
    assert values(ahead) == values(plain) == values(resumed)


def test_a_batch_that_cannot_be_made_ends_the_run_at_its_step(gpu: Device, tmp_path: Path) -> None:
    def made(step: int) -> dict[str, Tensor]:
        if step == 2:
            raise OSError("the file is gone")
        return batch(step)

    steps: list[int] = []
    with pytest.raises(OSError, match="the file is gone"):
        gpu.run(
            replace(PLAN, save_steps=1), batch=made, folder=tmp_path, on_progress=lambda step, *_: steps.append(step)
        )
    assert steps == [1, 2]
    gpu.run(replace(PLAN, save_steps=1), folder=tmp_path, resume=True, on_progress=lambda step, *_: steps.append(step))
    assert steps == [1, 2, 3, 4]


def test_rows_at_fault_are_named_in_their_own_batch(gpu: Device) -> None:
    def made(step: int) -> dict[str, Tensor]:
        rows = batch(step)
        if step == 1:
            rows["values"][7] = math.nan
        return rows

    with pytest.raises(UserError, match="at step 1; rows of its batch: 7;"):
        gpu.run(batch=made)


def test_rows_are_trimmed_where_they_are_made(gpu: Device) -> None:
    """As a micro-batch, before it is copied: on a GPU the sizes of a trimmed tensor would be read from it."""
    sizes: list[int] = []

    def trim(rows: dict[str, Tensor]) -> dict[str, Tensor]:
        gpu.events.append("trim")
        longest = int(rows["counted"].sum(1).max())
        return {name: value[:, : max(longest, 1)] for name, value in rows.items()}

    def padded(step: int) -> dict[str, Tensor]:
        lengths = torch.tensor([1, 1, 2, 1, 4, 3, 1, 1])
        return {**batch(step), "counted": torch.arange(4) < lengths[:, None]}

    def sized(model: nn.Module, rows: Mapping[str, Tensor]) -> Tensor:
        sizes.append(rows["values"].shape[1])
        return loss(model, rows)

    plan = replace(PLAN, micro_batch_size=4, max_steps=1)
    trimmed = gpu.run(plan, batch=padded, loss=sized, trim=trim)
    assert sizes == [2, 4]
    assert [event for event in gpu.events if event != "read"] == ["trim", "copy", "copy"] * 2
    assert trimmed.history[0]["items"] == 14


def test_micro_batches_have_so_many_rows_at_most_and_about_as_many_each() -> None:
    assert micro_batches(slice(2, 9), 3) == [slice(2, 5), slice(5, 7), slice(7, 9)]
    assert micro_batches(slice(0, 6), 3) == [slice(0, 3), slice(3, 6)]
    assert micro_batches(slice(0, 2), 5) == micro_batches(slice(0, 2), None) == [slice(0, 2)]
