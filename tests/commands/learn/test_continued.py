"""A finished run goes on with more tasks, to the numbers of a run that had all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import normalizers
from torch import Tensor

from regard.commands.learn.result import LearnResult
from regard.commands.learn.rollback import rollback
from regard.commands.learn.run import learn
from regard.continual.earlier_tasks import KEPT, KEPT_TENSORS
from regard.continual.methods import METHODS
from regard.continual.models import read_deltas
from regard.continual.pseudo import generator
from regard.continual.pseudo.parsing import INPUT_MARK
from regard.continual.text_learner import TextLearner
from regard.data.stream import SPLITS, Stream
from regard.errors import UserError
from tests.commands.learn.learn_runs import FIELDS
from tests.commands.learn.marks import READS_ENGLISH
from tests.continual import small_text_tasks
from tests.continual.pseudo import small_pseudo
from tests.continual.small_tasks import learnt_router, loaded, stream
from tests.continual.together import SMALL, TEXTS_ALONE

pytestmark = READS_ENGLISH
OPTIONS: dict[str, Any] = {**FIELDS, "diagnostic_samples": 0}
NUMBERS = ["method", "seed", "after_task", "task", "scenario", "score", "lost", "gained"]


def first(tasks: Stream, count: int) -> Stream:
    return replace(tasks, tasks=tasks.tasks[:count], order=tuple(range(count)))


def run_over(tasks: Stream, folder: Path, method: str = "replay", **options: Any) -> LearnResult:
    """Learn with a work folder, whose models the result takes along."""
    model = small_text_tasks.loaded() if tasks.text else loaded()
    options = {"method": method, **OPTIONS, **options} if "after" not in options else options
    result = learn(tasks, model=model, work_dir=folder / "work", **options)
    result.save(folder / "run")
    return LearnResult.load(folder / "run")


def scores(result: LearnResult) -> pd.DataFrame:
    return result.accuracy_matrix[NUMBERS].sort_values(NUMBERS[:5]).reset_index(drop=True)


def settings(method: str) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in SMALL.get(method, {}).items())


def write_tables(*names: str) -> None:
    """Write a table of one task for each name."""
    for name, words in {"a": ("cat", "dog"), "b": ("red", "blue"), "c": ("run", "sit")}.items():
        rows = [{"task": name, "text": f"the {word} on mat {n}", "label": word} for word in words for n in range(20)]
        if name in names:
            Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


OTHER_RANDOM = {"prescale", "ctr"}
"""Dropout has a mask for each class, plug-ins have weights for each task: with more, random numbers are others."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "method",
    sorted(
        name
        for name, kind in METHODS.items()
        if kind.can_continue and not kind.plans_ahead and name not in OTHER_RANDOM
    ),
)
def test_a_run_that_goes_on_gives_what_one_over_all_tasks_gives(method: str, tmp_path: Path) -> None:
    """To rounding: products with more classes are rounded otherwise, so weights are not compared bit by bit."""
    tasks = small_text_tasks.stream(2) if method in TEXTS_ALONE else stream(4)
    options: dict[str, Any] = {"method": method, "set": settings(method), "seeds": [1], "head": "method"}
    whole = run_over(tasks, tmp_path / "whole", **options)
    for count in range(1, len(tasks) + 1):
        before = {} if count == 1 else {"after": tmp_path / f"part-{count - 1}" / "run"}
        part = run_over(first(tasks, count), tmp_path / f"part-{count}", **(before or options))
    pd.testing.assert_frame_equal(scores(part), scores(whole))
    assert [len(run["tasks"]) for run in part.metadata["continued"]] == list(range(1, len(tasks)))
    assert len(part.cost) == len(whole.cost)
    if method != "joint":  # scored at the end alone
        check_changes(whole.accuracy_matrix)


def test_a_gate_is_measured_as_in_one_run(tmp_path: Path) -> None:
    """Scores of all tasks are of the end of a run; one that goes on has its end later."""
    options: dict[str, Any] = {"method": "sapt", "set": settings("sapt"), "seeds": [1], "diagnostic_samples": 2}
    whole = run_over(stream(3), tmp_path / "whole", **options)
    run_over(first(stream(3), 2), tmp_path / "two", **options)
    part = run_over(stream(3), tmp_path / "three", after=tmp_path / "two" / "run")
    rows = ["after_task", "task_index", "statistic", "adapter"]
    found, expected = (run.gate[rows].sort_values(rows).reset_index(drop=True) for run in (part, whole))
    assert "own_adapter_score" in set(expected["statistic"])
    pd.testing.assert_frame_equal(found, expected)


def test_a_run_whose_method_had_a_setting_that_it_does_not_read_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a version that gave methods all settings that they know, in their names: a new name was no run of it."""
    given: dict[str, Any] = {"method": "sapt,sapt-paper", "seeds": [1], "head": "method"}
    given["set"] = ("gate=open",)  # as `sapt` has it by default
    with monkeypatch.context() as version:
        version.setattr(
            "regard.commands.learn.run.split_methods",
            lambda config: [replace(config, method=name) for name in ("sapt", "sapt-paper")],
        )
        before = run_over(first(stream(), 2), tmp_path / "before", **given)
    assert [run["method"] for run in before.metadata["runs"]] == ["sapt gate=open", "sapt-paper gate=open"]
    longer = run_over(stream(), tmp_path / "longer", after=tmp_path / "before" / "run")
    assert [run["method"] for run in longer.metadata["runs"]] == ["sapt", "sapt-paper gate=open"]
    pd.testing.assert_frame_equal(scores(longer), scores(run_over(stream(), tmp_path / "whole", **given)))


def check_changes(matrix: pd.DataFrame) -> None:
    """Rows lost since a task was learnt, less those gained, are what its score fell by."""
    keys = ["task", "scenario"]
    learnt = matrix[matrix["after_task"] == matrix["task_index"]][[*keys, "score"]]
    later = matrix[matrix["after_task"] > matrix["task_index"]].merge(learnt, on=keys, suffixes=("", "_learnt"))
    fell = later["n"] * (later["score_learnt"] - later["score"]) / 100
    assert len(later)
    assert (later["lost"] - later["gained"]).to_numpy() == pytest.approx(fell.to_numpy())


def test_prompts_are_cut_as_those_of_a_run_that_names_no_side(tmp_path: Path) -> None:
    tasks, folder = small_text_tasks.stream(2), tmp_path / "part" / "run"
    result = run_over(first(tasks, 1), tmp_path / "part", method="finetune", truncation_side="right")
    del result.metadata["config"]["truncation_side"]
    result.save(folder, overwrite=True)
    part = run_over(tasks, tmp_path / "more", after=folder)
    assert [run["truncation_side"] for run in part.metadata["runs"]] == ["right"]


def test_a_setting_that_there_was_not_has_its_default(tmp_path: Path) -> None:
    folder, name = tmp_path / "part" / "run", "init_candidates"
    for value in (None, 3):
        options = {} if value is None else {"set": (*settings("sapt"), f"{name}={value}")}
        result = run_over(first(stream(4), 1), tmp_path / f"part-{value}", method="sapt", seeds=[1], **options)
        for run in result.metadata["runs"]:
            del run["settings"][name]
        result.save(folder, overwrite=True)
        if value is None:
            part = run_over(stream(4), tmp_path / "more", after=folder)
            assert [run["settings"][name] for run in part.metadata["runs"]] == [16]
            continue
        with pytest.raises(UserError, match=f"{name} of sapt .*was 16 in .*, it is 3 now"):
            run_over(stream(4), tmp_path / "other", after=folder)


def test_a_setting_with_another_default_by_now_is_as_it_was(tmp_path: Path) -> None:
    """As adapters of queries and values were, of rank 8; `joint_training` is typed as a word."""
    before = {"target_modules": "auto", "r": 4, "joint_training": False}
    typed = [f"{name}={str(value).lower()}" for name, value in before.items()]
    chosen = [item for item in settings("sapt") if item.partition("=")[0] not in before]
    folder = tmp_path / "part" / "run"
    result = run_over(first(stream(4), 1), tmp_path / "part", method="sapt", seeds=[1], set=(*chosen, *typed))
    result.metadata["config"]["set"] = chosen
    result.save(folder, overwrite=True)
    more = run_over(stream(4), tmp_path / "more", after=folder)
    whole = run_over(stream(4), tmp_path / "whole", method="sapt", seeds=[1], set=(*chosen, *typed))
    assert {name: more.metadata["runs"][0]["settings"][name] for name in before} == before
    pd.testing.assert_frame_equal(scores(more)[NUMBERS[1:]], scores(whole)[NUMBERS[1:]])


def test_a_run_from_before_known_tasks_had_their_adapters_goes_on_with_the_router(tmp_path: Path) -> None:
    folder = tmp_path / "part" / "run"
    result = run_over(first(stream(4), 1), tmp_path / "part", method="sapt", seeds=[1], num_epochs=1)
    del result.metadata["runs"][0]["settings"]["known_task"]
    result.save(folder, overwrite=True)
    more = run_over(stream(4), tmp_path / "more", after=folder)
    assert more.metadata["runs"][0]["settings"]["known_task"] == "router"


def test_what_has_a_place_for_each_class_is_not_gone_on_with(tmp_path: Path) -> None:
    run_over(first(stream(4), 1), tmp_path / "part", "ewc")
    with pytest.raises(UserError, match=r"^continue: ewc keeps values for each class of a run"):
        run_over(stream(4), tmp_path / "more", after=tmp_path / "part" / "run")


@pytest.mark.every_value
@pytest.mark.parametrize("method", ["gainlora", "inflora", "osf"])
def test_what_depends_on_the_number_of_tasks_is_not_gone_on_with(method: str, tmp_path: Path) -> None:
    """They learnt the first tasks as some of fewer, not as a run over all does."""
    assert METHODS[method].plans_ahead
    run_over(first(stream(4), 2), tmp_path / "part", method, seeds=[1], num_epochs=1)
    with pytest.raises(UserError, match=rf"^continue: {method} treats each task by how many there are, and cannot go"):
        run_over(stream(4), tmp_path / "more", after=tmp_path / "part" / "run")


def test_more_rows_than_a_longer_run_keeps_of_a_task_are_not_gone_on_with(tmp_path: Path) -> None:
    """Of four rows two tasks keep two each, three keep one each."""
    fixed = ("memory_size=4", "memory_fraction=0.5", *settings("idbr"))
    run_over(first(stream(4), 2), tmp_path / "part", "idbr", seeds=[1], num_epochs=1, set=fixed)
    expected = "^continue: expected at most 1 examples of a task, as 3 tasks have, in the run that goes on, got 2"
    with pytest.raises(UserError, match=expected):
        run_over(first(stream(4), 3), tmp_path / "more", after=tmp_path / "part" / "run")


@pytest.mark.every_value
@pytest.mark.parametrize("method", ["sapt", "lfpt5"])
def test_what_a_last_task_was_to_write_is_written_when_the_run_goes_on(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes after the last task, so it keeps nothing; texts, and then weights, are those of one run."""

    def write(_: Any, __: Any, count: int, **___: Any) -> list[str]:
        mark = INPUT_MARK if method == "sapt" else "quick"
        return [f"the {mark} {number}" for number in torch.randint(99, (count,)).tolist()]

    monkeypatch.setattr(generator, "_train", lambda *_: None)
    monkeypatch.setattr(TextLearner, "sample_texts", write)
    texts = small_pseudo.tasks(3) if method == "sapt" else small_text_tasks.stream(2)
    free = replace(texts, tasks=tuple(replace(task, metric="rouge-l") for task in texts.tasks))
    config = learnt_router(reflection="generated", memory_size=2, r=2, router_warmup_steps=3)
    config = config if method == "sapt" else {"separator": "quick", "num_virtual_tokens": 3, "pseudo_fraction": 0.5}
    options = {**OPTIONS, "method": method, "set": tuple(f"{name}={value}" for name, value in config.items())}
    options |= {"seeds": [1], "num_epochs": 1}

    def learn_texts(count: int, name: str, **options: Any) -> Path:
        result = learn(first(free, count), model=small_pseudo.writer(), work_dir=tmp_path / name / "work", **options)
        result.save(tmp_path / name / "run")
        return tmp_path / name / "run"

    whole, two = learn_texts(3, "whole", **options), learn_texts(2, "two", **options)
    part = learn_texts(3, "part", after=two)
    kept, expected = (next((folder / "models").iterdir()) for folder in (part, whole))
    assert_same(load_file(kept / KEPT_TENSORS), load_file(expected / KEPT_TENSORS))
    assert_same(read_deltas(kept, 3), read_deltas(expected, 3))
    values = [json.loads((folder / KEPT).read_text(encoding="utf-8"))["values"] for folder in (kept, expected)]
    assert values[0] == values[1] != {}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes, told",
    [
        ({"num_epochs": 5}, "^num-epochs: expected that of .*run, which is gone on with, got 5"),
        ({"method": "finetune"}, "^method: expected none with a run to go on with"),
        ({"seeds": [3]}, "^seeds: expected none with a run to go on with"),
    ],
)
def test_a_run_goes_on_as_it_began(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    run_over(first(stream(4), 1), tmp_path / "part")
    with pytest.raises(UserError, match=told):
        learn(stream(4), model=loaded(), after=tmp_path / "part" / "run", **changes)
    assert not (tmp_path / "more").exists()


def test_other_rows_models_and_tasks_are_refused(tmp_path: Path) -> None:
    run_over(first(stream(4), 2), tmp_path / "part")
    after = tmp_path / "part" / "run"
    for tasks, told in (
        (stream(3), "^continue: the train rows of .* are not those of the run"),
        (first(stream(4), 1), "^continue: expected the run's tasks first, .* got no task"),
        (first(stream(4), 2), "^continue: expected a task more than the run has, got none"),
    ):
        with pytest.raises(UserError, match=told):
            learn(tasks, model=loaded(), after=after)
    with pytest.raises(UserError, match=r"^continue: expected the model that the run began with"):
        learn(stream(4), model=loaded(seed=5), after=after)


def test_a_run_without_models_cannot_be_gone_on_with(tmp_path: Path) -> None:
    learn(first(stream(4), 1), "finetune", loaded(), **OPTIONS).save(tmp_path / "run")
    with pytest.raises(UserError, match=r"has no models of finetune-.* `regard learn --config .*run --out DIR`"):
        learn(stream(4), model=loaded(), after=tmp_path / "run")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "lineage.json", "index.json"])
def test_a_damaged_or_missing_state_is_not_gone_on_with(name: str, tmp_path: Path) -> None:
    run_over(first(stream(4), 1), tmp_path / "part")
    (state,) = (tmp_path / "part" / "run" / "models").glob(f"*/{name}")
    state.write_bytes(state.read_bytes() + b"x")
    for _ in range(2):
        with pytest.raises(UserError, match=r"^(continue|models): .*(missing|damaged|not kept|cannot read)"):
            learn(stream(4), model=loaded(), after=tmp_path / "part" / "run")
        state.unlink(missing_ok=True)


@pytest.mark.exhaustive
def test_another_model_given_by_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tables("a", "b")
    for seed in (0, 5):
        model = loaded(seed=seed)
        model.model.save_pretrained(f"model-{seed}")
        model.tokenizer.save_pretrained(f"model-{seed}")
    for method in ("finetune", "joint"):
        learn("a.jsonl", method, "model-0", work_dir=f"work-{method}", **OPTIONS).save(f"run-{method}")
        with pytest.raises(UserError, match=r"^continue: expected the model that the run began with, model-0 with"):
            learn("b.jsonl", model="model-5", after=f"run-{method}")
    Path("model-0").rename("model-moved")
    found = learn("b.jsonl", model="model-moved", after="run-finetune")
    assert found.metadata["config"]["model"] == "model-moved"


@pytest.mark.exhaustive
def test_a_run_goes_on_at_its_learning_rate_and_with_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the defaults are others by now, as in another version."""
    searched = run_over(first(stream(4), 1), tmp_path / "searched", search_learning_rates="1e-5,1e-2")
    (run,) = learn(stream(4), model=loaded(), after=tmp_path / "searched" / "run").metadata["runs"]
    assert [run["learning_rate"], run["search"]] == [
        searched.metadata["runs"][0][name] for name in ("learning_rate", "search")
    ]
    assert len(run["search"]) == 2
    run_over(first(stream(4), 1), tmp_path / "part", learning_rate=None)
    after = tmp_path / "part" / "run"
    monkeypatch.setattr("regard.continual.training_phase.FULL_RATE", 0.5)
    found = learn(stream(4), model=loaded(), after=after)
    assert found.metadata["runs"][0]["learning_rate"] == 1e-4
    changed = replace(METHODS["replay"].Config(), memory_size=7)
    monkeypatch.setattr(METHODS["replay"].Config, "parse", classmethod(lambda cls, values: changed))
    with pytest.raises(UserError, match=r"^continue: memory_size of replay was \d+ in .*run, it is 7 now"):
        learn(stream(4), model=loaded(), after=after)


def test_a_changed_file_of_a_method_is_refused(tmp_path: Path) -> None:
    own, name = tmp_path / "own.py", f"{tmp_path / 'own.py'}:Own"
    text = "from regard.continual.method import Method\nclass Own(Method):\n    pass\n"
    own.write_text(text, encoding="utf-8")
    run_over(first(stream(4), 1), tmp_path / "part", name)
    own.write_text(f"{text}    # changed\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"^continue: the file of .*own.py:Own is not the one of .*run; restore it"):
        learn(stream(4), model=loaded(), after=tmp_path / "part" / "run")


@pytest.mark.exhaustive
def test_a_run_with_an_order_of_its_own_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tables("a", "b")
    Path("both.jsonl").write_text(Path("a.jsonl").read_text() + Path("b.jsonl").read_text(), encoding="utf-8")
    write_tables("c")
    options: dict[str, Any] = {**OPTIONS, "order": "1-0"}
    learn("both.jsonl", "finetune", loaded(), work_dir="work", **options).save("run")
    part = learn("c.jsonl", model=loaded(), after="run")
    whole = learn("both.jsonl,c.jsonl", "finetune", loaded(), **options)
    assert part.metadata["runs"][0]["tasks"] == ["b", "a", "c"]
    pd.testing.assert_frame_equal(scores(part), scores(whole))


@pytest.mark.exhaustive
def test_an_interrupted_run_that_goes_on_is_resumed(tmp_path: Path) -> None:
    run_over(first(stream(4), 1), tmp_path / "part")
    after, seen = tmp_path / "part" / "run", list[str]()

    def stop(progress: Any) -> None:
        seen.append(progress.event.task)
        if progress.event.task_index == 3:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"model": loaded(), "after": after, "work_dir": tmp_path / "work"}
    with pytest.raises(KeyboardInterrupt):
        learn(stream(4), **options, on_progress=stop)
    found = learn(stream(4), **options, resume=True)
    whole = learn(stream(4), model=loaded(), after=after)
    pd.testing.assert_frame_equal(scores(found), scores(whole), check_exact=True)


@pytest.mark.exhaustive
def test_new_tasks_in_a_file_stand_behind_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tables("a", "b")
    options: dict[str, Any] = {**OPTIONS, "order": "paper"}
    learn("a.jsonl", "finetune", loaded(), work_dir="work", **options).save("run-a")
    part = learn("b.jsonl", model=loaded(), after="run-a")
    whole = learn("a.jsonl,b.jsonl", "finetune", loaded(), **options)
    pd.testing.assert_frame_equal(scores(part), scores(whole))
    assert part.metadata["config"]["stream"] == "a.jsonl,b.jsonl"
    assert part.metadata["stream"]["name"] == whole.metadata["stream"]["name"] == "a.jsonl + b.jsonl"


def test_a_run_whose_held_out_text_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    """Tasks behind the change were measured on another text, in one table with those before it."""
    text, tasks = tmp_path / "held.txt", small_text_tasks.stream(2)
    text.write_text("the cat . the dog on red , it is slow . " * 8)
    given: dict[str, Any] = {"method": "finetune", "held_out": str(text), "held_out_samples": 2, "seeds": [1]}
    part = run_over(first(tasks, 1), tmp_path / "part", **given)
    assert part.metadata["beyond_stream"].keys() == {str(text)}
    text.write_text("say blue run sit the cat of dog red . " * 8)
    with pytest.raises(UserError, match=rf"^continue: expected {text} as .*run read it, it has changed; restore it$"):
        run_over(tasks, tmp_path / "more", after=tmp_path / "part" / "run")


def test_a_run_with_a_setting_that_changed_nothing_goes_on_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a version that took settings which nothing reads beside the others; this one refuses them."""
    given: dict[str, Any] = {"method": "replay", "seeds": [1], "set": ("replay_interval=7", "memory_size=5")}
    with monkeypatch.context() as version:
        version.setattr(METHODS["replay"].Config, "conditions", {})
        run_over(first(stream(3), 2), tmp_path / "before", **given)
    with pytest.raises(UserError, match=r"^replay_interval: expected replay_mode=interval, which reads it, got"):
        run_over(stream(3), tmp_path / "new", **given)
    longer = run_over(stream(3), tmp_path / "longer", after=tmp_path / "before" / "run")
    assert [run["settings"]["replay_interval"] for run in longer.metadata["runs"]] == [100]
    now = run_over(stream(3), tmp_path / "whole", **{**given, "set": ("memory_size=5",)})
    pd.testing.assert_frame_equal(scores(longer), scores(now))
    folder = rollback(tmp_path / "before" / "run", 2, out=tmp_path / "back", model=loaded())
    assert folder.is_dir()


def _with_six_words(task: Any) -> Any:
    """Cut the texts of a task, which are of 8 tokens then at most."""
    cut = {
        split: replace(rows, texts=tuple((" ".join(text.split()[:6]),) for (text,) in rows.texts))
        for split, rows in ((split, task.split(split)) for split in SPLITS)
    }
    return replace(task, **cut)


def test_a_run_that_goes_on_says_what_its_length_was_fitted_to_and_what_it_cuts(tmp_path: Path) -> None:
    """The first two tasks have texts of 8 tokens at most, the third longer ones, which were said to fit by 95 %."""
    tasks = replace(stream(3), tasks=tuple(map(_with_six_words, stream(3).tasks[:2])) + stream(3).tasks[2:])
    options: dict[str, Any] = {"seeds": [1], "length": None}
    run_over(first(tasks, 2), tmp_path / "part", "finetune", **options)
    notes: list[str] = []

    def listen(progress: Any) -> None:
        notes.append(progress.event.note)

    whole = run_over(tasks, tmp_path / "whole", after=tmp_path / "part" / "run", on_progress=listen)
    (run,) = whole.metadata["runs"]
    assert (run["fitted"], run["fitted_tasks"], run["length"]) == (True, 2, 8)
    assert "fitted to 95 % of the training texts of the first 2 tasks, with which the run began" in "".join(notes)
    (cut,) = [row for row in run["truncation"] if row["task"] == tasks.tasks[2].name]
    counts = [len(text.split()) + 2 for split in SPLITS for (text,) in tasks.tasks[2].split(split).texts]
    assert (cut["rows"], cut["tokens"]) == (sum(n > 8 for n in counts), sum(max(n - 8, 0) for n in counts))
    assert cut["rows"] > 0


def test_a_run_that_an_earlier_version_went_on_with_says_what_its_length_was_fitted_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That version did not write to how many tasks: it was fitted to those of the first run, not of the last."""
    options: dict[str, Any] = {"seeds": [1], "length": None}
    run_over(first(stream(3), 1), tmp_path / "one", "finetune", **options)
    with monkeypatch.context() as patch:
        patch.setattr("regard.commands.learn.run.FITTED_TASKS", "fitted")
        two = run_over(first(stream(3), 2), tmp_path / "two", after=tmp_path / "one" / "run")
    assert "fitted_tasks" not in two.metadata["runs"][0]
    three = run_over(stream(3), tmp_path / "three", after=tmp_path / "two" / "run")
    assert three.metadata["runs"][0]["fitted_tasks"] == 1


def test_a_full_disk_where_the_state_is_kept_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last task of a run, and where one that goes on copies what earlier tasks changed."""

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    part, options = tmp_path / "part", {"method": "replay", **OPTIONS, "seeds": [1]}
    with monkeypatch.context() as patch:
        patch.setattr("regard.continual.earlier_tasks.save_file", full)
        with pytest.raises(UserError, match=r"cannot write .*state\.safetensors: .*No space"):
            learn(first(stream(3), 2), model=loaded(), work_dir=part, **options)
    result = learn(first(stream(3), 2), model=loaded(), work_dir=part, resume=True, **options)
    result.save(tmp_path / "run")
    monkeypatch.setattr("regard.continual.earlier_tasks.save_file", full)
    with pytest.raises(UserError, match=r"cannot write .*after-0001.*: .*No space"):
        learn(stream(3), model=loaded(), after=tmp_path / "run", work_dir=tmp_path / "on")


def test_a_run_that_goes_on_with_another_tokenizer_is_told_of_it(tmp_path: Path) -> None:
    """Its weights are the same; what a version of the library writes otherwise is no other tokenizer, so it goes on."""
    run_over(first(stream(3), 2), tmp_path, "replay", seeds=[1])
    other = loaded()
    other.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.warns(UserWarning, match="continue: the tokenizer of .* is another than"):
        learn(stream(3), model=other, after=tmp_path / "run")
