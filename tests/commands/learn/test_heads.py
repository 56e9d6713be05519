"""The head that methods have where none is asked for."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from regard.commands.learn.config import LearnConfig, split_methods
from regard.commands.learn.heads import OBSTACLE, choose_head, describe_head, find_obstacle
from regard.commands.learn.run import learn
from regard.data.stream import Stream
from regard.errors import UserError
from regard.models.heads import encode_labels, split_label
from regard.models.pretrained import Loaded, load
from tests.commands.learn.learn_runs import FIELDS
from tests.continual import small_text_tasks
from tests.continual.small_tasks import loaded, stream

READS_LABELS = "--head labels compares texts with the words of the labels"


def chosen(method: str, tasks: Stream | None = None, model: Loaded | None = None, **said: Any) -> str:
    configs = split_methods(LearnConfig(method=method, **said))
    return choose_head(configs, tasks or stream(), model or loaded())


@pytest.mark.parametrize(
    "method, reason",
    [
        ("sapt", ""),
        ("finetune,replay", ""),
        ("sapt,prescale", f"prescale cannot do without; {READS_LABELS} of the other methods alone"),
        (
            "sapt,prescale,ctr,replay-lora",
            f"prescale, ctr cannot do without; {READS_LABELS} of the other methods alone",
        ),
    ],
)
def test_why_labels_are_not_read(method: str, reason: str) -> None:
    assert find_obstacle(split_methods(LearnConfig(method=method)), stream(), loaded()) == reason
    told = describe_head([{OBSTACLE: reason} if reason else {}], "auto")
    assert told == (f"all methods have linear heads, for {reason}" if reason else "")
    assert describe_head([{OBSTACLE: reason}], "method") == ""


@pytest.mark.parametrize(
    "method, said, head",
    [
        ("sapt", {}, "labels"),
        ("finetune,replay-lora,joint", {}, "labels"),
        ("finetune", {"lora_rank": 2}, "labels"),
        ("finetune,replay", {}, "method"),
        ("sapt,prescale", {}, "method"),
        ("sapt,probe", {}, "method"),
        ("sapt,ctr", {}, "method"),
        ("sapt", {"head": "method"}, "method"),
        ("finetune", {"head": "labels"}, "labels"),
    ],
)
def test_labels_are_read_where_adapters_are_compared_and_all_methods_can(
    method: str, said: dict[str, Any], head: str
) -> None:
    assert chosen(method, **said) == head


def test_texts_have_no_head_of_classes() -> None:
    assert chosen("sapt", small_text_tasks.stream(1), small_text_tasks.loaded()) == "method"


@pytest.mark.minilm
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "names, head",
    [
        (("cat", "dog"), "labels"),
        (("entailment", "not_entailment"), "labels"),
        (("very positive", "positive"), "labels"),
        (("EducationalInstitution", "Artist"), "labels"),
        (("1", "2"), "method"),
        (("A", "B"), "method"),
        (("c1", "d2"), "method"),
        (("class_0", "class_1"), "method"),
        (("mood/0", "mood/1"), "method"),  # as whole numbers are named
        (("2 stars", "3 stars"), "method"),
        (("Cat", "cat"), "method"),
        (("погода", "спорт"), "method"),  # spelt letter by letter
        (("ไทย", "cat"), "method"),  # unknown
        (("cat", "dog " * 600), "method"),  # more than the model takes
    ],
)
def test_classes_that_are_no_words_keep_their_linear_head(names: tuple[str, ...], head: str) -> None:
    """As the tokenizer of MiniLM reads them: codes were learnt no better than by chance."""
    task = replace(stream().tasks[0], labels=names)
    assert chosen("sapt", replace(stream(), tasks=(task,), order=(0,)), minilm()) == head


@pytest.mark.minilm
@pytest.mark.parametrize(
    "names, told",
    [
        (("Cat", "cat"), "'Cat' and 'cat' are the same tokens; rename one, or both alike if they are one class"),
        (("class_1", "class_2"), f"two labels are the same but for digits or case; {READS_LABELS}"),
        (
            ("cat", "dog " * 600),
            f"the label '{'dog ' * 10}…' has more than the 512 tokens that the model takes; shorten it",
        ),
        (("A", "dog"), f"the label 'A' is none; {READS_LABELS}"),
    ],
)
def test_the_head_of_labels_is_advised_where_it_is_not_refused(names: tuple[str, ...], told: str) -> None:
    task = replace(stream().tasks[0], labels=names)
    tasks = replace(stream(), tasks=(task,), order=(0,))
    obstacle = find_obstacle(split_methods(LearnConfig(method="sapt")), tasks, minilm())
    assert obstacle == f"not all labels are words that the model may know and that differ: {told}"
    classes = {name: split_label(name) for name in names}
    if READS_LABELS in told:
        assert encode_labels(minilm(), minilm().model, classes, "mean").shape == (2, 384)
    else:
        refused = r"labels collide: 'Cat' and 'cat' are the same words|at most 512 tokens for a class"
        with pytest.raises(UserError, match=refused):
            encode_labels(minilm(), minilm().model, classes, "mean")


@cache
def minilm() -> Loaded:
    return load("minilm")


@pytest.mark.exhaustive
def test_a_run_says_that_it_reads_labels_and_that_it_was_not_asked_to() -> None:
    fields: dict[str, Any] = {**FIELDS, "diagnostic_samples": 0, "num_epochs": 1}
    found = learn(stream(4), "sequential-lora", loaded(), **fields)
    assert [run["head"] for run in found.metadata["runs"]] == ["labels"] * len(found.metadata["runs"])
    assert found.metadata["config"]["head"] == "auto"
    assert "All methods compare texts with the words of the labels" in found.page()
    asked = learn(stream(4), "sequential-lora", loaded(), **fields, head="method")
    assert all("head" not in run for run in asked.metadata["runs"])
    assert "with the words of the labels" not in asked.page()


@pytest.mark.minilm
@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("labels, count", [(("red", "blue"), 0), (("class_0", "class_1"), 1)])
def test_codes_of_later_tasks_under_the_head_that_the_first_ones_chose_are_warned_of(
    labels: tuple[str, ...], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, words in (("a", ("cat", "dog")), ("b", labels)):
        rows = [{"task": name, "text": f"the {word} on mat {n}", "label": word} for word in words for n in range(10)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    fields: dict[str, Any] = {**FIELDS, "diagnostic_samples": 0, "num_epochs": 1, "max_steps": ("a=1", "b=1")}
    found = learn("a.jsonl,b.jsonl", "sequential-lora", minilm(), **fields)
    assert sum(text.startswith("head: ") for text in found.metadata["runs"][0]["warnings"]) == count
