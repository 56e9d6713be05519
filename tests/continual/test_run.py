"""Runs over a stream against a loop written out by hand, and what they say of scores and costs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.methods import METHODS
from regard.continual.run import KEEPING, SCORING, make_learner, run_stream, trim_padding
from regard.continual.run_state import ProgressEvent, RunState, collect_tensors
from regard.data.stream import ClassificationTask, Stream
from regard.errors import UserError
from tests.continual.small_tasks import BUDGET, CLASSES, loaded, stream

PAPER = replace(BUDGET, warmup_ratio=0.06, num_epochs=3, learning_rate=1e-2)
OFFSETS = (0, 2, 5, 7)
"""Where the classes of each task begin among those of the stream."""


class Broken(Exception):
    """What ends a run early."""


def exact(name: str = "finetune", *, budget: Any = PAPER, of: Stream | None = None) -> Learner:
    """In float64 and without dropout."""
    learner = make_learner(of or stream(), METHODS[name](), loaded(dropout=0.0, dtype=torch.float64), budget, seed=1)
    for module in learner.network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return learner


def scores(ran: RunState) -> dict[tuple[int, int, str], float]:
    return {(row["after_task"], row["task_index"], row["scenario"]): row["score"] for row in ran.rows["matrix"]}


# -- by hand --------------------------------------------------------------------------------------------


def trained_by_hand(network: nn.Module, batches: list[dict[str, Tensor]], first: int, count: int) -> None:
    """AdamW on the mean cross-entropy over `count` classes from `first` on, as arXiv 2410.05648 trains a task."""
    parameters, steps = list(network.parameters()), len(batches)
    warm = math.ceil(0.06 * steps)
    means, squares = ([torch.zeros_like(one) for one in parameters] for _ in range(2))
    network.train()
    for step, rows in enumerate(batches, start=1):
        rate = 1e-2 * (step / warm if step <= warm else (steps + 1 - step) / (steps + 1 - warm))
        counted = rows["labels"] != IGNORE_INDEX
        given = {
            name: rows[name][counted] for name in ("input_ids", "attention_mask", "token_type_ids") if name in rows
        }
        logits = network(given)[:, first : first + count]
        right = logits.gather(1, rows["labels"][counted, None] - first)[:, 0]
        mean = (logits.exp().sum(1).log() - right).mean()
        gradients = torch.autograd.grad(mean, parameters)
        norm = math.sqrt(sum(float(one.square().sum()) for one in gradients))
        with torch.no_grad():
            for value, gradient, m, v in zip(parameters, gradients, means, squares, strict=True):
                clipped = gradient * min(1.0, 1.0 / (norm + 1e-6))
                m.mul_(0.9).add_(0.1 * clipped)
                v.mul_(0.999).add_(0.001 * clipped.square())
                if value.ndim >= 2:
                    value.mul_(1 - rate * 0.01)
                value.sub_(rate * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-6))


def scored_by_hand(learner: Learner, task: int, among: list[int]) -> float:
    """The share of test texts, each read alone, whose highest logit among some classes is that of its class."""
    learner.network.eval()
    examples, names, right = learner.stream.tasks[task].test, learner.stream.classes, 0
    for texts, label in zip(examples.texts, examples.labels, strict=True):
        ids = torch.tensor([[*learner.tokenizer(*texts)["input_ids"][:9], 3]])  # 10 tokens at most, the last [SEP]
        ids = ids[:, : list(ids[0]).index(3) + 1]
        rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            logits = learner.network(rows)[0]
        right += names[max(among, key=lambda one: float(logits[one]))] == CLASSES[task][label]
    return 100 * right / len(examples)


@pytest.fixture(scope="module")
def by_hand() -> tuple[list[dict[str, Tensor]], dict[tuple[int, int, str], float]]:
    """The weights after each task, and the accuracy matrix."""
    learner, method = exact(), METHODS["finetune"]()
    weights, matrix = [], {}
    for task in range(3):
        matrix[task, task + 1, "til"] = scored_by_hand(learner, task, list(range(*OFFSETS[task : task + 2])))
        learner.task = task
        with torch.no_grad():
            for name in ("vectors", "bias"):  # of classes that no task has had
                began = learner.start[f"classifier.head.{name}"][OFFSETS[task] :]
                getattr(learner.network.classifier.head, name)[OFFSETS[task] :] = began
        batches = method.batches(learner, task, learner.fine_tuning_phase())
        drawn = [batches.rows(step) for step in range(batches.steps)]
        trained_by_hand(learner.network, drawn, OFFSETS[task], len(CLASSES[task]))
        weights.append({name: value.clone() for name, value in collect_tensors(learner.network).items()})
        for other in range(task + 1):
            own = list(range(*OFFSETS[other : other + 2]))
            matrix[task + 1, other + 1, "til"] = scored_by_hand(learner, other, own)
            matrix[task + 1, other + 1, "cil"] = scored_by_hand(learner, other, list(range(OFFSETS[task + 1])))
    return weights, matrix


def test_fine_tuning_is_the_plain_loop(by_hand: Any) -> None:
    """Its weights after each task, and every score: TIL, CIL, and of a task before it is learnt."""
    weights, matrix = by_hand
    after: list[dict[str, Tensor]] = []
    ran = run_stream(
        exact(),
        METHODS["finetune"](),
        on_task=lambda learner, task: after.append(
            {name: value.clone() for name, value in collect_tensors(learner.network).items()}
        ),
    )
    for found, expected in zip(after, weights, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)
    assert scores(ran) == pytest.approx(matrix, abs=1e-4)
    assert len({round(value) for value in matrix.values()}) > 2, "the scores tell nothing"
    assert [row["n"] for row in ran.rows["matrix"] if row["task_index"] == 2] == [12] * 5


def test_the_last_step_of_a_phase_trains() -> None:
    """Also where it is the only one, and nothing warms up."""
    budget = replace(PAPER, num_epochs=1, batch_size=64, warmup_ratio=0.0)
    learner = exact(budget=budget)
    before = {name: value.clone() for name, value in collect_tensors(learner.network).items()}
    ran = run_stream(learner, METHODS["finetune"]())
    assert [row["steps"] for row in ran.rows["cost"]] == [1, 1, 1]
    after = collect_tensors(ran.network)
    assert max(float((after[name] - value).abs().max()) for name, value in before.items()) > 1e-3


def test_what_a_row_of_the_matrix_says() -> None:
    ran = run_stream(exact(budget=replace(PAPER, num_epochs=1)), METHODS["finetune"]())
    told = {(row["task_index"], row["task"]) for row in ran.rows["matrix"]}
    assert told == {(1, "cat-dog"), (2, "red-blue-green"), (3, "run-sit")}
    places = [(row["after_task"], row["task_index"]) for row in ran.rows["matrix"] if row["scenario"] == "til"]
    assert places == [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)]


def test_probing_leaves_the_encoder() -> None:
    learner = exact("probe")
    ran = run_stream(learner, METHODS["probe"]())
    moved = {
        name for name, value in collect_tensors(ran.network).items() if not torch.equal(value, learner.start[name])
    }
    assert moved == {"classifier.head.vectors", "classifier.head.bias"}
    assert all(one.requires_grad for one in ran.network.parameters())


@pytest.mark.exhaustive
def test_separate_models_know_nothing_of_each_other() -> None:
    """Each is that of a stream of its task alone, but for the order of its rows; what it scores stays."""
    ran = run_stream(exact("separate"), METHODS["separate"]())
    plain = scores(run_stream(exact(), METHODS["finetune"]()))
    found = scores(ran)
    assert found[1, 1, "til"] == plain[1, 1, "til"]
    assert set(found) == {(after, place, "til") for after in range(1, 4) for place in range(1, after + 1)}
    for place in (1, 2):
        assert {found[after, place, "til"] for after in range(place, 4)} == {found[place, place, "til"]}


def test_what_is_seen_before_a_task_is_the_model_that_learns_it() -> None:
    """Of separate models the one that the run began with."""
    method = METHODS["separate"]()
    learner = make_learner(stream(4), method, loaded(), BUDGET, seed=1)

    def look(learner: Learner, task: int) -> list[dict[str, Any]]:
        now, start = collect_tensors(learner.network), learner.start
        return [{"statistic": "as at the start", "value": all(torch.equal(now[name], start[name]) for name in now)}]

    found = run_stream(learner, method, diagnose=look).rows["diagnostics"]
    assert [row["value"] for row in found] == [True, False] * 3


def test_joint_learns_at_the_end() -> None:
    ran = run_stream(exact("joint"), METHODS["joint"]())
    assert set(scores(ran)) == {(3, place, setting) for place in (1, 2, 3) for setting in ("til", "cil")}
    assert [row["steps"] for row in ran.rows["cost"]] == [0, 0, 3 * math.ceil(42 / 4)]
    assert [row["examples_per_second"] is None for row in ran.rows["cost"]] == [True, True, False]


def test_a_limit_of_steps_is_of_one_task() -> None:
    """It ends in the midst of an epoch, on the batches that there are without it; all tasks at once have none."""
    budget = replace(PAPER, max_steps={exact().stream.tasks[1].name: 4})
    plain, limited = (exact("finetune", budget=one) for one in (PAPER, budget))
    whole = [math.ceil(len(CLASSES[task]) * 6 / 4) * 3 for task in range(3)]
    assert whole[1] > 4
    for learner in (plain, limited):
        learner.task = 1
    batches, fewer = (METHODS["finetune"]().batches(one, 1, one.fine_tuning_phase()) for one in (plain, limited))
    for step in range(4):
        assert torch.equal(batches.rows(step)["input_ids"], fewer.rows(step)["input_ids"])
    ran = run_stream(limited, METHODS["finetune"]())
    assert [row["steps"] for row in ran.rows["cost"]] == [whole[0], 4, whole[2]]
    budget = replace(PAPER, max_steps={exact().stream.tasks[2].name: 4})
    together = run_stream(exact("joint", budget=budget), METHODS["joint"]())
    assert together.rows["cost"][-1]["steps"] == 3 * math.ceil(42 / 4)


# -- costs ----------------------------------------------------------------------------------------------


def test_what_a_task_costs() -> None:
    """FLOPs: 6 for each weight of the linear layers and token, and some for attention, which is short here."""
    learner = exact()
    ran = run_stream(learner, METHODS["finetune"]())
    linear = 2 * (4 * 16 * 16 + 2 * 16 * 32)
    for task, row in enumerate(ran.rows["cost"]):
        learner.task = task
        batches = METHODS["finetune"]().batches(learner, task, learner.fine_tuning_phase())
        tokens = sum(batches.rows(step)["input_ids"].numel() for step in range(batches.steps))
        assert 6 * linear * tokens <= row["flops"] <= 1.35 * 6 * linear * tokens
        assert (row["task_index"], row["task"]) == (task + 1, learner.stream.tasks[task].name)
        assert row["steps"] == batches.steps == 3 * math.ceil(len(CLASSES[task]) * 6 / 4)
        assert row["examples_per_second"] * row["seconds"] == pytest.approx(3 * len(CLASSES[task]) * 6)
        assert (row["memory_bytes"], row["memory_examples"]) == (0, 0)
        assert row["peak_memory_mib"] > 100


def test_progress_is_told() -> None:
    told: list[ProgressEvent] = []
    run_stream(
        exact("probe-finetune", budget=replace(PAPER, num_epochs=1)),
        METHODS["probe-finetune"](),
        on_progress=told.append,
    )
    first = [(one.phase, one.step, one.steps) for one in told if one.task_index == 1]
    steps = [("probing", step, 6) for step in range(1, 7)] + [("fine-tuning", step, 3) for step in (1, 2, 3)]
    assert first == [*steps, (KEEPING, 0, 0), (SCORING, 0, 0)]  # which may take longer than all steps
    assert {one.task for one in told if one.task_index == 3} == {"run-sit"}
    assert all(one.metrics["loss"] >= 0 for one in told if one.steps)


def test_columns_that_are_padding_in_all_rows() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0]])
    rows = {"input_ids": torch.ones(2, 4), "attention_mask": mask, "labels": torch.zeros(2)}
    found = trim_padding(rows)
    assert found["input_ids"].shape == found["attention_mask"].shape == (2, 3)
    assert torch.equal(found["labels"], rows["labels"])


# -- resumed --------------------------------------------------------------------------------------------


def stopped(folder: Path, when: Callable[[ProgressEvent], bool], **options: Any) -> None:
    """A run that ends early."""

    def look(told: ProgressEvent) -> None:
        if when(told):
            raise Broken

    method = METHODS["finetune"]()
    with pytest.raises(Broken):
        run_stream(
            make_learner(stream(), method, loaded(), BUDGET, seed=1), method, folder=folder, on_progress=look, **options
        )


@pytest.fixture(scope="module")
def unbroken() -> RunState:
    method = METHODS["finetune"]()
    return run_stream(make_learner(stream(), method, loaded(), BUDGET, seed=1), method)


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("every", [None, 2])
def test_a_resumed_run_costs_what_the_unbroken_one_does(every: int | None, unbroken: RunState, tmp_path: Path) -> None:
    """But for the time: steps before it was broken off count as the others."""
    stopped(tmp_path, lambda told: told.task_index == 2 and told.step == 8, checkpoint_every=every)
    method = METHODS["finetune"]()
    learner = make_learner(stream(), method, loaded(), BUDGET, seed=1)
    ran = run_stream(learner, method, folder=tmp_path, resume=True, checkpoint_every=every)
    assert ran.rows["matrix"] == unbroken.rows["matrix"]
    for found, expected in zip(ran.rows["cost"], unbroken.rows["cost"], strict=True):
        assert {name: found[name] for name in ("flops", "steps")} == {
            name: expected[name] for name in ("flops", "steps")
        }
    assert all(
        torch.equal(one, collect_tensors(unbroken.network)[name]) for name, one in collect_tensors(ran.network).items()
    )


def test_a_phase_goes_on_with_the_rows_that_its_batches_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions, and more processes, fill up batches of a task of few rows: its state was refused."""
    budget = replace(BUDGET, batch_size=100, num_epochs=6)

    def run(**options: Any) -> RunState:
        method = METHODS["finetune"]()
        return run_stream(make_learner(stream(), method, loaded(), budget, seed=1), method, **options)

    def look(told: ProgressEvent) -> None:
        if (told.task_index, told.step) == (3, 4):
            raise Broken

    with monkeypatch.context() as earlier:
        earlier.setattr(Learner, "batch_size", lambda learner, most: learner.budget.batch_size)
        expected = collect_tensors(run().network)
        with pytest.raises(Broken):
            run(folder=tmp_path, checkpoint_every=3, on_progress=look)
    found = collect_tensors(run(folder=tmp_path, checkpoint_every=3, resume=True).network)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_flops_are_counted_in_the_first_step_again_where_no_checkpoint_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is taken, as in a run that was not broken off: without the counter some products round otherwise."""
    monkeypatch.setattr("regard.continual.run.measure_flops", lambda *_: pytest.fail("a step of its own"))
    counted = list[bool]()

    class Counted(METHODS["finetune"]):  # type: ignore[misc]
        def loss(self, learner: Learner, network: nn.Module, rows: dict[str, Tensor]) -> Tensor:
            counted.append(len(_get_current_dispatch_mode_stack()) > 0)
            if len(counted) == 3:
                raise Broken
            loss: Tensor = super().loss(learner, network, rows)
            return loss

    for unfinished in (False, True):
        counted.clear()
        if unfinished:
            (tmp_path / "task-0001" / "stage-0" / ".unfinished-ab12").mkdir(parents=True)
        method = Counted()
        learner = make_learner(stream(), method, loaded(), BUDGET, seed=1)
        with pytest.raises(Broken):
            run_stream(learner, method, folder=tmp_path, resume=True, checkpoint_every=10)
        assert counted == [True, False, False]


@pytest.mark.exhaustive
def test_a_new_run_takes_nothing_from_the_old_one(tmp_path: Path) -> None:
    """And leaves what is not its own."""
    stopped(tmp_path, lambda told: told.task_index == 3, checkpoint_every=1)
    (tmp_path / "notes.txt").write_text("mine")
    stopped(tmp_path, lambda told: told.task_index == 1 and told.step == 2, checkpoint_every=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "task-0001"]


@pytest.mark.exhaustive
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "change, told",
    [
        ({"seed": 2}, "seed was 1 when the run started and is 2 now"),
        ({"budget": replace(BUDGET, num_epochs=5)}, "budget.num_epochs was 2 when the run started and is 5 now"),
        (
            {"stream": stream().reorder((1, 0, 2))},
            r"stream.order was \[0, 1, 2\] when the run started and is \[1, 0, 2\] now",
        ),
        (
            {"stream": replace(stream(), name="other")},
            'stream.name was "words" when the run started and is "other" now',
        ),
        ({"method": "joint"}, 'method was "Finetune" when the run started and is "Joint" now'),
        ({"head": "labels"}, 'model.head was "linear" when the run started and is "labels" now'),
    ],
)
def test_a_run_of_other_settings_is_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    stopped(tmp_path, lambda told: told.task_index == 2)
    method = METHODS[change.pop("method", "finetune")]()
    said = {"stream": stream(), "method": method, "loaded": loaded(), "budget": BUDGET, "seed": 1} | change
    with pytest.raises(UserError, match=f"^cannot resume: {told}"):
        run_stream(make_learner(**said), method, folder=tmp_path, resume=True)


def test_other_rows_are_another_stream(tmp_path: Path) -> None:
    stopped(tmp_path, lambda told: told.task_index == 2)
    first, *others = stream().tasks
    changed = replace(stream(), tasks=(replace(first, sha256={"train": "of others"}), *others))
    method = METHODS["finetune"]()
    with pytest.raises(UserError, match=r"stream.tasks.0.train was .* and is .of others. now"):
        run_stream(make_learner(changed, method, loaded(), BUDGET, seed=1), method, folder=tmp_path, resume=True)


@pytest.mark.parametrize(
    "name, content",
    [
        ("manifest.json", "{"),
        ("manifest.json", json.dumps({"schema_version": 1})),
        ("network.safetensors", "short"),
        ("method.safetensors", None),
    ],
)
def test_a_damaged_state_is_told(name: str, content: str | None, tmp_path: Path) -> None:
    stopped(tmp_path, lambda told: told.task_index == 2)
    path = tmp_path / "after-00000001" / name
    path.unlink() if content is None else path.write_text(content)
    method = METHODS["finetune"]()
    learner = make_learner(stream(), method, loaded(), BUDGET, seed=1)
    with (
        pytest.warns(UserWarning, match=f"after-00000001 is damaged .{name}"),
        pytest.raises(UserError, match=r"cannot resume: each of the 1 states in .* is damaged\. Start"),
    ):
        run_stream(learner, method, folder=tmp_path, resume=True)


# -- bad input ------------------------------------------------------------------------------------------


def test_a_task_with_one_class() -> None:
    of_one = {part: replace(stream().tasks[0].split(part), labels=(0,) * count) for part, count in PARTS.items()}
    task = ClassificationTask(name="one", labels=("cat",), **of_one)
    with pytest.raises(UserError, match="stream: expected at least two classes in each task, 'one' has 1"):
        exact(of=Stream(name="s", tasks=(task,), order=(0,), seed=0))


def test_a_class_that_is_not_trained() -> None:
    task = stream().tasks[0]
    train = replace(task.train, labels=(0,) * len(task.train))
    with pytest.raises(UserError, match="stream: expected rows of each class in train, 'cat-dog' has none of dog"):
        exact(of=Stream(name="s", tasks=(replace(task, train=train),), order=(0,), seed=0))


def test_an_empty_split() -> None:
    task = stream().tasks[0]
    with pytest.raises(UserError, match="stream: expected rows in each split, cat-dog dev has none"):
        exact(
            of=Stream(name="s", tasks=(replace(task, dev=replace(task.dev, texts=(), labels=())),), order=(0,), seed=0)
        )


def test_a_label_that_is_no_class() -> None:
    task = stream().tasks[0]
    test = replace(task.test, labels=(2,) * len(task.test))
    with pytest.raises(UserError, match="stream: expected labels from 0 to 1 in test of 'cat-dog', got 2"):
        exact(of=Stream(name="s", tasks=(replace(task, test=test),), order=(0,), seed=0))


PARTS: dict[Any, int] = {"train": 12, "dev": 6, "test": 8}
