"""Streams from a user's own tables and folders."""

import csv
import json
import re
import tracemalloc
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from regard.data import read_stream, read_task
from regard.data.files import describe_file
from regard.data.missing_values import blank_no_numbers, find_gaps
from regard.data.names_alike import warn_of_labels_alike_between
from regard.data.rows import LabeledRow, RawTask
from regard.data.stream import SPLITS, ClassificationTask, Stream, TextTask
from regard.errors import UserError

Records = list[dict[str, Any]]


def records(task: str, each: int = 10, **more: Any) -> Records:
    """Rows of two classes of a task, in turn."""
    return [{"task": task, "text": f"{task} {at}", "label": ("no", "yes")[at % 2]} | more for at in range(2 * each)]


def write(path: Path, rows: Records) -> Path:
    """The rows in the form of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def message_of(path: Path, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        read_stream(path, **settings)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(("stream: ", "data: "))
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_a_table_without_splits(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"mine{suffix}", records("second") + records("first", each=20))
    stream = read_stream(path, seed=5)
    assert (stream.name, [task.name for task in stream.tasks]) == (path.name, ["second", "first"])
    assert [task.labels for task in stream.tasks] == [("no", "yes")] * 2
    assert stream.classes == ("no", "yes")
    sizes = [[Counter(task.split(split).labels) for split in ("train", "dev", "test")] for task in stream.tasks]
    assert sizes == [
        [{0: 7, 1: 7}, {0: 1, 1: 1}, {0: 2, 1: 2}],
        [{0: 14, 1: 14}, {0: 2, 1: 2}, {0: 4, 1: 4}],
    ]
    for task in stream.tasks:
        assert "10% (dev) and 20% (test) of each class drawn with seed 5" in task.source
        found = [text for split in ("train", "dev", "test") for text in task.split(split).texts]
        assert len(set(found)) == len(found)
    assert read_stream(path, seed=5) == stream
    assert read_stream(path, seed=6).tasks[1].test != stream.tasks[1].test


def test_a_table_with_splits_and_pairs(tmp_path: Path) -> None:
    rows = [
        row | {"split": split, "text": f"{split} {row['text']}", "text_pair": pair}
        for split in ("train", "validation", "test")
        for task, pair in (("two", "other"), ("one", None))
        for row in records(task)
    ]
    stream = read_stream(write(tmp_path / "mine.jsonl", rows), samples_per_class=4)
    two, one = stream.tasks
    assert (two.dev.texts[0], one.dev.texts[0]) == (("validation two 0", "other"), ("validation one 0",))
    assert [len(two.split(split)) for split in ("train", "dev", "test")] == [8, 20, 20]
    assert stream.metadata["dev"] == "a split of its own"


def test_a_missing_dev_is_held_out_of_train(tmp_path: Path) -> None:
    rows = [
        row | {"split": split, "text": f"{split} {row['text']}"} for split in ("train", "test") for row in records("a")
    ]
    task = read_stream(write(tmp_path / "mine.csv", rows)).tasks[0]
    assert [Counter(task.split(split).labels) for split in ("train", "dev", "test")] == [
        {0: 9, 1: 9},
        {0: 1, 1: 1},
        {0: 10, 1: 10},
    ]
    assert all(text[0].startswith("train") for text in task.dev.texts)


def test_whole_numbers_are_classes_of_their_task(tmp_path: Path) -> None:
    rows = [row | {"label": at % 2 * 10} for name in ("x", "y") for at, row in enumerate(records(name))]
    stream = read_stream(write(tmp_path / "mine.jsonl", rows))
    assert stream.classes == ("x/0", "x/10", "y/0", "y/10")


def test_a_folder_for_each_task(tmp_path: Path) -> None:
    for name, suffix in (("b", "csv"), ("a", "jsonl")):
        for split in ("train", "test"):
            rows = [{"text": f"{split} {row['text']}", "label": row["label"]} for row in records(name)]
            write(tmp_path / f"tasks/{name}/{split}.{suffix}", rows)
    write(tmp_path / "tasks/b/valid.parquet", records("valid"))
    (tmp_path / "tasks/.hidden").mkdir()
    (tmp_path / "tasks/README.md").write_text("these are tasks")
    stream = read_stream(tmp_path / "tasks", order="1-0")
    assert (stream.name, [task.name for task in stream.tasks]) == ("tasks", ["b", "a"])
    assert [[len(task.split(split)) for split in ("train", "dev", "test")] for task in stream.tasks] == [
        [20, 20, 20],
        [18, 2, 20],
    ]
    assert "where there is none" in stream.metadata["dev"]


def test_val_is_dev_and_a_file_of_no_split_is_told(tmp_path: Path) -> None:
    for split in ("train", "test", "val", "extra", "more"):
        rows = [{"text": f"{split} {row['text']}", "label": row["label"]} for row in records("a")]
        write(tmp_path / f"tasks/a/{split}.jsonl", rows)
    with pytest.warns(UserWarning, match="is not read") as told:
        stream = read_stream(tmp_path / "tasks")
    for name, one in zip(("extra", "more"), told, strict=True):
        assert re.search(rf"{name}.jsonl is not read: expected a name of train, dev", str(one.message))
    assert [len(stream.tasks[0].split(split)) for split in ("train", "dev", "test")] == [20, 20, 20]
    assert all(text[0].startswith("val") for text in stream.tasks[0].dev.texts)


def test_half_a_surrogate_pair_is_refused_in_any_column(tmp_path: Path) -> None:
    """JSON allows it; no hash and no tokenizer does."""
    row = {"task": "a", "text": "fine \u00e9", "label": "half \ud83d"}
    path = write(tmp_path / "mine.jsonl", [{**row, "label": "whole \ud83d\ude00"}, row])
    with pytest.raises(UserError, match=r"expected Unicode under 'label' in .*mine.jsonl, line 2, got half of a surr"):
        read_stream(path)


def test_overlaps_between_own_tasks(tmp_path: Path) -> None:
    rows = [
        row | {"split": split, "text": f"{split} {row['text']}"}
        for split in ("train", "dev", "test")
        for name in ("a", "b")
        for row in records(name)
    ]
    rows.append({"task": "a", "text": "TEST b 3", "label": "no", "split": "train"})
    rows.append({"task": "b", "text": "test  b 4", "label": "no", "split": "dev"})
    path = write(tmp_path / "mine.jsonl", rows)
    clean, paper = (read_stream(path, protocol=protocol) for protocol in ("clean", "paper"))
    assert [len(clean.tasks[0].train), len(clean.tasks[1].dev)] == [20, 20]
    assert [len(paper.tasks[0].train), len(paper.tasks[1].dev)] == [21, 21]
    for stream in (clean, paper):
        assert stream.metadata["overlaps"]["a"]["train_in_other_tasks"] == 1
        assert stream.metadata["overlaps"]["b"]["dev_in_test"] == 1


# -- instructions and answers --------------------------------------------------------------------------


def answered(task: str, column: str = "answer", each: int = 10, **more: Any) -> Records:
    """Rows of a task with a free answer in the place of the label."""
    return [{"task": task, "text": f"{task} {at}", column: f"it is {at}"} | more for at in range(2 * each)]


@pytest.mark.parametrize("column", ["instruction", "definition"])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_an_instruction_is_the_first_of_two_texts(tmp_path: Path, suffix: str, column: str) -> None:
    """As in the Long Sequence benchmark: the texts behind it are joined; a task without is as it was."""
    rows = records("a", **{column: "Say yes or no.", "text_pair": "other"}) + records(
        "b", **{column: "", "text_pair": ""}
    )
    first, second = (stream := read_stream(write(tmp_path / f"mine{suffix}", rows))).tasks
    texts = {text for split in ("train", "dev", "test") for text in first.split(split).texts}
    assert texts == {("Say yes or no.", f"a {at} other") for at in range(20)}
    assert all(len(text) == 1 for text in second.train.texts)
    assert (stream.metadata["instructions"], stream.metadata["task_type"]) == (True, "classification")
    plain = read_stream(write(tmp_path / f"plain{suffix}", [{**row, column: "", "text_pair": ""} for row in rows]))
    assert plain.metadata["instructions"] is False
    kept = [text[1].removesuffix(" other") for text in first.test.texts]
    pair = write(tmp_path / f"pair{suffix}", [{**row, column: ""} for row in rows])
    assert kept == [text[0] for text in read_stream(pair).tasks[0].test.texts], "the split is drawn without it"


def test_rows_of_one_text_and_several_instructions_are_several_rows(tmp_path: Path) -> None:
    rows = [row | {"text": "one text", "instruction": f"Question {at}?"} for at, row in enumerate(records("a"))]
    two = [row | {"text": f"text {at // 2}", "instruction": f"{at % 2}?"} for at, row in enumerate(records("a"))]
    for name, written in (("mine.jsonl", rows), ("two.jsonl", two)):
        (task,) = read_stream(write(tmp_path / name, written)).tasks
        assert sum(len(task.split(split)) for split in ("train", "dev", "test")) == 20


@pytest.mark.parametrize("column", ["answer", "target"])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_a_table_of_answers_is_text_to_text(tmp_path: Path, suffix: str, column: str) -> None:
    rows = answered("a", column, instruction="Say what it is.") + answered("b", column, instruction="")
    stream = read_stream(write(tmp_path / f"mine{suffix}", rows), samples_per_class=5)
    assert stream.text
    first, second = stream.tasks
    assert isinstance(first, TextTask)
    assert isinstance(second, TextTask)
    assert [len(first.split(split)) for split in ("train", "dev", "test")] == [5, 2, 4]
    number = first.train.inputs[0].split("\n")[1].removeprefix("a ")
    assert first.train.inputs[0] == f"Say what it is.\na {number}\nOutput: "
    assert first.train.targets[0] == (f"it is {number}",)
    assert second.train.inputs[0].endswith("\nOutput: ")
    assert second.train.inputs[0].startswith("b ")
    assert [(task.metric, task.labels, task.definition) for task in (first, second)] == [
        ("rouge-l-unicode", (), "Say what it is."),
        ("rouge-l-unicode", (), ""),
    ]
    assert stream.metadata["task_type"] == "generation"


def test_the_metric_of_answers_may_be_chosen(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", answered("a") + answered("b"))
    assert [task.metric for task in read_stream(file, metric="accuracy").tasks] == ["accuracy"] * 2
    with pytest.raises(UserError, match=r"metric: expected one of rouge-l, .*, got 'bleu'"):
        read_stream(file, metric="bleu")
    with pytest.raises(UserError, match="metric: expected none with 'stdlib-split', which has its own, got 'sari'"):
        read_stream("stdlib-split", metric="sari")
    labelled = write(
        tmp_path / "labelled.jsonl", [{"task": "t", "text": f"x{n}", "label": "ab"[n % 2]} for n in range(20)]
    )
    with pytest.raises(UserError, match=r"metric: expected none with '.*', whose tasks have classes, got 'accuracy'"):
        read_stream(labelled, metric="accuracy")


def test_answers_may_be_several_or_whole_numbers(tmp_path: Path) -> None:
    rows = [row | {"answer": ["four", 4] if at % 2 else at} for at, row in enumerate(answered("a"))]
    (task,) = read_stream(write(tmp_path / "mine.jsonl", rows)).tasks
    assert isinstance(task, TextTask)
    assert set(task.train.targets) <= {("four", "4"), *((str(at),) for at in range(20))}


def test_labels_are_written_where_that_is_asked_for(tmp_path: Path) -> None:
    """With both columns the labels are learned, unless answers are asked for."""
    path = write(tmp_path / "mine.jsonl", records("a", instruction="Say yes or no.") + records("b"))
    (first, second) = (stream := read_stream(path, task_type="generation")).tasks
    assert isinstance(first, TextTask)
    assert (stream.text, first.metric, first.labels) == (True, "exact-match-unicode", ("no", "yes"))
    assert set(first.train.targets) == {("no",), ("yes",)}
    assert [one.definition for one in (first, second) if isinstance(one, TextTask)] == ["Say yes or no.", ""]
    both = write(tmp_path / "both.jsonl", records("a", answer="it is so"))
    assert not read_stream(both).text
    (task,) = read_stream(both, task_type="generation").tasks
    assert (task.train.targets[0], task.labels) == (("it is so",), ())


def test_a_folder_of_answers(tmp_path: Path) -> None:
    for name, suffix in (("b", "csv"), ("a", "jsonl")):
        for split in ("train", "test"):
            write(tmp_path / f"{name}/{split}.{suffix}", answered(f"{split} {name}"))
    stream = read_stream(tmp_path)
    assert [[len(task.split(split)) for split in ("train", "dev", "test")] for task in stream.tasks] == [
        [18, 2, 20]
    ] * 2
    write(tmp_path / "c/train.csv", records("train c"))
    write(tmp_path / "c/test.csv", records("test c"))
    assert "expected the column 'label' in" in message_of(tmp_path)


def test_instructions_and_answers_that_are_none(tmp_path: Path) -> None:
    rows = records("a", instruction="Say yes or no.")
    path = write(tmp_path / "some.jsonl", [*rows[:3], rows[3] | {"instruction": " "}, *rows[4:]])
    assert message_of(path) == (
        f"stream: expected an instruction in each row of 'a', or in none, got none in {path}, line 4"
    )
    path = write(tmp_path / "number.jsonl", [rows[0] | {"instruction": 3}, *rows[1:]])
    assert message_of(path) == f"stream: expected text in the column 'instruction' of {path}, line 1, got 3"
    path = write(tmp_path / "two.jsonl", records("a", instruction="x", definition="y"))
    assert message_of(path) == f"stream: expected one of the columns instruction and definition in {path}, found both"
    path = write(tmp_path / "answers.jsonl", answered("a", target="x"))
    assert message_of(path) == f"stream: expected one of the columns answer and target in {path}, found both"
    for answer in (None, [], [""], " ", 1.5):
        path = write(tmp_path / "none.jsonl", [answered("a")[0] | {"answer": answer}, *answered("a")[1:]])
        assert "expected an answer or a list of answers in the column 'answer' of" in message_of(
            path, missing_values="refuse"
        )
    path = write(tmp_path / "plain.jsonl", records("a"))
    with pytest.raises(UserError, match=r"instructions: expected a column instruction or definition in .*plain\.jsonl"):
        read_stream(path, instructions=True)
    with pytest.raises(UserError, match="task-type: expected one of classification, generation, got 'words'"):
        read_stream(path, task_type=cast(Any, "words"))


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change,said",
    [
        ({"text": 3}, "expected text in the column 'text' of {path}, line 1, got 3"),
        ({"text": None}, "expected text in the column 'text' of {path}, line 1, got None"),
        ({"text": "  "}, "expected text in the column 'text' of {path}, line 1, got '  '"),
        ({"text_pair": 3}, "expected text in the column 'text_pair' of {path}, line 1, got 3"),
        ({"label": None}, "expected a string or a whole number as label in {path}, line 1, got None"),
        ({"label": 1.5}, "expected a string or a whole number as label in {path}, line 1, got 1.5"),
        ({"label": ""}, "expected a string or a whole number as label in {path}, line 1, got ''"),
        ({"task": None}, "expected the name of a task in {path}, line 1, got None"),
        ({"split": "all"}, "expected a split of train, dev, validation, valid, val, test in {path}, line 1, got 'all'"),
        ({"text_pair": "two"}, "expected one text in each row of 'a', or two in each, got both"),
        (
            {"task": "lonely"},
            "at least 3 texts of two classes in 'lonely' of {path}, one for each split, got fewer of 'no'",
        ),
    ],
)
def test_rows_that_are_none(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    rows = records("a")
    path = write(tmp_path / "mine.jsonl", [rows[0] | change, *rows[1:]])
    assert said.format(path=path) in message_of(path, missing_values="refuse")


def told(path: Path, **settings: Any) -> tuple[Stream, str]:
    """The stream, and the one warning."""
    with pytest.warns(UserWarning, match="stream: ") as caught:
        stream = read_stream(path, **settings)
    assert len(caught) == 1
    return stream, str(caught[0].message)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_rows_without_a_label_are_left_out_and_told(tmp_path: Path, suffix: str) -> None:
    """Empty, blank and missing labels; what is left is read as a table that never had these rows."""
    rows = records("a") + records("b")
    empty: list[Any] = ["", "  "] if suffix in (".csv", ".tsv") else [None, "", "  "]
    gaps = [{"task": "a", "text": f"gap {at}", "label": label} for at, label in enumerate(empty)]
    if suffix == ".jsonl":
        gaps += [{"task": "a", "text": "gap 3"}, {"task": "a", "text": "gap 4", "label": float("nan")}]
    path, whole = tmp_path / f"mine{suffix}", write(tmp_path / f"whole{suffix}", rows)
    write(path, [*rows[:2], *gaps, {"task": "b", "text": "gap", "label": ""}, *rows[2:]])
    stream, warning = told(path, seed=3)
    first = "row 3" if suffix == ".parquet" else "line 3" if suffix == ".jsonl" else "line 4"
    number = len(gaps) + 1
    assert warning == (
        f"stream: {path}: {number} of {40 + number} rows have nothing in the column 'label' and are left out, "
        f"the first in {first} (missing-values=refuse stops there)"
    )
    assert stream.metadata["left_out"] == {"a": len(gaps), "b": 1}
    assert "left_out" not in (expected := read_stream(whole, seed=3)).metadata
    assert [task.sha256 for task in stream.tasks] == [task.sha256 for task in expected.tasks]
    if suffix == ".csv":
        said = message_of(path, missing_values="refuse")
        assert said == f"stream: expected a string or a whole number as label in {path}, line 4, got ''"


@pytest.mark.parametrize("mark", ["NaN", "NA", "<NA>", "null"])
def test_marks_of_no_number_are_no_class_among_numbers(tmp_path: Path, mark: str) -> None:
    """As R and pandas write a gap in a column of numbers; among words they may be a class."""
    rows = [*records("a"), *records("b")]
    numbered = [{**row, "label": ["no", "yes"].index(row["label"])} if row["task"] == "a" else row for row in rows]
    gaps: Records = [{"task": "a", "text": f"gap {at}", "label": mark} for at in range(3)]
    stream, warning = told(write(tmp_path / "mine.csv", [*gaps, *numbered]), seed=3)
    assert f"3 of 43 rows have {mark} in the column 'label' and are left out" in warning
    refused = message_of(tmp_path / "mine.csv", missing_values="refuse")
    assert refused.endswith(f"line 2, got '{mark}'")
    whole = read_stream(write(tmp_path / "whole.csv", numbered), seed=3)
    assert [task.sha256 for task in stream.tasks] == [task.sha256 for task in whole.tasks]
    words = write(tmp_path / "words.csv", [*gaps, *rows])
    with pytest.warns(UserWarning, match=f"have the label '{mark}', as many tables mark rows without one: it is"):
        (task, _) = cast(list[ClassificationTask], list(read_stream(words, order="0-1").tasks))
    assert mark in task.labels


def test_words_for_no_number_alone_are_classes() -> None:
    """Nothing says that they are gaps in a column of numbers."""
    rows = [(line, {"task": "a", "label": label}) for line, label in enumerate(("NA", "none", "NA"), start=2)]
    with pytest.warns(UserWarning, match="have the label 'NA', as many tables mark rows without one"):
        assert blank_no_numbers(rows, "label", "mine.csv", "stream") == rows


def test_gaps_are_empty_cells_in_tasks_that_have_more_full_ones() -> None:
    assert find_gaps(["x", None, "y", None, "z"], ["a", "a", "b", "b", "b"]) == [3]


def test_rows_without_a_text_are_left_out_and_told(tmp_path: Path) -> None:
    """One warning counts rows without a text and without a label; what is left is read as if they were not there."""
    rows = records("a") + records("b")
    blank: list[dict[str, Any]] = [{"task": "a", "text": text, "label": "no"} for text in (None, "", " \u00a0", [])]
    path = write(tmp_path / "mine.jsonl", [*rows[:2], *blank, {"task": "b", "label": "no"}, *rows[2:]])
    stream, warning = told(path, seed=3)
    assert warning == (
        f"stream: {path}: 5 of 45 rows have nothing in the column 'text' and are left out, the first in line 3 "
        "(missing-values=refuse stops there)"
    )
    assert stream.metadata["left_out"] == {"a": 4, "b": 1}
    expected = read_stream(write(tmp_path / "whole.jsonl", rows), seed=3)
    assert [task.sha256 for task in stream.tasks] == [task.sha256 for task in expected.tasks]
    path = write(tmp_path / "mine.jsonl", [*blank[:1], {"task": "b", "text": "x", "label": ""}, *rows])
    assert "2 of 42 rows have nothing in the column 'label' or nothing in the column 'text'" in told(path)[1]
    path = write(tmp_path / "mine.jsonl", [*rows, {"task": "c", "text": "", "label": "no"}])
    with pytest.warns(UserWarning, match="1 of 41 rows have nothing in the column 'text'"):
        assert message_of(path).endswith(f"a text and a label of the task 'c' in {path}, none of 1 has both")
    path = write(tmp_path / "mine.jsonl", [row | {"text": ""} for row in rows])
    assert message_of(path).endswith(f"values in the column 'text' of {path}, none of 40 rows has one")
    path = write(
        tmp_path / "mine.jsonl",
        [row | {"text": "" if at % 2 else "x"} | {"label": "y" * (at % 2)} for at, row in enumerate(rows)],
    )
    assert message_of(path).endswith(f"the columns 'label' and 'text' of {path}, none of 40 rows has all")


def test_inputs_may_be_empty_where_instructions_say_all(tmp_path: Path) -> None:
    """Of text-to-text tasks; where there is no instruction either, a row is left out."""
    rows = answered("a", instruction="Name a colour.")
    path = write(tmp_path / "mine.jsonl", [rows[0] | {"text": ""}, *rows[1:]])
    stream = read_stream(path)
    assert ("left_out" in stream.metadata, sum(len(stream.tasks[0].split(one)) for one in SPLITS)) == (False, 20)
    path = write(tmp_path / "mine.jsonl", [*rows, {"task": "a", "text": "", "instruction": "", "answer": "red"}])
    assert told(path)[0].metadata["left_out"] == {"a": 1}


def test_an_instruction_of_classification_is_no_text(tmp_path: Path) -> None:
    """Where answers are labels it says what to do, of the text that is missing; such a row was refused."""
    rows = records("a", instruction="Say yes or no.")
    path = write(tmp_path / "mine.jsonl", [*rows, rows[0] | {"text": ""}])
    assert told(path)[0].metadata["left_out"] == {"a": 1}


@pytest.mark.parametrize("kind", ["table", "folder"])
def test_rows_without_the_second_text_are_left_out_where_others_have_one(tmp_path: Path, kind: str) -> None:
    """A task whose rows have one text is read beside them; of a task with few second texts, these are refused."""
    pairs, single = records("a", text_pair="other"), records("b", text_pair="")
    gaps = [
        {**pairs[0], "text": f"gap {at}", "text_pair": second} for at, second in enumerate(("", None, float("nan")))
    ]
    path = tmp_path / "mine.jsonl"
    if kind == "table":
        write(path, [*pairs, *gaps, *single])
    else:
        path = tmp_path / "mine"
        for task, rows in (("a", [*pairs, *gaps]), ("b", single)):
            write(path / task / "train.jsonl", pairs if task == "a" else rows)
            write(path / task / "test.jsonl", [row | {"text": f"test {row['text']}"} for row in rows])
    stream, warning = told(path)
    assert "3 of " in warning
    assert "rows have nothing in the column 'text_pair' and are left out" in warning
    assert stream.metadata["left_out"] == {"a": 3}
    path = write(tmp_path / "few.jsonl", [*records("a", text_pair=""), *pairs[:3]])
    assert message_of(path).endswith("expected one text in each row of 'a', or two in each, got both")


def test_rows_with_a_second_text_or_no_instruction_need_a_text(tmp_path: Path) -> None:
    """Also where no row of the table has one: that a column lacks was a traceback."""
    rows = answered("a", instruction="Name a colour.")
    bare = [{"task": "a", "instruction": row["text"], "answer": row["answer"]} for row in rows]
    for whole, gap in ((rows, rows[0] | {"text": "", "text_pair": "b"}), (bare, bare[0] | {"text_pair": "b"})):
        for row in (gap, whole[0] | {"text": "", "instruction": ""}, {"task": "a", "instruction": "", "answer": "red"}):
            assert told(write(tmp_path / "mine.jsonl", [*whole, row]))[0].metadata["left_out"] == {"a": 1}
            assert "the column 'text'" in message_of(tmp_path / "mine.jsonl", missing_values="refuse")


def labeled(number: int, label: Any, **columns: Any) -> list[dict[str, Any]]:
    return [{"task": "a", "text": f"{label} {at} {columns}", "label": label, **columns} for at in range(number)]


def test_minus_one_that_no_training_row_has_is_no_label(tmp_path: Path) -> None:
    """As published test files mark rows without a label; pandas writes -1.0 into a column with a gap."""
    rows = [row for split in ("train", "test") for label in (0, 1) for row in labeled(5, label, split=split)]
    for mark in (-1, "-1", -1.0):
        path = write(tmp_path / "mine.jsonl", [*rows, *labeled(3, mark, split="test")])
        stream, warning = told(path)
        assert "3 of 23 rows have -1 in the column 'label' and are left out, the first in line 21" in warning
        assert (stream.tasks[0].labels, len(stream.tasks[0].test)) == (("a/0", "a/1"), 10)
        assert (stream.metadata["left_out"], "minus_one" in stream.metadata) == ({"a": 3}, False)
        said = message_of(path, missing_values="refuse")
        assert said == f"stream: expected a label in {path}, line 21, got -1, which no training row of its task has"
    blank = [row | {"text": " "} for row in labeled(1, -2, split="train")]  # left out, so its label says nothing
    stream, warning = told(write(tmp_path / "mine.jsonl", [*rows, *blank, *labeled(3, -1, split="test")]))
    assert "4 of 24 rows have nothing in the column 'text' or -1 in the column 'label'" in warning
    negative = [row | {"label": row["label"] - 3} for row in rows]
    assert "'a/-1'" in message_of(write(tmp_path / "mine.jsonl", [*negative, *labeled(3, -1, split="test")]))
    path = write(tmp_path / "mine.jsonl", [*rows[:10], *labeled(3, -1, split="test")])
    with pytest.warns(UserWarning, match="3 of 13 rows have -1"):
        said = message_of(path)
    assert said.endswith(f"got none ({describe_file(path)}, 3 rows of the task have no label or no text)")


def test_minus_one_in_a_folder(tmp_path: Path) -> None:
    for task, mark in (("a", -1), ("b", 1)):
        write(tmp_path / f"{task}/train.csv", labeled(4, 0) + labeled(4, mark) + labeled(4, 1))
        write(tmp_path / f"{task}/test.csv", labeled(3, 0) + labeled(2, -1))
    with pytest.warns(UserWarning, match="rows (of 'a' )?have") as caught:
        stream = read_stream(tmp_path, protocol="paper")
    messages = [str(one.message) for one in caught]
    assert f"{tmp_path / 'b/test.csv'}: 2 of 5 rows have -1" in messages[0]
    assert messages[1].startswith(
        "stream: 6 rows of 'a' have the label -1, as many tables mark rows without one: it is"
    )
    assert (stream.metadata["left_out"], stream.metadata["minus_one"]) == ({"b": 2}, {"a": 6})
    assert [task.labels for task in stream.tasks] == [("a/-1", "a/0", "a/1"), ("b/0", "b/1")]


def test_minus_one_of_training_rows_is_a_class_unless_told_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [*labeled(10, 0), *labeled(10, 1), *labeled(10, -1)])
    stream, warning = told(path)
    assert re.search(r"10 rows of 'a' have the label -1, .* \(missing-values=skip-minus-one leaves", warning)
    assert (stream.tasks[0].labels, stream.metadata["minus_one"]) == (("a/-1", "a/0", "a/1"), {"a": 10})
    stream, warning = told(path, missing_values="skip-minus-one")
    assert "10 of 30 rows have -1 in the column 'label' and are left out, the first in line 21" in warning
    assert (stream.tasks[0].labels, stream.metadata["left_out"]) == (("a/0", "a/1"), {"a": 10})
    for labels in ((-1, 1), (-2, -1, 0, 1)):  # two classes by their sign, and a scale
        path = write(tmp_path / "mine.jsonl", [row for label in labels for row in labeled(10, label)])
        assert read_stream(path).tasks[0].labels == tuple(f"a/{label}" for label in labels)


@pytest.mark.filterwarnings("ignore:stream. labels of 'a' are decimal numbers")
@pytest.mark.parametrize("unit", [0.37, 37])
def test_measurements_as_labels_are_refused_as_such(tmp_path: Path, unit: float) -> None:
    rows = [{"task": "a", "text": f"x {at}", "label": f"{at * unit:g}"} for at in range(20)]
    reason = ": 20 different numbers as labels of 20 rows, each a class of its own; regression is not served"
    said = message_of(write(tmp_path / "all.csv", rows))
    assert "expected at least 3 texts of two classes in 'a' of" in said
    assert said.endswith(reason)
    split = [row | {"split": "train" if at < 15 else "test"} for at, row in enumerate(rows)]
    said = message_of(write(tmp_path / "split.csv", split))
    assert said.startswith("stream: expected labels of train (")
    assert ", …) in 'a', got " in said
    assert said.endswith(f" beside it and 4 more in 5 of 5 rows of dev and test{reason}")
    said = message_of(write(tmp_path / "float.jsonl", [{**rows[0], "label": 0.37}, *rows]))
    assert said.endswith("as label in " + f"{tmp_path / 'float.jsonl'}, line 1, got 0.37; regression is not served")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_true_and_false_are_labels(tmp_path: Path, suffix: str) -> None:
    """As pandas writes them into a .csv, so that one table has the same labels in each format."""
    (task,) = read_stream(write(tmp_path / f"mine{suffix}", labeled(10, True) + labeled(10, False))).tasks
    assert isinstance(task, ClassificationTask)
    assert task.labels == ("False", "True")
    assert {
        task.labels[label] for (text,), label in zip(task.train.texts, task.train.labels, strict=True) if "Tr" in text
    } == {"True"}


def test_names_of_splits_in_any_case(tmp_path: Path) -> None:
    rows = [row | {"split": split} for split in ("Train", "VALIDATION ", "test") for row in records("a", split=split)]
    (task,) = read_stream(
        write(tmp_path / "mine.jsonl", [dict(r, text=f"{r['text']} {r['split']}") for r in rows])
    ).tasks
    assert [len(task.split(split)) for split in SPLITS] == [20, 20, 20]


def test_labels_that_no_training_row_has(tmp_path: Path) -> None:
    rows = [row | {"split": split} for split in ("train", "test") for row in records("a", each=2)]
    rows += [{"task": "a", "text": f"new {at}", "label": "maybe", "split": "test"} for at in range(2)]
    said = "stream: expected labels of train (no, yes) in 'a', got 'maybe' beside it in 2 of 6 rows of dev and test"
    assert message_of(write(tmp_path / "mine.jsonl", rows)) == said
    rows[0] |= {"label": ["no", "yes"]}
    said = (
        f"a string or a whole number as label in {tmp_path / 'mine.jsonl'}, line 1, got ['no', 'yes']; several labels"
    )
    assert said in message_of(write(tmp_path / "mine.jsonl", rows))


def test_answers_that_are_missing(tmp_path: Path) -> None:
    empty = (None, "", [], [None, " "])
    gaps = [{"task": "a", "text": f"gap {at}", "answer": answer} for at, answer in enumerate(empty)]
    stream, warning = told(write(tmp_path / "mine.jsonl", [*answered("a"), *gaps, {"task": "a", "text": "gap"}]))
    assert "5 of 25 rows have nothing in the column 'answer' and are left out, the first in line 21" in warning
    assert stream.metadata["left_out"] == {"a": 5}
    (task,) = stream.tasks
    assert sum(len(task.split(split)) for split in SPLITS) == 20


def test_files_of_a_folder_without_some_labels(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"a/{split}.csv", [{"text": f"{split} {at}", "label": "xy"[at % 2]} for at in range(10)])
    with (tmp_path / "a/test.csv").open("a") as file:
        file.write("nothing said,\n")
    stream, warning = told(tmp_path)
    assert warning.startswith(f"stream: {tmp_path / 'a/test.csv'}: 1 of 11 rows have nothing in the column 'label'")
    assert (stream.metadata["left_out"], len(stream.tasks[0].test)) == ({"a": 1}, 10)
    write(tmp_path / "a/test.csv", [{"text": f"test {at}", "label": ""} for at in range(10)])
    said = message_of(tmp_path)
    assert f"expected labels in the column 'label' of {tmp_path / 'a/test.csv'}, none of 10 rows has one" in said
    write(tmp_path / "a/test.csv", [{"text": f"test {at}"} for at in range(10)])
    assert f"expected the column 'label' in {tmp_path / 'a/test.csv'}, line 2, found text" in message_of(tmp_path)


def test_decimal_numbers_as_labels_are_told(tmp_path: Path) -> None:
    """In a .csv, whose cells are texts; elsewhere they are refused."""
    for labels, is_told in ((("0.5", "1", "1.5"), True), (("1.0", "2.0"), False), (("1.5", "few"), False)):
        rows = [{"task": "a", "text": f"text {at}", "label": labels[at % len(labels)]} for at in range(18)]
        path = write(tmp_path / "mine.csv", rows)
        if is_told:
            warning = told(path)[1]
            assert warning.startswith(
                "stream: labels of 'a' are decimal numbers, such as 0.5: each of 3 numbers is a class"
            )
        else:
            read_stream(path)


@pytest.mark.filterwarnings("ignore:stream.*have nothing in the column")
def test_a_task_without_any_label_does_not_vanish(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", records("a") + records("b", label=None))
    assert message_of(path) == (
        f"stream: expected rows with a text and a label of the task 'b' in {path}, none of 20 has both"
    )
    blank = write(tmp_path / "blank.csv", [*records("a"), {"task": "", "text": "", "label": ""}])  # of a spreadsheet
    assert [task.name for task in read_stream(blank).tasks] == ["a"]


@pytest.mark.parametrize("column", ["text", "label"])
def test_missing_columns(tmp_path: Path, column: str) -> None:
    rows = [{name: value for name, value in row.items() if name != column} for row in records("a")]
    path = write(tmp_path / "mine.csv", rows)
    assert f"expected the column '{column}' in {path}, line 2, found " in message_of(path)


def test_a_table_without_tasks_is_one_task(tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name != "task"} for row in records("a")]
    with pytest.warns(UserWarning, match=r"tickets\.csv has no column 'task': its rows are one task, 'tickets'"):
        (task,) = read_stream(write(tmp_path / "tickets.csv", rows)).tasks
    assert (task.name, len(task.train) + len(task.dev) + len(task.test)) == ("tickets", 20)


def test_a_class_of_one_text_is_trained_on(tmp_path: Path) -> None:
    rows = [*records("a"), *records("b"), {"task": "b", "text": "once", "label": "rare"}]
    with pytest.warns(
        UserWarning, match="classes of 'b' of .* with fewer than 3 texts stay in train, none is held out: 'rare'"
    ):
        task = read_stream(write(tmp_path / "a.jsonl", rows)).tasks[1]
    assert isinstance(task, ClassificationTask)
    rare = task.labels.index("rare")
    assert [task.split(split).labels.count(rare) for split in SPLITS] == [1, 0, 0]


def test_instructions_as_they_are_published_are_read(tmp_path: Path) -> None:
    rows = [
        {"task": "t", "instruction": f"Say {at}.", "input": "loudly" if at % 2 else "", "output": f"{at}!"}
        for at in range(20)
    ]
    (task,) = read_stream(write(tmp_path / "a.jsonl", rows)).tasks
    assert isinstance(task, TextTask)
    pairs = [pair for split in SPLITS for pair in zip(task.split(split).inputs, task.split(split).targets, strict=True)]
    expected = {(f"Say {at}.\n{'loudly' + chr(10) if at % 2 else ''}Output: ", (f"{at}!",)) for at in range(20)}
    assert set(pairs) == expected
    labels = [row | {"label": "ab"[at // 2 % 2], "output": ""} for at, row in enumerate(rows)]
    labelled = write(tmp_path / "b.jsonl", labels)
    stream, warning = told(labelled)  # of classes, which need a text
    assert (stream.metadata["left_out"], "10 of 20 rows have nothing in the column 'input'" in warning) == (
        {"t": 10},
        True,
    )


def test_an_instruction_may_say_all(tmp_path: Path) -> None:
    rows = [{"task": "t", "instruction": f"Say {at}.", "output": f"{at}!"} for at in range(20)]
    (task,) = read_stream(write(tmp_path / "a.jsonl", rows)).tasks
    assert isinstance(task, TextTask)
    assert sorted(task.train.inputs)[0].endswith(".\nOutput: ")
    paired = [row | {"text": "", "text_pair": "two"} for row in rows]
    assert message_of(write(tmp_path / "b.jsonl", paired)).endswith(
        "the column 'text' of " + f"{tmp_path / 'b.jsonl'}, none of 20 rows has one"
    )


def test_texts_that_are_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.csv", [row | {"text": f"{at}.5"} for at, row in enumerate(records("a"))])
    assert message_of(path) == f"stream: expected text in the column 'text' of {path}, got numbers alone"


def test_tasks_that_are_none(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", [row | {"label": "same"} for row in records("a")])
    assert "stream: expected at least two classes in 'a', got 'same'" in message_of(one)
    unseen = [row | {"split": "train"} for row in records("a")]
    unseen += [{"task": "a", "text": "new", "label": "maybe", "split": "test"}]
    path = write(tmp_path / "unseen.jsonl", unseen)
    assert "expected labels of train (no, yes) in 'a', got 'maybe' beside it" in message_of(path)
    path = write(tmp_path / "empty.jsonl", [row | {"split": "train"} for row in records("a")])
    assert "expected rows in the test split of 'a', got none" in message_of(path)
    whole = [row | {"split": "train", "label": at % 2} for at, row in enumerate(records("a"))]
    whole += [{"task": "a", "text": "new", "label": 7, "split": "test"}]
    assert "expected labels of train (a/0, a/1) in 'a', got 'a/7'" in message_of(write(tmp_path / "w.jsonl", whole))


@pytest.mark.parametrize("suffix", [".JSONL", ".Csv", ".TSV", ".PARQUET"])
def test_the_case_of_a_suffix_says_nothing(tmp_path: Path, suffix: str) -> None:
    plain = read_stream(write(tmp_path / f"mine{suffix.lower()}", records("a")))
    table = write(tmp_path / f"lower{suffix.lower()}", records("a")).rename(tmp_path / f"mine{suffix}")
    assert read_stream(table).tasks[0].train == plain.tasks[0].train
    train = write(tmp_path / f"folder/a/train{suffix.lower()}", records("a"))
    train.rename(train.with_name(f"Train{suffix}"))
    test = write(tmp_path / f"folder/a/test{suffix.lower()}", records("b"))
    test.rename(test.with_suffix(suffix))
    assert len(read_stream(tmp_path / "folder").tasks[0].test.texts) == len(records("b"))


def test_quotes_of_tab_separated_values_are_told(tmp_path: Path) -> None:
    rows = records("a")
    path = write(tmp_path / "plain.tsv", rows)
    read_stream(path)
    path.write_text(path.read_text().replace("a 3", '"He said ""hi"" twice 3"'))
    with pytest.warns(
        UserWarning, match=r"plain.tsv, line 5: quotes around a field of .tsv are read as its text; save"
    ):
        read_stream(path)
    path.write_text('task\ttext\tlabel\na\t"one\ntwo"\tyes\n')
    assert message_of(path).endswith("line 2, got 2; .tsv is read without quotes")


def test_files_that_are_none(tmp_path: Path) -> None:
    assert message_of(tmp_path / "none.jsonl") == f"stream: expected a file, there is no {tmp_path / 'none.jsonl'}"
    for name, text, said in (
        ("cut.jsonl", '{"task"', "expected JSON in"),
        (
            "mac.jsonl",
            '{"task": "a"}\r{"task": "b"}',
            f"expected JSON in {tmp_path / 'mac.jsonl'}, line 1: a CR stands alone; end lines with",
        ),
        ("list.jsonl", "[1]", "expected an object in"),
        ("wide.csv", "task,text,label\na,b\n", "expected 3 columns in"),
        ("open.csv", 'task,text,label\na,"b', "expected CSV in"),
        ("quoted.csv", 'task;text;label\na;"b";c\n"d";"e";f\n', "expected CSV in"),
        ("semicolons.csv", "task;text;label\na;b;c\n", "expected the column 'text' in"),
        ("tabs.csv", "task\ttext\tlabel\na\tb\tc\n", "expected the column 'text' in"),
        ("commas.tsv", "task,text,label\na,b,c\n", "expected the column 'text' in"),
        ("in-texts.csv", "task;text;label\na;b, and more;c\n", "expected 1 column in"),
        ("wide.tsv", "task\ttext\tlabel\na\tb\n", "expected 3 columns in"),
        ("mine.csv.gz", "text", "cannot read "),
    ):
        (tmp_path / name).write_text(text)
        assert message_of(tmp_path / name).startswith(f"stream: {said}")
    (tmp_path / "saved").mkdir()
    for name in ("dataset_info.json", "state.json"):
        assert "save_to_disk" not in message_of(tmp_path / "saved")
        (tmp_path / "saved" / name).write_text("{}")
    assert message_of(tmp_path / "saved").endswith("write each split to a table: rows.to_parquet(…)")
    assert message_of(tmp_path / "tabs.csv").endswith(
        "; fields of .csv are separated by commas; name a file with tabs .tsv"
    )
    for name, mark in (("semicolons.csv", "semicolons"), ("commas.tsv", "commas")):
        told = f"; fields of .csv are separated by commas, of .tsv by tabs, not by {mark}"
        assert message_of(tmp_path / name).endswith(told)
    assert message_of(tmp_path / "quoted.csv").endswith(
        "fields are separated by commas, and quotes within quotes are doubled"
    )
    assert message_of(tmp_path / "in-texts.csv").endswith("not by semicolons")
    for name, text in (("one.csv", '"read, then rated"\na\n'), ("one.jsonl", '{"read; rated | told": "a"}\n')):
        (tmp_path / name).write_text(text)
        assert "separated" not in message_of(tmp_path / name)
    (tmp_path / "latin.csv").write_bytes("é".encode("latin-1"))
    assert message_of(tmp_path / "latin.csv").startswith("stream: expected UTF-8")
    assert message_of(tmp_path / "latin.csv").endswith(" at offset 0; save it as UTF-8")
    (tmp_path / "empty.jsonl").write_text("")
    assert message_of(tmp_path / "empty.jsonl").startswith("stream: expected rows in ")
    (tmp_path / "mine.txt").write_text("text")
    assert "expected a file with one of the suffixes .jsonl" in message_of(tmp_path / "mine.txt")
    assert message_of(tmp_path / "mine.txt").endswith("mine.txt")
    (tmp_path / "mine.json").write_text("[]")
    assert message_of(tmp_path / "mine.json").endswith("mine.json; write its list as .jsonl, an object on each line")
    (tmp_path / "headless.tsv").write_text("late again\tangry\n" * 9)
    told = (
        "found late again, angry; a stream has columns of the names text and label (or answer), and task if there are"
    )
    assert message_of(tmp_path / "headless.tsv").endswith(f"{told} several, which the first line says")
    for names, advice in (
        (("premise", "hypothesis"), "has them in the columns text and text_pair"),
        (("body",), "and task if there are several"),
    ):
        row = dict.fromkeys((*names, "task", "label"), "a")
        (tmp_path / "named.jsonl").write_text(f"{json.dumps(row)}\n" * 9)
        expected = f"expected the column 'text' in {tmp_path / 'named.jsonl'}, line 1, found {', '.join(row)}; a stream"
        assert expected in message_of(tmp_path / "named.jsonl")
        assert message_of(tmp_path / "named.jsonl").endswith(advice)
    (tmp_path / "other.jsonl").write_text('{"message": "late", "kind": "angry"}\n' * 9)
    assert message_of(tmp_path / "other.jsonl").endswith("(or answer), and task if there are several")
    (tmp_path / "bad.parquet").write_text("text")
    assert "expected a Parquet file" in message_of(tmp_path / "bad.parquet")
    path = write(tmp_path / "mine.jsonl", records("a"))
    assert message_of(path, folder=tmp_path).startswith(
        "data: expected no folder of published files with tasks of your own"
    )


def test_folders_that_are_none(tmp_path: Path) -> None:
    assert message_of(tmp_path).endswith(
        f"expected a folder for each task, with train and test, in {tmp_path}; there is none"
    )
    for name in ("train.csv", "test.csv", "other.csv"):
        write(tmp_path / name, records("a"))
    assert message_of(tmp_path).endswith(f"in {tmp_path}; put test.csv, train.csv into {tmp_path}/TASK")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.txt").write_text("late again")
    assert message_of(tmp_path).endswith(
        "/a, there is none; of a folder for each class, or of other files, make a table (text, label)"
    )
    write(tmp_path / "a/train.csv", records("a"))
    assert message_of(tmp_path).endswith("/a, there is none")
    assert f"expected test (.jsonl, .csv, .tsv, .parquet) in {tmp_path / 'a'}" in message_of(tmp_path)
    write(tmp_path / "a/test.csv", records("b"))
    write(tmp_path / "a/test.jsonl", records("b"))
    assert "expected one file of test in" in message_of(tmp_path)


def test_blanks_around_names_are_none_and_case_is_told(tmp_path: Path) -> None:
    rows = records("mood") + records("mood ", label=" no") + records("topic")
    rows += [row | {"text": f"again {at}"} for at, row in enumerate(records("topic"))]
    stream = read_stream(write(tmp_path / "mine.csv", rows))
    assert [task.name for task in stream.tasks] == ["mood", "topic"]
    assert stream.tasks[0].labels == ("no", "yes")
    shouted = [
        row | {"text": f"loud {at}", "label": str(row["label"]).upper()} for at, row in enumerate(records("mood"))
    ]
    with pytest.warns(UserWarning, match=r"in case alone are told apart, as NO and no; write them alike if they"):
        read_stream(write(tmp_path / "case.csv", records("mood") + shouted))
    both = records("mood") + [row | {"text": f"other {at}"} for at, row in enumerate(records("Mood"))]
    with pytest.warns(UserWarning, match=r"tasks of .* that differ in case alone are told apart, as mood and Mood"):
        read_stream(write(tmp_path / "tasks.csv", both))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_whole_numbers_written_as_floats_are_whole_numbers(tmp_path: Path, suffix: str) -> None:
    rows = [{"task": task, "text": f"{task} {at}", "label": float(at % 2)} for task in "ab" for at in range(40)]
    assert read_stream(write(tmp_path / f"a{suffix}", rows)).classes == ("a/0", "a/1", "b/0", "b/1")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_numbers_of_many_digits_are_whole_numbers(tmp_path: Path, suffix: str) -> None:
    """Keys of a database, or hashes, have 19 digits and more."""
    first = 2**63 - 2
    rows = [{"task": task, "text": f"{task} {at}", "label": first + at % 2} for task in "ab" for at in range(40)]
    classes = read_stream(write(tmp_path / f"a{suffix}", rows)).classes
    assert classes == tuple(f"{task}/{first + at}" for task in "ab" for at in range(2))


@pytest.mark.filterwarnings("ignore:stream. labels of .* are decimal numbers")
def test_names_that_look_like_numbers_are_names(tmp_path: Path) -> None:
    rows = [{"task": task, "text": f"{task} {at}", "label": f"{at % 3 / 2}"} for task in "ab" for at in range(60)]
    assert read_stream(write(tmp_path / "a.csv", rows)).classes == ("0.0", "0.5", "1.0")


def test_a_split_is_a_name(tmp_path: Path) -> None:
    assert "expected a split of train, dev" in message_of(write(tmp_path / "a.jsonl", records("a", split=["train"])))


@pytest.mark.parametrize(
    "names,shown",
    [
        (
            ("caf\u00e9", "cafe\u0301"),
            r"in Unicode form or signs that are not seen alone are told apart, as 'cafe.u0301' and 'caf.xe9'",
        ),
        (("m\u00b2", "m2"), r"in Unicode form or signs that are not seen alone are told apart, as 'm2' and 'm.xb2'"),
        (
            ("no", "no\u200b"),
            r"in Unicode form or signs that are not seen alone are told apart, as 'no' and 'no.u200b'",
        ),
    ],
)
def test_labels_that_look_the_same_are_told_of(tmp_path: Path, names: tuple[str, str], shown: str) -> None:
    rows = [
        row | {"text": f"{row['text']} {at}"} for at, name in enumerate((*names, "other")) for row in labeled(9, name)
    ]
    with pytest.warns(UserWarning, match=rf"labels of 'a' that differ {shown}"):
        assert len(read_stream(write(tmp_path / "mine.jsonl", rows)).classes) == 3


def test_labels_of_two_tasks_that_differ_in_case_are_told_of(tmp_path: Path) -> None:
    """They are two classes where the model chooses among those of all tasks."""
    rows = records("a") + [row | {"label": row["label"].upper()} for row in records("b")]
    with pytest.warns(
        UserWarning, match="labels of different tasks that differ in case alone are told apart, as no and NO"
    ):
        stream = read_stream(write(tmp_path / "mine.jsonl", rows))
    assert stream.classes == ("no", "yes", "NO", "YES")
    numbers = [row | {"label": at % 2} for task in ("A", "b") for at, row in enumerate(records(task))]
    read_stream(write(tmp_path / "numbers.jsonl", numbers))


def test_labels_alike_of_two_tasks_are_found_among_many() -> None:
    """All pairs of thousands of labels took a minute, and more than a gigabyte."""

    def task(name: str, labels: list[str]) -> RawTask:
        rows = tuple(LabeledRow.of((label,), label) for label in labels)
        return RawTask(name, tuple(labels), rows, None, rows, "here")

    many = [f"class {at}" for at in range(2000)]
    tracemalloc.start()
    try:
        warn_of_labels_alike_between([task("a", many), task("b", many)])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20e6
    with pytest.warns(UserWarning, match="labels of different tasks .* as class 7 and Class 7"):
        warn_of_labels_alike_between([task("a", many), task("b", [*many[8:], "Class 7"])])
    warn_of_labels_alike_between([task("a", ["x", "X"]), task("b", ["x", "y"])])  # of those of "a" was told


def test_whole_numbers_with_a_point_are_no_measurements(tmp_path: Path) -> None:
    """As pandas writes classes into a column with a gap; that there are too few rows is all that is wrong with them."""
    rows = [{"text": f"x {at}", "label": f"{at % 2}.0"} for at in range(4)]
    with pytest.warns(UserWarning, match="has no column 'task'"):
        said = message_of(write(tmp_path / "few.csv", rows))
    assert said.endswith("one for each split, got fewer of '0.0', '1.0'")


@pytest.mark.parametrize("answer", ["answer", "completion"])
def test_whole_prompts_are_read_as_they_are(tmp_path: Path, answer: str) -> None:
    rows = [{"task": "chat", "prompt": f"<|user|>{at}?\n<|assistant|>", answer: f"{at}!"} for at in range(20)]
    (task,) = read_stream(write(tmp_path / "chat.jsonl", rows)).tasks
    assert isinstance(task, TextTask)
    read = {pair for split in SPLITS for pair in zip(task.split(split).inputs, task.split(split).targets, strict=True)}
    assert read == {(f"<|user|>{at}?\n<|assistant|>", (f"{at}!",)) for at in range(20)}
    rows = [{"instruction": "Say it.", **row} for row in rows]
    with pytest.raises(UserError, match=r"expected one of the columns instruction and prompt in .*found both"):
        read_stream(write(tmp_path / "framed.jsonl", rows))
    rows = [{"task": "chat", "prompt": f"{at}?", "text_pair": "and", answer: f"{at}!"} for at in range(20)]
    with pytest.raises(UserError, match=r"expected one of the columns prompt and text_pair in .*found both"):
        read_stream(write(tmp_path / "pairs.jsonl", rows))
    labelled = [
        {"task": "t", "prompt": f"{at} of these", "label": "ab"[at % 2], "instruction": "Which?"} for at in range(20)
    ]
    (task,) = read_stream(write(tmp_path / "labelled.jsonl", labelled)).tasks
    assert isinstance(task, ClassificationTask)
    assert all(texts[0] == "Which?" and texts[1].endswith(" of these") for texts in task.train.texts)


def test_conversations_are_refused_with_the_column_for_them(tmp_path: Path) -> None:
    rows = [{"task": "chat", "messages": [{"role": "user", "content": "a"}]}]
    with pytest.raises(UserError, match=r"found task, messages; write conversations as text in a column 'prompt'"):
        read_stream(write(tmp_path / "talks.jsonl", rows))


@pytest.mark.parametrize("column", ["prompt", "input"])
def test_texts_in_two_columns_are_told_of(tmp_path: Path, column: str) -> None:
    rows = [{**row, column: f"Which? {row['text']}"} for row in records("t")]
    path = write(tmp_path / "two.jsonl", rows)
    with pytest.warns(UserWarning, match=f"two.jsonl: texts are read from the column 'text', not from '{column}';"):
        (task,) = read_stream(path).tasks
    assert isinstance(task, ClassificationTask)
    assert all(text.startswith("t ") for (text,) in task.train.texts)
    read_stream(write(tmp_path / "empty.jsonl", [{**row, column: ""} for row in rows]))


@pytest.mark.parametrize(
    "columns, task_type, told",
    [
        ({"label": "a", "output": "b"}, None, "labels are read from the column 'label', not from 'output'; delete"),
        ({"label": "a", "response": "b"}, "generation", "labels are read from the column 'label', not from 'response'"),
        ({"answer": "a", "output": "b"}, None, "answers are read from the column 'answer', not from 'output'; delete"),
        ({"label": "a", "output": ""}, None, None),
        ({"output": "b"}, None, None),
    ],
)
def test_answers_beside_what_is_read_are_told(
    columns: dict[str, str], task_type: Any, told: str | None, tmp_path: Path
) -> None:
    rows = [{"task": "t", "text": f"text {number}", **columns} for number in range(20)]
    if "label" in columns:
        rows[::2] = [row | {"label": "z"} for row in rows[::2]]
    path = tmp_path / "beside.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read_stream(path, task_type=task_type)
    said = [str(one.message) for one in caught if "read from the column" in str(one.message)]
    assert len(said) == (told is not None)
    assert told is None or told in said[0]


def write_classes(path: Path, numbers: list[int], names: list[str], column: str = "label") -> Path:
    """A table as `Dataset.to_parquet` of the library datasets writes it."""
    features = {"text": {"_type": "Value", "dtype": "string"}, column: {"_type": "ClassLabel", "names": names}}
    table = pyarrow.table({"text": [f"{path.stem} {at}" for at in range(len(numbers))], column: numbers})
    schema = table.schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(table.cast(schema), path)
    return path


@pytest.mark.filterwarnings("ignore:stream.*have -1 in the column")
def test_numbers_of_classes_that_have_names_are_read_as_these(tmp_path: Path) -> None:
    """Of two files each has an order of its own; -1 is no label."""
    write_classes(tmp_path / "a/train.parquet", [0, 1, 1, 0] * 3, ["good", "bad"])
    write_classes(tmp_path / "a/test.parquet", [0, 1, 1, -1], ["bad", "good"])
    task = read_stream(tmp_path, max_eval_samples=None).tasks[0]
    assert isinstance(task, ClassificationTask)
    found = {
        text: task.labels[cast(int, label)]
        for split in (task.train, task.test)
        for (text,), label in zip(split.texts, split.labels, strict=True)
    }
    trained = {text: found[text] for text in found if text.startswith("train")}
    assert trained == {text: "good" if int(text.split()[1]) % 4 in (0, 3) else "bad" for text in trained} != {}
    assert {text: found[text] for text in found if text not in trained} == {
        "test 0": "bad",
        "test 1": "good",
        "test 2": "good",
    }


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("named", ["train", "test"])
def test_numbers_beside_a_file_with_names_of_classes_have_these_names(kind: str, named: str, tmp_path: Path) -> None:
    other = "test" if named == "train" else "train"
    write_classes(tmp_path / f"a/{named}.parquet", [0, 1, 1, 0] * 3, ["good", "bad"])
    texts = [(f"{other} {number}", (1, 0, 0, 1)[number % 4]) for number in range(12)]
    line = '"{}",{}\n' if kind == "csv" else '{{"text": "{}", "label": {}}}\n'
    lines = ["text,label\n"] * (kind == "csv") + [line.format(text, label) for text, label in texts]
    (tmp_path / f"a/{other}.{kind}").write_text("".join(lines))
    task = read_stream(tmp_path, max_eval_samples=None).tasks[0]
    assert isinstance(task, ClassificationTask)
    assert task.labels == ("bad", "good")
    found = {
        text: task.labels[cast(int, label)]
        for split in (task.train, task.dev, task.test)
        for (text,), label in zip(split.texts, split.labels, strict=True)
    }
    assert len(found) == 24
    for text, label in found.items():
        is_good = int(text.split()[1]) % 4 in ((0, 3) if text.startswith(named) else (1, 2))
        assert label == ("good" if is_good else "bad")


def test_numbers_are_not_named_by_names_that_are_numbers(tmp_path: Path) -> None:
    """Nobody knows whether a 1 beside classes called 1 and 2 is the first or the second."""
    write_classes(tmp_path / "a/train.parquet", [0, 1] * 6, ["1", "2"])
    (tmp_path / "a/test.csv").write_text("text,label\nred,1\nblue,2\n")
    task = read_stream(tmp_path, max_eval_samples=None).tasks[0]
    assert isinstance(task, ClassificationTask)
    assert (task.labels, sorted(task.test.labels)) == (("a/1", "a/2"), [0, 1])


def test_numbers_beside_files_that_number_classes_in_two_orders_are_refused(tmp_path: Path) -> None:
    write_classes(tmp_path / "a/train.parquet", [0, 1] * 6, ["good", "bad"])
    write_classes(tmp_path / "a/dev.parquet", [0, 1] * 2, ["bad", "good"])
    (tmp_path / "a/test.csv").write_text("text,label\nred,1\nblue,0\n")
    with pytest.raises(UserError, match=re.escape("labels of train (bad, good) in 'a', got '0'")):
        read_stream(tmp_path, max_eval_samples=None)


def test_a_number_beyond_the_names_of_classes_is_refused(tmp_path: Path) -> None:
    path = write_classes(tmp_path / "beyond.parquet", [0, 1, 2, 1] * 5, ["good", "bad"])
    known = "expected the number of a class with a name, 0 to 1 (good, bad), in"
    for read, told in ((read_stream, f"stream: {known} {path}, row 3, got 2"), (read_task, f"task: {known} {path}")):
        with pytest.raises(UserError, match=re.escape(told)):
            read(str(path))


def test_blanks_around_the_names_of_columns_are_told(tmp_path: Path) -> None:
    path = tmp_path / "blanks.csv"
    path.write_text("task, text, label\na, hello, x\n")
    found = f"expected the column 'text' in {path}, line 2, found task,  text,  label"
    for read, option in ((read_stream, "stream"), (read_task, "task")):
        with pytest.raises(UserError) as error:
            read(str(path))
        assert str(error.value) == f"{option}: {found}; take the blanks around ' text' out of the line of names"


def test_labels_beside_answers_are_not_read(tmp_path: Path) -> None:
    """Text to text, a number without a name is nobody's label; without answers labels are written."""
    path = write_classes(tmp_path / "beyond.parquet", [0, 1, 2, 1] * 5, ["good", "bad"])
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.append_column("answer", [[f"so {at}" for at in range(20)]]), path)
    with pytest.warns(UserWarning, match="no column 'task'"):
        (task,) = read_stream(path, task_type="generation", max_eval_samples=None).tasks
    assert isinstance(task, TextTask)
    answers = [answers for part in (task.train, task.dev, task.test) for answers in part.targets]
    assert sorted(answers) == sorted((f"so {at}",) for at in range(20))
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(UserError, match="expected the number of a class with a name, 0 to 1"):
        read_stream(path, task_type="generation")


def test_a_table_of_classes_that_have_names_keeps_their_order(tmp_path: Path) -> None:
    """The second class is the one that F1 is of, whatever the names."""
    path = write_classes(tmp_path / "named.parquet", [0, 1, 1, 0, 1] * 4, ["quiet", "loud"])
    task = read_task(str(path))
    assert task.labels == ("quiet", "loud")
    assert sorted([*task.train.labels, *task.validation.labels]) == [0] * 8 + [1] * 12


def test_two_files_of_a_task_that_number_their_classes_otherwise_are_refused(tmp_path: Path) -> None:
    train = write_classes(tmp_path / "train.parquet", [0, 1] * 5, ["good", "bad"], "stars")
    same = write_classes(tmp_path / "same.parquet", [0, 1], ["good", "bad"], "stars")
    longer = write_classes(tmp_path / "longer.parquet", [0, 1], ["good", "bad", "unread"], "stars")
    for agreeing in (same, longer):
        assert len(read_task(str(train), label="stars", validation=str(agreeing)).validation.labels) == 2
    other = write_classes(tmp_path / "other.parquet", [0, 1], ["bad", "good"], "stars")
    with pytest.raises(UserError) as error:
        read_task(str(train), label="stars", validation=str(other))
    told = f"good, bad in {train} and bad, good in {other}"
    assert str(error.value) == f"task: expected classes numbered in one order, got {told}"


@pytest.mark.every_value
@pytest.mark.parametrize("written", [("good", "bad"), ("0", "1"), ("0.0", "1.0")])
@pytest.mark.parametrize("named", ["train", "test"])
def test_a_table_beside_one_with_names_of_classes_has_names_or_numbers(
    named: str, written: tuple[str, str], tmp_path: Path
) -> None:
    """`write_classes` numbers its texts, so that the class of each is known."""
    numbers = [0, 1, 1, 0, 1]
    parquet = write_classes(tmp_path / "named.parquet", numbers, ["good", "bad"])
    other = tmp_path / "other.csv"
    other.write_text("text,label\n" + "".join(f"other {at},{written[at % 2]}\n" for at in range(4)))
    train, validation = (parquet, other) if named == "train" else (other, parquet)
    task = read_task(str(train), validation=str(validation))
    assert sorted(task.labels) == ["bad", "good"]
    of_parquet, of_other = (task.train, task.validation) if named == "train" else (task.validation, task.train)
    names = [[task.labels[cast(int, label)] for label in part.labels] for part in (of_parquet, of_other)]
    assert names == [["good", "bad", "bad", "good", "bad"], ["good", "bad"] * 2]
    other.write_text("text,label\nx,great\ny,good\nz,bad\n")
    if named == "train":
        with pytest.raises(UserError, match=r"other.csv, line 2; got 'great'$"):
            read_task(str(train), validation=str(validation))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_task_has_no_class_of_two_names(tmp_path: Path) -> None:
    """Names of the file beside are of whole numbers alone, as 1 is beside 1.0; names that are numbers name none."""
    named = write_classes(tmp_path / "named.parquet", [0, 1, 0, 1], ["good", "bad"])
    train = tmp_path / "train.csv"
    for labels in (["0", "1", "1.0"], ["0", "1", "good"]):
        train.write_text("text,label\n" + "".join(f"t{at},{labels[at % 3]}\n" for at in range(9)))
        with pytest.raises(UserError, match=r"^task: expected each class written in one way, got 0, 1, "):
            read_task(str(train), validation=str(named))
    numbers = write_classes(tmp_path / "numbers.parquet", [0, 1, 0, 1], ["1", "2"])
    train.write_text("text,label\n" + "".join(f"t{at},{at % 2}\n" for at in range(6)))
    assert read_task(str(train), validation=str(numbers)).labels == ("0", "1")
