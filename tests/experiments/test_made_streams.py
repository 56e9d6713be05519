"""Tasks made of the classes of streams, and tasks held out; the sentences are invented."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.sapt.made_streams import hold_out_tasks, split_classes
from regard.data import read_stream
from regard.data.examples import Examples
from regard.data.stream import SPLITS, ClassificationTask, Stream
from regard.errors import UserError


def classes_of(name: str, labels: str, each: int, texts: int = 1) -> Stream:
    """A stream of one task with rows of a letter each for a class."""

    def rows(split: str, count: int) -> Examples:
        said = [(at, label) for label in range(len(labels)) for at in range(count)]
        return Examples(
            texts=tuple(tuple(f"{name} {split} {labels[of]} {at} {part}" for part in range(texts)) for at, of in said),
            labels=tuple(of for _, of in said),
        )

    task = ClassificationTask(
        name=name, labels=tuple(labels), train=rows("train", 2 * each), dev=rows("dev", each), test=rows("test", each)
    )
    return Stream(name=name, tasks=(task,), order=(0,), seed=0)


def rows_in(task: Any) -> list[tuple[str, ...]]:
    return [texts for split in SPLITS for texts in task.split(split).texts]


def test_each_class_once_where_there_are_enough() -> None:
    stream = split_classes([classes_of("one", "abcd", 8), classes_of("two", "vwxyz", 8, texts=2)], 4, seed=1)
    labels = [label for task in stream.tasks for label in task.labels]
    assert len(labels) == len(set(labels)) == 8
    assert all(set(task.labels) <= set("abcd") or set(task.labels) <= set("vwxyz") for task in stream.tasks)
    assert {tuple(len(task.split(split)) for split in SPLITS) for task in stream.tasks} == {(32, 16, 16)}
    assert sorted(stream.metadata["uses"]) == [f"one: {x}" for x in "abcd"] + [
        name for name in (f"two: {x}" for x in "vwxyz") if name[-1] in labels
    ]


def test_rows_are_drawn_by_their_words() -> None:
    plain = classes_of("one", "abcd", 8)
    train = plain.tasks[0].train
    signed = replace(train, texts=tuple(tuple(f"{text}!" for text in row) for row in train.texts))
    streams = (plain, replace(plain, tasks=(replace(plain.tasks[0], train=signed),)))
    found = [[task.train.texts for task in split_classes([stream], 4, classes=2, seed=3).tasks] for stream in streams]
    assert [[tuple(text.rstrip("!") for text in row) for row in rows] for rows in found[1]] == [
        list(rows) for rows in found[0]
    ]


def test_no_row_is_in_two_tasks_and_no_classes_twice() -> None:
    streams = [classes_of("one", "abcdef", 40), classes_of("two", "wxyz", 12)]
    stream = split_classes(streams, 15, seed=2)
    assert (len(stream), stream.name) == (15, "one+two-15")
    rows = Counter(texts for task in stream.tasks for texts in rows_in(task))
    assert set(rows.values()) == {1}
    assert len({frozenset(task.labels) for task in stream.tasks}) == 15
    uses = Counter(label for task in stream.tasks for label in task.labels)
    assert {f"{'one' if label in 'abcdef' else 'two'}: {label}": many for label, many in uses.items()} == (
        stream.metadata["uses"]
    )
    assert max(uses.values()) - min(uses.values()) <= 1, "classes are used as evenly as rows allow"
    for task in stream.tasks:
        assert isinstance(task, ClassificationTask)
        for split in SPLITS:
            part = task.split(split)
            assert set(part.labels) == {0, 1}
            assert min(Counter(part.labels).values()) >= 4
            for (text,), label in zip(part.texts, part.labels, strict=True):
                assert text.split()[1:3] == [split, task.labels[label]], "rows stay in their split and class"


def test_classes_with_few_rows_are_used_less() -> None:
    stream = split_classes([classes_of("one", "abcdef", 40), classes_of("two", "wx", 4)], 10, seed=2)
    uses = stream.metadata["uses"]
    assert (uses["two: w"], uses["two: x"]) == (1, 1)
    assert sum(uses.values()) == 20


def test_tasks_are_drawn_by_the_seed() -> None:
    streams = [classes_of("one", "abcdefgh", 20)]
    one, same, other = (split_classes(streams, 6, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert [task.labels for task in one.tasks] != [task.labels for task in other.tasks]
    assert {len(task.labels) for task in split_classes(streams, 4, classes=3).tasks} == {3}


def test_a_row_of_two_streams_is_in_one() -> None:
    """The second stream is the first one again: nothing of it is left."""
    first = classes_of("one", "abcd", 8)
    second = Stream(name="again", tasks=first.tasks, order=(0,), seed=0)
    stream = split_classes([first, second], 2)
    assert {name.split(":")[0] for name in stream.metadata["uses"]} == {"one"}
    with pytest.raises(UserError, match="expected classes and rows for 5 tasks, there are enough for 4"):
        split_classes([first, second], 5)


def test_too_few_classes_or_rows() -> None:
    with pytest.raises(UserError, match="tasks: expected classes and rows for 50 tasks, there are enough for 3"):
        split_classes([classes_of("one", "abc", 100)], 50)
    with pytest.raises(UserError, match="there are enough for 0"):
        split_classes([classes_of("one", "abc", 3)], 1)
    with pytest.raises(UserError, match="classes: expected a whole number of at least 2, got 1"):
        split_classes([classes_of("one", "abc", 3)], 1, classes=1)
    with pytest.raises(UserError, match="streams: expected streams of classification, at least one"):
        split_classes([], 1)


def test_many_tasks_of_the_standard_library() -> None:
    stream = split_classes([read_stream("stdlib-split")], 20, seed=508)
    assert len(stream) == 20
    assert min(len(task.train) for task in stream.tasks) >= 16
    assert len(stream.classes) == 14


# -- held out -----------------------------------------------------------------------------------------


def test_unseen_tasks() -> None:
    whole = split_classes([classes_of("one", "abcdefgh", 8)], 4).reorder([2, 0, 3, 1])
    names = [task.name for task in whole.tasks]
    stream, held_out = hold_out_tasks(whole, [names[3], names[0]])
    assert [task.name for task in stream.tasks] == names[1:3]
    assert [task.name for task in held_out] == [names[3], names[0]]
    assert stream.order == (0, 1), "of 0 and 3 the first and the second"
    assert stream.metadata["unseen"] == (names[3], names[0])
    assert set(stream.classes).isdisjoint(label for task in held_out for label in task.labels)


@pytest.mark.parametrize("which", [[], ["x"], [0, 1]])
def test_unseen_tasks_that_cannot_be(which: list[Any]) -> None:
    whole = split_classes([classes_of("one", "abcd", 8)], 2)
    names = [whole.tasks[one].name if isinstance(one, int) else one for one in which]
    with pytest.raises(UserError, match=r"unseen: expected some of the tasks 000-.*, but not all, got"):
        hold_out_tasks(whole, names)


@pytest.mark.data
def test_fifty_tasks_of_what_is_at_hand(data_folder: Path) -> None:
    stream = split_classes([read_stream("stdlib-split"), read_stream("db-split", data_folder)], 50, seed=508)
    assert (len(stream), len(stream.classes)) == (50, 28)
