"""Ceilings of routers: classifiers that see the training rows of all tasks at once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.common.claims import UNDECIDED
from experiments.routing import ceiling
from experiments.routing.ceiling import LINEAR, TUNED, Rows, fit_classifier, list_confusions, make_case, weigh_tuned
from experiments.routing.page import make_page, router_table
from experiments.routing.reach import (
    OUT_OF_REACH,
    WITHIN_REACH,
    better_ceiling,
    describe_mixed_up,
    judge_reach,
    reach_table,
    shares_of,
)
from experiments.routing.routers import encode_rows
from experiments.routing.tables import Tables
from experiments.sapt.run import SEEDS
from tests.continual.small_tasks import loaded, stream
from tests.experiments.test_routing import case_of, work_of


def test_rows_of_all_tasks_are_joined_and_lose_columns_that_pad() -> None:
    tasks = stream(8)
    train, test = ceiling.read_rows(tasks, loaded())
    assert train.tasks.bincount().tolist() == [len(task.train) for task in tasks.tasks]
    assert test.tasks.bincount().tolist() == [len(task.test) for task in tasks.tasks]
    longest = int(train.inputs["attention_mask"].sum(1).max())
    assert train.select(torch.arange(len(train.tasks))).inputs["input_ids"].shape[1] == longest
    second = train.select((train.tasks == 1).nonzero().flatten())
    ids = encode_rows(tasks.tasks[1].train, loaded())["input_ids"][:, : second.inputs["input_ids"].shape[1]]
    assert torch.equal(second.inputs["input_ids"], ids)


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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


# -- what is within reach --------------------------------------------------------------------------------------------


def ceiling_of(name: str, seed: int, own: float, right: float, other: float = 0.25) -> dict[str, Any]:
    """Return the file of a ceiling of `fifty`, which takes a share of the books for films."""
    made = case_of("fifty", name, seed, own) | {"seconds": [9.0], "chosen": {"rate": 0.1}}
    for line in made["routing"]:
        line["own_largest"] = right
    return {**made, "taken_for": [{"task": "books", "other": "films", "share": other}]}


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    work = work_of(tmp_path / "work")  # the router has 0.82, 0.83 and 0.84
    for seed, other in zip(SEEDS, (0.25, 0.5, 0.0), strict=True):
        for name, own, right in ((LINEAR, 0.75, 0.7), (TUNED, 0.5, 0.78)):
            content = ceiling_of(name, seed, own, right + seed / 1e4, other)
            (work / "routers-fifty" / f"{name}-{seed}.json").write_text(json.dumps(content))
    return Tables.gather(work)


@pytest.mark.exhaustive
def test_the_better_ceiling_is_that_of_the_larger_value(tables: Tables) -> None:
    better = better_ceiling(tables, "fifty")
    assert better is not None
    assert better[:2] == (TUNED, "own_largest")  # rows routed right, though its own weight is the least
    assert better[2] == pytest.approx({seed: 0.78 + seed / 1e4 for seed in SEEDS})
    assert better_ceiling(tables, "long") is None
    shares = shares_of(tables, "fifty", better[2])
    assert shares[SEEDS[0]] == pytest.approx(0.82 / 0.7842)


@pytest.mark.exhaustive
def test_an_aim_is_out_of_reach_if_the_whole_interval_is_below_it(tables: Tables) -> None:
    assert judge_reach({1: 0.78, 2: 0.79, 3: 0.78}, 0.8) == OUT_OF_REACH
    assert judge_reach({1: 0.82, 2: 0.83, 3: 0.82}, 0.8) == WITHIN_REACH
    assert judge_reach({1: 0.78, 2: 0.79, 3: 0.83}, 0.8) == UNDECIDED
    assert judge_reach({1: 0.7, 2: 0.7}, 0.8) == UNDECIDED  # two seeds
    (line,) = reach_table(tables).rows
    assert [*line[:4], *line[5:7]] == ["fifty", "0.8", TUNED, "routed right", "0.78 ± 0.01", OUT_OF_REACH]


@pytest.mark.exhaustive
def test_the_page_says_what_is_out_of_reach_and_mixed_up(tables: Tables) -> None:
    assert describe_mixed_up(tables) == "In `fifty` it takes books for films (0.25)."
    text = " ".join(make_page(tables).to_markdown().split())
    assert f"| fifty | 0.8 | {TUNED} | routed right | 0.78 ± 0.01 | {OUT_OF_REACH} | 1.06 ± 0.04 |" in text
    assert "on the same vectors -0.08 ± 0.02 (`fifty`); with the model trained -0.33 ± 0.02 (`fifty`)." in text
    assert [line[1:3] + line[-2:] for line in router_table(tables).rows if line[1] == TUNED] == [[TUNED, "3", "–", "–"]]
    assert tables.record["chosen"][0]["chosen"] == {"rate": 0.1}


@pytest.mark.exhaustive
def test_a_page_without_ceilings_says_nothing_of_them(tmp_path: Path) -> None:
    assert "within reach" not in make_page(Tables.gather(work_of(tmp_path / "work"))).to_markdown()
