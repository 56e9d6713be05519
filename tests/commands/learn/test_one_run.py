"""One run of a comparison: its gate and what is warned of, the head that is asked for, tasks from text to text."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tokenizers import models
from transformers import AutoModelForSeq2SeqLM

from regard.adapters.attention import SharedAttention
from regard.cli import main
from regard.commands.learn import one_run
from regard.commands.learn.config import LearnConfig
from regard.commands.learn.encoder_diagnostics import make_diagnostics
from regard.commands.learn.result import COLUMNS, LearnResult
from regard.commands.learn.rollback import rollback
from regard.commands.learn.run import TASK_END, Progress, learn
from regard.commands.learn.warnings import (
    find_unlearnt,
    majority_score,
    write_fit_warnings,
    write_gate_warnings,
    write_score_warnings,
    write_training_warnings,
)
from regard.continual import diagnostics
from regard.continual import run as running
from regard.continual.methods.epi import Epi, EpiConfig
from regard.continual.methods.sapt import Sapt, SaptConfig
from regard.continual.models import load_network
from regard.continual.run import make_learner
from regard.continual.training_phase import TrainingBudget, probing_rate, setting_rate
from regard.data.benchmarks import SUPER_NI_ORDERS
from regard.errors import UserError
from tests.commands.learn.learn_runs import FIELDS
from tests.commands.learn.marks import READS_ENGLISH
from tests.continual import small_text_tasks
from tests.continual.pseudo.test_files import published
from tests.continual.small_tasks import BUDGET, learnt_router, loaded, stream

pytestmark = READS_ENGLISH

SAPT: dict[str, Any] = {**FIELDS, "seeds": [1], "set": ("r=2",), "head": "labels"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))


@pytest.fixture(scope="module")
def gated() -> LearnResult:
    """SAPT beside a method without a gate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))
        return learn(stream(), ["sapt", "finetune"], loaded(), **SAPT)


class Interrupted(Exception):
    pass


def learn_until(task: int, phase: str, method: str, **given: Any) -> None:
    """Learn the stream up to a phase of a task, where the run is interrupted."""

    def stop(told: Progress) -> None:
        if (told.event.task_index, told.event.phase) == (task, phase):
            raise Interrupted

    with pytest.raises(Interrupted):
        learn(stream(), method, loaded(), on_progress=stop, **given)


# -- gates ------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_table_of_gates(gated: LearnResult) -> None:
    """All tasks so far after each task; scored are the one just learnt and, at the end, all."""
    table = gated.gate
    assert gated.pseudo.empty
    assert tuple(table) == COLUMNS["gate"]
    assert {*table["method"]} == {"sapt r=2"}
    assert str(table["adapter"].dtype) == "Int64"
    weights = table[table["statistic"] == "weight"]
    places = [*zip(weights["after_task"], weights["task_index"], weights["adapter"], strict=True)]
    assert places == [(n, t, b) for n in (1, 2, 3) for t in range(1, n + 1) for b in range(1, n + 1)]
    assert weights.groupby(["after_task", "task_index"])["value"].sum().tolist() == pytest.approx([1.0] * 6)
    scored = table[table["statistic"] == "routed_score"]
    assert [*zip(scored["after_task"], scored["task_index"], strict=True)] == [(1, 1), (2, 2), (3, 1), (3, 2), (3, 3)]


KEYS = ["after_task", "task_index", "task"]


def gate_scores(result: LearnResult, statistic: str) -> dict[Any, float]:
    """A score of the gate by task, after each task that it was taken after."""
    return dict(result.gate[result.gate["statistic"] == statistic].set_index(KEYS)["value"])


def matrix_scores(result: LearnResult, scenario: str) -> dict[Any, float]:
    matrix = result.accuracy_matrix
    rows = matrix[matrix["method"].str.startswith("sapt") & (matrix["scenario"] == scenario)]
    return dict(rows.set_index(KEYS)["score"])


def test_the_adapter_of_a_known_task_answers_alone(gated: LearnResult) -> None:
    """Where the task is not known nothing changes, and the router's scores are those of a run that has no other."""
    routed = learn(stream(), "sapt", loaded(), **{**SAPT, "set": ("r=2", "known_task=router")})
    known = matrix_scores(gated, "til")
    alone = gate_scores(gated, "own_adapter_score")
    assert alone == {key: known[key] for key in alone}
    by_router = matrix_scores(routed, "til")
    for result in (gated, routed):
        assert gate_scores(result, "routed_score") == {key: by_router[key] for key in alone}
        assert matrix_scores(result, "cil") == matrix_scores(routed, "cil")
    assert any(known[key] != by_router[key] for key in alone)
    by_task = {name: {known[key] for key in known if key[2] == name and key[0] >= key[1]} for _, _, name in known}
    assert {len(scores) for scores in by_task.values()} == {1}  # later tasks change nothing


@pytest.mark.exhaustive
def test_nothing_is_looked_at_where_nothing_is_diagnosed() -> None:
    found = learn(stream(), "sapt", loaded(), **{**SAPT, "diagnostic_samples": 0})
    assert found.gate.empty
    assert not any("gate" in text for text in found.metadata["runs"][0]["warnings"])


@pytest.mark.exhaustive
def test_a_comparison_that_is_gone_on_with_has_the_same_gates(gated: LearnResult, tmp_path: Path) -> None:
    given: dict[str, Any] = {**SAPT, "work_dir": tmp_path}
    learn_until(3, "fine-tuning", "sapt", **given)
    told: list[Progress] = []
    found = learn(stream(), "sapt", loaded(), resume=True, on_progress=told.append, **given)
    assert [one.event.task_index for one in told if one.event.phase == TASK_END] == [3]
    pd.testing.assert_frame_equal(found.gate, gated.gate, check_exact=True)
    found.save(tmp_path / "out")
    pd.testing.assert_frame_equal(LearnResult.load(tmp_path / "out").gate, gated.gate, check_exact=True)


def test_the_state_of_another_run_that_was_interrupted_is_told_of(tmp_path: Path) -> None:
    """Without the setting that it had, or with another, a run began anew and said nothing."""
    given: dict[str, Any] = {**FIELDS, "num_probing_epochs": None, "diagnostic_samples": 0, "seeds": [1]}
    given["work_dir"] = tmp_path
    learn_until(2, "fine-tuning", "replay", set="memory_size=3", **given)
    told: list[Progress] = []
    with pytest.warns(UserWarning, match=r"resume: replay-memory-size=3-1 was interrupted .* replay-1 is asked for"):
        learn(stream(), "replay", loaded(), resume=True, **given)
    learn(stream(), "replay", loaded(), resume=True, set="memory_size=3", on_progress=told.append, **given)
    assert [one.event.task_index for one in told if one.event.phase == TASK_END] == [2, 3]


def test_a_state_that_a_finished_run_has_left_is_none_that_was_interrupted(tmp_path: Path) -> None:
    """It was killed between the last line of its journal and the end of its states."""
    given: dict[str, Any] = {**FIELDS, "num_probing_epochs": None, "diagnostic_samples": 0, "seeds": [1]}
    given["work_dir"] = tmp_path
    learn(stream(), "finetune", loaded(), **given)
    (tmp_path / "states" / "finetune-1").mkdir(parents=True)
    with warnings.catch_warnings(record=True) as told:
        learn(stream(), "replay", loaded(), resume=True, **given)
    assert not told


def _with_other_words() -> Any:
    """The model with a tokenizer that takes cats for dogs."""
    found = loaded()
    state = json.loads(found.tokenizer.backend_tokenizer.to_str())
    words = state["model"]["vocab"]
    words["cat"], words["dog"] = words["dog"], words["cat"]
    found.tokenizer.backend_tokenizer.model = models.WordLevel(words, unk_token="[UNK]")
    return found


def _with_other_dropout() -> Any:
    return loaded(dropout=0.3)


@pytest.mark.every_value
@pytest.mark.parametrize(
    "change, problem",
    [
        (_with_other_words, "cannot resume: the tokenizer is another than the run began with, or the package"),
        (_with_other_dropout, "cannot resume: model_config.attention_probs_dropout_prob was null .* and is 0.3 now"),
    ],
)
def test_a_model_folder_whose_weights_alone_are_the_same_is_refused(change: Any, problem: str, tmp_path: Path) -> None:
    """Its tokenizer or its config was edited: the run went on with it in silence."""
    given: dict[str, Any] = {**FIELDS, "num_probing_epochs": None, "diagnostic_samples": 0, "seeds": [1]}
    given["work_dir"] = tmp_path
    learn_until(2, "fine-tuning", "replay", **given)
    with pytest.raises(UserError, match=problem):
        learn(stream(), "replay", change(), resume=True, **given)
    learn(stream(), "replay", loaded(), resume=True, **given)


def test_interference_is_the_same_where_a_run_goes_on_behind_its_last_task(tmp_path: Path) -> None:
    """InfLoRA trains one of the two matrices of an adapter."""
    given: dict[str, Any] = {**SAPT, "work_dir": tmp_path}
    learn_until(3, TASK_END, "inflora", **given)
    found = learn(stream(), "inflora", loaded(), resume=True, **given)
    whole = learn(stream(), "inflora", loaded(), **SAPT)
    assert len(whole.interference) == 6
    pd.testing.assert_frame_equal(found.interference, whole.interference, check_exact=True)


@pytest.mark.exhaustive
def test_no_interference_of_what_does_not_answer() -> None:
    """SLAO tunes an adapter and answers with another: all gradients would be 0."""
    assert learn(stream(), "slao", loaded(), **SAPT).interference.empty


@pytest.mark.exhaustive
def test_a_task_is_kept_when_it_is_told_of(tmp_path: Path) -> None:
    given: dict[str, Any] = {**SAPT, "diagnostic_samples": 0, "work_dir": tmp_path}
    learn_until(2, TASK_END, "sapt", **given)
    told: list[Progress] = []
    learn(stream(), "sapt", loaded(), resume=True, on_progress=told.append, **given)
    assert {one.event.task_index for one in told} == {3}


def test_the_diagnostics_are_of_a_model_with_its_blocks(gated: LearnResult) -> None:
    table = gated.diagnostics
    ours = table[table["method"].str.startswith("sapt") & (table["statistic"] == "over_smoothing")]
    by_place = ours[ours["task_index"] == 1].dropna(subset=["layer"]).set_index(["after_task", "layer"])["value"]
    before, after = by_place.loc[0], by_place.loc[1]
    assert (before != after).all()


@pytest.mark.exhaustive
def test_pseudo_samples_that_stand_for_tasks_are_looked_at(tmp_path: Path) -> None:
    """Of every task, beside its rows; a run without any has none, and what was found is read again."""
    for task in stream().tasks:
        published(tmp_path / "written", task.name, *(" ".join(one) for one in task.train.texts[::2]))
    settings = (
        *SAPT["set"],
        "router=attention",
        "reflection=generated",
        "memory_size=4",
        f"pseudo_samples_dir={tmp_path / 'written'}",
    )
    found = learn(stream(), "sapt", loaded(), **{**SAPT, "set": settings})
    assert tuple(found.pseudo) == COLUMNS["pseudo"]
    kept = found.pseudo[found.pseudo["statistic"] == "kept"]
    assert kept["task_index"].tolist() == [1, 2, 3]
    assert kept["task"].tolist() == [task.name for task in stream().tasks]
    whole = found.pseudo[found.pseudo["statistic"] == "copied_whole"]["value"]
    assert whole.tolist() == [1.0] * 3  # they are training rows
    found.save(tmp_path / "out")
    pd.testing.assert_frame_equal(LearnResult.load(tmp_path / "out").pseudo, found.pseudo)
    assert "Pseudo samples" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def row(after: int, position: int, weight: float) -> dict[str, Any]:
    return {
        "after_task": after,
        "task_index": position,
        "task": f"t{position}",
        "statistic": "own_adapter_weight",
        "adapter": position,
        "value": weight,
    }


@pytest.mark.parametrize(
    "settings, remedy",
    [
        ({"gate": "published"}, "--set gate=open"),
        ({"router_warmup_steps": 50}, "more than --set router_warmup_steps=50, --set freeze_router=true"),
    ],
)
def test_a_gate_that_is_shut_is_warned_of(settings: dict[str, Any], remedy: str) -> None:
    """Less than half of an equal share when it was learnt: of 1/2 for the second task, of 1/3 for the third."""
    gate = [row(1, 1, 1.0), row(2, 1, 0.01), row(2, 2, 0.24), row(3, 1, 0.001), row(3, 2, 0.01), row(3, 3, 0.17)]
    found = write_gate_warnings(gate, Sapt(SaptConfig(**learnt_router(**settings))))
    told = "gate: the adapter of t2 got 0.24 of its rows' weight; it was not trained. Open it: "
    assert found[0] == told + remedy
    assert [one.partition(" got ")[0] for one in found[1:-1]] == ["gate: the adapter of t1"]  # t2 has been told of
    assert found[-1].startswith("gate: tasks give their own adapters 0.06 of their rows' weight on average at the end;")


@pytest.mark.parametrize(
    "settings, remedy",
    [
        ({"reflection": "none"}, "--set reflection=real"),
        ({"gate": "published", "reflection_weight": 0.2}, "more than --set reflection_weight=0.2, or gate=open"),
        ({"memory_size": 4}, "more vectors with --set memory_size=N"),
    ],
)
def test_a_gate_that_shuts_later_is_warned_of(settings: dict[str, Any], remedy: str) -> None:
    """By what is there in the end: less than half of 1/3. What it was in between is not told."""
    gate = [row(1, 1, 1.0), row(2, 1, 0.01), row(2, 2, 0.9), row(3, 1, 0.5), row(3, 2, 0.16), row(3, 3, 0.17)]
    found = write_gate_warnings(gate, Sapt(SaptConfig(**learnt_router(**settings))))
    told = "gate: the adapter of t2 got 0.16 of its rows' weight at the end; it is lost. Preserve it: "
    assert found[:-1] == [told + remedy]
    assert found[-1].startswith("gate: tasks give their own adapters 0.28 of their rows' weight on average at the end;")


def test_blocks_that_have_their_weight_on_average_are_not_said_to_be_shared() -> None:
    gate = [row(1, 1, 1.0), row(2, 1, 0.4), row(2, 2, 0.61)]
    assert write_gate_warnings(gate, Sapt()) == []
    (told,) = write_gate_warnings([*gate[:2], row(2, 2, 0.59)], Sapt())
    assert told.endswith("either the gate is closed, or their texts are similar and share adapters")


def test_tasks_that_were_not_learnt_are_told_of() -> None:
    """cat-dog's commonest label has half of its rows, red-blue-green's a third; zero-shot and later scores are none."""
    tasks = stream()
    places = [(task.name, position) for position, task in enumerate(tasks.tasks, 1)]

    def cells(*scores: float, after: int = 0) -> list[dict[str, Any]]:
        return [
            {"scenario": "til", "task": name, "task_index": place, "after_task": after or place, "score": score}
            for (name, place), score in zip(places, scores, strict=True)
        ]

    shares = [majority_score(task.test.labels) for task in tasks.tasks]
    assert shares == [100 * max(map(task.test.labels.count, task.test.labels)) / len(task.test) for task in tasks.tasks]
    learnt = cells(*(one + 1 for one in shares))
    assert find_unlearnt(learnt, tasks) == []
    assert find_unlearnt([*learnt, *cells(0.0, 0.0, 0.0, after=3)], tasks) == [], "a task that was forgotten was learnt"
    assert find_unlearnt(cells(0.0, 0.0, 0.0, after=3), tasks) == [name for name, _ in places], "joint: at the end"
    zero_shot = [{**one, "after_task": one["task_index"] - 1} for one in cells(0.0, 0.0, 0.0)]
    assert find_unlearnt([*zero_shot, *learnt], tasks) == []
    assert find_unlearnt(cells(shares[0], shares[1] + 1, 0.0), tasks) == [places[0][0], places[2][0]]


def test_a_task_of_answers_that_are_labels_may_be_unlearnt() -> None:
    """Half of the rows of animals and colours have each label; moves has free answers, of which none is right."""
    tasks = small_text_tasks.stream()
    rows = [
        {"scenario": "til", "task": task.name, "task_index": place, "after_task": place, "score": score}
        for place, (task, score) in enumerate(zip(tasks.tasks, (50.0, 51.0, 0.0), strict=True), 1)
    ]
    assert find_unlearnt(rows, tasks) == ["animals", "moves"]


def test_every_task_that_was_not_learnt_is_named() -> None:
    names = [f"task {number}" for number in range(9)]
    worse = f"scores: no better than the most frequent label, or 0, right after training: {', '.join(names)}. Try more "
    assert write_score_warnings(names) == [f"{worse}--num-epochs or --learning-rate"]
    assert write_score_warnings(names, probing_rate(TrainingBudget())) == [
        f"{worse}epochs or another --probing-learning-rate"
    ]
    assert write_score_warnings(names, setting_rate(0.3)) == [f"{worse}epochs or another --set learning_rate"]
    assert write_score_warnings([]) == []


def test_tasks_whose_training_rows_are_wrong_are_named() -> None:
    """Below 75 %; not those that are named as not learnt."""
    rows = [{"task": name, "score": score} for name, score in (("a", 74.9), ("b", 75.0), ("c", 12.0), ("d", 30.0))]
    told = "training: less than 75 % of training rows are right just after their task: a (74.9 %), d (30.0 %). "
    more = "More steps (--min-steps) may learn more"
    assert write_fit_warnings(rows, ["c"], adapts_few=False) == [told + more]
    assert write_fit_warnings(rows, ["c"], adapts_few=True) == [
        f"{told}{more}, or adapters in more layers (--set target_modules=all-linear)"
    ]
    assert write_fit_warnings(rows[1:2], [], adapts_few=True) == []


@pytest.mark.parametrize(
    "method, settings, warns, adapts_few",
    [
        ("finetune", (), True, False),
        ("sapt", (), True, False),
        ("sapt", ("target_modules=auto",), True, True),
        ("sapt", ("adapter_type=prompt", "num_virtual_tokens=2"), True, False),
        ("merge-linear", (), False, False),
    ],
)
@pytest.mark.every_value
def test_a_run_names_tasks_whose_training_rows_are_wrong(
    method: str, settings: tuple[str, ...], warns: bool, adapts_few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and last, unless they are named as not learnt; of merged adapters the share would say nothing."""
    monkeypatch.setattr(running, "score_training_rows", lambda _, task: (10.0, 90.0, 20.0)[task])
    monkeypatch.setattr(one_run, "find_unlearnt", lambda *_: [])
    given = {**FIELDS, "seeds": [1], "diagnostic_samples": 0, "save_models": False, "set": settings}
    (run,) = learn(stream(), method, loaded(), **given).metadata["runs"]
    told = [text for text in run["warnings"] if text.startswith("training: less than")]
    first, _, last = run["tasks"]
    assert len(told) == warns
    assert all(f": {first} (10.0 %), {last} (20.0 %). " in text for text in told)
    assert all(("target_modules" in text) is adapts_few for text in told)


def test_tasks_that_training_made_worse_are_named() -> None:
    """By the score before a task was trained and the first one after; and by its adapter against another."""
    cells = [
        ("mood", 1, 0, 73.3),
        ("mood", 1, 1, 66.7),
        ("mood", 1, 2, 90.0),
        ("size", 2, 1, 20.0),
        ("size", 2, 2, 20.0),
    ]
    matrix = [
        {"scenario": scenario, "task": task, "task_index": place, "after_task": after, "score": score}
        for scenario in ("til", "cil")
        for task, place, after, score in cells
    ]
    rows = {"mood": 500, "size": 20}
    (message,) = write_training_warnings(matrix, [], rows)
    assert message == "training: lower scores than before: mood (66.7 after 73.3). Try more epochs"
    scores = {"own_adapter_score": 66.7, "last_adapter_score": 86.7}
    gate = [
        {"task": task, "task_index": place, "after_task": after, "statistic": name, "value": value}
        for task, place, after in (("mood", 1, 2), ("size", 2, 2))
        for name, value in scores.items()
    ]
    (message,) = write_training_warnings([], gate, rows)
    problem = "gate: adapters score less on the rows of their tasks than those of others"
    assert message == f"{problem}: size (66.7 against 86.7). Try more epochs"
    few = {"mood": 15, "size": 4}
    assert write_training_warnings(matrix, gate, few) == [], "15 rows do not tell 73.3 from 66.7"
    gate[2]["value"] = 86.6
    assert write_training_warnings([], gate, rows) == []


def test_the_blocks_of_tasks_are_in_the_record(gated: LearnResult) -> None:
    names = [task.name for task in stream().tasks]
    of_run = {run["method"]: run.get("blocks") for run in gated.metadata["runs"]}
    assert of_run == {"sapt r=2": dict(zip(names, (1, 2, 3), strict=True)), "finetune": None}


@pytest.mark.exhaustive
def test_a_shut_gate_is_in_the_record_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here by keys of which a new one is always far away."""
    whole = SharedAttention.scores

    def scores(self: SharedAttention, vectors: torch.Tensor) -> torch.Tensor:
        found = whole(self, vectors)
        if found.shape[-1] < 2:
            return found
        return torch.cat([found[:, :-1], found[:, -1:] - 50], -1)

    monkeypatch.setattr(SharedAttention, "scores", scores)
    found = learn(stream(), "sapt", loaded(), **{**SAPT, "set": ("r=2", "router=attention", "gate=published")})
    warnings = [one for one in found.metadata["runs"][0]["warnings"] if one.startswith("gate:")]
    assert [one.split(" got ")[0] for one in warnings[:-1]] == [
        "gate: the adapter of red-blue-green",
        "gate: the adapter of run-sit",
    ]
    assert warnings[-1].startswith("gate: tasks give their own adapters 0.3")
    assert json.loads(json.dumps(found.metadata)) == found.metadata


# -- heads ------------------------------------------------------------------------------------------------


def test_a_head_of_the_labels_words_is_not_trained(gated: LearnResult) -> None:
    """A linear one has a vector of 16 and a bias for each of seven classes."""
    assert gated.metadata["config"]["head"] == "labels"
    fields: dict[str, Any] = {**FIELDS, "seeds": [1], "diagnostic_samples": 0}
    plain, ours = (learn(stream(), "finetune", loaded(), head=head, **fields) for head in ("method", "labels"))
    scores = gated.accuracy_matrix[gated.accuracy_matrix["method"] == "finetune"]["score"]
    assert ours.accuracy_matrix["score"].tolist() == scores.tolist() != plain.accuracy_matrix["score"].tolist()
    assert plain.metadata["model"]["parameters"] - ours.metadata["model"]["parameters"] == 7 * 17


@pytest.mark.parametrize(
    "method, said, told",
    [
        ("probe", {}, "head: expected one that can be trained, stage probing trains the head alone, and labels has no"),
        ("ctr", {}, "head: expected linear with ctr, got labels"),
        ("idbr", {}, "head: expected linear with idbr, whose own it becomes, got labels"),
        (
            "mbpa++",
            {"set": ("adaptation_scope=head",)},
            "head: expected linear with adaptation_scope=head of mbpa++, got labels",
        ),
        ("prescale", {}, "head: expected method with prescale, whose own head is full, got 'labels'"),
    ],
)
def test_methods_that_need_a_head_to_train(method: str, said: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as raised:
        learn(stream(), method, loaded(), **{**FIELDS, **said, "head": "labels", "diagnostic_samples": 0})
    assert str(raised.value).startswith(told)
    assert "\n" not in str(raised.value)


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["l2p", "mbpa++"])
def test_others_learn_with_the_words_of_labels(method: str) -> None:
    small = {
        "l2p": ("pool_size=3", "prompt_length=1", "top_k=2"),
        "mbpa++": ("memory_size=6", "num_neighbors=2", "adaptation_steps=1"),
    }[method]
    found = learn(stream(4), method, loaded(), **{**FIELDS, "head": "labels", "diagnostic_samples": 0, "set": small})
    assert len(found.accuracy_matrix) > 0


def test_a_head_that_another_run_had_is_not_gone_on_with(tmp_path: Path) -> None:
    fields: dict[str, Any] = {**FIELDS, "diagnostic_samples": 0, "work_dir": tmp_path}
    learn(stream(), "finetune", loaded(), **fields)
    with pytest.raises(UserError, match=r"cannot resume: config.head was "):
        learn(stream(), "finetune", loaded(), resume=True, head="labels", **fields)


def test_the_schedule_of_a_course_is_that_of_training() -> None:
    said: dict[str, Any] = {"lr_scheduler_type": "constant", "warmup_ratio": 0.5, "weight_decay": 0.25}
    method, budget = Sapt(), LearnConfig(**FIELDS, **said).budget()
    learner = make_learner(stream(4), method, loaded(), budget, seed=1)
    stage = learner.fine_tuning_phase()
    plan = running._make_training_config(learner, stage, learner.epoch_batches(learner.items(0), stage), None)
    assert (plan.lr_scheduler_type, plan.warmup_steps, plan.weight_decay) == ("constant", plan.max_steps / 2, 0.25)


# -- from text to text --------------------------------------------------------------------------------------


@pytest.fixture
def instructed(tmp_path: Path) -> Path:
    """Two of SuperNI's tasks in its layout, and a tiny T5 with a tokenizer."""
    drawn = random.Random(1)
    for name, topic in zip(SUPER_NI_ORDERS["1"], ("animals", "colours"), strict=False):
        place = tmp_path / "data" / "SuperNI" / name
        place.mkdir(parents=True)
        for split, rows in (("train", 6), ("dev", 3), ("test", 4)):
            inputs = small_text_tasks.pairs(topic, rows, drawn)
            both = zip(inputs.inputs, inputs.targets, strict=True)
            told = [
                {"input": f"{split[:2]} {number} {text}", "output": list(of)} for number, (text, of) in enumerate(both)
            ]
            (place / f"{split}.json").write_text(json.dumps({"Definition": ["say it"], "Instances": told}))
    model = small_text_tasks.loaded("t5")
    model.model.save_pretrained(tmp_path / "t5")
    model.tokenizer.save_pretrained(tmp_path / "t5")
    return tmp_path


def line(folder: Path, *more: Any) -> list[str]:
    given = ("learn", "superni", "--data", folder / "data", "--missing-tasks", "skip", "--task-type", "generation")
    small = ("--num-epochs", 1, "--learning-rate", "5e-3", "--batch-size", 4, "--length", 40, "--target-length", 5)
    written = ("--diagnostic-samples", 2, "--model", folder / "t5", "--out", folder / "run")
    return [str(part) for part in (*given, *small, *written, *more)]


@pytest.mark.exhaustive
def test_answers_are_learnt_from_the_command_line(instructed: Path) -> None:
    assert main(line(instructed, "--method", "sapt,separate", "--set", "r=2")) == 0
    found = LearnResult.load(instructed / "run")
    assert {*found.accuracy_matrix["scenario"]} == {"til"}
    assert [one["metric"] for one in found.metadata["stream"]["tasks"]] == ["rouge-l"] * 2
    assert set(found.gate["after_task"]) == {1, 2}
    assert {*found.diagnostics["statistic"]} >= {"sink_deviation", "over_smoothing"}
    assert set(found.interference["after_task"]) >= {2}
    zero = found.metrics[
        (found.metrics["metric"] == "zero_shot_transfer") & found.metrics["method"].str.startswith("sapt")
    ]
    before = found.accuracy_matrix[
        (found.accuracy_matrix["after_task"] == 1) & (found.accuracy_matrix["task_index"] == 2)
    ]
    assert zero["value"].tolist() == before["score"].tolist(), "nothing is taken off for guessing"


@pytest.mark.exhaustive
def test_models_that_answer_in_texts_are_put_together_again(instructed: Path) -> None:
    assert main(line(instructed, "--method", "sapt,finetune", "--set", "r=2")) == 0
    plain = rollback(instructed / "run", 1, instructed / "plain", method="finetune")
    assert AutoModelForSeq2SeqLM.from_pretrained(plain).config.lineage["tasks"][0]["name"] == SUPER_NI_ORDERS["1"][0]
    network = load_network(rollback(instructed / "run", 2, instructed / "pool", method="sapt r=2"))
    ids = torch.tensor([[5, 6, 2]])
    said = network.generate({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 4)
    assert said.shape[0] == 1


def test_a_head_for_answers_is_refused(instructed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line(instructed, "--method", "sapt", "--head", "labels")) == 2
    told = "regard learn: head: expected none where answers are written (tasks from text to text), got 'labels'"
    assert capsys.readouterr().err.strip().splitlines()[-1] == told  # behind a warning of unknown tokens


@pytest.mark.parametrize("said", [{"task_type": "generation"}, {"missing_tasks": "skip"}, {"instructions": True}])
def test_a_stream_that_is_given_has_its_form(said: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(said)).replace('_', '-')} cannot be used with a Stream object"):
        learn(small_text_tasks.stream(), "sapt", small_text_tasks.loaded(), **said)


def test_a_given_model_learns_a_given_stream_of_answers() -> None:
    given: dict[str, Any] = {
        "num_epochs": 1,
        "batch_size": 4,
        "length": 16,
        "target_length": 5,
        "diagnostic_samples": 0,
    }
    found = learn(small_text_tasks.stream(4, 2), "separate", small_text_tasks.loaded(), **given)
    assert len(found.accuracy_matrix) == 3


def test_the_score_to_beat_is_that_of_the_most_frequent_label() -> None:
    assert majority_score([0, 1, 1, 2, 1]) == 60


@pytest.mark.exhaustive
def test_a_users_table_of_answers_is_learnt(tmp_path: Path) -> None:
    """Prompts and answers of the tiny tasks as rows of a table, with an instruction; labels are written where asked."""
    rows = [
        {"task": task.name, "split": split, "instruction": "say :", "text": text, "answer": list(answers)}
        for task in small_text_tasks.stream(4, 2).tasks
        for split in ("train", "dev", "test")
        for text, answers in zip(task.split(split).inputs, task.split(split).targets, strict=True)
    ]
    answered, labelled = tmp_path / "answered.jsonl", tmp_path / "labelled.jsonl"
    answered.write_text("".join(json.dumps(one) + "\n" for one in rows))
    labelled.write_text("".join(json.dumps({**one, "label": one["answer"][0]}) + "\n" for one in rows))
    given: dict[str, Any] = {"num_epochs": 1, "batch_size": 4, "target_length": 5, "diagnostic_samples": 0}
    found = learn(answered, "sequential-lora", small_text_tasks.loaded(), order="paper", **given)
    assert {task["metric"] for task in found.metadata["stream"]["tasks"]} == {"rouge-l-unicode"}
    assert len(found.accuracy_matrix) == 5
    assert found.metadata["runs"][0]["length"] == 16, "fitted: an instruction, at most ten words and the prompt's"
    assert found.metadata["runs"][0]["truncation"] == []
    found = learn(labelled, "sequential-lora", small_text_tasks.loaded(), task_type="generation", **given)
    assert {task["metric"] for task in found.metadata["stream"]["tasks"]} == {"rouge-l-unicode"}
    labelled.write_text(labelled.read_text().replace('"answer"', '"other"'))
    found = learn(labelled, "sequential-lora", small_text_tasks.loaded(), task_type="generation", **given)
    assert {task["metric"] for task in found.metadata["stream"]["tasks"]} == {"exact-match-unicode"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", [Epi(EpiConfig(r=2)), Sapt(SaptConfig(r=2))], ids=["epi", "sapt"])
def test_diagnostics_observe_each_row_once(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a router reads in the encoder to weigh adapters is not observed."""
    learner = make_learner(stream(), method, loaded(dropout=0.0), BUDGET, seed=1)
    running.run_stream(learner, method)
    observed: list[int] = []
    samples = diagnostics.watching

    @contextmanager
    def note(*arguments: Any, **options: Any) -> Iterator[Any]:
        with samples(*arguments, **options) as observer:
            yield observer
        observed.append(observer.samples)

    monkeypatch.setattr(diagnostics, "watching", note)
    config = LearnConfig(**{**FIELDS, "diagnostic_samples": 6})
    make_diagnostics(config, loaded())(learner, 1)
    assert observed == [6]
