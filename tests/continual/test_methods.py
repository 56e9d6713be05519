"""What holds of every method of continual learning, whichever there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from regard.continual import run as running
from regard.continual.costs import AROUND
from regard.continual.learner import Learner
from regard.continual.method import Method, MethodState
from regard.continual.methods import METHODS, method_named
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import ProgressEvent, RunState, collect_tensors
from regard.data.stream import Stream
from regard.errors import UserError
from tests.continual.small_tasks import loaded, stream
from tests.continual.together import ONE, ROWS, TEXTS_ALONE, exact, kept, made, no_flops, two_tasks
from tests.training.test_loop_processes import free_port

ROOT = Path(__file__).parents[2]
NAMES = tuple(name for name in METHODS if name not in TEXTS_ALONE)
BEGINS_AS_FINE_TUNING = {"finetune", "replay", "agem", "ewc", "lwf", "der++", "mbpa++", "separate"}
"""Those for which the first task is one like any other: nothing is to be kept yet."""
FROZEN = {"probe", "l2p", "ctr"}
"""Those whose encoder stays as it was."""
NO_ADAPTERS = {
    "l2p",
    "ctr",
    "sequential-lora",
    "incremental-lora",
    "replay-lora",
    "o-lora",
    "n-lora",
    "inflora",
    "migu",
    "slao",
    "merge-linear",
    "merge-ties",
    "merge-dare",
    "gainlora",
    "seekr",
    "osf",
    "progprompt",
    "epi",
    "sapt",
    "sapt-paper",
    "sapt-task-free",
}
"""Those that refuse adapters beside those of their own."""
WITH_MEMORY = {"replay": 6, "replay-lora": 6, "seekr": 6, "agem": 6, "der++": 6, "mbpa++": 6}
CLOCK = ("seconds", *AROUND, "examples_per_second", "peak_memory_mib")


class Broken(Exception):
    """What ends a run early."""


class Outcome(NamedTuple):
    """A run's tables and weights, what was kept, and the classifier's weights after each task."""

    found: dict[str, Any]
    weights: dict[str, Tensor]
    kept: MethodState
    after: list[dict[str, Tensor]]


def learner_of(method: Method, *, of: Stream | None = None, **options: Any) -> Learner:
    return make_learner(of or stream(ROWS), method, loaded(), ONE, **{"seed": 1, **options})


def outcome(ran: RunState, after: list[dict[str, Tensor]]) -> Outcome:
    rows = [{name: value for name, value in row.items() if name not in CLOCK} for row in ran.rows["cost"]]
    return Outcome({**ran.rows, "cost": rows}, collect_tensors(ran.network), ran.method.state, after)


@cache
def learnt(name: str, seed: int = 1) -> Outcome:
    """The stream learnt from beginning to end."""
    method, after = made(name), list[dict[str, Tensor]]()

    def on_task(learner: Learner, task: int) -> None:
        weights = collect_tensors(learner.network.classifier)
        after.append({key: value.clone() for key, value in weights.items()})

    return outcome(run_stream(learner_of(method, seed=seed), method, on_task=on_task), after)


def check_same(found: Outcome, expected: Outcome) -> None:
    """Bit for bit."""
    assert found.found == expected.found
    assert found.weights.keys() == expected.weights.keys()
    assert all(torch.equal(one, found.weights[name]) for name, one in expected.weights.items())
    assert found.kept.examples == expected.kept.examples
    assert found.kept.values == expected.kept.values
    assert found.kept.tensors.keys() == expected.kept.tensors.keys()
    assert all(torch.equal(one, found.kept.tensors[name]) for name, one in expected.kept.tensors.items())


# -- scores and memory ----------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_matrix_has_a_score_for_each_task_learnt_and_the_next(name: str) -> None:
    kind, rows = METHODS[name], learnt(name).found["matrix"]
    places = {(row["after_task"], row["task_index"], row["scenario"]) for row in rows}
    assert len(places) == len(rows)
    assert all(0 <= row["score"] <= 100 for row in rows)
    assert {row["n"] for row in rows} == {8, 12}
    first = 3 if kind.evaluation_scope == "end" else 1
    config = ("til", "cil") if kind.incremental else ("til",)
    expected = {(after, place, kind_) for after in range(first, 4) for place in range(1, after + 1) for kind_ in config}
    before = {(after, after + 1, "til") for after in range(3)} if kind.evaluation_scope == "seen" else set()
    assert places == expected | before
    scores = {(row["after_task"], row["task_index"], row["scenario"]): row["score"] for row in rows}
    assert all(
        scores[after, place, "cil"] <= scores[after, place, "til"] for after, place, kind_ in expected if kind_ == "cil"
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_no_more_is_kept_than_is_declared(name: str) -> None:
    found, method = learnt(name), made(name)
    many = [row["memory_examples"] for row in found.found["cost"]]
    assert all(count <= method.memory_size for count in many)
    assert many[-1] == len(found.kept.examples) == len(set(found.kept.examples))
    assert all(0 <= item.task < 3 for item in found.kept.examples)
    if name in WITH_MEMORY:
        assert method.memory_size == WITH_MEMORY[name] == many[-1]
    if found.kept.examples or found.kept.tensors:
        assert found.found["cost"][-1]["memory_bytes"] > 0


# -- what is trained ------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_the_first_task_is_fine_tuning_where_nothing_is_to_be_kept_yet(name: str) -> None:
    found, plain = learnt(name).after[0], learnt("finetune").after[0]
    same = found.keys() == plain.keys() and all(torch.equal(one, found[key]) for key, one in plain.items())
    assert same == (name in BEGINS_AS_FINE_TUNING)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "finetune"])
def test_no_method_is_fine_tuning_in_the_end(name: str) -> None:
    found, plain = learnt(name).after[2], learnt("finetune").after[2]
    assert found.keys() != plain.keys() or any(not torch.equal(one, found[key]) for key, one in plain.items())


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_frozen_stays_frozen(name: str) -> None:
    method = made(name)
    learner = learner_of(method)
    encoder = {key: value for key, value in learner.start.items() if key.startswith("classifier.encoder.")}
    weights = learnt(name).weights
    assert encoder
    assert weights.keys() >= encoder.keys()
    moved = [key for key, value in encoder.items() if not torch.equal(value, weights[key])]
    assert (not moved) == (name in FROZEN)
    for key, one in learner.network.named_parameters():
        opened = {"adapters", "soft_prompts", "keys"} & set(key.split("."))  # one after the other
        if not one.requires_grad and not opened:
            assert torch.equal(weights[key], learner.start[key]), key


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_below_adapters_the_model_stays_as_it_was(name: str) -> None:
    method = made(name)
    if name in NO_ADAPTERS:
        with pytest.raises(UserError, match="lora: expected none "):
            learner_of(method, lora={"rank": 2})
        return
    learner = learner_of(method, of=two_tasks(), lora={"rank": 2})
    run_stream(learner, method)
    moved = {key for key, value in learner.network.state_dict().items() if not torch.equal(value, learner.start[key])}
    outside = [key for key in moved if key.startswith("classifier.encoder.") and "lora_" not in key]
    assert outside == []
    assert any(key.startswith("classifier.head.") for key in moved)
    assert any("lora_" in key for key in moved) == (name not in FROZEN)


# -- the same numbers: each run that goes on is a second one of the same seed -----------------------------


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_stops_between_tasks_is_resumed_to_the_same(name: str, tmp_path: Path) -> None:
    def stop(learner: Learner, learnt: int) -> None:
        if learnt == 2:
            raise Broken

    method = made(name)
    with pytest.raises(Broken):
        run_stream(learner_of(method), method, folder=tmp_path, on_task=stop)
    method = made(name)
    found = outcome(run_stream(learner_of(method), method, folder=tmp_path, resume=True), [])
    check_same(found, learnt(name))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_is_killed_within_a_stage_is_resumed_to_the_same(name: str, tmp_path: Path) -> None:
    method = made(name)
    learner = learner_of(method)

    def kill(told: ProgressEvent) -> None:
        names = [phase.name for phase in method.phases(learner, learner.task)]  # none where all is learnt at the end
        if told.task_index >= 2 and told.phase in names[-1:] and told.step == 2:
            raise Broken

    with pytest.raises(Broken):
        run_stream(learner, method, folder=tmp_path, checkpoint_every=1, on_progress=kill)
    assert max(tmp_path.glob("task-*/stage-*/*")).name == "step-00000001"
    method = made(name)
    found = outcome(run_stream(learner_of(method), method, folder=tmp_path, resume=True, checkpoint_every=1), [])
    check_same(found, learnt(name))


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_another_seed_draws_another_head(name: str) -> None:
    ours, other = (learner_of(made(name), seed=seed).start["classifier.head.vectors"] for seed in (1, 2))
    assert not torch.equal(ours, other)


@cache
def whole(name: str) -> RunState:
    """A run without dropout in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "measure_flops", no_flops)
        return exact(name)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_do_not_matter(name: str) -> None:
    check_close(name, collect_tensors(exact(name, micro_batch=3).network), collect_tensors(whole(name).network))


def check_close(name: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-10, msg=f"{name}: {key}")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    shared = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script = str(Path(__file__).with_name("together.py"))
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", script, str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    try:
        ended = [(process.communicate(timeout=900)[1], process.returncode) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [code for _, code in ended] == [0, 0], "\n".join(said for said, _ in ended)
    for rank in (0, 1):
        told = json.loads((tmp_path / f"found-{rank}.json").read_text())
        for name in NAMES:
            assert told[name] == kept(whole(name)), name
            check_close(name, load_file(tmp_path / f"{name}-{rank}.safetensors"), collect_tensors(whole(name).network))


def test_names_that_are_no_method() -> None:
    assert method_named("replay") is METHODS["replay"]
    with pytest.raises(UserError, match=r"method: expected one of finetune, .*, got 'er'"):
        method_named("er")
    with pytest.raises(UserError, match=r"^method: there is no 'repaly', did you mean 'replay'\?"):
        method_named("repaly")


def test_settings_that_are_none() -> None:
    parsed = METHODS["replay"].Config.parse
    with pytest.raises(UserError, match=r"^set: there is no setting speed; allowed are memory_size, "):
        parsed({"speed": 1})
    with pytest.raises(
        UserError, match=r"^set: there is no setting memory_siz, did you mean 'memory_size'\? Allowed are memory_size, "
    ):
        parsed({"memory_siz": 1})
    with pytest.raises(UserError, match=r"^set: there is no setting memory_size, the method has none$"):
        METHODS["finetune"].Config.parse({"memory_size": 1})


@pytest.mark.parametrize(
    "name, settings, told",
    [
        ("prescale", "common_tokens=frequent", "scaling=sink, which reads it, got scaling=full"),
        ("prescale", "min_document_frequency=.2 scaling=sink", "common_tokens=frequent, which reads it, got common_to"),
        ("replay", "replay_interval=10", "replay_mode=interval, which reads it, got replay_mode=batch"),
        ("replay-lora", "replay_batch_size=3 replay_mode=merge", "replay_mode=batch or interval, which reads it, got"),
        ("mbpa++", "l2_weight=.1 adaptation_steps=0", "adaptation_steps above 0, which reads it, got adaptation_steps"),
        ("ewc", "decay_factor=.5", "online=true, which reads it, got online=false"),
        ("idbr", "memory_size=90 replay=false", "replay=true, which reads it, got replay=false"),
    ],
)
def test_settings_that_change_nothing_beside_the_others_are_refused(name: str, settings: str, told: str) -> None:
    """They were taken in silence: `--set replay_interval=10` alone gave the numbers of the default."""
    values = dict(setting.split("=", 1) for setting in settings.split())
    with pytest.raises(UserError, match=f"^{next(iter(values))}: expected {told}"):
        METHODS[name].Config.parse(values)
    assert METHODS[name].Config.unread(values) == {next(iter(values))}
