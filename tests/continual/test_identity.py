"""What a run's numbers depend on: where any of it is another, the run does not go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regard.continual import run as running
from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.methods import METHODS
from regard.continual.methods.sapt_config import SaptConfig
from regard.continual.run import make_learner, run_stream
from regard.errors import UserError
from regard.runs.work_dir import check_same_identity
from tests.continual.small_tasks import BUDGET, loaded, stream

ADAPTERS = {"rank": 2, "alpha": 4}
AS_IT_WAS: dict[str, Any] = {"budget": BUDGET, "seed": 1, "lora": ADAPTERS, "head": "linear"}


class Stopped(Exception):
    """Ends a run in its second task."""


def begun(memory: int = 6, rows: int = 2, **changes: Any) -> tuple[Learner, Method]:
    method = METHODS["replay"](METHODS["replay"].Config.parse({"memory_size": memory}))
    return make_learner(stream(rows), method, loaded(), **{**AS_IT_WAS, **changes}), method


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2},
        {"lora": {"rank": 2, "alpha": 8}},
        {"lora": None},
        {"head": "full"},
        {"budget": replace(BUDGET, learning_rate=1e-3)},
        {"memory": 5},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_run_does_not_go_on(changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))

    def stop(learner: Learner, learnt: int) -> None:
        if learnt == 2:
            raise Stopped

    learner, method = begun()
    with pytest.raises(Stopped):
        run_stream(learner, method, folder=tmp_path, on_task=stop)
    learner, method = begun(**changes)
    with pytest.raises(UserError, match=r"^cannot resume: "):
        run_stream(learner, method, folder=tmp_path, resume=True)


def test_a_run_of_before_there_was_a_setting_goes_on_with_its_default() -> None:
    name, writes = "generator_repetition_penalty", {"router": "attention", "reflection": "generated", "r": 2}

    def fingerprint(**settings: Any) -> dict[str, Any]:
        method = METHODS["sapt"](METHODS["sapt"].Config.parse({**writes, **settings}))
        return running._fingerprint(begun()[0], method)

    settings = {one: value for one, value in SaptConfig(**writes).to_dict().items() if one != name}
    before = {**fingerprint(), "settings": settings}
    check_same_identity(before, fingerprint())
    with pytest.raises(UserError, match=f"{name} was null when the run started and is 1.5 now"):
        check_same_identity(before, fingerprint(**{name: 1.5}))


def test_two_stages_of_a_task_draw_batches_of_their_own() -> None:
    learner, _ = begun(rows=8)
    items = learner.items(0)
    first, second = (
        learner.schedule(items, learner.fine_tuning_phase(name=name)) for name in ("probing", "fine-tuning")
    )
    again = learner.schedule(items, learner.fine_tuning_phase(name="probing"))
    assert [first.at(step) for step in range(first.steps)] == [again.at(step) for step in range(first.steps)]
    assert [first.at(step) for step in range(first.steps)] != [second.at(step) for step in range(first.steps)]
