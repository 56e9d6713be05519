"""Streams from text to text: learnt, scored, resumed and put together again, with methods that need no classes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM

from regard.continual import scoring
from regard.continual.costs import AROUND, measure_flops, trim_padding
from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.methods import METHODS
from regard.continual.models import (
    TaskDeltas,
    delta_path,
    export_network,
    load_network,
    rebuild_network,
)
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import ProgressEvent, RunState, collect_tensors
from regard.continual.scoring import generate_answers, score_task, score_text
from regard.continual.text_learner import TextLearner
from regard.errors import UserError
from regard.models.generator import add_model_hash
from tests.continual import small_tasks
from tests.continual.small_text_tasks import ANSWERS, BUDGET, KINDS, Kind, lively, loaded, stream, task

NAMES = ("finetune", "replay", "agem", "ewc", "separate", "joint")
SMALL: dict[str, dict[str, Any]] = {
    "replay": {"memory_size": 6, "storage_policy": "balanced"},
    "agem": {"memory_size": 6, "replay_batch_size": 3},
    "ewc": {"fisher_samples": 4},
}
ONE = replace(BUDGET, num_epochs=1)
CLOCK = ("seconds", *AROUND, "examples_per_second", "peak_memory_mib")
ENOUGH = 90.0


class Broken(Exception):
    """What ends a run early."""


def made(name: str) -> Method:
    kind = METHODS[name]
    return kind(kind.Config.parse(SMALL.get(name, {})))


def learner_of(method: Method, kind: Kind = "t5", **options: Any) -> TextLearner:
    return cast(TextLearner, make_learner(stream(4), method, loaded(kind, dropout=0.1), ONE, **{"seed": 1, **options}))


@cache
def learnt(name: str) -> RunState:
    """The stream learnt from beginning to end."""
    method = made(name)
    return run_stream(learner_of(method), method)


def tables(ran: RunState) -> dict[str, Any]:
    rows = [{name: value for name, value in row.items() if name not in CLOCK} for row in ran.rows["cost"]]
    return {**ran.rows, "cost": rows}


def check_same(found: RunState, expected: RunState) -> None:
    """Bit for bit."""
    assert tables(found) == tables(expected)
    weights = collect_tensors(expected.network)
    assert all(torch.equal(one, weights[name]) for name, one in collect_tensors(found.network).items())
    assert found.method.state.examples == expected.method.state.examples
    for name, one in expected.method.state.tensors.items():
        assert torch.equal(one, found.method.state.tensors[name])


# -- scores -----------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_answers(kind: Kind) -> None:
    learner = cast(TextLearner, make_learner(stream(), made("finetune"), lively(kind), BUDGET, seed=1))
    said = [answer for _, answer in sorted(generate_answers(learner, cast(Any, learner.stream.tasks[0])))]
    assert len(said) == 8
    assert not any("[" in one for one in said)
    first = cast(Any, learner.stream.tasks[0])
    targets = tuple((one or "nothing", "else") if row % 4 else ("wrong",) for row, one in enumerate(said))
    told = replace(first, test=replace(first.test, targets=targets))
    rights = sum(row % 4 != 0 and one != "" for row, one in enumerate(said))
    assert 0 < rights <= 6
    found = score_text(learner, told)
    assert found.til == pytest.approx(100 * rights / 8)
    assert (found.cil, found.n) == (None, 8)
    assert score_task(learner, 0, tasks_trained=1) == score_text(learner, first)
    assert score_task(learner, 0, tasks_trained=0, split="dev").n == 6
    learner.budget = replace(BUDGET, eval_batch_size=3)
    assert sorted(generate_answers(learner, first)) == list(enumerate(said))


@pytest.mark.exhaustive
def test_a_task_outside_the_stream() -> None:
    ran = learnt("finetune")
    other = task("colours", rows=9)
    assert other not in ran.learner.stream.tasks
    assert score_text(ran.learner, other) == score_task(ran.learner, 1, tasks_trained=3)
    with pytest.raises(
        UserError, match="task: expected a run over tasks from text to text, words is of classification"
    ):
        score_text(
            make_learner(small_tasks.stream(), METHODS["finetune"](), small_tasks.loaded(), small_tasks.BUDGET, seed=1),
            other,
        )


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_the_matrix(name: str) -> None:
    kind, rows = METHODS[name], learnt(name).rows["matrix"]
    assert {row["scenario"] for row in rows} == {"til"}
    assert all(0 <= row["score"] <= 100 and row["n"] == 8 for row in rows)
    places = {(row["after_task"], row["task_index"]) for row in rows}
    assert len(places) == len(rows)
    first = 3 if kind.evaluation_scope == "end" else 1
    expected = {(after, place) for after in range(first, 4) for place in range(1, after + 1)}
    assert places == expected | (
        {(after, after + 1) for after in range(3)} if kind.evaluation_scope == "seen" else set()
    )


# -- learning ---------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_the_tasks_are_learnt(kind: Kind) -> None:
    """All at once, with no word of which task a prompt is of but its own."""
    method, model = made("joint"), loaded(kind, width=24)
    learner = make_learner(
        stream(20), method, model, replace(BUDGET, num_epochs=11, batch_size=8, learning_rate=1e-2), seed=1
    )
    ran = run_stream(learner, method)
    scores = {row["task"]: row["score"] for row in ran.rows["matrix"]}
    assert set(scores) == set(ANSWERS)
    assert min(scores.values()) >= ENOUGH, scores


@pytest.mark.exhaustive
def test_what_is_learnt_last_is_known_best() -> None:
    method = made("finetune")
    ran = run_stream(
        make_learner(
            stream(12, many=2), method, loaded(width=24), replace(BUDGET, num_epochs=12, learning_rate=1e-2), seed=1
        ),
        method,
    )
    scores = {(row["after_task"], row["task_index"]): row["score"] for row in ran.rows["matrix"]}
    assert scores[1, 1] >= ENOUGH
    assert scores[2, 2] >= ENOUGH
    assert scores[0, 1] < ENOUGH / 2
    assert scores[2, 1] < ENOUGH / 2


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "finetune"])
def test_no_method_is_fine_tuning(name: str) -> None:
    found = []
    for one in ("finetune", name):
        method = made(one)
        longer = replace(ONE, num_epochs=4)
        found.append(
            collect_tensors(
                run_stream(make_learner(stream(4, many=2), method, loaded(), longer, seed=1), method).network
            )
        )
    assert any(not torch.equal(one, found[0][key]) for key, one in found[1].items())


@pytest.mark.exhaustive
def test_a_memory_has_each_answer() -> None:
    ran = learnt("replay")
    kept = ran.method.state.examples
    assert len(kept) == 6
    said = {cast(Any, ran.learner.stream.tasks[item.task]).train.targets[item.row][0] for item in kept}
    assert len(said) == 6
    assert ran.rows["cost"][-1]["memory_bytes"] == sum(4 * ran.learner.length(item) + 4 for item in kept)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name, kind", [*((name, "t5") for name in NAMES), ("finetune", "llama")])
def test_micro_batches_do_not_matter(name: str, kind: Kind) -> None:
    found = []
    for size in (None, 3):
        method = made(name)
        model = loaded(kind, dtype=torch.float64)
        learner = make_learner(stream(4, many=2), method, model, replace(ONE, micro_batch_size=size), seed=1)
        found.append(collect_tensors(run_stream(learner, method).network))
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=0, atol=1e-9)


def test_examples_are_rows_whatever_the_length_of_their_answers() -> None:
    ran = learnt("finetune")
    budget = ran.learner.budget
    for one, row in zip(ran.learner.stream.tasks, ran.rows["cost"], strict=True):
        assert row["examples_per_second"] * row["seconds"] == pytest.approx(budget.num_epochs * len(one.train))


def test_operations_are_counted_for_each_token() -> None:
    method = made("finetune")
    learner = learner_of(method)
    phase = learner.fine_tuning_phase()
    batches = method.batches(learner, 0, phase)
    rows = trim_padding(batches.rows(0))
    with FlopCounterMode(display=False) as counter:
        learner.generator.encoder(
            **{name: rows[name] for name in ("input_ids", "attention_mask", "labels")}
        ).loss.backward()
    per_token, per_step = measure_flops(learner, method, batches, phase)
    tokens = rows["input_ids"].numel() + rows["labels"].numel()
    assert per_token * tokens == pytest.approx(counter.get_total_flops(), rel=0.05)
    assert per_step == pytest.approx(0, abs=1e-6 * counter.get_total_flops())


# -- the same numbers -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["replay", "ewc", "separate"])
def test_a_run_that_stops_between_tasks_is_resumed_to_the_same(name: str, tmp_path: Path) -> None:
    def stop(learner: Learner, many: int) -> None:
        if many == 2:
            raise Broken

    method = made(name)
    with pytest.raises(Broken):
        run_stream(learner_of(method), method, folder=tmp_path, on_task=stop)
    method = made(name)
    check_same(run_stream(learner_of(method), method, folder=tmp_path, resume=True), learnt(name))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_is_killed_within_a_stage_is_resumed_to_the_same(name: str, tmp_path: Path) -> None:
    def kill(told: ProgressEvent) -> None:
        if (told.task_index >= 2 or name == "joint") and told.step == 2:
            raise Broken

    method = made(name)
    with pytest.raises(Broken):
        run_stream(learner_of(method), method, folder=tmp_path, checkpoint_every=1, on_progress=kill)
    assert max(tmp_path.glob("task-*/stage-*/*")).name == "step-00000001"
    method = made(name)
    check_same(run_stream(learner_of(method), method, folder=tmp_path, resume=True, checkpoint_every=1), learnt(name))


@pytest.mark.exhaustive
def test_another_length_of_answers_is_another_run(tmp_path: Path) -> None:
    method = made("finetune")
    run_stream(learner_of(method), method, folder=tmp_path)
    other = make_learner(stream(4), method, loaded(dropout=0.1), replace(ONE, target_length=4), seed=1)
    with pytest.raises(
        UserError, match=r"cannot resume: .*budget.target_length was 5 when the run started and is 4 now"
    ):
        run_stream(other, made("finetune"), folder=tmp_path, resume=True)


# -- what each task has changed -----------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
@pytest.mark.parametrize("name", ["finetune", "separate", "joint"])
def test_the_network_after_each_task(name: str, lora: Any, tmp_path: Path) -> None:
    method, after, deltas = made(name), list[dict[str, Tensor]](), TaskDeltas(tmp_path)
    learner = make_learner(stream(4), method, add_model_hash(loaded()), ONE, seed=1, lora=lora)
    deltas.begin(learner, method, name)

    def keep(learner: Learner, task: int) -> None:
        deltas.write(learner, task)
        after.append({key: value.clone() for key, value in collect_tensors(learner.network).items()})

    run_stream(learner, method, on_task=keep)
    for task_, expected in enumerate(after, start=1):
        network, about = rebuild_network(tmp_path, task_, loaded())
        found = collect_tensors(network)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    names = set(load_file(delta_path(tmp_path, 3)))
    assert names
    assert lora is None or all("lora_" in one for one in names)
    check_exported(learner, network, about, tmp_path / "model")
    with pytest.raises(UserError, match="model: expected the one that the run began with, tiny-t5 with weights"):
        rebuild_network(tmp_path, 1, loaded(seed=1))


def check_exported(learner: Learner, network: Any, about: Any, folder: Path) -> None:
    """It is read again, by us and by Transformers, and answers the same."""
    export_network(network, learner.tokenizer, about, folder)
    rows = learner.rows([*learner.items(0), *learner.items(2)])
    expected = learner.network.eval()(rows)
    torch.testing.assert_close(load_network(folder)(rows), expected)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert [one["name"] for one in model.config.lineage["tasks"]][-1] == "moves"
    assert json.loads((folder / "lineage.json").read_text()) == model.config.lineage
    ids = model.generate(rows["input_ids"], attention_mask=rows["attention_mask"].long(), max_new_tokens=5)
    ours = cast(Any, learner.network).generate(rows, 5)
    assert torch.equal(ids[:, 1:], ours)


def test_a_language_model_is_told_by_its_head_too() -> None:
    given = loaded("gpt2")
    assert add_model_hash(given).sha256 == add_model_hash(loaded("gpt2")).sha256
    other = loaded("llama")
    with torch.no_grad():
        cast(Any, other.model).lm_head.weight[0] += 1
    assert add_model_hash(other).sha256 != add_model_hash(loaded("llama")).sha256


def test_a_process_without_a_row_has_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of four processes, for one."""
    learner = learner_of(made("finetune"))
    monkeypatch.setattr(scoring.processes, "local_shard", lambda rows: rows[:0])
    assert score_text(learner, cast(Any, learner.stream.tasks[0])).til == 0
