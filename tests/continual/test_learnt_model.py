"""A folder that was handed on gives the labels that the run was scored with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.commands.learn.result import LearnResult
from regard.commands.learn.rollback import rollback
from regard.commands.learn.run import learn
from regard.continual import learnt_model
from regard.continual.answer_metrics import score_answer
from regard.continual.learnt_model import describe_learnt_model
from regard.continual.text_learner import encode_prompts
from regard.data.stream import TextTask
from regard.errors import UserError
from tests.commands.learn.learn_runs import FIELDS
from tests.continual import small_text_tasks
from tests.continual.small_tasks import loaded, stream
from tests.continual.together import SMALL
from tests.processes import run_python

METHODS = ["finetune", "sapt"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("learnt")
    fields: dict[str, Any] = {**FIELDS, "diagnostic_samples": 0, "num_epochs": 3, "set": ("r=2",)}
    found = learn(stream(), METHODS, loaded(), seeds=[1], work_dir=place / "work", **fields)
    return found.save(place / "run")


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", METHODS)
def test_it_predicts_what_the_run_was_scored_with(method: str, run: Path, tmp_path: Path) -> None:
    folder = rollback(run, 2, tmp_path / "model", method=method, model=loaded())
    model = regard.LearntModel.from_pretrained(folder)
    assert repr(model).startswith("LearntModel(")
    assert repr(model).endswith(f"{model.lineage['tasks'][-1]['name']})")
    matrix = LearnResult.load(run).accuracy_matrix
    rows = matrix[(matrix["method"].str.startswith(method)) & (matrix["after_task"] == 2)]
    for place, task in enumerate(stream().tasks[:2], 1):
        names = [task.labels[label] for label in task.test.labels]
        for scenario, known in (("til", task.name), ("cil", None)):
            predicted = model.predict(task.test.texts, known)
            right = 100 * sum(map(str.__eq__, predicted, names)) / len(names)
            assert right == pytest.approx(
                rows[(rows["scenario"] == scenario) & (rows["task_index"] == place)]["score"].item()
            )
    assert model.labels() == (*stream().tasks[0].labels, *stream().tasks[1].labels)
    with pytest.raises(UserError, match=r"^task: expected one of cat-dog, red-blue-green, got 'run-sit'"):
        model.predict(["a cat"], "run-sit")


def test_a_known_task_is_answered_without_the_router(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = regard.LearntModel.from_pretrained(rollback(run, 2, tmp_path / "model", method="sapt", model=loaded()))

    def ask(*_: Any) -> None:
        raise LookupError

    monkeypatch.setattr(type(model.network.router), "forward", ask)
    assert set(model.predict(["a cat .", "the red"], "cat-dog")) <= {"cat", "dog"}
    with pytest.raises(LookupError):
        model.predict(["a cat ."])


@pytest.mark.exhaustive
def test_the_card_says_tasks_and_scores_and_its_lines_run_in_a_new_process(run: Path, tmp_path: Path) -> None:
    folder = rollback(run, 2, tmp_path / "model", method="sapt", model=loaded())
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "| 2 | red-blue-green | red, blue, green |" in card
    assert str(tmp_path) not in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    lines = code.replace("FOLDER", str(folder)).replace("model.predict", "print(model.predict").strip() + ")"
    done = run_python(["-c", lines])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()[2:-2] in regard.LearntModel.from_pretrained(folder).labels()


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"with lineage.json, as `regard rollback` writes it, got .*empty$"):
        regard.LearntModel.from_pretrained(tmp_path / "empty")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text('{"command": "learn"}')
    with pytest.raises(UserError, match=r"run, a run of `regard learn`; `regard rollback .*run TASK --out DIR` writes"):
        regard.LearntModel.from_pretrained(tmp_path / "run")


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind, method", [("t5", "sapt"), ("llama", "sapt"), ("llama", "finetune")])
def test_it_writes_the_answers_that_the_run_was_scored_with(
    kind: small_text_tasks.Kind, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, base = small_text_tasks.stream(2), small_text_tasks.loaded(kind)
    fields: dict[str, Any] = {
        **FIELDS,
        "diagnostic_samples": 0,
        "num_epochs": 12,
        "target_length": 4,
        "learning_rate": 1e-2,
    }
    fields["set"] = ("r=2",) if method == "sapt" else ()
    found = learn(tasks, method, base, seeds=[1], work_dir=tmp_path / "work", **fields)
    folder = rollback(found.save(tmp_path / "run"), 3, tmp_path / "model", model=base)
    model = regard.LearntModel.from_pretrained(folder)
    assert model.writes
    sides = list[str]()

    def cut(*given: Any, side: Any, **limits: Any) -> Any:
        sides.append(side)
        return encode_prompts(*given, side=side, **limits)

    monkeypatch.setattr(learnt_model, "encode_prompts", cut)
    assert "LearntModel" in (folder / "README.md").read_text(encoding="utf-8")
    rows, answers = found.accuracy_matrix.query("after_task == 3"), set[str]()
    for task in tasks.tasks:
        assert isinstance(task, TextTask)
        written = model.predict(task.test.inputs, batch_size=3)
        triples = zip(written, task.test.targets, task.test.inputs, strict=True)
        grade = 100 * sum(score_answer(task.metric, *one) for one in triples) / len(written)
        assert grade == pytest.approx(rows[rows["task"] == task.name]["score"].item())
        answers |= {*written}
    assert len(answers) > 1
    assert {*sides} == {found.metadata["runs"][0]["truncation_side"]} == {"middle"}
    with pytest.raises(UserError, match=r"^texts: expected single texts for a model that writes answers, got a pair"):
        model.predict([("say", "a cat")])


def test_prompts_stand_around_inputs_as_in_training() -> None:
    tasks = [{"name": "sum", "prompt": ["Add. ", " ="]}, {"name": "old"}, {"name": "word", "prompt": ["", " ="]}]
    model = regard.LearntModel(None, None, {"tasks": tasks})
    assert model.complete(["1 2", "Add. 1 2 ="], "sum") == ["Add. 1 2 =", "Add. 1 2 ="]
    assert model.complete(["1 2", "1 ="], "old") == ["1 2", "1 ="]
    assert model.complete(["Add. 1 2 =", "1 ="]) == ["Add. 1 2 =", "1 ="]
    with pytest.raises(
        UserError, match=r"^task: expected one of sum, old, word, whose prompts differ, or whole prompts"
    ):
        model.complete(["1 2"])
    alone = regard.LearntModel(None, None, {"tasks": tasks[:1]})
    assert alone.complete(["1 2"]) == ["Add. 1 2 ="]


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["ctr", "progprompt"])
def test_methods_that_have_to_be_told_the_task_are_told_it(method: str, tmp_path: Path) -> None:
    settings = [f"{name}={value}" for name, value in SMALL.get(method, {}).items()]
    fields: dict[str, Any] = {**FIELDS, "diagnostic_samples": 0, "set": settings}
    found = learn(stream(), method, loaded(), work_dir=tmp_path / "work", **fields)
    folder = rollback(found.save(tmp_path / "run"), 2, tmp_path / "model", model=loaded())
    model = regard.LearntModel.from_pretrained(folder)
    rows = found.accuracy_matrix.query("after_task == 2")
    for task in stream().tasks[:2]:
        names = [task.labels[label] for label in task.test.labels]
        right = 100 * sum(map(str.__eq__, model.predict(task.test.texts, task.name), names)) / len(names)
        assert right == pytest.approx(rows[rows["task"] == task.name]["score"].item())
    with pytest.raises(UserError, match=rf"^task: expected one of cat-dog, red-blue-green, which {method} has to be"):
        model.predict(["a cat"])


def test_one_text_is_no_list_of_letters(run: Path, tmp_path: Path) -> None:
    folder = rollback(run, 1, tmp_path / "model", method="finetune", model=loaded())
    with pytest.raises(UserError, match=r"^texts: expected a list of texts, got one text, 'a cat'"):
        regard.LearntModel.from_pretrained(folder).predict("a cat")


@pytest.mark.parametrize("gap", [None, float("nan"), 3, {"text": "a cat"}, ("a", None), ("a", "b", "c"), (), b"a cat"])
def test_what_is_no_text_is_refused_by_its_row(gap: Any, run: Path, tmp_path: Path) -> None:
    folder = rollback(run, 1, tmp_path / "model", method="finetune", model=loaded())
    model = regard.LearntModel.from_pretrained(folder)
    with pytest.raises(UserError, match=r"^texts: expected a text or a pair of texts in row 1, got "):
        model.predict(["a cat", gap])
    with pytest.raises(UserError, match=r"^texts: expected at least one, got none"):
        model.predict([])


@pytest.mark.parametrize(
    "base, begins, title",
    [
        ("org/model", "---\nbase_model: org/model\n", "# org/model after"),
        ("/home/me/model", "---\ntags", "# model after"),
        ("minilm", "---\ntags", "# minilm after"),
    ],
)
def test_the_card_is_one_that_the_hub_takes(base: str, begins: str, title: str) -> None:
    """No folder of this machine, nor a name without owner; labels do not break the table."""
    tasks = [{"name": "a|b", "labels": ["x | y", "two\nlines"]}]
    lineage = {"base": base, "sha256": "0" * 64, "tasks": tasks, "length": 8}
    method = {"name": "finetune", "settings": {}}
    card = describe_learnt_model({**lineage, "method": method}, {"a|b": 50.0})
    assert card.startswith(begins)
    assert title in card
    assert "/home" not in card
    assert "| 1 | a/b | x / y, two lines | 50.0 |" in card


@pytest.mark.parametrize("method, lacks", [("mbpa++", True), ("finetune", False)])
def test_the_card_says_where_scores_are_not_those_of_the_model(method: str, lacks: bool) -> None:
    """Models of mbpa++ are saved without the memory that they adapt to, and answer as before the adaptation."""
    tasks = [{"name": "a", "labels": ["x", "y"]}]
    lineage = {"base": "b", "sha256": "0" * 64, "tasks": tasks, "length": 8}
    card = describe_learnt_model({**lineage, "method": {"name": method, "settings": {}}}, {"a": 50.0})
    assert ("They are not those of this model, which was saved without the memory" in card) == lacks


@pytest.mark.every_value
@pytest.mark.parametrize(
    "method, prompts, asked",
    [
        ("finetune", [[], []], '["a text"])'),
        ("progprompt", [[], []], '["a text"], task="b \\"c\\"")'),
        ("sapt", [["Add. ", " ="], ["Name it. ", " ="]], '["a text"], task="b \\"c\\"")'),
        ("sapt", [["", " ="], ["", " ="]], '["a text"])'),
        ("progprompt", [[]], '["a text"])'),
    ],
)
def test_the_lines_of_the_card_name_a_task_where_predict_has_to_be_told_one(
    method: str, prompts: list[list[str]], asked: str
) -> None:
    tasks = [
        {"name": name, "labels": [], **({"prompt": prompt} if prompt else {})}
        for name, prompt in zip(("a", 'b "c"'), prompts, strict=False)
    ]
    lineage = {"base": "m", "sha256": "0" * 64, "tasks": tasks, "length": 8}
    assert f"model.predict({asked}\n" in describe_learnt_model(
        {**lineage, "method": {"name": method, "settings": {}}}, {}
    )


def test_a_model_is_used_without_the_file_of_its_method(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from regard.continual.method import Method\n\n\nclass Mine(Method):\n    pass\n")
    fields: dict[str, Any] = {**FIELDS, "diagnostic_samples": 0}
    found = learn(stream(), f"{file}:Mine", loaded(), seeds=[1], work_dir=tmp_path / "work", **fields)
    folder = rollback(found.save(tmp_path / "run"), 2, tmp_path / "model", model=loaded())
    file.unlink()
    model = regard.LearntModel.from_pretrained(folder)
    assert model.predict(["a cat"])[0] in model.labels()
