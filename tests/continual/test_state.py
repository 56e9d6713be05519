"""The state of a run after a task, on disk: whole or not at all, the last two."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.continual import run as running
from regard.continual import run_state as state
from regard.continual.learner import Learner
from regard.continual.method import MethodState
from regard.continual.methods.sapt import Sapt, SaptConfig
from regard.continual.run import make_learner, run_stream
from regard.continual.training_phase import ExampleRef
from regard.errors import UserError
from regard.models.model_files import eval_mode
from tests.continual.small_tasks import BUDGET, learnt_router, loaded, stream


class Tied(nn.Module):
    """Two names for one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.arange(3))


ABOUT = {"seed": 1, "tasks": ["a", "b"]}
KEPT = MethodState([ExampleRef(0, 3), ExampleRef(1, 2)], {"means": torch.arange(4.0).view(2, 2).T}, {"step": 7})


def saved(folder: Path, learnt: int, network: nn.Module | None = None) -> None:
    state.save(folder, learnt, network or Tied(), KEPT, {"matrix": [{"score": 50.0}], "identity": ABOUT})


def test_saved_and_restored(tmp_path: Path) -> None:
    network, other = Tied(), Tied()
    network.get_buffer("seen").add_(1)
    saved(tmp_path, 2, network)
    restored = state.restore_state(tmp_path, other, ABOUT)
    assert restored is not None
    learnt, kept, found = restored
    assert learnt == 2
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in network.state_dict().items())
    assert other.first.weight is other.second.weight
    assert kept.examples == KEPT.examples
    assert all(isinstance(item, ExampleRef) for item in kept.examples)
    assert torch.equal(kept.tensors["means"], KEPT.tensors["means"])
    assert kept.values == {"step": 7}
    assert found["matrix"] == [{"score": 50.0}]


def test_what_a_resumed_run_computes_with_lies_in_memory_as_before(tmp_path: Path) -> None:
    """Products of tensors that begin elsewhere than at a multiple of 64 bytes, as in a file, may round otherwise."""
    tensors = {f"{number}": torch.ones(number, dtype=torch.float64) for number in range(1, 9)}
    kept, network = MethodState([], tensors, {}), Tied()
    state.save(tmp_path, 1, network, kept, {"identity": ABOUT})
    restored = state.restore_state(tmp_path, network, ABOUT)
    assert restored is not None
    assert [value.data_ptr() % 64 for value in tensors.values()] == [0] * 8, "as PyTorch puts them"
    assert [value.data_ptr() % 64 for value in restored[1].tensors.values()] == [0] * 8


def test_tied_weights_are_written_once() -> None:
    assert set(state.collect_tensors(Tied())) == {"first.weight", "first.bias", "second.bias", "seen"}


def test_the_last_two_states_are_kept(tmp_path: Path) -> None:
    assert state.restore_state(tmp_path, Tied(), ABOUT) is None
    for learnt in (1, 2, 3):
        saved(tmp_path, learnt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after-00000002", "after-00000003"]


def test_what_is_not_finished_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves the state before."""
    saved(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "save_file", full)
    with pytest.raises(UserError, match="No space left on device"):
        saved(tmp_path, 2)
    restored = state.restore_state(tmp_path, Tied(), ABOUT)
    assert restored is not None
    assert restored[0] == 1


def test_a_state_of_another_network(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(UserError, match=r"resume: expected the network of this run, .* does not fit it"):
        state.restore_state(tmp_path, nn.Linear(2, 2), ABOUT)


def test_a_state_of_other_settings(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(UserError, match=r"cannot resume: seed was 1 when the run started and is 2 now"):
        state.restore_state(tmp_path, Tied(), {**ABOUT, "seed": 2})


@pytest.mark.exhaustive
def test_a_run_that_goes_on_has_the_block_open_that_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is seen between two tasks is the same, and what was trained can still be asked for its gradient."""
    monkeypatch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))

    def seen_by(folder: Path, stop: int | None) -> list[tuple[set[str], Tensor]]:
        method = Sapt(SaptConfig(**learnt_router(r=2, router_warmup_steps=2)))
        learner, found = make_learner(stream(2), method, loaded(), BUDGET, seed=1), []

        def look(learner: Learner, task: int) -> list[Any]:
            rows = learner.rows(learner.items(task)[:3])
            with eval_mode(learner.network), torch.no_grad():
                states = learner.network(rows)
            found.append(({name for name, one in learner.network.named_parameters() if one.requires_grad}, states))
            return []

        def leave(learnt: int, _: Any) -> None:
            if learnt == stop:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            run_stream(learner, method, folder=folder, resume=True, diagnose=look, on_kept=leave)
        return found

    whole = seen_by(tmp_path / "whole", None)
    parts = seen_by(tmp_path / "parts", 2) + seen_by(tmp_path / "parts", None)
    assert len(whole) == len(parts) == 6
    for (names, states), (again, mine) in zip(whole, parts, strict=True):
        assert again == names
        assert torch.equal(mine, states)


@pytest.mark.exhaustive
def test_the_seconds_of_a_resumed_run_are_those_of_all_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10**6, 100))  # each look at the clock is 100 seconds after the one before
    monkeypatch.setattr(running.time, "perf_counter", lambda: float(next(clock)))

    def learnt(stop: int | None, *, resume: bool) -> running.RunState:
        method = Sapt(SaptConfig(r=2))
        learner = make_learner(stream(2), method, loaded(), BUDGET, seed=1)

        def tell(num_tasks: int, _rows: Any) -> None:
            if num_tasks == stop:
                raise KeyboardInterrupt

        return run_stream(learner, method, folder=tmp_path, resume=resume, on_kept=tell)

    with contextlib.suppress(KeyboardInterrupt):
        learnt(1, resume=False)
    manifest = json.loads((tmp_path / "after-00000001" / "manifest.json").read_text(encoding="utf-8"))
    with contextlib.suppress(KeyboardInterrupt):
        learnt(2, resume=True)
    last = learnt(None, resume=True)
    assert last.seconds_before > manifest["record"]["rows"]["seconds"] >= 100


@pytest.mark.parametrize("value", [{0: 1}, {"a": [{2: 3}]}, {1, 2}, torch.ones(1)])
def test_what_a_resumed_run_would_not_have_is_refused(value: Any, tmp_path: Path) -> None:
    kept = MethodState(values={"mean": 1.5, "own": value})
    with pytest.raises(UserError, match=r"method: state.values\['own'\]: expected numbers, texts, lists"):
        state.save(tmp_path, 1, torch.nn.Linear(1, 1), kept, {})
    with pytest.raises(AttributeError):
        kept.mean = 5  # type: ignore[attr-defined]
