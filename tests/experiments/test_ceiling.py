"""Ceilings of routers: classifiers that see the training rows of all tasks at once."""

from pathlib import Path

import pytest
import torch

from experiments.routing import ceiling
from experiments.routing.ceiling import LINEAR, TUNED, Rows, fit_classifier, list_confusions, make_case, weigh_tuned
from tests.continual.small_tasks import loaded, stream


def test_rows_of_all_tasks_are_joined_and_lose_columns_that_pad() -> None:
    tasks = stream(8)
    train, test = ceiling.read_rows(tasks, loaded())
    assert train.tasks.bincount().tolist() == [len(task.train) for task in tasks.tasks]
    assert test.tasks.bincount().tolist() == [len(task.test) for task in tasks.tasks]
    longest = int(train.inputs["attention_mask"].sum(1).max())
    assert train.select(torch.arange(len(train.tasks))).inputs["input_ids"].shape[1] == longest
    second = train.select((train.tasks == 1).nonzero().flatten())
    ids = ceiling._encode(tasks.tasks[1].train, loaded())["input_ids"][:, : second.inputs["input_ids"].shape[1]]
    assert torch.equal(second.inputs["input_ids"], ids)


def test_a_linear_ceiling_is_chosen_on_training_rows_and_knows_tasks_that_differ() -> None:
    random = torch.Generator().manual_seed(0)
    centers = 4 * torch.randn(3, 8, generator=random)
    tasks = torch.arange(3).repeat_interleave(20)
    vectors = centers[tasks] + 0.3 * torch.randn(60, 8, generator=random)
    weights, chosen = ceiling.weigh_linear((vectors, tasks), centers, seed=1)
    assert weights.argmax(1).tolist() == [0, 1, 2]
    assert weights.sum(1).tolist() == pytest.approx([1.0] * 3)
    assert chosen["cross_validated"] == 1.0


def test_the_rate_rises_and_falls_to_nothing() -> None:
    shares = [ceiling._share_of_rate(step, 20) for step in range(21)]
    assert shares[:3] == [0.5, 1.0, 1.0]
    assert shares[2:] == sorted(shares[2:], reverse=True)
    assert shares[-1] == 0.0


def test_a_fine_tuned_ceiling_learns_tasks_and_leaves_the_model_as_it_was() -> None:
    model = loaded()
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    train, test = ceiling.read_rows(stream(32), model)
    weights = weigh_tuned(fit_classifier(train, 3, model, 5e-3, seed=1), test)
    again = weigh_tuned(fit_classifier(train, 3, model, 5e-3, seed=1), test)
    assert torch.equal(weights, again)
    assert float((weights.argmax(1) == test.tasks).float().mean()) > 0.9
    assert all(torch.equal(value, before[name]) for name, value in model.model.state_dict().items())


def test_the_rate_is_chosen_on_rows_that_are_not_trained_on() -> None:
    ids = torch.arange(1, 24)[:, None]
    tasks = torch.tensor([0] * 10 + [1] * 13)
    train, held_out = ceiling.split_rows(Rows({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, tasks))
    assert held_out.inputs["input_ids"].flatten().tolist() == [5, 10, 15, 20]
    assert sorted([*train.inputs["input_ids"].flatten().tolist(), 5, 10, 15, 20]) == list(range(1, 24))


def test_confusions_are_shares_of_rows_by_task() -> None:
    first, second = torch.eye(2)[[0, 0, 0, 1]], torch.eye(2)[[1, 1]]
    assert list_confusions([first, second], ["a", "b"]) == [{"task": "a", "other": "b", "share": 0.25}]


@pytest.mark.parametrize("name", [LINEAR, TUNED])
def test_a_case_is_as_that_of_a_router(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "EPOCHS_OF", {"long": 1})
    made = make_case("long", name, 1, stream(8), loaded(), lambda: {"rate": 5e-3})
    assert [line["task"] for line in made["routing"]] == [task.name for task in stream(8).tasks]
    assert all(0 <= line["own_weight"] <= 1 for line in made["routing"])
    assert made["chosen"]


def test_a_rate_is_kept_and_one_stream_takes_that_of_another(tmp_path: Path) -> None:
    (tmp_path / "ceiling-rates").mkdir()
    (tmp_path / "ceiling-rates" / "long.json").write_text('{"rate": 0.5}', encoding="utf-8")
    assert ceiling.choose_rate("fifty", "nowhere", loaded(), tmp_path) == {"rate": 0.5}
