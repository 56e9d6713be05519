"""Many tasks of a folder, and what the protocols differ in; the sentences are invented."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regard.data import read_stream
from regard.data.derived_streams import MIN_ROWS, sample_instruction_tasks
from regard.data.splits import describe_protocol_differences, format_protocol_differences
from regard.data.stream import SPLITS, TextTask
from regard.errors import UserError


def write(path: Path, rows: list[tuple[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    instances = [{"input": text, "output": [answer]} for text, answer in rows]
    path.write_text(json.dumps({"Definition": ["Do."], "Categories": ["Question Answering"], "Instances": instances}))


def folder_of(path: Path, count: int, rows: int = 40) -> Path:
    """So many files of tasks, every fourth as a folder of splits."""
    for number in range(count):
        name = f"task{number:03d}_made_up"
        if number % 4:
            write(path / f"{name}.json", [(f"{name} {at}", f"say {at}") for at in range(rows)])
            continue
        for split, share in (("train", rows - 10), ("dev", 5), ("test", 5)):
            write(path / name / f"{split}.json", [(f"{name} {split} {at}", "so") for at in range(share)])
    return path


# -- many tasks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["tasks", "CL_Benchmark/SuperNI", ""])
def test_many_tasks(tmp_path: Path, below: str) -> None:
    folder_of(tmp_path / below, 12)
    stream = sample_instruction_tasks(tmp_path, 8, seed=3)
    assert (len(stream), stream.text, stream.name) == (8, True, "superni-8")
    sizes = Counter(tuple(len(task.split(split)) for split in SPLITS) for task in stream.tasks)
    assert set(sizes) <= {(32, 4, 4), (30, 5, 5)}
    task = stream.tasks[0]
    assert isinstance(task, TextTask)
    assert (task.metric, task.kind, task.definition) == ("rouge-l", "question answering", "Do.")
    assert task.train.inputs[0].startswith("Definition: Do.\n\nNow complete the following example -\nInput: task")


def test_many_tasks_are_drawn_by_the_seed(tmp_path: Path) -> None:
    folder_of(tmp_path, 12)
    few, more = sample_instruction_tasks(tmp_path, 4, seed=3), sample_instruction_tasks(tmp_path, 8, seed=3)
    assert more.tasks[:4] == few.tasks
    assert [task.name for task in sample_instruction_tasks(tmp_path, 8, seed=4).tasks] != [
        task.name for task in more.tasks
    ]
    limited = sample_instruction_tasks(tmp_path, 4, seed=3, samples_per_task=10, max_eval_samples=2)
    assert {tuple(len(task.split(split)) for split in SPLITS) for task in limited.tasks} == {(10, 2, 2)}


def test_too_few_tasks(tmp_path: Path) -> None:
    folder_of(tmp_path, 5)
    with pytest.raises(UserError, match=r"tasks: expected 50 tasks in .*, there are 5$"):
        sample_instruction_tasks(tmp_path, 50)
    write(tmp_path / "task900_short.json", [("a", "b"), ("c", "d"), ("e", "f")])
    with pytest.raises(UserError, match=r"expected 6 tasks in .*, there are 6 of which 5 have at least 20 rows$"):
        sample_instruction_tasks(tmp_path, 6)
    passed = {sample_instruction_tasks(tmp_path, 5, seed=seed).metadata["passed_over"] for seed in range(8)}
    assert passed == {(), ("task900_short",)}
    write(tmp_path / "task900_short.json", [(f"short {at}", "so") for at in range(MIN_ROWS)])
    assert len(sample_instruction_tasks(tmp_path, 6)) == 6
    with pytest.raises(UserError, match=r"tasks: expected files task\*.json, or a folder of train.json for each task"):
        sample_instruction_tasks(tmp_path / "nothing", 1)
    with pytest.raises(UserError, match="tasks: expected a whole number of at least 1, got 0"):
        sample_instruction_tasks(tmp_path, 0)


# -- protocols ----------------------------------------------------------------------------------------


def published(folder: Path, *, leak: bool = True) -> Path:
    """Two tasks: one with the same dev and test file, one with a dev file of its own but for a row.

    Without a `leak` each file of both has rows of its own.
    """
    for name, dev in (("sst2", "test" if leak else "dev"), ("imdb", "dev")):
        head = "Text: " if name == "sst2" else ""
        for split, of, count in (("train", "train", 40), ("dev", dev, 10), ("test", "test", 10)):
            rows = [(f"{head}{name} {of} {at}", ("Bad", "Good")[at % 2]) for at in range(count)]
            if leak and (name, split) in (("imdb", "dev"), ("sst2", "train")):
                rows.append((f"{head}{name} test 3", "Good"))
            write(folder / f"Long_Sequence/{name}/{split}.json", rows)
    return folder


DIFFERENCE = {
    **{"tasks": 2, "both": 2, "identical": 1, "dev_in_test": 11, "train_in_test": 1, "train_in_dev": 1},
    **{"paper_train": 81, "paper_dev": 21, "paper_test": 20},
    **{"clean_train": 76, "clean_dev": 14, "clean_test": 20, "dropped": 2},
}


@pytest.mark.parametrize("protocol", ["clean", "paper"])
def test_what_the_protocols_differ_in(protocol: Any, tmp_path: Path) -> None:
    """It is the same whichever of them the stream is read with."""
    stream = read_stream(
        "long-sequence", published(tmp_path), missing_tasks="skip", task_type="generation", protocol=protocol
    )
    assert stream.metadata["protocols"] == {
        "imdb": {
            **{"identical": False, "dev_in_test": 1, "train_in_test": 0, "train_in_dev": 0},
            "evaluated": "the test file",
            "published": {"train": 40, "dev": 11, "test": 10},
            "paper": {"train": 40, "dev": 11, "test": 10},
            "clean": {"train": 40, "dev": 10, "test": 10},
            "dropped": 1,
        },
        "sst2": {
            **{"identical": True, "dev_in_test": 10, "train_in_test": 1, "train_in_dev": 1},
            "evaluated": "the test file",
            "published": {"train": 41, "dev": 10, "test": 10},
            "paper": {"train": 41, "dev": 10, "test": 10},
            "clean": {"train": 36, "dev": 4, "test": 10},
            "dropped": 1,
        },
    }
    assert {task.name: len(task.train) for task in stream.tasks} == {
        name: sizes[protocol]["train"] for name, sizes in stream.metadata["protocols"].items()
    }
    assert describe_protocol_differences(stream) == DIFFERENCE


def test_the_difference_in_words() -> None:
    assert format_protocol_differences(DIFFERENCE).splitlines() == [
        "protocols: rows of the files that are test rows as well: 11 of dev, 1 of train; 1 of 2 tasks with both have "
        "byte-identical dev and test files",
        "  --protocol paper: 81 train, 21 dev and 20 test rows; as published, dev being test where it has no rows else",
        "  --protocol clean: 76 train, 14 dev and 20 test rows; 2 dropped, dev held out of train where it was test",
    ]
    refused = {name: count for name, count in DIFFERENCE.items() if "clean" not in name and name != "dropped"}
    assert format_protocol_differences(refused | {"both": 0}).splitlines()[::2] == [
        "protocols: rows of the files that are test rows as well: 11 of dev, 1 of train",
        "  --protocol clean: refused, a split or a class would be left without rows",
    ]


def test_protocols_that_clean_files_do_not_set_apart(tmp_path: Path) -> None:
    stream = read_stream("long-sequence", published(tmp_path, leak=False), missing_tasks="skip")
    assert [sizes["clean"] == sizes["paper"] for sizes in stream.metadata["protocols"].values()] == [True, True]
    assert describe_protocol_differences(stream) == {}


def test_many_tasks_have_both_protocols(tmp_path: Path) -> None:
    stream = sample_instruction_tasks(folder_of(tmp_path, 8), 8)
    assert describe_protocol_differences(stream) == {}
    write(tmp_path / "task000_made_up" / "dev.json", [(f"task000_made_up test {at}", "so") for at in range(5)])
    leaking = sample_instruction_tasks(tmp_path, 8)
    assert describe_protocol_differences(leaking)["dev_in_test"] == 5
    others = tuple(task for task in leaking.tasks if task.name != "task000_made_up")
    assert describe_protocol_differences(replace(leaking, tasks=others, order=tuple(range(7)))) == {}


def test_what_clean_refuses_is_no_mistake_of_paper(tmp_path: Path) -> None:
    folder = published(tmp_path)
    rows = [("Text: sst2 test 1", "Good"), *((f"Text: sst2 train {at}", "Bad") for at in range(20))]
    write(folder / "Long_Sequence/sst2/train.json", rows)
    with pytest.raises(UserError, match="expected rows of 'Good' in the train split of 'sst2'"):
        read_stream("long-sequence", folder, missing_tasks="skip")
    stream = read_stream("long-sequence", folder, missing_tasks="skip", protocol="paper")
    assert [(sizes["clean"], sizes["dropped"]) for sizes in stream.metadata["protocols"].values()] == [(None, None)] * 2
    assert "clean: refused" in format_protocol_differences(describe_protocol_differences(stream))


def test_protocols_of_other_streams() -> None:
    stream = read_stream("stdlib-split", samples_per_class=5, max_eval_samples=5)
    assert "protocols" not in stream.metadata
    assert describe_protocol_differences(stream) == {}
    paper = read_stream("stdlib-split", samples_per_class=5, max_eval_samples=5, protocol="paper")
    assert not any(set(task.dev.texts) & set(task.test.texts) for task in paper.tasks), "selected on other rows"


@pytest.mark.data
def test_thirty_tasks_with_the_same_dev_and_test(data_folder: Path) -> None:
    found = [
        describe_protocol_differences(read_stream(name, data_folder, missing_tasks="skip", protocol=protocol))
        for name in ("long-sequence", "superni")
        for protocol in ("clean", "paper")
    ]
    assert found[::2] == found[1::2]
    assert sum(one["both"] for one in found[::2]) == sum(one["identical"] for one in found[::2]) == 26


@pytest.mark.data
def test_fifty_tasks_of_what_is_at_hand(data_folder: Path) -> None:
    with pytest.raises(UserError, match=r"expected 50 tasks in .*, there are 15$"):
        sample_instruction_tasks(data_folder, 50)
