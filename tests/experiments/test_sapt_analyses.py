"""The further analyses of SAPT, each case run on a tiny model and tiny tasks."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from experiments.sapt import analyses as sapt_analyses
from experiments.sapt import decoder as sapt_decoder
from experiments.sapt import run as sapt
from experiments.sapt.analyses import ANALYSES, AnalysisContext, cut_layers, select_tasks
from experiments.sapt.numbers import make_number
from experiments.sapt.run import Row
from experiments.sapt.tables import Tables
from regard.commands.pretrain.config import preset_config
from regard.continual import run as continual
from regard.continual.training_phase import TrainingBudget
from regard.data.stream import Stream
from regard.errors import UserError
from tests.continual import small_tasks, small_text_tasks
from tests.continual.pseudo import small_pseudo

NAMES = tuple("-".join(labels) for labels in small_tasks.CLASSES)
GIVEN = AnalysisContext("nowhere", small_tasks.loaded(), 3)


def tiny(
    of: Row, tasks: Stream, seed: int, loaded: Any, data: str, budget: TrainingBudget | None = None, **more: Any
) -> Any:
    """A run with few steps, whatever the budget."""
    opened = of.method == "sapt" and of.settings.get("gate") != "published"
    quick = (
        {**of.settings, "router_warmup_steps": min(2, of.settings.get("router_warmup_steps", 2))}
        if opened
        else of.settings
    )
    quick = {**quick, "num_virtual_tokens": 2} if quick.get("adapter_type") == "prompt" else quick
    return sapt.run_row(Row(of.method, quick, of.lora, of.rate), tasks, seed, loaded, data, small_tasks.BUDGET, **more)


@pytest.fixture(autouse=True)
def use_small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three tasks of the tests in place of published ones."""
    monkeypatch.setattr(
        sapt_analyses, "read_tasks", lambda order, seed, data, *, instructions=True: small_tasks.stream()
    )
    monkeypatch.setattr(sapt_analyses, "run_row", tiny)
    monkeypatch.setattr(sapt_analyses, "BUDGET", small_tasks.BUDGET)
    monkeypatch.setattr(sapt_analyses, "FEW", NAMES[:2])
    monkeypatch.setattr(sapt_analyses, "PAIRS", {"similar": NAMES[:2]})
    monkeypatch.setattr(sapt_analyses, "HELD_OUT", 1)
    monkeypatch.setattr(sapt_analyses, "LAYERS", (1, 2))
    monkeypatch.setattr(sapt_analyses, "MANY", 3)
    monkeypatch.setattr(sapt_analyses, "read_stream", lambda name, folder, **given: small_tasks.stream())
    monkeypatch.setattr(sapt_analyses, "split_classes", lambda streams, count, seed: streams[0])


def made(name: str, case: str) -> dict[str, float]:
    """The numbers of a case that have no place."""
    return {measure: of[None] for measure, of in placed(name, case).items() if None in of}


def placed(name: str, case: str) -> dict[str, dict[float | None, float]]:
    """The numbers of a case by measure and place."""
    found: dict[str, dict[float | None, float]] = {}
    for one in dict(ANALYSES[name](GIVEN))[case]():
        found.setdefault(one["measure"], {})[one["x"]] = one["value"]
    return found


@pytest.mark.parametrize(
    "name, cases",
    [
        ("share", [f"{kind}, {part}%" for kind in ("real", "density") for part in (2, 5, 10, 50, 100)]),
        ("size", [f"{row}, {n} layers" for n in (1, 2) for row in ("sapt", "sequential-lora", "joint")]),
        ("unseen", ["sapt", "sequential-lora", "base model"]),
        ("pair", [f"similar (cat-dog, red-blue-green), {row}" for row in ("sapt", "sequential-lora", "separate")]),
        ("strength", ["λ 0.01", "λ 0.1", "λ 1", "λ 10", "balanced 1"]),
        ("gate", list(sapt_analyses.GATES)),
        ("prompts", list(sapt_analyses.PROMPTS)),
        ("rates", [f"{row}, {rate}" for row in sapt_analyses.RATED for rate in ("0.0005", "0.001", "0.002")]),
        ("fifty", ["sapt, 3 tasks", "sapt, gate held, 3 tasks", "sequential-lora, 3 tasks"]),
        ("instructions", ["with", "without"]),
    ],
)
def test_an_analysis_has_these_cases(name: str, cases: list[str]) -> None:
    assert [case for case, _ in ANALYSES[name](GIVEN)] == cases


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name, case",
    [
        ("share", "real, 50%"),
        ("share", "density, 100%"),
        ("strength", "balanced 1"),
        ("prompts", "prompts, rate ×5"),
        ("prompts", "prompts, rate ×5, no MLP"),
        *(("gate", case) for case in sapt_analyses.GATES),
    ],
)
def test_a_run_is_told_in_numbers(name: str, case: str) -> None:
    found = made(name, case)
    assert {
        "average_performance cil",
        "forgetting_rate cil",
        "learning_accuracy til",
        "own_adapter_weight end",
        "entropy learning",
        "seconds",
    } <= set(found)
    assert 0 <= found["least own_adapter_weight end"] <= found["own_adapter_weight end"] <= 1
    assert {"routed_score", "own_adapter_score", "last_adapter_score"} <= set(found)


def test_a_model_may_be_cut() -> None:
    model: Any = small_tasks.loaded().model
    cut: Any = cut_layers(small_tasks.loaded(), 1).model
    assert (len(cut.encoder.layer), cut.config.num_hidden_layers) == (1, 1)
    assert len(model.encoder.layer) == 2
    found = made("size", "joint, 1 layers")
    assert "average_performance cil" in found
    assert "own_adapter_weight end" not in found
    with pytest.raises(UserError, match=r"^layers: expected a number from 1 to 2, got 3"):
        cut_layers(small_tasks.loaded(), 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["sapt", "base model"])
def test_unseen_tasks_are_scored_and_never_trained(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []

    def seen(learner: Any, method: Any, **given: Any) -> Any:
        trained.append(len(learner.stream))
        return continual.run_stream(learner, method, **given)

    monkeypatch.setattr(sapt, "run_stream", seen)
    found = made("unseen", case)
    assert set(found) == {"score", "chance", "score: run-sit", "chance: run-sit"}
    assert found["chance"] == 50
    assert 0 <= found["score"] <= 100
    assert trained == ([2] if case == "sapt" else [])


def test_rates_are_those_that_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Row] = []
    monkeypatch.setattr(sapt_analyses, "run_row", lambda of, *rest, **more: asked.append(of) or tiny(of, *rest, **more))
    found = made("rates", "joint, 0.0005")
    assert [(of.method, of.lora, of.rate) for of in asked] == [("joint", True, 5e-4)]
    assert "average_performance cil" in found


@pytest.mark.exhaustive
def test_a_decoder_is_trained_here_and_taught_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; what it then writes is scored, and its blocks are weighed."""
    (tmp_path / "prose.txt").write_text("a cat sat on the mat, and the dog ran far away . " * 80, encoding="utf-8")
    made: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "length": 64,
        "vocab_size": 270,
    }
    made |= {"max_steps": 2, "warmup_steps": 1, "sink_samples": 4, "eval_samples": 4}
    monkeypatch.setattr(sapt_decoder, "RECIPE", {**made, "data": (f"prose={tmp_path / 'prose.txt'}",)})
    monkeypatch.setattr(sapt_decoder, "read_text_tasks", lambda seed, data: small_text_tasks.stream())
    monkeypatch.setattr(sapt_analyses, "FEW", ("animals", "colours"))
    cases = dict(ANALYSES["decoder"](dataclasses.replace(GIVEN, work=tmp_path)))
    assert tuple(cases) == (*sapt_decoder.DECODED, "lfpt5")
    found = {one["measure"]: one["value"] for one in cases["sapt"]()}
    assert {"average_performance til", "forgetting_rate til", "learning_accuracy til", "own_adapter_weight end"} <= set(
        found
    )
    assert "average_performance cil" not in found
    config = json.loads((tmp_path / "decoder-3" / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["RegardForCausalLM"]
    monkeypatch.setattr(sapt_decoder, "pretrain", None)
    assert cases["joint"]()
    asked: list[Row] = []
    monkeypatch.setattr(sapt_analyses, "run_row", lambda of, *rest: asked.append(of) or sapt.run_row(of, *rest))
    cases["incremental-lora"]()
    assert (asked[0].method, asked[0].rate) == ("incremental-lora", None)  # the budget's, as all others


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", list(sapt_decoder.STANDING))
def test_what_stands_for_tasks_is_told_with_what_it_gives_away(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sapt_decoder, "load_decoder", lambda work, seed: small_pseudo.writer())
    monkeypatch.setattr(sapt_decoder, "read_text_tasks", lambda seed, data: small_pseudo.tasks(3))
    monkeypatch.setattr(sapt_analyses, "FEW", tuple(task.name for task in small_pseudo.tasks(2).tasks))
    monkeypatch.setattr(sapt_decoder, "DECODER_BUDGET", small_text_tasks.BUDGET)
    quick = {"generated": {"generator_steps": 60, "generator_lr": 2e-2, "generator_batch_size": 8}}.get(case, {})

    def learnt(of: Row, *rest: Any) -> Any:
        return sapt.run_row(dataclasses.replace(of, settings={**of.settings, "router_warmup_steps": 2, **quick}), *rest)

    monkeypatch.setattr(sapt_analyses, "run_row", learnt)
    found = made("standing", case)
    assert "average_performance til" in found
    assert ("membership" in found) is (case != "none")
    assert 0 <= found.get("membership", 0) <= 1
    assert ({"told apart", "near duplicates", "copied 8-grams", "kept"} & set(found) != set()) is (case == "generated")


def test_portions_share_a_tasks_rows_and_come_again() -> None:
    whole = small_tasks.stream()
    found = sapt_analyses.split_portions(whole)
    assert [task.name for task in found.tasks] == [*NAMES, *(f"{name}, again" for name in NAMES)]
    for task, first, second in zip(whole.tasks, found.tasks[:3], found.tasks[3:], strict=True):
        rows = [tuple(zip(one.train.texts, one.train.labels, strict=True)) for one in (task, first, second)]  # type: ignore[union-attr]
        assert Counter(rows[0]) == Counter(rows[1]) + Counter(rows[2])
        assert (first.test, second.dev) == (task.test, task.dev)


@pytest.mark.exhaustive
def test_those_that_notice_are_told_with_how_often_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made("noticed", "sapt, a block a portion")
    assert found["blocks"] == 4
    assert found["right"] == 0.5
    found = made("noticed", "sapt-task-free")
    assert 1 <= found["blocks"] <= 4


def test_a_decoder_has_room_for_texts_and_answers() -> None:
    budget = sapt_decoder.DECODER_BUDGET
    assert sapt_decoder.RECIPE["length"] >= budget.length + budget.target_length
    assert preset_config("nano", **sapt_decoder.RECIPE).training_config().max_steps == sapt_decoder.RECIPE["max_steps"]


def test_a_decoder_is_given_as_many_rows_of_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        sapt_decoder, "read_stream", lambda *_, **given: asked.append(given) or small_text_tasks.stream()
    )
    monkeypatch.setattr(sapt_decoder, "TRAIN", 4)
    found = sapt_decoder.read_text_tasks(3, "nowhere")
    assert {"task_type": "generation", "missing_tasks": "skip", "seed": 3, "order": "3"}.items() <= asked[0].items()
    for task, whole in zip(found.tasks, small_text_tasks.stream().tasks, strict=True):
        answers = Counter(said[0] for said in task.train.targets)
        every = {said[0] for said in whole.train.targets}
        assert max(answers.values()) <= 4 // len(every)
        assert set(answers) == every
        assert set(task.train.inputs) <= set(whole.train.inputs)
        assert task.test == whole.test


def test_only_the_first_order_is_run_with_variants() -> None:
    first, other = map(sapt.list_rows, sapt.ORDERS)
    assert first == list(sapt.ROWS)
    assert {*first} - {*other} == {row for row in sapt.ROWS if ", " in row}


@pytest.mark.exhaustive
def test_two_tasks_are_told_with_their_weights() -> None:
    found = made("pair", "similar (cat-dog, red-blue-green), sapt")
    assert {f"task {task} {when}" for task in (1, 2) for when in ("learnt", "end")} <= set(found)
    assert found["task 2 learnt"] == found["task 2 end"]
    of_second = [found[f"weight of block {block} in task 2"] for block in (1, 2)]
    assert sum(of_second) == pytest.approx(1)


@pytest.mark.exhaustive
def test_many_tasks_are_told_by_their_number() -> None:
    found = placed("fifty", "sapt, 3 tasks")
    for name in ("seconds a step", "average_performance by tasks", "own_adapter_weight by tasks", "entropy by tasks"):
        assert list(found[name]) == [1, 2, 3]
    assert found["own_adapter_weight by tasks"][1.0] == pytest.approx(1)
    assert found["average_performance by tasks"][3.0] == pytest.approx(found["average_performance cil"][None])


def test_no_gate_tells_tasks_with_the_same_classes_apart() -> None:
    """a-b, b-c and b-a: a comes twice, b three times, c once."""
    first = small_tasks.stream().tasks[0]
    named = [("a", "b"), ("b", "c"), ("b", "a")]
    tasks = tuple(dataclasses.replace(first, name="-".join(one), labels=one) for one in named)
    found = sapt_analyses.bound_own_weight(Stream(name="x", tasks=tasks, order=(0, 1, 2), seed=0))
    bounds = [1, (1 + 1 / 2 + 1 / 2 + 1) / 4, (1 / 2 + 1 / 3 + 1 / 3 + 1 + 1 / 3 + 1 / 2) / 6]
    assert [(one["x"], one["value"]) for one in found] == [(n + 1, pytest.approx(one)) for n, one in enumerate(bounds)]


def test_tasks_are_chosen_by_name() -> None:
    found = select_tasks(small_tasks.stream(), (NAMES[2], NAMES[0]))
    assert [task.name for task in found.tasks] == [NAMES[2], NAMES[0]]
    assert sorted(found.order) == [0, 1]
    with pytest.raises(UserError, match=r"^data: expected the task mnli, there are cat-dog"):
        select_tasks(small_tasks.stream(), ("mnli",))


def test_what_is_not_known_is_no_number() -> None:
    assert make_number("x", None) == []
    assert make_number("x", 1, 2.0) == [{"measure": "x", "x": 2.0, "value": 1.0}]


@pytest.mark.exhaustive
def test_the_command_keeps_cases_and_makes_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sapt_analyses, "load", lambda name: small_tasks.loaded())
    given = ["instructions", "--data", "nowhere", "--work", str(tmp_path)]
    sapt_analyses.main(given)
    kept = sorted((tmp_path / "analysis-instructions").iterdir())
    assert [path.name for path in kept] == ["with-42.json", "without-42.json"]
    assert json.loads(kept[0].read_text(encoding="utf-8"))["case"] == "with"
    assert "instructions, with:" in capsys.readouterr().out
    sapt_analyses.main(given)
    assert capsys.readouterr().out == ""
    kept[0].parent.rename(tmp_path / "analysis-x")
    with pytest.raises(UserError, match="found none"):
        Tables.gather(tmp_path)
